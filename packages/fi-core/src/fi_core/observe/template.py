"""TraceTemplate: the description of an op as data, and how a call fills it in.

Axes, inputs, outputs and reference give the benchmark definition of a call (`definition`). With `make`, `work` and
`tolerance` the same description gives tests and benchmark cases their arguments (`sample`), expected outputs
(`expected`), operations and bytes, and the allowed error (`tolerance_of`).
"""

from __future__ import annotations

import inspect
import json
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fi_core.observe.comparison import default_tolerances
from fi_core.observe.draw import Draw, dtype_of, nbytes
from fi_core.runtime import files


@dataclass(frozen=True)
class Var:
    """An axis that changes from call to call, such as the batch."""

    description: str = ""


@dataclass(frozen=True)
class Const:
    """An axis that a model fixes; its value is part of the definition's name, as `abbrev` (default: the axis name)."""

    description: str = ""
    abbrev: str | None = None  # "" keeps the axis out of the name
    value: int | None = None


@dataclass(frozen=True)
class Tensor:
    """A tensor argument or result; `dim_names` are axes of the template."""

    dim_names: Sequence[str]
    _: KW_ONLY
    param: str | None = None  # parameter of the op; default: the name in the template
    tuple_idx: int | None = None  # which member, if the parameter is a tuple
    dtype: str | None = None
    dtype_from: str | None = None  # an input of the template with the same dtype
    dtype_from_scalar: str | None = None  # a parameter that holds the dtype
    optional: bool = False
    description: str = ""


@dataclass(frozen=True)
class Scalar:
    """A plain number among the arguments."""

    dtype: str = "float32"
    _: KW_ONLY
    param: str | None = None
    optional: bool = False
    description: str = ""


Source = Callable[..., Any] | str | Sequence[Callable[..., Any]]  # of several functions the last is the source's own


class Work(NamedTuple):
    """The least work of a call: operations, bytes to and from memory, and the unit that executes the operations."""

    flops: int
    bytes: int
    unit: str = "matmul"  # or matmul_fp8


@dataclass(frozen=True)
class TraceTemplate:
    """The description of an op, from which definitions, tests and benchmark cases are derived.

    op         names in fi_core's registry of the ops that the function launches
    reference  the function in fp64, or exact; its text is whole in itself (helpers first, if it is several functions)
    make       (draw, **sizes) -> the arguments of one call by parameter; `draw` is a `Draw`, sizes have defaults
    plan       (wrapper class, arguments) -> a planned wrapper, if the function is its `run`; arguments of the
               constructor and of `plan` are then arguments of the call too
    written    of the inputs as the reference takes them: the elements of outputs that a call writes, where these are
               not all, as booleans by output that broadcast
    samples    sizes and dtypes for tests, as the function `samples` gives them; (): the defaults of `make`
    work       arguments -> Work; or a number: so many operations an element of the outputs, and every tensor once
    eager      the function in eager torch, of the same arguments as the reference and in their dtypes: a peer
    tolerance  (rtol, atol) by output name or by dtype, where `default_tolerances` does not fit
    others     parameters that the reference does not know: a call that sets one has no description
    """

    op_type: str
    axes: Mapping[str, Var | Const]
    inputs: Mapping[str, Tensor | Scalar]
    outputs: Mapping[str, Tensor | Scalar]
    _: KW_ONLY
    name_prefix: str | None = None
    reference: Source | None = None
    check: Source | None = None
    init: Source | None = None
    constraints: Sequence[str] = None  # type: ignore[assignment]  # None, as FlashInfer has it: no constraints
    tags: Sequence[str] = None  # type: ignore[assignment]
    description: str = ""
    op: str | Sequence[str] = ()
    make: Callable[..., dict[str, Any]] | None = None
    plan: Callable[[Callable[..., Any], Mapping[str, Any]], Any] | None = None
    written: Callable[..., Mapping[str, Any]] | None = None
    samples: Sequence[Mapping[str, Any]] = field(default=())
    work: Callable[[Mapping[str, Any]], Work] | int | None = None
    eager: Callable[..., Any] | None = None
    tolerance: Mapping[Any, tuple[float, float]] = field(default_factory=dict)
    others: Sequence[str] = field(default=())

    def __post_init__(self) -> None:
        for name in ("constraints", "tags"):
            object.__setattr__(self, name, getattr(self, name) or ())

    @property
    def ops(self) -> tuple[str, ...]:
        """The names in `op`."""
        return (self.op,) if isinstance(self.op, str) else tuple(self.op)

    def sample(self, device: Any = "cpu", generator: Any = 0, nasty: bool = True, **sizes: Any) -> dict[str, Any]:
        """The arguments of one call by parameter, from `make`. generator: a torch generator, or a seed."""
        if self.make is None:
            raise ValueError(f"{self.op_type}: its description makes no arguments")
        return self.make(Draw(device, generator, nasty), **sizes)

    def values(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs of the template by name, as the reference takes them; tuples are split into their members."""
        found = {}
        for key, entry in self.inputs.items():
            value = arguments.get(entry.param or key)
            if isinstance(entry, Tensor) and entry.tuple_idx is not None and value is not None:
                value = _member(value, entry.tuple_idx)
            if value is not None:
                found[key] = value
        return found

    def target(self, output: str, arguments: Mapping[str, Any]) -> Any:
        """The argument of a call that receives an output; None: the output is returned."""
        entry = self.outputs[output]
        found = arguments.get(entry.param) if entry.param else None
        member = None if found is None or not isinstance(entry, Tensor) else entry.tuple_idx
        return found if member is None else _member(found, member)

    def results(self, arguments: Mapping[str, Any], returned: Any) -> dict[str, Any]:
        """The outputs of a call by name: arguments that it wrote, then the returned tensors in order."""
        rest = iter(returned if isinstance(returned, (tuple, list)) else [returned])
        targets = {key: self.target(key, arguments) for key in self.outputs}
        return {key: next(rest) if target is None else target for key, target in targets.items()}

    def expected(self, arguments: Mapping[str, Any], reference: Callable[..., Any] | None = None) -> dict[str, Any]:
        """The outputs of the reference by name, for arguments as they are before a call; they stay as they are."""
        import torch

        source = reference or self.reference
        function = source[-1] if isinstance(source, Sequence) and not isinstance(source, str) else source
        if not callable(function):
            raise ValueError(f"{self.op_type}: its reference is not a function")
        given = self.values(arguments)
        outputs = function(**{k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in given.items()})
        return dict(zip(self.outputs, outputs if isinstance(outputs, tuple) else (outputs,)))

    def where_written(
        self, arguments: Mapping[str, Any], got: Mapping[str, Any], want: Mapping[str, Any]
    ) -> dict[str, Any]:
        """`want` where a call writes, and `got` elsewhere."""
        written = self.written(**self.values(arguments)) if self.written else {}
        return {
            name: value.double().where(written[name], got[name].to(value.device).double())
            if name in written and got[name].shape == value.shape
            else value
            for name, value in want.items()
        }

    def layouts(self, arguments: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of each output of a call; its axes are axes of inputs or follow from `constraints`."""
        sizes: dict[str, int] = {}
        for key, entry in self.inputs.items():
            if isinstance(entry, Tensor) and (given := _given(key, entry, arguments)) is not None:
                sizes |= zip(entry.dim_names, given.shape)
        for axis, _, size in (constraint.partition(" == ") for constraint in self.constraints):
            if axis in self.axes and axis not in sizes:
                sizes[axis] = eval(size, {}, sizes)
        tensors = {key: entry for key, entry in self.outputs.items() if isinstance(entry, Tensor)}
        for axis in {axis for entry in tensors.values() for axis in entry.dim_names} - set(sizes):
            raise ValueError(f"{self.op_type}: no input has the axis {axis!r}; tell it by a constraint '{axis} == ...'")
        return {
            key: (tuple(sizes[axis] for axis in entry.dim_names), self._declared_dtype(entry, arguments))
            for key, entry in tensors.items()
        }

    def work_of(self, arguments: Mapping[str, Any]) -> Work:
        """The least work of a call."""
        if self.work is None:
            raise ValueError(f"{self.op_type}: its description counts no work")
        if callable(self.work):
            return self.work(arguments)
        counted = [(math.prod(shape), dtype_of(dtype).itemsize) for shape, dtype in self.layouts(arguments).values()]
        written = sum(count * size for count, size in counted)
        operations = self.work * sum(count for count, _ in counted)
        return Work(operations, nbytes(*self.values(arguments).values()) + written)

    def tolerance_of(self, output: str, dtype: Any) -> tuple[float, float]:
        """(rtol, atol) of an output."""
        own = self.tolerance.get(output, self.tolerance.get(_dtype_name(dtype)))
        return default_tolerances(dtype) if own is None else own

    def problems(self, parameters: Sequence[str] | None = None) -> Iterator[str]:
        """The errors of the template. parameters: those of the op, None if it takes any."""
        names = {entry.param or key for key, entry in self.inputs.items()}
        names |= {entry.param for entry in self.outputs.values() if entry.param}
        if parameters is not None:
            yield from (f"param {name!r} is not a parameter of the op" for name in sorted(names - set(parameters)))
        known = names | set(parameters or self.axes)
        shaped = [entry for entry in self.inputs.values() if isinstance(entry, Tensor)]
        for axis, kind in self.axes.items():
            from_call = axis in known or axis in self.inputs or any(axis in entry.dim_names for entry in shaped)
            if isinstance(kind, Const) and kind.value is None and not from_call:
                yield f"axis {axis!r} is constant, but nothing in a call tells its value"
        for key, entry in (*self.inputs.items(), *self.outputs.items()):
            if isinstance(entry, Tensor):
                yield from (f"{key!r} has the undeclared axis {a!r}" for a in entry.dim_names if a not in self.axes)
                if entry.dtype_from is not None and entry.dtype_from not in self.inputs:
                    yield f"{key!r} takes its dtype from {entry.dtype_from!r}, which is not an input"
        for key, entry in self.outputs.items():
            if isinstance(entry, Tensor) and not (entry.dtype or entry.dtype_from or entry.dtype_from_scalar):
                if not any(set(entry.dim_names) & set(other.dim_names) for other in shaped):
                    yield f"the dtype of output {key!r} is unknown"

    def definition(self, api: str, arguments: Mapping[str, Any], name: str | None = None) -> dict[str, Any]:
        """The JSON-ready benchmark definition of one call, from shapes and dtypes only."""
        values = self._axis_values(arguments)
        result: dict[str, Any] = {
            "name": name or self.definition_name(values),
            "description": self.description,
            "op_type": self.op_type,
            "tags": [f"fi_api:{api}", *self.tags],
            "axes": {axis: _axis_entry(kind, values[axis]) for axis, kind in self.axes.items()},
        }
        if self.constraints:
            result["constraints"] = list(self.constraints)
        result["inputs"] = {key: self._entry(key, entry, arguments, False) for key, entry in self.inputs.items()}
        result["outputs"] = {key: self._entry(key, entry, arguments, True) for key, entry in self.outputs.items()}
        for key in ("reference", "check", "init"):
            text = _source_text(getattr(self, key))
            if text is not None:
                result[key] = text
        return result

    def build_fi_trace_fn(self, fi_api: str) -> Callable[..., dict[str, Any]]:
        """A function `(save_dir=None, name=None, **arguments)` that gives the definition of a call.

        Args:
            fi_api: the name of the op, "norm.rmsnorm".
        """

        def fi_trace(save_dir: str | Path | None = None, name: str | None = None, **arguments: Any) -> dict[str, Any]:
            definition = self.definition(fi_api, arguments, name)
            if save_dir is not None:
                write_definition(definition, Path(save_dir))
            return definition

        return fi_trace

    def name_of(self, arguments: Mapping[str, Any]) -> str:
        """The name of the definition of a call."""
        return self.definition_name(self._axis_values(arguments))

    def _axis_values(self, arguments: Mapping[str, Any]) -> dict[str, int | None]:
        return {axis: self._axis_value(axis, kind, arguments) for axis, kind in self.axes.items()}

    def definition_name(self, axis_values: Mapping[str, int | None]) -> str:
        """The name of a definition: the op and the values of its constant axes, "gemm_n4096_k512"."""
        parts = [self.name_prefix or self.op_type]
        for axis, kind in self.axes.items():
            value = axis_values.get(axis)
            if isinstance(kind, Const) and kind.abbrev != "" and value is not None:
                parts.append(f"{axis if kind.abbrev is None else kind.abbrev}{value}")
        return "_".join(parts)

    def _axis_value(self, axis: str, kind: Var | Const, arguments: Mapping[str, Any]) -> int | None:
        if isinstance(kind, Var):
            return None
        if kind.value is not None:
            return kind.value
        tensors = [(k, e) for k, e in self.inputs.items() if isinstance(e, Tensor) and axis in e.dim_names]
        for optional in (False, True):
            for key, entry in tensors:
                if entry.optional is optional and (given := _given(key, entry, arguments)) is not None:
                    return given.shape[list(entry.dim_names).index(axis)]
            if not optional:
                scalar = self.inputs.get(axis)
                number = arguments.get((scalar.param if scalar else None) or axis)
                if isinstance(number, int):
                    return int(number)
        return None

    def _entry(self, key: str, entry: Tensor | Scalar, arguments: Mapping[str, Any], output: bool) -> dict[str, Any]:
        if isinstance(entry, Scalar):
            result: dict[str, Any] = {"shape": None, "dtype": entry.dtype}
        else:
            given = None if output else _given(key, entry, arguments)
            dtype = self._declared_dtype(entry, arguments) if given is None else given.dtype
            result = {"shape": list(entry.dim_names), "dtype": dtype}
        if entry.optional:
            result["optional"] = True
        if entry.description:
            result["description"] = entry.description
        if output and entry.param:
            result["param"] = entry.param
        return result

    def _declared_dtype(self, entry: Tensor, arguments: Mapping[str, Any]) -> str:
        """The dtype of an output, or of an optional input that is not given."""
        source = self.inputs.get(entry.dtype_from) if entry.dtype_from else None
        if isinstance(source, Tensor):
            given = _given(entry.dtype_from or "", source, arguments)
            if given is not None:
                return given.dtype
        if entry.dtype_from_scalar and arguments.get(entry.dtype_from_scalar) is not None:
            return _dtype_name(arguments[entry.dtype_from_scalar])
        if entry.dtype:
            return entry.dtype
        for key, other in self.inputs.items():
            if isinstance(other, Tensor) and set(other.dim_names) & set(entry.dim_names):
                given = _given(key, other, arguments)
                if given is not None:
                    return given.dtype
        return "unknown"


def write_definition(definition: Mapping[str, Any], directory: Path) -> None:
    """Writes a definition to a file of its name."""
    files.write(directory / f"{definition['name']}.json", json.dumps(definition, indent=2))


_UNSET = (1, -1, "NHD", "NONE", ())  # a scale, a window, a layout, a position encoding, further arguments


def sets_any(arguments: Mapping[str, Any], *names: str) -> bool:
    """Whether a call sets one of these arguments; a reference without them does not describe such a call."""

    def is_set(value: Any) -> bool:
        if value is None or isinstance(value, bool):
            return bool(value)
        return not isinstance(value, (int, float, str, tuple)) or value not in _UNSET

    return any(is_set(arguments.get(name)) for name in names)


def _axis_entry(kind: Var | Const, value: int | None) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "var"}
    if isinstance(kind, Const):
        entry = {"type": "const", "value": value}
    if kind.description:
        entry["description"] = kind.description
    return entry


class _Given(NamedTuple):
    """Shape and dtype of a tensor that a call passes."""

    shape: tuple[int, ...]
    dtype: str


def _given(key: str, entry: Tensor, arguments: Mapping[str, Any]) -> _Given | None:
    """The tensor that a call passes for an entry; None if it passes none."""
    name = entry.param or key
    value = arguments.get(name)
    member = isinstance(value, (tuple, list))
    if isinstance(value, (tuple, list)):
        index = entry.tuple_idx or 0
        value = value[index] if len(value) > index else None
    if value is None or not (hasattr(value, "shape") and hasattr(value, "dtype")):
        return None
    shape = tuple(int(size) for size in value.shape)
    if entry.tuple_idx is not None and not member:
        shape = (shape[0], *shape[2:])  # the members are fused along axis 1, as in a paged KV cache of one tensor
    if len(shape) != len(entry.dim_names):
        raise ValueError(f"{name}: axes {list(entry.dim_names)} are required, got shape {tuple(value.shape)}")
    return _Given(shape, _dtype_name(value.dtype))


def _member(value: Any, index: int) -> Any:
    """A member of a tuple; of one tensor that fuses them along axis 1, the view."""
    return value[index] if isinstance(value, (tuple, list)) else value.select(1, index)


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _source_text(source: Source | None) -> str | None:
    if source is None or isinstance(source, str):
        return source
    functions = (source,) if callable(source) else source
    try:
        return "\n\n".join(textwrap.dedent(inspect.getsource(function)) for function in functions)
    except (OSError, TypeError):  # built in, or defined where no file holds the text
        return None
