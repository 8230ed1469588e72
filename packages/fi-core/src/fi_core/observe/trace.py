"""fi_trace: the benchmark definition of an op call, asked for or written as calls pass by (FI_TRACE_DUMP)."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fi_core.observe.comparison import default_check, default_tolerances, standard_check
from fi_core.observe.describe import axes_of, dispatcher, options, samples, sized, tensors, words
from fi_core.observe.solution import BuildSpec, Solution, SourceFile, SupportedBindings, SupportedLanguages
from fi_core.observe.template import (
    Const,
    Scalar,
    Tensor,
    TraceTemplate,
    Var,
    Work,
    sets_any,
    write_definition,
)
from fi_core.runtime.env import env

__all__ = [
    "BuildSpec",
    "Const",
    "Scalar",
    "Solution",
    "SourceFile",
    "SupportedBindings",
    "SupportedLanguages",
    "Tensor",
    "TraceTemplate",
    "Var",
    "Work",
    "attach_trace",
    "auto_dump",
    "axes_of",
    "call_arguments",
    "default_check",
    "default_tolerances",
    "dispatcher",
    "fi_trace",
    "options",
    "samples",
    "standard_check",
    "sized",
    "template_problems",
    "tensors",
    "words",
]

F = TypeVar("F", bound=Callable[..., Any])
Dispatcher = Callable[..., "TraceTemplate | None"]  # fn(save_dir=None, name=None, **arguments), with .templates
Trace = TraceTemplate | Dispatcher
# Arguments that an object holds since its `plan`: by name an attribute of the object, or a function of it.
Planned = Mapping[str, "str | Callable[[Any], Any]"]

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


def template_problems(func: Callable[..., Any], template: TraceTemplate, planned: Planned | None = None) -> list[str]:
    """The errors of a template of an op, in words; empty if there is none."""
    parameters = _parameters(func)
    return list(template.problems(parameters if parameters is None else [*parameters, *(planned or ())]))


def planned_arguments(owner: Any, planned: Planned) -> dict[str, Any]:
    """Arguments that the `plan` of an object stored."""
    return {name: getattr(owner, of) if isinstance(of, str) else of(owner) for name, of in planned.items()}


def call_arguments(arguments: Mapping[str, Any], planned: Planned | None = None, owner: Any = None) -> dict[str, Any]:
    """All arguments of a call: its own, and for a method those that its object holds. Its own win."""
    result = dict(arguments)
    if planned and owner is not None:
        held = planned_arguments(owner, planned)
        result.update((name, value) for name, value in held.items() if result.get(name) is None)
    return result


def attach_trace(func: F, trace: Trace, planned: Planned | None = None) -> None:
    """Give an op `fi_trace` (and `fi_init`) and put its templates into the registry."""
    templates = [trace] if isinstance(trace, TraceTemplate) else list(getattr(trace, "templates", ()))
    for template in templates:
        problems = template_problems(func, template, planned)
        if problems:
            text = "; ".join(problems)
            warnings.warn(f"no trace for {_api_name(func)}: {template.op_type}: {text}", stacklevel=3)
            return
    for template in templates:
        _TRACE_REGISTRY.append((func, template, template.name_prefix or template.op_type))

    def traced(save_dir: str | Path | None = None, name: str | None = None, **arguments: Any) -> dict[str, Any]:
        if not isinstance(save_dir, (str, Path, type(None))):
            came = type(save_dir).__name__
            raise TypeError(f"{func.__name__}.fi_trace: arguments are taken by name; got a {came} alone")
        given = call_arguments(arguments, planned, arguments.pop("self", None))
        try:
            definition = _definition(func, trace, given, save_dir, name)
        except KeyError as missing:
            raise TypeError(f"{func.__name__}.fi_trace: the argument {missing} is required") from None
        if definition is None:
            raise ValueError(f"{_api_name(func)}: no trace template covers these arguments")
        if save_dir is not None:
            write_definition(definition, Path(save_dir))
        return definition

    traced.trace, traced.planned = trace, planned  # type: ignore[attr-defined]
    func.fi_trace = traced  # type: ignore[attr-defined]
    if isinstance(trace, TraceTemplate) and callable(trace.init):
        func.fi_init = trace.init  # type: ignore[attr-defined]


class Described(NamedTuple):
    """A public function, or the `run` of a wrapper, with a description that makes its inputs."""

    function: Callable[..., Any]
    template: TraceTemplate

    @property
    def wrapper(self) -> type | None:
        """The class that `function` is the `run` of."""
        name = self.function.__qualname__.rpartition(".")[0]
        return getattr(sys.modules[self.function.__module__], name) if name else None

    @property
    def name(self) -> str:
        """The public name, of a wrapper that of its class."""
        return self.wrapper.__name__ if self.wrapper else self.function.__name__

    def own(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of the function itself: not those that a wrapper holds since its `plan`."""
        if self.wrapper is None:
            return dict(arguments)
        held, parameters = self.function.fi_trace.planned, inspect.signature(self.function).parameters  # type: ignore[attr-defined]
        return {name: value for name, value in arguments.items() if name in parameters and name not in held}

    def bind(self, arguments: Mapping[str, Any]) -> Callable[..., Any]:
        """The function, or `run` of a wrapper that is planned for these arguments."""
        if self.wrapper is None:
            return self.function
        assert self.template.plan is not None
        return self.template.plan(self.wrapper, arguments).run  # type: ignore[no-any-return]

    def call(self, arguments: Mapping[str, Any]) -> Any:
        """The result of the function."""
        return self.bind(arguments)(**self.own(arguments))


def traced_functions() -> dict[Callable[..., Any], list[TraceTemplate]]:
    """The functions with templates, of the families that are loaded."""
    found: dict[Callable[..., Any], list[TraceTemplate]] = {}
    for function, template, _ in _TRACE_REGISTRY:
        found.setdefault(function, []).append(template)
    return found


def every_described() -> Iterator[Described]:
    """All descriptions that make inputs, of the families that are loaded."""
    return (Described(function, template) for function, template, _ in _TRACE_REGISTRY if template.make is not None)


def fi_trace(
    func_or_method: Callable[..., Any], save_dir: str | Path | None = None, name: str | None = None, **arguments: Any
) -> dict[str, Any]:
    """The definition of a call of `func_or_method`, an op or a bound or unbound method.

    It is written to `save_dir` if that is given.

    Nothing is computed: only the shapes and dtypes of the arguments are read. A bound method reads the arguments of
    `plan` from its object; an unbound one takes them as arguments too.
    """
    traced = getattr(func_or_method, "fi_trace", None)
    if traced is None:
        came = getattr(func_or_method, "__qualname__", func_or_method)
        raise ValueError(f"func_or_method: an op with a trace template is required, got {came}")
    if inspect.ismethod(func_or_method):
        arguments["self"] = func_or_method.__self__
    return traced(save_dir=save_dir, name=name, **arguments)  # type: ignore[no-any-return]


def select_template(
    func: Callable[..., Any],
    trace: Trace,
    arguments: Mapping[str, Any],
    save_dir: str | Path | None = None,
    name: str | None = None,
) -> TraceTemplate | None:
    """The template of a call; None if a dispatcher has none for it, or if the call sets what the reference ignores."""
    found = trace if isinstance(trace, TraceTemplate) else trace(save_dir=save_dir, name=name, **arguments)
    if found is None:
        return None
    usual = _defaults(func)  # what has none is given in every call
    changed = [other for other in found.others if other in usual and not _same(arguments.get(other), usual[other])]
    return None if sets_any(arguments, *changed) else found


def _same(value: Any, usual: Any) -> bool:
    return value is usual or (isinstance(value, (int, float, str)) and value == usual)


@functools.cache
def _defaults(func: Callable[..., Any]) -> dict[str, Any]:
    return {name: p.default for name, p in inspect.signature(func).parameters.items() if p.default is not p.empty}


def _definition(
    func: Callable[..., Any],
    trace: Trace,
    arguments: Mapping[str, Any],
    save_dir: str | Path | None = None,
    name: str | None = None,
) -> dict[str, Any] | None:
    template = select_template(func, trace, arguments, save_dir, name)
    return None if template is None else template.definition(_api_name(func), arguments, name)


def auto_dump(func: F, trace: Trace, planned: Planned | None = None) -> F:
    """Wrap an op so that each new definition is written to FI_TRACE_DUMP_DIR, before the call."""
    signature = inspect.signature(func)

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        directory = env.trace_dump_dir
        if directory is not None:
            try:
                _dump_call(func, trace, planned, signature, args, kwargs, directory)
            except Exception as error:  # a trace never stops the call
                _warn_once(_api_name(func), error)
        return func(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def _dump_call(
    func: Callable[..., Any],
    trace: Trace,
    planned: Planned | None,
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    directory: Path,
) -> None:
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    owner = arguments.pop("self", None)
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments.update(arguments.pop(parameter.name, {}))
    definition = _definition(func, trace, call_arguments(arguments, planned, owner))
    if definition is not None and definition["name"] not in _dumped:
        write_definition(definition, directory)
        _dumped.add(definition["name"])


def _warn_once(api: str, error: Exception) -> None:
    if (api, type(error)) not in _warned:
        _warned.add((api, type(error)))
        warnings.warn(f"no trace of {api}: {type(error).__name__}: {error}", stacklevel=3)
