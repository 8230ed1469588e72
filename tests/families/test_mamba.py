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


def of_elements(x: dict[str, Any], device: str) -> dict[str, Any]:
    """The inputs with a number of dt, A, D and dt_bias for each element."""
    shape, width = x["x"].shape, x["A"].shape
    return x | {
        "dt": rand(*shape, dtype=x["dt"].dtype, device=device, seed=11).abs(),
        "A": -rand(*width, dtype=F32, device=device, seed=12).abs(),
        "D": rand(*width[:2], dtype=F32, device=device, seed=13),
        "dt_bias": rand(*width[:2], dtype=F32, device=device, seed=14),
    }


def elements_expected(x: dict[str, Any], row: Any, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs `[T, heads, dim]` and states `[T + 1, ..]` in fp64, from the formula with every number of its own."""
    own = {name: value[row].double().cpu() for name, value in x.items() if name in ("x", "dt", "B", "C", "z")}
    own = {name: value.reshape(-1, *value.shape[-2:]) for name, value in own.items()}
    rate, skip, bias = (x[name].double().cpu() for name in ("A", "D", "dt_bias"))
    b, c = (own[name].repeat_interleave(HEADS // GROUPS, 1)[:, :, None, :] for name in "BC")
    states, outputs = [state.double().cpu()], []
    for t in range(len(own["x"])):
        dt = torch.nn.functional.softplus(own["dt"][t] + bias)
        s = torch.exp(dt[..., None] * rate) * states[-1] + (dt * own["x"][t])[..., None] * b[t]
        outputs.append(((s * c[t]).sum(-1) + skip * own["x"][t]) * torch.nn.functional.silu(own["z"][t]))
        states.append(s)
    return torch.stack(outputs), torch.stack(states)


@pytest.mark.parametrize("state_dtype", [F32, BF16, F16])
@pytest.mark.parametrize(("rows", "dim", "dstate"), [((3,), 64, 128), ((2, 3), 37, 64), ((2,), 64, 256)])
def test_a_number_for_each_element(
    rows: tuple[int, ...], dim: int, dstate: int, state_dtype: torch.dtype, device: str
) -> None:
    x = of_elements(inputs(rows, device, dtype=F32, dim=dim, dstate=dstate), device)
    state = strided(rand(rows[0], HEADS, dim, dstate, dtype=state_dtype, device=device), row_padding=8)
    before, out = state.clone(), guarded((*rows, HEADS, dim), F32, device, row_padding=8)
    selective_state_update(state, **x, out=out)
    for row in range(rows[0]):
        want, states = elements_expected(x, row, before[row])
        assert_close(out[row].view(-1, HEADS, dim), want, tolerance=(1e-4, 1e-3))
        assert_close(state[row], states[-1], tolerance=STATE[state_dtype])
    assert_guards(out)
    assert_guards(state)


@pytest.mark.parametrize("name", ["dt", "A", "D", "dt_bias"])
def test_each_of_the_numbers_alone(name: str, device: str) -> None:
    usual = inputs((2,), device, dtype=F32)
    x = usual | {name: of_elements(usual, device)[name]}
    state = rand(2, HEADS, 64, 128, dtype=F32, device=device)
    before = state.clone()
    out = selective_state_update(state, **x)
    for row in range(2):
        want, states = elements_expected(x, row, before[row])
        assert_close(out[row].view(-1, HEADS, 64), want, tolerance=(1e-4, 1e-3))
        assert_close(state[row], states[-1], tolerance=STATE[F32])


def test_the_form_without_heads(device: str) -> None:
    x = of_elements(inputs((3,), device, dtype=F32), device)
    flat = {name: value[:, 0] if name in ("x", "dt", "B", "C", "z") else value[0] for name, value in x.items()
            if name != "dt_softplus"}  # fmt: skip
    one = {name: value[:, :1] if name in ("x", "dt", "B", "C", "z") else value[:1] for name, value in x.items()
           if name != "dt_softplus"}  # fmt: skip
    state = rand(5, 1, 64, 128, dtype=F32, device=device)
    slots, kept = torch.tensor([4, 0, 2], dtype=torch.int32, device=device), torch.zeros(3, 1, 64, 128, device=device)
    other = state[:, 0].clone()
    want = selective_state_update(state, **one, state_batch_indices=slots)
    out = selective_state_update(
        other, **flat, state_batch_indices=slots, intermediate_states_buffer=kept, dt_softplus=False
    )
    assert out.shape == (3, 64)
    assert torch.equal(out, want[:, 0])
    assert torch.equal(other, state[:, 0])
    assert torch.equal(kept[:, 0], state[slots.long(), 0])


@pytest.mark.parametrize(("dtype", "most"), [(torch.int16, 32767), (torch.int8, 127)])
@pytest.mark.parametrize("elements", [False, True])
def test_states_of_integers(dtype: torch.dtype, most: int, elements: bool, device: str) -> None:
    """A row of integers times its scale is the state; its largest number becomes the largest integer."""
    x = inputs((2, 3), device, dtype=F32)
    x = of_elements(x, device) if elements else x
    state = (rand(4, HEADS, 64, 128, dtype=F32, device=device) * most / 4).round().clamp(-most, most).to(dtype)
    scale = rand(4, HEADS, 64, dtype=F32, device=device, seed=8).abs() / most + 1e-6
    before = state.double() * scale.double()[..., None]
    others = state[[1, 2]].clone(), scale[[1, 2]].clone()
    kept, kept_scale = torch.zeros(2, 3, HEADS, 64, 128, dtype=dtype, device=device), torch.zeros(2, 3, HEADS, 64, 1)
    kept_scale = kept_scale.to(device)
    out = selective_state_update(
        state, **x, state_batch_indices=torch.tensor([3, 0], device=device), state_scale=scale[..., None],
        intermediate_states_buffer=kept, intermediate_state_scales=kept_scale,
    )  # fmt: skip
    for row, slot in ((0, 3), (1, 0)):
        want, states = elements_expected(x, row, before[slot])
        assert_close(out[row], want, tolerance=(1e-4, 1e-3))
        assert_rows(state[slot], scale[slot], states[-1], most)
        for t in range(3):
            assert_rows(kept[row, t], kept_scale[row, t, ..., 0], states[t + 1], most)
    assert torch.equal(state[[1, 2]], others[0]) and torch.equal(scale[[1, 2]], others[1])


def assert_rows(q: torch.Tensor, scale: torch.Tensor, want: torch.Tensor, most: int) -> None:
    """Each number within half a step of its row, whose largest becomes `most`."""
    q, scale = q.double().cpu(), scale.double().cpu()
    torch.testing.assert_close(scale, want.abs().amax(-1) / most, rtol=1e-5, atol=0)
    assert (q.abs().amax(-1) == most).all()
    assert ((q * scale[..., None] - want).abs() <= 0.5001 * scale[..., None] + 1e-5).all()


def test_rows_of_zeros_have_a_scale() -> None:
    x = {name: torch.zeros_like(v) if torch.is_tensor(v) else v for name, v in inputs((1,), "cpu", dtype=F32).items()}
    state, scale = torch.zeros(1, HEADS, 64, 128, dtype=torch.int16), torch.zeros(1, HEADS, 64)
    selective_state_update(state, **x, state_scale=scale)
    assert not state.any() and (scale == 1).all()


def test_stochastic_rounding(device: str) -> None:
    """Each number becomes one of the two next to it, on average itself; a seed gives the same again."""
    x = inputs((1,), device, dtype=F32)
    start = rand(1, HEADS, 64, 128, dtype=F32, device=device).half()
    exact = start.float()
    selective_state_update(exact, **x)

    def rounded(seed: int, **options: Any) -> torch.Tensor:
        state = start.clone()
        seeds = torch.tensor([seed], dtype=torch.int64, device=device)
        selective_state_update(state, **x, rand_seed=seeds, **options)
        return state

    draws = torch.stack([rounded(seed) for seed in range(400)])
    assert torch.equal(draws[3], rounded(3)) and not torch.equal(draws[3], draws[4])
    assert not torch.equal(rounded(3, philox_rounds=5), draws[3])
    step = torch.exp2(exact.abs().double().log2().floor().clamp(min=-14) - 10)
    off = (draws.double() - exact.double()) / step
    assert off.abs().max() < 1.001
    assert off.mean(0).abs().mean() < 0.03 and off.mean(0).abs().max() < 0.15, "0.025 is the most of 400 draws of one"
    nearest = start.clone()
    selective_state_update(nearest, **x)
    assert torch.equal(nearest, exact.half())


def test_rounding_of_the_smallest_numbers() -> None:
    """Below 2^-14 the step of fp16 is 2^-24."""
    x = {name: torch.zeros_like(v) if torch.is_tensor(v) else v for name, v in inputs((1,), "cpu", dtype=F32).items()}
    x["dt_softplus"] = False
    x["dt"], x["x"], x["B"] = (torch.ones_like(x[name]) for name in ("dt", "x", "B"))
    x["x"] *= 2.0**-24 / 4
    seed, state = torch.tensor([1]), torch.zeros(1, HEADS, 64, 128, dtype=F16)
    selective_state_update(state, **x, rand_seed=seed)
    assert set(state.unique().tolist()) == {0.0, 2.0**-24}
    assert abs(float((state > 0).float().mean()) - 0.25) < 0.01


def test_options_of_rounding_that_do_not_fit() -> None:
    half, ints = torch.zeros(2, HEADS, 64, 128, dtype=F16), torch.zeros(2, HEADS, 64, 128, dtype=torch.int16)
    seed, scale = torch.tensor([1]), torch.ones(2, HEADS, 64)
    for state, options, words in (
        (half, {"rand_seed": torch.tensor([1, 2])}, "rand_seed must have 1 element"),
        (half, {"rand_seed": seed, "philox_rounds": 0}, "philox_rounds must be above 0; got 0"),
        (half, {"rand_seed": seed, "state_scale": scale}, "state_scale must be given with .*, and with no other"),
        (ints, {}, "state_scale must be given with an int8 or int16 state, and is missing"),
        (ints, {"state_scale": scale[:1]}, "state_scale must have shape"),
        (
            ints,
            {"state_scale": scale, "intermediate_states_buffer": ints[:, None].clone()},
            "intermediate_state_scales must be given with .*, and are missing",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            selective_state_update(state, **inputs((2,), "cpu"), **options)


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"backend": "triton"}, ValueError, "backend must be one of"),
    ({"algorithm": "fast"}, ValueError, "algorithm must be one of"),
    ({"rand_seed": 3}, TypeError, "rand_seed must be an int64 tensor of 1 element; got int"),
    ({"rand_seed": torch.zeros(1, dtype=torch.int64)}, ValueError, "rand_seed must come with a float16 state; got f"),
    ({"state_scale": torch.zeros(2, HEADS, 64)}, ValueError, "state_scale must be given with an int8 or int16"),
    ({"A": torch.zeros(HEADS, 64, 64)}, ValueError, "A must have shape"),
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
