// block_dequantize: checks the arguments, launches the CUDA kernel or runs the CPU one.
#include "fi/quantization/block_dequantize.h"

#include "fi/generated/block_dequantize.h"
#include "fi/host/tile.h"

#if !FI_CUDA
#include "fi/cpu/row_convert.h"
#endif

namespace fi {
namespace {

#if !FI_CUDA
FI_CLONES void load_e2m1(const uint8_t* codes, float* to, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t code = codes[i / 2] >> (4 * (i % 2)) & 15u;
    to[i] = cpu::bits_float(cpu::detail::decode_magnitude<2, 1>(code & 7u) | (code & 8u) << 28);
  }
}
FI_CLONES void multiply(float* x, float scale, float global_scale, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) x[i] = x[i] * scale * global_scale;
}

void run_cpu(const BlockDequantizeParams& p, DType dtype, DType out, bool ue8m0, int64_t batch) {
  const float global_scale = p.global_scale ? *p.global_scale : 1.f;
  const cpu::StoreRow store = cpu::row_storer(out);
  cpu::for_rows(batch * p.rows, p.columns, p.columns, [&](int64_t line, float* values) {
    const int64_t matrix = line / p.rows, row = line % p.rows;
    const uint8_t* from = p.input + matrix * p.input_batch_stride + row * p.input_row_stride;
    const uint8_t* scales = p.scales + matrix * p.scale_batch_stride;
    if (dtype == kU8)
      load_e2m1(from, values, p.columns);
    else
      cpu::row_loader(dtype)(from, values, p.columns);
    for (int32_t column = 0; column < p.columns; column += p.block) {
      const uint8_t code = scales[scale_offset(p.layout, static_cast<int32_t>(row), column / p.block, p.scale_columns)];
      const float scale = ue8m0 ? cpu::ue8m0_to_float(code) : cpu::to_float(cpu::e4m3_t{code});
      multiply(values + column, scale, global_scale, p.block);
    }
    store(values, static_cast<char*>(p.out) + line * p.columns * out.bytes(), p.columns);
  });
}
#endif

BlockDequantizeRequest request_of(const BlockDequantizeArgs& a) {
  const DType input = a.input.dtype() == kU8 ? kE2M1 : a.input.dtype();  // a byte holds two
  return {input, a.out.dtype(), static_cast<BlockDequantizeRequest::Scale>(a.scale_format)};
}

void block_dequantize(const Kernel& kernel, const BlockDequantizeArgs& a) {
  // 1 check
  Dim batch{"batch", a.input.ndim() == 2 ? 1 : -1}, rows{"rows"}, bytes{"bytes"};
  a.input.is({kU8, kE4M3, kE5M2}).inner_contiguous();
  if (a.input.ndim() == 2)
    a.input.shape(rows, bytes);
  else
    a.input.shape(batch, rows, bytes);
  Dim columns{"columns", bytes * (a.input.dtype() == kU8 ? 2 : 1)};
  a.out.is({kF32, kBF16}).on(a.input).contiguous();
  if (a.input.ndim() == 2)
    a.out.shape(rows, columns);
  else
    a.out.shape(batch, rows, columns);
  FI_CHECK(a.block_size > 0 && a.block_size % 8 == 0 && columns % a.block_size == 0, ValueError,
           "block_size must be a multiple of 8 that divides the %lld columns of input; got %lld",
           static_cast<long long>(columns), static_cast<long long>(a.block_size));
  FI_CHECK(a.scale_format == kE4m3Scale || a.scale_format == kUe8m0Scale, ValueError,
           "scale_format must be 0 (e4m3) or 1 (ue8m0); got %lld", static_cast<long long>(a.scale_format));
  FI_CHECK(a.layout >= kScales128x4 && a.layout <= kScalesLinear, ValueError,
           "layout must be 0 (128x4), 1 (8x4) or 2 (linear); got %lld", static_cast<long long>(a.layout));
  FI_CHECK(rows < 1 << 30 && columns < 1 << 30, ValueError, "input must have dimensions below 2^30; got %s",
           a.input.shape_str().c_str());
  if (a.global_scale) {
    a.global_scale.is({kF32}).on(a.input);
    FI_CHECK(a.global_scale.numel() == 1, ValueError, "global_scale must have one element; got %s",
             a.global_scale.shape_str().c_str());
  }

  // 2 shape
  BlockDequantizeParams p{};
  p.out = a.out.data();
  p.input = a.input.data<const uint8_t>();
  p.scales = a.scales.data<const uint8_t>();
  p.global_scale = a.global_scale ? a.global_scale.data<const float>() : nullptr;
  p.rows = static_cast<int32_t>(rows);
  p.columns = static_cast<int32_t>(columns);
  p.block = static_cast<int32_t>(a.block_size);
  p.layout = static_cast<int32_t>(a.layout);
  const int64_t blocks = columns / a.block_size, tile = scale_tile_rows(p.layout);
  p.scale_columns = static_cast<int32_t>(p.layout == kScalesLinear ? blocks : (blocks + 3) / 4 * 4);
  p.input_row_stride = a.input.stride(-2);
  p.input_batch_stride = a.input.ndim() == 2 ? 0 : a.input.stride(0);
  p.scale_batch_stride = (rows + tile - 1) / tile * tile * p.scale_columns;
  const int64_t expected = batch * p.scale_batch_stride;
  a.scales.is({kU8}).on(a.input).contiguous();
  FI_CHECK(a.scales.numel() == expected, ValueError, "scales must have %lld elements in this layout; got %s",
           static_cast<long long>(expected), a.scales.shape_str().c_str());
  if (batch == 0 || rows == 0 || columns == 0) return;

  // 3 launch
#if FI_CUDA
  const int64_t vector = a.input.dtype() == kU8 ? 4 : 8;
  FI_CHECK(a.input.row_alignment(vector) == vector, ValueError,
           "rows of input must start at multiples of %lld bytes; got address %p and strides of %lld and %lld: copy it",
           static_cast<long long>(vector), a.input.data(), static_cast<long long>(p.input_batch_stride),
           static_cast<long long>(p.input_row_stride));
  p.chunks = batch * rows * columns / 8;
  FI_CHECK(p.chunks <= 0x7fffffff, ValueError, "input is too large: got shape %s", a.input.shape_str().c_str());
  p.chunks_per_row = divisor(static_cast<uint32_t>(columns / 8));
  p.rows_per_matrix = divisor(static_cast<uint32_t>(rows));
  launch_threads(kernel, kernel.entries.front(), p.chunks, a.input.device(), p);
#else
  (void)kernel;
  run_cpu(p, a.input.dtype(), a.out.dtype(), a.scale_format == kUe8m0Scale, batch);
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::block_dequantize, fi::request_of)
