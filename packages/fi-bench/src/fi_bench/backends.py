"""What a backend name means: one of our implementations, eager torch, or another library, imported on use."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fi_bench import support
from fi_bench.baselines import FLASHINFER, LIBRARIES
from fi_bench.case import Case, Inputs, Planned
from fi_bench.errors import SkipError, UsageError, did_you_mean

if TYPE_CHECKING:
    from fi_core.spec.op import Impl

# Backends of FlashInfer that the seeds name without saying so: `cutlass` is `flashinfer:cutlass`.
_FOREIGN = (
    "cudnn-native", "cutlass", "trtllm", "trtllm-gen", "trtllm-native", "trtllm-fmha-v2", "cute-dsl", "prims-ts",
    "triton", "fla", "cudsl", "tgv", "cublaslt", "b12x", "tinygemm", "cutile", "trtllm_low_latency",
    "flashinfer-decomp", "flashinfer-fused", "cutekda", "flash-kda",
)  # fmt: skip
_RENAMED = {"trtllm-gen-native": "trtllm-native", "prims_ts": "prims-ts", "trtllm": "trtllm-gen"}
_OURS = ("auto", "cpu", "cuda", "sm80", "sm90", "sm100", "fa2", "fa2_tc", "fa3")


NAMES = (*_OURS, *LIBRARIES, *_FOREIGN)


def canonical(name: str, family: str = "attention") -> tuple[str, str | None]:
    """The name in use today, and a warning if another was typed; `trtllm` is old for attention only."""
    if name in _RENAMED and (name != "trtllm" or family == "attention"):
        return _RENAMED[name], f"Backend name '{name}' has been renamed to '{_RENAMED[name]}'."
    if name not in NAMES and not name.startswith("flashinfer:"):
        known = ", ".join((*_OURS, *LIBRARIES))
        raise UsageError(f"unknown backend {name!r}{did_you_mean(name, NAMES) or f'; known are {known}'}")
    return name, None


def is_ours(name: str, case: Case) -> bool:
    return name in _OURS and not (name == "fa3" and "flash_attention3" in case.rivals and not _has(case, "fa3"))


@dataclass(frozen=True)
class Runner:
    """A backend bound to a case.

    `prepare(inputs)` does what is not timed and gives the call; `call(inputs)` is the timed part; `outputs(inputs,
    returned)` finds the results.
    """

    name: str
    library: str
    resolved: str
    prepare: Callable[[Inputs], Callable[[Inputs], Any]]
    outputs: Callable[[Inputs, Any], Any]
    context: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext


def bind(name: str, case: Case, device: str) -> Runner:
    """The runner of a backend; SkipError says why there is none here."""
    if is_ours(name, case):
        return _ours(name, case, device)
    if name == "fa3":
        name = "flash_attention3"
    base, _, own = name.partition(":")
    if base in _FOREIGN:
        return _flashinfer(name, base, case, device)
    library = LIBRARIES[base]
    if library is FLASHINFER:
        return _flashinfer(name, own, case, device)
    run = case.torch if name == "torch" else case.rivals.get(name)
    if run is None and name in support.FLASHINFER.get(case.routine, ()):
        return _flashinfer(name, name, case, device)  # the seeds mean FlashInfer's use of cuBLAS and cuDNN
    if run is None:
        raise SkipError(f"{name} has no {case.routine}")
    module = library.module()
    if module is None:
        raise SkipError(f"{library.modules[0]} is not installed: {library.install}")
    if library.majors is not None:
        _check_major(name, library.majors, device)
    return Runner(name, module.partition(".")[0], name, _prepared(run), case.torch_outputs or case.outputs)


def _prepared(run: Callable[[Inputs], Any] | Planned) -> Callable[[Inputs], Callable[[Inputs], Any]]:
    if isinstance(run, Planned):
        return lambda x: functools.partial(run.call, run.plan(x))
    return lambda x: run


def _of_function(case: Case, function: Callable[..., Any], backend: str) -> Callable[[Inputs], Callable[[Inputs], Any]]:
    """`case.call` on the function, or on what `case.plan` makes of it."""
    if case.plan is None:
        return lambda x: functools.partial(case.call, function)
    plan = case.plan
    return lambda x: functools.partial(case.call, plan(function, x, backend))


def _check_major(name: str, majors: tuple[int, ...], device: str) -> None:
    if device == "cpu":
        raise SkipError(f"{name} has kernels for GPUs only")
    import torch

    if torch.cuda.get_device_capability()[0] not in majors:
        raise SkipError(f"{name} has kernels for compute capability {', '.join(f'{m}.x' for m in majors)}")


def _flashinfer(name: str, own: str, case: Case, device: str) -> Runner:
    """FlashInfer has our signatures; `own` is its own backend name, empty for its default."""
    if FLASHINFER.module() is None:
        whose = "" if name.startswith("flashinfer") else f"{own} is a backend of FlashInfer; "
        raise SkipError(f"{whose}flashinfer is not installed: {FLASHINFER.install}")
    _check_major(name, FLASHINFER.majors or (), device)
    import torch

    why = support.refusal(case.routine, own, "{}.{}".format(*torch.cuda.get_device_capability())) if own else None
    if why:
        raise SkipError(why)
    function = _function(case, "flashinfer")
    if function is None:
        raise SkipError(f"this version of flashinfer has no {case.function}")
    if case.plan is None and own:
        if "backend" not in inspect.signature(function).parameters:
            raise SkipError(f"flashinfer.{case.function} has one backend: use --backends flashinfer")
        function = _with_keyword(function, backend=own)
    return Runner(name, "flashinfer", name, _of_function(case, function, own or "auto"), case.outputs)


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


def capabilities(case: Case) -> dict[str, tuple[str, ...]]:
    """Where each implementation of a case runs, as its constraints say: "CPU" and compute capabilities."""
    from fi_core.launch.op import launchers

    implementations(case)  # declares the op
    found = launchers().get(case.op)
    places = [("CPU", {"device": "cpu", "capability": 0})]
    places += [(c, {"device": "cuda", "capability": int(c.replace(".", ""))}) for c in support.CAPABILITIES]

    def runs(impl: Impl, values: dict[str, object]) -> bool:
        return all(rule.holds(values) for rule in impl.constraints if rule.name in values)

    impls = found.op.impls if found else ()
    return {impl.name: tuple(place for place, values in places if runs(impl, values)) for impl in impls}


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
        return Runner(name, "fi_core", _first(case, device), _of_function(case, function, name), case.outputs)
    if name not in impls:
        raise SkipError(f"fi-core's {case.op} has no implementation {name!r}; it has {', '.join(impls)}")
    if (name == "cpu") != (device == "cpu"):
        raise SkipError(f"implementation {name!r} does not run on --device {device}")

    @contextlib.contextmanager
    def using() -> Iterator[None]:
        from fi_core.launch.op import launchers

        with launchers()[case.op].using(name):
            yield

    return Runner(name, "fi_core", name, _of_function(case, function, name), case.outputs, using)


def _first(case: Case, device: str) -> str:
    """Which implementation fi-core prefers on this device, for the `auto` rows."""
    on_cpu = device == "cpu"
    return next((name for name in implementations(case) if (name == "cpu") == on_cpu), "torch")
