"""Cases of single-request attention."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fi_bench.case import Case, Inputs, Planned, Tolerance, dtype_of
from fi_bench.described import described, sizes_of
from fi_bench.errors import SkipError
from fi_bench.peers import flash_attention3

if TYPE_CHECKING:
    import torch

_LSE = Tolerance(1e-3, 1e-2)  # of scores that other libraries round to 16 bits


def _sizes(p: Namespace) -> dict[str, Any]:
    dim_qk = p.head_dim_qk or 128
    return {
        **sizes_of(p, "num_qo_heads", "num_kv_heads", "window_left", "kv_dtype", kv_len="s_kv", dtype="q_dtype"),
        "head_dim_qk": dim_qk,
        "head_dim_vo": p.head_dim_vo or dim_qk,
        "logits_soft_cap": p.logits_soft_cap or None,
        "sm_scale": dim_qk**-0.5,
    }


def _prefill_sizes(p: Namespace) -> dict[str, Any]:
    out_dtype = dtype_of(p.out_dtype or p.q_dtype)
    return {**_sizes(p), "qo_len": p.s_qo, "causal": p.causal, "o_dtype": out_dtype}


def _heads_first(x: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [Hq, qo, D], k and v [Hkv, kv, D]."""
    q = x.q.unsqueeze(0) if x.q.ndim == 2 else x.q
    k, v = (x.k.transpose(0, 1), x.v.transpose(0, 1)) if x.kv_layout == "NHD" else (x.k, x.v)
    return q.transpose(0, 1), k, v


def _visible(x: Inputs, rows: torch.Tensor, kv_len: int, qo_len: int) -> torch.Tensor | None:
    """Which keys each of these query rows sees; None is all."""
    import torch

    causal = x.get("causal", False)
    if not causal and x.window_left < 0:
        return None
    key = torch.arange(kv_len, device=rows.device)
    last = (rows + kv_len - qo_len).unsqueeze(1)
    seen = key <= last if causal else torch.ones_like(key <= last)
    return seen & (key >= last - x.window_left) if x.window_left >= 0 else seen


def sdpa(backend: str | None = None) -> Callable[[Inputs], Any]:
    """torch's scaled_dot_product_attention, with the backend it prefers or the named one."""

    def run(x: Inputs) -> torch.Tensor:
        import contextlib

        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        q, k, v = (t.unsqueeze(0) for t in _heads_first(x))
        qo_len, kv_len = q.shape[2], k.shape[2]
        square = (
            x.get("causal", False) and qo_len == kv_len and x.window_left < 0
        )  # torch's own causal mask is top left
        mask = None if square else _visible(x, torch.arange(qo_len, device=q.device), kv_len, qo_len)
        force = sdpa_kernel([getattr(SDPBackend, backend)]) if backend else contextlib.nullcontext()
        try:
            with force:
                out = torch.nn.functional.scaled_dot_product_attention(
                    q, k.to(q.dtype), v.to(q.dtype), mask, is_causal=square, scale=x.sm_scale, enable_gqa=True
                )
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
            raise SkipError(f"torch's {backend} backend does not take these inputs") from None
        out = out.squeeze(0).transpose(0, 1)
        return out[0] if x.q.ndim == 2 else out

    return run


def _plan_flash_attention3(x: Inputs) -> Callable[[Inputs], torch.Tensor]:
    """Its varlen form with one request, which all its builds have."""
    import torch

    function = flash_attention3()
    q, k, _ = _heads_first(x)
    lengths = [(torch.tensor([0, t.shape[1]], dtype=torch.int32, device=t.device), t.shape[1]) for t in (q, k)]
    (cu_q, max_q), (cu_k, max_k) = lengths
    options = {"softmax_scale": x.sm_scale, "causal": x.get("causal", False), "softcap": x.logits_soft_cap or 0.0}
    if x.window_left >= 0:
        options["window_size"] = [x.window_left, -1]

    def run(x: Inputs) -> torch.Tensor:
        q, k, v = (t.transpose(0, 1) for t in _heads_first(x))
        out: torch.Tensor = function(q, k, v, cu_q=cu_q, cu_k=cu_k, max_q=max_q, max_k=max_k, **options)
        return out[0] if x.q.ndim == 2 else out

    return run


_PEERS: dict[str, Callable[[Inputs], Any] | Planned] = {
    "torch_math": sdpa("MATH"),
    "torch_flash": sdpa("FLASH_ATTENTION"),
    "torch_efficient": sdpa("EFFICIENT_ATTENTION"),
    "cudnn": sdpa("CUDNN_ATTENTION"),
    "flash_attention3": Planned(_plan_flash_attention3, lambda run, x: run(x)),
}


def _unsupported(backend: str, p: Namespace) -> str | None:
    if p.case:
        return "--case is for batch routines"
    if p.batch_size != 1:
        return f"single-request attention takes --batch_size 1, got {p.batch_size}"
    if p.random_actual_seq_len:
        return "--random_actual_seq_len is for batch routines"
    if p.causal and p.s_qo > p.s_kv:
        return f"--s_qo must be at most --s_kv ({p.s_kv}) with --causal, got {p.s_qo}"
    if p.num_qo_heads % p.num_kv_heads:
        return f"--num_qo_heads must be a multiple of --num_kv_heads ({p.num_kv_heads}), got {p.num_qo_heads}"
    if backend in ("torch", "cudnn") or backend.startswith("torch_"):
        if p.logits_soft_cap:
            return "torch's scaled_dot_product_attention has no soft cap"
        if p.q_dtype.startswith("fp8"):
            return "torch's scaled_dot_product_attention has no fp8 query"
    return None


def _options(x: Inputs) -> dict[str, Any]:
    return {
        "kv_layout": x.kv_layout,
        "window_left": x.window_left,
        "logits_soft_cap": x.logits_soft_cap,
        "sm_scale": x.sm_scale,
    }


def _case(function: str, sizes: Callable[[Namespace], dict[str, Any]], call: Any, lse: bool = False) -> Case:
    return described(
        function,
        sizes,
        call,
        sdpa(),
        which=lambda p, template: f"kv_layout:{p.kv_layout}" in template.tags and ("lse" in template.outputs) == lse,
        op="single_attention",
        peers=_PEERS,
        tolerance={"lse": _LSE} if lse else {},
        unsupported=_unsupported,
    )


def _prefill(routine: str, lse: bool) -> Case:
    return _case(
        f"prefill.{routine}",
        _prefill_sizes,
        lambda f, x: f(x.q, x.k, x.v, o_dtype=x.o_dtype, causal=x.causal, **_options(x)),
        lse,
    )


CASES = (
    _case("decode.single_decode_with_kv_cache", _sizes, lambda f, x: f(x.q, x.k, x.v, **_options(x))),
    _prefill("single_prefill_with_kv_cache", lse=False),
    _prefill("single_prefill_with_kv_cache_return_lse", lse=True),
)
