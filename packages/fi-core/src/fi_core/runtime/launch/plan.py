"""Plans of launches: the kernels that a public function calls for arguments of certain forms, listed once.

    @plans_launches("output")
    def layer(p: Launches, x: torch.Tensor, output: torch.Tensor | None = None) -> torch.Tensor: ...

The function adds its launches to `p`. While a plan is made, it gets *forms* in place of tensors: tensors of torch's
meta device, which have a dtype, a shape, strides and a place, but no memory. Later calls of such forms are one call of
C++, which compares the tensors with the forms, allocates what lies between the kernels and calls them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeAlias, TypeVar

from fi_core.runtime.launch import torch_op
from fi_core.runtime.launch.kernel import begin_module
from fi_core.runtime.launch.operator import Operator, operator_of, rehearsal
from fi_core.runtime.launch.reach import TOKEN_COUNTS, on_host
from fi_core.runtime.resolve.checks import checks_signs
from fi_core.runtime.signature import define
from fi_core.runtime.spec.dtype import DTYPES, short_name

if TYPE_CHECKING:
    import torch

    from fi_core.runtime.spec.op import Op

P = ParamSpec("P")
R = TypeVar("R")
ALIGNMENT = 256  # bytes of a piece of scratch
_MOST_KEYS, _MOST_PLANS = 4096, 8  # of a function; of a key, whose calls differ in strides, dtypes or optional tensors
_CONSTANT, _TENSOR, _VIEW = range(3)  # enum Source of fi/host/steps.h
# Forms are views of one address space, so that a view knows its place and its alignment: scratch begins at 0, the n-th
# tensor of a call at n regions plus the low bits of its address, and constants lie behind.
_SPACE, _REGION, _CONSTANTS = 1 << 62, 1 << 40, 1 << 20


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class AtOnce:
    """Launches at once. workspace: memory for scratch, uint8; None: torch allocates each piece. is_traced: by
    torch.compile, which knows no addresses.
    """

    def __init__(self, device: torch.device, workspace: torch.Tensor | None = None, is_traced: bool = False) -> None:
        self.device, self._workspace, self._end, self._is_traced = device, workspace, 0, is_traced
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
        operator_of(op).function(*values, **named)

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
        import torch

        return torch.empty(shape, dtype=dtype, device=self.device)

    def constant(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor whose contents never change, and which is no argument of the call."""
        return x

    def address(self, x: torch.Tensor) -> int:
        """Of the first element, modulo 256."""
        return 0 if self._is_traced or torch_op.is_special(x) else x.data_ptr() % ALIGNMENT


@functools.cache
def _space(dtype: torch.dtype) -> torch.Tensor:
    import torch

    return torch.empty(_SPACE // dtype.itemsize, dtype=dtype, device="meta")


def _form(base: int, address: int, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return _space(dtype).as_strided(shape, strides, (base * _REGION + address) // dtype.itemsize)


def _rows(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of contiguous rows."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


class Form(NamedTuple):
    """A tensor of a step."""

    base: int  # 0: scratch; n: the n-th tensor of a call; behind these: constants; -1: torch makes it
    offset: int  # bytes from the begin of that
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Step(NamedTuple):
    """A call of an operator with values in the order of its host module."""

    operator: Operator
    values: tuple[Any, ...]


class PlanBuilder:
    """Lists launches. `forms` are those of the tensors of a call."""

    def __init__(
        self,
        device: torch.device,
        tensors: Sequence[torch.Tensor | None],
        shapes: Sequence[Sequence[int] | None] | None = None,
    ) -> None:
        self.device, self.steps, self.scratch_bytes = device, list[Step](), 0
        self.forms = [
            x if x is None else _form(n, x.data_ptr() % ALIGNMENT, shape or x.shape, x.stride(), x.dtype)
            for n, (x, shape) in enumerate(zip(tensors, shapes or [None] * len(tensors)), 1)
        ]
        self.results: list[torch.Tensor] = []
        self.constants: list[torch.Tensor] = []
        self.is_complete = True  # whether no step needs a tensor that torch makes
        self._written: set[int] = set()

    def add(self, op: Op, *values: Any, **named: Any) -> None:
        operator = operator_of(op)
        given = operator.native(*values, **named)
        forms = tuple(self._place(x) if hasattr(x, "storage_offset") else x for x in given)
        self._written.update(f.base for f, a in zip(forms, op.native) if a.written and f is not None)
        self.steps.append(Step(operator, forms))

    def scratch(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """No byte is used twice: a step may begin while the one before it drains."""
        begin = self.scratch_bytes
        self.scratch_bytes += aligned(math.prod(shape) * dtype.itemsize)
        return _form(0, begin, shape, _rows(shape), dtype)

    def result(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        self.results.append(_form(len(self.forms) + len(self.results) + 1, 0, shape, _rows(shape), dtype))
        return self.results[-1]

    def constant(self, x: torch.Tensor) -> torch.Tensor:
        self.constants.append(x)
        return _form(_CONSTANTS + len(self.constants) - 1, 0, x.shape, x.stride(), x.dtype)

    def address(self, x: torch.Tensor) -> int:
        return int(x.storage_offset()) * x.element_size() % ALIGNMENT

    def _place(self, x: torch.Tensor) -> Form:
        facts = x.dtype, tuple(x.shape), tuple(x.stride())
        if x.untyped_storage().nbytes() != _SPACE or short_name(x.dtype) not in DTYPES:
            self.is_complete = False
            return Form(-1, 0, *facts)
        base, offset = divmod(int(x.storage_offset()) * x.element_size(), _REGION)
        return Form(base, offset - self._begin(base), *facts)

    def _begin(self, base: int) -> int:
        """The low bits of the address of a tensor of the call."""
        own = self.forms[base - 1] if 0 < base <= len(self.forms) else None
        return 0 if own is None else self.address(own)

    def finished(
        self, out: torch.Tensor | None, returned: torch.Tensor | list[torch.Tensor]
    ) -> tuple[list[int], bool] | None:
        """The numbers of the tensors that a call returns, and whether as a list; None: torch makes a tensor in each
        call. out: an argument that receives the result. Raises ValueError for a result that no step writes.
        """
        listed = returned if isinstance(returned, list) else [returned]
        for x in (*self.results, *(x for x in listed if x is out)):
            if self.is_complete and x.numel() and self._place(x).base not in self._written:
                raise ValueError(f"a plan must write its results; no step writes {x.dtype} {list(x.shape)}")
        whole = {self._place(x): n for n, x in enumerate((*self.forms, *self.results), 1) if x is not None}
        numbers = [whole.get(self._place(x), 0) for x in listed]
        return (numbers, listed is returned) if self.is_complete and all(numbers) else None

    def prepare(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Has each module learn the kernels that the steps need. All kernels compile at the same time."""
        bases, requests = self._bases(tensors), []
        for operator, values in self.steps:
            made = (self._tensor(x, bases) if isinstance(x, Form) else x for x in values)
            requests.append((operator, operator.request(self.device, *made)))
        for operator, request in requests:
            operator.prepare(request, self.device)
        for operator, request in requests:
            operator.learn(request, self.device)

    def _bases(self, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Scratch, the tensors of a call and results of the plan's forms."""
        import torch

        results = (torch.empty(x.shape, dtype=x.dtype, device=self.device) for x in self.results)
        return [torch.empty(self.scratch_bytes, dtype=torch.uint8, device=self.device), *tensors, *results]

    def begin(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Begins to compile the kernels of the steps. tensors: of the call; None for those of another shape."""
        bases = [None, *tensors]

        def is_given(x: Form) -> bool:
            return x.base >= _CONSTANTS or (x.base < len(bases) and bases[x.base] is not None)

        for operator, values in self.steps:
            made = (
                x
                if not isinstance(x, Form)
                else self._tensor(x, bases)
                if is_given(x)
                else on_host(x.dtype, x.shape, x.strides, x.offset % ALIGNMENT)
                for x in values
            )
            operator.prepare(operator.request(self.device, *made), self.device)

    def _tensor(self, form: Form, bases: Sequence[torch.Tensor | None]) -> torch.Tensor:
        import torch

        if form.base < 0:
            return torch.empty_strided(form.shape, form.strides, dtype=form.dtype, device=self.device)
        base = bases[form.base] if form.base < _CONSTANTS else self.constants[form.base - _CONSTANTS]
        assert base is not None
        begin = base.storage_offset() * base.element_size() + form.offset
        empty: Any = torch.empty(0, dtype=form.dtype, device=self.device)
        found: torch.Tensor = empty.set_(base.untyped_storage(), begin // form.dtype.itemsize, form.shape, form.strides)
        return found

    def words(self, tensors: Sequence[torch.Tensor | None]) -> list[Any]:
        """The plan as the host module reads it: see fi/host/steps.h. tensors: of a call."""
        whole = [None if x is None else self._place(x) for x in (*self.forms, *self.results)]
        words = [self.scratch_bytes, len(self.forms), *tensors, len(self.results), len(self.constants), *self.constants]
        views: dict[Form, int] = {}
        calls: list[Any] = []
        for operator, values in self.steps:
            calls += [operator.module(self.device)["call"], len(values)]
            for x in values:
                if not isinstance(x, Form):
                    calls += [_CONSTANT, x if x is None or isinstance(x, (bool, float)) else int(x)]
                elif 0 < x.base < _CONSTANTS and x == whole[x.base - 1]:
                    calls += [_TENSOR, x.base]
                else:
                    calls += [_VIEW, views.setdefault(x, len(views))]
        bases = self._bases(tensors)
        words.append(len(views))
        for view in views:
            base = view.base if view.base < _CONSTANTS else view.base - _CONSTANTS + len(whole) + 1
            words += [base, view.offset, self._tensor(view, bases)]
        return words + calls


Launches: TypeAlias = "AtOnce | PlanBuilder"  # what a function that plans its launches calls


class LaunchPlan:
    """The launches of calls whose tensors have certain forms."""

    __slots__ = ("_builder", "_call", "_empty", "_is_list", "_numbers", "_results")

    def __init__(
        self, builder: PlanBuilder, tensors: Sequence[torch.Tensor | None], numbers: list[int], is_list: bool
    ) -> None:
        import torch

        self._builder, self._is_list, self._empty = builder, is_list, torch.empty
        self._numbers = [n - 1 for n in numbers]
        self._results: list[dict[str, Any]] = [
            {"size": x.shape, "dtype": x.dtype, "device": builder.device} for x in builder.results
        ]
        modules = [step.operator.module(builder.device) for step in builder.steps]
        make = next(module["steps"] for module in modules if module.implements_function("steps"))
        self._call: Callable[..., Any] = make(*builder.words(tensors))

    def run(self, workspace: torch.Tensor | None, tensors: tuple[torch.Tensor | None, ...]) -> Any:
        """The result; None: a tensor has another form."""
        builder = self._builder
        if self._results:
            tensors = *tensors, *(self._empty(**result) for result in self._results)
        found = self._call(workspace, *tensors)
        if found is not None and found.__class__ is not int:  # a request; the steps before it may run again
            builder.prepare(tensors[: len(builder.forms)])
            found = self._call(workspace, *tensors)
        if found is not None:
            return None
        results = [tensors[n] for n in self._numbers]
        return results if self._is_list else results[0]


def plans_launches(
    out: str, by: str | None = None, workspace: str = "None", tokens: Mapping[str, int] | None = None
) -> Callable[[Callable[Concatenate[Launches, P], R]], Callable[P, R]]:
    """Decorates a function whose first argument takes its launches; callers leave that out.

    It returns its argument `out`, or a new tensor in its place, or a list of tensors. What it does besides launching
    must depend on numbers and on forms of tensors only. Where torch computes a tensor that a kernel reads, calls are
    not planned, nor where torch traces, a rehearsal runs, or FI_CHECK=1 has every op look at its tensors.

    Args:
        out: the argument that receives the result.
        by: the tensor by whose shape and device plans are told apart first; None: the first one that is required.
        workspace: the argument that is memory for scratch.
        tokens: the axis of tokens of each argument that has one. On CUDA the first call of a layer begins to compile
            the kernels of other numbers of tokens.

    One of the host modules of a plan's steps must export `steps` (FI_STEPS).
    """

    def decorate(function: Callable[Concatenate[Launches, P], R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        parameters = list(signature.parameters.values())[1:]
        own = _Plans(function, parameters, out, workspace, tokens or {})
        tensors = own.tensors
        numbers = [p.name for p in parameters if p not in tensors and p.name != workspace]
        first = by or next(p.name for p in tensors if str(p.annotation) == "torch.Tensor")
        values = ", ".join(f"{p.name}={p.name}" if p.kind is p.KEYWORD_ONLY else p.name for p in parameters)
        everything = f"({', '.join(p.name for p in parameters)},)"
        at_once = f"return function(AtOnce({first}.device, {workspace}), {values})"
        body = [
            "try:",
            "    if not modes() and not rehearsal() and not checks_signs():",
            f"        given = {', '.join(map(_unpacked, tensors))},",
            "        if not (records() and any(x is not None and x.requires_grad for x in given)):",
            f"            key = {first}.shape, {first}.get_device(), {out} is None, {', '.join(numbers)}",
            "            plans = known.get(key, ())",
            "            if plans is not None:",
            "                for plan in plans:",
            f"                    if (found := plan.run({workspace}, given)) is not None:",
            "                        return found",
            f"                if (found := make(key, {first}.device, {everything})) is not None:",
            "                    return found",
            "except Exception as error:",
            f"    recover({everything}, error)",
            at_once,
        ]
        taken = [p.name if p.default is p.empty else f"{p.name}=None" for p in parameters]  # true defaults: below
        positional = sum(p.kind is not p.KEYWORD_ONLY for p in parameters)
        if positional < len(taken):
            taken.insert(positional, "*")
        scope = own.scope
        made: Any = define(function.__name__, taken, body, scope)
        traced: Any = define(f"traced_{function.__name__}", taken, [at_once.replace("),", ", True),", 1)], scope)
        for one in (made, traced):
            one.__defaults__, one.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
        made._torchdynamo_inline, made.begin_other_counts = traced, own.begin_other_counts
        functools.update_wrapper(made, function)
        made.__signature__ = signature.replace(parameters=parameters)
        return made  # type: ignore[no-any-return]

    return decorate


class _Plans:
    """The plans of a function, by what is no tensor in its calls."""

    def __init__(
        self,
        function: Callable[..., Any],
        parameters: Sequence[inspect.Parameter],
        out: str,
        workspace: str,
        tokens: Mapping[str, int],
    ) -> None:
        self.function, self.parameters, self.out, self.workspace = function, parameters, out, workspace
        self.tokens, self.layers = tokens, set[Any]()  # whose kernels have begun to compile
        self.tensors = [p for p in parameters if "torch.Tensor" in str(p.annotation) and p.name != workspace]
        self.known: dict[Any, tuple[LaunchPlan, ...] | None] = {}  # None: calls are not planned
        self.scope: dict[str, Any] = {
            "modes": self._begin, "records": None, "known": self.known, "make": self._make, "recover": self._recover,
            "function": function, "AtOnce": AtOnce, "rehearsal": rehearsal, "checks_signs": checks_signs,
        }  # fmt: skip

    def _begin(self) -> int:
        """Takes the place of `modes` until the first call: declaring functions must not import torch."""
        self.scope.update(torch_op.signals())
        return self.scope["modes"]()  # type: ignore[no-any-return]

    def _make(self, key: Any, device: torch.device, values: tuple[Any, ...]) -> Any:
        """The result of a call of a new form, whose plan is kept; None: calls of its kind are not planned."""
        named = dict(zip((p.name for p in self.parameters), values))
        tensors = tuple(x for p in self.tensors for x in _listed(p, named[p.name]))
        if any(x is not None and torch_op.unreadable(x) for x in tensors):
            return None
        builder = PlanBuilder(device, tensors)
        given_out, returned = self._list(builder, named)
        for op in {step.operator.op: None for step in builder.steps}:
            begin_module(op, device.type)
        if device.type == "cuda":
            self.begin_other_counts(device, named)
        numbers = builder.finished(given_out, returned)
        if len(self.known) >= _MOST_KEYS:
            self.known.clear()
        if numbers is None or not builder.steps:
            builder.prepare(tensors)
            self.known[key] = None
            return None
        plan = LaunchPlan(builder, tensors, *numbers)
        self.known[key] = (plan, *(self.known.get(key) or ()))[:_MOST_PLANS]
        return plan.run(named.get(self.workspace), tensors)

    def _list(self, builder: PlanBuilder, named: dict[str, Any]) -> tuple[Any, Any]:
        """(the form of the argument `out`, what the function returns) where it lists its launches."""
        forms, given = iter(builder.forms), dict(named)
        for p in self.tensors:
            found = [next(forms) for _ in _listed(p, named[p.name])]
            given[p.name] = found if isinstance(named[p.name], (tuple, list)) else found[0] if found else None
        return given[self.out], self.function(builder, **given)

    def begin_other_counts(self, device: torch.device, named: dict[str, Any]) -> None:
        """Begins to compile the kernels that a layer reaches with other numbers of tokens, once for a layer.

        named: the arguments of a call.
        """
        listed = [(x, self.tokens.get(p.name)) for p in self.tensors for x in _listed(p, named[p.name])]

        def shapes(count: int) -> list[tuple[int, ...] | None]:
            return [
                x if x is None else tuple(count if dim == axis else n for dim, n in enumerate(x.shape))
                for x, axis in listed
            ]

        numbers = (v for p, v in named.items() if p != self.workspace and p not in {t.name for t in self.tensors})
        layer = str(device), tuple(shapes(0)), tuple(x if x is None else x.dtype for x, _ in listed), tuple(numbers)
        if not self.tokens or layer in self.layers:
            return
        self.layers.add(layer)
        for count in TOKEN_COUNTS:
            builder = PlanBuilder(device, [x for x, _ in listed], shapes(count))
            with contextlib.suppress(
                ValueError, NotImplementedError, MemoryError, RuntimeError
            ):  # no call waits for it
                self._list(builder, named)
                builder.begin([x if axis is None else None for x, axis in listed])

    def _recover(self, values: tuple[Any, ...], error: Exception) -> None:
        """Raises the error of a call, unless a tensor is one that only the ops themselves can take or refuse, or a
        value is no part of a key, as a list is not.
        """
        tensors = [x for p, value in zip(self.parameters, values) if p in self.tensors for x in _listed(p, value)]
        plain = (value for p, value in zip(self.parameters, values) if p not in self.tensors)
        if all(isinstance(value, Hashable) for value in plain) and not any(
            x is not None and torch_op.unreadable(x) for x in tensors
        ):
            raise torch_op.without_frames(error)


def _is_listed(p: inspect.Parameter) -> bool:
    return "[torch.Tensor" in str(p.annotation)


def _unpacked(p: inspect.Parameter) -> str:
    """Python code for the tensors of an argument, as items of a tuple."""
    if not _is_listed(p):
        return p.name
    return f"*({p.name} if isinstance({p.name}, (tuple, list)) else () if {p.name} is None else ({p.name},))"


def _listed(p: inspect.Parameter, value: Any) -> Sequence[Any]:
    """The tensors of an argument, as `_unpacked` has them."""
    if not _is_listed(p):
        return (value,)
    return value if isinstance(value, (tuple, list)) else () if value is None else (value,)
