"""Cases of single-request attention."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fi_bench.baselines import flash_attention3
from fi_bench.case import Case, Inputs, Outputs, Planned, Tolerance, Work, dtype_of
from fi_bench.cases.common import nbytes, normal
from fi_bench.errors import SkipError
from fi_core.testing.attention import attention_flops_with_actual_seq_lens

if TYPE_CHECKING:
    import torch

_ROWS_AT_ONCE = 1024  # of the fp64 score matrix of one head
_LSE = Tolerance(1e-3, 1e-2)


def _make(p: Namespace, device: Any, generator: Any, decode: bool) -> Inputs:
    dim_qk = p.head_dim_qk or 128
    dim_vo = p.head_dim_vo or dim_qk
    q_dtype, kv_dtype = dtype_of(p.q_dtype), dtype_of(p.kv_dtype)
    tokens = (p.s_kv, p.num_kv_heads) if p.kv_layout == "NHD" else (p.num_kv_heads, p.s_kv)
    q_shape = (p.num_qo_heads, dim_qk) if decode else (p.s_qo, p.num_qo_heads, dim_qk)
    return Inputs(
        q=normal(q_shape, q_dtype, device, generator),
        k=normal((*tokens, dim_qk), kv_dtype, device, generator),
        v=normal((*tokens, dim_vo), kv_dtype, device, generator),
        causal=p.causal and not decode,
        kv_layout=p.kv_layout,
        window_left=p.window_left,
        soft_cap=p.logits_soft_cap or None,
        scale=dim_qk**-0.5,
        out_dtype=dtype_of(p.out_dtype) if p.out_dtype else q_dtype,
    )


def _heads_first(x: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [Hq, qo, D], k and v [Hkv, kv, D]."""
    q = x.q.unsqueeze(0) if x.q.ndim == 2 else x.q
    k, v = (x.k.transpose(0, 1), x.v.transpose(0, 1)) if x.kv_layout == "NHD" else (x.k, x.v)
    return q.transpose(0, 1), k, v


def _visible(x: Inputs, rows: torch.Tensor, kv_len: int, qo_len: int) -> torch.Tensor | None:
    """Which keys each of these query rows sees; None is all."""
    import torch

    if not x.causal and x.window_left < 0:
        return None
    key = torch.arange(kv_len, device=rows.device)
    last = (rows + kv_len - qo_len).unsqueeze(1)
    seen = key <= last if x.causal else torch.ones_like(key <= last)
    return seen & (key >= last - x.window_left) if x.window_left >= 0 else seen


def _reference(x: Inputs) -> Outputs:
    """Softmax attention in fp64, one head and a block of rows at a time; LSE in base 2."""
    import torch

    q, k, v = _heads_first(x)
    group, qo_len, kv_len = q.shape[0] // k.shape[0], q.shape[1], k.shape[1]
    out = torch.empty((qo_len, q.shape[0], v.shape[2]), dtype=torch.float64, device=q.device)
    lse = torch.empty((qo_len, q.shape[0]), dtype=torch.float64, device=q.device)
    for head in range(q.shape[0]):
        keys, values = k[head // group].double(), v[head // group].double()
        for start in range(0, qo_len, _ROWS_AT_ONCE):
            rows = torch.arange(start, min(start + _ROWS_AT_ONCE, qo_len), device=q.device)
            score = q[head, rows].double() @ keys.t() * x.scale
            if x.soft_cap:
                score = x.soft_cap * torch.tanh(score / x.soft_cap)
            seen = _visible(x, rows, kv_len, qo_len)
            if seen is not None:
                score = score.masked_fill(~seen, float("-inf"))
            out[rows, head] = torch.softmax(score, -1).nan_to_num(0.0) @ values
            lse[rows, head] = torch.logsumexp(score, -1) / torch.log(torch.tensor(2.0, dtype=torch.float64))
    return {"out": out[0] if x.q.ndim == 2 else out, "lse": lse[0] if x.q.ndim == 2 else lse}


def _out_only(reference: Callable[[Inputs], Outputs]) -> Callable[[Inputs], Outputs]:
    return lambda x: {"out": reference(x)["out"]}


def _sdpa(backend: str | None = None) -> Callable[[Inputs], Any]:
    """torch's scaled_dot_product_attention, with the backend it prefers or the named one."""

    def run(x: Inputs) -> torch.Tensor:
        import contextlib

        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        q, k, v = (t.unsqueeze(0) for t in _heads_first(x))
        qo_len, kv_len = q.shape[2], k.shape[2]
        square = x.causal and qo_len == kv_len and x.window_left < 0  # torch's own causal mask is top left
        mask = None if square else _visible(x, torch.arange(qo_len, device=q.device), kv_len, qo_len)
        force = sdpa_kernel([getattr(SDPBackend, backend)]) if backend else contextlib.nullcontext()
        try:
            with force:
                out = torch.nn.functional.scaled_dot_product_attention(
                    q, k.to(q.dtype), v.to(q.dtype), mask, is_causal=square, scale=x.scale, enable_gqa=True
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
    options = {"softmax_scale": x.scale, "causal": x.causal, "softcap": x.soft_cap or 0.0}
    if x.window_left >= 0:
        options["window_size"] = [x.window_left, -1]

    def run(x: Inputs) -> torch.Tensor:
        q, k, v = (t.transpose(0, 1) for t in _heads_first(x))
        out: torch.Tensor = function(q, k, v, cu_q=cu_q, cu_k=cu_k, max_q=max_q, max_k=max_k, **options)
        return out[0] if x.q.ndim == 2 else out

    return run


_RIVALS: dict[str, Callable[[Inputs], Any] | Planned] = {
    "torch_math": _sdpa("MATH"),
    "torch_flash": _sdpa("FLASH_ATTENTION"),
    "torch_efficient": _sdpa("EFFICIENT_ATTENTION"),
    "cudnn": _sdpa("CUDNN_ATTENTION"),
    "flash_attention3": Planned(_plan_flash_attention3, lambda run, x: run(x)),
}


def _work(p: Namespace, x: Inputs) -> Work:
    """Pairs that the mask leaves (causal by the usual formula, the diagonal counted by half); each tensor once."""
    q, k, v = _heads_first(x)
    heads, qo_len, dim_qk = q.shape
    kv_len, dim_vo = k.shape[1], v.shape[2]
    flops = attention_flops_with_actual_seq_lens([qo_len], [kv_len], dim_qk, dim_vo, heads, x.causal)
    out_bytes = qo_len * heads * dim_vo * x.out_dtype.itemsize
    return Work(flops, nbytes(x.q, x.k, x.v) + out_bytes)


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
        "logits_soft_cap": x.soft_cap,
        "sm_scale": x.scale,
    }


def _prefill_call(f: Callable[..., Any], x: Inputs) -> Any:
    return f(x.q, x.k, x.v, o_dtype=x.out_dtype, causal=x.causal, **_options(x))


def _returned(x: Inputs, returned: Any) -> Outputs:
    return {"out": returned[0], "lse": returned[1]} if isinstance(returned, tuple) else {"out": returned}


def _prefill(routine: str, lse: bool) -> Case:
    return Case(
        routine=routine,
        function=f"prefill.{routine}",
        op="single_attention",
        make=lambda p, device, generator: _make(p, device, generator, decode=False),
        call=_prefill_call,
        outputs=_returned,
        reference=_reference if lse else _out_only(_reference),
        work=_work,
        torch=_sdpa(),
        torch_outputs=_returned,
        rivals=_RIVALS,
        tolerance={"lse": _LSE},
        unsupported=_unsupported,
    )


CASES = (
    Case(
        routine="single_decode_with_kv_cache",
        function="decode.single_decode_with_kv_cache",
        op="single_attention",
        make=lambda p, device, generator: _make(p, device, generator, decode=True),
        call=lambda f, x: f(x.q, x.k, x.v, **_options(x)),
        outputs=_returned,
        reference=_out_only(_reference),
        work=_work,
        torch=_sdpa(),
        rivals=_RIVALS,
        unsupported=_unsupported,
    ),
    _prefill("single_prefill_with_kv_cache", lse=False),
    _prefill("single_prefill_with_kv_cache_return_lse", lse=True),
)
