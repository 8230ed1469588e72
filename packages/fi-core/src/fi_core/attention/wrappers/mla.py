"""Batch MLA over a paged latent cache: plan once per step, run once per layer."""

from __future__ import annotations

import functools
import math
from numbers import Real
from typing import Any

from fi_core.attention.contract import check_backend, check_workspace, dtype_of, flag, number
from fi_core.attention.ops import mla as ops
from fi_core.attention.schedule import MlaPlan
from fi_core.attention.wrappers import mla_trace, planners
from fi_core.attention.wrappers.base import PlannedWrapper, Shapes, check_results, keep, of_plan
from fi_core.attention.wrappers.tables import TABLES, MLAPlanMetadata, Tables, one_form
from fi_core.observe.describe import words
from fi_core.observe.log import fi_api
from fi_core.observe.subject import explain
from fi_core.runtime.errors import refuse
from fi_core.runtime.invariance import check_plan, is_on
from fi_core.runtime.lazy import torch
from fi_core.runtime.returns import method_setting_lse, method_with_lse

BACKENDS = ("auto", "fa2", "fa3")
FOREIGN = ("cutlass", "trtllm-gen", "cute-dsl", "cute-dsl-monolithic", "cute-dsl-modular", "xqa", "cutile")
_INT_WORKSPACE = 8 << 20  # bytes
_REQUIRED = words("num_heads head_dim_ckv head_dim_kpe page_size causal sm_scale q_data_type kv_data_type")  # of plan
_WORDS = {
    **dict.fromkeys(("query_layout", "kv_cache_layout"), (None, "packed", "split")),
    "lse_mode": ("none", "base2", "basee"),
    "output_scale": ("none", "per-tensor"),
    "scale_mode": ("default", "kv-per-tensor", "bmm-scalar", "bmm-tensor"),
}
# Of these, use_profiler, output_dtype, skip_softmax, enable_pdl and use_sinks: a key without them costs half.
_DEFAULTS = (None, None, "none", "none", "default", False, None, False, None, False)


def check_call(
    plan: MlaPlan, out: Any, lse: Any, q_nope: Any, q_pe: Any, ckv_cache: Any, kpe_cache: Any, *rest: Any
) -> None:
    """Raises the error that names the input that differs from the plan."""
    check_plan(plan.split_kv and not plan.fixed_splits)
    latent, rope = ops.LATENT, plan.head_dim_kpe
    for name, tensor, dtype, last in (
        ("q_nope", q_nope, plan.q_dtype, (plan.num_heads, latent)),
        ("q_pe", q_pe, plan.q_dtype, (plan.num_heads, rope)),
        ("ckv_cache", ckv_cache, plan.kv_dtype, (plan.page_size, latent)),
        ("kpe_cache", kpe_cache, plan.kv_dtype, (plan.page_size, rope)),
    ):
        if tensor.dtype is not dtype:
            raise ValueError(f"{name}: {dtype} was planned; got {tensor.dtype}")
        if tensor.ndim != 3 or tuple(tensor.shape[1:]) != last:
            raise ValueError(f"{name}: shape [.., {last[0]}, {last[1]}] was planned; got {tuple(tensor.shape)}")


@fi_api
class BatchMLAPagedAttentionWrapper(PlannedWrapper):
    """Multi-head latent attention with absorbed weights over a paged cache (MLA, arXiv:2405.04434).

    A query has a latent part (512 wide) and a rotary part (64 wide). The cache holds one latent row `ckv` and one
    rotary key `kpe` per token, which all heads share; ckv serves as key and as value. `plan` once per step, `run` once
    per layer. `last_choice` is the `Choice` of the dispatcher of the last run.

    Args:
        float_workspace_buffer: contiguous, on the device of the cache, aligned to 16 bytes; partials of split-KV. 34
            MiB keeps all SMs of an H200 busy; with less memory fewer SMs work.
        use_cuda_graph: fixes the batch size and lets `plan` copy its tables into the four buffers. A captured `run`
            then computes the batch that was planned last.
        qo_indptr, kv_indptr: int32 `[batch_size + 1]` or longer, with use_cuda_graph.
        kv_indices: int32 `[max_pages]`, with use_cuda_graph.
        kv_len_arr: int32 `[batch_size]`, with use_cuda_graph.
        backend: "auto"; "fa2" (mma.sync, sm_80 and later); "fa3" (Hopper).

    Raises:
        ValueError: backend or buffers.
        NotImplementedError: a backend of another library.
    """

    _plan: MlaPlan
    _causal, _sm_scale, _page_size = of_plan("causal"), of_plan("sm_scale"), of_plan("page_size")
    _num_heads, _batch_size, _head_dim_kpe = of_plan("num_heads"), of_plan("batch_size"), of_plan("head_dim_kpe")
    _q_data_type, _kv_data_type = of_plan("q_dtype"), of_plan("kv_dtype")
    _qo_indptr_buf, _kv_indptr_buf = of_plan("qo_indptr"), of_plan("kv_indptr")
    _kv_indices_buf, _kv_len_arr_buf = of_plan("page_indices"), of_plan("kv_len")
    _head_dim_ckv = ops.LATENT
    _plan_run, _check_call = ops.plan_run, staticmethod(check_call)

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        check_workspace(float_workspace_buffer, "float_workspace_buffer")
        check_backend(backend, BACKENDS, FOREIGN)
        self._backend, self._use_cuda_graph = backend, use_cuda_graph
        self._float_workspace_buffer, self.device = float_workspace_buffer, float_workspace_buffer.device
        self._int_workspace_buffer = torch.empty(_INT_WORKSPACE, dtype=torch.uint8, device=self.device)
        self._pinned = None
        buffers: dict[str, Any] = dict(zip(TABLES, (qo_indptr, kv_indptr, kv_indices, kv_len_arr)))
        self._tables, self._shapes = Tables(self.device, buffers if use_cuda_graph else None), Shapes()
        fields = dict(zip(("qo_indptr", "kv_indptr", "page_indices", "kv_len"), buffers.values()))
        self._plan = MlaPlan(backend=backend, **fields)
        self._use_profiler = False
        self.last_choice = None
        self._cached_module: Any = None
        self._reset_plan()
        planners.add(self)

    @fi_api
    def plan(
        self,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        num_heads: int | None = None,
        head_dim_ckv: int | None = None,
        head_dim_kpe: int | None = None,
        page_size: int | None = None,
        causal: bool | None = None,
        sm_scale: float | None = None,
        q_data_type: torch.dtype | str | None = None,
        kv_data_type: torch.dtype | str | None = None,
        use_profiler: bool = False,
        *,
        metadata: MLAPlanMetadata | None = None,
        cum_seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        max_q_len: int | None = None,
        query_layout: str | None = None,
        kv_cache_layout: str | None = None,
        lse_mode: str = "none",
        output_dtype: torch.dtype | str | None = None,
        output_scale: str = "none",
        scale_mode: str = "default",
        skip_softmax: bool = False,
        enable_pdl: bool | None = None,
        use_sinks: bool = False,
        disable_split_kv: bool = False,
    ) -> None:
        """Plans the next `run` calls: splits the KV of each request into work tiles. It does not synchronise.

        Args:
            qo_indptr: `[batch_size + 1]`, offsets of query tokens: request b has `qo_indptr[b] : qo_indptr[b + 1]`.
            kv_indptr: `[batch_size + 1]`, offsets of pages in kv_indices.
            kv_indices: page ids.
            kv_len_arr: `[batch_size]`, tokens of each request in the cache, its query tokens included.
            num_heads: query heads.
            head_dim_ckv: 512.
            head_dim_kpe: 64, or 0 without a rotary part.
            page_size: tokens of a page.
            causal: query token i of a request attends to `kv_len - qo_len + i + 1` tokens instead of all.
            sm_scale: factor of the scores, from the width of a head before absorption, such as 1 / sqrt(128 + 64).
            q_data_type: fp16 or bf16.
            kv_data_type: that of q, or float8_e4m3fn with bf16 queries.
            use_profiler: must be False.
            metadata: all tables in one object, instead of the arguments above and below.
            cum_seq_lens_q, block_tables, seq_lens: instead of the first four `[batch_size + 1]`, `[batch_size,
                max_pages]` and `[batch_size]`: a row of page ids for each request.
            max_q_len, skip_softmax: hints without effect.
            query_layout, kv_cache_layout, lse_mode: None, "packed" or "split"; "none", "base2" or "basee". A run takes
                both layouts and returns lse in either base, whatever was planned.
            output_dtype: None, or that of q.
            output_scale: must be "none".
            scale_mode: "default" or "kv-per-tensor": the scales of run.
            enable_pdl: programmatic dependent launch; None: where the device supports it.
            use_sinks: a run must then have sinks.
            disable_split_kv: requests are not split. The result of a request then has the same bits alone and in any
                batch of as many query tokens each; a few requests then leave SMs idle.

            The tables are int32 tensors on the host or on the device (int64 ones are copied). On the host they are
            copied to the device.

        Raises:
            ValueError: a shape, width or dtype; with use_cuda_graph also tables that do not fit the buffers.
            TypeError: an argument is missing, or not a number.
            NotImplementedError: use_profiler, output_dtype, output_scale or scale_mode.
        """
        self._forget_plan()
        tables = qo_indptr, kv_indptr, kv_indices, kv_len_arr
        dense = cum_seq_lens_q is not None or block_tables is not None or seq_lens is not None or max_q_len is not None
        if dense or metadata is not None or kv_len_arr is None:
            tables = one_form(metadata, cum_seq_lens_q, block_tables, seq_lens, max_q_len, *tables)
        key: tuple[Any, ...] = (
            num_heads, head_dim_ckv, head_dim_kpe, page_size, causal, sm_scale, q_data_type, kv_data_type,
            disable_split_kv, is_on(),
        )  # fmt: skip
        rest = query_layout, kv_cache_layout, lse_mode, output_scale, scale_mode, use_profiler, output_dtype
        last = skip_softmax, enable_pdl, use_sinks
        if (*rest, *last) != _DEFAULTS:
            key = (*key, *rest, *last)
        plan, sized = self._shapes.find(key) or self._shapes.keep(key, self._shaped(*key))
        placed = self._tables.place(*tables)
        batch_size = placed[3].numel()
        found = sized.get(batch_size) or keep(sized, batch_size, self._sized(plan, batch_size))
        self._end(found, placed)
        self._cached_module = planners.MLA_PLANNER

    def _shaped(self, *options: Any) -> MlaPlan:
        """A plan without tables for the options of `plan`: those of _REQUIRED, disable_split_kv, and of _WORDS on."""
        missing = [name for name, value in zip(_REQUIRED, options) if value is None]
        if missing:
            raise TypeError(f"plan() missing required arguments: {', '.join(missing)}")
        num_heads, head_dim_ckv, head_dim_kpe, page_size, causal, sm_scale, q_data_type, kv_data_type = options[:8]
        disable_split_kv, is_invariant, *rest = options[8:]
        output_scale, scale_mode, use_profiler, output_dtype, _, enable_pdl, use_sinks = (rest or _DEFAULTS)[3:]
        q_type, kv_type = dtype_of(q_data_type, "q_data_type"), dtype_of(kv_data_type, "kv_data_type")
        check_types(q_type, kv_type)
        if head_dim_ckv != ops.LATENT:
            raise ValueError(f"head_dim_ckv: {ops.LATENT} is required; got {head_dim_ckv!r}")
        if head_dim_kpe not in (0, ops.ROPE):
            raise ValueError(f"head_dim_kpe: {ops.ROPE}, or 0 without a rotary part, is required; got {head_dim_kpe!r}")
        for name, value in (("num_heads", num_heads), ("page_size", page_size)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: a positive integer is required; got {value!r}")
        for (name, known), word in zip(_WORDS.items(), rest):
            if word not in known:
                raise ValueError(f"{name}: one of {', '.join(map(repr, known))} is required; got {word!r}")
        refuse("kernels have no profiler of their own; use Nsight Compute", use_profiler=use_profiler)
        refuse("scale the output afterwards", output_scale=None if output_scale == "none" else output_scale)
        refuse("pass ckv_scale and kpe_scale to run", scale_mode=scale_mode if scale_mode.startswith("bmm") else None)
        other = None if output_dtype is None or dtype_of(output_dtype, "output_dtype") is q_type else output_dtype
        refuse(f"the output is {q_type} as the queries; convert it afterwards", output_dtype=other)
        shape = {"num_heads": num_heads, "head_dim_kpe": head_dim_kpe, "page_size": page_size, "causal": bool(causal)}
        types = {"q_dtype": q_type, "kv_dtype": kv_type, "fp8": kv_type.itemsize == 1}
        split_kv = not flag("disable_split_kv", disable_split_kv)
        own = {"enable_pdl": enable_pdl, "sinks": bool(use_sinks), "fixed_splits": split_kv and is_invariant}
        where = self.device, num_heads, head_dim_kpe > 0, kv_type, self._backend
        own["fine_splits"] = own["fixed_splits"] and ops.fine_splits(*where)
        return MlaPlan(
            sm_scale=number(sm_scale, "sm_scale"), split_kv=split_kv, backend=self._backend, **shape, **types, **own
        )

    def _sized(self, plan: MlaPlan, batch_size: int) -> MlaPlan:
        """The plan with its buffers, at the same addresses for plans of as many requests and heads."""
        size, schedule, workspace = ops.place(
            self._int_workspace_buffer, self._float_workspace_buffer, plan.num_heads, batch_size, plan.fixed_splits
        )
        return plan.replace(batch_size=batch_size, schedule=schedule, workspace=workspace, **size._asdict())

    def _end(self, plan: MlaPlan, tables: tuple[Any, ...]) -> list[int]:
        """Completes a plan, of `_sized`: computes its schedules, and makes the call of its kernel.

        tables: on the device.
        """
        qo_indptr, kv_indptr, page_indices, kv_len = tables
        plan = plan.replace(qo_indptr=qo_indptr, kv_indptr=kv_indptr, page_indices=page_indices, kv_len=kv_len)
        ops.mla_plan(
            plan.schedule, kv_len, plan.page_size, plan.num_heads, plan.max_ranges, plan.narrow_ranges,
            plan.wide_ranges, ops.NARROW_ROWS, ops.WIDE_ROWS * plan.cluster, qo_indptr, kv_indptr,
            split_kv=plan.split_kv, fixed_splits=plan.fixed_splits, fine_splits=plan.fine_splits,
            workspace_floats=plan.workspace.numel(),
        )  # fmt: skip
        self._set_call(plan, self.last_choice)
        ranges = plan.max_ranges, plan.narrow_ranges, plan.wide_ranges
        return self._end_plan([plan.batch_size, plan.num_heads, *ranges, plan.cluster])

    @method_with_lse
    @fi_api(trace=mla_trace.TEMPLATE, planned=mla_trace.PLANNED)
    def run(
        self,
        q_nope: torch.Tensor | None = None,
        q_pe: torch.Tensor | None = None,
        ckv_cache: torch.Tensor | None = None,
        kpe_cache: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        query: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        ckv_scale: float | None = None,
        ckv_scale_arr: torch.Tensor | None = None,
        kpe_scale: float | None = None,
        sinks: torch.Tensor | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        bmm1_scale: float | torch.Tensor | None = None,
        bmm2_scale: float | torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of the planned batch: `softmax((q_nope ckv^T + q_pe kpe^T) * sm_scale) ckv` for each head.

        Args:
            q_nope: `[tokens, num_heads, 512]`, of the planned dtype.
            q_pe: `[tokens, num_heads, 64]`; width 0 if head_dim_kpe is 0.
            ckv_cache: `[num_pages, page_size, 512]`, of the planned dtype.
            kpe_cache: `[num_pages, page_size, 64]`; width 0 if head_dim_kpe is 0.
            out: like q_nope; written and returned if given. Rows outside all requests are not written.
            lse: fp32 `[tokens, num_heads]`, written if given.
            return_lse: also return lse, `log2(sum(2^(score * log2 e)))`.
            profiler_buffer, kv_len, page_table, o_scale, bmm1_scale, bmm2_scale: must be None; they belong to kernels
                of other libraries.
            return_lse_base_on_e: lse as a natural logarithm.
            query: instead of q_nope and q_pe these two as a tuple, or side by side in one tensor.
            kv_cache: instead of ckv_cache and kpe_cache, likewise.
            ckv_scale: with a float8_e4m3fn cache the value of an element is `ckv * ckv_scale`.
            ckv_scale_arr: instead of ckv_scale, fp32 `[num_pages, page_size, 4]`, a scale of each 128 columns.
            kpe_scale: with a float8_e4m3fn cache and a rotary part, likewise.
            sinks: fp32 `[num_heads]`, a logit that enters the softmax and the lse of each head.
            skip_softmax_threshold_scale_factor: without effect; no softmax is skipped, which any threshold permits.

            Queries and caches may have any strides with a contiguous last dimension and rows at multiples of 16 bytes:
            ckv_cache and kpe_cache may be slices of one `[num_pages, page_size, 576]` tensor.

        Returns:
            out `[tokens, num_heads, 512]`, or (out, lse). A token that attends to nothing has out = 0 and lse = -inf.

        Raises:
            RuntimeError: no plan.
            UnsupportedError: the device lacks the kernels of the backend.
            ValueError: shape, dtype, device, stride or scale. Wrong contents of tables: on the CPU, and on CUDA with
                FI_CHECK=1 at import, which synchronises.
        """
        plan, call = self._plan, self._call
        if call is None:
            plan, call = self._ready()
        foreign = profiler_buffer is not None or kv_len is not None or page_table is not None or o_scale is not None
        if foreign or bmm1_scale is not None or bmm2_scale is not None:
            given = {"profiler_buffer": profiler_buffer, "kv_len": kv_len, "page_table": page_table, "o_scale": o_scale}
            given |= {"bmm1_scale": bmm1_scale, "bmm2_scale": bmm2_scale}
            refuse("it belongs to kernels of another library", **given)
        if query is not None:
            q_nope, q_pe = _parts("query", query, q_nope=q_nope, q_pe=q_pe)
        if kv_cache is not None:
            ckv_cache, kpe_cache = _parts("kv_cache", kv_cache, ckv_cache=ckv_cache, kpe_cache=kpe_cache)
        ckv = kpe = 1.0
        if plan.fp8 or ckv_scale is not None or ckv_scale_arr is not None or kpe_scale is not None:
            ckv, kpe = _scales(plan, ckv_scale, ckv_scale_arr, kpe_scale)
        if plan.sinks and sinks is None:
            raise ValueError("sinks: a tensor is required, since use_sinks was planned; got None")
        return_lse = return_lse is True or (return_lse is not False and flag("return_lse", return_lse))
        results, in_ln = (out, lse), return_lse_base_on_e
        try:
            if out is None:
                out = q_nope.new_empty(*q_nope.shape)  # type: ignore[union-attr]
            if lse is None and return_lse:
                lse = q_nope.new_empty(*q_nope.shape[:2], dtype=torch.float32)  # type: ignore[union-attr]
            ran = ops.run_planned(
                call, out, lse, q_nope, q_pe, ckv_cache, kpe_cache, ckv, kpe, ckv_scale_arr, in_ln, sinks=sinks
            )
        except Exception as error:
            values = {"q_nope": q_nope, "q_pe": q_pe, "ckv_cache": ckv_cache, "kpe_cache": kpe_cache}
            others = {"out": out, "lse": lse, "sinks": sinks, "ckv_scale_arr": ckv_scale_arr}
            explain(error, functools.partial(_check_run, plan, *results, **values), others, **values)
            raise
        self.last_choice = ran or self.last_choice
        return (out, lse) if return_lse and lse is not None else out

    run_return_lse = method_setting_lse(run)

    def _ready(self) -> tuple[MlaPlan, Any]:
        """The plan and its call, made anew because an option has changed."""
        self._require_plan()
        self._set_call(self._plan, self.last_choice)
        return self._plan, self._call


def check_types(q_type: torch.dtype, kv_type: torch.dtype) -> None:
    """Raises ValueError unless there are kernels for queries and a cache of these dtypes."""
    if q_type not in (torch.float16, torch.bfloat16):
        raise ValueError(f"q_data_type: torch.float16 or torch.bfloat16 is required; got {q_type}")
    if kv_type not in (torch.float16, torch.bfloat16, torch.float8_e4m3fn):
        required = "torch.float16, torch.bfloat16 or torch.float8_e4m3fn is required"
        raise ValueError(f"kv_data_type: {required}; got {kv_type}")
    if kv_type is torch.float8_e4m3fn and q_type is not torch.bfloat16:
        raise ValueError(f"q_data_type: torch.bfloat16 is required with a float8_e4m3fn cache; got {q_type}")
    if kv_type is not torch.float8_e4m3fn and kv_type is not q_type:
        raise ValueError(f"kv_data_type: that of the queries, {q_type}, or float8_e4m3fn is required; got {kv_type}")


def _parts(name: str, whole: Any, **parts: Any) -> Any:
    """The latent and the rotary part of a run's query or cache, in either form. Raises TypeError and ValueError."""
    if any(x is not None for x in parts.values()):
        raise TypeError(f"{name}: {' and '.join(parts)} may not be given with it; got both")
    if hasattr(whole, "tensor_split"):
        return whole[..., : ops.LATENT], whole[..., ops.LATENT :]
    if not isinstance(whole, tuple) or len(whole) != 2:
        raise TypeError(f"{name}: a tensor or a tuple ({', '.join(parts)}) is required; got a {type(whole).__name__}")
    return whole


def _check_run(plan: MlaPlan, out: Any, lse: Any, **given: Any) -> None:
    """Raises the error that names the argument of a run that is missing, or differs from the plan."""
    missing = [name for name, value in given.items() if value is None]
    if missing:
        raise TypeError(f"run() missing {', '.join(missing)}: query= and kv_cache= may stand for two of them each")
    check_call(plan, None, None, *given.values())
    check_results(given["q_nope"], given["q_nope"].shape, given["q_nope"].dtype, out, lse)


def _scales(plan: MlaPlan, ckv_scale: Any, ckv_scale_arr: Any, kpe_scale: Any) -> tuple[float, float]:
    """The scales of ckv and kpe, 1 where there are none. Raises ValueError."""
    if not plan.fp8:
        for name, value in (("ckv_scale", ckv_scale), ("ckv_scale_arr", ckv_scale_arr), ("kpe_scale", kpe_scale)):
            if value is not None:
                raise ValueError(f"{name}: must be None with a cache of {plan.kv_dtype}; got {value!r}")
        return 1.0, 1.0
    if (ckv_scale is None) == (ckv_scale_arr is None):
        came = "neither" if ckv_scale is None else "both"
        required = "Exactly one of ckv_scale or ckv_scale_arr is required with a float8_e4m3fn cache"
        raise ValueError(f"{required}; got {came}")
    ckv = 1.0 if ckv_scale is None else _scale(ckv_scale, "ckv_scale")
    return ckv, _scale(kpe_scale, "kpe_scale") if plan.head_dim_kpe else ckv


def _scale(value: Any, name: str) -> float:
    if not isinstance(value, (float, Real)) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name}: a finite positive number is required with a float8_e4m3fn cache; got {value!r}")
    return float(value)
