"""Plans of launches: the kernels that a public function calls for arguments of certain forms, listed once.

    @plans_launches("output")
    def layer(p: Launches, x: torch.Tensor, output: torch.Tensor | None = None) -> torch.Tensor: ...

The function adds its launches to `p`. While a plan is made, it gets *forms* in place of tensors: tensors of torch's
meta device, which have a dtype, a shape, strides and a place, but no memory. Later calls of such forms are one call of
C++, which compares the tensors with the forms, allocates what lies between the kernels and calls them.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

from fi_core.runtime.errors import without_frames
from fi_core.runtime.invariance import is_on
from fi_core.runtime.launch import torch_op
from fi_core.runtime.launch.operator import Operator, operators
from fi_core.runtime.lazy import torch
from fi_core.runtime.machine import rehearsal
from fi_core.runtime.resolve.ahead import TOKEN_COUNTS, begin_module, reported
from fi_core.runtime.resolve.checks import checks_signs
from fi_core.runtime.signature import passed, redefine
from fi_core.runtime.spec.dtype import DTYPES, short_name
from fi_core.runtime.spec.op import Op
from fi_core.runtime.tensors import is_special, unreadable

P = ParamSpec("P")
R = TypeVar("R")
Axis: TypeAlias = "int | Callable[[torch.Tensor | None], int | None]"  # of an argument, or of each of its tensors
ALIGNMENT = 256  # bytes of a piece of scratch
_MOST_KEYS, _MOST_PLANS = 4096, 8  # of a function; of a key, whose calls differ in strides, dtypes or optional tensors
# Forms lie in one address space, so that a view knows its place and its alignment: scratch begins at 0, the n-th tensor
# of a call at n regions plus the low bits of its address.
_SPACE, _REGION = 1 << 61, 1 << 40


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class AtOnce:
    """Launches at once. workspace: memory for scratch, uint8; None: torch allocates each piece."""

    def __init__(self, device: torch.device, workspace: torch.Tensor | None = None) -> None:
        self.device, self._workspace, self._end = device, workspace, 0
        if workspace is None:
            return
        if str(workspace.dtype) != "torch.uint8":
            raise TypeError(f"workspace_buffer must be uint8; got {workspace.dtype}")
        if workspace.ndim != 1 or not workspace.is_contiguous() or workspace.device != device:
            raise ValueError(
                f"workspace_buffer must be contiguous, of one dimension, on {device}; got {list(workspace.shape)} on "
                f"{workspace.device}"
            )
        self._end = -workspace.data_ptr() % ALIGNMENT

    def add(self, op: Op, *values: Any, **named: Any) -> None:
        """Launches an op with these arguments."""
        operators()[op.name].function(*values, **named)

    def scratch(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory for what lies between the kernels of this call."""
        if self._workspace is None:
            return self.result(shape, dtype)
        begin, size = self._end, math.prod(shape) * dtype.itemsize
        self._end = begin + aligned(size)
        if begin + size > self._workspace.numel():
            raise ValueError(
                f"workspace_buffer must have more than {begin + size} bytes for this call; got "
                f"{self._workspace.numel()}"
            )
        return self._workspace[begin : begin + size].view(dtype).view(*shape)

    def result(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A new tensor, which the function returns."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def constant(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor whose contents never change, and which is no argument of the call."""
        return x

    def address(self, x: torch.Tensor) -> int:
        """Of the first element, modulo 256; 0 where it has none."""
        return 0 if torch.compiler.is_compiling() or is_special(x) else x.data_ptr() % ALIGNMENT


@functools.cache
def _space(dtype: torch.dtype, device: str) -> torch.Tensor:
    """The address space without memory: "meta", or "cpu" for host modules, which read no element of it."""
    if device == "meta":
        return torch.empty(_SPACE // dtype.itemsize, dtype=dtype, device="meta")
    return torch.frombuffer((ctypes.c_char * _SPACE).from_address(_SPACE), dtype=torch.uint8).view(dtype)


def _address(form: torch.Tensor) -> int:
    return int(form.storage_offset()) * form.element_size()


def _facts(form: torch.Tensor) -> tuple[Any, ...]:
    return _address(form), form.dtype, form.shape, form.stride()


def _on_host(form: torch.Tensor) -> torch.Tensor:
    """The form as a tensor that host modules take."""
    return _space(form.dtype, "cpu").as_strided(form.shape, form.stride(), form.storage_offset())


class LaunchPlan:
    """Lists launches, and makes them for calls whose tensors have these forms.

    tensors: of a call, each with its axis of tokens; tokens: their number in place of that of the tensors.
    """

    def __init__(
        self, device: torch.device, tensors: Sequence[tuple[torch.Tensor | None, int | None]], tokens: int | None = None
    ) -> None:
        self.device, self.scratch_bytes = device, 0
        # The calls: operators with values in the order of their host modules; tensors are forms on the host.
        self.steps: list[tuple[Operator, tuple[Any, ...]]] = []
        self.forms: list[torch.Tensor | None] = []  # of the tensors of a call; of results and constants behind them
        for x, axis in tensors:
            self._add_form(x, None if tokens is None else axis, tokens)
        self.given = len(self.forms)
        self.made: list[Callable[[], torch.Tensor]] = []  # gives each result and constant to a call
        self.is_complete = True  # whether no step needs a tensor that torch makes
        self._results: list[torch.Tensor] = []
        self._written: set[int] = set()

    def _add_form(self, x: torch.Tensor | None, axis: int | None = None, size: Any = None) -> Any:
        """The form of the next tensor of a call: that of x, with another size of one axis if that is given."""
        form = None
        if x is not None:
            shape = [size if dim == axis else n for dim, n in enumerate(x.shape)]
            begin = (len(self.forms) + 1) * _REGION + (0 if x.is_meta else x.data_ptr() % ALIGNMENT)
            form = _space(x.dtype, "meta").as_strided(shape, x.stride(), begin // x.element_size())
        self.forms.append(form)
        return form

    def add(self, op: Op, *values: Any, **named: Any) -> None:
        operator, found = operators()[op.name], list[Any]()
        for argument, x in zip(op.native, operator.native(*values, **named)):
            if hasattr(x, "storage_offset"):
                if argument.written:
                    self._written.add(_address(x) // _REGION)
                if x.untyped_storage().nbytes() != _SPACE or short_name(x.dtype) not in DTYPES:
                    self.is_complete = False
                found.append(_on_host(x))
            else:
                found.append(x if x is None or isinstance(x, (bool, float)) else int(x))
        self.steps.append((operator, tuple(found)))

    def scratch(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """No byte is used twice: a step may begin while the one before it drains."""
        begin, size = self.scratch_bytes, math.prod(shape) * dtype.itemsize
        self.scratch_bytes += aligned(size)
        return _space(dtype, "meta")[begin // dtype.itemsize :][: math.prod(shape)].view(*shape)

    def result(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        self.made.append(functools.partial(torch.empty, size=torch.Size(shape), dtype=dtype, device=self.device))
        self._results.append(self._add_form(torch.empty(shape, dtype=dtype, device="meta")))
        return self._results[-1]

    def constant(self, x: torch.Tensor) -> torch.Tensor:
        self.made.append(lambda: x)
        return self._add_form(x)  # type: ignore[no-any-return]

    def address(self, x: torch.Tensor) -> int:
        return _address(x) % ALIGNMENT

    def finish(self, out: torch.Tensor | None, returned: torch.Tensor | list[torch.Tensor]) -> bool:
        """Completes the plan, whose function returns this; False: no step can make the calls of all, or torch makes a
        tensor in each call. out: an argument that receives the result. Raises ValueError for one that no step writes.
        """
        listed = returned if isinstance(returned, list) else [returned]
        for x in (*self._results, *(x for x in listed if x is out)):
            if self.is_complete and x.numel() and _address(x) // _REGION not in self._written:
                raise ValueError(f"a plan must write its results; no step writes {x.dtype} {list(x.shape)}")
        self.prepare()
        whole = {_facts(x): n for n, x in enumerate(self.forms) if x is not None}
        modules = [operator.module(self.device) for operator, _ in self.steps]
        makers = [module["steps"] for module in modules if module.implements_function("steps")]
        if not makers or not self.is_complete or any(_facts(x) not in whole for x in listed):
            return False
        self._returned, self._is_list = [whole[_facts(x)] for x in listed], listed is returned
        scratch = _space(torch.uint8, "cpu")[: self.scratch_bytes]
        words = [self.given, 1 + len(self.forms), scratch, *(x if x is None else _on_host(x) for x in self.forms)]
        for module, (_, values) in zip(modules, self.steps):
            words += [module["call"], len(values), *values]
        self._call = makers[0](*words)
        return True

    def prepare(self, learns: bool = True) -> None:
        """Begins to compile the kernels that the steps need, all at the same time. learns: waits for them, too, and
        has each module learn them.
        """
        requests = [(operator, operator.request(self.device, *values)) for operator, values in self.steps]
        for operator, request in requests:
            operator.prepare(request, self.device)
        for operator, request in requests if learns else ():
            operator.learn(request, self.device)

    def run(self, workspace: torch.Tensor | None, tensors: tuple[torch.Tensor | None, ...]) -> Any:
        """The result; None: a tensor has another form."""
        if self.made:
            tensors = *tensors, *[make() for make in self.made]
        found = self._call(workspace, *tensors)
        if found is not None and found.__class__ is not int:  # a request; the steps before it may run again
            self.prepare()
            found = self._call(workspace, *tensors)
        if found is not None:
            return None
        return [tensors[n] for n in self._returned] if self._is_list else tensors[self._returned[0]]


Launches: TypeAlias = "AtOnce | LaunchPlan"  # what a function that plans its launches calls
_AT_ONCE = "return function(AtOnce({device}, {workspace}), {values})"
_PLANNED = """\
try:
    if not modes() and not rehearsal() and not checks_signs():
        given = {given},
        if not (records() and any(x is not None and x.requires_grad for x in given)):
            key = {key}
            plans = known.get(key, ())
            if plans is not None:
                for plan in plans:
                    if (found := plan.run({workspace}, given)) is not None:
                        return found
                if (found := make(key, {device}, {all})) is not None:
                    return found
except Exception as error:
    recover({all}, error)
"""


class plans_launches:
    """Decorates a function whose first argument takes its launches; callers leave that out.

    It returns its argument `out`, or a new tensor in its place, or a list of tensors. What it does besides launching
    must depend on numbers and on forms of tensors only. Where torch computes a tensor that a kernel reads, calls are
    not planned, nor where torch traces, a rehearsal runs, or FI_CHECK=1 has every op look at its tensors.

    Args:
        out: the argument that receives the result.
        by: the tensor by whose shape and device plans are told apart first; None: the first one that is required.
        workspace: the argument that is memory for scratch.
        tokens: the axis of tokens of each argument that has one, or a function that tells it of each of its tensors.
            On CUDA the first call of a layer begins to compile the kernels of other numbers of tokens.

    A plan is kept where one of the host modules of its steps exports `steps` (FI_STEPS).
    """

    def __init__(
        self, out: str, by: str | None = None, workspace: str = "None", tokens: Mapping[str, Axis] | None = None
    ) -> None:
        self.out, self.by, self.workspace, self.tokens = out, by, workspace, tokens or {}
        self.known: dict[Any, tuple[LaunchPlan, ...] | None] = {}  # by what is no tensor; None: calls are not planned
        self.layers = set[Any]()  # whose kernels have begun to compile

    def __call__(self, function: Callable[Concatenate[Launches, P], R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        self.function: Callable[..., Any] = function
        self.parameters = list(signature.parameters.values())[1:]
        self.tensors = [p for p in self.parameters if "torch.Tensor" in str(p.annotation) and p.name != self.workspace]
        self.numbers = [p.name for p in self.parameters if p not in self.tensors and p.name != self.workspace]
        scope: dict[str, Any] = {"known": self.known, "make": self._make, "recover": self._recover, "listed": _listed}
        scope.update(function=function, AtOnce=AtOnce, rehearsal=rehearsal, checks_signs=checks_signs, is_on=is_on)
        torch_op.signal(scope)
        first = self.by or next(p.name for p in self.tensors if str(p.annotation) == "torch.Tensor")
        words = {
            "device": f"{first}.device",
            "key": f"{first}.shape, {first}.get_device(), {self.out} is None, is_on(), {', '.join(self.numbers)}",
            "given": ", ".join(f"*listed({p.name})" if "[" in str(p.annotation) else p.name for p in self.tensors),
            "all": f"{{{', '.join(f'{p.name!r}: {p.name}' for p in self.parameters)}}}",
            "values": passed(self.parameters),
            "workspace": self.workspace,
        }
        traced, planned = (
            redefine(function, self.parameters, text.format_map(words), scope)
            for text in (_AT_ONCE, _PLANNED + _AT_ONCE)
        )
        planned._torchdynamo_inline = traced
        planned.begin_other_counts = self.begin_other_counts
        functools.update_wrapper(planned, function)
        planned.__signature__ = signature.replace(parameters=self.parameters)
        return planned  # type: ignore[no-any-return]

    def _make(self, key: Any, device: torch.device, named: dict[str, Any]) -> Any:
        """The result of a call of a new form, whose plan is kept; None: calls of its kind are not planned."""
        tensors = self._tensors(named)
        if any(x is not None and unreadable(x) for x, _ in tensors):
            return None
        plan = LaunchPlan(device, tensors)
        given_out, returned = self._list(plan, named)
        for op in {operator.op: None for operator, _ in plan.steps}:
            begin_module(op, device.type)
        if device.type == "cuda":
            plan.prepare(learns=False)  # first: NVRTC parses one unit at a time
            self.begin_other_counts(device, named)
        is_planned = plan.finish(given_out, returned)
        if len(self.known) >= _MOST_KEYS:
            self.known.clear()
        if not is_planned:
            self.known[key] = None
            return None
        self.known[key] = (plan, *(self.known.get(key) or ()))[:_MOST_PLANS]
        return plan.run(named.get(self.workspace), tuple(x for x, _ in tensors))

    def _tensors(self, named: dict[str, Any]) -> list[tuple[Any, int | None]]:
        """The tensors of a call in order, each with its axis of tokens."""
        axes = ((x, self.tokens.get(p.name)) for p in self.tensors for x in _listed(named[p.name]))
        return [(x, axis(x) if callable(axis) else axis) for x, axis in axes]

    def _list(self, plan: LaunchPlan, named: dict[str, Any]) -> tuple[Any, Any]:
        """(the form of the argument `out`, what the function returns) where it lists its launches."""
        forms, given = iter(plan.forms), dict(named)
        for p in self.tensors:
            own = [next(forms) for _ in _listed(named[p.name])]
            given[p.name] = own if isinstance(named[p.name], (tuple, list)) else own[0]
        return given[self.out], self.function(plan, **given)

    def begin_other_counts(self, device: torch.device, named: dict[str, Any]) -> None:
        """Begins to compile the kernels that a layer reaches with other numbers of tokens, once for a layer.

        named: the arguments of a call.
        """
        tensors = self._tensors(named)
        forms = (x if x is None else (x.dtype, x.shape) for x in LaunchPlan(device, tensors, 0).forms)
        layer = str(device), *forms, *(named[name] for name in self.numbers)
        if not self.tokens or layer in self.layers:
            return
        self.layers.add(layer)
        for count in TOKEN_COUNTS:
            plan = LaunchPlan(device, tensors, count)
            with reported(f"{self.function.__name__} of {count} tokens"):
                self._list(plan, named)
                plan.prepare(learns=False)

    def _recover(self, named: dict[str, Any], error: Exception) -> None:
        """Raises the error of a call, unless only ops can take or refuse a tensor, or a value is no part of a key."""
        is_special = any(x is not None and unreadable(x) for x, _ in self._tensors(named))
        if not is_special and all(isinstance(named[name], Hashable) for name in self.numbers):
            raise without_frames(error)


def _listed(value: Any) -> Sequence[Any]:
    """The tensors of an argument, which may take several."""
    return value if isinstance(value, (tuple, list)) else (value,)
