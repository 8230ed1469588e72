"""The tables of plans: in the buffers of a CUDA graph, and those of batch MLA in each form that a caller has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fi_core.attention.contract import check_graph_buffer
from fi_core.runtime.lazy import torch
from fi_core.runtime.tensors import viewed
from fi_core.utils import int32_index

TABLES = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")


def fixed_batch_size(buffers: Mapping[str, Any], of: str) -> int:
    """The batch size that the buffers of use_cuda_graph fix, by that named `of`. ValueError if one differs."""
    for name, buffer in buffers.items():
        check_graph_buffer(buffer, name)
    batch_size: int = buffers[of].numel() - ("indptr" in of)
    for name, buffer in buffers.items():
        wanted, found = batch_size + ("indptr" in name), buffer.numel()
        if found != wanted and "indices" not in name:
            raise ValueError(f"{name}: length {wanted} is required, for {batch_size} requests as {of} has; got {found}")
    return batch_size


def copy_tables(
    buffers: Mapping[str, Any], tables: Mapping[str, torch.Tensor], names: Mapping[str, str], non_blocking: bool
) -> dict[str, torch.Tensor]:
    """Copies each table into the beginning of its buffer, all tables of one device in one kernel; returns the buffers.

    names: of the buffers. Raises ValueError and TypeError for a table that does not fit.
    """
    placed: dict[str, torch.Tensor] = {}
    together: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    for field, table in tables.items():
        buffer = placed[field] = buffers[field]
        table = int32_index(table)
        if table.data_ptr() == buffer.data_ptr():
            continue
        if table.ndim != 1:
            raise ValueError(f"{names[field]}: one dimension is required of a table; got shape {tuple(table.shape)}")
        if table.dtype is not buffer.dtype:
            raise TypeError(f"{names[field]}: a table of {buffer.dtype} or int64 is required; got {table.dtype}")
        if table.shape != buffer.shape:
            if table.numel() > buffer.numel():
                raise ValueError(f"{names[field]}: the buffer has room for {buffer.numel()}; got {table.numel()}")
            buffer = buffer[: table.numel()]
        if table.device == buffer.device:
            together[0].append(buffer)
            together[1].append(table)
        else:
            buffer.copy_(table, non_blocking=non_blocking)
    if together[0]:
        torch._foreach_copy_(*together)  # pyright: ignore[reportPrivateImportUsage]
    return placed


class MLAPlanMetadata(NamedTuple):
    """The tables of a plan of BatchMLAPagedAttentionWrapper, which documents them: as lists of pages, or dense."""

    qo_indptr: torch.Tensor | None = None
    kv_indptr: torch.Tensor | None = None
    kv_indices: torch.Tensor | None = None
    kv_len_arr: torch.Tensor | None = None
    cum_seq_lens_q: torch.Tensor | None = None
    block_tables: torch.Tensor | None = None
    seq_lens: torch.Tensor | None = None
    max_q_len: int | None = None

    @classmethod
    def csr(
        cls, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_len_arr: torch.Tensor
    ) -> MLAPlanMetadata:
        """The pages of the requests one after another."""
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)

    @classmethod
    def dense(
        cls,
        cum_seq_lens_q: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        max_q_len: int | None = None,
    ) -> MLAPlanMetadata:
        """A row of pages for each request."""
        return cls(None, None, None, None, cum_seq_lens_q, block_tables, seq_lens, max_q_len)

    @classmethod
    def dual(
        cls,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        *,
        cum_seq_lens_q: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        max_q_len: int | None = None,
    ) -> MLAPlanMetadata:
        """The same batch in both forms; plans read the first."""
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr, cum_seq_lens_q, block_tables, seq_lens, max_q_len)


def one_form(
    metadata: Any, cum_seq_lens_q: Any, block_tables: Any, seq_lens: Any, max_q_len: Any, *lists: Any
) -> tuple[Any, ...]:
    """qo_indptr, kv_indptr, kv_indices and kv_len_arr (lists) of the form that is given: the arguments of `plan`.

    Raises:
        TypeError: none, or a metadata of another class.
        ValueError: two forms, or a block table of another shape.
    """
    flat: tuple[Any, ...] = *lists, cum_seq_lens_q, block_tables, seq_lens, max_q_len
    if metadata is not None:
        if not isinstance(metadata, MLAPlanMetadata):
            raise TypeError(f"metadata: an MLAPlanMetadata is required; got a {type(metadata).__name__}")
        if any(x is not None for x in flat):
            raise ValueError("metadata: no other table may be given with it; got both")
    found = MLAPlanMetadata(*flat) if metadata is None else metadata
    if any(x is not None for x in found[:4]):
        if metadata is None and any(x is not None for x in found[4:]):
            raise ValueError("block_tables: tables of one form are required; got lists of pages and dense ones")
        return found[:4]
    if found.cum_seq_lens_q is None or found.block_tables is None or found.seq_lens is None:
        raise TypeError(
            "plan() missing required arguments: metadata, or qo_indptr, kv_indptr, kv_indices and kv_len_arr, or "
            "cum_seq_lens_q, block_tables and seq_lens"
        )
    table = found.block_tables
    if table.ndim != 2 or table.shape[0] != found.seq_lens.numel():
        raise ValueError(
            f"block_tables: [batch_size, max_pages] with the {found.seq_lens.numel()} requests of seq_lens is "
            f"required; got {tuple(table.shape)}"
        )
    indptr = torch.arange(table.shape[0] + 1, dtype=torch.int32) * table.shape[1]
    return found.cum_seq_lens_q, indptr, viewed("block_tables", table.contiguous(), -1), found.seq_lens


class Tables:
    """Places the tables of plans on the device: in the buffers of a CUDA graph, or where they are needed.

    Args:
        device: of the wrapper.
        buffers: by their names, with a CUDA graph.

    Raises:
        ValueError: buffers. Those of offsets may be longer than the batch that kv_len_arr fixes.
    """

    def __init__(self, device: torch.device, buffers: dict[str, Any] | None) -> None:
        self.device, self.buffers, self.batch_size = device, buffers, 0
        if buffers is None:
            return
        check_graph_buffer(buffers["kv_len_arr"], "kv_len_arr")
        for name in TABLES[:2]:
            check_graph_buffer(buffers[name], name)
            buffers[name] = buffers[name][: buffers["kv_len_arr"].numel() + 1]
        self.batch_size = fixed_batch_size(buffers, "kv_len_arr")

    def place(self, qo_indptr: Any, kv_indptr: Any, kv_indices: Any, kv_len_arr: Any) -> tuple[Any, ...]:
        """The tables of a plan on the device. Raises ValueError."""
        given, device = (qo_indptr, kv_indptr, kv_indices, kv_len_arr), self.device
        if self.buffers is None and self._fits(*given):
            return given
        self._check(given)
        if self.buffers is not None:
            copy_tables(self.buffers, dict(zip(TABLES, given)), dict(zip(TABLES, TABLES)), non_blocking=True)
            return tuple(self.buffers.values())
        return tuple(int32_index(x).to(device, non_blocking=True).contiguous() for x in given)

    def _fits(self, qo: torch.Tensor, kv: torch.Tensor, pages: torch.Tensor, kv_len: torch.Tensor) -> bool:
        """Whether kernels read the tables as they are: what `_check` asks, at a quarter of its time (0.8 us)."""
        device = self.device
        return (
            qo.dtype is kv.dtype is pages.dtype is kv_len.dtype is torch.int32
            and qo.ndim == kv.ndim == pages.ndim == kv_len.ndim == 1
            and qo.numel() == kv.numel() == kv_len.numel() + 1
            and qo.device == kv.device == pages.device == kv_len.device == device
            and qo.is_contiguous()
            and kv.is_contiguous()
            and pages.is_contiguous()
            and kv_len.is_contiguous()
        )

    def _check(self, given: tuple[Any, ...]) -> None:
        for name, table in zip(TABLES, given):
            if table.ndim != 1 or (table.dtype is not torch.int32 and table.dtype is not torch.int64):
                raise ValueError(
                    f"{name}: int32 with one dimension is required; got {table.dtype}, shape {tuple(table.shape)}"
                )
        qo_indptr, kv_indptr, _, kv_len = given
        batch_size = kv_len.numel()
        if self.buffers is not None and batch_size != self.batch_size:
            raise ValueError(f"kv_len_arr: the buffers fix a batch of {self.batch_size} requests; got {batch_size}")
        for name, table in (("qo_indptr", qo_indptr), ("kv_indptr", kv_indptr)):
            if table.numel() != batch_size + 1:
                raise ValueError(
                    f"{name}: length {batch_size + 1} is required, one more than kv_len_arr; got {table.numel()}"
                )
