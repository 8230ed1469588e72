"""Merging of attention states against fp64, on every device and implementation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import fi_core
from families.harness import assert_close, assert_guards, guarded, impls, rand, strided, using
from fi_core.attention.merge import _merge_state_in_place_reference, _merge_state_reference, _merge_states_reference

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Head dims of one vector, less than one, a partial vector, partial warps, and more vectors than a CTA has threads.
SHAPES = [(1, 1, 128), (5, 3, 64), (3, 2, 7), (2, 5, 100), (4, 3, 576), (2, 1, 4104), (3, 1, 1), (0, 4, 128)]
LSE_TOLERANCE = (1e-6, 2e-6)
INF = float("inf")


def states(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Values v of the shape, and lse s without the last dimension."""
    v = rand(*shape, dtype=dtype, device=device, seed=seed)
    return v, rand(*shape[:-1], 1, dtype=torch.float32, device=device, seed=seed + 1, scale=4.0)[..., 0].contiguous()


def check(actual: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert_close(actual[0], expected[0])
    assert actual[1].dtype == torch.float32
    assert_close(actual[1], expected[1], tolerance=LSE_TOLERANCE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_merge_state(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    a, b = (states(*shape, dtype=dtype, device=device, seed=seed) for seed in (1, 5))
    want = _merge_state_reference(*a, *b)
    for impl in impls("merge_state", device):
        with using("merge_state", impl):
            got = fi_core.merge_state(*a, *b)
            assert got[0].dtype == dtype
            check(got, want)
            for padding in (8, 1):  # 1: rows no vector load may touch
                apart = [(strided(v, padding), strided(s, padding)) for v, s in (a, b)]
                check(fi_core.merge_state(*apart[0], *apart[1]), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_merge_state_in_place(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    a, b = (states(*shape, dtype=dtype, device=device, seed=seed) for seed in (1, 5))
    mask = torch.arange(shape[0], device=device) % 3 != 1
    for impl in impls("merge_state", device):
        with using("merge_state", impl):
            for given in (None, mask, mask.byte() * 7):
                v, s = strided(a[0], 8), strided(a[1], 3)
                assert fi_core.merge_state_in_place(v, s, *b, given) is None
                check((v, s), _merge_state_in_place_reference(*a, *b, given))
                assert_guards(v)
                assert_guards(s)
                if given is not None:
                    assert torch.equal(v[~mask], a[0][~mask]) and torch.equal(s[~mask], a[1][~mask])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 7, 8, 13, 16, 33, 200])
def test_merge_states(count: int, dtype: torch.dtype, device: str) -> None:
    """Counts around the number of states that are summed at once."""
    for n, heads, d in ((3, 2, 128), (2, 3, 20), (1, 2, 7), (2, 1, 576), (1, 1, 4104), (0, 2, 8)):
        v, s = states(n, count, heads, d, dtype=dtype, device=device)
        want = _merge_states_reference(v, s)
        for impl in impls("merge_states", device):
            with using("merge_states", impl):
                got = fi_core.merge_states(v, s)
                assert got[0].dtype == dtype and got[0].shape == (n, heads, d)
                check(got, want)
                check(fi_core.merge_states(strided(v, 8), strided(s, 5)), want)
                check(fi_core.merge_states(v.transpose(1, 2).contiguous().transpose(1, 2), s.mT.contiguous().mT), want)
                check(fi_core.merge_states(strided(v, 1), s), want)


def test_one_state_is_copied(device: str) -> None:
    v, s = states(3, 1, 2, 64, dtype=torch.bfloat16, device=device)
    merged, merged_s = fi_core.merge_states(v, s)
    assert torch.equal(merged, v[:, 0]) and torch.equal(merged_s, s[:, 0])


def poisoned(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight rows of two states; each row has other empty states, whose v is NaN or inf."""
    v, s = states(8, 2, 3, 48, dtype=torch.float16, device=device)
    for row, empty in enumerate([(), (0,), (1,), (0, 1), (), (0,), (), ()]):
        for i in empty:
            s[row, i], v[row, i] = -INF, INF if row == 1 else math.nan
    return v, s


def test_empty_states_are_neutral(device: str) -> None:
    """An empty state leaves the other unchanged, bit for bit, even if its v is NaN; two give 0 and -inf."""
    v, s = poisoned(device)
    want_v, want_s = _merge_states_reference(v.nan_to_num(0, 0, 0), s)
    in_place = v[:, 0].clone(), s[:, 0].clone()
    fi_core.merge_state_in_place(*in_place, v[:, 1], s[:, 1])
    for got in (fi_core.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1]), in_place, fi_core.merge_states(v, s)):
        check(got, (want_v, want_s))
        for row, other in ((1, 1), (2, 0), (5, 1)):
            assert torch.equal(got[0][row], v[row, other]) and torch.equal(got[1][row], s[row, other])
        assert not got[0][3].any() and (got[1][3] == -INF).all()


@pytest.mark.parametrize("count", [2, 5, 64])
def test_many_empty_states(count: int, device: str) -> None:
    v, s = states(2, count, 2, 40, dtype=torch.float32, device=device)
    s[0, 1:], v[0, 1:] = -INF, math.nan
    s[1], v[1] = -INF, INF
    merged, lse = fi_core.merge_states(v, s)
    assert torch.equal(merged[0], v[0, 0]) and torch.equal(lse[0], s[0, 0])
    assert not merged[1].any() and (lse[1] == -INF).all()


@pytest.mark.parametrize("bad", [math.nan, INF])
@pytest.mark.parametrize("count", [2, 40])
def test_bad_lse_spoils_its_row_and_head_only(bad: float, count: int, device: str) -> None:
    v, s = states(4, count, 3, 64, dtype=torch.bfloat16, device=device)
    want = _merge_states_reference(v, s)
    s[2, 1, 1] = bad
    s[1, 0, 0], v[1, 0, 0, 5] = -INF, math.nan  # an empty state beside it
    want_row = _merge_states_reference(v[1:2].nan_to_num(0), s[1:2])
    for x, fixed in zip(want, want_row):
        x[1], x[2, 1] = fixed[0], math.nan
    check(fi_core.merge_states(v, s), want)
    if count == 2:
        check(fi_core.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1]), want)
        fi_core.merge_state_in_place(v0 := v[:, 0].clone(), s0 := s[:, 0].clone(), v[:, 1], s[:, 1])
        check((v0, s0), want)


def test_nan_values_stay_in_their_element(device: str) -> None:
    v, s = states(2, 2, 2, 32, dtype=torch.float32, device=device)
    v[1, 0, 1, 3] = math.nan
    merged, lse = fi_core.merge_states(v, s)
    assert merged.isnan().nonzero().tolist() == [[1, 1, 3]] and lse.isfinite().all()
    pair, lse = fi_core.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])
    assert pair.isnan().nonzero().tolist() == [[1, 1, 3]] and lse.isfinite().all()


def test_large_lse(device: str) -> None:
    """Large lse do not overflow: only differences are exponentiated."""
    for shift in (3e4, -3e4):
        v, s = states(3, 9, 2, 64, dtype=torch.float32, device=device)
        s = (s + shift).contiguous()
        v_want, s_want = _merge_states_reference(v, s)
        v_got, s_got = fi_core.merge_states(v, s)
        assert_close(v_got, v_want, tolerance=(1e-4, 1e-4))
        assert_close(s_got, s_want, tolerance=(3e-7, 0))
    v, s = states(2, 2, 1, 8, dtype=torch.float32, device=device)
    s[:, 0] = s[:, 1] + 1000
    assert torch.equal(fi_core.merge_states(v, s)[0], v[:, 0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_types_of_lse(dtype: torch.dtype, device: str) -> None:
    v, s = states(3, 2, 2, 16, dtype=torch.float32, device=device)
    s = s.to(dtype)
    want = _merge_states_reference(v, s.float())
    check(fi_core.merge_states(v, s), want)
    check(fi_core.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1].float()), want)
    in_place = v[:, 0].clone(), s[:, 0].float()
    fi_core.merge_state_in_place(*in_place, v[:, 1], s[:, 1])
    check(in_place, want)


@pytest.mark.parametrize("count", [2, 64])
def test_rows_do_not_depend_on_the_batch(count: int, device: str) -> None:
    v, s = states(33, count, 4, 128, dtype=torch.bfloat16, device=device)
    assert torch.equal(fi_core.merge_states(v[7:8], s[7:8])[0], fi_core.merge_states(v, s)[0][7:8])
    a = v[:, 0], s[:, 0], v[:, 1], s[:, 1]
    assert torch.equal(fi_core.merge_state(*(x[7:8] for x in a))[0], fi_core.merge_state(*a)[0][7:8])


def test_merging_compiles(device: str) -> None:
    v, s = states(5, 2, 2, 32, dtype=torch.bfloat16, device=device)
    pair = v[:, 0].contiguous(), s[:, 0].contiguous(), v[:, 1].contiguous(), s[:, 1].contiguous()
    for function, arguments in ((fi_core.merge_state, pair), (fi_core.merge_states, (v, s))):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        for got, want in zip(compiled(*arguments), function(*arguments)):
            assert torch.equal(got, want)
    mine, other = [x.clone() for x in pair[:2]], [x.clone() for x in pair[:2]]
    torch.compile(fi_core.merge_state_in_place, fullgraph=True, backend="aot_eager")(*mine, *pair[2:])
    fi_core.merge_state_in_place(*other, *pair[2:])
    assert torch.equal(mine[0], other[0]) and torch.equal(mine[1], other[1])
    assert not torch.equal(mine[0], pair[0])


def test_ops_are_registered_well() -> None:
    """torch's own checks of schema, fakes and functionalisation."""
    v, s = states(3, 2, 2, 8, dtype=torch.float16, device="cpu")
    out, out_s = guarded((3, 2, 8), torch.float16, "cpu"), guarded((3, 2), torch.float32, "cpu")
    fi_core.merge_states(v, s)
    torch.library.opcheck(torch.ops.fi_core.merge_states.default, (out.fill_(0), out_s.fill_(0), v, s))
    pair = v[:, 0], s[:, 0], v[:, 1], s[:, 1]
    fi_core.merge_state(*pair)
    mask = torch.tensor([True, False, True])
    torch.library.opcheck(
        torch.ops.fi_core.merge_state.default, (v[:, 0].clone(), s[:, 0].clone(), *pair[2:], *pair[:2], mask)
    )
    mine, others = (v[:, 0].clone(), s[:, 0].clone(), *pair[2:]), pair[:2]
    torch.library.opcheck(torch.ops.fi_core.merge_state.default, (*mine, *others, mask))
    torch.library.opcheck(torch.ops.fi_core.merge_state.default, mine)


V, S = torch.ones(4, 2, 8, dtype=torch.float16), torch.ones(4, 2)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"v_a": V[0]}, ValueError, r"v_a must have shape \[n, num_heads, head_dim\]; got \[2, 8\]"),
        ({"v_a": V.int()}, ValueError, "requires dtype in"),
        ({"v_b": V.float()}, TypeError, "v_b must have the dtype of v_a, float16; got float32"),
        ({"v_b": V[:3]}, ValueError, r"v_b must have shape .* n = 4.* got \[3, 2, 8\]"),
        ({"v_a": torch.ones(4, 8, 2).half().mT}, ValueError, "v_a must be contiguous in its last"),
        ({"v_a": V[..., :0], "v_b": V[..., :0]}, ValueError, "v_a must have 1 <= head_dim"),
        ({"s_a": S.int()}, TypeError, "s_a must be float32; got int32"),
        ({"s_b": S[:, :1]}, ValueError, r"s_b must have shape .* num_heads = 2.* got \[4, 1\]"),
    ],
)
def test_merge_state_refuses(change: dict[str, torch.Tensor], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        fi_core.merge_state(**({"v_a": V, "s_a": S, "v_b": V, "s_b": S} | change))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"s": S.half()}, TypeError, "s must be float32; got float16"),
        ({"v_other": V.float()}, TypeError, "v_other must have the dtype of v, float16; got float32"),
        ({"s_other": S[:1]}, ValueError, "s_other must have shape"),
        ({"mask": torch.ones(4)}, TypeError, "mask must be bool or uint8; got float32"),
        ({"mask": torch.ones(3, dtype=torch.bool)}, ValueError, r"mask must have shape \[n\] with n = 4; got \[3\]"),
    ],
)
def test_merge_state_in_place_refuses(change: dict[str, Any], error: type[Exception], words: str) -> None:
    """Errors name the arguments of this function; s is written, so it is not cast."""
    with pytest.raises(error, match=words):
        fi_core.merge_state_in_place(**({"v": V.clone(), "s": S.clone(), "v_other": V, "s_other": S} | change))


@pytest.mark.parametrize(
    ("v", "s", "error", "words"),
    [
        (V, S, ValueError, "v: shape .n, num_states, num_heads, head_dim. is required; got .4, 2, 8."),
        (V[None], S, ValueError, r"s must have shape \[n, num_states, num_heads\]"),
        (V[None], S[None].int(), TypeError, "s must be float32; got int32"),
        (V[None], S[None, :, :1], ValueError, "s must have shape .* num_heads = 2"),
    ],
)
def test_merge_states_refuses(v: torch.Tensor, s: torch.Tensor, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        fi_core.merge_states(v, s)


def test_definitions_name_heads_and_dim() -> None:
    assert fi_core.merge_state.fi_trace(v_a=V, s_a=S, v_b=V, s_b=S)["name"] == "merge_state_h2_d8"
    assert fi_core.merge_states.fi_trace(v=V[None], s=S[None])["outputs"]["merged"]["dtype"] == "float16"
