"""causal_conv1d_fn and causal_conv1d_update: pools, drafts, blocks of a prefix cache, padding, layouts, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from families.harness import assert_close, assert_guards, rand, strided
from fi_core.mamba import causal_conv1d_fn, causal_conv1d_update

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DIM = 136


def table(*values: Any, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def pool(slots: int, length: int, device: str, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Channels lie next to each other, with NaN between slots."""
    return strided(rand(slots, length, DIM, dtype=dtype, device=device, seed=9)).transpose(1, 2)


def weights(width: int, device: str, dtype: torch.dtype = BF16) -> dict[str, torch.Tensor]:
    return {
        "weight": rand(DIM, width, dtype=dtype, device=device, seed=1),
        "bias": rand(DIM, dtype=dtype, device=device, seed=2),
    }


def whole(x: torch.Tensor, history: torch.Tensor | None, w: dict[str, torch.Tensor]) -> torch.Tensor:
    """fp64: x `[dim, T]`, history `[dim, W - 1]` or None."""
    width = w["weight"].shape[1]
    before = x.new_zeros(x.shape[0], width - 1) if history is None else history
    windows = torch.cat([before, x], 1).double().unfold(1, width, 1)
    y = (windows * w["weight"].double()[:, None]).sum(-1) + w["bias"].double()[:, None]
    return torch.nn.functional.silu(y)


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("width", [2, 3, 4, 5])
def test_a_sequence_in_parts_has_the_bits_of_the_whole(width: int, dtype: torch.dtype, device: str) -> None:
    """By both functions, cut anywhere; the state is the last inputs, bit for bit."""
    length, w = 150, weights(width, device, dtype)
    x = strided(rand(length, DIM, dtype=dtype, device=device)).t()
    start = pool(2, width - 1, device, dtype)
    state, slot, has = start.clone(), table(1, device=device), torch.tensor([True], device=device)
    want = causal_conv1d_fn(x, **w, conv_states=state, query_start_loc=table(0, length, device=device),
                            cache_indices=slot, has_initial_state=has)  # fmt: skip
    assert_close(want, whole(x, start[1], w).to(want.device), tolerance=(1e-5, 1e-5) if dtype is F32 else (1e-2, 1e-2))
    assert torch.equal(state[1], x[:, length - width + 1 :])
    assert torch.equal(state[0], start[0])
    other, parts, first = start.clone(), [], 0
    for size in (1, 2, 70, 1, 64, 12):
        own = x[:, first : first + size]
        if size > 1:
            parts.append(causal_conv1d_fn(own, **w, conv_states=other, query_start_loc=table(0, size, device=device),
                                          cache_indices=slot, has_initial_state=has))  # fmt: skip
        else:
            y = causal_conv1d_update(own.t(), other, **w, activation="silu", conv_state_indices=slot)
            parts.append(y.t())
        first += size
    assert torch.equal(torch.cat(parts, 1), want)
    assert torch.equal(other, state)


def test_packed_sequences_with_padding(device: str) -> None:
    """An empty sequence and padding touch nothing; outputs of padding are 0."""
    lengths, w = [70, 0, 5, 1, 64], weights(4, device)
    x = strided(rand(sum(lengths), DIM, dtype=BF16, device=device)).t()
    state = pool(7, 5, device)
    before = state.clone()
    has = torch.tensor([True, True, True, False, True], device=device)
    slots = table(3, 1, -1, 2, 0, device=device)
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0)
    y = causal_conv1d_fn(x, **w, conv_states=state, query_start_loc=offsets, cache_indices=slots,
                         has_initial_state=has, null_block_id=0)  # fmt: skip
    assert y.shape == x.shape and y.stride() == (1, DIM)
    first, after = 0, before.clone()
    for length, slot, kept in zip(lengths, slots.tolist(), has.tolist()):
        own = x[:, first : first + length]
        if slot <= 0:
            assert not y[:, first : first + length].any()
        elif length:
            history = before[slot, :, :3] if kept else None
            assert_close(y[:, first : first + length], whole(own, history, w).to(y.device), tolerance=(1e-2, 1e-2))
            joined = torch.cat([before[slot, :, :3] if kept else torch.zeros_like(before[slot, :, :3]), own], 1)
            after[slot, :, :3] = joined[:, -3:]
        first += length
    assert torch.equal(state, after)


@pytest.mark.parametrize("form", ["padded", "packed"])
def test_drafts_of_which_some_hold(form: str, device: str) -> None:
    """Whatever is accepted, outputs have the bits of a run without drafts."""
    width, drafts, w = 4, 3, weights(4, device)
    tokens = rand(40, DIM, dtype=BF16, device=device, seed=5)
    plain, slot = pool(3, width - 1, device), table(2, device=device)
    state = torch.zeros(3, width - 2 + drafts, DIM, dtype=BF16, device=device).transpose(1, 2)
    state[2, :, : width - 1] = plain[2]
    want = torch.stack([causal_conv1d_update(tokens[t : t + 1], plain, **w, activation="silu",
                                             conv_state_indices=slot)[0] for t in range(30)])  # fmt: skip
    done, accepted = 0, 1
    for held in (3, 1, 2, 2, 3, 1, 1, 3):
        guess = tokens[done : done + drafts].clone()
        guess[held:] = rand(drafts - held, DIM, dtype=BF16, device=device, seed=77) if held < drafts else guess[held:]
        more: dict[str, Any] = {"num_accepted_tokens": table(accepted, device=device), "conv_state_indices": slot}
        if form == "packed":
            offsets = table(0, drafts, device=device)
            y = causal_conv1d_update(guess, state, **w, activation=True, query_start_loc=offsets,
                                     max_query_len=drafts, **more)  # fmt: skip
        else:
            y = causal_conv1d_update(guess.t()[None], state, **w, activation=True, **more)[0].t()
        assert torch.equal(y[:held], want[done : done + held])
        done, accepted = done + held, held
    assert torch.equal(state[2, :, accepted - 1 : accepted + 2], tokens[done - 3 : done].t())


@pytest.mark.parametrize("computed", [0, 7, 8, 13])
@pytest.mark.parametrize("length", [1, 2, 9, 90])
def test_blocks_of_a_prefix_cache(computed: int, length: int, device: str) -> None:
    """Each block's slot takes the state at its end, also where it ends within the first W - 1 tokens, and where the
    inputs before come from the same slot."""
    block, w = 8, weights(4, device)
    tokens = rand(computed + length, DIM, dtype=BF16, device=device, seed=3)
    x, blocks = tokens[computed:].t(), -(-(computed + length) // block)
    state = pool(2 * blocks + 2, 3, device)
    history = torch.cat([torch.zeros(3, DIM, dtype=BF16, device=device), tokens[:computed]])[-3:].t()
    slots = torch.arange(1, 2 * blocks + 1, dtype=torch.int32, device=device).view(2, blocks).flip(1)
    columns = table(0, 0, device=device), table(0, max(computed - 1, 0) // block, device=device)
    state[int(slots[1, columns[1][1]])] = history
    before = state.clone()
    y = causal_conv1d_fn(
        x, **w, conv_states=state, query_start_loc=table(0, 0, length, device=device), cache_indices=slots,
        has_initial_state=torch.tensor([False, computed > 0], device=device),
        block_idx_first_scheduled_token=table(0, computed // block, device=device),
        block_idx_last_scheduled_token=table(0, (computed + length - 1) // block, device=device),
        initial_state_idx=columns[1], num_computed_tokens=table(0, computed, device=device), block_size_to_align=block,
    )  # fmt: skip
    assert_close(y, whole(x, history, w).to(y.device), tolerance=(1e-2, 1e-2))
    after = before.clone()
    joined = torch.cat([history, x], 1)
    for b in range(computed // block, (computed + length - 1) // block + 1):
        seen = min((b + 1) * block - computed, length)
        after[int(slots[1, b])] = joined[:, seen : seen + 3]
    assert torch.equal(state, after)
    into = state.clone()
    last = (computed + length - 1) // block
    one = causal_conv1d_update(
        tokens[-1:], into, **w, conv_state_indices=slots[1:], initial_state_idx=table(last, device=device),
        block_idx_last_scheduled_token=table(0, device=device),
    )  # fmt: skip
    alone = state[int(slots[1, last])][None].clone()
    assert torch.equal(one, causal_conv1d_update(tokens[-1:], alone, **w))
    assert torch.equal(into[int(slots[1, 0])], alone[0])


def test_layouts(device: str) -> None:
    """Any strides give the bits of the fast layout; x is not changed."""
    w, offsets = weights(4, device), table(0, 40, 70, device=device)
    x = rand(70, DIM, dtype=BF16, device=device).t()
    state = pool(2, 3, device)
    want, after = None, None
    for form in (x, x.contiguous(), rand(70, 2 * DIM, dtype=BF16, device=device)[:, ::2].copy_(x.t()).t()):
        for own in (state.clone(), state.contiguous(), rand(2, DIM, 7, dtype=BF16, device=device)):
            if own.shape[2] == 7:
                own[:, :, :3] = state
            kept = form.clone()
            y = causal_conv1d_fn(form, **w, conv_states=own, query_start_loc=offsets,
                                 has_initial_state=torch.tensor([True, False], device=device))  # fmt: skip
            want = y if want is None else want
            after = own.clone() if after is None else after
            assert torch.equal(y, want) and torch.equal(own[:, :, :3], after) and torch.equal(form, kept)
    updates = rand(2, DIM, 3, dtype=BF16, device=device)
    one, two = state.clone(), state.clone()
    y = causal_conv1d_update(updates, one, **w)
    assert y.stride() == updates.stride()
    assert torch.equal(y, causal_conv1d_update(updates.transpose(1, 2).contiguous().transpose(1, 2), two, **w))
    assert torch.equal(one, two)


def test_nothing_but_the_result_is_written(device: str) -> None:
    w = weights(4, device)
    x, state = rand(9, DIM, dtype=BF16, device=device).t(), strided(rand(3, 3, DIM, dtype=BF16, device=device))
    causal_conv1d_fn(x, **w, conv_states=state.transpose(1, 2), query_start_loc=table(0, 9, device=device))
    assert_guards(state)
    assert torch.equal(state[0], x.t()[-3:])


def test_activation_and_bias(device: str) -> None:
    x, w = rand(3, DIM, dtype=F32, device=device), weights(4, device, F32)
    state = pool(3, 3, device, F32)
    joined = torch.cat([state, x[:, :, None]], 2).double()
    plain = (joined * w["weight"].double()).sum(-1)
    for activation, bias in ((None, None), (False, w["bias"]), ("swish", w["bias"]), (True, None)):
        want = plain if bias is None else plain + bias.double()
        want = torch.nn.functional.silu(want) if activation else want
        y = causal_conv1d_update(x, state.clone(), w["weight"], bias, activation)
        torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)


def test_refusals() -> None:
    w, x, state = weights(4, "cpu"), rand(8, DIM, dtype=BF16, device="cpu").t(), pool(2, 3, "cpu")
    good: dict[str, Any] = {"x": x, **w, "conv_states": state, "query_start_loc": table(0, 8)}
    for changes, error, words in (
        ({"activation": "gelu"}, ValueError, "activation must be 'silu'"),
        ({"cache_indices": [8]}, TypeError, "cache_indices must be a tensor of slots, .*sixth argument"),
        ({"x": x[0]}, ValueError, r"x must have shape \[dim, T\]"),
        ({"weight": rand(DIM, 6, dtype=BF16, device="cpu")}, ValueError, "weight must have shape .*width 2 to 5"),
        ({"bias": w["bias"].float()}, TypeError, "bias must have the dtype of x"),
        ({"conv_states": state[:, :, :2]}, ValueError, "conv_states must hold 3 inputs"),
        ({"query_start_loc": table(0, 9)}, ValueError, "query_start_loc must end at 8 or less; got 9"),
        ({"cache_indices": table(2)}, ValueError, "cache_indices must be below 2"),
        ({"has_initial_state": torch.ones(1)}, TypeError, "has_initial_state must be bool"),
        ({"block_idx_first_scheduled_token": table(0)}, ValueError, "block_size_to_align must be above 0"),
    ):
        with pytest.raises(error, match=words):
            causal_conv1d_fn(**{**good, **changes})
    rows = rand(2, DIM, dtype=BF16, device="cpu")
    for changes, words in (
        ({"query_start_loc": table(0, 2)}, "max_query_len must be above 0"),
        ({"query_start_loc": table(0, 2), "max_query_len": 1}, "max_query_len must be at least 2"),
        ({"x": rows[0]}, r"x must have shape \[B, dim\] or \[B, dim, L\]"),
        ({"num_accepted_tokens": table(2, 1)}, "num_accepted_tokens must be in 1 to 1"),
        ({"num_accepted_tokens": table(1, 1), "x": rand(2, DIM, 3, dtype=BF16, device="cpu")}, "hold 5 inputs"),
        ({"conv_state_indices": table([0, 1], [1, 0]), "initial_state_idx": table(0, 2)}, "initial_state_idx must be"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            causal_conv1d_update(**{"x": rows, "conv_state": state.clone(), **w, **changes})
