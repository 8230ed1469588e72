"""Files that begin to compile, on other threads, before they are needed: those of a kernel, and of the kernels that a
layer reaches beside it, for other sizes and in the ops that share its calls.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from fi_core.runtime.build import diagnose, sources
from fi_core.runtime.dispatch import AUTO, Choice, Request, choose
from fi_core.runtime.errors import UnsupportedError
from fi_core.runtime.invariance import is_on
from fi_core.runtime.machine import rehearsal, target_of
from fi_core.runtime.resolve import start
from fi_core.runtime.spec.dtype import short_name
from fi_core.runtime.spec.op import Op, Spec
from fi_core.runtime.spec.target import Target

# Each way to compute a layer is met: it serves a range of tokens whose ends differ by a factor of 1.45 or more.
TOKEN_COUNTS = tuple(sorted({round(2 ** (n / 2)) for n in range(27)}))
begun: list[Spec] = []  # by `begin`, for `fi_core.compat.begun.load_begun`


@functools.cache
def begin(spec: Spec) -> None:
    """Begins to compile, on other threads, the files of a spec that are not there. `bind` waits for them."""
    if spec.target.kind == "cpu" or spec.unit() is not None:
        start(sources.artifacts(spec))
        begun.append(spec)


@functools.cache
def begin_module(op: Op, kind: str) -> None:
    """Begins to compile the host module of an op, if it is not there. `host_module` waits for it."""
    start([sources.host_module(op, kind)])


@contextlib.contextmanager
def reported(what: str) -> Iterator[None]:
    """Logs, once, the error of something that begins to compile before a call needs it, as that call then raises it."""
    try:
        yield
    except (ValueError, NotImplementedError, RuntimeError) as error:
        diagnose.once(logging.WARNING, f"{what} is not compiled ahead: {type(error).__name__}: {error}")


def reached(request: Request, known: Mapping[str, Op]) -> Iterator[Spec]:
    """The specs of the op and of the ops beside it, for all values of the fields that differ between calls of a layer.

    known: the ops of imported families, by name; an op beside it that is not imported is left out.
    """
    given = dict(zip(request.op.fields, request.values))
    for op in (request.op, *(known[name] for name in request.op.beside if name in known)):
        shared = {name: value for name, value in given.items() if name in op.fields}
        for fields in op.calls_of_layer(shared):
            with contextlib.suppress(UnsupportedError, ValueError):  # or the other op has no such backend
                yield choose(Request.of(op, request.target, fields, request.backend)).spec


def begin_reached(request: Request, known: Mapping[str, Op]) -> None:
    """Begins to compile the kernel of a request and what `reached` gives on a GPU; a CPU has one module for an op."""
    if request.target.kind == "cuda" and (request.op.varies or request.op.beside):
        begin(choose(request).spec)  # first: NVRTC parses one unit at a time
        for spec in reached(request, known):
            begin(spec)


def planned(op: Op, device: Any, backend: str, *values: Any, ahead: bool = True) -> Choice:
    """The choice for calls with these values of the op's fields, in order; dtypes of torch or short names.

    It is for a plan, which has no tensors yet. Cached: one look-up per call.

    Args:
        op, device, backend, values: the request.
        ahead: begin to compile the kernel of the choice on other threads, if that is necessary; False where the call
            follows at once.

    Raises:
        UnsupportedError: no implementation supports the values.
        ValueError: backend.
    """
    return _planned(op, target_of(device), backend, values, is_on(), ahead and not rehearsal())


@functools.lru_cache(maxsize=4096)
def _planned(op: Op, target: Target, backend: str, values: tuple[Any, ...], invariant: bool, ahead: bool) -> Choice:
    named = tuple(short_name(v) if type(v).__name__ == "dtype" else v for v in values)
    choice = choose(Request(op, target, named, backend, invariant))
    if ahead:
        begin(choice.spec)
    return choice


def composition(op: Op, device: Any, *values: Any) -> str:
    """The implementation of a composite op for these values of its fields, in order: the ops that compute a call.

    Cached: one look-up per call. Raises UnsupportedError if no implementation supports the values.
    """
    choice = _planned(op, target_of(device), AUTO, values, is_on(), False)
    if shown := rehearsal():
        shown.note(choice)
    return choice.implementation
