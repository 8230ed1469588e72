"""Operators: functions with an op's arguments. A call is one call of the op's host module, which knows its kernels.

found = call(values...)                the number of the choice that ran, or the request that no kernel is known for
choose(request) -> bind -> learn       once for each request; then the call is made again
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from fi_core.runtime.dispatch import AUTO, Choice, Request, choose
from fi_core.runtime.invariance import is_on
from fi_core.runtime.launch import torch_op
from fi_core.runtime.launch.kernel import Kernel, Launch, begin, bind, host_module, rehearse, rehearsed_module
from fi_core.runtime.launch.reach import begin_reached
from fi_core.runtime.resolve.checks import checks_signs
from fi_core.runtime.signature import define
from fi_core.runtime.spec.arguments import REQUIRED, Argument
from fi_core.runtime.spec.dtype import short_name
from fi_core.runtime.spec.op import Op, Spec
from fi_core.runtime.spec.target import CPU, Target, cuda_target

_MOST_REQUESTS = 4096  # that a host module keeps
_CUDA = 2  # kDLCUDA


class PlannedCall(NamedTuple):
    """The call of an op with a plan, whose tensors C++ reads: see `Operator.plan`. learn: teaches it a kernel."""

    plan: Any
    check: Callable[..., None]
    call: Callable[..., Any]
    learn: Callable[..., Any]


class Operator:
    """The callable of an op, and the kernels that it has bound.

    `function` takes all arguments, `planned_function` a PlannedCall and the rest of them. Both return the
    Choice that ran; while torch.compile traces them, they are the registered torch operator and return None.
    """

    def __init__(self, op: Op) -> None:
        self.op = op
        self.kernels: dict[Any, Kernel] = {}  # by spec, device, and what is rehearsed
        self.choices: list[Choice | None] = []  # by the numbers that calls return
        self._numbers: dict[Choice, int] = {}
        self._learned = set[str]()
        # A number for each backend that callers name, in the order in which they come.
        self._backends: dict[Any, int] = defaultdict(lambda: len(self._backends), {AUTO: 0})
        self._modules: dict[str, Any] = {}  # by the type of the device
        self._plans: dict[str, Callable[..., Any]] = {}  # likewise: what makes a planned call
        self._forced: str | None = None
        self._lock = threading.RLock()
        self._rest = [a for a in op.parsed if a.name not in op.planned]
        self._scope: dict[str, Any] = {
            "modes": self.register,
            "records": None,
            "call": self._first_call,
            "choices": self.choices,
            "backends": self._backends,
            "missed": self._missed,
            "missed_plan": self._missed_plan,
            "whole": self._whole,
            "extended": self._extended,
            "torch_op": torch_op,
            "op": op,
        }
        self._define()
        self.function: Callable[..., Choice | None] = self._scope[op.name]
        self.planned_function: Callable[..., Choice | None] = self._scope.get(f"{op.name}_planned", self.function)
        if "torch" in sys.modules:  # else at the first call: declaring ops must not import torch
            self.register()

    def register(self) -> int:
        """Defines the torch operator; takes the place of `modes` until then, and returns what that returns."""
        torch_op.register(self.op, self._scope["direct"])
        self._scope.update(torch_op.signals())
        return self._scope["modes"]()  # type: ignore[no-any-return]

    def _define(self) -> None:
        """The functions of the op, by name in the scope that they share; torch's dispatcher ends in `direct`."""
        op, given = self.op, _tuple(self.op.parsed)
        values = _values(op.native)
        known = "return choices[found] if found.__class__ is int else"
        call = [f"found = call({values})", f"{known} missed(found, {given}, %s)"]
        extended = f"    return extended(variant, {values})"
        variant = ["if variant is not None:", extended] if op.takes_variant else []
        last = ", variant" if op.takes_variant else ""
        parameters = [*map(_parameter, op.parsed), *(["*", "variant=None"] if op.takes_variant else [])]
        self._function(op.name, parameters, op.parsed, [*variant, call[0], call[1] % False], given, last)
        explain = ["except Exception as error:", f"    torch_op.explain(op, {given}, error)"]
        self.native = define(f"native_{op.name}", parameters, [f"return {values},"], self._scope)
        define("direct", parameters, ["try:", *_indented([*variant, call[0], call[1] % True]), *explain], self._scope)
        if op.planned:
            rest, fixed = _tuple(self._rest), [a for a in op.native if a.name in op.planned]
            words = (f"backends[plan.{a.name}]" if a.kind == "str" else f"plan.{a.name}" for a in fixed)
            self.fixed = define("fixed", ["plan"], [f"return {', '.join(words)},"], self._scope)
            call = [f"found = plan.call({_values(self._rest)})", f"{known} missed_plan(plan, found, {rest})"]
            parameters = ["plan", *map(_parameter, self._rest)]
            self._function(f"{op.name}_planned", parameters, self._rest, call, f"whole(plan, {rest})", "")

    def _function(
        self, name: str, parameters: Sequence[str], tensors: Sequence[Argument], call: list[str], given: str, last: str
    ) -> None:
        """A function that takes torch's dispatcher where that must see the call, and that torch.compile can trace."""
        body = [
            "try:",
            f"    if not modes() and not (records() and ({torch_op.requires_grad(tuple(tensors))})):",
            *_indented(call, 2),
            "except Exception as error:",
            f"    torch_op.recover(op, {given}, error)",
            f"return torch_op.dispatch(op, {given}{last})",
        ]
        made: Any = define(name, parameters, body, self._scope)
        traced = [f"return torch_op.call({self.op.name!r}, {given}{last})"]
        made._torchdynamo_inline = define(f"traced_{name}", parameters, traced, self._scope)

    def _whole(self, call: PlannedCall, rest: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of a planned call in the order of the declaration."""
        given = dict(zip((a.name for a in self._rest), rest))
        return tuple(given[a.name] if a.name in given else getattr(call.plan, a.name) for a in self.op.parsed)

    def _extended(self, variant: Any, *values: Any) -> None:
        """Calls the kernel of a user's variant, with the variant's own arguments behind those of the op."""
        self._checked(variant.call, self.op.native)(*values, *variant.extras)

    # Modules and kernels.

    def module(self, device: Any) -> Any:
        """The host module for tensors of a device."""
        kind = target_of(device).kind
        if _rehearsals:
            return rehearsed_module(self.op, kind)
        if kind not in self._modules:
            with self._lock:
                self._modules[kind] = host_module(self.op, kind)
        return self._modules[kind]

    def _first_call(self, *values: Any) -> Any:
        """Takes the place of `call` until a module is loaded, and in a rehearsal: no kernel is known."""

    def _checked(self, call: Callable[..., Any], taken: Sequence[Argument]) -> Callable[..., Any]:
        return torch_op.refusing_unreadable(self.op, taken, call) if checks_signs() else call

    def _rehearsed(self, device: Any, values: tuple[Any, ...]) -> Choice:
        """Computes the launches of a call, which does not run."""
        choice = choose(self._request(self.request(device, *values), device)[0])
        is_cuda = choice.request.target.kind == "cuda"
        done = self.kernel(choice.spec, device).run(*values) if is_cuda else ()
        _rehearsals[-1].calls.append((choice, done))
        return choice

    def _number(self, choice: Choice) -> int:
        with self._lock:
            if choice not in self._numbers:
                self.choices.append(choice)
                self._numbers[choice] = len(self.choices) - 1
            return self._numbers[choice]

    def _request(self, found: str, device: Any) -> tuple[Request, list[int]]:
        """The request that a host module tells in words, and the words."""
        words = list(map(int, found.split()))
        values = tuple(field.value(word) for field, word in zip(self.op.fields.values(), words[3:]))
        named = self._forced or list(self._backends)[words[1]]
        return Request(self.op, target_of(device), values, named, bool(words[2])), words

    def kernel(self, spec: Spec, device: Any) -> Kernel:
        """The kernel of a spec, which is compiled and loaded if necessary."""
        shown = _rehearsals[-1] if _rehearsals else None
        key = spec, device.index, shown and (shown.multiprocessors, shown.shared_limit)
        with self._lock:
            if key not in self.kernels:
                limits = (shown.multiprocessors, shown.shared_limit) if shown else ()
                self.kernels[key] = rehearse(spec, *limits) if limits else bind(spec, device.index or 0)
            return self.kernels[key]

    def request(self, device: Any, *values: Any) -> str:
        """The words of the request of a call that does not run. values: in the order of the host module; their tensors
        may lie elsewhere.
        """
        place, words = self.module(device)["request"](*values).split(" ", 1)
        return f"{_CUDA << 32 | device.index if device.type == 'cuda' else place} {words}"

    def prepare(self, found: str, device: Any) -> None:
        """Begins to compile the kernel of a request."""
        begin(choose(self._request(found, device)[0]).spec)

    def learn(self, found: str, device: Any) -> list[int]:
        """Teaches the module the kernel of a request, unless it knows that; the words that teach it."""
        request, words = self._request(found, device)
        choice = choose(request)
        if found not in self._learned:
            begin_reached(request, {name: known.op for name, known in _operators.items()})
        lesson = [self._number(choice), self.kernel(choice.spec, device).bound, *words]
        with self._lock:  # a thread that finds it learned calls at once
            if found not in self._learned:
                if len(self._learned) >= _MOST_REQUESTS:
                    self.forget()
                self.module(device)["learn"](*lesson)
                self._learned.add(found)
        return lesson

    def _missed(self, found: str | None, arguments: tuple[Any, ...], wrapped: bool) -> Choice | None:
        """Makes a call for whose request no kernel was known; perhaps another device's module was asked."""
        torch_op.check(self.op, arguments, wrapped=wrapped)
        named = dict(zip((a.name for a in self.op.parsed), arguments))
        values = tuple(self._backends[v] if a.kind == "str" else v for a in self.op.native for v in (named[a.name],))
        device = _device_of(values)
        if _rehearsals:
            return self._rehearsed(device, values)
        module = self.module(device)
        self._scope["call"] = self._checked(module["call"], self.op.native)
        number = module["call"](*values)
        if not isinstance(number, int):
            self.learn(number, device)
            number = module["call"](*values)
        return self.choices[int(number)]

    # Plans.

    def plan(self, choice: Choice | None, device: Any, check: Callable[..., None], plan: Any) -> PlannedCall:
        """A call with the planned arguments that are attributes of a plan, which never changes.

        Args:
            choice: what calls are expected to run; its kernel is known from the first call on.
            device: of the tensors.
            check: raises where the rest of a call, in declared order, does not fit the plan, its first argument. Asked
                for each request that the plan does not know.
            plan: the plan.
        """
        if _rehearsals:
            return PlannedCall(plan, check, self._first_call, self._first_call)
        make = self._plans.get(device.type) or self._plans.setdefault(device.type, self.module(device)["plan"])
        call = make(-1 if choice is None else self._numbers.get(choice, -1), *self.fixed(plan))
        return PlannedCall(plan, check, self._checked(call, self._rest), call)

    def _missed_plan(self, planned: PlannedCall, found: str, rest: tuple[Any, ...]) -> Choice | None:
        if planned.learn == self._first_call:  # planned in a rehearsal
            return self._missed(None, self._whole(planned, rest), False)
        torch_op.check(self.op, self._whole(planned, rest), wrapped=False)
        planned.check(planned.plan, *rest)
        number = planned.call(*rest)
        if not isinstance(number, int):
            planned.learn(*self.learn(number, _device_of(rest)))
            number = planned.call(*rest)
        return self.choices[int(number)]

    def forget(self) -> None:
        """Drops what calls have learned; kernels stay loaded."""
        with self._lock:
            for module in self._modules.values():
                module["forget"]()
            self._learned.clear()
            self.restart()

    def restart(self) -> None:
        """Asks Python for the module of the next call: another one, where a rehearsal begins or ends."""
        self._scope["call"] = self._first_call

    @contextlib.contextmanager
    def using(self, implementation: str) -> Iterator[None]:
        """Forces the named implementation inside the block, for tests and benchmarks (not thread safe)."""
        self.op.implementation(implementation)
        forced, self._forced = self._forced, implementation
        self.forget()
        try:
            yield
        finally:
            self._forced = forced
            self.forget()

    @contextlib.contextmanager
    def noted(self) -> Iterator[list[Choice]]:
        """The choices of the calls inside the block, for benchmarks (not thread safe)."""
        kept, noted = self.choices, _Noted(self.choices)
        self.choices = self._scope["choices"] = noted
        try:
            yield noted.calls
        finally:
            kept[:] = noted
            self.choices = self._scope["choices"] = kept


class _Noted(list[Any]):
    """Choices by the numbers that calls return, which keeps those that are looked up."""

    def __init__(self, choices: list[Any]) -> None:
        super().__init__(choices)
        self.calls: list[Choice] = []

    def __getitem__(self, number: Any) -> Any:
        choice = super().__getitem__(number)
        self.calls.append(choice)
        return choice


def _parameter(argument: Argument) -> str:
    return argument.name if argument.default is REQUIRED else f"{argument.name}={argument.default!r}"


def _device_of(values: Sequence[Any]) -> Any:
    return next(value.device for value in values if hasattr(value, "device"))


def _tuple(arguments: Sequence[Argument]) -> str:
    return f"({', '.join(a.name for a in arguments)},)"


def _values(arguments: Sequence[Argument]) -> str:
    return ", ".join(f"backends[{a.name}]" if a.kind == "str" else a.name for a in arguments)


def _indented(lines: Sequence[str], levels: int = 1) -> list[str]:
    return [f"{'    ' * levels}{line}" for line in lines]


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
    return _planned(op, target_of(device), backend, values, is_on(), ahead and not _rehearsals)


@functools.lru_cache(maxsize=4096)
def _planned(op: Op, target: Target, backend: str, values: tuple[Any, ...], invariant: bool, ahead: bool) -> Choice:
    named = tuple(short_name(v) if type(v).__name__ == "dtype" else v for v in values)
    choice = choose(Request(op, target, named, backend, invariant))
    if ahead:
        begin(choice.spec)
    return choice


def composition(op: Op, device: Any, *values: Any) -> str:
    """The implementation of a composite op for these values of its fields, in order: the ops that compute a call.

    Cached: one look-up per call. Raises UnsupportedError if no implementation supports the values.
    """
    choice = _planned(op, target_of(device), AUTO, values, is_on(), False)
    if _rehearsals:
        _rehearsals[-1].calls.append((choice, ()))
    return choice.implementation


class Rehearsal:
    """Calls for another machine: each choice and each launch is computed, and nothing runs.

    Tensors are on the CPU and are not read. `calls` has choice and launches of each call; `files`, those of a variant.

    Args:
        target: the rehearsed target.
        multiprocessors, shared_limit: of its device; the latter in bytes of a CTA.
    """

    def __init__(self, target: Target, multiprocessors: int, shared_limit: int) -> None:
        self.target, self.multiprocessors, self.shared_limit = target, multiprocessors, shared_limit
        self.calls: list[tuple[Choice, tuple[Launch, ...]]] = []
        self.files: dict[Choice, tuple[Any, ...]] = {}

    def __enter__(self) -> Rehearsal:
        _rehearsals.append(self)
        for known in _operators.values():
            known.restart()
        return self

    def __exit__(self, *_: object) -> None:
        _rehearsals.pop()
        for known in _operators.values():
            known.restart()


_rehearsals: list[Rehearsal] = []  # the innermost counts


def rehearsal() -> Rehearsal | None:
    return _rehearsals[-1] if _rehearsals else None


_operators: dict[str, Operator] = {}


def operator(op: Op) -> Callable[..., Choice | None]:
    """The function that calls an op, with its declared arguments; it returns the Choice that ran.

    While torch.compile traces it, it is the registered torch operator and returns None.
    """
    _operators[op.name] = made = Operator(op)
    return made.function


def operator_of(op: Op) -> Operator:
    return _operators[op.name]


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
