"""`fi-bench calibrate`: measures the ceilings of this machine and keeps them by device."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fi_bench.console import figure, say
from fi_bench.errors import OK, UsageError
from fi_bench.files import text_of, writable
from fi_bench.parsing import Parser, underscored

if TYPE_CHECKING:
    import torch

    from fi_bench.case import Inputs


class Ceilings(NamedTuple):
    """Measured rates: bytes/s of a copy (read + written) and of a read, FLOP/s of a 16-bit and of an fp8 matmul."""

    copy: float
    read: float
    matmul: float
    matmul_fp8: float

    @property
    def memory(self) -> float:
        """The faster of both: a kernel that mostly reads may beat a copy."""
        return max(self.copy, self.read)

    def seconds(self, flops: int, bytes: int, unit: str = "matmul") -> float:
        """The least time in which work can be done here."""
        return float(max(bytes / self.memory, flops / getattr(self, unit)))


def store() -> Path:
    from fi_core.runtime.env import env

    return env.cache_dir / "bench" / "ceilings.json"


def machine(environment: dict[str, Any], device: str) -> str:
    """The key of the ceilings: the UUID of the GPU, or model and thread count of the CPU."""
    if device == "cuda":
        return str(environment.get("gpu_uuid"))
    return f"{environment.get('cpu')} x{environment.get('threads')}"


def load(path: Path | None = None) -> dict[str, Ceilings]:
    """All kept ceilings by machine; none if nothing was calibrated."""
    file = path or store()
    try:
        kept = json.loads(text_of(file) or "{}")
        return {name: Ceilings(*(float(row[field]) for field in Ceilings._fields)) for name, row in kept.items()}
    except FileNotFoundError:
        if path is not None:
            raise UsageError(f"{path}: no such file; `fi-bench calibrate --output {path}` makes it") from None
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{file}: not a file of `fi-bench calibrate` ({error})") from None


def measure_ceilings(device_name: str, size_mb: int, matmul_size: int) -> Ceilings:
    """Copy and read of `size_mb` MiB, and a square 16-bit matmul (fp32 on a CPU), by the timers of the benchmarks."""
    import torch

    from fi_bench.case import Inputs
    from fi_bench.measure import Options, measure

    device = torch.device(device_name, torch.cuda.current_device()) if device_name == "cuda" else torch.device("cpu")
    n = size_mb << 18  # fp32 elements
    dtype = torch.bfloat16 if device_name == "cuda" else torch.float32
    source = torch.randn(n, device=device)
    square = [torch.randn(matmul_size, matmul_size, device=device).to(dtype) for _ in range(2)]

    def rate(call: Callable[[Inputs], Any], inputs: Inputs, amount: int) -> float:
        options = Options(num_iters=10, cache="warm", cupti=False, graph=False, regime="burst")  # ceilings, not means
        found = measure(call, inputs, 4 * n, device, options)
        return amount / (sorted(found.samples_ns)[len(found.samples_ns) // 2] / 1e9)

    copy = rate(lambda x: x.out.copy_(x.source), Inputs(source=source, out=torch.empty_like(source)), 8 * n)
    read = rate(_read(device), Inputs(source=source, out=torch.zeros(1, dtype=torch.int32, device=device)), 4 * n)
    matmul = rate(lambda x: x.a @ x.b, Inputs(a=square[0], b=square[1]), 2 * matmul_size**3)
    fp8 = matmul
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        a, b = (s.to(torch.float8_e4m3fn) for s in square)
        one = torch.ones((), device=device)
        product = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]

        def scaled(x: Inputs) -> Any:
            return product(x.a, x.b, x.one, x.one, out_dtype=torch.bfloat16, use_fast_accum=True)

        fp8 = rate(scaled, Inputs(a=a, b=b.t(), one=one), 2 * matmul_size**3)
    return Ceilings(copy, read, matmul, fp8)


def _read(device: torch.device) -> Callable[[Inputs], Any]:
    if device.type == "cpu":
        return lambda x: x.source.sum()
    from fi_bench.measure.device import kernels

    own = kernels(device)
    return lambda x: own.read(x.source, x.out)


def main(words: Sequence[str]) -> int:
    parser = Parser(prog="fi-bench calibrate", description="Measure copy, read and matmul ceilings of this machine.")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--size_mb", type=int, help="size of the copied buffer (GPU 2048, CPU 256)")
    parser.add_argument("--matmul_size", type=int, help="matrix dimension (GPU 8192, CPU 1024)")
    parser.add_argument("--output", type=Path, help="file to keep them in (default: in the cache folder of fi)")
    args: Namespace = parser.parse_args(underscored(words))
    import torch

    from fi_bench import environment

    has_gpu = torch.cuda.is_available()
    if args.device == "cuda" and not has_gpu:
        raise UsageError("--device cuda: torch sees no CUDA device")
    device = ("cuda" if has_gpu else "cpu") if args.device == "auto" else args.device
    size = args.size_mb or (2048 if device == "cuda" else 256)
    file = args.output or store()
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = {k: v._asdict() for k, v in load(writable(file, "--output")).items()}  # before minutes of measurement
    found = measure_ceilings(device, size, args.matmul_size or (8192 if device == "cuda" else 1024))
    name = machine(environment.collect(), device)
    file.write_text(json.dumps({**kept, name: found._asdict()}, indent=1) + "\n", encoding="utf-8")
    print(f"copy    {figure(found.copy / 1e12)} TB/s (read + written)")
    print(f"read    {figure(found.read / 1e12)} TB/s")
    print(f"matmul  {figure(found.matmul / 1e12)} TFLOP/s ({'bf16' if device == 'cuda' else 'fp32'})")
    if found.matmul_fp8 != found.matmul:
        print(f"        {figure(found.matmul_fp8 / 1e12)} TFLOP/s (fp8)")
    say("INFO", f"kept for {name} in {file}")
    return OK
