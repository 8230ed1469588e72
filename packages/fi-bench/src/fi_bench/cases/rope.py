"""Cases of rotary embedding, plain and with fp8 quantisation."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fi_bench.case import Case, Inputs, Outputs, Tolerance, Work, dtype_of
from fi_bench.cases.common import FP8_MAX, integers, nbytes, normal, page_table, to_fp8
from fi_bench.described import described, sizes_of

if TYPE_CHECKING:
    import torch

_MAX_OFFSET = 4096
# Other libraries compute angles of thousands of radians in fp32, good to some 1e-4.
_ON_THE_FLY = {name: Tolerance(1e-2, 1e-2) for name in ("q_rope", "k_rope")}


def _frequencies(p: Namespace, llama31: bool, device: Any) -> torch.Tensor:
    """Angle per position of each rotated pair, fp64."""
    import torch

    dim = p.rotary_dim or p.head_dim
    f: torch.Tensor = p.rope_theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)
    scale, low, high = float(p.rope_scale), float(p.low_freq_factor), float(p.high_freq_factor)
    if not llama31:
        return f / scale
    smooth = (f * p.old_context_len / (2 * math.pi * (high - low)) - low / (high - low)).clamp(0, 1)
    blended: torch.Tensor = f * (1 - smooth) / scale + f * smooth
    return blended


def _sizes(p: Namespace) -> dict[str, Any]:
    return {
        **sizes_of(p, "num_qo_heads", "num_kv_heads", num_segments="batch_size", dtype="input_dtype"),
        "nnz": p.batch_size * p.seq_len,
        "max_position": _MAX_OFFSET + p.seq_len,
    }


def _table(p: Namespace, device: Any, llama31: bool = False) -> dict[str, torch.Tensor]:
    """The table of cosines and sines for peers, and the frequencies it is of."""
    import torch

    frequencies = _frequencies(p, llama31, device)
    angles = torch.arange(_MAX_OFFSET + p.seq_len, dtype=torch.float64, device=device).unsqueeze(1) * frequencies
    return {"cos_sin_cache": torch.cat([angles.cos(), angles.sin()], 1).float(), "frequencies": frequencies}


def _positions(p: Namespace, offsets: torch.Tensor) -> torch.Tensor:
    import torch

    within = torch.arange(p.seq_len, dtype=torch.int32, device=offsets.device)
    return (offsets.unsqueeze(1) + within).flatten()


def _options(p: Namespace, llama31: bool) -> dict[str, Any]:
    options = {
        "rotary_dim": p.rotary_dim,
        "interleave": p.interleave,
        "rope_scale": p.rope_scale,
        "rope_theta": p.rope_theta,
    }
    if llama31:
        options |= {
            "low_freq_factor": p.low_freq_factor,
            "high_freq_factor": p.high_freq_factor,
            "old_context_len": p.old_context_len,
        }
    return options


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleave: bool) -> torch.Tensor:
    """x [n, heads, d] with its first 2 * cos.shape[1] dimensions rotated, in the precision of cos."""
    import torch

    width = 2 * cos.shape[-1]
    part, rest = x[..., :width].to(cos.dtype), x[..., width:].to(cos.dtype)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    a, b = (part[..., 0::2], part[..., 1::2]) if interleave else part.chunk(2, -1)
    pair = (a * cos - b * sin, b * cos + a * sin)
    rotated = torch.stack(pair, -1).flatten(-2) if interleave else torch.cat(pair, -1)
    return torch.cat([rotated, rest], -1)


def _torch(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Eager, from the table of cosines: in fp32, rounded once."""
    cos, sin = x.cos_sin_cache[x.pos_ids.long()].chunk(2, -1)
    q, k = (_rotate(part, cos, sin, x.interleave).to(part.dtype) for part in (x.q, x.k))
    return q, k


def _torch_cached(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = x.cos_sin_cache[x.positions.long()].chunk(2, -1)
    parts = (part.unflatten(1, (-1, x.head_size)) for part in (x.query, x.key))
    query, key = (_rotate(part, cos, sin, not x.is_neox).to(part.dtype).flatten(1) for part in parts)
    return query, key


def _plain(routine: str) -> Case:
    llama31, by_id = "llama31" in routine, "pos_ids" in routine

    def add(p: Namespace, x: Inputs) -> dict[str, Any]:
        """The options of the call, and what the peer reads."""
        pos_ids = x.pos_ids if by_id else _positions(p, x.offsets)
        return {"options": _options(p, llama31), "pos_ids": pos_ids, **_table(p, x.q.device, llama31)}

    def call(f: Callable[..., Any], x: Inputs) -> Any:
        where = (x.pos_ids,) if by_id else (x.indptr, x.offsets)
        return f(x.q, x.k, *where, **x.options)

    return described(
        f"rope.{routine}",
        lambda p: {**_sizes(p), **_options(p, llama31), "head_dim": p.head_dim},
        call,
        _torch,
        add=add,
        op="rope",
        tolerance=_ON_THE_FLY,
    )


def _cached(routine: str) -> Case:
    return described(
        f"rope.{routine}",
        lambda p: {
            **_sizes(p),
            **sizes_of(p, "rope_theta", head_size="head_dim"),
            "rotary_dim": p.rotary_dim or p.head_dim,
            "is_neox": not p.interleave,
        },
        lambda f, x: f(x.positions, x.query, x.key, x.head_size, x.cos_sin_cache, x.is_neox),
        _torch_cached,
        op="rope",
    )


def _make_quantised(p: Namespace, device: Any, generator: Any, mla: bool = False, append: bool = False) -> Inputs:
    """q and k split into a rotated and a plain part; MLA has one k without a head dimension."""
    import torch

    nnz, dtype, fp8 = p.batch_size * p.seq_len, dtype_of(p.input_dtype), dtype_of(p.quant_dtype)
    rope, nope = p.rotary_dim or p.head_dim, p.no_rope_dim
    offsets = integers(0, _MAX_OFFSET, (p.batch_size,), device, generator)
    table = _table(Namespace(**{**vars(p), "rotary_dim": rope}), device)["cos_sin_cache"]
    x = Inputs(pos_ids=_positions(p, offsets), cos_sin_cache=table, interleave=p.interleave)
    heads_k = () if mla else (p.num_kv_heads,)
    for part, dim in (("rope", rope), ("nope", nope)):
        for name, heads in (("q", (p.num_qo_heads,)), ("k", heads_k)):
            source = normal((nnz, *heads, dim), dtype, device, generator) if dim else None
            x[f"{name}_{part}"] = source
            x[f"{name}_{part}_out"] = None if source is None else torch.empty_like(source, dtype=fp8)
    x.update(quant_dtype=fp8, scale_q=1.5, scale_kv=0.75, pdl=p.enable_pdl)
    if append:
        del x["k_rope_out"], x["k_nope_out"]
        x.update(page_table([p.seq_len] * p.batch_size, p.page_size, device, generator))
        rows = torch.arange(nnz, dtype=torch.int32, device=device)
        tokens = (p.page_size, p.num_kv_heads) if p.kv_layout == "NHD" else (p.num_kv_heads, p.page_size)
        x.update(
            v=normal((nnz, p.num_kv_heads, rope + nope), dtype, device, generator),
            k_cache=normal((x.num_pages, *tokens, rope + nope), fp8, device, generator),
            v_cache=normal((x.num_pages, *tokens, rope + nope), fp8, device, generator),
            batch_indices=rows // p.seq_len,
            positions=rows % p.seq_len,
            page_size=p.page_size,
            kv_layout=p.kv_layout,
        )
    return x


def _quantise(x: Inputs, precision: torch.dtype) -> Outputs:
    """The four parts as fp8."""
    cos, sin = x.cos_sin_cache[x.pos_ids.long()].to(precision).chunk(2, -1)
    results = {}
    for name, scale in (("q", x.scale_q), ("k", x.scale_kv)):
        source = x[f"{name}_rope"]
        heads = source if source.ndim == 3 else source.unsqueeze(1)
        results[f"{name}_rope"] = _rotate(heads, cos, sin, x.interleave).view(source.shape) * scale
        if x[f"{name}_nope"] is not None:
            results[f"{name}_nope"] = x[f"{name}_nope"].to(precision) * scale
    return {name: to_fp8(value, x.quant_dtype) for name, value in results.items()}


def _quantised_reference(x: Inputs) -> Outputs:
    import torch

    return {name: value.double() for name, value in _quantise(x, torch.float64).items()}


def _torch_quantised(x: Inputs) -> Outputs:
    import torch

    return _quantise(x, torch.float32)


def _filled(x: Inputs, returned: Any) -> Outputs:
    names = ("q_rope", "k_rope", "q_nope", "k_nope")
    return {name: x[f"{name}_out"] for name in names if x.get(f"{name}_out") is not None}


def _append(x: Inputs, precision: torch.dtype) -> Outputs:
    """What the append must leave: quantised q, and both caches."""
    import torch

    parts = _quantise(x, precision)
    rows = torch.cat([parts["k_rope"].float(), *([parts["k_nope"].float()] if "k_nope" in parts else [])], -1)
    bound = FP8_MAX[str(x.quant_dtype).removeprefix("torch.")]
    values = (x.v.to(precision) * x.scale_kv).clamp(-bound, bound).float()
    page = x.kv_indices[(x.kv_indptr[x.batch_indices.long()] + x.positions // x.page_size).long()].long()
    slot = (x.positions % x.page_size).long()
    outputs = {"q_rope": parts["q_rope"]} | ({"q_nope": parts["q_nope"]} if "q_nope" in parts else {})
    for name, new in (("k_cache", rows), ("v_cache", values)):
        cache = x[name].float()
        (cache if x.kv_layout == "NHD" else cache.transpose(1, 2))[page, slot] = new.to(x.quant_dtype).float()
        outputs[name] = cache
    return outputs


def _append_reference(x: Inputs) -> Outputs:
    import torch

    return {name: value.double() for name, value in _append(x, torch.float64).items()}


def _torch_append(x: Inputs) -> Outputs:
    import torch

    return _append(x, torch.float32)


def _append_outputs(x: Inputs, returned: Any) -> Outputs:
    return _filled(x, returned) | {"k_cache": x.k_cache, "v_cache": x.v_cache}


def _quantised_call(f: Callable[..., Any], x: Inputs) -> Any:
    outputs = {name: x[name] for name in ("q_rope_out", "k_rope_out", "q_nope_out", "k_nope_out")}
    return f(x.q_rope, x.k_rope, x.q_nope, x.k_nope, x.cos_sin_cache, x.pos_ids, **_quantisation(x), **outputs)


def _quantisation(x: Inputs) -> dict[str, Any]:
    scales = {"quant_scale_q": x.scale_q, "quant_scale_kv": x.scale_kv}
    return {"is_neox": not x.interleave, "quantize_dtype": x.quant_dtype, "enable_pdl": x.pdl, **scales}


def _append_call(f: Callable[..., Any], x: Inputs) -> Any:
    return f(
        x.q_rope,
        x.k_rope,
        x.q_nope,
        x.k_nope,
        x.v,
        x.cos_sin_cache,
        x.pos_ids,
        (x.k_cache, x.v_cache),
        x.kv_indices,
        x.kv_indptr,
        batch_indices=x.batch_indices,
        positions=x.positions,
        page_size=x.page_size,
        kv_layout=x.kv_layout,
        q_rope_out=x.q_rope_out,
        q_nope_out=x.q_nope_out,
        **_quantisation(x),
    )


def _quantised_work(p: Namespace, x: Inputs) -> Work:
    sources = [x[name] for name in ("q_rope", "q_nope", "k_rope", "k_nope")] + [x.get("v")]
    elements = sum(t.numel() for t in sources if t is not None)
    return Work(4 * elements, nbytes(*sources) + elements * x.quant_dtype.itemsize + nbytes(x.pos_ids))


def _quantised(routine: str, mla: bool) -> Case:
    return Case(
        routine=routine,
        function=f"rope.{routine}",
        op="rope_quantize",
        make=lambda p, device, generator: _make_quantised(p, device, generator, mla),
        call=_quantised_call,
        outputs=_filled,
        reference=_quantised_reference,
        work=_quantised_work,
        torch=_torch_quantised,
        torch_outputs=lambda x, returned: returned,
        poison=("q_rope_out", "k_rope_out", "q_nope_out", "k_nope_out"),
        pdl=True,
    )


_BY_SHAPE = ("apply_rope", "apply_rope_pos_ids", "apply_llama31_rope", "apply_llama31_rope_pos_ids")
CASES = (
    *(_plain(name) for name in _BY_SHAPE),
    *(_plain(f"{name}_inplace") for name in _BY_SHAPE),
    _cached("apply_rope_with_cos_sin_cache"),
    _cached("apply_rope_with_cos_sin_cache_inplace"),
    _quantised("rope_quantize_fp8", mla=False),
    _quantised("mla_rope_quantize_fp8", mla=True),
    Case(
        routine="rope_quantize_fp8_append_paged_kv_cache",
        function="rope.rope_quantize_fp8_append_paged_kv_cache",
        op="rope_quantize",
        make=lambda p, device, generator: _make_quantised(p, device, generator, append=True),
        call=_append_call,
        outputs=_append_outputs,
        reference=_append_reference,
        work=_quantised_work,
        torch=_torch_append,
        torch_outputs=lambda x, returned: returned,
        poison=("q_rope_out", "q_nope_out"),
        pdl=True,
    ),
)
