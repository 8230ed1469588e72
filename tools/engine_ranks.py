"""Serves the same requests by vLLM on 1, 2, 4 and 8 tensor-parallel ranks, and compares tokens and tokens/s.

    python tools/engine_ranks.py [MODEL] [--ranks 1,2,4,8] [--kernels plugin,own] [--out summary.jsonl]

MODEL is a folder with config.json and weights; without it, a Qwen3 model with seeded weights is written to a temporary
folder. Each engine is a process of its own: fi's plugin with FI_VLLM_LAYERS=1, or vLLM's own kernels. A line of the
kind "ranks" has tokens/s, and how the tokens of the first requests differ from those of the first engine: how many
requests are the same, which share of tokens precedes the first difference, and how far their logprobs are apart. Exit
code 0: all engines have served. 1: one has not. 2: usage.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

TOKENS = 128
NORMS = {"rms_norm": ["fi"], "fused_add_rms_norm": ["fi"]}
SHAPE = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 8, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000, "max_position_embeddings": 2048,
    "initializer_range": 0.02, "tie_word_embeddings": False,
}  # fmt: skip


def write_model(folder: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, dtype=torch.bfloat16)).to(torch.bfloat16)
    model.save_pretrained(folder)


def prompts(count: int, vocab: int, seed: int) -> list[list[int]]:
    rng = Random(seed)
    return [[rng.randrange(2, vocab) for _ in range(rng.randint(128, 512))] for _ in range(count)]


def engine(model: str, ranks: int, kernels: str) -> dict[str, Any]:
    """The arguments of vLLM's LLM."""
    own = {} if kernels == "own" else {"attention_backend": "CUSTOM", "ir_op_priority": NORMS}
    return {
        "model": model,
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "seed": 0,
        "tensor_parallel_size": ranks,
        "max_model_len": 2048,
        "max_num_seqs": 64,
        "enable_prefix_caching": False,
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
        **own,
    }


def serve(model: str, ranks: int, kernels: str, count: int) -> dict[str, Any]:
    """Tokens and logprobs of the requests, and tokens/s of three other batches."""
    from vllm import LLM, SamplingParams

    llm = LLM(**engine(model, ranks, kernels))
    vocab = llm.model_config.get_vocab_size()

    def run(seed: int) -> Any:
        params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=1)
        given = [{"prompt_token_ids": prompt} for prompt in prompts(count, vocab, seed)]
        return [found.outputs[0] for found in llm.generate(given, params, use_tqdm=False)]

    first, rates = run(1), []
    for seed in (2, 3, 4):
        since = time.monotonic()
        served = sum(len(found.token_ids) for found in run(seed))
        rates.append(served / (time.monotonic() - since))
    logprobs = [[step[token].logprob for token, step in zip(x.token_ids, x.logprobs)] for x in first]
    return {"tokens": [list(x.token_ids) for x in first], "logprobs": logprobs, "tok_s": statistics.median(rates)}


def compared(got: dict[str, Any], want: dict[str, Any]) -> dict[str, Any]:
    """How the tokens of an engine differ from those of another."""
    pairs = list(zip(got["tokens"], want["tokens"], strict=True))
    equal = [next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), len(a)) for a, b in pairs]
    apart = [
        abs(x - y)
        for a, b, count in zip(got["logprobs"], want["logprobs"], equal)
        for x, y in zip(a[:count], b[:count])
    ]
    total = sum(len(a) for a, _ in pairs)
    return {
        "same_requests": sum(count == len(a) for count, (a, _) in zip(equal, pairs)),
        "of": len(pairs),
        "before_difference": round(sum(equal) / max(1, total), 4),
        "logprobs_apart": round(statistics.fmean(apart), 5) if apart else None,
    }


def started(words: list[str], kernels: str, place: Path) -> dict[str, Any]:
    """What an engine in a process of its own has served."""
    # NVLink multicast stays off, which fi does not use.
    more = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    more["FI_VLLM_LAYERS"] = str(int(kernels == "plugin"))
    line = [sys.executable, __file__, *words, "--serve", str(place)]
    subprocess.run(line, env=os.environ | more, check=True)
    found: dict[str, Any] = json.loads(place.read_text())
    return found


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--ranks", default="1,2,4,8", help="numbers of ranks (1,2,4,8)")
    parser.add_argument("--kernels", default="own,plugin", help="of plugin and own (own,plugin)")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--out", type=Path, help="jsonl to append to")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.serve:
        args.serve.write_text(json.dumps(serve(args.model, int(args.ranks), args.kernels, args.requests)))
        return 0
    failures, want = 0, None
    with tempfile.TemporaryDirectory(prefix="fi-ranks-") as folder:
        model = args.model or f"{folder}/model"
        if args.model is None:
            write_model(Path(model))
        for ranks in map(int, args.ranks.split(",")):
            for kernels in args.kernels.split(","):
                one = [model, f"--ranks={ranks}", f"--kernels={kernels}", f"--requests={args.requests}"]
                row: dict[str, Any] = {"kind": "ranks", "kernels": kernels, "ranks": ranks}
                try:
                    got = started(one, kernels, Path(folder, f"{kernels}{ranks}.json"))
                except (subprocess.CalledProcessError, OSError) as error:
                    failures += 1
                    row["error"] = str(error)
                else:
                    want = want or got
                    row |= {"tok_s": round(got["tok_s"]), **compared(got, want)}
                print(json.dumps(row), flush=True)
                if args.out:
                    with args.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
