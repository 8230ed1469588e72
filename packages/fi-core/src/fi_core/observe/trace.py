"""fi_trace: the benchmark definition of an op call, asked for or written as calls pass by (FI_TRACE_DUMP)."""

from __future__ import annotations

import functools
import inspect
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from fi_core.env import env
from fi_core.observe.template import (
    Const,
    Scalar,
    Tensor,
    TraceTemplate,
    Var,
    default_check,
    default_tolerances,
)

__all__ = [
    "Const",
    "Scalar",
    "Tensor",
    "TraceTemplate",
    "Var",
    "attach_trace",
    "auto_dump",
    "default_check",
    "default_tolerances",
    "fi_trace",
    "template_problems",
]

F = TypeVar("F", bound=Callable[..., Any])
Dispatcher = Callable[..., "TraceTemplate | None"]  # fn(save_dir=None, name=None, **arguments), with .templates
Trace = TraceTemplate | Dispatcher

_TRACE_REGISTRY: list[tuple[Callable[..., Any], TraceTemplate, str]] = []  # (op, template, label)
_dumped: set[str] = set()
_warned: set[tuple[str, type]] = set()


def _api_name(func: Callable[..., Any]) -> str:
    return f"{func.__module__}.{func.__qualname__}"


def _parameters(func: Callable[..., Any]) -> list[str] | None:
    """The parameter names of an op, without self; None if it takes any keyword."""
    parameters = inspect.signature(func).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return None
    return [name for name in parameters if name != "self"]


def template_problems(func: Callable[..., Any], template: TraceTemplate) -> list[str]:
    """What is wrong with the template of an op, in words; empty if nothing."""
    return list(template.problems(_parameters(func)))


def attach_trace(func: F, trace: Trace) -> None:
    """Give an op `fi_trace` (and `fi_init`) and put its templates into the registry."""
    templates = [trace] if isinstance(trace, TraceTemplate) else list(getattr(trace, "templates", ()))
    for template in templates:
        problems = template_problems(func, template)
        if problems:
            text = "; ".join(problems)
            warnings.warn(f"no trace for {_api_name(func)}: {template.op_type}: {text}", stacklevel=3)
            return
    for template in templates:
        _TRACE_REGISTRY.append((func, template, template.name_prefix or template.op_type))

    def traced(save_dir: str | Path | None = None, name: str | None = None, **arguments: Any) -> dict[str, Any]:
        definition = _definition(func, trace, arguments, save_dir, name)
        if definition is None:
            raise ValueError(f"{_api_name(func)}: no trace template covers these arguments")
        if save_dir is not None:
            _write(definition, Path(save_dir))
        return definition

    func.fi_trace = traced  # type: ignore[attr-defined]
    if isinstance(trace, TraceTemplate) and callable(trace.init):
        func.fi_init = trace.init  # type: ignore[attr-defined]


def fi_trace(
    func: Callable[..., Any], save_dir: str | Path | None = None, name: str | None = None, **arguments: Any
) -> dict[str, Any]:
    """The definition of a call of `func`, an op or a bound or unbound method; written to `save_dir` if that is given.

    Nothing is computed: the arguments only lend their shapes and dtypes.
    """
    traced = getattr(func, "fi_trace", None)
    if traced is None:
        raise ValueError(f"func: an op with a trace template is required, got {getattr(func, '__qualname__', func)}")
    return traced(save_dir=save_dir, name=name, **arguments)  # type: ignore[no-any-return]


def _definition(
    func: Callable[..., Any],
    trace: Trace,
    arguments: Mapping[str, Any],
    save_dir: str | Path | None = None,
    name: str | None = None,
) -> dict[str, Any] | None:
    template = trace if isinstance(trace, TraceTemplate) else trace(save_dir=save_dir, name=name, **arguments)
    return None if template is None else template.definition(_api_name(func), arguments, name)


def _write(definition: Mapping[str, Any], directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{definition['name']}.json"
    path.write_text(json.dumps(definition, indent=2), encoding="utf-8")


def auto_dump(func: F, trace: Trace) -> F:
    """Wrap an op so that each new definition is written to FI_TRACE_DUMP_DIR, before the call."""
    signature = inspect.signature(func)

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        directory = env.trace_dump_dir
        if directory is not None:
            try:
                _dump_call(func, trace, signature, args, kwargs, directory)
            except Exception as error:  # a trace never stops the call
                _warn_once(_api_name(func), error)
        return func(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def _dump_call(
    func: Callable[..., Any],
    trace: Trace,
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    directory: Path,
) -> None:
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    arguments.pop("self", None)
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments.update(arguments.pop(parameter.name, {}))
    definition = _definition(func, trace, arguments)
    if definition is not None and definition["name"] not in _dumped:
        _write(definition, directory)
        _dumped.add(definition["name"])


def _warn_once(api: str, error: Exception) -> None:
    if (api, type(error)) not in _warned:
        _warned.add((api, type(error)))
        warnings.warn(f"no trace of {api}: {type(error).__name__}: {error}", stacklevel=3)
