"""A custom attention variant: sigmoid attention in a few lines of CUDA, for a prompt and then token by token.

    python examples/custom_attention.py

Weights are sigmoid(q k / sqrt(d) + bias) with a bias for each head, and no softmax (Ramapuram et al. 2024,
arXiv:2409.04431). The constructors of the wrappers compile one text into the prefill and the decode kernels, with NVRTC
for a GPU and with g++ for the CPU. The result is compared with torch in float64.
"""

from __future__ import annotations

import argparse
import time

import torch

import fi_core

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, PROMPT, STEPS = 8, 2, 64, 16, 50, 5
DTYPE = torch.float16

SIGMOID = r"""
struct SigmoidAttention : AttentionVariantBase {
  static constexpr bool use_softmax = false;  // the transform below returns the weights
  uint32_t window_left, qo_len, kv_len;

  template <typename Params>
  __device__ __host__ SigmoidAttention(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    window_left = kv_len;
  }

  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    const float x = logits * params.sm_scale + params.bias[qo_head_idx];
    return math::ptx_rcp(1.f + math::ptx_exp2(-x * math::log2e));
  })
};
"""
# A name for the files; dtypes of q, kv, output and page tables; head dims; the tensors and scalars that the struct
# reads from `params`, with their C types; the name and the text of the struct.
JIT_ARGS = (
    "sigmoid_attention", DTYPE, DTYPE, DTYPE, torch.int32, HEAD_DIM, HEAD_DIM, ["bias"], ["float"], ["sm_scale"],
    ["float"], "SigmoidAttention", SIGMOID,
)  # fmt: skip


def expected(q: torch.Tensor, cache: torch.Tensor, bias: torch.Tensor, length: int) -> torch.Tensor:
    k, v = cache.double().transpose(0, 1).flatten(1, 2)[:, :length].repeat_interleave(HEADS // KV_HEADS, 2)
    weights = torch.sigmoid(torch.einsum("ihd,jhd->hij", q.double(), k) * HEAD_DIM**-0.5 + bias.double()[:, None, None])
    seen = torch.ones(weights.shape[1:], dtype=torch.bool, device=q.device).tril(length - len(q))
    return torch.einsum("hij,jhd->ihd", weights * seen, v)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.manual_seed(0)
    pages = -(-(PROMPT + STEPS) // PAGE_SIZE)
    cache = torch.randn(pages, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM, device=DEVICE).to(DTYPE)
    bias = torch.linspace(-4.0, -2.0, HEADS, device=DEVICE)
    workspace = torch.empty(16 << 20, dtype=torch.uint8, device=DEVICE)

    start = time.perf_counter()
    prefill = fi_core.BatchPrefillWithPagedKVCacheWrapper(workspace, backend="fa2", jit_args=JIT_ARGS)
    decode = fi_core.BatchDecodeWithPagedKVCacheWrapper(workspace, backend="fa2", jit_args=JIT_ARGS)
    print(f"prefill and decode kernels compiled, or found, in {time.perf_counter() - start:.2f} s")

    worst = 0.0
    for length in range(PROMPT, PROMPT + STEPS):
        used = -(-length // PAGE_SIZE)
        table = (
            torch.tensor([0, used]).int(),
            torch.arange(used).int(),
            torch.tensor([(length - 1) % PAGE_SIZE + 1]).int(),
        )
        rows = PROMPT if length == PROMPT else 1
        q = torch.randn(rows, HEADS, HEAD_DIM, device=DEVICE).to(DTYPE)
        if length == PROMPT:
            qo_indptr = torch.tensor([0, rows]).int()
            prefill.plan(qo_indptr, *table, HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, causal=True, q_data_type=DTYPE)
            out = prefill.run(q, cache, bias, HEAD_DIM**-0.5)
        else:
            decode.plan(*table, HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, q_data_type=DTYPE)
            out = decode.run(q, cache, bias, HEAD_DIM**-0.5)
        worst = max(worst, float((out - expected(q, cache, bias, length)).abs().max()))
    print(f"{decode.resolved_backend} on {DEVICE.type}: largest error of {PROMPT + STEPS - 1} tokens {worst:.4f}")
    if worst > 0.01:
        raise SystemExit("the results are wrong")


if __name__ == "__main__":
    main()
