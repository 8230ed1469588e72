"""BatchAttention: prompts and decode requests of one batch in any order, over one paged KV cache."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from fi_core.attention.contract import LAYOUTS, Cache, check_shape, code, number, results, unpack
from fi_core.attention.wrappers import mixed_trace
from fi_core.attention.wrappers.base import PlanState
from fi_core.attention.wrappers.side_by_side import divide, halves, operations, side_by_side
from fi_core.observe.checked import checked
from fi_core.observe.log import fi_api
from fi_core.runtime.invariance import is_on
from fi_core.runtime.lazy import torch
from fi_core.utils import int32_index

_WORKSPACE = 160 << 20  # bytes, for both halves


@fi_api
class BatchAttention(PlanState):
    """Attention of a batch that mixes prompts and decode requests: `plan` once per step, `run` once per layer.

    Requests of one row at the beginning or the end of the batch, where engines place them, take the decode kernel and
    the others the prefill kernel, at the same time on different SMs if both take long enough. Other batches, and all
    batches inside `batch_invariant()`, take the prefill kernel.

    Args:
        kv_layout: "NHD" or "HND".
        device: of the wrapper's own workspaces, 176 MiB.
        jit_args: arguments of gen_customize_batch_attention_module, for a variant instead of the built-in attention
            (not an argument of FlashInfer's class).

    Raises:
        KeyError: kv_layout.
        ValueError: device.
    """

    def __init__(
        self, kv_layout: str = "NHD", device: torch.device | str = "cuda", jit_args: Sequence[Any] | None = None
    ) -> None:
        code(LAYOUTS, kv_layout, "kv_layout")
        try:
            self._kv_layout, self.device = kv_layout, torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"device: a device of torch is required; got {device!r} ({error})") from None
        workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=device)
        self._prefill, self._decode = halves(workspace, kv_layout, jit_args)

    @fi_api
    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype | str = "bfloat16",
        kv_data_type: torch.dtype | str = "bfloat16",
        use_profiler: bool = False,
    ) -> None:
        """Plans the next `run` calls. It synchronises where qo_indptr, kv_indptr or kv_len_arr is on the device.

        Args:
            qo_indptr: int32 `[batch_size + 1]`; request b has rows `q[qo_indptr[b] : qo_indptr[b + 1]]`.
            kv_indptr: int32 `[batch_size + 1]`; request b has pages `kv_indices[kv_indptr[b] : kv_indptr[b + 1]]`.
            kv_indices: int32 `[kv_indptr[-1]]` or longer, page ids.
            kv_len_arr: int32 `[batch_size]`, tokens of each request.
            num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, page_size, causal, sm_scale, logits_soft_cap,
                q_data_type, kv_data_type: as in `BatchPrefillWithPagedKVCacheWrapper.plan`. Head dims are up to 256.
            use_profiler: must be False.

        Raises:
            ValueError: head dims above 256; other errors are those of that function.
            NotImplementedError: use_profiler.
        """
        self._forget_plan()
        check_shape(num_qo_heads, num_kv_heads, page_size, head_dim_qk=head_dim_qk, head_dim_vo=head_dim_vo)
        for name, dim in (("head_dim_qk", head_dim_qk), ("head_dim_vo", head_dim_vo)):
            if dim > 256:
                raise ValueError(f"{name}: at most 256 is required; got {dim}")
        if use_profiler:
            raise NotImplementedError("use_profiler: not supported, profile with fi-bench or Nsight; pass False")
        host = _on_host(qo_indptr, kv_indptr, kv_len_arr)
        rows, pages, tokens = (x.tolist() for x in host)
        qo_lens = [after - before for before, after in itertools.pairwise(rows)]
        first, last = (0, 0) if is_on() else _decode_range(qo_lens)  # a place in the batch chooses no kernel
        begin, end = (last, len(qo_lens)) if first == 0 else (0, first)  # the requests of prefill
        options: dict[str, Any] = {"sm_scale": sm_scale, "logits_soft_cap": logits_soft_cap}
        options |= {"q_data_type": q_data_type, "kv_data_type": kv_data_type}

        def tables(from_: int, to: int) -> tuple[Any, ...]:
            """qo_indptr, kv_indptr, kv_indices and lengths of some of the requests."""
            qo, kv = (x[from_ : to + 1] - x[from_] for x in host[:2])
            return qo, kv, kv_indices[pages[from_] : pages[to]], host[2][from_:to]

        shape = num_qo_heads, num_kv_heads
        if last > first:
            _, kv, indices, lens = tables(first, last)
            self._decode.plan(kv, indices, lens, *shape, head_dim_qk, page_size, seq_lens=lens, **options)
        if end > begin or last == first:
            qo, kv, indices, lens = tables(begin, end)
            dims = (head_dim_qk, page_size, head_dim_vo)
            self._prefill.plan(qo, kv, indices, lens, *shape, *dims, causal=causal, seq_lens=lens, **options)
        self._rows = rows[begin], rows[end], rows[first], rows[last], rows[-1]
        self._head_dim_vo, self._logits_soft_cap = head_dim_vo, logits_soft_cap or 0.0
        lengths = [(float(q), float(kv)) for q, kv in zip(qo_lens[begin:end], tokens[begin:end])]
        self._operations = operations(num_qo_heads, head_dim_qk + head_dim_vo, causal, lengths)
        described = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_indices": kv_indices, "kv_len_arr": kv_len_arr}
        scale = head_dim_qk**-0.5 if sm_scale is None else sm_scale
        covered = self._prefill._variant is None and not logits_soft_cap
        options = {"sm_scale": scale, "causal": causal, "kv_layout": self._kv_layout, "covered": covered}
        self._described = {**described, **options}
        self._end_plan([len(qo_lens), begin, end, first, last, rows[-1]])

    @fi_api(trace=mixed_trace.mixed, planned=mixed_trace.PLANNED_MIXED)
    @checked
    def run(
        self,
        q: torch.Tensor,
        kv_cache: Cache,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        logits_soft_cap: float = 0.0,
        profiler_buffer: torch.Tensor | None = None,
        kv_cache_sf: Any = None,
        *,
        variant_args: Sequence[Any] = (),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of the planned batch.

        Args:
            q, kv_cache, out, lse, k_scale, v_scale, kv_cache_sf: as q, paged_kv_cache and options of
                `BatchPrefillWithPagedKVCacheWrapper.run`.
            logits_soft_cap: 0, or instead of the planned one, which must be positive too.
            profiler_buffer: without effect.
            variant_args: with jit_args, the variant's tensors and scalars in order of declaration.

        Returns:
            (out `[qo_indptr[-1], num_qo_heads, head_dim_vo]` of q's dtype, lse fp32 `[qo_indptr[-1], num_qo_heads]`,
            base 2).

        Raises:
            RuntimeError: no plan.
            ValueError: logits_soft_cap without one in the plan; other errors are those of that function.
        """
        self._require_plan()
        prefill, decode = self._prefill, self._decode
        begin, end, first, last, rows = self._rows
        if q.ndim != 3 or q.shape[0] != rows:
            raise ValueError(f"q: {rows} rows were planned (qo_indptr[-1]); got shape {tuple(q.shape)}")
        shape = (*q.shape[:2], self._head_dim_vo)
        out, lse = results(q, shape, out, lse, True, q.dtype)
        assert lse is not None
        written = out, lse
        options: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale, "kv_cache_sf": kv_cache_sf}
        spans: dict[Any, tuple[int, int]] = {prefill: (begin, end), decode: (first, last)}
        used = [half for half, (from_, to) in spans.items() if to > from_] or [prefill]
        if number(logits_soft_cap, "logits_soft_cap") > 0.0 and self._logits_soft_cap <= 0.0:
            raise ValueError(f"logits_soft_cap: the plan had none; got {logits_soft_cap}")
        for half in used:
            half._change(soft_cap=logits_soft_cap if logits_soft_cap > 0.0 else self._logits_soft_cap)

        def attend(half: Any) -> None:
            if half in used:
                rows = slice(*spans[half])
                part = {"out": written[0][rows], "lse": written[1][rows], "return_lse": True}
                half.run(q[rows], kv_cache, *variant_args, **part, **options)

        ctas = 0
        if last > first:
            _, v = unpack(kv_cache, self._kv_layout)
            ctas = divide(decode, v, self._operations if len(used) == 2 else 0.0)
        prefill._change(num_ctas=ctas)
        side_by_side(ctas, q.device, lambda: attend(prefill), lambda: attend(decode))
        return out, lse


def _on_host(qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_len_arr: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tables on the host. Raises ValueError and TypeError for other forms."""
    if not qo_indptr.numel() == kv_indptr.numel() == kv_len_arr.numel() + 1:
        raise ValueError(
            f"qo_indptr, kv_indptr and kv_len_arr: lengths batch_size + 1, batch_size + 1 and batch_size are "
            f"required; got {qo_indptr.numel()}, {kv_indptr.numel()} and {kv_len_arr.numel()}"
        )
    host = tuple(int32_index(x.cpu()) for x in (qo_indptr, kv_indptr, kv_len_arr))
    for name, x in zip(("qo_indptr", "kv_indptr", "kv_len_arr"), host):
        if x.dtype is not torch.int32 or x.ndim != 1:
            raise TypeError(f"{name}: a flat int32 tensor is required; got {x.dtype} of shape {tuple(x.shape)}")
    return host


def _decode_range(qo_lens: list[int]) -> tuple[int, int]:
    """The requests [first, last) of one row at the beginning of a batch, or at its end if those are more."""
    leading = next((i for i, rows in enumerate(qo_lens) if rows != 1), len(qo_lens))
    trailing = next((i for i, rows in enumerate(reversed(qo_lens)) if rows != 1), len(qo_lens))
    return (0, leading) if leading >= trailing else (len(qo_lens) - trailing, len(qo_lens))
