"""A layer of experts as its kernels take it: sorted tables, weights in a format, the activation, memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from fi_core.fused_moe.ops import MXFP8
from fi_core.quantization.layout import SfLayout
from fi_core.tllm_enums import ActivationType, is_gated_activation

if TYPE_CHECKING:
    import torch

    from fi_core.runtime.launch.plan import Axis


def _of_adapters(x: torch.Tensor | None) -> int | None:
    """Of the tensors of an ExpertLora only lora_indices, which are integers, have tokens."""
    return None if x is None or x.is_floating_point() else 0


# The axis of tokens of the arguments of a layer, by which plans reach the kernels of other numbers of tokens.
TOKENS: dict[str, Axis] = {
    **dict.fromkeys(
        (
            "input",
            "token_selected_experts",
            "token_final_scales",
            "hidden_states",
            "routing_logits",
            "topk_ids",
            "routing_replay_out",
            "gemm1_lora_delta",
            "output",
        ),
        0,
    ),
    "lora": _of_adapters,
}

# Activations of mixed weights: as they are; e4m3 with a scale for each token, or with a ue8m0 scale for each 32 values.
AS_GIVEN, E4M3_TOKENS, E4M3_BLOCKS = "", "e4m3 tokens", "e4m3 blocks of 32"


class Tables(NamedTuple):
    """Slots (a token and one of its experts) sorted by local expert; int32, on the device."""

    offsets: torch.Tensor  # [experts + 1]: rows of expert e are offsets[e] .. offsets[e + 1] - 1
    rows: torch.Tensor  # [slots]: row -> token; -1 from offsets[-1] on
    positions: torch.Tensor  # [tokens, top_k]: slot -> row; -1: its expert is not here
    active: torch.Tensor  # [experts + 1]: the number of experts with rows, their numbers, then -1
    counters: torch.Tensor  # [COUNTERS], zeros


class TokenExperts(NamedTuple):
    """The experts of each token and their weights."""

    ids: torch.Tensor  # [tokens, top_k] int32 or int64, of all ranks
    weights: torch.Tensor | None  # [tokens, top_k] fp32 or bf16; None: ones
    first_expert: int = 0  # of this rank


class Mixed(NamedTuple):
    """A format of weights that become 16-bit floats in registers; the scales are those of `moe_mixed_gemm`."""

    format: int
    layout: int = SfLayout.layout_linear.value
    alpha: torch.Tensor | None = None  # fp32 [1] or [experts]: factors of the outputs
    input_scale: torch.Tensor | None = None  # [k]: factors of the inputs


class Projection(NamedTuple):
    """A weight of each local expert. The first of a gated expert has the rows of the linear projection, then the gate.

    scale: of the weight as the op `gemm` takes it, or as `moe_mixed_gemm` takes it. bias: `[experts, n]`, in the order
    of the rows. columns: `[n]`, the rows of weight and bias that hold the outputs; None: in order. shuffle_tile: of
    `shuffle_matrix_a`, by which they are; a gated weight for 128 alternates before. 0 with columns: any order.
    """

    weight: torch.Tensor  # [experts, n, k], fp4 and int4 [experts, n, k / 2]; or [experts, k / b, n, b], b of 128 bytes
    scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    mixed: Mixed | None = None
    shuffle_tile: int = 0

    @property
    def rows(self) -> int:
        """Of the weight of an expert."""
        return self.weight.shape[-2]

    @property
    def columns_of_k(self) -> int:
        """The length of an input."""
        packed = self.mixed is not None and self.mixed.format != MXFP8
        blocks = self.weight.shape[1] if self.weight.ndim == 4 else 1
        return blocks * self.weight.shape[-1] * (2 if packed else 1)

    def by_rows(self) -> Projection:
        """With a weight `[experts, n, k]`: blocks are copied, at the cost of reading and writing them."""
        if self.weight.ndim == 3:
            return self
        return self._replace(weight=self.weight.transpose(1, 2).flatten(2))


class Activation(NamedTuple):
    """An activation with its constants: per expert, fp32 `[experts]`, or the same for all."""

    kind: int = ActivationType.Swiglu
    alpha: torch.Tensor | None = None
    beta: torch.Tensor | None = None
    limit: torch.Tensor | None = None
    alpha_value: float = 1.0
    beta_value: float = 0.0
    limit_value: float = 3.4e38

    def width(self, rows: int) -> int:
        """The outputs of a first weight with so many rows."""
        return rows // 2 if is_gated_activation(self.kind) else rows

    def options(self) -> dict[str, Any]:
        """By the names of the arguments of the operators that activate."""
        return {"activation" if name == "kind" else name: value for name, value in self._asdict().items()}


class Layer(NamedTuple):
    """Tokens and weights of a layer, in one of the formats that the kernels know.

    x: `[tokens, hidden]`, 16 bits or e4m3. dtype: of sums and of what lies between kernels, 16 bits. x_scale: fp32
    `[tokens, hidden / 128]` of e4m3 x with blocks. quant: fp32 `[1]` or `[experts]`, the factor of activated values
    before they become e4m3. blocks: e4m3 weights have scales of 128 x 128; 16-bit activations are quantised.
    activations: how the operands of products with mixed weights are rounded.
    """

    x: torch.Tensor
    up: Projection
    down: Projection
    dtype: torch.dtype
    x_scale: torch.Tensor | None = None
    quant: torch.Tensor | None = None
    blocks: bool = False
    activations: str = AS_GIVEN

    @property
    def quantizes(self) -> bool:
        """Whether the operands of both products are e4m3."""
        return self.up.mixed is None and self.up.weight.element_size() == 1
