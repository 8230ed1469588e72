"""The common part of the wrappers: whether there is a plan, how it is kept, what constructors and runs share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fi_core.attention import contract
from fi_core.attention.contract import computed, per_head, scale_product
from fi_core.attention.cudnn import graph as cudnn
from fi_core.attention.ops.request import Facts
from fi_core.attention.wrappers import planners
from fi_core.attention.wrappers.tables import copy_tables, fixed_batch_size
from fi_core.observe.describe import words
from fi_core.observe.log import fi_api
from fi_core.runtime.lazy import torch
from fi_core.runtime.machine import rehearsal
from fi_core.runtime.signature import F, takes
from fi_core.utils import PosEncodingMode, check_shape_dtype_device, int32_index

if TYPE_CHECKING:
    from fi_core.attention.custom import CustomAttention
    from fi_core.runtime.dispatch import Choice

# Bytes: a million work tiles of prefill; decode takes 4.2 MiB for 132 ranges with head_dim 256, 6.3 for 396 with 128.
_INT_WORKSPACE = 8 << 20
_MOST_KEPT = 64  # shapes of a wrapper, and sizes of a shape; an engine may plan batches of many


def check_results(
    q: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, out: torch.Tensor | None, lse: torch.Tensor | None
) -> None:
    """Raises the ValueError that names a given result of a wrong form: out of this shape and dtype, lse without the
    last dimension and of fp32. Kernels check both, so that `run` asks only when one has refused a call.
    """
    if out is not None:
        check_shape_dtype_device(out, shape, dtype, q.device, "out")
    if lse is not None:
        check_shape_dtype_device(lse, shape[:2], torch.float32, q.device, "lse")


def check_types(plan: Any, q: Any, k: Any, v: Any, scales: Any, name: str) -> None:
    """Raises the ValueError that names a tensor of another dtype than that of the plan. name: of k and v."""
    if q.dtype is not plan.q_dtype:
        raise ValueError(f"q: q_data_type {plan.q_dtype} was planned; got {q.dtype}")
    if k.dtype is not plan.kv_dtype or v.dtype is not k.dtype:
        raise ValueError(f"{name}: kv_data_type {plan.kv_dtype} was planned; got {k.dtype} and {v.dtype}")
    contract.check_nvfp4(scales, k, name)


def run_scales(
    plan: Any, scales: tuple[Any, Any, Any], args: tuple[Any, ...], kv_scales: tuple[Any, Any]
) -> tuple[float, float, tuple[Any, ...]]:
    """(sm_scale, out_scale, tensors) of a run; tensors: the arguments of the op from scale_q on, or none of them.

    scales: q_scale, k_scale and v_scale; args: scale_q, scale_k and scale_v; kv_scales: those of NVFP4.
    """
    sm_scale, bmm1 = scale_product(plan.scale, *scales[:2])
    out_scale, bmm2 = scale_product(1.0, scales[2])
    by_head: tuple[Any, Any, Any] = (None, None, None)
    if args:
        scale_qk, scale_vo, by_head = per_head(args)
        sm_scale, out_scale = sm_scale * scale_qk, out_scale * scale_vo
    tensors = *by_head, bmm1, bmm2, *kv_scales
    return sm_scale, out_scale, () if all(x is None for x in tensors) else tensors


def keep(table: dict[Any, Any], key: Any, value: Any) -> Any:
    """Adds a value to a table, which is emptied when it is full, and returns the value."""
    if len(table) >= _MOST_KEPT:
        table.clear()
    table[key] = value
    return value


class Shapes:
    """What plans of the same arguments share, by these arguments: only their tables differ. It is of a wrapper's
    workspaces.
    """

    def __init__(self) -> None:
        self._found: dict[Any, tuple[tuple[type, ...], tuple[Any, dict[Any, Any]]]] = {}

    def find(self, key: tuple[Any, ...]) -> tuple[Any, dict[Any, Any]] | None:
        """A plan without tables, and what else is kept with it; None: it is not known, or an argument is refused."""
        try:
            types, found = self._found[key]
        except (KeyError, TypeError):  # not known, or not hashable
            return None
        # 0, 0.0 and False are equal, and an argument may require one of them.
        return found if types == tuple(map(type, key)) and not rehearsal() else None

    def keep(self, key: tuple[Any, ...], plan: Any) -> tuple[Any, dict[Any, Any]]:
        found = plan, dict[Any, Any]()
        # Tensors and arrays may change in place, or are not hashable.
        if not rehearsal() and not any(hasattr(x, "shape") for x in key):
            keep(self._found, key, (tuple(map(type, key)), found))
        return found


_OF_PLAN = (*contract.SCORES, "causal", "window_left")


def older_form(like: F, run: Any, plan: Callable[..., Any], *names: str) -> F:
    """`forward` of a wrapper, with the parameters of these names as `plan` and `run` declare them. like: of `takes`."""

    def forward(self: Any, given: dict[str, Any]) -> Any:
        """The older form of `run`. Its options replace those of the plan from then on; omitted ones get defaults."""
        options = {name: given.pop(name) for name in _OF_PLAN if name in given}
        given.pop("use_fp16_qk_reduction", None)
        if options:
            scores = contract.score_fields(*(options.pop(name) for name in contract.SCORES))
            self._replace_options(**options, **scores)
        return self.run(**given)

    forward.__qualname__, forward.__module__ = f"{run.__qualname__.rpartition('.')[0]}.forward", run.__module__
    return takes(like, words("self", *names), plan, run)(forward)


class PlanState:
    """The part of a planned wrapper that tells whether `run` may be called."""

    _plan_info: list[int] | None = None  # None: no plan, or the last one failed
    _plan_began = False  # since the workspaces were set
    _was_planned = False  # a plan has succeeded since then, so a CUDA graph may have been captured

    def _reset_plan(self) -> None:
        """For new workspaces, which hold no schedule."""
        self._plan_info, self._plan_began, self._was_planned = None, False, False

    def _forget_plan(self) -> None:
        """Every plan begins with it, so that one that fails leaves nothing to run."""
        self._plan_info, self._plan_began = None, True

    def _begin_plan(self, num_qo_heads: int, num_kv_heads: int, page_size: int, **head_dims: int) -> None:
        """Forgets the last plan, then checks the shape of the new one."""
        self._forget_plan()
        contract.check_shape(num_qo_heads, num_kv_heads, page_size, **head_dims)

    def _end_plan(self, info: list[int]) -> list[int]:
        """Declares the plan complete."""
        self._plan_info, self._was_planned = info, True
        return info

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Checks its argument only: one kernel accepts K and V of different strides.

        Raises:
            ValueError: variant.
            RuntimeError: no plan.
        """
        if variant != "independent":
            raise ValueError(f'variant: "independent" is required; got {variant!r}')
        self._require_plan("prewarm_paged_kv_stride_variant")

    def _require_plan(self, function: str = "run") -> None:
        """Raises RuntimeError without a plan."""
        if self._plan_info is None:
            what = "the last plan failed: call plan again" if self._plan_began else "call plan first"
            raise RuntimeError(f"{function}: {what}")


class of_plan:
    """A field of a wrapper's plan as an attribute, which engines read and assign. Assigning makes another plan."""

    def __init__(self, field: str, read: Callable[[Any], Any] | None = None, write: Any = None) -> None:
        self.field, self.read, self.write = field, read, write

    def __get__(self, wrapper: Any, owner: type) -> Any:
        if wrapper is None:
            return self
        value = getattr(wrapper._plan, self.field)
        return self.read(value) if self.read else value

    def __set__(self, wrapper: Any, value: Any) -> None:
        wrapper._change(**{self.field: self.write(value) if self.write else value})


class PlannedWrapper(PlanState):
    """A wrapper whose `plan` makes a `schedule.Plan`.

    All that a run needs of `plan` is in `_plan`, which no code changes: `_change` puts another one in its place.
    """

    _plan: Any
    _call: Any = None  # the planned call of the kernel; None: no plan, or the plan has changed since it was made
    _plan_run: Callable[..., Any]  # makes it: `Operator.plan`
    _check_call: Callable[..., None]  # raises the error that names the argument of a run that differs from its plan
    _cudnn: cudnn.PlannedBatch | None = None  # runs instead of the kernel, as does a user's variant
    _variant: CustomAttention | None = None
    device: torch.device
    last_choice: Choice | None
    _backend: str
    _use_cuda_graph: bool
    _int_workspace_buffer: torch.Tensor
    _pinned: torch.Tensor | None  # None: not read yet, or of another workspace

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    @property
    def resolved_backend(self) -> str:
        """The backend of the last run: "fa2", "fa2_tc" (decode), "fa3", "cudnn" or "cpu".

        Before the first run of a plan the backend that the plan of decode or prefill chose, else the argument.
        """
        return self.last_choice.backend if self.last_choice else self._backend

    @computed
    def _pin_memory_int_workspace_buffer(self) -> torch.Tensor:
        """A pinned mirror of the int workspace, for engines. It is allocated when read: `plan` does not use it."""
        if self._pinned is None:
            own = self._int_workspace_buffer
            self._pinned = torch.empty(own.shape, dtype=own.dtype, device="cpu", pin_memory=own.is_cuda)
        return self._pinned

    def _change(self, **fields: Any) -> Any:
        """Replaces the plan by one with these fields, whose call the next run makes, unless they are those it has."""
        plan = self._plan
        for name, value in fields.items():
            had = getattr(plan, name)
            if had is not value and not ({type(had), type(value)} <= {int, float} and had == value):
                self._plan, self._call = plan.replace(**fields), None
                break
        return self._plan

    def _forget_plan(self) -> None:
        super()._forget_plan()
        self._call = None

    _replace_options = _change

    def _set_call(self, plan: Any, choice: Choice | None) -> None:
        """Makes this the plan, and the call of the kernel that runs it. choice: expected of runs."""
        own = self._cudnn is None and self._variant is None  # else there is no planned call
        call = self._plan_run(choice, self.device, self._check_call, plan) if own else plan
        self._plan, self._call = plan, call


class BatchWrapper(PlannedWrapper):
    """A wrapper that plans a batch and runs it; the subclasses document `plan` and `run`."""

    _kind: str  # "decode" or "prefill", of a user's variant
    _backends: Mapping[str, str]  # names of `backend`, with the dispatcher's
    _buffers: Mapping[str, str]  # by fields of the plan: arguments of the constructor, for CUDA graphs
    _fixes_batch: str  # the one whose length fixes the batch size
    _foreign: Collection[str]  # names of other libraries' kernels
    _pos_encoding_mode = of_plan("pos_encoding", lambda value: PosEncodingMode(value).name, contract.encoding)
    _window_left, _sm_scale = of_plan("window_left"), of_plan("sm_scale")
    _logits_soft_cap = of_plan("soft_cap", write=lambda value: value or 0.0)
    _rope_scale = of_plan("rope_scale", write=lambda value: value or 1.0)
    _rope_theta = of_plan("rope_theta", write=lambda value: value or 1e4)
    _batch_size, _num_qo_heads = of_plan("batch_size"), of_plan("num_qo_heads")
    _num_kv_heads, _page_size = of_plan("num_kv_heads"), of_plan("page_size")
    _cached_q_data_type, _cached_kv_data_type = of_plan("q_dtype"), of_plan("kv_dtype")
    _cached_o_data_type = of_plan("o_dtype")
    _paged_kv_indptr_buf, _paged_kv_indices_buf = of_plan("indptr"), of_plan("page_indices")
    _paged_kv_last_page_len_buf, _block_tables = of_plan("last_page_len"), of_plan("block_tables")
    _is_dense: bool  # whether the float workspace must be contiguous
    _copies: dict[str, torch.Tensor]  # device copies of host tables, reused while shapes repeat
    _choose: Callable[..., Choice]

    def _set_up(
        self,
        workspace: torch.Tensor,
        kv_layout: str,
        backend: str,
        use_cuda_graph: bool,
        jit: tuple[Sequence[Any] | None, Mapping[str, Any] | None],
        buffers: Mapping[str, Any],
    ) -> int:
        """Checks the arguments of the constructors and keeps them; returns the code of the layout.

        jit: jit_args and jit_kwargs; buffers: by fields of the plan, from which they are read.
        """
        contract.check_workspace(workspace, "float_workspace_buffer", contiguous=self._is_dense)
        layout = contract.code(contract.LAYOUTS, kv_layout, "kv_layout")
        contract.check_backend(backend, self._backends, self._foreign)
        self._kv_layout, self._backend, self._use_cuda_graph = kv_layout, backend, use_cuda_graph
        self.device, self._copies = workspace.device, {}
        named = {self._buffers[field]: buffer for field, buffer in buffers.items()}
        self._fixed_batch_size = fixed_batch_size(named, self._fixes_batch) if use_cuda_graph else 0
        self._cudnn = self._variant = None  # where each run finds them at once
        if jit[0] is not None or jit[1]:
            from fi_core.attention.custom_modules import customised

            self._variant = customised(self._kind, backend, self.device, *jit)
        return layout

    def _begin(self, workspace: torch.Tensor) -> None:
        """The end of the constructors: cuDNN where it is the backend, and the wrapper's own workspace."""
        if self._backend == "cudnn":
            cudnn.require(self.device)
            self._cudnn = cudnn.PlannedBatch(self._use_cuda_graph)
        self.reset_workspace_buffer(workspace, torch.empty(_INT_WORKSPACE, dtype=torch.uint8, device=self.device))

    def _facts(self, plan: Any, out: Any, dims: tuple[int, int], page_size: int, mask: str, **more: Any) -> Facts:
        """The facts of runs of a plan; a user's variant must have been made for them. more: other fields."""
        if self._variant is not None:
            self._variant.check(plan.q_dtype, plan.kv_dtype, out, *dims)
        group_size, encoded = plan.num_qo_heads // plan.num_kv_heads, PosEncodingMode(plan.pos_encoding).name
        types = plan.q_dtype, contract.kv_type(plan.kv_dtype), out
        return Facts(*types, *dims, group_size, page_size, encoded, mask, **more)

    def _by_cudnn(
        self, plan: Any, values: tuple[Any, ...], tensors: tuple[Any, ...], causal: bool, *dim: int
    ) -> Choice:
        """Runs cuDNN's kernels. values: out, lse, q, k, v, sm_scale, out_scale, sinks; dim: of `_choose`, if any."""
        assert self._cudnn is not None
        out, lse, q, k, v, sm_scale, out_scale, sinks = values
        *by_head, bmm1, bmm2, _, _ = tensors or (None,) * 7
        choice = self._choose(plan, *dim, scaled=bmm1 is not None or any(x is not None for x in by_head))
        workspace, taken = self._float_workspace_buffer, (out, lse, q, k, v, sinks)
        self._cudnn.attend(taken, plan.kv_layout, workspace, sm_scale, causal, plan.window_left)
        if out_scale != 1.0 or bmm2 is not None:
            out.mul_(out_scale if bmm2 is None else bmm2 * out_scale)
        return choice

    @fi_api
    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        """Replaces both workspaces. Call `plan` before the next run.

        Args:
            float_workspace_buffer: as in the constructor.
            int_workspace_buffer: contiguous, any dtype, aligned to 16 bytes, private to the wrapper: it holds the
                schedule from plan to the last run.

        Raises:
            ValueError: alignment or strides.
        """
        contract.check_workspace(float_workspace_buffer, "float_workspace_buffer", contiguous=self._is_dense)
        contract.check_workspace(int_workspace_buffer, "int_workspace_buffer")
        self._float_workspace_buffer, self._int_workspace_buffer = float_workspace_buffer, int_workspace_buffer
        self._pinned, self._shapes = None, Shapes()
        self._reset_plan()
        self._plan, self._call = self._plan.replace(scheduled=None), None
        self.last_choice = None
        self._cached_module: Any = None
        planners.add(self)
        self._place()

    def _place(self) -> None:
        """Lays out new workspaces."""
        raise NotImplementedError

    def _on_device(self, name: str, table: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        """A table as kernels read it: on the device, int64 and uint32 converted to int32 (a small kernel each)."""
        table = int32_index(table)
        if table.device == self.device:
            return table
        kept = self._copies.get(name)
        if kept is not None and kept.shape == table.shape and kept.dtype == table.dtype:
            return kept.copy_(table, non_blocking=non_blocking)
        kept = self._copies[name] = table.to(self.device, non_blocking=non_blocking)
        return kept

    def _placed(self, tables: dict[str, torch.Tensor], non_blocking: bool) -> dict[str, torch.Tensor]:
        """The tables, by fields of the plan, on the device, or in the buffers of the CUDA graph."""
        if self._use_cuda_graph:
            return copy_tables(vars(self._plan), tables, self._buffers, non_blocking)
        for field, table in tables.items():
            if table.dtype is not torch.int32 or table.device != self.device:
                tables[field] = self._on_device(field, table, non_blocking)
        return tables

    def end_forward(self) -> None:
        """Does nothing; older callers end a plan with it."""


class AroundWrapper:
    """A wrapper that plans and runs by a batch wrapper."""

    _inner: Any

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        """Replaces both workspaces, as of the batch wrappers. Call `plan` before the next run."""
        self._inner.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Checks its argument only, as PlanState's."""
        self._inner.prewarm_paged_kv_stride_variant(variant)

    def end_forward(self) -> None:
        """Does nothing; older callers end a plan with it."""
