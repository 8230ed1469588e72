// Launches one unit kernel of the device building blocks: describes a and b for TMA in the 128-byte swizzle.
#include "blocks.h"

#include "fi/host/function.h"

namespace {

// A box has 128 bytes of columns.
void describe(const fi::Kernel& kernel, fi::TensorMap& map, const fi::Tensor& x, int64_t box_rows) {
  const int64_t bytes = x.dtype().bytes();
  const uint64_t sizes[] = {static_cast<uint64_t>(x.size(1)), static_cast<uint64_t>(x.size(0))};
  const uint64_t strides[] = {static_cast<uint64_t>(x.stride(0) * bytes)};
  const uint32_t box[] = {static_cast<uint32_t>(128 / bytes), static_cast<uint32_t>(box_rows)};
  kernel.describe(map, bytes, 2, const_cast<void*>(x.data<const void>()), sizes, strides, box);
}

// entry: which kernel; rows_a, rows_b: of the boxes that it loads.
void blocks(const fi::Kernel& kernel, fi::Tensor out, fi::Tensor a, fi::Tensor b, fi::Tensor counters, int64_t entry,
            int64_t grid, int64_t rows_a, int64_t rows_b, int64_t group_m) {
  BlockParams p{};
  describe(kernel, p.a_map, a, rows_a);
  describe(kernel, p.b_map, b, rows_b);
  p.a = a.data<const void>();
  p.out = static_cast<float*>(out.data());
  p.counters = counters.data<int32_t>();
  p.m = static_cast<int32_t>(out.size(0)), p.n = static_cast<int32_t>(out.size(1));
  p.group_m = static_cast<int32_t>(group_m);
  kernel.launch(kernel.entries[static_cast<size_t>(entry)], fi::Launch{grid}, a.device(), p);
}

}  // namespace

FI_FUNCTION(blocks, "out", "a", "b", "counters", "entry", "grid", "rows_a", "rows_b", "group_m")
