"""Operators: functions with an op's arguments, which find a bound kernel for tensors by one dict look-up."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from fi_core.runtime.dispatch import AUTO, Choice, Request, choose
from fi_core.runtime.launch import torch_op
from fi_core.runtime.launch.dispatch_cache import program
from fi_core.runtime.launch.kernel import Kernel, Launch, begin, bind, launches, rehearse
from fi_core.runtime.resolve.checks import checks_signs
from fi_core.runtime.spec.arguments import REQUIRED
from fi_core.runtime.spec.dtype import short_name
from fi_core.runtime.spec.op import Op
from fi_core.runtime.spec.target import CPU, Target, cuda_target

Bound = tuple[Callable[..., Any], Choice]
_MOST_KEYS = 4096  # kept by an operator
OTHER_DEVICE = -1  # kOtherDevice of fi/host/op.h


class Operator:
    """The callable of an op, and the kernels that it has bound.

    A call looks for a kernel by type and facts of its arguments. The host module reads the facts, which takes a tenth
    of the time that they take in Python, and calls the kernel that it remembers for them; else they are read here. The
    kernel itself sees whether it serves the device of the arguments.
    """

    reads_device = False  # whether the device is a fact, since the kernels do not look

    def __init__(self, op: Op) -> None:
        self.op = op
        self.kernels: dict[Any, Kernel] = {}  # by choice and device
        self._bound: dict[Any, Bound] = {}  # by what the op reads of a call: the kernel of the newest device
        self._placed: dict[Any, Bound] = {}  # by that, the index of the device, and the values that were declined
        self._caches: dict[Any, Callable[..., int | None]] = {}  # by what the host module does not read
        self._choices: list[Choice] = []  # by the numbers that the caches return
        self._forced: str | None = None
        self._named = [argument.name for argument in op.parsed if argument.name == "backend"]
        self.function: Callable[..., Choice | None] = self._compile()
        if "torch" in sys.modules:  # else at the first call: declaring ops must not import torch
            self.register()

    def register(self) -> int:
        """Defines the torch operator; takes the place of `modes` until then, and returns what that returns."""
        scope = self.function.__globals__
        torch_op.register(self.op, scope["direct"])
        scope.update(torch_op.signals())
        return scope["modes"]()  # type: ignore[no-any-return]

    def _compile(self) -> Callable[..., Choice | None]:
        """A function with the op's arguments by name, so that a call costs one frame and no packing.

        torch.compile traces `traced` in its place, and torch's dispatcher ends in `direct`.
        """
        op, arguments = self.op, self.op.parsed
        names = [argument.name for argument in arguments]
        first = next(argument.name for argument in arguments if argument.kind == "Tensor")
        head = ["KIND", *([f"{first}.get_device()"] if self.reads_device else []), *self._named]
        parameters = [a.name if a.default is REQUIRED else f"{a.name}={a.default!r}" for a in arguments]
        parameters += ["*", "variant=None"] if op.takes_variant else []
        native = ", ".join(argument.name for argument in arguments if argument.native)
        given = f"({', '.join(names)},)"
        kind = f"({', '.join(head)},)" if len(head) > 1 else "KIND"
        body = [
            f"key = ({', '.join([*head, *([op.read] if op.read else [])])},)",
            f"call, choice = bound.get(key) or bind(key, {given})",
            f"if (found := call({native})) is not None:",
            f"    return call_another(key, {given}, ({native},), found)",
        ]
        special = ["if variant is not None:", f"    return decline(variant.call({native}, *variant.extras))"]
        special = special if op.takes_variant else []
        cached = [f"cache = caches.get({kind})", f"if cache and (found := cache({native})) is not None:",
                  "    return choices[found]"]  # fmt: skip
        usual = [*cached, *body, f"remember({kind}, call, choice, ({native},))"] if op.read else body
        traced = f"{given}{', variant' if op.takes_variant else ''}"
        lines = [
            f"def {op.name}({', '.join(parameters)}):",
            "    try:",
            f"        if not modes() and not (records() and ({torch_op.requires_grad(arguments)})):",
            *(f"            {line.replace('KIND', f'type({first})')}" for line in (*special, *usual, "return choice")),
            "    except Exception as error:",
            f"        torch_op.recover(op, {given}, error)",
            f"    return torch_op.dispatch(op, {traced})",
            f"def direct({', '.join(parameters)}):",
            "    try:",
            *(f"        {line.replace('KIND', 'None')}" for line in (*special, *body, "return choice")),
            "    except Exception as error:",
            f"        torch_op.explain(op, {given}, error)",
            f"def traced({', '.join(parameters)}):",
            f"    return torch_op.call({op.name!r}, {traced})",
        ]
        scope: dict[str, Any] = {
            "torch_op": torch_op, "op": op, "bound": self._bound, "bind": self._bind, "decline": self._decline,
            "call_another": self._call_another, "modes": self.register, "caches": self._caches,
            "choices": self._choices, "remember": self._remember,
        }  # fmt: skip
        exec(compile("\n".join(lines), f"<operator {op.name}>", "exec"), scope)
        scope[op.name]._torchdynamo_inline = scope["traced"]
        return scope[op.name]  # type: ignore[no-any-return]

    def bind_by(self, bind: Callable[[Operator, tuple[Any, ...], tuple[Any, ...]], Bound] | None) -> None:
        """Each call asks bind, with this operator, the facts and the arguments, what to call; None ends that."""
        scope = self.function.__globals__
        if bind is None:
            scope.update(bound=self._bound, bind=self._bind, caches=self._caches, remember=self._remember)
        else:
            by = functools.partial(bind, self)
            scope.update(bound={}, bind=by, caches={}, remember=lambda *_: None)

    def bound(self, key: tuple[Any, ...], arguments: tuple[Any, ...]) -> Bound:
        """The kernel and the choice for a call."""
        return self._bound.get(key) or self._bind(key, arguments)

    def _remember(self, kind: Any, call: Callable[..., Any], choice: Choice, native: tuple[Any, ...]) -> None:
        """Shows the cache of a kind of calls the kernel of a call, unless more than the kernel has been called."""
        kernel = self.kernels.get((choice.spec, native[0].device.index))
        if kernel is None or call is not kernel.call:
            return
        if choice not in self._choices:
            self._choices.append(choice)
        cache = self._caches.get(kind)
        if cache is None:
            cache = self._caches[kind] = kernel.module["dispatch_cache"](*program(self.op))
        cache(call, self._choices.index(choice), *native)

    def chosen(self, key: tuple[Any, ...], arguments: tuple[Any, ...], declined: tuple[int, ...] = ()) -> Choice:
        """The choice for a call."""
        torch_op.check(self.op, arguments, wrapped=key[0] is None)
        device = next(a.device for a in arguments if hasattr(a, "device"))
        backend = self._forced or (key[1] if self._named else AUTO)
        return self.choice(target_of(device), (*key[1 + len(self._named) :], *declined), backend)

    def _decline(self, found: int | None) -> None:
        """Raises if a kernel, for which there is no substitute, has declined a call."""
        if found == OTHER_DEVICE:
            raise ValueError(f"{self.op.name}: the kernel was planned for another device than that of the tensors")
        if found is not None:
            field = self.op.found_by_entry
            need = self.op.fields[field].default
            raise ValueError(f"{self.op.name}: {field} {need} is required of the tensors; got {found}")

    def _call_another(
        self, key: tuple[Any, ...], arguments: tuple[Any, ...], native: tuple[Any, ...], found: int
    ) -> Choice:
        """Calls the kernel that serves a call, which the kernel of its key has declined, and returns its choice."""
        declined: tuple[int, ...] = ()
        while True:
            if found != OTHER_DEVICE:
                if declined:
                    self._decline(found)
                declined = (found,)
            bound = self._placed.get((key, native[0].get_device(), declined))
            if bound is None:
                bound = self._bind(key, arguments, declined)
            elif not declined:
                self._bound[key] = bound
            call, choice = bound
            found = call(*native)
            if found is None:
                return choice

    def _bind(self, key: tuple[Any, ...], arguments: tuple[Any, ...], declined: tuple[int, ...] = ()) -> Bound:
        choice = self.chosen(key, arguments, declined)
        device = next(a.device for a in arguments if hasattr(a, "device"))
        if _rehearsals:
            call = _rehearsals[-1].bind(choice)
        else:
            slot = choice.spec, device.index
            kernel = self.kernels.get(slot)
            if kernel is None:
                kernel = self.kernels[slot] = bind(choice.spec, device.index or 0)
            sees = kernel.sees_views and not checks_signs()
            call = kernel.call if sees else torch_op.refusing_negated(self.op, kernel.call)
        if len(self._placed) >= _MOST_KEYS:
            self.forget()
        found = self._placed[key, -1 if device.index is None else device.index, declined] = call, choice
        if not declined:
            self._bound[key] = found
        return found

    def choice(self, target: Target, read: tuple[Any, ...], backend: str = AUTO) -> Choice:
        """The choice for a call with these facts. Raises UnsupportedError with reasons."""
        return choose(Request(self.op, target, _short(self.op.request(*read) if self.op.request else read), backend))

    def launches(self, choice: Choice) -> tuple[Launch, ...]:
        """The kernel launches of this thread's last call, if it ran this choice on CUDA."""
        kernel = next((k for (spec, _), k in self.kernels.items() if spec == choice.spec), None)
        return launches(kernel.module) if kernel and choice.request.target.kind == "cuda" else ()

    def forget(self) -> None:
        """Drops the bound calls, and the chains of all operators; kernels stay loaded."""
        self._bound.clear()
        self._placed.clear()
        self._caches.clear()
        for known in chains:
            known.clear()

    @contextlib.contextmanager
    def using(self, implementation: str) -> Iterator[None]:
        """Forces the named implementation inside the block, for tests and benchmarks (not thread safe)."""
        self.op.implementation(implementation)
        forced, bound, placed = self._forced, dict(self._bound), dict(self._placed)
        self._forced = implementation
        self.forget()
        try:
            yield
        finally:
            self._forced = forced
            self.forget()
            self._bound.update(bound)
            self._placed.update(placed)


def _short(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values of a request, with short names of dtypes."""
    return tuple(short_name(v) if type(v).__name__ == "dtype" else v for v in values)


def planned(op: Op, device: Any, backend: str, *values: Any, ahead: bool = True) -> Choice:
    """The choice for calls with these values of the op's fields, in order; dtypes of torch or short names.

    It is for a plan, which has no tensors yet. Cached: one look-up per call.

    Args:
        op, device, backend, values: the request.
        ahead: begin to compile the kernel of the choice on other threads, if that is necessary; False where the call
            follows at once.

    Raises:
        UnsupportedError: no implementation supports the values.
        ValueError: backend.
    """
    return _planned(op, target_of(device), backend, values, ahead and not _rehearsals)


@functools.lru_cache(maxsize=4096)
def _planned(op: Op, target: Target, backend: str, values: tuple[Any, ...], ahead: bool) -> Choice:
    choice = choose(Request(op, target, _short(values), backend))
    if ahead:
        begin(choice.spec)
    return choice


def composition(op: Op, device: Any, *values: Any) -> str:
    """The implementation of a composite op for these values of its fields, in order: the ops that compute a call.

    Cached: one look-up per call. Raises UnsupportedError if no implementation supports the values.
    """
    choice = _planned(op, target_of(device), AUTO, values, False)
    if _rehearsals:
        _rehearsals[-1].calls.append((choice, ()))
    return choice.implementation


class Rehearsal:
    """Calls for another machine: each choice and each launch is computed, and nothing runs.

    Tensors are on the CPU and their contents are not read. `calls` has the choice and the launches of each call, in
    order.

    Args:
        target: the rehearsed target.
        multiprocessors, shared_limit: of its device; the latter in bytes of a CTA.
    """

    def __init__(self, target: Target, multiprocessors: int, shared_limit: int) -> None:
        self.target, self.multiprocessors, self.shared_limit = target, multiprocessors, shared_limit
        self.calls: list[tuple[Choice, tuple[Launch, ...]]] = []

    def bind(self, choice: Choice) -> Callable[..., None]:
        if self.target.kind == "cpu":
            return lambda *_: self.calls.append((choice, ()))
        function, module = rehearse(choice.spec, self.multiprocessors, self.shared_limit)

        def call(*arguments: Any) -> Any:
            declined = function(*arguments)
            if declined is None:
                self.calls.append((choice, launches(module)))
            return declined

        return call

    def __enter__(self) -> Rehearsal:
        for known in _operators.values():
            known.forget()
        _rehearsals.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _rehearsals.pop()
        for known in _operators.values():
            known.forget()


_rehearsals: list[Rehearsal] = []  # the innermost counts


def is_rehearsing() -> bool:
    return bool(_rehearsals)


_operators: dict[str, Operator] = {}
chains: list[dict[Any, Any]] = []  # of all public functions: what they have recorded


def operator(op: Op) -> Callable[..., Choice | None]:
    """The function that calls an op, with its declared arguments; it returns the Choice that ran.

    While torch.compile traces it, it is the registered torch operator and returns None.
    """
    _operators[op.name] = made = Operator(op)
    return made.function


def operators() -> dict[str, Operator]:
    """The operators of the families imported so far, by op name."""
    return dict(_operators)


def target_of(device: Any) -> Target:
    """The target of a torch device, or of the current rehearsal."""
    return _rehearsals[-1].target if _rehearsals else _target_of(device)


@functools.cache
def _target_of(device: Any) -> Target:
    if device.type == "cpu":
        return CPU
    if device.type != "cuda":
        raise ValueError(f"device: a cpu or cuda device is required of tensors; got {device}")
    import torch

    return cuda_target(*torch.cuda.get_device_capability(device))


def multiprocessors_of(device: Any) -> int:
    """SMs of a CUDA device, or of the rehearsed device."""
    return _rehearsals[-1].multiprocessors if _rehearsals else _multiprocessors_of(device)


@functools.cache
def _multiprocessors_of(device: Any) -> int:
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count
