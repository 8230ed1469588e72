"""The switch of batch invariance: while it is on, calls get only kernels whose bits of a row depend on that row."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from typing import Any

from fi_core.runtime.env import env

# Blocks that are open, and one more with FI_BATCH_INVARIANT=1. Host modules read it where it lies, on each call.
word = ctypes.c_int64(env.batch_invariant)
_lock = threading.Lock()


def is_on() -> bool:
    """Whether calls of this process are batch invariant now."""
    return word.value != 0


def check_plan(splits_by_batch: bool) -> None:
    """Raises ValueError if a plan whose result must not follow the batch splits its work by the batch."""
    if splits_by_batch and is_on():
        raise ValueError("run: inside of fi_core.batch_invariant() a plan that was made inside is required: call plan")


def follow(module: Any) -> None:
    """Tells a host module where the word lies."""
    if module.implements_function("follow"):
        module["follow"](ctypes.addressof(word))


@contextlib.contextmanager
def batch_invariant() -> Iterator[None]:
    """Makes the results of calls batch invariant: the bits of a row depend on nothing but the row.

    A row is a request of attention, a token of a product, a norm or an expert. Its result is the same alone and in any
    batch, at any position, beside any other rows and the padding of a CUDA graph, for any page size and order of pages,
    and eager or from a graph. Kernels that cannot promise this are not chosen; an op without any other raises
    UnsupportedError. It is a context manager, and a decorator of a function. FI_BATCH_INVARIANT=1 has the same effect
    for the whole process.

    The switch belongs to the process: while a block is open anywhere, the calls of all threads are invariant, including
    threads and tasks that start or end inside it. Blocks may be nested and may overlap. A plan that was made outside a
    block cannot run inside.
    """
    with _lock:
        word.value += 1
    try:
        yield
    finally:
        with _lock:
            word.value -= 1
