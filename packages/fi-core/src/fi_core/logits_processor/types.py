"""What tensors between two operators hold."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class TensorType(Enum):
    """What a tensor between two operators holds."""

    LOGITS = "logits"
    PROBS = "probs"
    INDICES = "indices"


@dataclass(frozen=True)
class TaggedTensor:
    """A tensor, and what it holds."""

    data: torch.Tensor
    type: TensorType

    @staticmethod
    def logits(t: torch.Tensor) -> TaggedTensor:
        """`t` as logits."""
        return TaggedTensor(t, TensorType.LOGITS)

    @staticmethod
    def probs(t: torch.Tensor) -> TaggedTensor:
        """`t` as probabilities."""
        return TaggedTensor(t, TensorType.PROBS)

    @staticmethod
    def indices(t: torch.Tensor) -> TaggedTensor:
        """`t` as tokens."""
        return TaggedTensor(t, TensorType.INDICES)

    @property
    def shape(self) -> torch.Size:
        """The shape of the tensor."""
        return self.data.shape

    @property
    def device(self) -> torch.device:
        """The device of the tensor."""
        return self.data.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor."""
        return self.data.dtype

    def size(self, dim: int | None = None) -> torch.Size | int:
        """The size of one dimension, or of all."""
        return self.data.shape if dim is None else self.data.size(dim)
