"""The op behind single-request attention, whose public forms are in decode/ and prefill/."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fi_core.attention.arguments import LAYOUTS, POS_ENCODINGS, code
from fi_core.attention.tiles import MULTIPLY, TILE_OF_48
from fi_core.launch.op import Launcher
from fi_core.spec.constraint import ON_CPU, at_least
from fi_core.spec.dtype import DTYPES
from fi_core.spec.op import Axes, Entry, Impl, Op, Unit
from fi_core.utils import ceil_div

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    Variant = tuple[Callable[..., None], bool, Sequence[Any]]

_TYPES = ("f16", "bf16", "f32", "e4m3", "e5m2")
_ROWS = 4  # packed query rows a block of the rows kernel holds in registers


def _single_attention_unit(axes: Axes) -> Unit:
    """config = (kind, largest head dim, packed rows a block): tiles on tensor cores, rows on CUDA cores, combine."""
    q, kv = DTYPES[str(axes["q"])], DTYPES[str(axes["kv"])]
    if axes["few"] or q.short not in MULTIPLY:
        rows = f"attend_rows<{q.device}, {kv.device}"
        entries = [Entry("attend_rows", f"{rows}, 1, {_ROWS}>", 128, (1, 256, _ROWS))]
        if q.short not in MULTIPLY:
            entries.append(Entry("attend_wide_rows", f"{rows}, 2, 1>", 128, (1, 512, 1)))
        entries.append(Entry("combine_chunks", "combine_chunks", 128, (2, 512, 1)))
    else:
        tile = TILE_OF_48
        size, body = tile.shared_bytes(kv.bytes), tile.body("attend_tiles", q.short, kv.short)
        entries = [Entry("attend_tiles", body, tile.threads, (0, 512, tile.rows), size, tile.blocks)]
    return Unit("fi/attention/single_attention.cuh", "SingleAttentionParams", tuple(entries))


SINGLE_ATTENTION = Op(
    name="single_attention",
    family="attention",
    schema="(Tensor(a!) out, Tensor(b!)? lse, Tensor(c!)? workspace, Tensor q, Tensor k, Tensor v, "
    "Tensor? custom_mask, Tensor? packed_custom_mask, Tensor? scale_q, Tensor? scale_k, Tensor? scale_v, "
    "int kv_layout, int pos_encoding_mode, bool causal, int window_left, float logits_soft_cap, float sm_scale, "
    "float v_scale, float rope_scale, float rope_theta, bool few) -> ()",
    axes={
        "few": (False, True),
        "q": ("f16", "bf16", "f32", "e4m3", "e5m2"),
        "kv": ("f16", "bf16", "f32", "e4m3", "e5m2"),
    },
    impls=(Impl("cpu", ON_CPU), Impl("cuda", at_least(80), _single_attention_unit)),
    prebuilt=tuple(
        {"few": few, "q": q, "kv": kv}
        for q, kv in (
            *zip(_TYPES, _TYPES),
            *((q, kv) for q in ("f16", "bf16") for kv in ("e4m3", "e5m2")),
        )
        for few in (True, False)
        if few or q != "f32"
    ),
)

single_attention = Launcher(
    SINGLE_ATTENTION, lambda out, lse, workspace, q, k, *rest: (q.get_device(), rest[-1], q.dtype, k.dtype)
)

_FEW = 16  # packed rows (of the query heads that share a kv head) up to which a tile of 64 would be mostly empty
_BLOCKS = 528  # four on each multiprocessor of an H200
_LEAST_KEYS = 128  # of a chunk: below, merging costs more than the parallel reads save


def choose(
    qo_len: int, num_qo_heads: int, num_kv_heads: int, kv_len: int, head_dim: int, window_left: int, fp32: bool
) -> tuple[bool, int]:
    """Which kernel takes the rows (few: CUDA cores, else tensor cores), and into how many chunks it splits the keys.

    CUDA cores take few rows, whose keys are then split so that they keep the device busy, and fp32. All depends on the
    shape alone: results do not change from device to device, and chunks times query heads stays below 2112 or the
    number of heads, which bounds the workspace.
    """
    rows = qo_len * num_qo_heads // max(1, num_kv_heads)
    if (qo_len > 1 and rows > _FEW) or (head_dim > 256 and not fp32):
        return fp32, 1
    visible = kv_len if window_left < 0 else min(kv_len, window_left + qo_len)
    blocks = max(1, num_kv_heads * ceil_div(rows, _ROWS))
    return True, max(1, min(ceil_div(visible, _LEAST_KEYS), _BLOCKS // blocks))


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qo_len: int,
    out_dtype: torch.dtype | None,
    return_lse: bool,
    kv_layout: str,
    pos_encoding_mode: str,
    window_left: int,
    logits_soft_cap: float | None,
    sm_scale: float | None,
    qk_factor: float | None,
    v_scale: float | None,
    rope_scale: float | None,
    rope_theta: float | None,
    causal: bool = False,
    custom_mask: torch.Tensor | None = None,
    packed_custom_mask: torch.Tensor | None = None,
    scale_q: torch.Tensor | None = None,
    scale_k: torch.Tensor | None = None,
    scale_v: torch.Tensor | None = None,
    variant: Variant | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Allocates the results and calls the op, for q `[qo_len, heads, d]` or `[heads, d]`: what the forms share.

    variant: the op with a user's variant, whether it was compiled for few rows, and what it takes more.
    """
    import torch

    layout = code(LAYOUTS, kv_layout, "kv_layout")
    encoding = code(POS_ENCODINGS, pos_encoding_mode, "pos_encoding_mode")
    if k.ndim != 3 or v.ndim != 3:
        raise ValueError(f"k and v must have 3 dimensions; got shapes {tuple(k.shape)} and {tuple(v.shape)}")
    *rows, dim = q.shape
    dim_vo = v.shape[2]
    shape = (*rows, dim_vo)
    out = q.new_empty(shape) if out_dtype is None else q.new_empty(shape, dtype=out_dtype)  # a dtype costs 1 us
    lse = q.new_empty(rows, dtype=torch.float32) if return_lse else None
    workspace = None
    fp32 = q.dtype is torch.float32
    few, chunks = choose(qo_len, rows[-1], k.shape[1 - layout], k.shape[layout], max(dim, dim_vo), window_left, fp32)
    launch: Callable[..., None] = single_attention
    extras: Sequence[Any] = ()
    if variant is not None:
        launch, compiled_few, extras = variant
        few, chunks = compiled_few, chunks if compiled_few else 1
    if chunks > 1:
        workspace = q.new_empty((chunks, qo_len * rows[-1], dim_vo + 2), dtype=torch.float32)
    scale: float = (dim**-0.5 if dim else 1.0) if sm_scale is None else sm_scale
    launch(
        out,
        lse,
        workspace,
        q,
        k,
        v,
        custom_mask,
        packed_custom_mask,
        scale_q,
        scale_k,
        scale_v,
        layout,
        encoding,
        causal,
        window_left,
        logits_soft_cap or 0.0,
        scale if qk_factor is None else scale * qk_factor,
        1.0 if v_scale is None else v_scale,
        1.0 if rope_scale is None else rope_scale,
        1e4 if rope_theta is None else rope_theta,
        few,
        *extras,
    )
    return out if lse is None else (out, lse)


def __getattr__(name: str) -> Any:
    """Callers look here for the wrapper with sinks, which lives in the family that this module is a part of."""
    if name == "BatchAttentionWithAttentionSinkWrapper":
        from fi_core.prefill import BatchAttentionWithAttentionSinkWrapper

        return BatchAttentionWithAttentionSinkWrapper
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
