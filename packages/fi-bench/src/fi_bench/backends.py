"""Backend names: an implementation of fi-core, eager torch, or another library, which is imported on use."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from fi_bench import cases, support
from fi_bench.case import Case, Inputs, Planned
from fi_bench.catalog import family_of
from fi_bench.errors import SkipError, UsageError, did_you_mean
from fi_bench.peers import FLASHINFER, LIBRARIES, Library

# FlashInfer's names of backends. Those that a function here takes time that function (`labels`); the others time
# FlashInfer's own, which `flashinfer:cutlass` always does.
_FOREIGN = (
    "cudnn-native",
    "cutlass",
    "trtllm",
    "trtllm-gen",
    "trtllm-native",
    "trtllm-fmha-v2",
    "cute-dsl",
    "prims-ts",
    "triton",
    "fla",
    "cudsl",
    "tgv",
    "cublaslt",
    "b12x",
    "tinygemm",
    "cutile",
    "trtllm_low_latency",
    "flashinfer-decomp",
    "flashinfer-fused",
    "cutekda",
    "flash-kda",
)
_RENAMED = {"trtllm-gen-native": "trtllm-native", "prims_ts": "prims-ts", "trtllm": "trtllm-gen"}
_PUBLIC = ("fa2", "fa2_tc", "fa3")  # values of `backend=` that the wrappers of FlashInfer and of fi-core accept
_TUNED = "tuned"
_DEVICES = ("auto", _TUNED, "cpu", "cuda")
_OLDEST = 8.0  # the first compute capability that any kernel takes
_OWN = "fi:"  # before the name of an implementation of fi-core that is also the name of a library: `fi:cudnn`


@functools.cache
def ours() -> tuple[str, ...]:
    """The names that mean fi-core: devices, public backends, and the implementations of its ops."""
    found = dict.fromkeys((*_DEVICES, *_PUBLIC, *(name for case in cases.every() for name in implementations(case))))
    return tuple(_OWN + name if name in (*LIBRARIES, *_FOREIGN) else name for name in found)


def names() -> tuple[str, ...]:
    """Every name that --backends accepts."""
    return (*ours(), *LIBRARIES, *_FOREIGN)


def canonical(name: str, family: str = "attention") -> tuple[str, str | None]:
    """The current name, and a warning if an old one was typed; `trtllm` is old for attention only."""
    if name in _RENAMED and (name != "trtllm" or family == "attention"):
        return _RENAMED[name], f"Backend name '{name}' has been renamed to '{_RENAMED[name]}'."
    quick = name in (*_DEVICES, *_PUBLIC, *LIBRARIES, *_FOREIGN) or name.startswith("flashinfer:")
    if not quick and name not in ours():
        known = ", ".join((*ours(), *LIBRARIES))
        raise UsageError(f"unknown backend {name!r}{did_you_mean(name, names()) or f'; known are {known}'}")
    return name, None


def is_ours(name: str, case: Case) -> bool:
    if name == "fa3" and "flash_attention3" in case.peers:  # a backend of fi-core's wrappers, else FlashAttention-3
        return case.plan is not None and exists(case)
    return name in ours()


@dataclass(frozen=True)
class Runner:
    """A backend bound to a case.

    `prepare(inputs)` does the untimed work and returns the call; `call(inputs)` is timed; `outputs(inputs, returned)`
    names the results.
    """

    name: str
    library: str
    resolved: str  # "": what the first call chooses, see `noted`
    prepare: Callable[[Inputs], Callable[[Inputs], Any]]
    outputs: Callable[[Inputs, Any], Any]
    context: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext


def bind(name: str, case: Case, device: str) -> Runner:
    """The runner of a backend. SkipError gives the reason if it cannot run here."""
    if is_ours(name, case):
        return _ours(name, case, device)
    if name in labels(case):
        return _labelled(name, case, device)
    if name == "fa3":
        name = "flash_attention3"
    base, _, own = name.partition(":")
    if base in _FOREIGN:
        return _flashinfer(name, base, case, device)
    library = LIBRARIES[base]
    if library is FLASHINFER:
        return _flashinfer(name, own, case, device)
    run = case.torch if name == "torch" else case.peers.get(name)
    if run is None and name in support.FLASHINFER.get(case.routine, ()):
        return _flashinfer(name, name, case, device)  # FlashInfer's benchmark means its own use of cuBLAS and cuDNN
    if run is None:
        raise SkipError(f"{name} has no {case.routine}")
    module = library.module()
    if library.majors is not None:
        _check_major(name, library, device)
    if module is None:
        raise SkipError(f"{library.modules[0]} is not installed: {library.install}")
    return Runner(name, module.partition(".")[0], name, _prepared(run), case.torch_outputs or case.outputs)


def _prepared(run: Callable[[Inputs], Any] | Planned) -> Callable[[Inputs], Callable[[Inputs], Any]]:
    if isinstance(run, Planned):
        return lambda x: functools.partial(run.call, run.plan(x))
    return lambda x: run


def _of_function(case: Case, function: Callable[..., Any], backend: str) -> Callable[[Inputs], Callable[[Inputs], Any]]:
    """`case.call` on the function, or on the wrapper that `case.plan` plans."""
    if case.plan is None:
        return lambda x: functools.partial(case.call, function)
    plan = case.plan
    return lambda x: functools.partial(case.call, plan(function, x, backend))


def _needs_gpu(name: str, capabilities: str, package: str = "") -> SkipError:
    """The reason on a CPU: a GPU, which one, and then the package."""
    also = f" and {package}" if package else ""
    return SkipError(
        f"backend {name!r} does not run on --device cpu: it needs a GPU of compute capability {capabilities}{also}; "
        "--backends cpu runs the same case"
    )


def _check_major(name: str, library: Library, device: str) -> None:
    majors = ", ".join(f"{m}.x" for m in library.majors or ())
    if device == "cpu":
        missing = "" if library.module() else f"{library.modules[0]} ({library.install})"
        raise _needs_gpu(name, majors, missing)
    import torch

    if torch.cuda.get_device_capability()[0] not in (library.majors or ()):
        raise SkipError(f"{name} has kernels for compute capability {majors}")


def _flashinfer(name: str, own: str, case: Case, device: str) -> Runner:
    """FlashInfer has our signatures; `own` is its own backend name, empty for its default."""
    _check_major(name, FLASHINFER, device)
    if FLASHINFER.module() is None:
        whose = "" if name.startswith("flashinfer") else f"{own} is a backend of FlashInfer; "
        raise SkipError(f"{whose}flashinfer is not installed: {FLASHINFER.install}")
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


# --- implementations of fi-core: only the code below this line uses the internals of fi_core ---


def exists(case: Case) -> bool:
    """Whether fi-core has the function of this case (imports no torch)."""
    return _function(case, "fi_core") is not None


def _implementations(case: Case) -> tuple[Any, ...]:
    from fi_core.runtime.launch.operator import operators

    exists(case)  # imports the family, which declares its ops
    found = operators().get(case.op)
    return tuple(found.op.implementations) if found else ()


def implementations(case: Case) -> tuple[str, ...]:
    """Names of the implementations of the op behind a case (imports no torch); empty if it has no kernel of its own."""
    return tuple(impl.name for impl in _implementations(case))


def labels(case: Case) -> tuple[str, ...]:
    """FlashInfer's names of backends that this library's function or wrapper takes, beside those of other libraries.

    A GEMM lists its own; all of them select the same kernels. Its "trtllm" takes weights in another order.
    """
    takes = getattr(_function(case, "fi_core"), "has_backend", None)
    own = [name for name in ("cudnn", *_FOREIGN) if name != "trtllm" and takes and takes(name)]
    return tuple(name for name in (*case.labels, *own) if name not in case.peers)


def _capabilities_from(case: Case) -> str:
    """The compute capabilities of a case's kernels in words."""
    places = [float(place) for found in capabilities(case).values() for place in found if place != "CPU"]
    return f"{min((place for place in places if place >= _OLDEST), default=_OLDEST)} and later"


def _labelled(name: str, case: Case, device: str) -> Runner:
    """This library's function or wrapper, asked for by FlashInfer's name of a backend."""
    if device == "cpu":
        raise _needs_gpu(name, _capabilities_from(case))
    function = _function(case, "fi_core")
    assert function is not None, f"fi_core.{case.function} has labels"
    resolved = name if name in implementations(case) else ""
    return Runner(name, "fi_core", resolved, _of_function(case, function, name), case.outputs)


def capabilities(case: Case) -> dict[str, tuple[str, ...]]:
    """Where each implementation of a case runs, as its constraints say: "CPU" and compute capabilities."""
    return {impl.name: _places(impl) for impl in _implementations(case)}


def _places(impl: Any) -> tuple[str, ...]:
    places = [("CPU", {"device": "cpu", "capability": 0})]
    places += [(c, {"device": "cuda", "capability": int(c.replace(".", ""))}) for c in support.CAPABILITIES]

    def runs(values: dict[str, object]) -> bool:
        return all(rule.holds(values) for rule in impl.constraints if getattr(rule, "name", "") in values)

    return tuple(place for place, values in places if runs(values))


def _public(case: Case) -> list[str]:
    """Values of `backend=` that the wrapper of a case accepts."""
    impls = _implementations(case) if case.plan is not None else ()
    return [name for name in _PUBLIC if any(name in impl.backends for impl in impls)]


def usual(routine: str) -> list[str]:
    """The backends that are timed on a GPU by default: FlashInfer's, or `auto` where they are not fi-core's."""
    theirs = list(family_of(routine).default_backends)
    found = cases.find(routine)
    own = implementations(found) if found and exists(found) else ()
    return ["auto"] if own and not set(theirs) & set(own) else theirs


def offered(case: Case) -> dict[str, tuple[str, ...]]:
    """Every name that --backends takes for a case of fi-core, but FlashInfer's own, and where it runs."""
    if not exists(case):
        return {}
    impls = _implementations(case)
    every = ("CPU", *support.CAPABILITIES)
    found = {"auto": {place for impl in impls if not impl.by_name for place in _places(impl)} if impls else set(every)}
    for public in _public(case):
        found[public] = {place for impl in impls if public in impl.backends for place in _places(impl)} - {"CPU"}
    kernels = found["auto"] - {"CPU"}
    found |= dict.fromkeys(labels(case), kernels)
    for name, places in capabilities(case).items():
        known = {place for place in places if place == "CPU" or float(place) >= _OLDEST}
        found[_OWN + name if name in (*LIBRARIES, *_FOREIGN) else name] = known
    for name in (*(("torch",) if case.torch else ()), *case.peers):
        found[name] = set(LIBRARIES[name].places(every))
    return {name: tuple(place for place in every if place in on) for name, on in found.items() if on}


def _ours(name: str, case: Case, device: str) -> Runner:
    function = _function(case, "fi_core")
    if function is None:
        raise SkipError(f"fi_core.{case.function} does not exist yet")
    impls = implementations(case)
    if name == _TUNED:
        return _tuned(case, function, device)
    if name.startswith(_OWN):
        own = name.removeprefix(_OWN)
        if own not in impls or case.plan is None:
            raise SkipError(f"fi-core's {case.routine} has no backend {own!r}")
        if device == "cpu":
            raise _needs_gpu(name, _capabilities_from(case))
        return Runner(name, "fi_core", own, _of_function(case, function, own), case.outputs)
    if name == "auto" or not impls:
        if name not in ("auto", device):
            raise SkipError(f"{case.routine} is plain torch on every device: use --backends auto")
        return Runner(name, "fi_core", "" if impls else "torch", _of_function(case, function, name), case.outputs)
    if name in _public(case):
        if device == "cpu":
            raise _needs_gpu(name, _capabilities_from(case) if name != "fa3" else "9.0")
        return Runner(name, "fi_core", "", _of_function(case, function, name), case.outputs)
    if name not in impls:
        raise SkipError(f"fi-core's {case.op} has no implementation {name!r}; it has {', '.join(impls)}")
    if device == "cpu" and name != "cpu":
        raise _needs_gpu(name, ", ".join(capabilities(case)[name]))
    if (name == "cpu") != (device == "cpu"):
        raise SkipError(f"implementation {name!r} does not run on --device {device}")

    @contextlib.contextmanager
    def using() -> Iterator[None]:
        from fi_core.runtime.launch.operator import operators

        with forcing(operators()[case.op], name):
            yield

    asked = name if name in (*_DEVICES, *_PUBLIC) else "auto"  # a wrapper accepts no name of an implementation
    return Runner(name, "fi_core", name, _of_function(case, function, asked), case.outputs, using)


def _tuned(case: Case, function: Callable[..., Any], device: str) -> Runner:
    """The fastest of all tactics of all implementations; each is timed briefly before the case is."""
    from fi_bench.tuned import Tuned
    from fi_core.runtime.launch.operator import operators

    impls = [name for name in implementations(case) if (name == "cpu") == (device == "cpu")]
    found = operators().get(case.op)
    tuned = Tuned(found, function) if found and any(a.name == "tactic" for a in found.op.parsed) else None
    if tuned is None or tuned.name is None:
        raise SkipError(f"{case.routine} has no tactics: use --backends auto")

    def prepare(x: Inputs) -> Callable[[Inputs], Any]:
        from fi_core.testing import bench_gpu_time

        call = functools.partial(case.call, function)
        timed = functools.partial(bench_gpu_time, call, 2, 5, input_args=(x,), use_cuda_graph=True)
        tuned.use(tuned.fastest(impls, lambda: timed(num_iters_within_graph=5)[0]))
        return call

    return Runner(_TUNED, "fi_core", "", prepare, case.outputs, tuned.in_place)


@contextlib.contextmanager
def forcing(operator: Any, implementation: str) -> Iterator[None]:
    """All calls of an operator inside the block run the named implementation (not thread safe)."""
    operator.op.implementation(implementation)  # raises ValueError if there is none of this name
    before = operator.forced
    try:
        operator.forced = implementation
        operator.forget()
        yield
    finally:
        operator.forced = before
        operator.forget()


class _Noted(list[Any]):
    """The choices of an operator by number, which keeps those that its calls look up."""

    def __init__(self, operator: Any) -> None:
        super().__init__(operator.choices)
        self.operator, self.kept, self.seen = operator, operator.choices, list[Any]()

    def __getitem__(self, number: Any) -> Any:
        self.seen.append(super().__getitem__(number))
        return self.seen[-1]

    def __enter__(self) -> list[Any]:
        self.operator.choices = self
        return self.seen

    def __exit__(self, *_: object) -> None:
        self.kept[:] = self
        self.operator.choices = self.kept


def noted(case: Case, call: Callable[[], Any]) -> tuple[Any, str]:
    """What a call returns, and the implementation of the case's op, or else of another op of it, that ran; "" if none
    was chosen: plain torch, or a call whose launches are recorded.
    """
    from fi_core.runtime.launch.operator import operators

    exists(case)  # imports the family, which declares its ops
    found = [operators()[name] for name in (case.op, *case.also) if name in operators()]
    with contextlib.ExitStack() as stack:
        choices = [stack.enter_context(_Noted(known)) for known in found]
        returned = call()
    return returned, next((str(calls[-1].implementation) for calls in choices if calls), "")
