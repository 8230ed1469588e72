"""Short ways to write a TraceTemplate: sizes of a `make`, tensors and numbers by their axes, axes, samples."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from fi_core.observe.draw import Draw
from fi_core.observe.template import Const, Scalar, Tensor, TraceTemplate, Var


def with_sizes(
    make: Callable[..., dict[str, Any]], hidden: Sequence[str], **usual: Any
) -> Callable[..., dict[str, Any]]:
    """A `make` with these defaults; the hidden parameters are not sizes that a user can choose."""
    found = functools.partial(make, **usual)
    parameters = inspect.signature(found).parameters.values()
    found.__signature__ = inspect.Signature([p for p in parameters if p.name not in hidden])  # type: ignore[attr-defined]
    return found


class Sizes(SimpleNamespace):
    """The sizes of one call by name."""

    def named(self, *names: str) -> dict[str, Any]:
        """Those that the call takes by the same name."""
        return {name: getattr(self, name) for name in names}


def sized(
    fixed: Mapping[str, Any] | None = None, **usual: Any
) -> Callable[[Callable[[Draw, Any], dict[str, Any]]], Callable[..., dict[str, Any]]]:
    """A `make` from a function of a draw and its sizes, a namespace: it takes the usual ones by name, as defaults.

    fixed: sizes that a user cannot choose.
    """
    sizes = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=usual[name]) for name in usual]
    signature = inspect.Signature([inspect.Parameter("draw", inspect.Parameter.POSITIONAL_ONLY), *sizes])

    def decorate(function: Callable[[Draw, Any], dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        def make(draw: Draw, **given: Any) -> dict[str, Any]:
            signature.bind(draw, **given)  # refuses other sizes
            return function(draw, Sizes(**{**(fixed or {}), **usual, **given}))

        make.__signature__ = signature  # type: ignore[attr-defined]
        return make

    return decorate


def tensors(shared: Mapping[str, Any] | None = None, /, **axes: str) -> dict[str, Tensor]:
    """Tensors by name from their axes in words, as a="m k". shared: what else `Tensor` takes, for all of them."""
    return {name: Tensor(names.split(), **shared or {}) for name, names in axes.items()}


def options(**names: str) -> dict[str, Scalar]:
    """Numbers that a call may leave out: by dtype their names in words."""
    return {name: Scalar(dtype, optional=True) for dtype, words in names.items() for name in words.split()}


def words(*lines: str) -> tuple[str, ...]:
    """The words of the lines."""
    return tuple(" ".join(lines).split())


def axes_of(inputs: Mapping[str, Tensor | Scalar], **fixed: str | None) -> dict[str, Var | Const]:
    """The axes of the inputs. fixed: those that a model fixes, with their `abbrev`, behind all others."""
    shaped = (entry.dim_names for entry in inputs.values() if isinstance(entry, Tensor))
    names = dict.fromkeys(itertools.chain.from_iterable(shaped))
    consts = {name: Const(abbrev=abbrev) for name, abbrev in fixed.items() if name in names}
    return {**{name: Var() for name in names if name not in fixed}, **consts}


def dispatcher(
    templates: Iterable[TraceTemplate], choose: Callable[[dict[str, Any]], TraceTemplate | None]
) -> Callable[..., TraceTemplate | None]:
    """A trace for `fi_api` of these templates. choose: the one for the arguments of a call, or None."""

    def trace(save_dir: Any = None, name: str | None = None, **arguments: Any) -> TraceTemplate | None:
        return choose(arguments)

    trace.templates = tuple(templates)  # type: ignore[attr-defined]
    return trace


def samples(axes: Mapping[str, Sequence[Any]]) -> tuple[dict[str, Any], ...]:
    """Every combination of a value of each axis; axes that change together share a key, as in "rows, columns"."""
    found: list[dict[str, Any]] = []
    for values in itertools.product(*axes.values()):
        sample: dict[str, Any] = {}
        for names, value in zip((key.split(", ") for key in axes), values):
            sample |= zip(names, value if len(names) > 1 else (value,))
        found.append(sample)
    return tuple(found)
