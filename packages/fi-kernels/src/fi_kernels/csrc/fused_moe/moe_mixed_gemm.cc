// moe_mixed_gemm: checks the arguments, launches the CUDA kernel or runs the CPU one.
#include "fi/fused_moe/moe_mixed_gemm.h"

#include <algorithm>

#include "fi/generated/moe_mixed_gemm.h"
#include "fi/host/contents.h"

#if !FI_CUDA
#include <vector>

#include "fi/fused_moe/moe_cpu.h"
#endif

namespace fi {
namespace {

#if !FI_CUDA
float scale_of(const MoeMixedGemmParams& p, MixedFormat format, int64_t index) {
  if (format == kInt4) return cpu::to_float(static_cast<const cpu::bf16_t*>(p.scales)[index]);
  const uint8_t code = static_cast<const uint8_t*>(p.scales)[index];
  return format == kNvfp4 ? cpu::to_float(cpu::e4m3_t{code}) : cpu::ue8m0_to_float(code);
}

// Row j of the weight of an expert.
void dequantize_row(const MoeMixedGemmParams& p, MixedFormat format, int64_t expert, int64_t j, float* out) {
  const auto* row =
      static_cast<const uint8_t*>(p.problem.b) + expert * p.problem.b_batch_stride + j * p.problem.b_row_stride;
  const int32_t block = scale_block(format);
  float scale = 0.f;
  for (int32_t k = 0; k < p.problem.k; ++k) {
    if (k % block == 0)
      scale = scale_of(
          p, format,
          expert * p.scale_stride + scale_offset(p.layout, static_cast<int32_t>(j), k / block, p.scale_columns));
    const uint32_t code = format == kMxfp8 ? row[k] : row[k / 2] >> 4 * (k % 2) & 15u;
    const float value = format == kMxfp8  ? cpu::to_float(cpu::e4m3_t{static_cast<uint8_t>(code)})
                        : format == kInt4 ? static_cast<float>(static_cast<int32_t>(code ^ 8u) - 8)
                                          : cpu::e2m1_to_float(code);
    out[k] = value * scale;
  }
}

FI_CLONES float dot(const float* a, const float* b, int64_t n) {
  float sum = 0.f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

void run_cpu(const MoeMixedGemmParams& p, MixedFormat format, DType dtype) {
  const GemmProblem& q = p.problem;
  const cpu::LoadRow load = cpu::row_loader(dtype);
  const cpu::StoreRow store = cpu::row_storer(dtype);
  for (int64_t e = 0; e < q.batch; ++e) {
    const int64_t first = q.row_groups[e], count = std::min(q.row_groups[e + 1], q.m) - first;
    if (count <= 0) continue;
    std::vector<float> x(static_cast<size_t>(count * q.k));
    for (int64_t r = 0; r < count; ++r) {
      const int64_t row = p.rows ? p.rows[first + r] : first + r;
      load(static_cast<const char*>(q.a) + row * q.a_row_stride * 2, x.data() + r * q.k, q.k);
    }
    const float alpha = p.alpha ? p.alpha[e * p.alpha_stride] : 1.f;
    cpu::for_rows(q.n, q.k * (count + 4), q.k, [&](int64_t j, float* row) {
      dequantize_row(p, format, e, j, row);
      for (int64_t r = 0; r < count; ++r) {
        const float sum = dot(row, x.data() + r * q.k, q.k) * alpha;
        store(&sum, static_cast<char*>(q.out) + ((first + r) * q.out_row_stride + j) * 2, 1);
      }
    });
  }
}
#else
// The entry with the smallest tile that holds the expected tokens of an expert, else that with the largest. Its warps
// share k in tiles of few tokens.
const Entry& tile(const Kernel& kernel, int64_t expected) {
  if (batch_invariant()) return kernel.entries.back();
  for (const Entry& entry : kernel.entries)
    if (expected <= MoeMixedGemmConfig::of(entry).tokens) return entry;
  return kernel.entries.back();
}
#endif

MoeMixedGemmRequest request_of(const MoeMixedGemmArgs& a) {
  return {a.x.dtype(), static_cast<MoeMixedGemmRequest::Format>(a.format)};
}

void moe_mixed_gemm(const Kernel& kernel, const MoeMixedGemmArgs& a) {
  // 1 check
  FI_CHECK(a.format >= kMxfp4 && a.format <= kMxfp8, ValueError, "format must be in 0..3; got %lld",
           static_cast<long long>(a.format));
  const auto format = static_cast<MixedFormat>(a.format);
  Dim m{"rows"}, n{"n"}, k{"k"}, tokens{"tokens"}, experts{"experts"};
  a.x.is({kF16, kBF16}).inner_contiguous().shape(tokens, k);
  a.out.like(a.x).inner_contiguous().shape(m, n);
  FI_CHECK(k % 32 == 0 && k >= 32 && (format != kInt4 || k % 128 == 0), ValueError,
           "x must have a multiple of %d columns; got %s", format == kInt4 ? 128 : 32, a.x.shape_str().c_str());
  Dim packed{format == kMxfp8 ? "k" : "k / 2", k / values_per_byte(format)};
  a.weight.is({kU8, kE4M3}).on(a.x).inner_contiguous().shape(experts, n, packed);
  Dim ends{"experts + 1", experts + 1};
  a.offsets.is({kI32}).on(a.x).contiguous().shape(ends);
  if (a.rows) a.rows.is({kI32}).on(a.x).contiguous().shape(m);
  FI_CHECK(a.rows || tokens == m, ValueError, "x must have the rows of out, %lld, without rows; got %s",
           static_cast<long long>(m), a.x.shape_str().c_str());
  if (a.alpha) {
    a.alpha.is({kF32}).on(a.x).contiguous();
    FI_CHECK(a.alpha.numel() == 1 || a.alpha.numel() == experts, ValueError,
             "alpha must have one element, or one for each of %lld experts; got %s", static_cast<long long>(experts),
             a.alpha.shape_str().c_str());
  }
  FI_CHECK(a.layout == kScales128x4 || a.layout == kScalesLinear, ValueError,
           "layout must be 0 (128x4) or 2 (linear); got %lld", static_cast<long long>(a.layout));
  const int64_t blocks = k / scale_block(format), linear = a.layout == kScalesLinear;
  const int64_t scale_rows = linear ? n : (n + 127) / 128 * 128, scale_columns = linear ? blocks : (blocks + 3) / 4 * 4;
  a.scales.is({format == kInt4 ? kBF16 : kU8}).on(a.x).contiguous();
  FI_CHECK(a.scales.numel() == experts * scale_rows * scale_columns, ValueError,
           "scales must have %lld elements for %lld experts, %lld rows and blocks of %d; got %s",
           static_cast<long long>(experts * scale_rows * scale_columns), static_cast<long long>(experts),
           static_cast<long long>(n), scale_block(format), a.scales.shape_str().c_str());
  FI_CHECK(m < 1 << 30 && n < 1 << 30 && k < 1 << 30, ValueError, "out must be smaller; got %s",
           a.out.shape_str().c_str());
  FI_CHECK(a.x.row_alignment(16) == 16 && a.weight.row_alignment(16) == 16, ValueError,
           "x and weight must have rows that are 16-byte aligned; got strides %lld and %lld: call .contiguous()",
           static_cast<long long>(a.x.stride(0)), static_cast<long long>(a.weight.stride(1)));
  if (m == 0 || n == 0 || experts == 0) return;
  if (kernel.checks_contents(a.x.device())) check_offsets(Integers(kernel, a.offsets), m);

  // 2 shape
  MoeMixedGemmParams p{};
  GemmProblem& q = p.problem;
  q.out = a.out.data();
  q.a = a.x.data();
  q.b = a.weight.data();
  q.row_groups = a.offsets.data<int32_t>();
  q.out_row_stride = a.out.stride(0);
  q.a_row_stride = a.x.stride(0);
  q.b_batch_stride = a.weight.stride(0);
  q.b_row_stride = a.weight.stride(1);
  q.m = static_cast<int32_t>(m);
  q.n = static_cast<int32_t>(n);
  q.k = static_cast<int32_t>(k);
  q.batch = q.matrices = static_cast<int32_t>(experts);
  q.rows = GemmRows::kIndptr;
  p.rows = a.rows ? a.rows.data<int32_t>() : nullptr;
  p.scales = a.scales.data();
  p.alpha = a.alpha ? a.alpha.data<float>() : nullptr;
  p.alpha_stride = a.alpha && a.alpha.numel() > 1;
  p.scale_stride = scale_rows * scale_columns;
  p.scale_columns = static_cast<int32_t>(scale_columns);
  p.layout = static_cast<int32_t>(a.layout);

  // 3 launch
#if FI_CUDA
  const int64_t expected = a.expected_m >= 0 ? a.expected_m : (m + experts - 1) / experts;
  const Entry& entry = tile(kernel, expected);
  const auto config = MoeMixedGemmConfig::of(entry);
  // A tile of weights meets the tokens of its expert one tile after another.
  p.group_m = static_cast<int32_t>((m + config.tokens - 1) / config.tokens);
  const int64_t columns = (n + config.columns - 1) / config.columns;
  const int64_t tiles = (m / config.tokens + std::min<int64_t>(m, experts)) * columns;
  Launch launch{std::min(tiles, kernel.multiprocessors(a.x.device()) * config.ctas)};
  launch.pdl = kernel.pdl(a.enable_pdl);
  kernel.launch(entry, launch, a.x.device(), p);
#else
  if (a.rows && kernel.checks) cpu::check_rows(a.rows, tokens);
  (void)a.expected_m, (void)a.enable_pdl;
  run_cpu(p, format, a.x.dtype());
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::moe_mixed_gemm, fi::request_of)
