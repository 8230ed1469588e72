// silu_and_mul, gelu_and_mul and gelu_tanh_and_mul: checks the arguments, launches the CUDA kernel or runs the CPU one.
#include "fi/activation/act_and_mul.h"

#include "fi/generated/act_and_mul.h"
#include "fi/host/tile.h"

#if !FI_CUDA
#include "fi/cpu/math.h"
#include "fi/cpu/row_convert.h"
#endif

namespace fi {
namespace {

ActAndMulRequest request_of(const ActAndMulArgs& a) { return {a.input.dtype()}; }

#if FI_CUDA
const Entry& tile(const Kernel& kernel, const ActAndMulArgs& a, int64_t elements, int64_t vec) {
  const int64_t multiprocessors = kernel.multiprocessors(a.input.device());
  return kernel.first_entry([&](const Entry& entry) {
    const auto config = ActAndMulConfig::of(entry);
    const int64_t ctas = elements / (config.vec_size * config.vectors_per_thread * entry.threads);
    return config.act == a.act && config.vec_size <= vec && ctas >= config.min_ctas_per_sm * multiprocessors;
  });
}
#else
template <Activation kAct, bool kExact = true>
FI_CLONES void apply(const float* gate, const float* up, float* out, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = activate<CpuMath, kAct, kExact>(gate[i]) * up[i];
}

void run_cpu(const ActAndMulParams& p, int64_t rows, const ActAndMulArgs& a) {
  const DType dtype = a.input.dtype();
  const auto gelu = dtype == kF32 ? apply<kGelu> : apply<kGelu, false>;
  const auto run = a.act == kSilu ? apply<kSilu> : a.act == kGelu ? gelu : apply<kGeluTanh>;
  cpu::for_pieces(rows, p.h, 2, [&](int64_t row, int64_t first, int64_t n, float* scratch) {
    const int64_t at = row * p.input_row_stride + first;
    const float* gate = cpu::floats_of(dtype, a.input.at(at), scratch, n);
    const float* up = cpu::floats_of(dtype, a.input.at(at + p.h), scratch + cpu::kPiece, n);
    void* out = a.out.at(row * p.out_row_stride + first);
    run(gate, up, dtype == kF32 ? static_cast<float*>(out) : scratch, n);
    if (dtype != kF32) cpu::row_storer(dtype)(scratch, out, n);
  });
}
#endif

void act_and_mul(const Kernel& kernel, const ActAndMulArgs& a) {
  // 1 check
  a.input.is({kF16, kBF16, kF32});
  FI_CHECK(a.input.ndim() >= 1 && a.input.size(-1) % 2 == 0, ValueError,
           "input must have shape [..., 2 h], the last dimension even; got %s", a.input.shape_str().c_str());
  FI_CHECK(a.act >= kSilu && a.act <= kGeluTanh, ValueError,
           "act must be 0 (silu), 1 (gelu) or 2 (gelu_tanh); got %lld", static_cast<long long>(a.act));
  const Dim h{"h", a.input.size(-1) / 2};
  a.out.like(a.input).shape_of(a.input, h);

  // 2 shape
  ActAndMulParams p{a.out.data(), a.input.data(), 0, 0, h, 0, {}};
  const int64_t rows = a.input.rows(&p.input_row_stride);
  a.out.rows(&p.out_row_stride);
  if (rows == 0 || h == 0) return;

  // 3 launch
#if FI_CUDA
  const Entry& entry = tile(kernel, a, rows * h, vec_size(h, {a.input, a.out}));
  const auto config = ActAndMulConfig::of(entry);
  launch_rows(kernel, entry, rows, h / config.vec_size, config.vectors_per_thread, kernel.pdl(a.enable_pdl), a.input,
              [&](int64_t first, uint32_t vectors) {
                p.out = a.out.at(first * p.out_row_stride), p.input = a.input.at(first * p.input_row_stride);
                p.vectors = vectors, p.vectors_per_row = divisor(static_cast<uint32_t>(h / config.vec_size));
                return p;
              });
#else
  (void)kernel, run_cpu(p, rows, a);
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::act_and_mul, fi::request_of)
