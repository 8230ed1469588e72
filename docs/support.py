"""Which implementations serve an op on a target."""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def implementations(op: Any, target: Any) -> tuple[str, ...]:
    """The implementations of an op that take some of its prebuilt requests on a target, in the op's order."""
    from fi_core.runtime.dispatch import Request

    facts = [Request.of(op, target, values).facts() for values in op.grid()]
    return tuple(i.name for i in op.implementations if not all(i.refusals(values) for values in facts))
