"""Operators: functions with an op's arguments. A call is one call of the op's host module, which knows its kernels.

found = call(values...)                the number of the choice that ran, or the request that no kernel is known for
choose(request) -> bind -> learn       once for each request; then the call is made again
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fi_core.runtime import machine
from fi_core.runtime.dispatch import AUTO, Choice, Request, choose
from fi_core.runtime.launch import torch_op
from fi_core.runtime.launch.kernel import Kernel, bind, host_module, rehearse, rehearsed_module
from fi_core.runtime.machine import Rehearsal, rehearsal, target_of
from fi_core.runtime.resolve.ahead import begin, begin_reached
from fi_core.runtime.resolve.checks import checks_signs
from fi_core.runtime.signature import define
from fi_core.runtime.spec.arguments import REQUIRED, Argument
from fi_core.runtime.spec.op import Op, Spec

_MOST_REQUESTS = 4096  # that a host module keeps
_CUDA = 2  # kDLCUDA

# An operator's function. It takes torch's dispatcher where that must see the call.
_FUNCTION = """\
try:
    if not modes() and not (records() and ({requires_grad})):
        {variant}
        found = {call}
        return choices[found] if found.__class__ is int else operator.{missed}
except Exception as error:
    if not any(map(torch_op.is_special, {given})):  # for these it has failed before the kernel, in tvm-ffi
        torch_op.explain(op, {given}, error)
return torch_op.dispatch(op, {given}{last})"""
_TRACED = "registered()\nreturn torch_op.call({name!r}, {given}{last})"  # by torch.compile
# Where torch's dispatcher ends.
_DIRECT = """\
try:
    {variant}
    found = {call}
    return choices[found] if found.__class__ is int else operator.missed({given}, True)
except Exception as error:
    torch_op.explain(op, {given}, error)"""


class PlannedCall(NamedTuple):
    """The call of an op with a plan, whose tensors C++ reads: see `Operator.plan`. learn: teaches it a kernel."""

    plan: Any
    check: Callable[..., None]
    call: Callable[..., Any]
    learn: Callable[..., Any]


class Operator:
    """The callable of an op, and the kernels that it has bound.

    `function` takes all arguments, `planned_function` a PlannedCall and the rest of them. Both return the
    Choice that ran; while torch.compile traces them, they are the registered torch operator and return None. `native`
    takes the arguments, too, and returns them as the host module does: in its order, with numbers for backends.
    """

    def __init__(self, op: Op) -> None:
        self.op = op
        self.kernels: dict[Any, Kernel] = {}  # by spec and device
        self._numbers: dict[Choice, int] = {}
        self._learned = set[str]()
        # A number for each backend that callers name, in the order in which they come.
        self._backends: dict[Any, int] = defaultdict(lambda: len(self._backends), {AUTO: 0})
        self._modules: dict[str, Any] = {}  # by the type of the device
        self._plans: dict[str, Callable[..., Any]] = {}  # likewise: what makes a planned call
        self.forced: str | None = None  # the implementation of all calls; `forget` after each change
        self._lock = threading.RLock()
        self._rest = [a for a in op.parsed if a.name not in op.planned]
        self._scope: dict[str, Any] = {"operator": self, "op": op, "backends": self._backends, "torch_op": torch_op}
        self.choices = []
        self.restart()
        self._define()
        machine.watchers.append(self.restart)
        torch_op.signal(self._scope, lambda: torch_op.register(op, self._scope["direct"]))
        if "torch" in sys.modules:  # else at the first call
            self._scope["modes"]()

    @property
    def choices(self) -> list[Choice | None]:
        """The choices by the numbers that calls return; a list put in its place sees each look-up."""
        return self._scope["choices"]  # type: ignore[no-any-return]

    @choices.setter
    def choices(self, kept: list[Choice | None]) -> None:
        self._scope["choices"] = kept

    def _define(self) -> None:
        """Makes the functions of the op, in the scope in which they look up names."""
        op, scope = self.op, self._scope
        values, has_variant = _values(op.native), op.takes_variant
        words = {"call": f"call({values})", "given": _tuple(op.parsed), "last": ", variant" if has_variant else ""}
        extended = f"return operator.checked(variant.call, op.native)({values}, *variant.extras)"
        words["variant"] = f"if variant is not None: {extended}" if has_variant else ""
        words["missed"] = f"missed({words['given']}, False)"
        parameters = [*map(_parameter, op.parsed), *(["*", "variant=None"] if has_variant else [])]
        self.native = define(f"native_{op.name}", parameters, f"return {values},", scope)
        define("direct", parameters, _DIRECT.format_map(words), scope)
        self.function: Callable[..., Choice | None] = self._function(op.name, parameters, op.parsed, words)
        self.planned_function = self.function
        if op.planned:
            rest, fixed = _tuple(self._rest), [a for a in op.native if a.name in op.planned]
            names = (f"backends[plan.{a.name}]" if a.kind == "str" else f"plan.{a.name}" for a in fixed)
            self.fixed = define("fixed", ["plan"], f"return {', '.join(names)},", scope)
            words = {"call": f"plan.call({_values(self._rest)})", "given": f"operator.whole(plan, {rest})"}
            words |= {"last": "", "variant": "", "missed": f"missed_plan(plan, found, {rest})"}
            parameters = ["plan", *map(_parameter, self._rest)]
            self.planned_function = self._function(f"{op.name}_planned", parameters, self._rest, words)

    def _function(
        self, name: str, parameters: Sequence[str], taken: Sequence[Argument], words: dict[str, str]
    ) -> Callable[..., Any]:
        words = words | {"requires_grad": torch_op.requires_grad(taken), "name": self.op.name}
        made: Any = define(name, parameters, _FUNCTION.format_map(words), self._scope)
        made._torchdynamo_inline = define(f"traced_{name}", parameters, _TRACED.format_map(words), self._scope)
        return made  # type: ignore[no-any-return]

    def whole(self, call: PlannedCall, rest: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of a planned call in the order of the declaration."""
        given = dict(zip((a.name for a in self._rest), rest))
        return tuple(given[a.name] if a.name in given else getattr(call.plan, a.name) for a in self.op.parsed)

    # Modules and kernels.

    def module(self, device: Any) -> Any:
        """The host module for tensors of a device."""
        kind = target_of(device).kind
        if rehearsal():
            return rehearsed_module(self.op, kind)
        if kind not in self._modules:
            with self._lock:
                self._modules[kind] = host_module(self.op, kind)
        return self._modules[kind]

    def _first_call(self, *values: Any) -> Any:
        """Takes the place of `call` until a module is loaded, and in a rehearsal: no kernel is known."""

    def checked(self, call: Callable[..., Any], taken: Sequence[Argument]) -> Callable[..., Any]:
        """With FI_CHECK=1 a call that looks at each tensor: C++ sees no negated view, and not every fake tensor."""

        def checked(*values: Any) -> Any:
            torch_op.check(self.op, values, wrapped=False, taken=taken)
            return call(*values)

        return checked if checks_signs() else call

    def _choose(self, found: str, device: Any) -> tuple[Choice, list[int]]:
        """The choice for a request that a host module tells in words, and the words."""
        words = list(map(int, found.split()))
        values = tuple(field.value(word) for field, word in zip(self.op.fields.values(), words[3:]))
        named = self.forced or list(self._backends)[words[1]]
        return choose(Request(self.op, target_of(device), values, named, bool(words[2]))), words

    def request(self, device: Any, *values: Any) -> str:
        """The words of the request of a call that does not run. values: in the order of the host module; their tensors
        may lie elsewhere.
        """
        place, words = self.module(device)["request"](*values).split(" ", 1)
        return f"{_CUDA << 32 | device.index if device.type == 'cuda' else place} {words}"

    def prepare(self, found: str, device: Any) -> None:
        """Begins to compile the kernel of a request."""
        begin(self._choose(found, device)[0].spec)

    def kernel(self, spec: Spec, device: Any) -> Kernel:
        """The kernel of a spec, which is compiled and loaded if necessary."""
        with self._lock:
            key = spec, device.index
            if key not in self.kernels:
                self.kernels[key] = bind(spec, device.index or 0)
            return self.kernels[key]

    def learn(self, found: str, device: Any) -> list[int]:
        """Teaches the module the kernel of a request, unless it knows that; the words that teach it."""
        choice, words = self._choose(found, device)
        with self._lock:  # a thread that finds it learned calls at once
            is_new = found not in self._learned
            if is_new:
                begin_reached(choice.request, {name: known.op for name, known in _operators.items()})
            if choice not in self._numbers:
                self.choices.append(choice)
                self._numbers[choice] = len(self.choices) - 1
            lesson = [self._numbers[choice], self.kernel(choice.spec, device).bound, *words]
            if is_new:
                if len(self._learned) >= _MOST_REQUESTS:
                    self.forget()
                self.module(device)["learn"](*lesson)
                self._learned.add(found)
        return lesson

    def _rehearsed(self, shown: Rehearsal, device: Any, values: tuple[Any, ...]) -> Choice | None:
        """Computes the launches of a call, which does not run."""
        if not shown.has_launcher(self.op):
            shown.calls.append((self.op, None))
            return None
        choice, _ = self._choose(self.request(device, *values), device)
        is_cuda = shown.target.kind == "cuda"
        told = rehearse(choice.spec, shown.multiprocessors, shown.shared_limit).run(*values) if is_cuda else None
        shown.note(choice, told)
        return choice

    def missed(self, arguments: tuple[Any, ...], wrapped: bool) -> Choice | None:
        """Makes a call for whose request no kernel was known; perhaps another device's module was asked."""
        torch_op.check(self.op, arguments, wrapped=wrapped)
        values = self.native(*arguments)
        device = _device_of(values)
        if shown := rehearsal():
            return self._rehearsed(shown, device, values)
        call = self.module(device)["call"]
        self._scope["call"] = self.checked(call, self.op.native)
        number = call(*values)
        if not isinstance(number, int):
            self.learn(number, device)
            number = call(*values)
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
        if rehearsal():
            return PlannedCall(plan, check, self._first_call, self._first_call)
        make = self._plans.get(device.type) or self._plans.setdefault(device.type, self.module(device)["plan"])
        call = make(-1 if choice is None else self._numbers.get(choice, -1), *self.fixed(plan))
        return PlannedCall(plan, check, self.checked(call, self._rest), call)

    def missed_plan(self, planned: PlannedCall, found: str | None, rest: tuple[Any, ...]) -> Choice | None:
        if found is None:  # planned in a rehearsal
            return self.missed(self.whole(planned, rest), False)
        torch_op.check(self.op, self.whole(planned, rest), wrapped=False)
        planned.check(planned.plan, *rest)
        planned.learn(*self.learn(found, _device_of(rest)))
        return self.choices[int(planned.call(*rest))]

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


def _parameter(argument: Argument) -> str:
    return argument.name if argument.default is REQUIRED else f"{argument.name}={argument.default!r}"


def _device_of(values: Sequence[Any]) -> Any:
    return next(value.device for value in values if hasattr(value, "device"))


def _tuple(arguments: Sequence[Argument]) -> str:
    return f"({', '.join(a.name for a in arguments)},)"


def _values(arguments: Sequence[Argument]) -> str:
    return ", ".join(f"backends[{a.name}]" if a.kind == "str" else a.name for a in arguments)


_operators: dict[str, Operator] = {}


def operator(op: Op) -> Callable[..., Choice | None]:
    """The function that calls an op, with its declared arguments; it returns the Choice that ran.

    While torch.compile traces it, it is the registered torch operator and returns None.
    """
    _operators[op.name] = made = Operator(op)
    return made.function


def operators() -> dict[str, Operator]:
    """The operators of the families imported so far, by op name."""
    return _operators
