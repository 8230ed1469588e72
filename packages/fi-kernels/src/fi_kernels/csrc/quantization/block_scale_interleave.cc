// block_scale_interleave: copies linear block scales to the 128x4 layout.
#include "fi/quantization/block_scale_interleave.h"

#include "fi/generated/block_scale_interleave.h"
#include "fi/host/tile.h"

#if !FI_CUDA
#include <algorithm>

#include "fi/cpu/parallel.h"
#endif

namespace fi {
namespace {

#if !FI_CUDA
template <class T>
void run_cpu(const BlockScaleInterleaveParams& p, int64_t padded_rows, int64_t all_rows) {
  cpu::parallel_for(all_rows, std::max(1, 16384 / p.padded_columns), [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      const int64_t batch = index / padded_rows, row = index % padded_rows;
      T* out = static_cast<T*>(p.out) + batch * padded_rows * p.padded_columns;
      const T* input = static_cast<const T*>(p.input) + (batch * p.rows + row) * p.columns;
      for (int32_t column = 0; column < p.padded_columns; column += 4) {  // four are neighbours
        T* to = out + scale_offset(kScales128x4, static_cast<int32_t>(row), column, p.padded_columns);
        for (int32_t i = 0; i < 4; ++i) to[i] = row < p.rows && column + i < p.columns ? input[column + i] : T{0};
      }
    }
  });
}
#else
const Entry& tile(const Kernel& kernel, bool aligned) {
  return kernel.first_entry(
      [&](const Entry& e) { return aligned || BlockScaleInterleaveConfig::of(e).columns_per_thread == 4; });
}
#endif

BlockScaleInterleaveRequest request_of(const BlockScaleInterleaveArgs& a) { return {a.input.dtype()}; }

void block_scale_interleave(const Kernel& kernel, const BlockScaleInterleaveArgs& a) {
  // 1 check
  a.input.is({kU8, kBF16}).contiguous();
  const int ndim = a.input.ndim();
  FI_CHECK(ndim == 2 || ndim == 3, ValueError, "input must have shape [m, c] or [batch, m, c]; got %s",
           a.input.shape_str().c_str());
  FI_CHECK(a.input.size(-2) < 1 << 30 && a.input.size(-1) < 1 << 30, ValueError,
           "input must have dimensions below 2^30; got %s", a.input.shape_str().c_str());

  // 2 shape
  BlockScaleInterleaveParams p{};
  p.out = a.out.data();
  p.input = a.input.data();
  p.rows = static_cast<int32_t>(a.input.size(-2));
  p.columns = static_cast<int32_t>(a.input.size(-1));
  p.padded_columns = (p.columns + 3) / 4 * 4;
  const int64_t strips = (p.rows + 127) / 128, all_strips = strips * (ndim == 3 ? a.input.size(0) : 1);
  Dim elements{"padded elements", all_strips * 128 * p.padded_columns};
  a.out.like(a.input).contiguous().shape(elements);
  if (elements == 0) return;

  // 3 launch
#if FI_CUDA
  FI_CHECK(a.out.alignment(16, {}) == 16, ValueError, "out must be 16-byte aligned; got address %p", a.out.data());
  const Entry& entry = tile(kernel, a.input.alignment(16, {p.columns}) == 16);
  const int64_t chunks_per_row = p.padded_columns / BlockScaleInterleaveConfig::of(entry).columns_per_thread;
  p.chunks = all_strips * 32 * chunks_per_row;
  FI_CHECK(p.chunks <= 0x7fffffff, ValueError, "input is too large: got shape %s", a.input.shape_str().c_str());
  p.chunks_per_row = divisor(static_cast<uint32_t>(chunks_per_row));
  p.strips = divisor(static_cast<uint32_t>(strips));
  launch_threads(kernel, entry, p.chunks, a.input.device(), p);
#else
  (void)kernel;
  a.input.dtype() == kU8 ? run_cpu<uint8_t>(p, strips * 128, all_strips * 128)
                         : run_cpu<uint16_t>(p, strips * 128, all_strips * 128);
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::block_scale_interleave, fi::request_of)
