"""One case of the fuzz: from its name to a record of what a hostile call did."""

from __future__ import annotations

import functools
import inspect
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch

from families.test_descriptions import check
from fi_core.observe.checked import names
from fi_core.observe.trace import TraceTemplate
from fi_core.runtime.errors import BackendSupportedError, FiError, GPUArchitectureError, LibraryError, UnsupportedError
from fi_core.runtime.launch.operator import operators
from fuzz import each, numbers
from fuzz.calls import Arguments, Scenario, invoke
from fuzz.hostile import Change, bits_of, contents, is_plain, metadata, tight

KINDS = ("metadata", "contents", "each", "numbers")
Record = dict[str, Any]
Changes = Callable[[Callable[..., Any], Arguments], tuple[Arguments, dict[str, Change]]]
Announce = Callable[[Record], None]
NAMED = (ValueError, TypeError, NotImplementedError, KeyError, FiError, LibraryError, BackendSupportedError,
         GPUArchitectureError)  # fmt: skip
FINDINGS = ("crash", "hang", "sanitizer", "unnamed error", "wrong answer")
_PLANS = ("plan", "fast_decode_plan", "begin_forward")  # after a failed one the session goes on
_NO_MEMORY = re.compile(r"can't allocate memory|not enough memory|Storage size calculation overflowed|numel.*overflow")
_FIRST = re.compile(r"(\w+): ")
_DRAWN = re.compile(r"sampl")


class _Over(Exception):
    """Ends a scenario after its hostile call."""


class Hostile:
    """The hook of one case: changes arguments of one call, and records what that call and later ones do."""

    def __init__(self, change: Changes, step: int, announce: Announce | None = None) -> None:
        self.change, self.step, self.announce = change, step, announce
        self.count = 0
        self.names: set[str] = set()
        self.record: Record = {"outcome": "valid", "change": ""}
        self.results: list[Any] = []
        self.same = self.extreme = self.beyond = False

    def __call__(
        self,
        function: Callable[..., Any],
        arguments: Arguments,
        template: TraceTemplate | None = None,
        planned: Arguments | None = None,
    ) -> Any:
        at, self.count = self.count, self.count + 1
        self.names |= set(inspect.signature(function).parameters) - {"self"}
        template_arguments = None
        if at == self.step:
            arguments, changes = self.change(function, arguments)
            self.same = bool(changes) and all(change.same for change in changes.values())
            self.extreme = any(change.extreme for change in changes.values())
            self.changed = list(changes)
            described = {entry.param or key for key, entry in template.inputs.items()} if template else set()
            self.beyond = any(  # an option that no reference takes, such as a scale
                name not in described and not isinstance(change.value, torch.Tensor) for name, change in changes.items()
            )
            self.function = function
            self.record["function"] = function.__qualname__
            self.record["change"] = "; ".join(f"{name}: {change.text}" for name, change in changes.items())
            template_arguments = {**(planned or {}), **arguments}
            if self.announce:
                self.announce(self.record)
        try:
            result = invoke(function, arguments)
        except Exception as error:
            if at < self.step or self.step < 0:
                raise
            self.judge(error, function, later=at > self.step)
            if function.__name__ in _PLANS and self.record["outcome"] == "named":
                return None
            raise _Over from None
        self.results.append(_copied(result))
        if at == self.step:
            self.record["outcome"] = "returned"
            self.returned = result, template_arguments, template
        return result

    def judge(self, error: Exception, function: Callable[..., Any], later: bool) -> None:
        text = str(error)
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if "/fi_core/" in f.filename]
        where = f"{Path(own[-1].filename).name}:{own[-1].name}" if own else ""
        words = set(re.findall(r"\w+", text))
        named = (
            any(names(text, name) for name in self.names)
            or _names_its_argument(text)
            or isinstance(error, UnsupportedError)
        )
        if isinstance(error, (RuntimeError, MemoryError)) and _NO_MEMORY.search(text):
            outcome = "no memory"
        elif isinstance(error, LibraryError) or (isinstance(error, NAMED) and named):
            outcome = "named"
        elif later and isinstance(error, RuntimeError) and "plan" in words:
            outcome = "named"  # the plan before has failed
        else:
            outcome = "unnamed error"
        self.record |= {
            "outcome": outcome, "error": type(error).__name__, "text": text[:300], "where": where,
            "raised_by": function.__qualname__,
        }  # fmt: skip


def _names_its_argument(text: str) -> bool:
    """Whether it begins with a name, or a kernel's error names a declared argument of its op."""
    first = _FIRST.match(text)
    if not first:
        return False
    known = operators().get(first.group(1))
    return known is None or bool({a.name for a in known.op.parsed} & set(re.findall(r"\w+", text)))


def drawn(
    kind: str, seed: int, function: Callable[..., Any], arguments: Arguments
) -> tuple[Arguments, dict[str, Change]]:
    """The arguments with one to three hostile ones, the same each time."""
    rng = Random(f"{kind} {seed} change")
    made = dict(arguments)
    if rng.random() < 0.6:
        made = {name: _tightened(value) for name, value in made.items()}
    others = [value for value in made.values() if is_plain(value)]
    parameters = inspect.signature(function).parameters
    changes: dict[str, Change] = {}
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        names = [name for name in parameters if name != "self" and name not in changes]
        given = [name for name in names if name in made]
        if kind == "contents":
            name = rng.choice(given) if given else ""
            change = contents(rng, made.get(name))
        else:
            name = rng.choice(given if rng.random() < 0.8 and given else names) if names else ""
            default = parameters[name].default if name else None
            change = metadata(rng, made.get(name, default), others) if name else None
        if change is not None and name:
            changes[name] = change
            variadic = parameters[name].kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            if not variadic or isinstance(change.value, (tuple, list)):
                made[name] = change.value
    order = [name for name in parameters if name in made]
    return {name: made[name] for name in order}, changes


def _tightened(value: Any) -> Any:
    if isinstance(value, tuple) and all(is_plain(x) for x in value):
        return tuple(tight(x) for x in value)
    return tight(value) if is_plain(value) else value


def _copied(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_copied(x) for x in value]
    return (
        value.detach().clone()
        if isinstance(value, torch.Tensor) and is_plain(value) and value.numel() < 1 << 22
        else None
    )


@functools.cache
def _steps(scenario: Scenario) -> int:
    """The number of calls of a scenario."""
    return run_plain(scenario, 0).count


def run_plain(scenario: Scenario, seed: int) -> Hostile:
    """The scenario without a change."""
    hook = Hostile(functools.partial(drawn, "metadata", seed), -1)
    scenario.start(hook, seed)
    return hook


def parse(name: str) -> tuple[str, int]:
    """Kind and seed of a case's name, such as "metadata:17". Raises ValueError."""
    kind, _, seed = name.partition(":")
    if kind not in KINDS or not seed.isdecimal():
        raise ValueError(
            f"case: {', '.join(KINDS[:-1])} or {KINDS[-1]}, a colon and a number are required; got {name!r}"
        )
    return kind, int(seed)


def run(name: str, scenarios: list[Scenario], announce: Announce = lambda record: None) -> Record:
    """Runs a case. announce: told of the change before the call, which may not come back."""
    kind, seed = parse(name)
    if kind == "numbers":
        return {"case": name, **numbers.run(seed, announce=lambda change: announce({"case": name, **change}))}
    rng = Random(name)
    change: Changes
    if kind == "each":
        scenario, way = each.find(seed, scenarios)
        seed, step, change = 0, way.step, functools.partial(each.changed, way)
    else:
        scenario, change = rng.choice(scenarios), functools.partial(drawn, kind, seed)
        step = rng.randrange(_steps(scenario)) if scenario.several else 0
    torch.manual_seed(seed)
    torch.set_num_threads(1 if seed % 8 else 2)
    record = {"case": name, "scenario": scenario.name}
    hook = Hostile(change, step, lambda change: announce(record | change))
    try:
        scenario.start(hook, seed)
    except _Over:
        pass
    except Exception as error:
        if "function" not in hook.record:
            raise
        if hook.record["outcome"] in ("returned", "valid"):  # the scenario itself stumbles over what came back
            hook.record |= {"outcome": "accepted", "text": f"{type(error).__name__}: {error}"[:200]}
    if hook.record["outcome"] == "returned":
        hook.record |= _answer(scenario, hook, seed)
    return record | hook.record


def _answer(scenario: Scenario, hook: Hostile, seed: int) -> Record:
    """Whether the result is right, as far as anything tells: the reference, or the call without the change."""
    result, arguments, template = hook.returned
    if hook.extreme or _DRAWN.search(hook.record["function"]):
        return {"outcome": "accepted"}
    if template is not None and template.reference is not None and not hook.beyond:
        before: list[Arguments] = []  # the call has written some of its arguments: they are made once more
        scenario.start(_Capture(hook, before), seed)
        try:
            if _over_another(hook.changed, before[0], arguments):
                return {"outcome": "accepted", "text": "a result over another argument: undefined"}
            given = _flags(hook.function, before[0])
            got = template.results(arguments, result)
            if not all(map(is_plain, got.values())):
                return {"outcome": "accepted", "text": "no numbers: the result is of another kind of tensor"}
            if not any(x.numel() for x in got.values()):  # the layout of an empty input may tell its orientation
                return {"outcome": "accepted", "text": "no numbers: the result is empty"}
            want = template.where_written(given, got, template.expected(given))
            if any(x.is_floating_point() and bool((x.abs() > 1e30).any()) for x in want.values()):
                return {"outcome": "accepted", "text": "a sum in fp32 may overflow on the way to such a number"}
        except Exception as error:
            return {"outcome": "accepted", "text": f"no reference: {type(error).__name__}: {error}"[:200]}
    elif hook.same:
        plain = run_plain(scenario, seed).results
        pairs = list(_pairs(hook.results, plain[: len(hook.results)]))
        wrong = [i for i, (a, b) in enumerate(pairs) if not _close(a, b)]
        return (
            {"outcome": "wrong answer", "text": f"result {wrong[0]} differs from the plain call's"}
            if wrong
            else {"outcome": "right"}
        )
    else:
        return {"outcome": "accepted"}
    try:
        check(template, got, want)
    except AssertionError as error:
        return {"outcome": "wrong answer", "text": str(error)[:300]}
    except Exception as error:
        return {"outcome": "accepted", "text": f"not compared: {type(error).__name__}: {error}"[:200]}
    return {"outcome": "right"}


def _over_another(changed: list[str], before: Arguments, after: Arguments) -> bool:
    """Whether the call has written a changed argument whose memory is that of another one, too."""
    for name in changed:
        x, old = after.get(name), before.get(name)
        if not is_plain(x) or not is_plain(old) or x.numel() > 1 << 24:
            continue
        others = (y for other, value in after.items() if other != name for y in _tensors(value))
        shared = any(y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for y in others)
        if shared and not torch.equal(x.view(bits_of(x)), old.view(bits_of(old))):
            return True
    return False


def _tensors(value: Any) -> list[torch.Tensor]:
    members = value if isinstance(value, (tuple, list)) else [value]
    return [x for x in members if is_plain(x)]


def _flags(function: Callable[..., Any], arguments: Arguments) -> Arguments:
    """The arguments, with a None for a flag as what it means: a reference would take its own default instead."""
    parameters = inspect.signature(function).parameters
    flags = {name for name, parameter in parameters.items() if isinstance(parameter.default, bool)}
    return {name: False if value is None and name in flags else value for name, value in arguments.items()}


class _Capture:
    """A hook that keeps the changed arguments of a call and makes none."""

    def __init__(self, hook: Hostile, kept: list[Arguments]) -> None:
        self.hook, self.kept = hook, kept

    def __call__(
        self,
        function: Callable[..., Any],
        arguments: Arguments,
        template: TraceTemplate | None = None,
        planned: Arguments | None = None,
    ) -> None:
        self.kept.append({**(planned or {}), **self.hook.change(function, arguments)[0]})


def _pairs(a: Any, b: Any) -> Any:
    if isinstance(a, list) and isinstance(b, list):
        for x, y in zip(a, b):
            yield from _pairs(x, y)
    elif isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        yield a, b


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape:
        return False
    x, y = a.float(), b.float()
    return bool(torch.allclose(x, y, rtol=2e-2, atol=2e-2, equal_nan=True))
