"""Serves texts with a Llama model on fi_core, by continuous batching, and compares every token with transformers.

    python examples/generate.py [--device cpu|cuda] [--dtype float32|bfloat16|float16] [--temperature T] [--json] ...

The model is transformers' own LlamaForCausalLM with the rotary embedding of Llama 3.1, small and with random weights,
so nothing is downloaded. Its vocabulary is the 256 bytes: prompts are real text, answers are noise. Requests of
different lengths arrive at different steps and share one KV cache that is too small for all of them. The engine is in
`serving.py`. With `--tp N` 2, 4 or 8 processes, each on a GPU of its own or all on the CPU, share the weights.

For greedy requests it checks:
- The tokens equal those of transformers' generate() with eager attention, one request at a time. A request may diverge
  only at a tie that rounding decides: the logits of the two tokens differ by at most three times the error of
  transformers' own logits.
- The error of each logit is at most twice the largest error of eager attention in the same dtype on the same tokens.
  The reference is the model in float64 (its norms and softmax in float32, as transformers always computes them).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from serving import Engine, Llama, Request, Scheduler

import fi_core
from fi_core import autotune, comm
from fi_core.integrations.transformers import register

ROOT = Path(__file__).resolve().parents[1]
PAGE_SIZE = 16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="default: float32 on a CPU, else float16")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="above 0: draw tokens at random; nothing is compared"
    )
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--max-new-tokens", type=int, default=32, help="length of the longest answer")
    parser.add_argument("--token-budget", type=int, default=128, help="most tokens in a step")
    parser.add_argument("--max-running", type=int, default=6, help="most requests that run at a time")
    parser.add_argument("--pages", type=int, default=60, help=f"pages of {PAGE_SIZE} tokens in the cache")
    parser.add_argument(
        "--no-cuda-graph", action="store_true", help="on a GPU: run steps that only generate without a CUDA graph"
    )
    parser.add_argument(
        "--attn", choices=("eager", "fi"), default="eager", help="attention of transformers' generate()"
    )
    parser.add_argument(
        "--batch-invariant", action="store_true", help="logits with the same bits whatever else is served; 16 bits"
    )
    parser.add_argument("--tp", type=int, default=1, help="processes that share the model: 1, 2, 4 or 8")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if options.dtype is None:
        options.dtype = "float32" if options.device == "cpu" else "float16"
    if options.device == "cuda" and options.dtype == "float32":
        parser.error("--dtype: float16 or bfloat16 is required with --device cuda, which prefills on tensor cores")
    if options.batch_invariant and options.dtype == "float32":
        parser.error("--dtype: float16 or bfloat16 is required with --batch-invariant")
    if options.tp not in (1, 2, 4, 8):
        parser.error(f"--tp: 1, 2, 4 or 8 is required; got {options.tp}")
    if options.device == "cuda" and torch.cuda.device_count() < options.tp:
        parser.error(f"--tp: {options.tp} GPUs are required; got {torch.cuda.device_count()}")
    return options


SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "initializer_range": 0.08,  # large enough that each token depends on all tokens before it
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "bos_token_id": None,
    "eos_token_id": None,
}


def model_of(device: str, dtype: torch.dtype, ranks: int = 1) -> Any:
    """The model; it has a key head for each rank."""
    shape = SHAPE | {"num_key_value_heads": max(SHAPE["num_key_value_heads"], ranks)}
    # Kernels compile while transformers is imported and the weights are made.
    fi_core.prepare(shape | {"dtype": dtype}, device=device, page_size=PAGE_SIZE, tp=ranks, wait=False)
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**shape, attn_implementation="eager", dtype=dtype)
    # The seed of 800 whose texts stay farthest from ties: the two largest logits differ by at least 0.013. Rounding to
    # float16 changes that difference by 0.006 (standard deviation, on a CPU).
    torch.manual_seed(82)
    return LlamaForCausalLM(config).eval().to(device, dtype)


def requests_of(options: argparse.Namespace) -> list[Request]:
    """Questions, and parts of a document that take several steps. One request arrives every second step."""
    document = (ROOT / "LICENSE").read_text()
    texts = [
        "What is a paged KV cache?",
        document[1000:1700],
        "The attention of a token reads the keys and values of all tokens before it, so",
        document[:450],
        "Once upon a time there was a kernel that",
        "A scheduler has two tasks. The first is to keep the device busy; the second",
        "?",
        document[3000:3300],
    ]
    longest = options.max_new_tokens
    return [
        Request(
            list(text.encode()),
            max_new_tokens=max(1, longest - 3 * (i % 4)),
            temperature=options.temperature,
            top_p=options.top_p,
            seed=i,
            arrival=2 * i,
        )
        for i, text in enumerate(texts)
    ]


class Check(NamedTuple):
    """The comparison of greedy requests with transformers."""

    tokens: int
    equal: int  # tokens that equal those of generate()
    leave: int  # requests that diverge
    distance: float  # largest difference of the logits of the two tokens where a request diverges
    error: float  # largest error of a logit
    eager_error: float  # the same of transformers in this dtype

    @property
    def passed(self) -> bool:
        return self.error <= 2 * self.eager_error and self.distance <= 3 * self.eager_error


@torch.inference_mode()
def compare(model: Any, requests: list[Request], attn: str) -> Check:
    """Tokens and logits of the requests against transformers. Leaves the model in float64."""
    wanted, eager = [], []
    if attn == "fi":
        register()
    for r in requests:
        model.set_attn_implementation(attn)
        prompt = torch.tensor([r.prompt], device=model.device)
        ids = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=r.max_new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        wanted.append(ids[0, len(r.prompt) :].tolist())
        model.set_attn_implementation("eager")
        eager.append(forward(model, r))
    model.double()
    equal, distances, errors, eager_errors = 0, [], [], []
    for r, want, eager_logits in zip(requests, wanted, eager):
        exact = forward(model, r)
        errors.append((torch.stack(r.logits) - exact).abs().max())
        eager_errors.append((eager_logits - exact).abs().max())
        same = [ours == theirs for ours, theirs in zip(r.generated, want)]
        equal += sum(same)
        if not all(same):  # after the first difference the two continue different texts
            at = same.index(False)
            distances.append((exact[at, r.generated[at]] - exact[at, want[at]]).abs())
    tokens = sum(len(want) for want in wanted)
    distance, error, eager_error = (  # torch's maximum keeps NaN
        float(torch.stack(values).max()) if values else 0.0 for values in (distances, errors, eager_errors)
    )
    return Check(tokens, equal, len(distances), distance, error, eager_error)


def forward(model: Any, request: Request) -> torch.Tensor:
    """transformers' logits at the positions that predict each generated token."""
    ids = torch.tensor([request.tokens[:-1]], device=model.device)
    return model(ids, use_cache=False).logits[0, len(request.prompt) - 1 :]


def rates(engine: Engine) -> dict[str, Any]:
    """Tokens a second in steps with prompt tokens, and in steps that only generate."""
    mixed = [t for t in engine.times if t.prompt_tokens]
    alone = [t for t in engine.times if not t.prompt_tokens]
    total = sum(t.seconds for t in engine.times)
    return {
        "steps": len(engine.times),
        "prompt_tokens_per_s": sum(t.prompt_tokens for t in mixed) / sum(t.seconds for t in mixed),
        "generated_tokens_per_s": sum(t.generated_tokens for t in alone) / max(1e-9, sum(t.seconds for t in alone)),
        "tokens_per_s": sum(t.prompt_tokens + t.generated_tokens for t in engine.times) / total,
        "seconds": total,
        "preemptions": engine.scheduler.preemptions,
    }


def report(result: dict[str, Any], requests: list[Request]) -> None:
    for r in requests:
        prompt, answer = bytes(r.prompt[:40]).decode(errors="replace"), ", ".join(map(str, r.generated[:5]))
        print(f"step {r.arrival:2}: {len(r.prompt):3} tokens {prompt!r:46} -> {len(r.generated)} tokens {answer}, ...")
    width = max(map(len, result["kernels"]))
    print(f"\n{'kernel':{width}} from")
    for kernel, origin in result["kernels"].items():
        print(f"{kernel:{width}} {origin}")
    print(
        f"\n{result['device']}, {result['dtype']}: {result['steps']} steps in {result['seconds']:.3f} s, "
        f"{result['preemptions']} preemptions\n"
        f"steps with prompts {result['prompt_tokens_per_s']:.0f} prompt tokens/s, "
        f"steps without {result['generated_tokens_per_s']:.0f} tokens/s, in all {result['tokens_per_s']:.0f} tokens/s"
    )
    if not result["repeatable"]:
        print("WRONG: a second run gave different tokens")
    if check := result.get("check"):
        diverged = f"{check['leave']} requests diverge at a tie, logits {check['distance']:.1e} apart\n"
        diverged = diverged if check["leave"] else ""
        print(
            f"{check['equal']} of {check['tokens']} tokens equal those of transformers' generate()\n"
            f"{diverged}"
            f"largest error of a logit {check['error']:.1e}, of transformers' own {check['eager_error']:.1e}\n"
            f"{'passed' if check['passed'] else 'WRONG'}"
        )


def run(options: argparse.Namespace, rank: int = 0) -> int:
    """Serves the requests; rank 0 compares and prints. Returns the exit code."""
    reference = model_of(options.device, DTYPES[options.dtype], options.tp)
    workspace = None
    if options.tp > 1:
        workspace = comm.create_allreduce_fusion_workspace(
            max_token_num=options.token_budget,
            hidden_dim=reference.config.hidden_size,
            dtype=reference.dtype,
            device=reference.device,
        )
    model = Llama(reference, max_positions=2048, workspace=workspace)
    graph = options.device == "cuda" and not options.no_cuda_graph and not options.batch_invariant
    served: list[list[int]] = []
    seconds: list[float] = []
    for wait in (autotune(), contextlib.nullcontext()):  # the first pass ends when all kernels are compiled and loaded
        requests = requests_of(options)
        for request in requests:
            request.logits = []
        compiled = len(fi_core.ahead.compiled_files())
        start = time.perf_counter()
        with wait:
            scheduler = Scheduler(options.pages, PAGE_SIZE, options.token_budget, options.max_running)
            engine = Engine(model, scheduler, graph, options.batch_invariant)
            engine.serve(requests)
        seconds.append(time.perf_counter() - start)
        served.append([token for request in requests for token in request.generated])
    if workspace:
        workspace.destroy()
    if rank:
        return 0
    result = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "CPU",
        "dtype": options.dtype,
        "tp": options.tp,
        "token_budget": options.token_budget,
        "backends": {"prefill": engine.prefill.resolved_backend, "decode": engine.decode.resolved_backend},
        "batch_invariant": options.batch_invariant,
        **rates(engine),
        "serve_seconds": seconds,
        "compiled_while_measured": len(fi_core.ahead.compiled_files()) - compiled,
        "repeatable": served[0] == served[1],
        "kernels": fi_core.loaded_kernels(),
    }
    check = compare(reference, requests, options.attn) if options.temperature == 0 else None
    if check:
        result["check"] = check._asdict() | {"passed": check.passed}
    if options.json:
        result["requests"] = [{"prompt": r.prompt, "generated": r.generated} for r in requests]
        print(json.dumps(result))
    else:
        report(result, requests)
    return 0 if result["repeatable"] and (check is None or check.passed) else 1


def run_rank(rank: int, options: argparse.Namespace, store: str) -> None:
    """One of the processes that share the model. They exchange memory handles over gloo, then only write to memory."""
    torch.set_num_threads(max(1, torch.get_num_threads() // options.tp))
    if options.device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=options.tp)
    code = run(options, rank)
    dist.destroy_process_group()
    sys.exit(code)


def main() -> int:
    options = parse()
    if options.tp == 1:
        return run(options)
    with tempfile.TemporaryDirectory() as folder:
        try:
            processes.spawn(run_rank, (options, f"{folder}/store"), nprocs=options.tp)
        except processes.ProcessExitedException as failed:
            return failed.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
