"""Concatenation of the parts of a key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from fi_core.observe.draw import Draw
from fi_core.observe.log import fi_api
from fi_core.observe.trace import Const, Tensor, TraceTemplate, Var, samples
from fi_core.runtime.launch.operator import operator
from fi_core.runtime.spec.constraint import ON_CPU, at_least
from fi_core.runtime.spec.op import Entry, Implementation, Op, Unit, Values

if TYPE_CHECKING:
    import torch


class _Config(NamedTuple):
    vec_bytes: int  # bytes of a vector


def _unit(axes: Values) -> Unit:
    """Kernel entries in order of preference."""
    entries = tuple(Entry(f"concat_mla_k_{n}", f"concat_mla_k<{n}>", 256, _Config(n)) for n in (16, 8, 4, 2, 1))
    return Unit("fi/concat_ops/concat_mla_k.cuh", "ConcatMlaKParams", entries)


CONCAT_MLA_K = Op(
    name="concat_mla_k",
    family="concat_ops",
    arguments="Tensor(a!) k, Tensor k_nope, Tensor k_rope, bool? enable_pdl=None",
    config=_Config,
    implementations=(Implementation("cpu", ON_CPU), Implementation("cuda", at_least(80), _unit)),
)

_concat_mla_k = operator(CONCAT_MLA_K)


def _reference(k, k_nope, k_rope):  # type: ignore[no-untyped-def]
    import torch

    return torch.cat([k_nope, k_rope.expand(*k_nope.shape[:2], -1)], -1)


def _eager(k, k_nope, k_rope):  # type: ignore[no-untyped-def]
    k[..., : k_nope.shape[-1]] = k_nope
    k[..., k_nope.shape[-1] :] = k_rope
    return k


_TYPES = ("bfloat16", "float16", "float8_e4m3fn")


def _make(
    draw: Draw, *, dtype: str = "bfloat16", n: int = 5, heads: int = 16, nope: int = 128, rope: int = 64
) -> dict[str, Any]:
    return {
        "k": draw.empty((n, heads, nope + rope), dtype),
        "k_nope": draw.rows(draw.normal((n, heads, nope), dtype)),
        "k_rope": draw.normal((n, 1, rope), dtype),
    }


@fi_api(
    trace=TraceTemplate(
        "concat_mla_k",
        axes={"n": Var(), "heads": Const(), "nope": Const(), "one": Const(), "rope": Const(), "width": Const()},
        inputs={
            "k": Tensor(["n", "heads", "width"]),
            "k_nope": Tensor(["n", "heads", "nope"]),
            "k_rope": Tensor(["n", "one", "rope"]),
        },
        outputs={"k": Tensor(["n", "heads", "width"], param="k", dtype_from="k_nope")},
        reference=_reference,
        op="concat_mla_k",
        make=_make,
        samples=samples({"dtype": _TYPES, "n, heads, nope, rope": ((5, 16, 128, 64), (3, 2, 7, 3), (0, 8, 128, 64))}),
        work=0,
        eager=_eager,
        description="The latent and the rotary part of each key side by side; all heads share the rotary part.",
    )
)
def concat_mla_k(k: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor, *, backend: str = "default") -> None:
    """Writes `[k_nope, k_rope]` of each token and head to k, in place: keys of MLA prefill (arXiv:2405.04434).

    Args:
        k: `[n, heads, nope + rope]`; any dtype of whole bytes and any strides with a contiguous last dimension.
        k_nope: `[n, heads, nope]`, likewise, of k's dtype.
        k_rope: `[n, 1, rope]`, likewise; all heads share it.
        backend: "default" and "cake" mean the same kernel.

    Raises:
        ValueError: a shape, stride, device or backend is wrong.
        TypeError: a dtype is wrong.
    """
    if backend not in ("default", "cake"):
        raise ValueError(f'backend: "default" or "cake" is required; got {backend!r}')
    _concat_mla_k(k, k_nope, k_rope)
