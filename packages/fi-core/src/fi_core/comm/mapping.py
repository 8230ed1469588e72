"""Mapping: what each rank of a parallel model does."""

from __future__ import annotations

from typing import Any

__all__ = ["Mapping"]


class Mapping:
    """The place of a rank among the dimensions of parallelism: pipeline, then context, then tensor, the fastest last.

    Rank = `pp_rank * cp_size * tp_size + cp_rank * tp_size + tp_rank`. The tensor-parallel ranks of a stage divide into
    `moe_cluster_size` x `moe_ep_size` x `moe_tp_size` for experts, tensor parallel slowest, cluster fastest; and into
    `attn_cp_size` x `attn_tp_size` for attention.

    Args:
        world_size: number of ranks, `tp_size * pp_size * cp_size`.
        rank: this rank.
        gpus_per_node: ranks of a node.
        cp_size, tp_size, pp_size: ranks of context, tensor and pipeline parallelism.
        cp_config: options of context parallelism; kept.
        moe_cluster_size, moe_tp_size, moe_ep_size: ranks of an expert cluster, of tensor parallel experts and of expert
            parallelism; -1: 1, what remains of tp_size, 1.
        attn_tp_size, attn_cp_size: ranks of attention; -1: tp_size and cp_size.
        auto_parallel: kept.
        enable_attention_dp: whether attention is data parallel over the tensor-parallel ranks.

    Raises:
        ValueError: The sizes do not multiply to the number of ranks, or rank is none of them.
    """

    rank: int = 0

    def __init__(
        self,
        world_size: int = 1,
        rank: int = 0,
        gpus_per_node: int = 8,
        *,
        cp_size: int = 1,
        cp_config: dict[str, Any] | None = None,
        tp_size: int = 1,
        pp_size: int = 1,
        moe_cluster_size: int = -1,
        moe_tp_size: int = -1,
        moe_ep_size: int = -1,
        attn_tp_size: int = -1,
        attn_cp_size: int = -1,
        auto_parallel: bool = False,
        enable_attention_dp: bool = False,
    ) -> None:
        if tp_size * pp_size * cp_size != world_size:
            raise ValueError(
                f"world_size: tp_size * pp_size * cp_size is required; got {world_size} and {tp_size} * {pp_size} * "
                f"{cp_size}"
            )
        if not 0 <= rank < world_size and not auto_parallel:
            raise ValueError(f"rank: 0 to world_size - 1, {world_size - 1}, is required; got {rank}")
        sizes = {
            "moe_cluster_size": moe_cluster_size,
            "moe_tp_size": moe_tp_size,
            "moe_ep_size": moe_ep_size,
            "attn_tp_size": attn_tp_size,
            "attn_cp_size": attn_cp_size,
        }
        for name, size in sizes.items():
            if size < 1 and size != -1:
                raise ValueError(f"{name}: 1 or more, or -1, is required; got {size}")
        moe_cluster_size = 1 if moe_cluster_size == -1 else moe_cluster_size
        if moe_tp_size == -1:
            moe_ep_size = 1 if moe_ep_size == -1 else moe_ep_size
            moe_tp_size = tp_size // (moe_ep_size * moe_cluster_size)
        elif moe_ep_size == -1:
            moe_ep_size = tp_size // (moe_tp_size * moe_cluster_size)
        if moe_tp_size * moe_ep_size * moe_cluster_size != tp_size:
            raise ValueError(
                "moe_tp_size: moe_tp_size * moe_ep_size * moe_cluster_size must be tp_size, "
                f"{tp_size}; got {moe_tp_size} * {moe_ep_size} * {moe_cluster_size}"
            )
        attn_tp_size = tp_size * cp_size // attn_cp_size if attn_tp_size == -1 and attn_cp_size > 0 else attn_tp_size
        attn_tp_size = tp_size if attn_tp_size == -1 else attn_tp_size
        attn_cp_size = tp_size * cp_size // attn_tp_size if attn_cp_size == -1 else attn_cp_size
        if attn_tp_size * attn_cp_size != tp_size * cp_size:
            raise ValueError(
                f"attn_tp_size: attn_tp_size * attn_cp_size must be tp_size * cp_size, {tp_size * cp_size}; got "
                f"{attn_tp_size} * {attn_cp_size}"
            )
        self.world_size, self.rank, self.gpus_per_node = world_size, rank, gpus_per_node
        self.cp_size, self.tp_size, self.pp_size = cp_size, tp_size, pp_size
        self.cp_config = {} if cp_config is None else cp_config
        self.moe_cluster_size, self.moe_tp_size, self.moe_ep_size = moe_cluster_size, moe_tp_size, moe_ep_size
        self.attn_tp_size, self.attn_cp_size = attn_tp_size, attn_cp_size
        self.auto_parallel, self.enable_attention_dp = auto_parallel, enable_attention_dp

    def _key(self) -> tuple[Any, ...]:
        return tuple(sorted((name, str(value)) for name, value in vars(self).items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"Mapping({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def to_dict(self) -> dict[str, Any]:
        """The arguments of this mapping by name, as `from_dict` takes them."""
        return dict(vars(self))

    @classmethod
    def from_dict(cls, mapping: dict[str, Any]) -> Mapping:
        """The mapping of `to_dict`."""
        return cls(**mapping)

    # Ranks

    @property
    def tp_rank(self) -> int:
        """Rank of tensor parallelism."""
        return self.rank % self.tp_size

    @property
    def cp_rank(self) -> int:
        """Rank of context parallelism."""
        return self.rank // self.tp_size % self.cp_size

    @property
    def pp_rank(self) -> int:
        """The stage of the pipeline."""
        return self.rank // (self.tp_size * self.cp_size)

    @property
    def moe_tp_rank(self) -> int:
        """Rank among tensor-parallel experts."""
        return self.tp_rank // (self.moe_ep_size * self.moe_cluster_size)

    @property
    def moe_ep_rank(self) -> int:
        """Rank of expert parallelism."""
        return self.tp_rank // self.moe_cluster_size % self.moe_ep_size

    @property
    def moe_cluster_rank(self) -> int:
        """Rank within the expert cluster."""
        return self.tp_rank % self.moe_cluster_size

    @property
    def attn_tp_rank(self) -> int:
        """Rank of tensor-parallel attention."""
        return self.rank % (self.tp_size * self.cp_size) % self.attn_tp_size

    @property
    def attn_cp_rank(self) -> int:
        """Rank of context-parallel attention."""
        return self.rank % (self.tp_size * self.cp_size) // self.attn_tp_size

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks of attention."""
        return self.tp_size if self.enable_attention_dp else 1

    # Groups: the ranks that differ from this one in one dimension only, in order

    def _group(self, size: int, stride: int) -> list[int]:
        first = self.rank - self.rank // stride % size * stride
        return [first + index * stride for index in range(size)]

    @property
    def tp_group(self) -> list[int]:
        """Ranks that share a layer's tensors."""
        return self._group(self.tp_size, 1)

    @property
    def cp_group(self) -> list[int]:
        """Ranks that share a context."""
        return self._group(self.cp_size, self.tp_size)

    @property
    def pp_group(self) -> list[int]:
        """Ranks of the other stages."""
        return self._group(self.pp_size, self.tp_size * self.cp_size)

    @property
    def moe_cluster_group(self) -> list[int]:
        """Ranks of the expert cluster."""
        return self._group(self.moe_cluster_size, 1)

    @property
    def moe_ep_group(self) -> list[int]:
        """Ranks among which experts are divided."""
        return self._group(self.moe_ep_size, self.moe_cluster_size)

    @property
    def moe_tp_group(self) -> list[int]:
        """Ranks that share an expert."""
        return self._group(self.moe_tp_size, self.moe_ep_size * self.moe_cluster_size)

    # Nodes

    @property
    def node_rank(self) -> int:
        """The node of this rank."""
        return self.get_node_rank(self.rank)

    @property
    def local_rank(self) -> int:
        """The rank within its node."""
        return self.get_local_rank(self.rank)

    def get_node_rank(self, rank: int) -> int:
        """The node of a rank."""
        return rank // self.gpus_per_node

    def get_local_rank(self, rank: int) -> int:
        """A rank within its node."""
        return rank % self.gpus_per_node

    def is_multi_node(self) -> bool:
        """Whether there are several nodes."""
        return self.world_size > self.gpus_per_node

    # Kinds of parallelism

    def has_tp(self) -> bool:
        """Whether there is tensor parallelism."""
        return self.tp_size > 1

    def has_cp(self) -> bool:
        """Whether there is context parallelism."""
        return self.cp_size > 1

    def has_pp(self) -> bool:
        """Whether there is pipeline parallelism."""
        return self.pp_size > 1

    def has_moe_tp(self) -> bool:
        """Whether experts are tensor parallel."""
        return self.moe_tp_size > 1

    def has_moe_ep(self) -> bool:
        """Whether there is expert parallelism."""
        return self.moe_ep_size > 1

    def has_moe_cluster(self) -> bool:
        """Whether experts form clusters."""
        return self.moe_cluster_size > 1

    def is_first_pp_rank(self) -> bool:
        """Whether this is the first stage."""
        return self.pp_rank == 0

    def is_last_pp_rank(self) -> bool:
        """Whether this is the last stage."""
        return self.pp_rank == self.pp_size - 1

    def is_second_last_pp_rank(self) -> bool:
        """Whether this is the stage before the last."""
        return self.pp_rank == self.pp_size - 2

    def prev_pp_rank(self) -> int:
        """The rank of the stage before, in a ring."""
        return (self.rank - self.tp_size * self.cp_size) % self.world_size

    def next_pp_rank(self) -> int:
        """The rank of the stage after, in a ring."""
        return (self.rank + self.tp_size * self.cp_size) % self.world_size

    def pp_layers(self, num_layers: int) -> list[int]:
        """The layers of this stage: contiguous, the first stages have one more where the number does not divide."""
        each, more = divmod(num_layers, self.pp_size)
        first = self.pp_rank * each + min(self.pp_rank, more)
        return list(range(first, first + each + (self.pp_rank < more)))

    def ep_experts(self, num_experts: int) -> list[int]:
        """The experts of this rank.

        Raises:
            ValueError: num_experts is no multiple of moe_ep_size.
        """
        if num_experts % self.moe_ep_size:
            raise ValueError(f"num_experts: a multiple of {self.moe_ep_size} is required; got {num_experts}")
        each = num_experts // self.moe_ep_size
        return list(range(self.moe_ep_rank * each, (self.moe_ep_rank + 1) * each))
