"""selective_state_update: tokens, pools, padding, packed requests with drafted tokens, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from families.harness import assert_close, assert_guards, guarded, rand, strided
from families.linear_attention_reference import selective_state_update as reference
from fi_core.mamba import selective_state_update

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
STATE = {F32: (1e-5, 1e-5), BF16: (1e-2, 1e-2), F16: (1e-3, 1e-3)}
HEADS, GROUPS = 4, 2


def inputs(
    rows: tuple[int, ...], device: str, *, dtype: torch.dtype = BF16, dim: int = 64, dstate: int = 128,
    rest: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """rows: [batch], [batch, tokens] or [tokens]. rest: also D, z, dt_bias and softplus."""
    rate = -rand(HEADS, dtype=F32, device=device, seed=1).abs()
    x: dict[str, Any] = {
        "x": strided(rand(*rows, HEADS, dim, dtype=dtype, device=device)),
        "dt": rand(*rows, HEADS, dtype=dtype, device=device, seed=2).abs()[..., None].expand(*rows, HEADS, dim),
        "A": rate[:, None, None].expand(HEADS, dim, dstate),
        "B": strided(rand(*rows, GROUPS, dstate, dtype=dtype, device=device, seed=3)),
        "C": strided(rand(*rows, GROUPS, dstate, dtype=dtype, device=device, seed=4)),
        "D": None,
    }
    if rest:
        x["D"] = rand(HEADS, dtype=dtype, device=device, seed=5)[:, None].expand(HEADS, dim)
        x["z"] = strided(rand(*rows, HEADS, dim, dtype=dtype, device=device, seed=6))
        x["dt_bias"] = rand(HEADS, dtype=F32, device=device, seed=7)[:, None].expand(HEADS, dim)
        x["dt_softplus"] = True
    return x


def expected(x: dict[str, Any], tokens: Any, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and states of the tokens that an index picks: `[T]` of them."""

    def own(name: str) -> torch.Tensor | None:
        value = x.get(name)
        return None if value is None else value[tokens].cpu().view(-1, *value.shape[-2:])

    dt = own("dt")[..., 0].double()  # type: ignore[index]
    if "dt_bias" in x:
        dt = torch.nn.functional.softplus(dt + x["dt_bias"][:, 0].cpu().double())
    d = None if x["D"] is None else x["D"][:, 0].cpu()
    return reference(state.cpu(), own("x"), dt, x["A"][:, 0, 0].cpu(), own("B"), own("C"), d, own("z"))  # type: ignore[arg-type]


@pytest.mark.parametrize("rest", [False, True])
@pytest.mark.parametrize(("dtype", "state_dtype"), [(BF16, F32), (BF16, BF16), (F16, F16), (F32, F32)])
@pytest.mark.parametrize(
    ("rows", "dim", "dstate", "gaps"),
    [
        ((3,), 64, 128, True), ((3,), 64, 128, False), ((2,), 96, 64, False), ((2, 3), 40, 64, True),
        ((2,), 64, 256, False),
    ],
)  # fmt: skip
def test_states_in_place(
    rows: tuple[int, ...], dim: int, dstate: int, gaps: bool, dtype: torch.dtype, state_dtype: torch.dtype, rest: bool,
    device: str,
) -> None:  # fmt: skip
    """gaps: rows of the state are not contiguous with each other."""
    x = inputs(rows, device, dtype=dtype, dim=dim, dstate=dstate, rest=rest)
    state = strided(rand(rows[0], HEADS, dim, dstate, dtype=state_dtype, device=device), row_padding=8 if gaps else 0)
    before, out = state.clone(), guarded((*rows, HEADS, dim), dtype, device, row_padding=8)
    assert selective_state_update(state, **x, out=out) is out
    for row in range(rows[0]):
        want, states = expected(x, row, before[row])
        loose = (1e-4, 1e-3) if dtype is F32 else (1e-2, 5e-2)
        assert_close(out[row].view(-1, HEADS, dim), want, tolerance=loose)
        assert_close(state[row], states[-1], tolerance=STATE[state_dtype])
    assert_guards(out)
    assert_guards(state)


def test_pool_padding_and_destinations(device: str) -> None:
    x = inputs((4,), device)
    indices = torch.tensor([5, -1, 0, 2], dtype=torch.int32, device=device)
    to = torch.tensor([1, 6, 3, -1], dtype=torch.int32, device=device)
    for destination in (None, to):
        pool = rand(7, HEADS, 64, 128, dtype=F32, device=device)
        after, out = pool.double().cpu(), guarded((4, HEADS, 64), BF16, device)
        for row, slot in ((0, 5), (2, 0), (3, 2)):
            target = slot if destination is None else int(to[row])
            if target >= 0:
                after[target] = expected(x, slice(row, row + 1), pool[slot])[1][-1]
        selective_state_update(pool, **x, state_batch_indices=indices, dst_state_batch_indices=destination, out=out)
        assert_close(pool, after, tolerance=STATE[F32])
        assert out[1].isnan().all()  # padding is not written
        assert not out[0].isnan().any()


def test_intermediate_states(device: str) -> None:
    x = inputs((2, 3), device)
    state = rand(2, HEADS, 64, 128, dtype=F32, device=device)
    before, kept = state.clone(), guarded((3, 4, HEADS, 64, 128), F32, device)
    selective_state_update(
        state, **x, disable_state_update=True, intermediate_states_buffer=kept, cache_steps=4,
        intermediate_state_indices=torch.tensor([2, 0], dtype=torch.int32, device=device),
    )  # fmt: skip
    assert torch.equal(state, before)
    for row, place in ((0, 2), (1, 0)):
        assert_close(kept[place, :3], expected(x, row, before[row])[1][1:], tolerance=STATE[F32])
    assert kept[1].isnan().all()
    assert kept[:, 3].isnan().all()
    assert_guards(kept)


def test_packed_requests_with_drafted_tokens(device: str) -> None:
    """Each request starts from the state after its last accepted token, and keeps the state after each new one."""
    lengths, x = [2, 0, 3], inputs((5,), device)
    cu_seqlens = torch.tensor([0, 2, 2, 5], dtype=torch.int32, device=device)
    slots = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=torch.int32, device=device)
    to = slots.clone()
    to[2, 1] = -1
    accepted = torch.tensor([2, 1, 3], dtype=torch.int32, device=device)
    pool = rand(10, HEADS, 64, 128, dtype=F32, device=device)
    before = pool.clone()
    after = before.double().cpu()
    out = selective_state_update(
        pool, **x, state_batch_indices=slots, dst_state_batch_indices=to, cu_seqlens=cu_seqlens,
        num_accepted_tokens=accepted,
    )  # fmt: skip
    first = 0
    for row, length in enumerate(lengths):
        if length:
            own = slice(first, first + length)
            want, states = expected(x, own, before[int(slots[row, int(accepted[row]) - 1])])
            assert_close(out[own], want, tolerance=(1e-2, 5e-2))
            for t in range(length):
                if to[row, t] >= 0:
                    after[to[row, t]] = states[t + 1]
        first += length
    assert_close(pool, after, tolerance=STATE[F32])


@pytest.mark.parametrize("count", [0, 4])
def test_accepted_tokens_outside_the_slots(count: int) -> None:
    slots = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    pool = rand(3, HEADS, 64, 128, dtype=F32, device="cpu")
    with pytest.raises(ValueError, match=f"num_accepted_tokens must be in 1 to 3, .*; got {count} at 0"):
        selective_state_update(
            pool, **inputs((2,), "cpu"), state_batch_indices=slots, dst_state_batch_indices=slots,
            cu_seqlens=torch.tensor([0, 2], dtype=torch.int32),
            num_accepted_tokens=torch.tensor([count], dtype=torch.int32),
        )  # fmt: skip


def test_strided_slots(device: str, checked: None) -> None:
    """Of a table that is part of a wider one, only its own slots count."""
    x = inputs((2, 1), device)
    wide = torch.tensor([[1, 99, 99], [0, 99, 99]], dtype=torch.int32, device=device)
    pool = rand(2, HEADS, 64, 128, dtype=F32, device=device)
    own, flat = pool.clone(), pool.clone()
    want = selective_state_update(pool, **x, state_batch_indices=wide[:, 0].contiguous())
    assert torch.equal(selective_state_update(flat, **x, state_batch_indices=wide[:, 0]), want)
    assert torch.equal(selective_state_update(own, **x, state_batch_indices=wide[:, :1]), want)
    assert torch.equal(own, pool)
    assert torch.equal(flat, pool)
    wide[1, 0] = 2
    for table in (wide[:, 0], wide[:, :1]):
        with pytest.raises(ValueError, match=r"state_batch_indices must be below 2, .*; got 2 at 1"):
            selective_state_update(own, **x, state_batch_indices=table)


def test_decay_at_its_extremes(device: str) -> None:
    """dt 0 keeps the state; a large dt forgets it."""
    x = inputs((1,), device, rest=False)
    dt = torch.tensor([0.0, 300.0, 0.0, 1.0], dtype=BF16, device=device)
    x["dt"] = dt[None, :, None].expand(1, HEADS, 64)
    x["A"] = torch.full((HEADS, 1, 1), -4.0, device=device).expand(HEADS, 64, 128)
    state = rand(1, HEADS, 64, 128, dtype=F32, device=device)
    before = state.clone()
    selective_state_update(state, **x)
    assert torch.equal(state[0, ::2], before[0, ::2])
    assert_close(state[0], expected(x, slice(0, 1), before[0])[1][-1], tolerance=STATE[F32])


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"backend": "triton"}, ValueError, "backend must be one of"),
    ({"algorithm": "fast"}, ValueError, "algorithm must be one of"),
    ({"rand_seed": torch.zeros(1)}, ValueError, "rand_seed must be None"),
    ({"state_scale": torch.zeros(1)}, ValueError, "state_scale must be None"),
    ({"A": torch.zeros(HEADS, 64, 128)}, ValueError, "A must hold one number for each head"),
    ({"dt": torch.zeros(2, HEADS, 64)}, ValueError, "dt must hold one number for each head"),
    ({"B": torch.zeros(2, 3, 128, dtype=BF16), "C": torch.zeros(2, 3, 128, dtype=BF16)}, ValueError,
     "B must have a number of heads that divides 4"),
    ({"C": torch.zeros(2, GROUPS, 64, dtype=BF16)}, ValueError, "C must have shape"),
    ({"x": torch.zeros(2, HEADS * 64, dtype=BF16)}, ValueError, "x must have shape"),
    ({"num_accepted_tokens": torch.ones(2, dtype=torch.int32)}, ValueError, "num_accepted_tokens must come with"),
    ({"state_batch_indices": torch.tensor([0, 2])}, ValueError, "state_batch_indices must be below 2"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED)
def test_refusals(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    state = rand(2, HEADS, 64, 128, dtype=F32, device="cpu")
    with pytest.raises(error, match=message):
        selective_state_update(state, **{**inputs((2,), "cpu"), **changes})
