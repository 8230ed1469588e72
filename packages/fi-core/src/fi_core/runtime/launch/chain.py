"""Chains: the kernels that a public function calls for arguments of certain shapes, as one call of a host module.

The first call of a kind runs the function and records which kernels it calls on which tensors. A later one gives the
tensors of the call to the recorded chain, which compares shapes, strides, dtypes and alignments, and calls the same
kernels. What lies between the kernels has one allocation.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from fi_core.runtime.launch import torch_op
from fi_core.runtime.launch.kernel import begin
from fi_core.runtime.launch.operator import Bound, Operator, chains, is_rehearsing, operators

if TYPE_CHECKING:
    import torch

    from fi_core.runtime.spec.op import Op

F = TypeVar("F", bound=Callable[..., Any])
_CONSTANT, _ARGUMENT, _VIEW = range(3)  # enum Source of fi/host/chain.h
_ALIGNMENT = 256  # bytes of what lies in the memory between the kernels
_MOST_KEYS, _MOST_RECORDINGS = 4096, 8  # of a function; of a key, whose calls differ in strides
_CODES = {  # of DLPack
    "int": 0, "uint": 1, "float": 2, "bfloat": 4, "complex": 5, "bool": 6, "float8_e4m3fn": 10, "float8_e5m2": 12,
}  # fmt: skip
_thread = threading.local()
_lock = threading.Lock()
_hooks = 0  # entered, in all threads
_constants: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()


class Chain:
    """The recorded kernels of a call. `results` are what the recorded call returned."""

    __slots__ = ("_call", "_constants", "_empty", "_is_list", "_records", "_results", "_size")

    def __init__(
        self,
        call: Callable[..., int | None],
        size: int,
        results: Sequence[torch.Tensor],
        is_list: bool,
        constants: Sequence[torch.Tensor],
    ) -> None:
        import torch

        self._constants = tuple(constants)
        self._call, self._empty, self._records = call, torch.empty, torch.is_grad_enabled
        self._size: dict[str, Any] = {"size": (size,), "dtype": torch.uint8}
        self._results: list[dict[str, Any]] = [{"size": x.shape, "dtype": x.dtype} for x in results]
        self._is_list = is_list

    def run(self, out: torch.Tensor | None, first: torch.Tensor, *given: torch.Tensor | None) -> Any:
        """The result, in `out` if that is given; None: not all is done, so the function itself must be called."""
        try:
            if self._records() and any(x is not None and x.requires_grad for x in (out, *given)):
                return None
            device = first.device
            if out is not None:
                results = [out]
            else:
                results = [self._empty(**result, device=device) for result in self._results]
            memory = self._empty(**self._size, device=device)
            if self._call(memory, *results, *given, *self._constants) is not None:
                return None
            return results if self._is_list else results[0]
        except Exception:  # the function itself raises an error that names an argument
            return None


class _Function:
    """A function with its chains."""

    def __init__(self) -> None:
        self.known: dict[Any, Chain | None] = {}  # None: cannot be recorded
        self.recordings: dict[Any, int] = {}
        self.kinds: set[Any] = set()  # whose kernels have begun to compile
        self.modes: Callable[[], int] = self._begin
        chains.extend((self.known, self.recordings))

    def _begin(self) -> int:
        modes: Callable[[], int] = torch_op.signals()["modes"]
        self.modes = modes
        return modes()

    def record(self, key: Any, compute: Callable[[], Any], *given: torch.Tensor | None) -> Any:
        """What compute() returns; the kernels that it calls become the chain of the key."""
        import torch

        if (key in self.known and self.known[key] is None) or is_rehearsing() or self.modes():
            return compute()
        kind = key[1:], *(getattr(x, "dtype", None) for x in given)
        if kind not in self.kinds:
            with contextlib.suppress(Exception), _starter():  # the second call raises it again
                compute()
            self.kinds.add(kind)
        steps: list[_Step] = []
        with _recorder(steps):
            result = compute()
        if len(self.known) >= _MOST_KEYS:
            self.known.clear()
            self.recordings.clear()
        times = self.recordings[key] = self.recordings.get(key, 0) + 1
        chain = None
        results = result if isinstance(result, list) else [result]
        if all(isinstance(x, torch.Tensor) for x in results) and times <= _MOST_RECORDINGS:
            constants = _constants_of(steps)
            make, found = _maker(steps), _program(steps, results, (*given, *constants))
            if make and found:
                size, words = found
                chain = Chain(make(*words), size, results, isinstance(result, list), constants)
        self.known[key] = chain
        return result


def chained(out: str, by: str | None = None) -> Callable[[F], F]:
    """Decorates a function that returns its argument `out`, or a new tensor in its place, with recorded chains.

    It may return a list of tensors instead, of which `out` is the only one if that is given.

    The function may call kernels and allocate; what else it computes must depend on arguments that are no tensors and
    on shapes, strides, dtypes and alignments only. A call in which torch itself makes a tensor that a kernel reads is
    not recorded, nor one that torch traces. Before the first call of its kind the function runs without its kernels, so
    that all of them compile at once; what torch computes must bear any contents then.

    Args:
        out: the argument that receives the result.
        by: the argument by whose shape and device calls are told apart first; None: the first tensor that is required.

    One of the host modules of the kernels must export `chain` (FI_CHAIN).
    """

    def decorate(function: F) -> F:
        parameters = list(inspect.signature(function).parameters.values())
        numbers = [p.name for p in parameters if "torch.Tensor" not in str(p.annotation)]
        tensors = [_unpacked(p) for p in parameters if p.name not in (*numbers, out)]
        names = [f"{p.name}={p.name}" if p.kind is p.KEYWORD_ONLY else p.name for p in parameters]
        taken = [p.name if p.default is p.empty else f"{p.name}=None" for p in parameters]  # true defaults: below
        positional = sum(p.kind is not p.KEYWORD_ONLY for p in parameters)
        if positional < len(taken):
            taken.insert(positional, "*")
        first = by or next(p.name for p in parameters if str(p.annotation) == "torch.Tensor")
        lines = (
            f"def {function.__name__}({', '.join(taken)}):",
            "    try:",
            f"        key = {first}.shape, {first}.get_device(), {', '.join(numbers)}",
            f"        given = {', '.join(tensors)},",
            "        chain = known.get(key)",
            "    except Exception:",
            f"        return function({', '.join(names)})",
            "    if chain is not None and not own.modes():",
            f"        found = chain.run({out}, {first}, *given)",
            "        if found is not None:",
            "            return found",
            f"    return own.record(key, lambda: function({', '.join(names)}), *given)",
        )
        own = _Function()
        scope: dict[str, Any] = {"function": function, "own": own, "known": own.known}
        exec(compile("\n".join(lines), f"<chained {function.__name__}>", "exec"), scope)
        made = scope[function.__name__]
        made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
        made._torchdynamo_inline = function  # torch.compile traces the function itself
        return functools.update_wrapper(made, function)  # type: ignore[return-value]

    return decorate


def _unpacked(p: inspect.Parameter) -> str:
    """Python code for the tensors of an argument, as items of a tuple."""
    if "[torch.Tensor" not in str(p.annotation):
        return p.name
    return f"*({p.name} if isinstance({p.name}, (tuple, list)) else () if {p.name} is None else ({p.name},))"


def constant(x: torch.Tensor) -> torch.Tensor:
    """x, whose contents never change: chains keep it and need not get it."""
    _constants[id(x)] = x
    return x


def _constants_of(steps: Sequence[_Step]) -> list[torch.Tensor]:
    used = {id(x) for step in steps for x in step.arguments if x is not None and x is _constants.get(id(x))}
    return [_constants[name] for name in used]


class _Step(NamedTuple):
    """One call of a kernel."""

    op: Op
    call: Callable[..., Any]
    arguments: tuple[Any, ...]


def _maker(steps: Sequence[_Step]) -> Callable[..., Any] | None:
    """What makes chains, of one of the host modules of the kernels."""
    for step in steps:
        for kernel in operators()[step.op.name].kernels.values():
            if kernel.call is step.call:
                with contextlib.suppress(AttributeError):
                    return kernel.module["chain"]  # type: ignore[no-any-return]
    return None


class _Hook:
    """While it is entered, operators that this thread calls ask `bind` for their kernels."""

    def __init__(self, bind: Callable[[Operator, tuple[Any, ...], tuple[Any, ...]], Bound]) -> None:
        self.bind = bind

    def __enter__(self) -> None:
        global _hooks
        with _lock:
            _hooks += 1
            if _hooks == 1:
                for operator in operators().values():
                    operator.bind_by(_bind)
        _thread.bind = self.bind

    def __exit__(self, *_: object) -> None:
        global _hooks
        _thread.bind = None
        with _lock:
            _hooks -= 1
            if _hooks == 0:
                for operator in operators().values():
                    operator.bind_by(None)


def _bind(operator: Operator, key: tuple[Any, ...], arguments: tuple[Any, ...]) -> Bound:
    bind = getattr(_thread, "bind", None)
    return bind(operator, key, arguments) if bind else operator.bound(key, arguments)


def _recorder(steps: list[_Step]) -> _Hook:
    """Appends the calls of kernels to steps."""

    def bind(operator: Operator, key: tuple[Any, ...], arguments: tuple[Any, ...]) -> Bound:
        call, choice = operator.bound(key, arguments)

        def recorded(*native: Any) -> Any:
            declined = call(*native)
            if declined is None:
                steps.append(_Step(operator.op, call, native))
            return declined

        return recorded, choice

    return _Hook(bind)


def _starter() -> _Hook:
    """Begins to compile kernels, at the same time where there are several, and calls none."""

    def bind(operator: Operator, key: tuple[Any, ...], arguments: tuple[Any, ...]) -> Bound:
        choice = operator.chosen(key, arguments)
        begin(choice.spec)
        return lambda *_: None, choice

    return _Hook(bind)


def _program(
    steps: Sequence[_Step], results: Sequence[torch.Tensor], given: Sequence[torch.Tensor | None]
) -> tuple[int, list[Any]] | None:
    """The bytes between the kernels, and the words from which the host module makes a chain; None: it cannot.

    Memory between the kernels is what the first kernel with it writes. What lies inside a result or an argument of the
    function keeps its distance from that one's begin. A kernel must write each result.
    """
    import torch
    import tvm_ffi

    arguments = (*results, *given)
    places = {x.data_ptr(): i + 1 for i, x in enumerate(arguments) if x is not None and x.numel()}
    if len(places) != sum(x is not None and x.numel() > 0 for x in arguments):  # two arguments begin at one address
        return None
    foreign = {x.untyped_storage().data_ptr() for x in given if x is not None and x.numel()}
    regions: dict[int, int] = {}  # address of memory between kernels -> its place
    unwritten = set(range(1, len(results) + 1))
    size, views, calls = 0, list[list[int]](), list[Any]()
    for step in steps:
        if not isinstance(step.call, tvm_ffi.Function):
            return None
        named = [a for a in step.op.parsed if a.native]
        calls += [step.call, len(named)]
        for argument, value in zip(named, step.arguments, strict=True):
            if not isinstance(value, torch.Tensor):
                calls += [_CONSTANT, value if value is None or isinstance(value, (bool, float)) else int(value)]
                continue
            base = _base(value, arguments, places)
            if base and argument.written:
                unwritten.discard(base)
            if base and value is arguments[base - 1]:
                calls += [_ARGUMENT, base]
                continue
            if base:
                owner = arguments[base - 1]
                assert owner is not None
                offset = value.data_ptr() - owner.data_ptr()
            else:
                storage = value.untyped_storage()
                begin = storage.data_ptr()
                if begin in foreign or (begin not in regions and not argument.written):
                    return None
                if begin not in regions:
                    regions[begin] = size
                    size += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
                offset = regions[begin] + value.data_ptr() - begin
            calls += [_VIEW, len(views)]
            views.append(_view(value, base, offset, 1))
    if unwritten:
        return None
    memory = [0, 0, 64, _CODES["uint"], 8, 1, max(1, size), 1]
    described = [
        [-1] if x is None else _view(x, i + 1, 0, next(n for n in (16, 8, 4, 2, 1) if x.data_ptr() % n == 0))
        for i, x in enumerate(arguments)
    ]
    words = [len(described) + 1, *memory, *(w for view in described for w in view), len(views)]
    return max(1, size), [*words, *(w for view in views for w in view), *calls]


def _base(x: torch.Tensor, arguments: Sequence[torch.Tensor | None], places: dict[int, int]) -> int:
    """The place of the argument in which x lies: that which begins with it, or else the only one around it; 0: none."""
    address = x.data_ptr()
    if not x.numel():
        return next((i + 1 for i, other in enumerate(arguments) if other is x), 0)
    if address in places:
        return places[address]
    around = [
        place
        for begin, place in places.items()
        if begin < address and address + _extent(x) <= begin + _extent(arguments[place - 1])
    ]
    return around[0] if len(around) == 1 else 0


def _extent(x: torch.Tensor | None) -> int:
    """Bytes from the first element to behind the last."""
    assert x is not None
    return (1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride()))) * x.element_size()


def _view(x: torch.Tensor, base: int, offset: int, alignment: int) -> list[int]:
    """A tensor as the host module reads it."""
    name = str(x.dtype).removeprefix("torch.")
    kind = name if name in _CODES else name.rstrip("0123456789")
    return [base, offset, alignment, _CODES[kind], 8 * x.element_size(), x.ndim, *x.shape, *x.stride()]
