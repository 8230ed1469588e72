"""Sweep syntax of flag values: `1,8,64`, `0.25,0.5`, `1:128:*2`, `256:1024:256`, `2^4:2^12`; the points of a sweep."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from fi_bench.errors import UsageError

T = TypeVar("T")
_MOST_POINTS = 10_000


class Axis(tuple[Any, ...]):
    """Several values of one flag."""


def _number(text: str) -> int:
    base, power, exponent = text.partition("^")
    return int(base) ** int(exponent) if power else int(base)


def _range(text: str) -> list[int]:
    """start:stop, start:stop:step or start:stop:*factor, both ends included; powers step by their base."""
    words = text.split(":")
    start, stop = _number(words[0]), _number(words[1])
    step = words[2] if len(words) == 3 else f"*{words[0].split('^')[0]}" if "^" in words[0] else "1"
    factor = int(step[1:]) if step.startswith("*") else None
    if len(words) > 3 or start > stop or (factor is not None and (factor < 2 or start < 1)):
        raise ValueError
    by = int(step) if factor is None else 0
    if factor is None and by < 1:
        raise ValueError
    values = [start]
    while len(values) <= _MOST_POINTS:
        following = values[-1] * factor if factor else values[-1] + by
        if following > stop:
            return values
        values.append(following)
    raise ValueError


def one_or_axis(values: list[T]) -> T | Axis:
    return values[0] if len(values) == 1 else Axis(values)


def integers(text: str) -> int | Axis:
    """argparse type of a shape flag."""
    try:
        values = [v for word in text.split(",") for v in (_range(word) if ":" in word else [_number(word)])]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be an integer, a list 1,8,64 or a range 1:128:*2, 256:1024:256, 2^4:2^12"
        ) from None
    return one_or_axis(values)


def finite(text: str) -> float:
    """argparse type of a flag with one number."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def reals(text: str) -> float | Axis:
    """argparse type of a shape flag that need not be an integer."""
    try:
        return one_or_axis([finite(word) for word in text.split(",")])
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a finite number or a list 0.25,0.5") from None


def requests(text: str) -> list[tuple[int, int]]:
    """(query, key/value) lengths of `[NAME=]ITEM,ITEM...`, where an ITEM is `[COUNT*]QO[@KV]` and KV counts the query.

    `mix=8192,32*1@8192` is a prefill of 8192 tokens and 32 decodes at 8192 tokens, their new one included.
    """
    found = []
    for item in text.rpartition("=")[2].split(","):
        count, star, lengths = item.rpartition("*")
        qo, at, kv = lengths.partition("@")
        number, query = _number(count) if star else 1, _number(qo)
        total = _number(kv) if at else query
        if number < 1 or not 1 <= query <= total:
            raise ValueError
        found += [(query, total)] * number
    return found


def batch(text: str) -> str:
    """argparse type of --case: the text, if it can be read."""
    try:
        requests(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a batch such as mix=8192,32*1@8192 (each [COUNT*]QO[@KV], with QO <= KV)"
        ) from None
    return text


def choices(*allowed: str, renamed: dict[str, str] | None = None) -> Callable[[str], Any]:
    """argparse type of a flag with named values, in any case; a list of them sweeps."""
    by_fold = {a.lower(): a for a in allowed} | (renamed or {})

    def parse(text: str) -> Any:
        values = []
        for word in text.split(","):
            if word.lower() not in by_fold:
                raise argparse.ArgumentTypeError(f"{word!r} is not one of {', '.join(allowed)}")
            values.append(by_fold[word.lower()])
        return one_or_axis(values)

    return parse


def points(args: argparse.Namespace) -> Iterator[argparse.Namespace]:
    """One namespace per point: the product of all axes, or all axes in step with --zip."""
    axes = {name: value for name, value in vars(args).items() if isinstance(value, Axis)}
    if not axes:
        yield args
        return
    lengths = {name: len(values) for name, values in axes.items()}
    if getattr(args, "zip", False):
        if len(set(lengths.values())) > 1:
            said = ", ".join(f"--{name} has {n}" for name, n in lengths.items())
            raise UsageError(f"--zip needs as many values on every swept flag: {said}")
        combos: Iterator[tuple[Any, ...]] = zip(*axes.values(), strict=True)
    else:
        combos = itertools.product(*axes.values())
    for combo in combos:
        yield argparse.Namespace(**{**vars(args), **dict(zip(axes, combo, strict=True))})
