"""Decoding with a gated delta rule: layouts, pools, padding, drafted tokens, gates at their extremes, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from families.harness import assert_close, assert_guards, guarded, rand, strided
from families.linear_attention_reference import gated_delta_rule, gates
from fi_core import gdn_kernels
from fi_core.gdn_decode import gated_delta_rule_decode, gated_delta_rule_decode_pretranspose, gated_delta_rule_mtp
from fi_core.observe.trace import fi_trace

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
STATE = {F32: (1e-5, 1e-5), BF16: (1e-2, 1e-2)}  # tolerances of states


def inputs(
    batch: int, tokens: int, device: str, *, dtype: torch.dtype = BF16, heads: tuple[int, int] = (2, 4),
    dims: tuple[int, int] = (128, 128), channel: bool = False,
) -> dict[str, Any]:  # fmt: skip
    (h, hv), (k, v) = heads, dims
    x = {
        "q": strided(rand(batch, tokens, h, k, dtype=dtype, device=device)),
        "k": strided(rand(batch, tokens, h, k, dtype=dtype, device=device, seed=1)),
        "v": strided(rand(batch, tokens, hv, v, dtype=dtype, device=device, seed=2)),
        "A_log": rand(hv, dtype=F32, device=device, seed=3),
        "a": rand(batch, tokens, hv, *([k] if channel else []), dtype=dtype, device=device, seed=4),
        "dt_bias": rand(hv, *([k] if channel else []), dtype=F32, device=device, seed=5),
        "b": rand(batch, tokens, hv, dtype=dtype, device=device, seed=6),
    }
    return x


def expected(
    x: dict[str, Any], row: int, state: torch.Tensor, l2norm: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    own = {name: x[name][row].cpu() for name in ("q", "k", "v", "a", "b")}
    alpha, beta = gates(own["a"], own["b"], x["A_log"].cpu(), x["dt_bias"].cpu())
    return gated_delta_rule(own["q"], own["k"], own["v"], alpha, beta, state.cpu(), own["q"].shape[-1] ** -0.5, l2norm)


@pytest.mark.parametrize("channel", [False, True])
@pytest.mark.parametrize(("dtype", "state_dtype"), [(BF16, F32), (BF16, BF16), (F16, F32)])
@pytest.mark.parametrize(
    ("batch", "tokens", "dims", "gaps"),
    [
        (3, 1, (128, 128), True), (3, 1, (128, 128), False), (2, 1, (256, 40), False), (1, 1, (64, 64), False),
        (2, 3, (128, 136), True), (1, 2, (64, 40), True),
    ],
)  # fmt: skip
def test_states_in_place(
    dtype: torch.dtype, state_dtype: torch.dtype, batch: int, tokens: int, dims: tuple[int, int], gaps: bool,
    channel: bool, device: str,
) -> None:  # fmt: skip
    """gaps: rows of the state are not contiguous with each other."""
    x = inputs(batch, tokens, device, dtype=dtype, dims=dims, channel=channel)
    state = strided(rand(batch, 4, dims[1], dims[0], dtype=state_dtype, device=device), row_padding=8 if gaps else 0)
    before, out = state.clone(), guarded((batch, tokens, 4, dims[1]), dtype, device, row_padding=8)
    got, returned = gated_delta_rule_decode_pretranspose(**x, state=state, output=out)
    assert got is out
    assert returned is state
    for row in range(batch):
        want, states = expected(x, row, before[row])
        assert_close(out[row], want)
        assert_close(state[row], states[-1], tolerance=STATE[state_dtype])
    assert_guards(out)
    assert_guards(state)


def test_without_normalisation_and_with_a_scale(device: str) -> None:
    x = inputs(1, 1, device)
    state = rand(1, 4, 128, 128, dtype=F32, device=device, scale=0.1)
    x["k"] = x["k"] * 0.1
    want, _ = expected(x, 0, state[0].clone(), l2norm=False)
    out, _ = gated_delta_rule_decode_pretranspose(**x, state=state, scale=0.5, use_qk_l2norm=False)
    assert_close(out[0], want * (0.5 * 128**0.5), tolerance=(1e-2, 2e-2))


def test_state_with_v_last(device: str) -> None:
    x = inputs(3, 1, device, dims=(128, 96))
    state = rand(3, 4, 128, 96, dtype=F32, device=device)
    before = state.clone()
    out, returned = gated_delta_rule_decode(**x, state=state)
    assert returned is state
    for row in range(3):
        want, states = expected(x, row, before[row].mT)
        assert_close(out[row], want)
        assert_close(state[row].mT, states[-1], tolerance=STATE[F32])


@pytest.mark.parametrize("wide", [False, True])
def test_pool(wide: bool, device: str) -> None:
    """Slots in any order; padding reads and writes nothing and gives 0; other slots to write."""
    indices = torch.tensor([5, -1, 0, 2], dtype=torch.int64 if wide else torch.int32, device=device)
    to = torch.tensor([1, 6, -1, 2], dtype=indices.dtype, device=device)
    x = inputs(4, 1, device)
    for destination in (None, to):
        pool = guarded((7, 4, 128, 128), F32, device)
        used = [5, 0, 2]
        pool[used] = rand(3, 4, 128, 128, dtype=F32, device=device)
        before = pool.clone()
        out, returned = gated_delta_rule_decode_pretranspose(
            **x, state=None, initial_state=pool, initial_state_indices=indices, output_state_indices=destination
        )
        assert returned is pool
        assert (out[1] == 0).all()
        after = before.clone().double().cpu()
        for row, slot in ((0, 5), (2, 0), (3, 2)):
            want, states = expected(x, row, before[slot])
            assert_close(out[row], want)
            target = slot if destination is None else int(to[row])
            if target >= 0:
                after[target] = states[-1]
        assert_close(pool, after, tolerance=STATE[F32])
        assert_guards(pool)


def test_disabled_update_keeps_the_states(device: str) -> None:
    x = inputs(2, 3, device)
    state = rand(2, 4, 128, 128, dtype=F32, device=device)
    before = state.clone()
    kept = guarded((3, 4, 4, 128, 128), F32, device)  # more rows and steps than needed
    gated_delta_rule_decode_pretranspose(**x, state=state, intermediate_states_buffer=kept, disable_state_update=True)
    assert torch.equal(state, before)
    for row in range(2):
        assert_close(kept[row, :3], expected(x, row, before[row])[1][1:], tolerance=STATE[F32])
    assert kept[2].isnan().all()
    assert kept[:, 3].isnan().all()
    assert_guards(kept)


def test_drafted_tokens(device: str) -> None:
    """States between go to a buffer, or to slots of the pool; padding and negative slots are skipped."""
    x, tokens = inputs(3, 4, device), 4
    indices = torch.tensor([3, -1, 1], dtype=torch.int32, device=device)
    start = rand(14, 4, 128, 128, dtype=F32, device=device)
    kept, pool = guarded((3, tokens, 4, 128, 128), F32, device), start.clone()
    out, returned = gated_delta_rule_mtp(
        **x, initial_state=pool, initial_state_indices=indices, intermediate_states_buffer=kept,
        disable_state_update=True,
    )  # fmt: skip
    assert returned is pool
    assert torch.equal(pool, start)
    assert (out[1] == 0).all()
    assert kept[1].isnan().all()
    slots = torch.tensor([[3, 4, 5, -1], [0, 0, 0, 0], [6, 7, -1, 8]], dtype=torch.int32, device=device)
    scattered, _ = gated_delta_rule_mtp(
        **x, initial_state=pool, initial_state_indices=indices, ssm_state_indices=slots, disable_state_update=False
    )
    assert torch.equal(scattered, out)
    after = start.double().cpu()
    for row, slot in ((0, 3), (2, 1)):
        want, states = expected(x, row, start[slot])
        assert_close(out[row], want)
        assert_close(kept[row], states[1:], tolerance=STATE[F32])
        for t in range(tokens):
            if slots[row, t] >= 0:
                after[slots[row, t]] = states[t + 1]
    assert_close(pool, after, tolerance=STATE[F32])


def test_drafted_tokens_on_bf16_states(device: str) -> None:
    """The entry that SGLang imports: the pool is updated unless the call says otherwise."""
    x, indices = inputs(2, 3, device), torch.tensor([2, 0], dtype=torch.int32, device=device)
    start = rand(3, 4, 128, 128, dtype=BF16, device=device)
    kept, pool = torch.empty(2, 3, 4, 128, 128, dtype=BF16, device=device), start.clone()
    given: dict[str, Any] = {**x, "initial_state_indices": indices}
    out = gdn_kernels.gated_delta_rule_mtp(**given, initial_state_source=pool, intermediate_states_buffer=kept)
    for row, slot in ((0, 2), (1, 0)):
        want, states = expected(x, row, start[slot])
        assert_close(out[row], want)
        assert_close(kept[row], states[1:], tolerance=STATE[BF16])
        assert_close(pool[slot], states[-1], tolerance=STATE[BF16])
    assert torch.equal(pool[1], start[1])
    one = {name: tensor[:, :1] if name in ("q", "k", "v", "a", "b") else tensor for name, tensor in given.items()}
    pool = start.clone()
    assert_close(gdn_kernels.gated_delta_rule(**one, initial_state_source=pool)[0], expected(x, 0, start[2])[0][:1])
    with pytest.raises(ValueError, match="recovery_steps: 0 is required; got 1; keep states in intermediate_states"):
        gdn_kernels.gated_delta_rule_mtp(**given, initial_state_source=pool, recovery_steps=1)
    kept.zero_()
    pool = start.clone()
    given["initial_state_source"] = pool
    assert torch.equal(gdn_kernels.gated_delta_rule_mtp_wy_output_only(**given), out)
    assert torch.equal(pool, start)
    with pytest.raises(ValueError, match="intermediate_states_buffer: None is required; got a tensor; gdn_kernels"):
        gdn_kernels.gated_delta_rule_mtp_wy_output_only(**given, intermediate_states_buffer=kept)


def test_drafted_tokens_update_the_state_only_if_asked_to(device: str) -> None:
    x = inputs(1, 2, device)
    indices = torch.zeros(1, dtype=torch.int32, device=device)
    start = rand(1, 4, 128, 128, dtype=F32, device=device)
    pool = start.clone()
    with pytest.warns(UserWarning, match="disable_state_update"):
        gated_delta_rule_mtp(**x, initial_state=pool, initial_state_indices=indices)
    assert torch.equal(pool, start)
    gated_delta_rule_mtp(**x, initial_state=pool, initial_state_indices=indices, disable_state_update=False)
    assert_close(pool[0], expected(x, 0, start[0])[1][-1], tolerance=STATE[F32])


def test_drafts_are_described_only_where_states_are_written() -> None:
    template = gated_delta_rule_mtp.fi_trace.trace.templates[0]  # type: ignore[attr-defined]
    call = template.sample()
    assert fi_trace(gated_delta_rule_mtp, **call)["outputs"].keys() == {"output", "state"}
    for value in (True, None):
        with pytest.raises(ValueError, match="no trace template covers"):
            fi_trace(gated_delta_rule_mtp, **{**call, "disable_state_update": value})


def test_gates_at_their_extremes(device: str) -> None:
    """alpha 0 and 1, beta 0 and 1, zero keys and queries: what remains is exact."""
    x = inputs(1, 1, device, heads=(4, 4))
    state = rand(1, 4, 128, 128, dtype=F32, device=device)
    before = state.clone()
    x["A_log"] = torch.tensor([5.0, -200.0, -200.0, 0.0], device=device)
    x["a"] = torch.tensor([100.0, 0, 0, 0], dtype=BF16, device=device).view(1, 1, 4)
    x["b"] = torch.tensor([300.0, -300.0, 300.0, 0], dtype=BF16, device=device).view(1, 1, 4)
    x["dt_bias"] = torch.zeros(4, device=device)
    x["k"] = x["k"].clone()
    x["k"][0, 0, 2] = 0
    x["q"] = x["q"].clone()
    x["q"][0, 0, 3] = 0
    out, _ = gated_delta_rule_decode_pretranspose(**x, state=state)
    want, states = expected(x, 0, before[0])
    assert_close(out[0], want)
    assert_close(state[0], states[-1], tolerance=STATE[F32])
    assert torch.equal(state[0, 1:3], before[0, 1:3])
    assert (out[0, 0, 3] == 0).all()


def test_no_rows(device: str) -> None:
    x = inputs(1, 1, device)
    none = {name: t[:0] if name in "qkvab" else t for name, t in x.items()}
    out, _ = gated_delta_rule_decode_pretranspose(**none, state=rand(0, 4, 128, 128, dtype=F32, device=device))
    assert out.shape == (0, 1, 4, 128)


def refused(**changes: Any) -> dict[str, Any]:
    x = inputs(2, 1, "cpu")
    return {**x, "state": rand(2, 4, 128, 128, dtype=F32, device="cpu"), **changes}


INT = torch.int32
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"backend": "triton"}, ValueError, "backend must be one of"),
    ({"state": None}, ValueError, "exactly one of state and initial_state"),
    ({"initial_state": torch.zeros(2, 4, 128, 128)}, ValueError, "exactly one of state and initial_state"),
    ({"state": torch.zeros(3, 4, 128, 128)}, ValueError, "state must have 2 slots"),
    ({"state": torch.zeros(2, 4, 128, 128, dtype=F16)}, ValueError, "requires state in f32, bf16, got f16"),
    ({"state": torch.zeros(2, 4, 128, 256)[..., ::2]}, ValueError, "state must be contiguous in one of"),
    ({"state": torch.zeros(2, 3, 128, 128)}, ValueError, "heads"),
    ({"A_log": torch.zeros(4, dtype=BF16)}, TypeError, "A_log must be float32"),
    ({"b": torch.zeros(2, 1, 3)}, ValueError, "b must have shape"),
    ({"dt_bias": torch.zeros(4, 128)}, ValueError, "dt_bias must have shape"),
    ({"q": torch.zeros(2, 1, 2, 128)}, ValueError, "requires dtype in bf16, f16, got f32"),
    ({"k": torch.zeros(2, 1, 3, 128, dtype=BF16)}, ValueError, "k must have a number of heads that divides 4"),
    ({"output": torch.zeros(2, 1, 4, 64, dtype=BF16)}, ValueError, "output must have shape"),
]  # fmt: skip


def test_caches_of_what_states_are_computed_from_are_refused() -> None:
    x, pool = inputs(1, 2, "cpu"), torch.zeros(1, 4, 128, 128)
    for option, value in (
        ("cache_replayssm", True), ("replayssm_rawv", pool), ("replayssm_rawk", pool), ("replayssm_g", pool),
        ("replayssm_beta", pool),
    ):  # fmt: skip
        with pytest.raises(NotImplementedError, match=f"{option}: not supported, keep the state after each token in"):
            gated_delta_rule_mtp(
                **x, initial_state=pool, initial_state_indices=torch.zeros(1, dtype=INT), disable_state_update=True,
                **{option: value},
            )  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED)
def test_refusals(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        gated_delta_rule_decode_pretranspose(**refused(**changes))


def test_refused_indices(device: str, checked: None) -> None:
    x, pool = inputs(2, 1, device), rand(3, 4, 128, 128, dtype=F32, device=device)
    beyond = torch.tensor([0, 3], dtype=INT, device=device)
    with pytest.raises(ValueError, match="state_indices must be below 3, the slots of the state; got 3 at 1"):
        gated_delta_rule_decode_pretranspose(**x, state=None, initial_state=pool, initial_state_indices=beyond)
    with pytest.raises(ValueError, match="initial_state_indices must be given"):
        gated_delta_rule_decode_pretranspose(**x, state=None, initial_state=pool)
    with pytest.raises(ValueError, match="disable_state_update must be False"):
        gated_delta_rule_mtp(
            **x, initial_state=pool, initial_state_indices=beyond[:1], ssm_state_indices=beyond[None],
            disable_state_update=True,
        )  # fmt: skip
