// gemm_fp32_weights: checks the arguments, splits k, launches the CUDA kernel or runs the CPU one.
#include "fi/gemm/gemm_fp32_weights.h"

#include <algorithm>

#include "fi/generated/gemm_fp32_weights.h"
#include "fi/host/kernel.h"

#if !FI_CUDA
#include "fi/cpu/aligned_floats.h"
#include "fi/cpu/products.h"
#include "fi/cpu/row_convert.h"
#endif

namespace fi {
namespace {

constexpr int64_t kLimit = int64_t{1} << 30, kMostTokens = int64_t{65535} * kFp32WeightsTokens;

int64_t ceil_of(int64_t a, int64_t b) { return (a + b - 1) / b; }

#if FI_CUDA
const Entry& tile(const Kernel& kernel, const GemmFp32WeightsParams& p, const GemmFp32WeightsArgs& a) {
  const bool vectors =
      p.k % 4 == 0 && a.b.alignment(16, {p.b_row_stride}) == 16 && a.a.alignment(8, {p.a_row_stride}) == 8;
  return kernel.first_entry([&](const Entry& e) { return vectors || GemmFp32WeightsConfig::of(e).elements == 1; });
}

void launch(const Kernel& kernel, const GemmFp32WeightsParams& p, const GemmFp32WeightsArgs& a) {
  const DLDevice device = a.a.device();
  const Entry& entry = tile(kernel, p, a);
  const int64_t tiles = ceil_of(p.n, kFp32WeightsRows), steps = ceil_of(p.k, kFp32WeightsWarps * kFp32WeightsBlockK);
  // CTAs of a cluster share k while SMs are left over. They follow n, k and the card, not m.
  const int64_t most = std::min(GemmFp32WeightsConfig::of(entry).ctas, steps);
  unsigned ctas = 1;
  while (2 * ctas <= most && 2 * ctas * tiles <= kernel.multiprocessors(device)) ctas *= 2;
  Launch launch{tiles * ctas, ceil_of(p.m, kFp32WeightsTokens)};
  launch.cluster = ctas;
  launch.pdl = kernel.pdl(a.enable_pdl);
  kernel.launch(entry, launch, device, p);
}
#else
// The products of fp32 by FMA are exact, so a weight needs no terms. The order of a sum depends on k only.
void run_cpu(const GemmFp32WeightsParams& p) {
  constexpr int64_t kBlock = 32, kTokens = 512;  // rows of b that stay in L2, tokens that are converted at once
  const int64_t k = cpu::padded(p.k);
  const cpu::AlignedFloats tokens(std::min<int64_t>(p.m, kTokens) * k);
  for (int64_t first = 0; first < p.m; first += kTokens) {
    const int64_t count = std::min(kTokens, p.m - first);
    for (int64_t i = 0; i < count; ++i)
      cpu::row_loader(kBF16)(p.a + (first + i) * p.a_row_stride, tokens.data() + i * k, p.k);
    cpu::parallel_for(ceil_of(p.n, kBlock), std::max<int64_t>(1, 65536 / (kBlock * k)),
                      [&](int64_t begin, int64_t end) {
                        const cpu::AlignedFloats rows(k == p.k ? 0 : kBlock * k);
                        for (int64_t row = begin * kBlock; row < std::min<int64_t>(end * kBlock, p.n); row += kBlock) {
                          const int64_t columns = std::min(kBlock, p.n - row);
                          const float* b = p.b + row * p.b_row_stride;
                          for (int64_t i = 0; i < columns && k != p.k; ++i)
                            std::copy_n(b + i * p.b_row_stride, p.k, rows.data() + i * k);
                          float* out = p.out + first * p.out_row_stride + row;
                          cpu::dots({{tokens.data(), k, 1},
                                     k == p.k ? b : rows.data(),
                                     out,
                                     k == p.k ? p.b_row_stride : k,
                                     p.out_row_stride,
                                     count,
                                     columns,
                                     k,
                                     false});
                        }
                      });
  }
}
#endif

void gemm_fp32_weights(const Kernel& kernel, const GemmFp32WeightsArgs& a) {
  // 1 check
  Dim m{"m"}, n{"n"}, k{"k"};
  a.a.is({kBF16}).shape(m, k).inner_contiguous();
  a.b.is({kF32}).on(a.a).shape(n, k).inner_contiguous();
  a.out.is({kF32}).on(a.a).shape(m, n).inner_contiguous();
  FI_CHECK(m <= kMostTokens && n <= kLimit && k >= 1 && k <= kLimit, ValueError,
           "a and b must have at most %lld and 2^30 rows, and 1 to 2^30 columns; got a %s, b %s",
           static_cast<long long>(kMostTokens), a.a.shape_str().c_str(), a.b.shape_str().c_str());
  if (m == 0 || n == 0) return;

  // 2 shape
  GemmFp32WeightsParams p{};
  p.out = a.out.data<float>();
  p.a = static_cast<const uint16_t*>(a.a.data());
  p.b = a.b.data<const float>();
  p.out_row_stride = a.out.stride(0);
  p.a_row_stride = a.a.stride(0);
  p.b_row_stride = a.b.stride(0);
  p.m = static_cast<int32_t>(m);
  p.n = static_cast<int32_t>(n);
  p.k = static_cast<int32_t>(k);

  // 3 launch
#if FI_CUDA
  launch(kernel, p, a);
#else
  (void)kernel, (void)a.enable_pdl;
  run_cpu(p);
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::gemm_fp32_weights)
