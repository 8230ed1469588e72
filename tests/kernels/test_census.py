"""Fences, arrivals, waits and barriers of kernels that hand over shared memory are those of the kept census."""

from __future__ import annotations

import pytest

from fi_core.runtime.build import sources, toolchain
from kernels import census
from kernels.kept import kept

UNITS = census.units()


def test_an_instruction_more_or_less_is_seen() -> None:
    text = """.visible .entry one(.param .u64 p) { fence.proxy.async.shared::cta; mbarrier.arrive.shared.b64 _, [%r1];
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 8; bar.warp.sync -1; bar.sync 3, 512; barrier.cluster.arrive; }
    .visible .entry two() { mbarrier.try_wait.parity.shared.b64 p, [%r1], 0; ld.acquire.gpu.b32 %r2, [%rd1]; }"""
    one, two = census.of_ptx(text).values()
    assert one == {
        "proxy fence": 1, "arrival": 1, "expected bytes": 1, "CTA barrier": 1, "warp barrier": 1, "cluster barrier": 1,
    }  # fmt: skip
    assert two == {"wait": 1, "release or acquire": 1}
    for gone, kind in (("fence.proxy.async.shared::cta;", "proxy fence"), ("bar.warp.sync -1;", "warp barrier")):
        assert kind not in census.of_ptx(text.replace(gone, ""))["one"]


def test_the_kept_census_is_of_these_units() -> None:
    found = census.kept_census()
    assert list(found) == list(UNITS) and len(UNITS) > 100
    assert census.KEPT.read_text() == census.as_text(found)
    for name, spec in UNITS.items():
        unit = spec.unit()
        assert unit and set(found[name]) == {entry.name for entry in unit.entries}, name


@pytest.mark.slow
@pytest.mark.parametrize("name", UNITS)
def test_ordering_instructions_are_those_of_the_census(name: str) -> None:
    """`python tests/kernels/census.py` writes the file anew after a change that is meant."""
    spec = UNITS[name]
    _, artifact = sources.artifacts(spec)
    text = kept("ptx", name, sources.closure(artifact), toolchain.nvcc_identity(), ask=lambda: census.ptx(spec))
    assert census.of_ptx(text) == census.kept_census()[name]
