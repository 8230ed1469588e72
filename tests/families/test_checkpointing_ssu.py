"""checkpointing_ssu and replayssm_materialize: acceptance of drafts, bits, packed requests, padding, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from families.harness import assert_close, rand, strided
from fi_core.mamba import (
    allocate_checkpointing_ssu_scratch,
    checkpointing_ssu,
    replayssm_materialize,
    selective_state_update,
)

BF16, F32 = torch.bfloat16, torch.float32
SLOTS, HEADS, GROUPS, DIM, N = 4, 4, 2, 64, 128


def ints(*values: Any, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def layer(device: str) -> dict[str, Any]:
    """What a layer fixes."""
    return {
        "A": (-rand(HEADS, dtype=F32, device=device, seed=1).abs())[:, None, None].expand(HEADS, DIM, N),
        "D": rand(HEADS, dtype=BF16, device=device, seed=2)[:, None].expand(HEADS, DIM),
        "dt_bias": rand(HEADS, dtype=F32, device=device, seed=3)[:, None].expand(HEADS, DIM),
        "dt_softplus": True,
    }


def tokens(count: int, device: str, seed: int = 10) -> dict[str, torch.Tensor]:
    """Inputs of each token, `[count, ..]`."""
    return {
        "x": rand(count, HEADS, DIM, dtype=BF16, device=device, seed=seed),
        "z": rand(count, HEADS, DIM, dtype=BF16, device=device, seed=seed + 1),
        "B": rand(count, GROUPS, N, dtype=BF16, device=device, seed=seed + 2),
        "C": rand(count, GROUPS, N, dtype=BF16, device=device, seed=seed + 3),
        "dt": rand(count, HEADS, dtype=BF16, device=device, seed=seed + 4)[..., None].expand(count, HEADS, DIM),
    }


def rings(rows: int, device: str, state_dtype: torch.dtype = F32) -> dict[str, torch.Tensor]:
    """Poisoned, but for the states."""
    nan = float("nan")
    return {
        "state": strided(rand(SLOTS, HEADS, DIM, N, dtype=state_dtype, device=device)),
        "x_cache": torch.full((SLOTS, HEADS, rows, DIM), nan, dtype=BF16, device=device),
        "B_cache": torch.full((SLOTS, GROUPS, rows, N), nan, dtype=BF16, device=device),
        "dt_cache": torch.full((SLOTS, HEADS, rows), nan, device=device),
        "ring_start": ints(*range(SLOTS), device=device) % rows,
        "prev_num_accepted_tokens": torch.zeros(SLOTS, dtype=torch.int32, device=device),
    }


def call(ring: dict[str, torch.Tensor], inputs: dict[str, torch.Tensor], device: str, **more: Any) -> torch.Tensor:
    """Inputs `[batch, T, ..]`; poisoned outputs."""
    out = torch.full_like(inputs["x"], float("nan"))
    assert checkpointing_ssu(**ring, **inputs, out=out, **layer(device), **more) is out
    return out


@pytest.mark.parametrize(("rows", "count"), [(16, 4), (5, 1), (9, 3), (32, 16)])
def test_drafts_of_which_some_hold_have_the_bits_of_single_tokens(rows: int, count: int, device: str) -> None:
    """Whatever is accepted and whenever the state is stored, outputs and states are those of token after token."""
    ring, start = rings(rows, device), None
    slot, plain = ints(2, device=device), ring["state"].clone()
    right, done, stored = tokens(60, device), 0, 0
    want = []
    for t in range(60):
        one = {name: x[t : t + 1] for name, x in right.items()}
        want.append(selective_state_update(plain, **one, **layer(device), state_batch_indices=slot)[0])
        if t == 0:
            start = plain[2].clone()
    assert start is not None
    pattern = [1, count, 1, count, count, max(1, count // 2), count, 1, max(1, count - 1), count]
    for held in pattern:
        if done + count > 60:
            break
        given = {name: x[done : done + count].clone() for name, x in right.items()}
        wrong = tokens(count, device, seed=99)
        for name, x in given.items():
            x[held:] = wrong[name][held:]
        given["dt"] = given["dt"][..., :1].expand_as(given["dt"])
        batch = {name: x[None] for name, x in given.items()}
        before, prev = ring["state"].clone(), int(ring["prev_num_accepted_tokens"][2])
        out = call(ring, batch, device, state_batch_indices=slot)
        assert torch.equal(out[0, :held], torch.stack(want[done : done + held]))
        if prev + 2 * count > rows:
            ring["ring_start"][2] = (ring["ring_start"][2] + prev) % rows
            ring["prev_num_accepted_tokens"][2] = held
            stored += 1
        else:
            assert torch.equal(ring["state"], before)
            ring["prev_num_accepted_tokens"][2] += held
        done += held
    assert stored > 0
    check = rings(rows, device)["state"]
    for t in range(done - int(ring["prev_num_accepted_tokens"][2])):
        one = {name: x[t : t + 1] for name, x in right.items()}
        selective_state_update(check, **one, **layer(device), state_batch_indices=slot)
    assert torch.equal(ring["state"], check)


def test_packed_requests_and_padding(device: str) -> None:
    """Each request has the bits that it has alone; padding and empty requests touch nothing."""
    lengths, slots = [2, 0, 4, 1], ints(3, 1, -1, 0, device=device)
    given = tokens(sum(lengths), device)
    start = rings(16, device)
    for name, dtype in (("x_cache", BF16), ("B_cache", BF16), ("dt_cache", F32)):
        start[name] = rand(*start[name].shape, dtype=dtype, device=device, seed=5).abs()
    start["prev_num_accepted_tokens"] = ints(3, 5, 7, 12, device=device)
    ring = {name: x.clone() for name, x in start.items()}
    packed = {name: x[None] for name, x in given.items()}
    cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0)
    out = call(ring, packed, device, cu_seqlens=cu_seqlens, max_seqlen=4, state_batch_indices=slots)
    own, first = {name: x.clone() for name, x in start.items()}, 0
    for length, slot in zip(lengths, slots.tolist()):
        part = slice(first, first + length)
        first += length
        if slot < 0:
            assert out[0, part].isnan().all()
        elif length:
            one = {name: x[None, part] for name, x in given.items()}
            alone = call(own, one, device, cu_seqlens=ints(0, length, device=device), max_seqlen=4,
                         state_batch_indices=ints(slot, device=device))  # fmt: skip
            assert torch.equal(out[0, part], alone[0])
    for name, x in ring.items():
        assert torch.equal(x, own[name])
        assert torch.equal(x[[1, 2]], start[name][[1, 2]])


@pytest.mark.parametrize("state_dtype", [F32, BF16])
def test_states_of_a_prefix_of_the_ring(state_dtype: torch.dtype, device: str) -> None:
    """In other slots, for many layers; source and rings stay, and no token means a copy."""
    rows, layers = 16, []
    for seed in range(2):
        ring = rings(rows, device, state_dtype)
        ring["state"] = rand(SLOTS, HEADS, DIM, N, dtype=state_dtype, device=device, seed=seed)
        ring["x_cache"] = rand(*ring["x_cache"].shape, dtype=BF16, device=device, seed=seed + 3)
        ring["B_cache"] = rand(*ring["B_cache"].shape, dtype=BF16, device=device, seed=seed + 4)
        ring["dt_cache"] = rand(*ring["dt_cache"].shape, dtype=F32, device=device, seed=seed + 5).abs()
        layers.append(ring)
    rates = [-rand(HEADS, dtype=F32, device=device, seed=7 + i).abs() for i in range(2)]
    before = [{name: x.clone() for name, x in ring.items()} for ring in layers]

    def table(name: str) -> list[torch.Tensor]:
        pools = [ring[name] for ring in layers]
        return [torch.tensor([p.data_ptr() for p in pools], device=device),
                torch.tensor([p.stride(0) for p in pools], device=device)]  # fmt: skip

    none = torch.zeros(2, dtype=torch.int64, device=device)
    src, dst = ints([0, 1, 3], [2, 0, 1], device=device), ints([2, -1, 1], [1, 3, 0], device=device)
    starts, lengths = ints(14, 3, 0, device=device), ints(5, 12, 0, device=device)
    replayssm_materialize(
        *table("state"), *table("x_cache"), *table("B_cache"), *table("dt_cache"),
        torch.tensor([a.data_ptr() for a in rates], device=device), none, none, src, dst, starts, lengths,
        ints(2, 0, -1, device=device), state_dtype=state_dtype, input_dtype=BF16, matrixA_dtype=F32, dim=DIM,
        dstate=N, num_heads=HEADS, heads_per_group=HEADS // GROUPS, max_window=12, ring_buffer_len=rows,
    )  # fmt: skip
    for i, (ring, old) in enumerate(zip(layers, before)):
        for name in ring.keys() - {"state"}:
            assert torch.equal(ring[name], old[name])
        after = old["state"].clone()
        for request in (2, 0):
            source, target = int(src[i, request]), int(dst[i, request])
            s = old["state"][source].double()
            for j in range(int(lengths[request])):
                row = (int(starts[request]) + j) % rows
                dt = old["dt_cache"][source, :, row].double()[:, None, None]
                b = old["B_cache"][source, :, row].double().repeat_interleave(HEADS // GROUPS, 0)[:, None]
                s = torch.exp(dt * rates[i].double()[:, None, None]) * s
                s = s + dt * old["x_cache"][source, :, row].double()[..., None] * b
            if not int(lengths[request]):
                assert torch.equal(ring["state"][target], old["state"][source])
            after[target] = s.to(state_dtype)
        assert_close(ring["state"], after, tolerance=(1e-5, 1e-5) if state_dtype is F32 else (1e-2, 1e-2))


def test_scratch_is_accepted(device: str) -> None:
    scratch = allocate_checkpointing_ssu_scratch(1, HEADS, 4, 12, BF16, device)
    assert [tuple(x.shape) for x in scratch] == [(1, HEADS, 32, 8), (1, HEADS, 16), (1, HEADS, 32, 8)]
    assert [x.dtype for x in scratch] == [BF16, F32, BF16]
    given = {name: x[None] for name, x in tokens(4, device).items()}
    want = call(rings(16, device), given, device)
    names = ("cb_scaled", "cumAdt_vec", "cb_old")
    out = call(rings(16, device), given, device, algorithm="two-kernel", **dict(zip(names, scratch)))
    assert torch.equal(out, want)
    with pytest.raises(ValueError, match="max_window must be in 1 to 16; got 17"):
        allocate_checkpointing_ssu_scratch(1, HEADS, 4, 17, BF16, device)


def test_refusals() -> None:
    given = {name: x[None] for name, x in tokens(4, "cpu").items()}
    for changes, error, words in (
        ({"algorithm": "fast"}, ValueError, "algorithm must be one of"),
        ({"algorithm": "two-kernel"}, ValueError, "cb_scaled, cumAdt_vec and cb_old must be given together"),
        ({"max_seqlen": 4}, ValueError, "max_seqlen must be given with cu_seqlens"),
        ({"state_scale": torch.ones(1)}, NotImplementedError, "state_scale: not supported"),
        ({"rand_seed": torch.ones(1)}, NotImplementedError, "rand_seed: not supported"),
        ({"dt": given["dt"].contiguous()}, ValueError, "dt must have one number for each head: stride 0"),
        ({"x_cache": torch.zeros(SLOTS, HEADS, 4, DIM, dtype=BF16)}, ValueError, "B_cache must have shape"),
        ({"ring_start": torch.zeros(SLOTS, dtype=torch.int64)}, TypeError, "ring_start must be int32"),
        ({"ring_start": ints(16, 0, 0, 0, device="cpu")}, ValueError, "ring_start must be in 0 to 15"),
        ({"prev_num_accepted_tokens": ints(13, 0, 0, 0, device="cpu")}, ValueError, "must be in 0 to 12"),
        ({"state_batch_indices": ints(4, device="cpu")}, ValueError, "state_batch_indices must be below 4"),
    ):
        arguments: dict[str, Any] = {**rings(16, "cpu"), **given, **layer("cpu"), "out": given["x"].clone(), **changes}
        with pytest.raises(error, match=words):
            checkpointing_ssu(**arguments)
    short = {name: x[:, :, :4] if name.endswith("_cache") else x for name, x in rings(16, "cpu").items()}
    with pytest.raises(ValueError, match="x_cache must have up to 16 rows more"):
        call(short, given, "cpu")


def test_refusals_of_materialize() -> None:
    """Tables are checked for their shapes, and what integers hold, but addresses."""
    table, slots = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int32)
    per_request, active = torch.zeros(2, dtype=torch.int32), ints(1, -1, device="cpu")
    tables = [f"{name}_{kind}" for name in ("state", "x_cache", "B_cache", "dt_cache", "state_scale")
              for kind in ("ptrs", "slot_strides")] + ["A_ptrs"]  # fmt: skip
    good: dict[str, Any] = {
        **{name: table.clone() for name in tables},
        "src_slots": slots, "dst_slots": slots, "ring_start": per_request, "replay_prefix_len": per_request,
        "active_request_indices": active, "state_dtype": F32, "input_dtype": BF16, "matrixA_dtype": F32, "dim": DIM,
        "dstate": N, "num_heads": HEADS, "heads_per_group": 2, "max_window": 12, "ring_buffer_len": 16,
    }  # fmt: skip
    for changes, error, words in (
        ({"state_dtype": torch.int8}, TypeError, "state_dtype must be float32 or float16 or bfloat16; got int8"),
        ({"input_dtype": F32}, TypeError, "input_dtype must be bfloat16 or float16; got float32"),
        ({"rand_seed": torch.ones(1)}, NotImplementedError, "rand_seed: not supported"),
        ({"A_ptrs": torch.zeros(2, dtype=torch.int64)}, ValueError, "A_ptrs must have shape"),
        ({"src_slots": slots.long()}, TypeError, "src_slots must be int32"),
        ({"heads_per_group": 3}, ValueError, "heads_per_group must divide num_heads"),
        ({"max_window": 17}, ValueError, "max_window must be in 1 to 16"),
        ({"replay_prefix_len": ints(0, 13, device="cpu")}, ValueError, "replay_prefix_len must be in 0 to 12"),
        ({"ring_start": ints(0, 16, device="cpu")}, ValueError, "ring_start must be in 0 to 15"),
        ({"active_request_indices": ints(2, -1, device="cpu")}, ValueError, "active_request_indices must be below 2"),
    ):
        with pytest.raises(error, match=words):
            replayssm_materialize(**{**good, **changes})
