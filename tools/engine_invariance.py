"""Serves 64 requests twice by vLLM in drawn orders and arrivals, and compares all tokens and logprobs bit for bit.

    FI_VLLM_LAYERS=1 python tools/engine_invariance.py MODEL --load-format dummy [--out summary.jsonl]

MODEL is a folder with config.json or what vLLM downloads. The engine has fi's plugin (`--attention-backend CUSTOM`, and
fi's norms), both switches of batch invariance and no CUDA graphs. Each time requests come in another order, at other
steps and with other neighbours, so that prompts are cut into other chunks; every second of them is sampled with a seed
of its own. The line that it prints, and appends to --out, is of the kind "invariance". Exit code 0: no bit differs. 1:
one does. 2: usage.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

TOKENS, LOGPROBS = 64, 5  # that a request generates; beside each token


class Request(NamedTuple):
    number: int
    prompt: list[int]


class Served(NamedTuple):
    """What a request generates: tokens, and of each step the bits of the logprobs by token."""

    tokens: list[int]
    logprobs: list[list[tuple[int, str]]]


def requests(count: int, vocab: int, lengths: tuple[int, int]) -> list[Request]:
    rng = Random(1)
    return [Request(i, [rng.randrange(2, vocab) for _ in range(rng.randint(*lengths))]) for i in range(count)]


def arrivals(found: Sequence[Request], seed: int) -> list[list[Request]]:
    """The requests that come before each step, in a drawn order; steps without any are empty."""
    rng, order, steps = Random(seed), list(found), list[list[Request]]()
    rng.shuffle(order)
    while order:
        count = rng.choice((0, 0, 1, 1, 2, 5, 16))
        steps.append(order[:count])
        del order[:count]
    return steps


def bits(x: float) -> str:
    return struct.pack(">d", x).hex()


def serve(engine: Any, params: Callable[[int], Any], steps: Sequence[Sequence[Request]], turn: int) -> list[Served]:
    """Adds the requests of each step and steps until all are served. engine: vLLM's LLMEngine."""
    done: dict[int, Served] = {}
    queue = [list(step) for step in steps]
    while queue or engine.has_unfinished_requests():
        for request in queue.pop(0) if queue else ():
            prompt = {"prompt_token_ids": request.prompt}
            engine.add_request(f"{turn}-{request.number}", prompt, params(request.number))
        if not engine.has_unfinished_requests():
            continue
        for output in engine.step():
            if output.finished:
                (one,) = output.outputs
                logprobs = [sorted((token, bits(x.logprob)) for token, x in step.items()) for step in one.logprobs]
                done[int(output.request_id.partition("-")[2])] = Served(list(one.token_ids), logprobs)
    return [done[number] for number in sorted(done)]


def differences(first: Sequence[Served], second: Sequence[Served]) -> dict[str, int]:
    """Requests, tokens and logprobs, and how many of them differ."""
    pairs = list(zip(first, second, strict=True))
    tokens = [(x, y) for a, b in pairs for x, y in zip(a.tokens, b.tokens, strict=True)]
    logprobs = [
        (x, y) for a, b in pairs for p, q in zip(a.logprobs, b.logprobs, strict=True) for x, y in zip(p, q, strict=True)
    ]
    return {
        "requests": len(pairs),
        "requests_differ": sum(a != b for a, b in pairs),
        "tokens": len(tokens),
        "tokens_differ": sum(x != y for x, y in tokens),
        "logprobs": len(logprobs),
        "logprobs_differ": sum(x != y for x, y in logprobs),
    }


def started(model: str, load_format: str) -> tuple[Any, Callable[[int], Any], int]:
    """vLLM's engine, the sampling parameters of a request by its number, and the size of the vocabulary."""
    switches = {"FI_BATCH_INVARIANT": "1", "VLLM_BATCH_INVARIANT": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    os.environ.update(switches)
    from vllm import LLM, SamplingParams

    norms = {"rms_norm": ["fi"], "fused_add_rms_norm": ["fi"]}
    llm = LLM(
        model,
        skip_tokenizer_init=True,
        load_format=load_format,
        dtype="bfloat16",
        seed=0,
        max_model_len=2048,
        max_num_seqs=64,
        max_num_batched_tokens=1024,
        attention_backend="CUSTOM",
        enforce_eager=True,
        enable_prefix_caching=True,
        max_logprobs=LOGPROBS,
        ir_op_priority=norms,
    )

    def params(number: int) -> Any:
        drawn = {"temperature": 0.8, "top_k": 20, "seed": number} if number % 2 else {"temperature": 0.0}
        return SamplingParams(**drawn, max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=LOGPROBS)

    return llm.llm_engine, params, llm.model_config.get_vocab_size()


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--load-format", default="auto", help="of vLLM's weights; dummy: drawn ones")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--out", type=Path, help="jsonl to append to, as of tools/engine_results.py")
    args = parser.parse_args(words)
    engine, params, vocab = started(args.model, args.load_format)
    found = requests(args.requests, vocab, (16, 1024))
    runs = [serve(engine, params, arrivals(found, seed), seed) for seed in (1, 2)]
    import vllm

    row = {"kind": "invariance", "tag": f"pl-{Path(args.model).name}", "vllm": vllm.__version__, **differences(*runs)}
    print(json.dumps(row))
    if args.out:
        with args.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
    return int(row["requests_differ"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
