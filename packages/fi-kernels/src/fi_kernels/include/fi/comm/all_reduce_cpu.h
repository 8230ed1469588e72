// The CPU twin of all_reduce: each rank publishes its input, waits for the others, and adds all in the order of ranks.
#pragma once
#include <cmath>
#include <vector>

#include "fi/comm/all_reduce.h"
#include "fi/comm/exchange_cpu.h"
#include "fi/cpu/math.h"
#include "fi/cpu/row_convert.h"
#include "fi/norm/norm_cpu.h"
#include "fi/quantization/block_quantize_cpu.h"

namespace fi::cpu {

inline FI_CLONES void add_row(float* sum, const float* x, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) sum[i] += x[i];
}

// Slices of `numel` elements, one for all ranks, or one for each; d: the length of a row that is normalized, or of a
// piece of a flat message.
inline void all_reduce(const AllReduceParams& p, DType dtype, ReduceOutput output, int64_t numel, int64_t slices,
                       int64_t d) {
  const LoadRow load = row_loader(dtype);
  const StoreRow store = row_storer(dtype), store_quantized = row_storer(kE4M3);
  const int64_t bytes = d * dtype.bytes();
  std::vector<float> weight(output == kReduceSum ? 0 : static_cast<size_t>(d));
  if (p.weight) load(p.weight, weight.data(), d);
  for (float& w : weight) w += p.weight_bias;
  const float scale = p.scale ? *p.scale : 1.f;
  BlockQuantizeParams blocks{};
  blocks.out = p.quant_out;
  blocks.scales = p.scale_out;
  blocks.out_row_stride = d / 2;
  blocks.columns = blocks.width = static_cast<int32_t>(d);
  blocks.layout = p.layout;
  blocks.scale_columns = p.scale_columns;
  const int64_t at_once = p.comm.rotation_bytes / bytes / slices * d;  // elements
  FI_CHECK(at_once > 0, ValueError, "workspace is too small for a row of input, %lld bytes",
           static_cast<long long>(bytes));
  for (int64_t begin = 0; begin < numel; begin += at_once) {
    const int64_t now = std::min(at_once, numel - begin);
    if (!publish(p.comm, static_cast<const char*>(p.input) + begin * dtype.bytes(), now * dtype.bytes(), slices,
                 numel * dtype.bytes()))
      return;
    const int64_t own = slices == 1 ? 0 : p.comm.rank * now * dtype.bytes();  // where this rank's slice was published
    for_rows((now + d - 1) / d, d * p.comm.world, 2 * d, [&](int64_t index, float* sum) {
      const int64_t n = std::min(d, now - index * d), first = (begin + index * d) * dtype.bytes();
      float* x = sum + d;
      std::fill(sum, sum + n, 0.f);
      for (int32_t rank = 0; rank < p.comm.world; ++rank) {
        load(published_data(p.comm, rank) + own + index * bytes, x, n);
        add_row(sum, x, n);
      }
      if (p.residual_in) {
        load(static_cast<const char*>(p.residual_in) + first, x, n);
        add_row(sum, x, n);
      }
      std::vector<char> rounded(static_cast<size_t>(bytes));
      char* out = p.out ? static_cast<char*>(p.out) + first : rounded.data();
      store(sum, out, n);
      if (output == kReduceSum) return;
      load(out, sum, d);
      const auto width = static_cast<int32_t>(d);
      const float inv_rms = 1.f / std::sqrt(sum_of_squares(sum, 0.f, width) * p.inv_d + p.eps);
      scale_by_weight(sum, weight.data(), inv_rms, width);
      char* normed = p.norm_out ? static_cast<char*>(p.norm_out) + first : rounded.data();
      store(sum, normed, d);
      load(normed, sum, d);
      const int64_t row = begin / d + index;
      if (output == kReduceE4m3) {
        for (int64_t i = 0; i < d; ++i) sum[i] *= 1.f / scale;
        store_quantized(sum, static_cast<char*>(p.quant_out) + row * d, d);
      } else if (output == kReduceE2m1) {
        quantize_row(blocks, 0, static_cast<int32_t>(row), sum, x, kU8, kE4m3Scale, 16, scale);
      } else if (output == kReduceRowE4m3) {
        const float row_scale = row_e4m3_scale(detail::largest_magnitude(sum, d));
        static_cast<float*>(p.scale_out)[row] = row_scale;
        for (int64_t i = 0; i < d; ++i) sum[i] *= 1.f / row_scale;
        store_quantized(sum, static_cast<char*>(p.quant_out) + row * d, d);
      } else if (output == kReduceGroupE4m3) {
        for (int64_t i = 0; i < d; i += p.group)
          static_cast<uint8_t*>(
              p.scale_out)[group_scale_offset(row, static_cast<int32_t>(i / p.group), p.scale_columns)] =
              static_cast<uint8_t>(detail::scale_block(sum + i, x + i, p.group, kUe8m0Scale, kE4m3Limit, 1.f, 0.f));
        store_quantized(x, static_cast<char*>(p.quant_out) + row * d, d);
      }
    });
  }
}

}  // namespace fi::cpu
