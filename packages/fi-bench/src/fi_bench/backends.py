"""What a backend name means: one of our implementations, eager torch, or a rival library imported on use."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from fi_bench.case import Case, Inputs
from fi_bench.errors import SkipError, UsageError, did_you_mean

# Names of FlashInfer's and cuDNN's kernels that the seeds allow; fi-core has no implementation of that name.
_FOREIGN = (
    "cudnn-native", "cutlass", "trtllm", "trtllm-gen", "trtllm-native", "trtllm-fmha-v2", "cute-dsl", "prims-ts",
    "triton", "fla", "cudsl", "tgv", "cublaslt", "b12x", "tinygemm", "cutile", "trtllm_low_latency",
    "flashinfer-decomp", "flashinfer-fused", "cutekda", "flash-kda",
)  # fmt: skip
_RENAMED = {"trtllm-gen-native": "trtllm-native", "prims_ts": "prims-ts", "trtllm": "trtllm-gen"}
_OURS = ("auto", "cpu", "cuda", "sm80", "sm90", "sm100", "fa2", "fa2_tc", "fa3")


@dataclass(frozen=True)
class Rival:
    """A library to compare with: the module that shows whether it is there, the command that installs it, and the
    compute capabilities (major) that it has kernels for; None is any of them and the CPU.
    """

    module: str
    install: str
    majors: tuple[int, ...] | None = None


RIVALS = {
    "torch": Rival("torch", "pip install torch"),
    "torch_math": Rival("torch", "pip install torch"),
    "torch_flash": Rival("torch", "pip install torch"),
    "torch_efficient": Rival("torch", "pip install torch", (8, 9, 10, 11, 12)),
    "cublas": Rival("torch", "pip install torch", (8, 9, 10, 11, 12)),
    "cudnn": Rival("torch", "pip install torch", (8, 9, 10, 11, 12)),
    "flashinfer": Rival("flashinfer", "pip install flashinfer-python", (8, 9, 10, 11, 12)),
    "flash_attention3": Rival(
        "flash_attn_interface",
        'pip install "git+https://github.com/Dao-AILab/flash-attention.git#subdirectory=hopper"',
        (9,),
    ),
    "flashmla": Rival("flash_mla", "pip install git+https://github.com/deepseek-ai/FlashMLA.git", (9, 10)),
    "deepgemm": Rival("deep_gemm", "pip install git+https://github.com/deepseek-ai/DeepGEMM.git", (9, 10)),
}
NAMES = (*_OURS, *RIVALS, *_FOREIGN)


def canonical(name: str) -> tuple[str, str | None]:
    """The name in use today, and a warning if another was typed."""
    if name in _RENAMED:
        return _RENAMED[name], f"Backend name '{name}' has been renamed to '{_RENAMED[name]}'."
    if name not in NAMES and not name.startswith("flashinfer:"):
        known = ", ".join((*_OURS, *RIVALS))
        raise UsageError(f"unknown backend {name!r}{did_you_mean(name, NAMES) or f'; known are {known}'}")
    return name, None


def is_ours(name: str, case: Case) -> bool:
    return name in _OURS and not (name == "fa3" and "flash_attention3" in case.rivals and not _has(case, "fa3"))


@dataclass(frozen=True)
class Runner:
    """A backend bound to a case: `run(inputs)` does the call, `outputs(inputs, returned)` finds the results."""

    name: str
    library: str
    resolved: str
    run: Callable[[Inputs], Any]
    outputs: Callable[[Inputs, Any], Any]
    context: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext


def bind(name: str, case: Case, device: str) -> Runner:
    """The runner of a backend; SkipError says why there is none here."""
    if is_ours(name, case):
        return _ours(name, case, device)
    if name == "fa3":
        name = "flash_attention3"
    rival = RIVALS.get(name.partition(":")[0])
    if rival is None:
        raise SkipError(f"{name} is a backend of other libraries; fi-core has no implementation of that name")
    if importlib.util.find_spec(rival.module) is None:
        raise SkipError(f"{rival.module} is not installed: {rival.install}")
    if rival.majors is not None:
        _check_major(name, rival.majors, device)
    if name.startswith("flashinfer"):
        return _flashinfer(name, case)
    run = case.torch if name == "torch" else case.rivals.get(name)
    if run is None:
        raise SkipError(f"{name} has no {case.routine}")
    return Runner(name, rival.module, name, run, case.torch_outputs or case.outputs)


def _check_major(name: str, majors: tuple[int, ...], device: str) -> None:
    if device == "cpu":
        raise SkipError(f"{name} has kernels for GPUs only")
    import torch

    if torch.cuda.get_device_capability()[0] not in majors:
        raise SkipError(f"{name} has kernels for compute capability {', '.join(f'{m}.x' for m in majors)}")


def _flashinfer(name: str, case: Case) -> Runner:
    """FlashInfer has our signatures; `flashinfer:fa2` passes its own backend name."""
    function = _function(case, "flashinfer")
    if function is None:
        raise SkipError(f"this version of flashinfer has no {case.function}")
    own = name.partition(":")[2]
    call = _with_keyword(function, backend=own) if own else function
    return Runner(name, "flashinfer", name, lambda x: case.call(call, x), case.outputs)


def _with_keyword(function: Callable[..., Any], **more: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(*args, **kwargs, **more)


def _function(case: Case, package: str) -> Callable[..., Any] | None:
    """`package.<case.function>`, or None if the package does not have it (yet)."""
    module, _, attribute = case.function.rpartition(".")
    try:
        found: Callable[..., Any] = operator.attrgetter(attribute)(importlib.import_module(f"{package}.{module}"))
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(package):
            raise
        return None
    except AttributeError:
        return None
    return found


# --- our own implementations: all that fi-bench knows of fi_core's inside is below this line ---


def exists(case: Case) -> bool:
    """Whether fi-core has the function of this case (imports no torch)."""
    return _function(case, "fi_core") is not None


def implementations(case: Case) -> tuple[str, ...]:
    """Names of the implementations of the op behind a case (imports no torch); empty if it has no kernel of its own."""
    from fi_core.launch.op import launchers

    exists(case)  # imports the family, which declares its ops
    found = launchers().get(case.op)
    return tuple(impl.name for impl in found.op.impls) if found else ()


def _has(case: Case, impl: str) -> bool:
    return impl in implementations(case)


def _ours(name: str, case: Case, device: str) -> Runner:
    function = _function(case, "fi_core")
    if function is None:
        raise SkipError(f"fi_core.{case.function} does not exist yet")
    impls = implementations(case)
    if name == "auto" or not impls:
        if name not in ("auto", device):
            raise SkipError(f"{case.routine} is plain torch on every device: use --backends auto")
        return Runner(name, "fi_core", _first(case, device), lambda x: case.call(function, x), case.outputs)
    if name not in impls:
        raise SkipError(f"fi-core's {case.op} has no implementation {name!r}; it has {', '.join(impls)}")
    if (name == "cpu") != (device == "cpu"):
        raise SkipError(f"implementation {name!r} does not run on --device {device}")

    @contextlib.contextmanager
    def using() -> Iterator[None]:
        from fi_core.launch.op import launchers

        with launchers()[case.op].using(name):
            yield

    return Runner(name, "fi_core", name, lambda x: case.call(function, x), case.outputs, using)


def _first(case: Case, device: str) -> str:
    """Which implementation fi-core prefers on this device, for the `auto` rows."""
    on_cpu = device == "cpu"
    return next((name for name in implementations(case) if (name == "cpu") == on_cpu), "torch")
