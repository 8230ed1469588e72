"""The planning half of the batch decode wrapper: its workspaces and page tables, and what a batch is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fi_core.attention.arguments import (
    LAYOUTS,
    POS_ENCODINGS,
    check_backend,
    check_length,
    check_shape,
    code,
    computed,
    data_types,
    last_value,
    pages_of_chunk,
    unsupported,
)
from fi_core.cudnn import planned as cudnn
from fi_core.decode import engine, ops
from fi_core.decode.arguments import BACKENDS, FOREIGN, check_lengths, deprecated_positional, lengths
from fi_core.decode.division import Division
from fi_core.errors import UnsupportedError
from fi_core.observe.log import fi_api
from fi_core.utils import _get_range_buf, constants

if TYPE_CHECKING:
    import torch

    from fi_core.jit.attention import CustomAttention

_JIT_ARGS = 16  # of gen_customize_batch_decode_module
_INT_WORKSPACE = 8 << 20  # bytes: partial results of 132 ranges of head_dim 256 take 4.2 MiB, of 396 of 128 6.3


class BatchDecodePlan:
    """What is planned; BatchDecodeWithPagedKVCacheWrapper, which runs it, says what the arguments are."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: Sequence[Any] | None = None,
        jit_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        import torch

        self._layout = code(LAYOUTS, kv_layout, "kv_layout")
        check_backend(backend, BACKENDS, FOREIGN)
        self._variant: CustomAttention | None = None
        if jit_args is not None or jit_kwargs:
            from fi_core.jit.attention import customised

            # With tensor cores arguments may follow that belong to prefill, and mean nothing here.
            given = jit_args[:_JIT_ARGS] if jit_args is not None and use_tensor_cores else jit_args
            self._variant = customised("decode", backend, float_workspace_buffer.device, given, jit_kwargs)
        self._kv_layout, self._backend = kv_layout, backend
        self._use_tensor_cores = use_tensor_cores or backend in ("trtllm-gen", "cudnn")
        self._use_cuda_graph = use_cuda_graph
        self._paged_kv_indptr_buf: Any = paged_kv_indptr_buffer
        self._paged_kv_indices_buf: Any = paged_kv_indices_buffer
        self._paged_kv_last_page_len_buf: Any = paged_kv_last_page_len_buffer
        self._fixed_batch_size = self._check_graph_buffers() if use_cuda_graph else 0
        self._block_tables: torch.Tensor | None = None
        self._copies: dict[str, torch.Tensor] = {}  # device copies of host tables, written again while shapes repeat
        self._q_len_per_req, self._is_causal, self._batch_size = 1, False, 0
        self.device = float_workspace_buffer.device
        self._cudnn = cudnn.PlannedBatch(use_cuda_graph) if backend == "cudnn" else None
        if self._cudnn is not None:
            cudnn.require(self.device)
        own = torch.empty(_INT_WORKSPACE, dtype=torch.uint8, device=self.device)
        self.reset_workspace_buffer(float_workspace_buffer, own)

    def _check_graph_buffers(self) -> int:
        """The batch size that the buffers of a graph fix."""
        import torch

        for name in ("indptr", "indices", "last_page_len"):
            buffer = getattr(self, f"_paged_kv_{name}_buf")
            if not torch.is_tensor(buffer):
                raise ValueError(f"paged_kv_{name}_buffer: a tensor is required with use_cuda_graph; got {buffer!r}")
        batch_size, bounds = len(self._paged_kv_last_page_len_buf), len(self._paged_kv_indptr_buf)
        if bounds != batch_size + 1:
            raise ValueError(
                f"paged_kv_indptr_buffer: length {batch_size + 1} is required, one more than "
                f"paged_kv_last_page_len_buffer; got {bounds}"
            )
        return batch_size

    @property
    def use_tensor_cores(self) -> bool:
        return self._use_tensor_cores

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    @property
    def resolved_backend(self) -> str:
        """The kernels that run uses ("fa2", "fa2_tc", "fa3" or "cpu"); before the first plan what was asked for."""
        return self._impl if self._plan_info else self._backend

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        """Replaces both workspaces; plan must be called before the next run.

        int_workspace_buffer: of any type, private to the wrapper: from plan to the last run the schedule lies there.
        """
        for name, buffer in (
            ("float_workspace_buffer", float_workspace_buffer),
            ("int_workspace_buffer", int_workspace_buffer),
        ):
            if buffer.data_ptr() % 16:
                raise ValueError(f"{name}: alignment to 16 bytes is required; got address {buffer.data_ptr():#x}")
            if not buffer.is_contiguous():
                raise ValueError(f"{name}: a contiguous tensor is required; got strides {buffer.stride()}")
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = int_workspace_buffer
        self._pinned: torch.Tensor | None = None
        capacity = len(self._paged_kv_indices_buf) if self._use_cuda_graph else None
        self._division = Division(int_workspace_buffer, float_workspace_buffer, capacity)
        self._fitting: set[Any] = set()  # strides that the chosen implementation takes
        self._plan_info: list[int] | None = None
        self._cached_module: engine.PrefillPlanner | engine.DecodePlanner | None = None
        engine.owners.add(self)

    @computed
    def _pin_memory_int_workspace_buffer(self) -> torch.Tensor:
        """A pinned mirror of the int workspace, which engines pass around; plan needs none, so it is made when read."""
        import torch

        if self._pinned is None:
            own = self._int_workspace_buffer
            self._pinned = torch.empty(own.shape, dtype=own.dtype, pin_memory=own.is_cuda)
        return self._pinned

    @computed
    def _qo_indptr_buf(self) -> torch.Tensor:
        """[0, 1, ..., batch_size] * q_len_per_req."""
        rows = _get_range_buf((self._fixed_batch_size or self._batch_size) + 1, self.device)
        return rows if self._q_len_per_req == 1 else rows * self._q_len_per_req

    @computed
    def _max_kv_len(self) -> int:
        """Length of the longest request of the last plan; waits for the device."""
        return max(lengths(*self._division.tables, self._page_size), default=0)

    def workspace_size(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        fixed_split_size: int | None = None,
        q_len_per_req: int = 1,
        **options: Any,
    ) -> tuple[int, int]:
        """Bytes of the float and of the int workspace that plan takes with these arguments; changes nothing.

        The lengths of requests do not matter, nor do options of plan that are not named here. fixed_split_size makes
        the answer grow with the number of page indices (with use_cuda_graph: with the buffer for them).
        """
        return self._division.bytes(
            head_dim, len(indptr) - 1, len(indices), num_qo_heads, num_kv_heads, page_size, q_len_per_req,
            pages_of_chunk(fixed_split_size),
        )  # fmt: skip

    @fi_api
    @deprecated_positional
    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        window_right: int = 0,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype | str | None = "float16",
        kv_data_type: torch.dtype | str | None = None,
        o_data_type: torch.dtype | str | None = None,
        data_type: torch.dtype | str | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        is_causal: bool | None = None,
    ) -> None:
        """Says what the next runs are about. Nothing waits for the device, where the work is also divided.

        indptr: `[batch_size + 1]`, indices: `[indptr[-1]]` or longer, last_page_len: `[batch_size]`; int32. Request b
        has the pages `indices[indptr[b] : indptr[b + 1]]`, the last of which holds last_page_len[b] tokens; without
        pages its length is 0. Each may lie on the host or on the device. What lies on the host is copied in the order
        of the current stream, so pinned tensors must keep their values until then. seq_lens: `[batch_size]`, int32,
        uint32 or int64; lengths instead of those that last_page_len gives. block_tables: kept as `_block_tables`; with
        backend "cudnn" its width bounds the lengths, without it plan waits for the device to know them.

        Head h reads kv head `h // (num_qo_heads / num_kv_heads)`, any whole ratio. head_dim: a multiple of 8 up to 512.
        pos_encoding_mode: "NONE", "ROPE_LLAMA" (keys rotated by their position, queries by theirs), "ALIBI".
        window_left: how many keys before its own a query sees; -1: all. logits_soft_cap c > 0: scores become
        `c tanh(score / c)`. sm_scale: default `1 / sqrt(head_dim)`. kv_data_type and o_data_type default to
        q_data_type; data_type fills q_data_type and kv_data_type where they are None.

        fixed_split_size (in pages; None or -1: none): requests are cut into chunks of so many tokens, rounded up to 64;
        disable_split_kv: they are not cut. With either, the result of a request is bit for bit the same alone and in
        any batch.
        q_len_per_req: query tokens of each request, its last ones, each of which sees the keys up to its own.

        Raises ValueError (shapes, sizes; lengths below q_len_per_req, if all tables lie on the host), TypeError
        (dtypes), KeyError (pos_encoding_mode), NotImplementedError (window_right, is_causal that differs from
        `q_len_per_req > 1`, NVFP4 keys).
        """
        if window_right != 0:
            raise unsupported("window_right", window_right, "there are no keys behind a decoded token: pass 0")
        if is_causal is not None and bool(is_causal) != (q_len_per_req > 1):
            raise NotImplementedError(
                f"is_causal: leave it out, or pass what q_len_per_req > 1 is ({q_len_per_req > 1}); got {is_causal}"
            )
        self._check_table(indptr, indices, last_page_len, seq_lens, page_size, q_len_per_req)
        if self._use_cuda_graph:
            _copy(
                (self._paged_kv_indptr_buf, self._paged_kv_last_page_len_buf, self._paged_kv_indices_buf),
                (indptr, last_page_len, indices),
                non_blocking,
            )
        else:
            self._paged_kv_indptr_buf = self._on_device("indptr", indptr, non_blocking)
            self._paged_kv_indices_buf = self._on_device("indices", indices, non_blocking)
            self._paged_kv_last_page_len_buf = self._on_device("last_page_len", last_page_len, non_blocking)
        self._block_tables = block_tables
        self._set_options(
            pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta,
            data_types(q_data_type, kv_data_type, o_data_type, data_type),
        )  # fmt: skip
        self._replan(
            self._paged_kv_indptr_buf, self._paged_kv_last_page_len_buf, seq_lens, num_qo_heads, num_kv_heads, head_dim,
            page_size, window_left, q_len_per_req, fixed_split_size, disable_split_kv, non_blocking,
        )  # fmt: skip

    begin_forward = plan

    def _check_table(
        self, indptr: Any, indices: Any, last_page_len: Any, seq_lens: Any, page_size: int, q_len: int
    ) -> None:
        batch_size = len(last_page_len)
        if len(indptr) != batch_size + 1:
            raise ValueError(f"indptr: length {batch_size + 1} is required, last_page_len's + 1; got {len(indptr)}")
        check_length(last_value(indptr), indices, "indices")
        if seq_lens is not None and len(seq_lens) != batch_size:
            raise ValueError(f"seq_lens: length {batch_size} is required, the batch size; got {len(seq_lens)}")
        if q_len != 1:
            if q_len < 1 or not self._use_tensor_cores:
                raise ValueError(f"q_len_per_req: at least 1, and 1 without use_tensor_cores, is required; got {q_len}")
            tables = (seq_lens,) if seq_lens is not None else (indptr, last_page_len)
            if all(table.device.type == "cpu" for table in tables):
                check_lengths(lengths(indptr, last_page_len, seq_lens, page_size), q_len)
        if not self._use_cuda_graph:
            return
        if batch_size != self._fixed_batch_size:
            raise ValueError(
                f"indptr: the batch size is fixed at {self._fixed_batch_size} by use_cuda_graph; got {batch_size}"
            )
        if len(indices) > len(self._paged_kv_indices_buf):
            raise ValueError(
                f"indices: paged_kv_indices_buffer has room for {len(self._paged_kv_indices_buf)}; got {len(indices)}"
            )
        if self._plan_info and q_len != self._q_len_per_req:
            raise ValueError(
                f"q_len_per_req: fixed at {self._q_len_per_req} by the first plan with use_cuda_graph; got {q_len}"
            )

    def _on_device(self, name: str, table: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        if table.device == self.device:
            return table
        kept = self._copies.get(name)
        if kept is not None and kept.shape == table.shape and kept.dtype == table.dtype:
            return kept.copy_(table, non_blocking=non_blocking)
        kept = self._copies[name] = table.to(self.device, non_blocking=non_blocking)
        return kept

    def _set_options(
        self,
        pos_encoding_mode: str,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        rope_scale: float | None,
        rope_theta: float | None,
        dtypes: tuple[torch.dtype, torch.dtype, torch.dtype] | None = None,
    ) -> None:
        """What run reads (and engines set): from plan, fast_decode_plan, and forward, which leaves the dtypes."""
        code(POS_ENCODINGS, pos_encoding_mode, "pos_encoding_mode")
        self._pos_encoding_mode = pos_encoding_mode
        self._window_left = window_left
        self._logits_soft_cap = 0.0 if logits_soft_cap is None else logits_soft_cap
        self._sm_scale = sm_scale
        self._rope_scale = 1.0 if rope_scale is None else rope_scale
        self._rope_theta = 1e4 if rope_theta is None else rope_theta
        if dtypes is not None:
            self._cached_q_data_type, self._cached_kv_data_type, self._cached_o_data_type = dtypes

    def _replan(
        self,
        indptr: torch.Tensor,
        last_page_len: torch.Tensor | None,
        kv_lens: torch.Tensor | None,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        window_left: int,
        q_len: int,
        split: int | None,
        whole: bool,
        non_blocking: bool = True,
    ) -> list[int]:
        """Divides the work, on the device, and remembers what it is. kv_lens win over last_page_len."""
        check_shape(num_qo_heads, num_kv_heads, page_size, head_dim=head_dim)
        self._num_qo_heads, self._num_kv_heads, self._head_dim = num_qo_heads, num_kv_heads, head_dim
        self._batch_size = len(indptr) - 1
        self._q_len_per_req, self._is_causal = q_len, q_len > 1
        self._q_shape = self._batch_size * q_len, num_qo_heads, head_dim
        self._page_shape = (page_size, num_kv_heads) if self._layout == 0 else (num_kv_heads, page_size)
        self._page_size = page_size
        self._impl, self._chosen_for = self._choose(head_dim), self._pos_encoding_mode
        indptr = self._on_device("planned_indptr", indptr, non_blocking)
        if kv_lens is not None:
            kv_lens, last_page_len = self._on_device("kv_lens", kv_lens, non_blocking), None
        self._plan_info = self._division.divide(
            indptr, last_page_len, kv_lens, len(self._paged_kv_indices_buf), num_qo_heads, num_kv_heads, head_dim,
            page_size, window_left, q_len, split, whole, self._impl, self._cached_kv_data_type,
        )  # fmt: skip
        if self._cudnn is not None:
            self._plan_cudnn(indptr, last_page_len, kv_lens)
        self._fitting.clear()
        self._cached_module = engine.PREFILL_PLANNER if self._use_tensor_cores else engine.DECODE_PLANNER
        return self._plan_info

    def _plan_cudnn(
        self, indptr: torch.Tensor, last_page_len: torch.Tensor | None, kv_lens: torch.Tensor | None
    ) -> None:
        import torch

        assert self._cudnn is not None
        if kv_lens is None:
            assert last_page_len is not None
            pages = indptr.diff()
            kv_lens = ((pages - 1) * self._page_size + last_page_len) * (pages > 0)
        table = self._block_tables
        most = self._max_kv_len if table is None else table.shape[1] * self._page_size
        self._cudnn.plan(
            constants(self._q_len_per_req, self._batch_size, self.device), kv_lens.to(torch.int32),
            (self._q_len_per_req, most), indptr, self._paged_kv_indices_buf, self._page_size, None,
        )  # fmt: skip

    def _check_cudnn(self, plain: bool) -> str:
        """Whether cuDNN takes the options, which forward may have set: its name, or UnsupportedError."""
        return cudnn.check(
            self._cached_q_data_type, self._cached_kv_data_type, self._cached_o_data_type, self._pos_encoding_mode,
            self._logits_soft_cap, plain,
        )  # fmt: skip

    def _choose(self, head_dim_vo: int) -> str:
        """The implementation. "fa2" with tensor cores is fa2_tc, or the CUDA cores for what that does not take."""
        if self._cudnn is not None:
            return self._check_cudnn(True)
        encoding = POS_ENCODINGS[self._pos_encoding_mode]
        if self._variant is not None:
            self._variant.check(
                self._cached_q_data_type,
                self._cached_kv_data_type,
                self._cached_o_data_type,
                self._head_dim,
                head_dim_vo,
            )
            return "cpu" if self.device.type == "cpu" else "fa2"
        rest = (
            self.device, self._cached_q_data_type, self._cached_kv_data_type, self._head_dim, head_dim_vo, encoding,
            self._page_size,
        )  # fmt: skip
        name = BACKENDS[self._backend]
        if name == "fa2" and self._use_tensor_cores:
            try:
                return ops.choose("fa2_tc", *rest)
            except UnsupportedError:
                pass
        return ops.choose(name, *rest)


def _copy(buffers: Sequence[torch.Tensor], tables: Sequence[torch.Tensor], non_blocking: bool) -> None:
    """Into the beginning of each buffer, unless it is the table itself; those on one device in one kernel."""
    import torch

    together: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    for buffer, table in zip(buffers, tables):
        if table.data_ptr() == buffer.data_ptr():
            continue
        if table.dtype is not buffer.dtype:
            raise TypeError(f"indptr, indices and last_page_len: {buffer.dtype} as in the buffers; got {table.dtype}")
        target = buffer if table.shape == buffer.shape else buffer[: len(table)]
        if table.device == buffer.device:
            together[0].append(target)
            together[1].append(table)
        else:
            target.copy_(table, non_blocking=non_blocking)
    if together[0]:
        torch._foreach_copy_(*together)  # pyright: ignore[reportPrivateImportUsage]
