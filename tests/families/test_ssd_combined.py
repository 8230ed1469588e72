"""Mamba-2 prefill: packed sequences, batches, pools, checkpoints, bits, the forms of FlashInfer and vLLM, refusals."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from families.harness import assert_close, assert_guards, guarded, rand, strided
from families.linear_attention_reference import selective_state_update as reference
from fi_core.mamba import SSDCombined, mamba_chunk_scan_combined_varlen, ssd_combined_fwd

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
HEADS, GROUPS = 4, 2
LENGTHS = [70, 0, 200, 1, 64, 129]
# Outputs sum up to 128 terms of size 10, which may cancel. In fp64 with the operands of products rounded to bf16, the
# worst of them are 0.21 beyond the relative part.
OUTPUTS, STATES = (2e-2, 3e-1), (1e-2, 3e-2)


def inputs(tokens: int, device: str, dim: int = 64, dstate: int = 128, dtype: torch.dtype = BF16) -> dict[str, Any]:
    """Packed: `[1, T, ..]`."""
    return {
        "x": strided(rand(1, tokens, HEADS, dim, dtype=dtype, device=device)),
        "dt": rand(1, tokens, HEADS, dtype=dtype, device=device, seed=1),
        "A": -rand(HEADS, dtype=F32, device=device, seed=2).abs(),
        "B": strided(rand(1, tokens, GROUPS, dstate, dtype=dtype, device=device, seed=3)),
        "C": strided(rand(1, tokens, GROUPS, dstate, dtype=dtype, device=device, seed=4)),
        "D": rand(HEADS, dtype=dtype, device=device, seed=5),
        "z": strided(rand(1, tokens, HEADS, dim, dtype=dtype, device=device, seed=6)),
        "dt_bias": rand(HEADS, dtype=F32, device=device, seed=7),
        "dt_softplus": True,
    }


def part(x: dict[str, Any], first: int, end: int) -> dict[str, Any]:
    return {name: t[:, first:end] if name in ("x", "dt", "B", "C", "z") else t for name, t in x.items()}


def expected(x: dict[str, Any], first: int, end: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs `[T, heads, dim]` and states `[T + 1, ..]` of tokens of the packed axis."""
    own = {name: t[0].cpu() for name, t in part(x, first, end).items() if name in ("x", "dt", "B", "C", "z")}
    dt = torch.nn.functional.softplus(own["dt"].double() + x["dt_bias"].cpu().double())
    d = x["D"].cpu()
    return reference(state.cpu(), own["x"], dt, x["A"].cpu(), own["B"], own["C"], d if d.ndim == 1 else None, own["z"])


def offsets(lengths: list[int], device: str) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def spans(lengths: list[int]) -> list[tuple[int, int]]:
    ends = offsets(lengths, "cpu").tolist()
    return list(itertools.pairwise(ends))


@pytest.mark.parametrize("state_dtype", [F32, BF16, F16])
@pytest.mark.parametrize(("dim", "dstate"), [(64, 128), (64, 64), (128, 128), (32, 48), (64, 16)])
def test_packed_sequences(dim: int, dstate: int, state_dtype: torch.dtype, device: str) -> None:
    x = inputs(sum(LENGTHS), device, dim, dstate)
    initial = strided(rand(len(LENGTHS), HEADS, dim, dstate, dtype=state_dtype, device=device, seed=9))
    out = guarded(x["x"].shape, BF16, device, row_padding=8)
    y, final = ssd_combined_fwd(**x, cu_seqlens=offsets(LENGTHS, device), initial_states=initial, out=out)
    assert y is out and final is not None and final.dtype is state_dtype
    for i, (first, end) in enumerate(spans(LENGTHS)):
        if first == end:
            assert torch.equal(final[i], initial[i])
            continue
        want, states = expected(x, first, end, initial[i])
        assert_close(y[0, first:end], want, tolerance=OUTPUTS)
        assert_close(final[i], states[-1], tolerance=STATES)
    assert_guards(out)


def test_a_sequence_has_the_bits_that_it_has_alone_or_in_parts(device: str) -> None:
    """In a batch, alone, and cut at multiples of 64 tokens with fp32 states."""
    x = inputs(sum(LENGTHS), device)
    initial = rand(len(LENGTHS), HEADS, 64, 128, dtype=F32, device=device, seed=9)
    y, final = ssd_combined_fwd(**x, cu_seqlens=offsets(LENGTHS, device), initial_states=initial)
    assert final is not None
    for i, (first, end) in enumerate(spans(LENGTHS)):
        if first == end:
            continue
        alone, last = ssd_combined_fwd(**part(x, first, end), initial_states=initial[i : i + 1])
        assert torch.equal(alone[0], y[0, first:end])
        assert last is not None and torch.equal(last[0], final[i])
        if end - first > 128:
            state, pieces = initial[i : i + 1], []
            for begin, stop in ((first, first + 64), (first + 64, first + 128), (first + 128, end)):
                piece, next_state = ssd_combined_fwd(**part(x, begin, stop), initial_states=state)
                assert next_state is not None
                state = next_state
                pieces.append(piece)
            assert torch.equal(torch.cat(pieces, 1)[0], y[0, first:end])
            assert torch.equal(state[0], final[i])


def test_batches(device: str) -> None:
    """Checkpoints are counted from the beginning of each sequence; D has a number for each element."""
    x = inputs(3 * 70, device)
    packed, _ = ssd_combined_fwd(**x, cu_seqlens=offsets([70] * 3, device))
    batched = {
        n: t.unflatten(1, (3, 70))[0].contiguous() if n in ("x", "dt", "B", "C", "z") else t for n, t in x.items()
    }
    kept = torch.full((3, HEADS, 64, 128), float("nan"), device=device)
    y, final = ssd_combined_fwd(
        **batched, checkpoint_states=kept, checkpoint_token_indices=torch.tensor([0, 64, -1], device=device),
        checkpoint_state_slots=torch.tensor([1, 2, 0], device=device),
    )  # fmt: skip
    assert torch.equal(y.flatten(0, 1), packed[0]) and final is not None and final.dtype is F32
    assert kept[0].isnan().all() and not kept[1].any()
    assert_close(kept[2], expected(x, 70, 134, torch.zeros(HEADS, 64, 128))[1][-1], tolerance=STATES)
    skip = rand(HEADS, 64, dtype=BF16, device=device, seed=15)
    del batched["z"]
    plain, _ = ssd_combined_fwd(**{**batched, "D": None})
    skipped, nothing = ssd_combined_fwd(**{**batched, "D": skip}, return_final_states=False)
    assert nothing is None
    assert_close(skipped, plain.double().cpu() + (skip.double() * batched["x"].double()).cpu(), tolerance=(2e-2, 0.3))


def test_pools_and_checkpoints(device: str) -> None:
    """Initial, final and kept states lie in one pool; a slot of -1 is none. Checkpoints change no bit of the rest."""
    x = inputs(sum(LENGTHS), device)
    pool = rand(20, HEADS, 64, 128, dtype=F32, device=device, seed=9)
    before = pool.clone()
    source = torch.tensor([3, 4, -1, 5, 6, 7], device=device)
    target = torch.tensor([3, 8, 9, 10, -1, 11], dtype=torch.int32, device=device)
    ends = offsets(LENGTHS, device)
    at = torch.tensor([[64, 13, 70], [0, -1, -1], [1, 128, 199], [0, 1, -1], [63, -1, 1], [5, 64, 128]], device=device)
    slots = torch.tensor(
        [[12, 13, 14], [-1, -1, -1], [15, 16, 17], [-1, 18, -1], [19, -1, 0], [-1, 1, 2]], device=device
    )
    tokens = torch.where(at < 0, -1, at + ends[:-1, None])
    plain, last = ssd_combined_fwd(**x, cu_seqlens=ends, initial_states=before, initial_state_indices=source)
    y, final = ssd_combined_fwd(
        **x, cu_seqlens=ends, initial_states=pool, initial_state_indices=source, final_states=pool,
        final_state_indices=target, checkpoint_states=pool, checkpoint_token_indices=tokens,
        checkpoint_state_slots=slots,
    )  # fmt: skip
    assert final is pool and last is not None
    assert torch.equal(y, plain)
    touched = set()
    for i, (first, end) in enumerate(spans(LENGTHS)):
        start = before[int(source[i])] if source[i] >= 0 else torch.zeros_like(before[0])
        states = expected(x, first, end, start)[1] if end > first else start[None].cpu().double()
        if target[i] >= 0:
            touched.add(int(target[i]))
            assert torch.equal(pool[int(target[i])], last[i])
        for j in range(3):
            if at[i, j] >= 0 and slots[i, j] >= 0:
                touched.add(int(slots[i, j]))
                assert_close(pool[int(slots[i, j])], states[int(at[i, j])], tolerance=STATES)
                if at[i, j] % 64 == 0 and at[i, j] > 0:
                    exact = ssd_combined_fwd(**part(x, first, first + int(at[i, j])), initial_states=start[None])[1]
                    assert exact is not None and torch.equal(pool[int(slots[i, j])], exact[0])
    others = [slot for slot in range(20) if slot not in touched]
    assert torch.equal(pool[others], before[others])
    assert len(touched) == 16


def test_decays_at_their_extremes(device: str) -> None:
    """A head that forgets everything, one that forgets nothing, and steps at the limits."""
    x = inputs(150, device)
    x["A"] = torch.tensor([-2000.0, -1e-6, -1.0, -30.0], device=device)
    x["dt"][0, 40:] = -50.0  # softplus of it is 0
    x["dt"][0, 100] = 60.0
    state = rand(1, HEADS, 64, 128, dtype=F32, device=device, seed=9)
    y, final = ssd_combined_fwd(**x, initial_states=state)
    want, states = expected(x, 0, 150, state[0])
    assert final is not None
    assert_close(final[0], states[-1], tolerance=(1e-2, 0.3))
    assert_close(y[0], want, tolerance=(2e-2, 8.0))  # up to 5600; as above, 5.2 beyond the relative part
    limited, _ = ssd_combined_fwd(**x, initial_states=state, dt_limit=(0.0, 0.5))
    clamped = {**x, "dt_softplus": False, "dt_bias": None}
    clamped["dt"] = torch.nn.functional.softplus(x["dt"].float() + x["dt_bias"]).clamp(0.0, 0.5)
    again, _ = ssd_combined_fwd(**clamped, initial_states=state)
    assert_close(limited, again.double().cpu(), tolerance=(1e-2, 1e-2))


def test_the_sequence_of_each_token(device: str) -> None:
    """seq_idx gives what cu_seqlens gives; the chunks of each sequence are counted as FlashInfer counts them."""
    lengths = [70, 200, 1]
    x, ends = inputs(sum(lengths), device), offsets(lengths, device)
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).to(device)[None]
    want, last = ssd_combined_fwd(**x, cu_seqlens=ends)
    counts = torch.zeros(4, dtype=torch.int32, device=device)
    y, final = ssd_combined_fwd(**x, seq_idx=ids, num_seqs=3, seq_chunk_cumsum=counts, update_seq_chunk_cumsum=True)
    assert torch.equal(y, want)
    assert final is not None and last is not None and torch.equal(final, last) and final.dtype is BF16
    assert counts.tolist() == [0, 1, 4, 5]  # of 128 tokens: 0..69, 70..127 and 128..255 and 256..269, 270
    layer = SSDCombined(64, HEADS, 64, 128, GROUPS, has_z=True, has_varlen=True, state_dtype=F32)
    y, final = layer.run(**x, seq_idx=ids, num_seqs=3)
    assert torch.equal(y, want) and final is not None and final.dtype is F32
    sums = layer.compute_seq_chunk_cumsum(ids, ids, ids, 64, 3)
    assert sums.tolist() == [0, 2, 6, 7]
    for changes, words in (
        ({"num_seqs": 3}, "seq_idx must be given, as the layer was made"),
        ({"seq_idx": ids, "z": None}, "z must be given"),
        ({"seq_idx": ids, "num_seqs": 3, "out": want}, 'out must be None with backend="cute"'),
        ({"seq_idx": ids, "x": x["x"][..., :32]}, "x and B must have the sizes of the layer"),
    ):
        with pytest.raises(ValueError, match=words):
            layer.run(**{**x, **changes})


@pytest.mark.parametrize("every", [False, True])
def test_the_form_of_vllm(every: bool, device: str) -> None:
    lengths = [70, 200, 64]
    x, ends = inputs(sum(lengths), device), offsets(lengths, device)
    initial = rand(3, HEADS, 64, 128, dtype=F32, device=device, seed=9)
    flat = {name: t[0] if name in ("x", "dt", "B", "C", "z") else t for name, t in x.items()}
    chunks = [0, 64, 70, 100, 200, 270, 334]
    last = torch.tensor([1, 4, 5], dtype=torch.int32, device=device)
    out = torch.empty_like(flat["x"])
    states = mamba_chunk_scan_combined_varlen(
        **flat, chunk_size=256, cu_seqlens=ends, cu_chunk_seqlens=torch.tensor(chunks, device=device),
        last_chunk_indices=last, seq_idx=torch.tensor([0, 0, 1, 1, 1, 2], device=device), out=out,
        initial_states=initial, return_intermediate_states=every, state_dtype=F32,
    )  # fmt: skip
    want, final = ssd_combined_fwd(**x, cu_seqlens=ends, initial_states=initial)
    assert torch.equal(out, want[0]) and final is not None
    if not every:
        assert torch.equal(states, final)
        return
    assert torch.equal(states[last.long()], final)
    for end, owner, state in zip(chunks[1:], (0, 0, 1, 1, 1, 2), states):
        first = int(ends[owner])
        assert_close(state, expected(x, first, end, initial[owner])[1][-1], tolerance=STATES)


def test_refusals() -> None:
    x = inputs(8, "cpu")
    ends, pool = offsets([8], "cpu"), torch.zeros(2, HEADS, 64, 128)
    for changes, error, words in (
        ({"x": x["x"][0]}, ValueError, "x must have 4 dimensions"),
        ({"A": x["A"].double()}, TypeError, "A must be float32"),
        ({"dt": x["dt"][..., :2]}, ValueError, "dt must have shape"),
        ({"B": x["B"][..., :24], "C": x["C"][..., :24]}, ValueError, "dstate a multiple of 16"),
        ({"D": torch.ones(3)}, ValueError, "D must have shape"),
        ({"z": x["z"].float()}, TypeError, "z must have the dtype of x"),
        ({"dt_bias": torch.ones(3)}, ValueError, "dt_bias must have shape"),
        ({"initial_states": pool}, ValueError, "initial_states must have shape"),
        ({"initial_states": pool, "initial_state_indices": torch.tensor([2])}, ValueError, "must be below 2"),
        ({"final_state_indices": torch.tensor([0])}, ValueError, "final_states must be given with"),
        ({"cu_seqlens": offsets([9], "cpu")}, ValueError, "cu_seqlens must end at 8 or less"),
        ({"seq_idx": torch.zeros(1, 8)}, ValueError, "must not be given together"),
        ({"cu_seqlens": None, "seq_idx": torch.zeros(1, 8).long()}, ValueError, "num_seqs must be given with seq_idx"),
        ({"checkpoint_states": pool}, ValueError, "must be given together"),
        ({"dt_limit": (1.0, 0.0)}, ValueError, "dt_limit must be a range"),
        ({"out": torch.zeros(1, 8, HEADS, 64)}, TypeError, "out must have the dtype of x"),
    ):
        with pytest.raises(error, match=words):
            ssd_combined_fwd(**{**x, "cu_seqlens": ends, **changes})
