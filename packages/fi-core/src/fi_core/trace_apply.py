"""Runs other implementations in place of public functions: by the names of the definitions that their calls have."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fi_core.observe.solution import Solution
from fi_core.observe.template import TraceTemplate
from fi_core.observe.trace import call_arguments, select_template, traced_functions
from fi_core.registry import load
from fi_core.runtime.env import env

__all__ = ["Solution", "disable_apply", "enable_apply", "is_enabled", "stats"]

Function = Callable[..., Any]
_solutions: dict[str, tuple[Function, bool]] = {}  # by definition: the function, and whether outputs are arguments
_wrapped: dict[Function, Function] = {}  # by the function that stands in: the one behind it
_counts: Counter[tuple[str, str]] = Counter()
_folders = contextlib.ExitStack()  # of the sources of solutions


def enable_apply(solutions: Mapping[str, Any] | None = None) -> int:
    """Has calls of public functions, and `run` of wrappers, run solutions, by the names of their definitions.

    The name of a call is that of its `fi_trace`. A solution takes the inputs of the definition by keyword, None for one
    that the call lacks, and returns its outputs in order; outputs that are arguments of the call are copied into them.
    A call whose name has no solution runs as before, and an error of a solution is the caller's. A second call replaces
    the solutions.

    Args:
        solutions: a function, or a `Solution` in Python, by name of a definition; None: the solutions in
            `FI_TRACE_APPLY_PATH/solutions/**/*.json`, none without it.

    Returns:
        How many attributes of modules and classes were replaced.

    Raises:
        TypeError: a solution is neither a function nor a `Solution`.
        NotImplementedError: a `Solution` has to be compiled.
    """
    if solutions is None:
        folder = env.trace_apply_path
        files = sorted(folder.glob("solutions/**/*.json")) if folder else []
        read = [Solution.from_dict(json.loads(file.read_text(encoding="utf-8"))) for file in files]
        solutions = {solution.definition: solution for solution in read}
    with contextlib.ExitStack() as folders:
        loaded = {name: _callable_of(name, solution, folders) for name, solution in solutions.items()}
        disable_apply()
        _folders.push(folders.pop_all())
    _solutions.update(loaded)
    if not loaded:
        return 0
    load()
    count = 0
    for function, templates in traced_functions().items():
        prefixes = {template.name_prefix or template.op_type for template in templates}
        if any(name == prefix or name.startswith(f"{prefix}_") for name in loaded for prefix in prefixes):
            for owner, attribute, value in _places(function):
                stand_in = next((s for s, behind in _wrapped.items() if behind is value), None)
                if stand_in is None:
                    stand_in = _standing_in(function, value)
                    _wrapped[stand_in] = value
                setattr(owner, attribute, stand_in)
                count += 1
    return count


def disable_apply() -> None:
    """Restores all functions, and forgets solutions and counts."""
    for owner in _owners():
        for attribute, value in list(vars(owner).items()):
            if inspect.isfunction(value) and value in _wrapped:
                setattr(owner, attribute, _wrapped[value])
    _wrapped.clear()
    _solutions.clear()
    _counts.clear()
    _folders.close()


def is_enabled() -> bool:
    """Whether any function is replaced."""
    return bool(_wrapped)


def stats() -> dict[str, dict[str, int]]:
    """By function, how many calls ran a solution ("hit"), had none ("fallback_no_candidate") or failed ("error")."""
    found: dict[str, dict[str, int]] = {}
    for (api, outcome), count in _counts.items():
        found.setdefault(api, {})[outcome] = count
    return found


def _callable_of(name: str, solution: Any, folders: contextlib.ExitStack) -> tuple[Function, bool]:
    if isinstance(solution, Solution):
        return _loaded(solution, folders), solution.spec.destination_passing_style
    if not callable(solution):
        raise TypeError(f"solutions[{name!r}]: a function or a Solution is required; got {type(solution).__name__}")
    return solution, False


def _loaded(solution: Solution, folders: contextlib.ExitStack) -> Function:
    """The function of a solution's entry point, from its sources in a folder of their own."""
    if not solution.spec.is_python_family:
        raise NotImplementedError(
            f"solutions[{solution.definition!r}]: Python is required; got {solution.spec.language.value}: build it "
            "with jit.gen_jit_spec, and pass a function that calls it"
        )
    folder = folders.enter_context(tempfile.TemporaryDirectory(prefix="fi-solution-"))
    for source in solution.sources:
        path = Path(folder, source.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source.content, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(
        f"fi_solution_{solution.hash()[:16]}", Path(folder, solution.entry_file())
    )
    assert spec is not None and spec.loader is not None
    module, before = importlib.util.module_from_spec(spec), set(sys.modules)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(folder)
        for other in set(sys.modules) - before:  # its other files: the next solution may have such names too
            if str(getattr(sys.modules[other], "__file__", "")).startswith(folder):
                del sys.modules[other]
    found = getattr(module, solution.entry_symbol(), None)
    if not callable(found):
        raise ValueError(f"entry_point: {solution.entry_file()} must define {solution.entry_symbol()!r}")
    return found  # type: ignore[no-any-return]


def _owners() -> Iterator[Any]:
    """Modules of fi, and their classes."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "fi_core" and module is not None and hasattr(module, "__dict__"):
            yield module
            yield from (value for value in list(vars(module).values()) if isinstance(value, type))


def _places(function: Function) -> Iterator[tuple[Any, str, Function]]:
    """Where a function stands, with what wraps it there; classes stand once."""
    seen = set()
    for owner in _owners():
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        for attribute, value in list(vars(owner).items()):
            if inspect.isfunction(value) and inspect.unwrap(value, stop=lambda f: f is function) is function:
                yield owner, attribute, value


def _standing_in(function: Function, behind: Function) -> Function:
    trace, planned = function.fi_trace.trace, function.fi_trace.planned  # type: ignore[attr-defined]
    signature, api = inspect.signature(function), f"{function.__module__}.{function.__qualname__}"
    form = str(signature.return_annotation)

    @functools.wraps(behind)
    def applied(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        owner = given.pop("self", None)
        for parameter in signature.parameters.values():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                given.update(given.pop(parameter.name, {}))
        arguments = call_arguments(given, planned, owner)
        template = select_template(function, trace, arguments)
        name = None if template is None else template.name_of(arguments)
        solution = None if name is None else _solutions.get(name)
        if solution is None or template is None:
            _counts[api, "fallback_no_candidate"] += 1
            return behind(*args, **kwargs)
        try:
            result = _run(template, arguments, form, *solution)
        except Exception:
            _counts[api, "error"] += 1
            raise
        _counts[api, "hit"] += 1
        return result

    return applied


def _run(template: TraceTemplate, arguments: Mapping[str, Any], form: str, function: Function, writes: bool) -> Any:
    """The result of a call, in the form that the public function is annotated with."""
    values = template.values(arguments)
    inputs = {name: values.get(name) for name in template.inputs}
    if writes:
        outputs = _empty(template, arguments, inputs)
        function(*inputs.values(), *outputs)
    else:
        returned = function(**inputs)
        outputs = list(returned) if isinstance(returned, (tuple, list)) else [returned]
    if len(outputs) != len(template.outputs):
        raise ValueError(f"a solution must return {', '.join(template.outputs)}; got {len(outputs)} values")
    for number, name in enumerate(template.outputs):
        target = template.target(name, arguments)
        if target is not None and target is not outputs[number]:
            outputs[number] = target.copy_(outputs[number])
    if form == "None":
        return None
    return outputs[0] if form == "torch.Tensor" or len(outputs) == 1 else tuple(outputs)


def _empty(template: TraceTemplate, arguments: Mapping[str, Any], inputs: Mapping[str, Any]) -> list[Any]:
    """Tensors for the outputs of a call."""
    import torch

    device = next(value.device for value in inputs.values() if isinstance(value, torch.Tensor))
    outputs = []
    for name, (shape, dtype) in template.layouts(arguments).items():
        target = template.target(name, arguments)
        outputs.append(torch.empty(shape, dtype=getattr(torch, dtype), device=device) if target is None else target)
    return outputs
