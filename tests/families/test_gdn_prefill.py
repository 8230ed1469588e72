"""Prefill with a gated delta rule: packed sequences, shared heads, pools, checkpoints, extremes, refusals."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import fi_core
from families.harness import assert_close, assert_guards, guarded, impls, rand, strided, using
from families.linear_attention_reference import gated_delta_rule
from fi_core import gdn_kernels, gdn_prefill
from fi_core.gdn_decode import gated_delta_rule_decode_pretranspose
from fi_core.gdn_prefill import _segment_tokens, chunk_gated_delta_rule

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
LENGTHS = [65, 0, 1, 130, 0, 63, 64]


def inputs(
    lengths: list[int], device: str, *, dtype: torch.dtype = BF16, heads: tuple[int, int, int] = (2, 2, 4),
    dim: int = 128, index: torch.dtype = torch.int32, channel: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """channel: with a gate for each channel of k."""
    total, (hq, hk, hv) = sum(lengths), heads
    h = max(hq, hv)
    gates = (total, h, dim) if channel else (total, h)
    g = torch.sigmoid(rand(*gates, dtype=F32, device=device, seed=3) + 3)
    return {
        "q": strided(rand(total, hq, dim, dtype=dtype, device=device)),
        "k": strided(rand(total, hk, dim, dtype=dtype, device=device, seed=1)),
        "v": strided(rand(total, hv, dim, dtype=dtype, device=device, seed=2)),
        "g": strided(g) if channel else g,
        "beta": torch.sigmoid(rand(total, h, dtype=F32, device=device, seed=4)),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).to(index).to(device),
        "use_qk_l2norm_in_kernel": True,
    }


def expected(x: dict[str, Any], start: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Outputs of all sequences; the states of each before its first token, after each 64 and after the last."""
    ends, outputs, states = x["cu_seqlens"].tolist(), [], []
    q, k, v, g, beta = (x[name].cpu() for name in ("q", "k", "v", "g", "beta"))
    for i, (first, end) in enumerate(itertools.pairwise(ends)):
        own = slice(first, end)
        out, state = gated_delta_rule(
            q[own], k[own], v[own], g[own], beta[own], start[i].cpu(), q.shape[-1] ** -0.5,
            x["use_qk_l2norm_in_kernel"], every=64,
        )  # fmt: skip
        outputs.append(out)
        states.append(state)
    return torch.cat([o.reshape(-1, *outputs[0].shape[1:]) for o in outputs]), states


def tolerance(device: str, dtype: torch.dtype, state: bool = False) -> tuple[float, float]:
    """CUDA kernels round operands of products to the dtype of q, the CPU rounds outputs only."""
    if device == "cpu":
        return (1e-4, 1e-4) if state else {BF16: (1e-2, 1e-2), F16: (1.5e-3, 1e-3)}[dtype]
    return {BF16: (2e-2, 2e-2), F16: (3e-3, 3e-3)}[dtype]


@pytest.mark.parametrize("channel", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(("heads", "dim"), [((2, 2, 4), 128), ((4, 2, 2), 128), ((2, 2, 2), 64)])
def test_packed_sequences(
    heads: tuple[int, int, int], dim: int, dtype: torch.dtype, channel: bool, device: str
) -> None:
    """Lengths around a chunk, empty sequences; value heads that share keys, query heads that share them."""
    x = inputs(LENGTHS, device, dtype=dtype, heads=heads, dim=dim, index=torch.int64, channel=channel)
    start = rand(len(LENGTHS), max(heads), dim, dim, dtype=F32, device=device)
    want, states = expected(x, start)
    for impl, segment in itertools.product(impls("chunk_gated_delta_rule", device), (None, 64, 128)):
        out = guarded(want.shape, dtype, device, row_padding=8)
        final = guarded(start.shape, F32, device)
        with using("chunk_gated_delta_rule", impl):
            got, last = chunk_gated_delta_rule(
                **x, initial_state=start, output_final_state=True, output=out, output_state=final, _cp_chunk_len=segment
            )
        assert got is out
        assert last is final
        assert_close(out, want, tolerance=tolerance(device, dtype))
        assert_close(final, torch.stack([s[-1] for s in states]), tolerance=tolerance(device, dtype, True))
        assert torch.equal(final[1], start[1])  # of an empty sequence
        assert_guards(out)
        assert_guards(final)


def test_defaults(device: str) -> None:
    """No gates, no initial state, no normalisation, only the output."""
    x = inputs([70, 3], device, heads=(2, 2, 2))
    x["k"] = x["k"] * 128**-0.5
    x["use_qk_l2norm_in_kernel"] = False
    ones = {"g": torch.ones_like(x["g"]), "beta": torch.ones_like(x["beta"])}
    want, _ = expected({**x, **ones}, torch.zeros(2, 2, 128, 128))
    plain = {name: value for name, value in x.items() if name not in ones}
    assert_close(fi_core.chunk_gated_delta_rule(**plain), want, tolerance=tolerance(device, BF16))
    scaled = chunk_gated_delta_rule(**plain, scale=0.5).double() / (0.5 * 128**0.5)
    assert_close(scaled, want, tolerance=tolerance(device, BF16))


@pytest.mark.parametrize("channel", [False, True])
@pytest.mark.parametrize("segment", [None, 64])
def test_pools_and_checkpoints(segment: int | None, channel: bool, device: str) -> None:
    lengths = [128, 0, 200, 63]
    x = inputs(lengths, device, channel=channel)
    slots = torch.tensor([4, 0, 2, 5], device=device)
    pool = guarded((6, 4, 128, 128), F32, device)
    pool[slots] = rand(4, 4, 128, 128, dtype=F32, device=device)
    before = pool.clone()
    starts = torch.tensor([0, 1, 1, 4, 4], dtype=torch.int32, device=device)  # one row is left out
    checkpoints = guarded((5, 4, 128, 128), F32, device)
    want, states = expected(x, before[slots])
    out, returned = chunk_gated_delta_rule(
        **x, initial_state=pool, output_state=pool, output_final_state=True, state_indices=slots,
        state_checkpoints=checkpoints, checkpoint_cu_starts=starts, checkpoint_every_n_tokens=128,
        _cp_chunk_len=segment,
    )  # fmt: skip
    assert returned is pool
    assert_close(out, want, tolerance=tolerance(device, BF16))
    for i, slot in enumerate(slots.tolist()):
        assert_close(pool[slot], states[i][-1], tolerance=tolerance(device, BF16, True))
    assert pool[1].isnan().all()
    assert_close(checkpoints[0], states[0][2], tolerance=tolerance(device, BF16, True))
    assert_close(checkpoints[1], states[2][2], tolerance=tolerance(device, BF16, True))
    assert checkpoints[2:].isnan().all()
    assert_guards(pool)


@pytest.mark.parametrize("channel", [False, True])
def test_states_go_to_other_slots(channel: bool, device: str) -> None:
    """And a prompt from the state after a multiple of 64 tokens has the bits of the whole, in fp32."""
    lengths = [200, 70, 0]
    x = inputs(lengths, device, channel=channel)
    pool = rand(8, 4, 128, 128, dtype=F32, device=device, seed=8)
    before = pool.clone()
    source, target = torch.tensor([5, 2, 1], device=device), torch.tensor([0, -1, 3], dtype=torch.int32, device=device)
    want = chunk_gated_delta_rule(
        **x, initial_state=before, output_state=before.clone(), state_indices=source, use_cp=False
    )
    out, state = chunk_gated_delta_rule(
        **x, initial_state=pool, output_state=pool, output_final_state=True, state_indices=source,
        output_state_indices=target,
    )  # fmt: skip
    assert state is pool and torch.equal(out, want)
    assert torch.equal(pool[1:3], before[1:3]) and torch.equal(pool[4:], before[4:])
    assert torch.equal(pool[3], before[1]), "an empty sequence copies its state"
    own = {name: t[:200] if name in ("q", "k", "v", "g", "beta") else t for name, t in x.items()}
    other, first = before.clone(), 0
    for end, (read, written) in ((128, (5, 6)), (200, (6, 7))):
        part = {name: t[first:end] if name in ("q", "k", "v", "g", "beta") else t for name, t in own.items()}
        part["cu_seqlens"] = torch.tensor([0, end - first], device=device)
        piece, _ = chunk_gated_delta_rule(
            **part, initial_state=other, output_state=other, output_final_state=True,
            state_indices=torch.tensor([read], device=device),
            output_state_indices=torch.tensor([written], device=device),
        )  # fmt: skip
        assert torch.equal(piece, out[first:end])
        first = end
    assert torch.equal(other[7], pool[0])


@pytest.mark.parametrize("state_dtype", [BF16, F16])
def test_narrow_states(state_dtype: torch.dtype, device: str) -> None:
    x = inputs([66], device)
    start = rand(1, 4, 128, 128, dtype=state_dtype, device=device)
    final = torch.empty_like(start)
    want, states = expected(x, start)
    out = chunk_gated_delta_rule(**x, initial_state=start, output_state=final)
    assert_close(out, want, tolerance=tolerance(device, BF16))
    assert_close(final[0], states[0][-1], tolerance=(2e-2, 2e-2))


EXTREMES = ["g=0", "g=1", "some g=0", "tiny g", "beta=0", "beta=1", "k=0", "same k"]


@pytest.mark.parametrize(
    ("which", "channel"),
    [*((which, channel) for which in EXTREMES for channel in (False, True)), ("g=0 of some channels", True)],
)
def test_extremes(which: str, channel: bool, device: str) -> None:
    x = inputs([150], device, heads=(2, 2, 2), channel=channel)
    g, beta, k = x["g"], x["beta"], x["k"].clone()
    if which in ("g=0", "g=1"):
        g.fill_(float(which[-1]))
    elif which == "some g=0":
        g[::7] = 0
    elif which == "tiny g":
        g[5::9] = 1e-30
        g[6::9] = 1e-42
    elif which == "g=0 of some channels":  # one gate is 0 in each block of 16 tokens, the others are 1 or tiny
        g[...] = 1
        g[..., ::3] = 1e-6
        g[torch.arange(150, device=device), :, torch.arange(150, device=device) % 128] = 0
    elif which.startswith("beta"):
        beta.fill_(float(which[-1]))
    elif which == "k=0":
        k[3::5] = 0
    else:
        k[:] = k[:1]
    x["k"] = k
    start = rand(1, 2, 128, 128, dtype=F32, device=device)
    want, states = expected(x, start)
    for segment in (None, 64):
        out, final = chunk_gated_delta_rule(**x, initial_state=start, output_final_state=True, _cp_chunk_len=segment)
        assert_close(out, want, tolerance=tolerance(device, BF16))
        assert_close(final[0], states[0][-1], tolerance=tolerance(device, BF16, True))


def test_the_places_of_hopper(device: str) -> None:
    """FlashInfer's launchers of sm_90 write outputs, states and checkpoints of `chunk_gated_delta_rule`."""
    lengths = [130, 0, 64]
    x = inputs(lengths, device)
    g, cu_seqlens = x.pop("g"), x.pop("cu_seqlens")
    start = rand(3, 4, 128, 128, dtype=F32, device=device, seed=9)
    starts = torch.tensor([0, 2, 2, 3], device=device)
    options = {"checkpoint_cu_starts": starts, "checkpoint_every_n_tokens": 64}
    for use_cp, more in ((False, {}), (True, {"cp_chunk_len": 64, "max_seqlen": 130})):
        kept = [torch.zeros(3, 4, 128, 128, device=device) for _ in range(2)]
        want, state = chunk_gated_delta_rule(
            **x, g=g, scale=0.1, initial_state=start, output_final_state=True, cu_seqlens=cu_seqlens, use_cp=use_cp,
            state_checkpoints=kept[0], _cp_chunk_len=more.get("cp_chunk_len"), **options,
        )  # fmt: skip
        run = gdn_kernels.cp_delta_rule_dsl_sm90 if use_cp else gdn_kernels.chunk_gated_delta_rule_sm90
        initial = {"initial_state" if use_cp else "init_state": start}
        q, k = (t / (t.float().square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (x["q"], x["k"]))
        o, final = torch.empty_like(want), torch.empty_like(state)
        arguments = {"q": q.to(BF16), "k": k.to(BF16), "v": x["v"], "alpha": g, "beta": x["beta"]}
        assert run(o=o, state=final, **arguments, **initial, cu_seqlens=cu_seqlens, scale=0.1,
                   state_checkpoints=kept[1], **options, **more) is None  # fmt: skip
        assert_close(o, want, tolerance=(2e-2, 2e-2))  # q and k are rounded first
        for own, other in ((final, state), (kept[1], kept[0])):
            assert_close(own, other, tolerance=(2e-2, 2e-2))


def test_decode_continues_prefill(device: str) -> None:
    """A state of prefill is one of decode: both have K last."""
    x = inputs([40], device)
    want, _ = expected(x, torch.zeros(1, 4, 128, 128))
    first = {name: value[:39] if name in ("q", "k", "v", "g", "beta") else value for name, value in x.items()}
    first["cu_seqlens"] = torch.tensor([0, 39], device=device)
    _, state = chunk_gated_delta_rule(**first, output_final_state=True)
    last = {name: x[name][39][None, None] for name in ("q", "k", "v")}
    a = torch.log(torch.expm1(-torch.log(x["g"][39])))[None, None]  # softplus(a) = -log g
    out, _ = gated_delta_rule_decode_pretranspose(
        **last, state=state, A_log=torch.zeros(4, device=device), a=a, dt_bias=torch.zeros(4, device=device),
        b=torch.logit(x["beta"][39])[None, None],
    )  # fmt: skip
    assert_close(out[0, 0], want[39], tolerance=tolerance(device, BF16))


@pytest.mark.gpu
def test_gates_of_channels_are_those_of_heads() -> None:
    """In 4096 tokens, with gates that are alike in all channels; whatever was in the workspace."""
    x = inputs([4096], "cuda", heads=(4, 4, 4))
    alike = x["g"][..., None].expand(-1, -1, 128).contiguous()
    for use_cp in (False, True):
        want, last = chunk_gated_delta_rule(**x, output_final_state=True, use_cp=use_cp)
        out, state = chunk_gated_delta_rule(**{**x, "g": alike}, output_final_state=True, use_cp=use_cp)
        assert_close(out, want, tolerance=tolerance("cuda", BF16))
        assert_close(state, last, tolerance=tolerance("cuda", BF16, True))


@pytest.mark.gpu
def test_many_heads_are_as_few() -> None:
    """Where there are many chunks, a CTA prepares four heads of one key: the heads of a part get the same results."""
    x = inputs([10600], "cuda", heads=(16, 16, 64), dim=64)
    some = {name: value[:, :8] if name in ("v", "g", "beta") else value for name, value in x.items()}
    some = {**some, "q": x["q"][:, :2], "k": x["k"][:, :2]}
    out, state = chunk_gated_delta_rule(**x, output_final_state=True, use_cp=False)
    want, last = chunk_gated_delta_rule(**some, output_final_state=True, use_cp=False)
    assert torch.equal(out[:, :8], want)
    assert torch.equal(state[:, :8], last)


class _OnGpu(torch.Tensor):
    """A tensor whose sequences are split as on a GPU."""

    def get_device(self) -> int:
        return 0


@pytest.mark.parametrize(("use_cp", "splits"), [(0, False), (False, False), (1, True), (True, True), ("auto", True)])
def test_segments_are_asked_for_by_truth(use_cp: Any, splits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[dict[str, Any]] = []
    monkeypatch.setattr(gdn_prefill, "_chunk", lambda *arguments, **named: called.append(named))
    monkeypatch.setattr(gdn_prefill, "_segments_on", lambda device, *shape: _segment_tokens(132, *shape))
    x = inputs([10600], "cpu")
    chunk_gated_delta_rule(**{**x, "q": x["q"].as_subclass(_OnGpu)}, use_cp=use_cp)
    assert bool(called[0]["segment_tokens"]) is splits


def test_indices_without_states(device: str) -> None:
    """Slots of states that are neither read nor written do not count."""
    x = inputs([3, 5], device)
    slots = torch.tensor([7, 0], dtype=torch.int32, device=device)
    assert torch.equal(chunk_gated_delta_rule(**x, state_indices=slots), chunk_gated_delta_rule(**x))


def test_a_negative_slot_is_no_state(device: str) -> None:
    """Its sequence starts from zeros, and its last state goes nowhere."""
    x, pool = inputs([70, 5], device), rand(3, 4, 128, 128, dtype=F32, device=device)
    before, slots = pool.clone(), torch.tensor([-1, 1], device=device)
    out = chunk_gated_delta_rule(**x, initial_state=pool, output_state=pool, state_indices=slots)
    assert torch.equal(out[:70], chunk_gated_delta_rule(**x)[:70])
    assert torch.equal(pool[::2], before[::2]) and not torch.equal(pool[1], before[1])


def test_no_tokens_and_no_sequences(device: str) -> None:
    start = rand(2, 4, 128, 128, dtype=F32, device=device)
    out, final = chunk_gated_delta_rule(**inputs([0, 0], device), initial_state=start, output_final_state=True)
    assert out.shape == (0, 4, 128)
    assert torch.equal(final, start)
    assert chunk_gated_delta_rule(**inputs([], device)).shape == (0, 4, 128)


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"cu_seqlens": None}, AssertionError, "cu_seqlens must be given"),
    ({"q": torch.zeros(5, 128, dtype=BF16)}, ValueError, r"q must have shape \[T, Hq, D\]; got \[5, 128\]"),
    ({"v": torch.zeros(5, dtype=BF16)}, ValueError, r"v must have shape \[T, Hv, D\]; got \[5\]"),
    ({"cu_seqlens": torch.zeros(1, 2)}, ValueError, r"cu_seqlens must have shape \[N \+ 1\]; got \[1, 2\]"),
    ({"cu_seqlens": torch.zeros(0)}, ValueError, r"cu_seqlens must have shape \[N \+ 1\]; got \[0\]"),
    ({"checkpoint_every_n_tokens": -64}, ValueError, "checkpoint_every_n_tokens must be a multiple of 64; got -64"),
    ({"cu_seqlens": torch.zeros(2)}, TypeError, "cu_seqlens must be int32 or int64"),
    ({"use_cp": "yes"}, ValueError, "use_cp must be"),
    ({"backend": "triton"}, ValueError, "backend must be one of"),
    ({"checkpoint_every_n_tokens": 65}, ValueError, "checkpoint_every_n_tokens must be a multiple of 64"),
    ({"checkpoint_every_n_tokens": 64}, ValueError, "state_checkpoints and checkpoint_cu_starts must be given"),
    ({"output_state_indices": torch.zeros(1, dtype=torch.int32), "output_final_state": True}, ValueError,
     "output_state must be given with state_indices and output_state_indices"),
    ({"output_state_indices": torch.tensor([9]), "output_state": torch.zeros(2, 4, 128, 128)}, ValueError,
     "output_state_indices must"),
    ({"state_indices": torch.zeros(1, dtype=torch.int32), "output_final_state": True}, ValueError,
     "output_state must be given"),
    ({"g": torch.ones(5, 2)}, ValueError, "g must have shape"),
    ({"g": torch.ones(5, 4, 64)}, ValueError, "g must have shape"),
    ({"g": torch.ones(5, 4, 128, dtype=BF16)}, TypeError, "g must be float32"),
    ({"g": torch.ones(5, 128, 4).mT}, ValueError, "g must be contiguous in its last dimension"),
    ({"beta": torch.ones(5, 4, dtype=BF16)}, TypeError, "beta must be float32"),
    ({"k": torch.zeros(5, 3, 128, dtype=BF16)}, ValueError, "k must have a number of heads that divides 4"),
    ({"v": torch.zeros(5, 4, 128, dtype=F16)}, TypeError, "v must have the dtype of q"),
    ({"initial_state": torch.zeros(2, 4, 128, 128)}, ValueError, "initial_state must have shape"),
    ({"output": torch.zeros(5, 4, 128)}, TypeError, "output must have the dtype of q"),
    ({"cu_seqlens": torch.tensor([0, 6])}, ValueError, "cu_seqlens must end at 5 or less; got 6"),
    ({"cu_seqlens": torch.tensor([0, 3, 2])}, ValueError, "cu_seqlens must not decrease"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED)
def test_refusals(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        chunk_gated_delta_rule(**{**inputs([5], "cpu"), **changes})
