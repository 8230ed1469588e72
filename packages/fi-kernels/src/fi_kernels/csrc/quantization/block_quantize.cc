// block_quantize: checks the arguments, launches the CUDA kernel or runs the CPU one.
#include "fi/quantization/block_quantize.h"

#include <algorithm>

#include "fi/generated/block_quantize.h"

#if !FI_CUDA
#include "fi/quantization/block_quantize_cpu.h"
#endif

namespace fi {
namespace {

int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

// Sets the shape and the strides of [rows, size] or [batch, rows, size].
void set_strides(const Tensor& tensor, int64_t& batch_stride, int64_t& row_stride) {
  tensor.inner_contiguous();
  row_stride = tensor.stride(-2);
  batch_stride = tensor.ndim() == 3 ? tensor.stride(0) : 0;
}

void check_scales(const BlockQuantizeArgs& a, BlockQuantizeParams& p) {
  const int64_t blocks = p.width / a.block_size;
  if (a.scale_format == kFloatScale || a.scale_format == kPowerOfTwoScale) {
    Dim rows{"rows", p.rows}, columns{"width / block_size", blocks};
    a.scales.is({kF32}).on(a.input).shape(rows, columns);
    FI_CHECK(a.input.ndim() == 2, ValueError, "input must have shape [rows, columns] with fp32 scales; got %s",
             a.input.shape_str().c_str());
    p.scale_row_stride = a.scales.stride(0);
    p.scale_column_stride = a.scales.stride(1);
    p.padded_rows = p.rows;
    p.scale_columns = static_cast<int32_t>(blocks);
    return;
  }
  FI_CHECK(a.layout >= kScales128x4 && a.layout <= kScalesLinear, ValueError,
           "layout must be 0 (128x4), 1 (8x4) or 2 (linear); got %lld", static_cast<long long>(a.layout));
  FI_CHECK(a.block_size <= 32, ValueError, "block_size must be 16 or 32 with scales of one byte; got %lld",
           static_cast<long long>(a.block_size));
  p.layout = static_cast<int32_t>(a.layout);
  p.padded_rows = static_cast<int32_t>(round_up(p.rows, scale_tile_rows(p.layout)));
  p.scale_columns = static_cast<int32_t>(p.layout == kScalesLinear ? blocks : round_up(blocks, 4));
  const int64_t expected = static_cast<int64_t>(p.batch) * p.padded_rows * p.scale_columns;
  a.scales.is({kU8}).on(a.input).contiguous();
  FI_CHECK(a.scales.numel() == expected, ValueError, "scales must have %lld elements in this layout; got %s",
           static_cast<long long>(expected), a.scales.shape_str().c_str());
  FI_CHECK(a.scales.alignment(4, {}) == 4, ValueError, "scales must start at a multiple of 4 bytes; got address %p",
           a.scales.data());
}

void check_optional(const BlockQuantizeArgs& a, BlockQuantizeParams& p) {
  if (a.global_scale) {
    a.global_scale.is({kF32}).on(a.input).contiguous();
    const int64_t n = a.global_scale.numel();
    const bool of_rows = a.input.ndim() == 2 && n == p.rows;
    FI_CHECK(n == 1 || n == p.batch || of_rows, ValueError,
             "global_scale must have 1 element, or one for each of %d matrices or of the %d rows of one; got %s",
             p.batch, p.rows, a.global_scale.shape_str().c_str());
    p.global_scale = a.global_scale.data<const float>();
    p.global_scale_stride = n > 1 && !of_rows;
    p.global_scale_row_stride = n > 1 && of_rows;
  }
  if (a.mask) {
    Dim batch{"batch", p.batch};
    a.mask.is({kI32}).on(a.input).contiguous().shape(batch);
    FI_CHECK(a.layout == kScales128x4, ValueError, "mask requires layout 0 (128x4); got layout %lld",
             static_cast<long long>(a.layout));
    p.mask = a.mask.data<const int32_t>();
  }
  FI_CHECK(!a.shuffle || (p.rows % 32 == 0 && !a.mask), ValueError,
           "shuffle requires a number of rows that is a multiple of 32, and no mask; got %d rows", p.rows);
  p.inverse_global_scale = a.inverse_global_scale;
  p.shuffle = a.shuffle;
  p.eps = static_cast<float>(a.eps);
}

BlockQuantizeRequest request_of(const BlockQuantizeArgs& a) {
  const DType out = a.out.dtype() == kU8 ? kE2M1 : a.out.dtype();  // a byte holds two
  return {a.input.dtype(), out, a.block_size, static_cast<BlockQuantizeRequest::Scale>(a.scale_format), a.gated};
}

#if FI_CUDA
const Entry& tile(const Kernel& kernel, const BlockQuantizeArgs& a, const BlockQuantizeParams& p, int64_t out_bytes) {
  const bool aligned = a.input.alignment(16, {p.input_row_stride, p.input_batch_stride, p.columns}) == 16 &&
                       a.out.alignment(out_bytes, {p.out_row_stride, p.out_batch_stride}) == out_bytes;
  return kernel.first_entry([&](const Entry& e) { return aligned || !BlockQuantizeConfig::of(e).aligned; });
}
#endif

void block_quantize(const Kernel& kernel, const BlockQuantizeArgs& a) {
  // 1 check
  a.input.is({kF16, kBF16, kF32, kE4M3});
  a.out.is({kU8, kE4M3, kE5M2, {kDLInt, 8}}).on(a.input);
  const int ndim = a.input.ndim();
  FI_CHECK(ndim == 2 || ndim == 3, ValueError,
           "input must have shape [rows, columns] or [batch, rows, columns]; got %s", a.input.shape_str().c_str());
  const int64_t values_per_byte = a.out.dtype() == kU8 ? 2 : 1, columns = a.input.size(-1) / (a.gated ? 2 : 1);
  FI_CHECK(a.input.size(-1) % (a.gated ? 2 * a.block_size : a.block_size) == 0, ValueError,
           "input must have a last dimension that is a multiple of %s%lld; got %s", a.gated ? "2 * " : "",
           static_cast<long long>(a.block_size), a.input.shape_str().c_str());
  bool fits = a.out.ndim() == ndim && a.out.size(-1) * values_per_byte >= columns &&
              a.out.size(-1) * values_per_byte % a.block_size == 0;
  for (int i = 0; fits && i + 1 < ndim; ++i) fits = a.out.size(i) == a.input.size(i);
  FI_CHECK(fits, ValueError, "out must have the rows of input %s and space for %lld columns in whole blocks; got %s",
           a.input.shape_str().c_str(), static_cast<long long>(columns), a.out.shape_str().c_str());
  for (int i = 0; i < ndim; ++i)
    FI_CHECK(a.input.size(i) < 1 << 30, ValueError, "input must have dimensions below 2^30; got %s",
             a.input.shape_str().c_str());

  // 2 shape
  BlockQuantizeParams p{};
  p.out = a.out.data();
  p.scales = a.scales.data();
  p.input = a.input.data();
  set_strides(a.input, p.input_batch_stride, p.input_row_stride);
  set_strides(a.out, p.out_batch_stride, p.out_row_stride);
  p.batch = static_cast<int32_t>(ndim == 3 ? a.input.size(0) : 1);
  p.rows = static_cast<int32_t>(a.input.size(-2));
  p.columns = static_cast<int32_t>(columns);
  p.width = static_cast<int32_t>(a.out.size(-1) * values_per_byte);
  check_scales(a, p);
  check_optional(a, p);
  if (p.batch == 0 || p.rows == 0 || p.width == 0) return;

  // 3 launch
#if FI_CUDA
  // Lanes of four columns exchange scales of one byte.
  const int64_t blocks = a.scales.dtype() == kU8 ? round_up(p.scale_columns, 4) : p.scale_columns;
  const int64_t chunks = blocks * a.block_size / kChunk;
  // A thread takes rows r, r + 32, r + 64, r + 96 of a tile of 128.
  const int64_t groups = p.padded_rows / 128 * 32 + std::min(32, p.padded_rows % 128);
  FI_CHECK(groups * chunks <= 0x7fffffff, ValueError, "input is too large: got shape %s", a.input.shape_str().c_str());
  p.chunks = divisor(static_cast<uint32_t>(chunks));
  const Entry& entry = tile(kernel, a, p, kChunk / values_per_byte);
  Launch launch{(groups * chunks + entry.threads - 1) / entry.threads, p.batch};
  launch.pdl = kernel.pdl(a.enable_pdl);
  kernel.launch(entry, launch, a.input.device(), p);
#else
  (void)kernel, (void)a.enable_pdl;
  cpu::block_quantize(p, a.input.dtype(), a.out.dtype(), static_cast<ScaleFormat>(a.scale_format),
                      static_cast<int32_t>(a.block_size), a.gated);
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::block_quantize, fi::request_of)
