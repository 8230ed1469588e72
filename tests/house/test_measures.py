"""The counts of tools/measures.py stay within their bounds, which only fall."""

from __future__ import annotations

import pytest

import measures

BOUNDS = {
    "lines": 1795,
    "attention": 11420,
    "execs": 2,
    "memory": 0,
    "reads": 0,
    "circles": 0,
    "arrows": 0,
    "spellings_decode": 7,
    "spellings_prefill": 8,
    "positional": 0,
    "functions": 0,
    "long_functions": 0,
    "private": 57,
    "skips": 40,
}


@pytest.mark.parametrize("name", measures.ROWS)
def test_a_count_is_within_its_bound(name: str) -> None:
    found = measures.ROWS[name]()
    assert len(found) <= BOUNDS[name], f"{measures.ROWS[name].__doc__}: {len(found)}\n" + "\n".join(found[:60])
