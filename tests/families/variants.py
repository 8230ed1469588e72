"""Attention variants as users write them - CUDA text with what it takes more - and the same in fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from families.harness import rand
from fi_core.utils import get_alibi_slopes

LOG2E = 1.4426950408889634
SM_SCALE = 0.11
# Every variant begins with the lengths of the request, and with the scale in base 2 if it has a softmax.
_HEAD = """
struct {name} : AttentionVariantBase {{
  static constexpr bool use_softmax = {softmax};
  uint32_t window_left, qo_len, kv_len;
  float sm_scale_log2;

  template <typename Params>
  __device__ __host__ {name}(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {{
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    window_left = params.window_left >= 0 ? params.window_left : kv_len;
    sm_scale_log2 = params.sm_scale * math::log2e;
  }}
"""

_SIGMOID = """
  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    return math::ptx_rcp(1.f + math::ptx_exp2(-(logits * sm_scale_log2 + params.sigmoid_bias * math::log2e)));
  })
};
"""
_MASK = """
  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    const uint32_t bit = qo_idx * kv_len + kv_idx;
    const uint8_t* bits = params.mask_bits + params.mask_begin[batch_idx];
    return (bits[bit / 8] >> (bit % 8)) & 1;
  })
};
"""
_ALIBI = """
  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    const float distance = float(int(kv_idx) - int(qo_idx));
    return logits + params.alibi_slopes[qo_head_idx] * distance * math::ptx_rcp(float(params.sm_scale));
  })
};
"""
_DUMP = """
  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    if (qo_idx < qo_len && kv_idx < kv_len)
      params.dump[params.dump_begin[batch_idx] + (int64_t(qo_head_idx) * qo_len + qo_idx) * kv_len + kv_idx] = logits;
    return logits;
  })
};
"""
_SINK = """
  REGISTER_M_D_UPDATE(params, kv_tile_idx, qo_head_idx, m, d, scale, {
    const float sink = kv_tile_idx == 0 ? params.sink[qo_head_idx] * math::log2e : -math::inf;
    const float m_new = max(m, sink);
    scale = math::ptx_exp2(m - m_new);
    d = d * scale + math::ptx_exp2(sink - m_new);
    m = m_new;
  })
  REGISTER_OUTPUT_TRANSFORM(params, output, batch_idx, qo_idx, qo_head_idx, m, d, scale, {
    return m == -math::inf ? 0.f : output * scale * math::ptx_rcp(d);
  })
};
"""

Lens = Sequence[tuple[int, int]]  # (qo_len, kv_len) of each request


@dataclass(frozen=True, eq=False)
class Example:
    """make(lens, heads, device): the tensors. logits(x, tensors, b): scores, or weights without a softmax, of the
    products x `[heads, qo_len, kv_len]` of request b. keep: the mask, `[qo_len, kv_len]`."""

    name: str
    body: str
    tensors: dict[str, str]
    scalars: dict[str, str]
    values: tuple[float, ...]
    make: Callable[[Lens, int, str], list[torch.Tensor]]
    logits: Callable[[torch.Tensor, list[torch.Tensor], int], torch.Tensor]
    keep: Callable[[Lens, list[torch.Tensor], int], torch.Tensor] | None = None
    softmax: bool = True

    @property
    def text(self) -> str:
        return _HEAD.format(name=self.name, softmax=str(self.softmax).lower()) + self.body

    def declared(self) -> tuple[Any, ...]:
        """The four lists, the name and the text, as the generators take them."""
        lists = [list(x) for d in (self.tensors, self.scalars) for x in (d, d.values())]
        return (*lists, self.name, self.text)

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tensors: list[torch.Tensor], lens: Lens, b: int,
        causal: bool = False, window_left: int = -1,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """(out `[qo_len, heads, d]`, lse or None) of request b in fp64."""
        q, k, v = (x.cpu().double() for x in (q, k, v))
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        s = self.logits(torch.einsum("ihd,jhd->hij", q, k), [t.cpu() for t in tensors], b)
        row, key = torch.arange(len(q))[:, None] + len(k) - len(q), torch.arange(len(k))[None]
        seen = torch.ones(len(q), len(k), dtype=torch.bool)
        if causal:
            seen &= key <= row
        if window_left >= 0:
            seen &= key >= row - window_left
        if self.keep is not None:
            seen &= self.keep(lens, [t.cpu() for t in tensors], b)
        if not self.softmax:
            return torch.einsum("hij,jhd->ihd", s.masked_fill(~seen, 0.0), v), None
        s = s.masked_fill(~seen, -torch.inf)
        if self.name == "Sink":
            s = torch.cat([s, tensors[0].cpu().double()[:, None, None].expand(*s.shape[:2], 1)], -1)
        weights = s.softmax(-1).nan_to_num(0.0)[..., : len(k)]
        return torch.einsum("hij,jhd->ihd", weights, v), s.logsumexp(-1).t() * LOG2E


def _mask_bits(lens: Lens, heads: int, device: str) -> list[torch.Tensor]:
    parts, begins = [], [0]
    for b, (qo, kv) in enumerate(lens):
        part = rand((qo * kv + 7) // 8, dtype=torch.float32, device="cpu", seed=b).view(torch.int32) & 0xFF
        parts.append(part.to(torch.uint8))
        begins.append(begins[-1] + len(part))
    return [torch.cat(parts).to(device), torch.tensor(begins, dtype=torch.int32, device=device)]


def _keep(lens: Lens, tensors: list[torch.Tensor], b: int) -> torch.Tensor:
    (qo, kv), bits = lens[b], tensors[0][int(tensors[1][b]) :]
    element = torch.arange(qo * kv)
    return ((bits[element // 8].int() >> (element % 8)) & 1).bool().view(qo, kv)


def _dump(lens: Lens, heads: int, device: str) -> list[torch.Tensor]:
    sizes = torch.tensor([0, *(heads * qo * kv for qo, kv in lens)]).cumsum(0)
    nothing = torch.full((int(sizes[-1]),), float("nan"), device=device)
    return [nothing, sizes[:-1].to(device)]


def _alibi(x: torch.Tensor, tensors: list[torch.Tensor], b: int) -> torch.Tensor:
    distance = torch.arange(x.shape[2])[None] - torch.arange(x.shape[1])[:, None]
    return x * SM_SCALE + tensors[0].double()[:, None, None] * distance


EXAMPLES = (
    Example(
        "FlashSigmoid", _SIGMOID, {}, {"sm_scale": "double", "sigmoid_bias": "float"}, (SM_SCALE, -0.7),
        lambda lens, heads, device: [], lambda x, t, b: torch.sigmoid(x * SM_SCALE - 0.7), softmax=False,
    ),
    Example(
        "Masked", _MASK, {"mask_bits": "uint8_t", "mask_begin": "int32_t"}, {"sm_scale": "double"}, (SM_SCALE,),
        _mask_bits, lambda x, t, b: x * SM_SCALE, _keep,
    ),
    Example(
        "Alibi", _ALIBI, {"alibi_slopes": "float"}, {"sm_scale": "double"}, (SM_SCALE,),
        lambda lens, heads, device: [get_alibi_slopes(heads).to(device)], _alibi,
    ),
    Example(
        "LogitsDump", _DUMP, {"dump": "float", "dump_begin": "int64_t"}, {"sm_scale": "double"}, (SM_SCALE,), _dump,
        lambda x, t, b: x * SM_SCALE,
    ),
    Example(
        "Sink", _SINK, {"sink": "float"}, {"sm_scale": "float"}, (SM_SCALE,),
        lambda lens, heads, device: [rand(heads, dtype=torch.float32, device=device, scale=2.0)],
        lambda x, t, b: x * SM_SCALE,
    ),
)  # fmt: skip
