// Quantizes new K and V rows to NVFP4 into the pages of their requests: a thread quantizes one block of 16 elements.
#pragma once
#include "fi/page/append_nvfp4_kv_cache.h"
#include "fi/quantization/block_quantize.cuh"

namespace fi {

// The threads of a row cover the heads of K, then the heads of V.
template <class T, bool kAligned>
FI_DEVICE void append_nvfp4_rows(const Nvfp4AppendParams& p) {
  const int row_in_cta = threadIdx.x / p.threads_per_row;
  const int index = blockIdx.y * p.threads_per_row + threadIdx.x - row_in_cta * p.threads_per_row;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (blockDim.x / p.threads_per_row) + row_in_cta;
  const int k_blocks = p.heads * p.k.blocks;
  const bool is_v = index >= k_blocks;
  const Nvfp4AppendOperand x = is_v ? p.v : p.k;
  const int of_part = is_v ? index - k_blocks : index, head = of_part / max(x.blocks, 1);
  const int block = of_part - head * x.blocks;
  const bool inside = row_in_cta < blockDim.x / p.threads_per_row && row < p.rows && head < p.heads;
  pdl_wait();
  Chunk<T> values;
  values.clear();
  Nvfp4AppendParams::Place to{-1, 0};
  if (inside) {
    values.template load_from<kAligned>(reinterpret_cast<const T*>(x.src) + row * x.src_row + head * x.src_head +
                                        block * kChunk);
    to = p.place(row);
  }
  const float factor = x.device_factor ? x.factor * *x.device_factor : x.factor;
  pdl_launch_dependents();
  if (to.page < 0) return;
  uint8_t* dst = x.dst + to.page * x.dst_page + to.slot * x.dst_slot + head * x.dst_head;
  if (!x.scales) {
    quantize<__nv_fp8_e4m3, kE4m3Scale>(values, {0, 1.f / factor}).template store_to<kAligned>(dst + block * kChunk);
    return;
  }
  const BlockScale scale = row_scale(values.magnitude(), 1.f / factor);
  quantize<E2m1, kE4m3Scale>(values, scale).template store_to<kAligned>(dst + block * (kChunk / 2));
  x.scales[to.page * x.scale_page + to.slot * x.scale_slot + head * x.scale_head + block] =
      static_cast<uint8_t>(scale.bits);
}

}  // namespace fi
