"""The kernels that a layer reaches beside that of one request: for other sizes, and of the ops that share its calls."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping

from fi_core.runtime.dispatch import Request, choose
from fi_core.runtime.errors import UnsupportedError
from fi_core.runtime.launch.kernel import begin
from fi_core.runtime.spec.op import Op, Spec

# Each way to compute a layer is met: it serves a range of tokens whose ends differ by a factor of 1.45 or more.
TOKEN_COUNTS = tuple(sorted({round(2 ** (n / 2)) for n in range(27)}))


def reached(request: Request, known: Mapping[str, Op]) -> Iterator[Spec]:
    """The specs of the op and of the ops beside it, for all values of the fields that differ between calls of a layer.

    known: the ops of imported families, by name; an op beside it that is not imported is left out.
    """
    given = dict(zip(request.op.fields, request.values))
    for op in (request.op, *(known[name] for name in request.op.beside if name in known)):
        shared = {name: value for name, value in given.items() if name in op.fields}
        for values in itertools.product(*(v(shared) if callable(v) else v for v in op.varies.values())):
            fields = {**shared, **dict(zip(op.varies, values))}
            with contextlib.suppress(UnsupportedError, ValueError):  # or the other op has no such backend
                yield choose(Request.of(op, request.target, fields, request.backend)).spec


def begin_reached(request: Request, known: Mapping[str, Op]) -> None:
    """Begins to compile what `reached` gives on a GPU; a CPU has one module for an op."""
    if request.target.kind == "cuda" and (request.op.varies or request.op.beside):
        for spec in reached(request, known):
            begin(spec)
