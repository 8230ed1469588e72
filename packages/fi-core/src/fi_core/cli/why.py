"""`fi-core why`: how a call is computed, and why: the Choice of each op, its launches, and the places of its files."""

from __future__ import annotations

import argparse
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fi_core.cli.declared import WAY_OUT, describe_op
from fi_core.cli.origin import Origin, describe_file, origin
from fi_core.cli.reached import ops_of
from fi_core.cli.report import Report, UsageError, paint
from fi_core.jit.base import default_targets
from fi_core.registry import described, ops
from fi_core.runtime.build import sources
from fi_core.runtime.dispatch import AUTO, Choice, Request, choose, explain
from fi_core.runtime.errors import LibraryError, UnsupportedError
from fi_core.runtime.machine import Launch
from fi_core.runtime.resolve import where
from fi_core.runtime.spec.artifact import Artifact
from fi_core.runtime.spec.dtype import DTYPES
from fi_core.runtime.spec.op import Op, Spec
from fi_core.runtime.spec.target import Target

_WORDS = {"true": True, "false": False, "none": None}
_HALVES = ("f16", "bf16")
_SHORT = {dtype.torch: short for short, dtype in DTYPES.items()}
_TORCH = {short: dtype.torch for short, dtype in DTYPES.items()}
# SMs, and bytes of shared memory that a CTA can have, of the largest device of an architecture; 90: H200.
_DEVICES = {80: (108, 163), 86: (84, 99), 89: (142, 99), 90: (132, 227), 100: (148, 227), 103: (148, 227)}
_OTHER_DEVICE = (128, 99)


class Step(NamedTuple):
    """One op of a call: its Choice, and its launches; None: they are not known. files: with a user's variant.

    An op in place of a choice: its launcher, which makes the request, is not there.
    """

    choice: Choice | Op
    launches: tuple[Launch, ...] | None
    files: tuple[Artifact, ...] | None = None


def run(args: argparse.Namespace) -> Report:
    answered = [_answer(args, target) for target in args.targets or default_targets()]
    data = [data for data, _, _ in answered]
    lines = [line for _, lines, _ in answered for line in lines]
    return Report(data[0] if len(data) == 1 else data, lines, ok=all(ok for _, _, ok in answered))


def _answer(args: argparse.Namespace, target: Target) -> tuple[dict[str, Any], list[str], bool]:
    """For one target: data, lines, and whether a call would run."""
    known, given = ops(), dict(args.facts)
    if len(given) != len(args.facts):
        raise UsageError("a fact is given twice")
    name = args.name.removeprefix("fi_core.")
    op = known.get(name)
    if op is not None and args.name == name and all(fact in op.fields for fact in given):
        return _explain_op(op, target, given, args.backend)
    sample = _sample(name)  # imports torch, which an op does not need
    if sample is not None:
        return _explain_call(name, sample, target, given, args)
    if op is not None:
        return _explain_op(op, target, given, args.backend)
    public = _public(name)
    if public is None:
        raise UsageError(_unknown(name))
    return _explain_reached(*public, target, given, args.backend)


# An op by the fields of its requests.
def _explain_op(
    op: Op, target: Target, given: Mapping[str, str], backend: str | None
) -> tuple[dict[str, Any], list[str], bool]:
    unknown = [name for name in given if name not in op.fields]
    if unknown:
        fields = " ".join(
            f"{name}={'|'.join(map(str, field.values)) if field.values else f'(default {field.default})'}"
            for name, field in op.fields.items()
        )
        raise UsageError(f"{op.name} takes {fields or 'no facts'}; unknown: {', '.join(unknown)}")
    values = {name: _field_value(text, op.fields[name].values) for name, text in given.items()}
    half = next((value for value in values.values() if value in _HALVES), None)
    if half:  # one 16-bit dtype that is given is that of the others
        values = {name: half for name, field in op.fields.items() if field.default in _HALVES} | values
    request = Request.of(op, target, values, backend or AUTO)
    try:
        step = Step(choose(request), None)
    except UnsupportedError as error:
        return _refused(str(request), error, explain(request))
    except ValueError as error:
        raise UsageError(str(error)) from None
    return _describe(step, target)


def _field_value(text: str, allowed: Sequence[object] | None) -> object:
    """The allowed value with this text; other text is kept, and the implementations refuse it."""
    word = text.removeprefix("torch.")
    word = _SHORT.get(word, word)
    if allowed is None:
        return int(word) if word.lstrip("-").isdecimal() else word
    if all(isinstance(value, bool) for value in allowed):
        word = {"true": "True", "1": "True", "false": "False", "0": "False"}.get(word.lower(), word)
    return next((value for value in allowed if str(value) == word), text)


# A public function or wrapper without a description, by the ops that its code reaches.
def _public(name: str) -> tuple[str, Any] | None:
    """The path and the object of a public name, which is given with or without its module."""
    module, _, word = name.rpartition(".")
    for place, exported in vars(importlib.import_module("fi_core"))["_MODULES"].items():
        home = importlib.import_module(f"fi_core.{place}")
        if word in (*exported, *getattr(home, "__all__", ())) and module in ("", place):
            return f"fi_core.{place}.{word}", getattr(home, word)
    return None


def _explain_reached(
    path: str, value: Any, target: Target, given: Mapping[str, str], backend: str | None
) -> tuple[dict[str, Any], list[str], bool]:
    """The Choice of each op that the code of a name reaches, for the given fields and the usual values of others."""
    found = [ops()[name] for name in ops_of(value)] if callable(value) else []
    fields = {field for op in found for field in op.fields}
    unknown = [fact for fact in given if fact not in fields]
    if unknown:
        takes = f"takes the fields of its ops, {', '.join(sorted(fields))}" if fields else "takes no facts"
        raise UsageError(f"{path} {takes}; unknown: {', '.join(unknown)}")
    if backend and not any(backend in (i.name, *i.backends) for op in found for i in op.implementations):
        raise UsageError(f"--backend: no op that {path} reaches has a backend {backend!r}")
    head = f"{path} on {target}: " + (
        f"reaches {', '.join(op.name for op in found)}; each as it is chosen for usual values"
        if found
        else "runs on the host, or reaches ops through an object; no kernel of its own"
    )
    data: dict[str, Any] = {"name": path, "target": str(target), "calls": []}
    lines, ready = [head], not found
    for op in found:
        facts = {fact: text for fact, text in given.items() if fact in op.fields}
        named = backend if any(backend in (i.name, *i.backends) for i in op.implementations) else None
        one, texts, ok = _explain_op(op, target, facts, named)
        data["calls"].append(one)
        lines += [f"  {text}" for text in texts]
        ready = ready or ok  # a call runs some of them
    return data, lines, ready


# A public function or wrapper by the sizes of a call.
def _sample(name: str) -> Any:
    """A function that makes a call of a public name from sizes; None without such a name or a description of its
    inputs.
    """
    from fi_core.observe.draw import Outline

    found = described(name.rpartition(".")[2])
    if found is None or (make := found.template.make) is None:
        return None

    call: Any = lambda **sizes: found.call(make(Outline(), **sizes))  # noqa: E731
    kept = [p for n, p in inspect.signature(make).parameters.items() if n != "draw"]
    call.__signature__ = inspect.Signature(kept)
    return call


def _explain_call(
    name: str, sample: Callable[..., Any], target: Target, given: Mapping[str, str], args: argparse.Namespace
) -> tuple[dict[str, Any], list[str], bool]:
    sizes = {fact: _size_value(text) for fact, text in given.items()}
    if args.backend:
        sizes["backend"] = args.backend
    parameters = inspect.signature(sample).parameters
    named = {n: p for n, p in parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD}
    unknown = [fact for fact in sizes if fact not in parameters] if len(named) == len(parameters) else []
    if "backend" in unknown:
        raise UsageError(f"--backend: {name} has no argument backend; its kernel is chosen by the request alone")
    if unknown:
        known = ", ".join(f"{p.name}={p.default}" for p in named.values())
        raise UsageError(f"{name} takes {known}; unknown: {', '.join(unknown)}")
    asked = {**{n: p.default for n, p in named.items() if p.default is not None}, **sizes}
    head = f"{name}({', '.join(f'{n}={v}' for n, v in asked.items())}) on {target}"
    data: dict[str, Any] = {"name": name, "sizes": asked, "target": str(target)}
    try:
        steps = _rehearse(sample, sizes, target, args.multiprocessors, args.compile)
    except UnsupportedError as error:
        found, lines, ok = _refused(head, error, {})
        return data | found, lines, ok
    except (TypeError, ValueError, LibraryError) as error:
        raise UsageError(str(error)) from None
    described = [_describe(step, target) for step in steps]
    data["calls"] = [one for one, _, _ in described]
    lines = [head, *(f"  {line}" for _, texts, _ in described for line in texts)]
    if any(step.launches is None for step in steps):
        data["incomplete"] = WAY_OUT
        lines.append(WAY_OUT)
    return data, lines, all(ready for _, _, ready in described)


def _rehearse(
    sample: Callable[..., Any], sizes: dict[str, Any], target: Target, sms: int | None, compiles: bool
) -> list[Step]:
    """The ops that a call runs, without duplicates."""
    from fi_core.runtime.machine import Rehearsal

    usual, shared = _DEVICES.get(target.capability, _OTHER_DEVICE)

    def has_launcher(op: Op) -> bool:
        return compiles or where(sources.host_module(op, target.kind)) is not None

    with Rehearsal(target, sms or usual, shared << 10, has_launcher) as rehearsal:
        sample(**sizes)
    files = rehearsal.files
    return [
        Step(choice, done, None if isinstance(choice, Op) else files.get(choice))
        for choice, done in dict.fromkeys(rehearsal.calls)
    ]


def _size_value(text: str) -> Any:
    word = text.removeprefix("torch.")
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return _TORCH.get(word, word)


def _unknown(name: str) -> str:
    import difflib

    import fi_core
    from fi_core.observe.trace import every_described

    public = filter(described, fi_core.__all__)
    known = sorted({*ops(), *public, *(found.name for found in every_described())})
    word = name.rpartition(".")[2]
    close = difflib.get_close_matches(word, known, 3, 0.4)
    hint = f"did you mean {' or '.join(close)}?" if close else f"ops are {', '.join(sorted(ops()))}"
    return f"no op or public function is named {name!r}; {hint}"


def _refused(
    head: str, error: UnsupportedError, reasons: Mapping[str, tuple[str, ...]]
) -> tuple[dict[str, Any], list[str], bool]:
    why = {**reasons} or error.reasons
    data = {"asked": head, "chosen": None, "implementations": {n: {"why_not": list(w)} for n, w in why.items()}}
    lines = [head, *(f"  {name}: {'; '.join(words)}" for name, words in why.items())]
    return (
        data,
        [*lines, paint("No implementation supports the request: a call raises UnsupportedError.", "red")],
        False,
    )


def _describe(step: Step, target: Target) -> tuple[dict[str, Any], list[str], bool]:
    choice = step.choice
    if isinstance(choice, Op):
        return describe_op(choice, target)
    origins = _origins(choice.spec) if step.files is None else [origin(artifact) for artifact in step.files]
    data = {
        "op": choice.request.op.name,
        "request": str(choice.request),
        "target": str(choice.request.target),
        "chosen": choice.implementation,
        "backend": choice.backend,
        "spec": choice.spec.name,
        "implementations": {
            choice.implementation: {"why_not": []},
            **{name: {"why_not": list(why)} for name, why in choice.reasons},
        },
        "entries": [str(entry) for entry in choice.entries],
        "launches": None if step.launches is None else [launch._asdict() for launch in step.launches],
        "files": [origin.data() for origin in origins],
    }
    lines = [str(choice.request), f"  {choice.implementation}: {paint('chosen', 'green')}"]
    if step.launches:
        configs = {entry.name: str(entry) for entry in choice.entries}
        for launch in step.launches:
            lines += [f"    launches {launch}", f"      kernel entry {configs[launch.entry]}"]
            lines += [f"      predicted {us:.1f} us: {words}" for words, us in launch.predicted]
    elif choice.entries:
        lines += [f"    kernel entry {entry}" for entry in choice.entries]
    lines += [line for origin in origins for line in describe_file(origin)]
    lines += [f"  {name}: {'; '.join(why)}" for name, why in choice.reasons]
    return data, lines, all(origin.ready for origin in origins)


def _origins(spec: Spec) -> list[Origin]:
    if spec.op.is_composite or (spec.target.kind == "cuda" and spec.unit() is None):
        return []  # other ops, or another library, bring the kernel
    return [origin(artifact) for artifact in sources.artifacts(spec)]
