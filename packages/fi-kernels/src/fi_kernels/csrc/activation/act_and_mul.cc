// silu_and_mul, gelu_and_mul and gelu_tanh_and_mul: checks the arguments, launches the CUDA kernel or runs the CPU one.
#include "fi/activation/act_and_mul.h"

#include <algorithm>

#include "fi/generated/act_and_mul.h"

#if !FI_CUDA
#include "fi/cpu/math.h"
#include "fi/cpu/parallel.h"
#include "fi/cpu/row_convert.h"
#endif

namespace fi {
namespace {

#if !FI_CUDA
constexpr int64_t kChunk = 1024;  // elements per chunk: the fp32 buffers of gate and up (4 KB each) stay in L1

// gate = act(gate) * up. The lower bound of x prevents -inf * 0: the limit at -inf is -0.
FI_CLONES void apply(Activation act, bool exact, float* gate, const float* up, int64_t n) {
  using cpu::detail::at_least, cpu::detail::at_most, cpu::detail::magnitude;
  if (act == kSilu) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) gate[i] = cpu::silu(gate[i]) * up[i];
  } else if (act == kGeluTanh) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i)
      gate[i] = at_least(gate[i], -200.f) * cpu::sigmoid(gelu_sigmoid_argument(gate[i])) * up[i];
  } else if (exact) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i)
      gate[i] = 0.5f * at_least(gate[i], -200.f) * (1.f + cpu::erf(gate[i] * 0.7071067811865476f)) * up[i];
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      const float a = magnitude(gate[i]);
      gate[i] = (at_least(gate[i], 0.f) - at_most(a, 200.f) * cpu::exp2(log2_gelu_tail(a))) * up[i];
    }
  }
}

void run_cpu(const ActAndMulParams& p, int64_t rows, Activation act, DType dtype) {
  const cpu::LoadRow load = cpu::row_loader(dtype);
  const cpu::StoreRow store = cpu::row_storer(dtype);
  const int64_t chunks = (p.h + kChunk - 1) / kChunk, bytes = dtype.bytes();
  cpu::parallel_for(rows * chunks, 4, [&](int64_t begin, int64_t end) {
    float gate[kChunk], up[kChunk];
    for (int64_t index = begin; index < end; ++index) {
      const int64_t row = index / chunks, first = index % chunks * kChunk, n = std::min(kChunk, p.h - first);
      const char* input = static_cast<const char*>(p.input) + (row * p.input_row_stride + first) * bytes;
      load(input, gate, n);
      load(input + p.h * bytes, up, n);
      apply(act, dtype == kF32, gate, up, n);
      store(gate, static_cast<char*>(p.out) + (row * p.out_row_stride + first) * bytes, n);
    }
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
  a.out.like(a.input);
  const int64_t h = a.input.size(-1) / 2;
  bool fits = a.out.ndim() == a.input.ndim() && a.out.size(-1) == h;
  for (int i = 0; fits && i + 1 < a.input.ndim(); ++i) fits = a.out.size(i) == a.input.size(i);
  FI_CHECK(fits, ValueError, "out must have the shape of input with the last dimension halved, input being %s; got %s",
           a.input.shape_str().c_str(), a.out.shape_str().c_str());

  // 2 shape
  ActAndMulParams p{};
  const int64_t rows = a.input.rows(&p.input_row_stride);
  a.out.rows(&p.out_row_stride);
  p.out = a.out.data();
  p.input = a.input.data();
  p.h = h;
  if (rows == 0 || h == 0) return;

  // 3 launch
#if FI_CUDA
  const int64_t bytes = a.input.dtype().bytes();
  int64_t vec_size =
      std::min(a.input.alignment(16, {p.input_row_stride, h}), a.out.alignment(16, {p.out_row_stride})) / bytes;
  while (h % vec_size) vec_size /= 2;
  const int64_t multiprocessors = kernel.multiprocessors(a.input.device());
  const Entry& entry = kernel.first_entry([&](const Entry& candidate) {
    const auto config = ActAndMulConfig::of(candidate);
    const int64_t ctas = rows * h / (config.vec_size * config.vectors_per_thread * candidate.threads);
    return config.act == a.act && config.vec_size <= vec_size && ctas >= config.min_ctas_per_sm * multiprocessors;
  });
  const auto config = ActAndMulConfig::of(entry);
  const int64_t vectors_per_row = h / config.vec_size, vectors_per_cta = config.vectors_per_thread * entry.threads;
  const int64_t max_rows = 0x7fffffff / vectors_per_row;  // per launch: the kernel indexes vectors with 31 bits
  FI_CHECK(max_rows > 0, ValueError, "input is too wide: got shape %s", a.input.shape_str().c_str());
  p.vectors_per_row = divisor(static_cast<uint32_t>(vectors_per_row));
  for (int64_t first = 0; first < rows; first += max_rows) {
    const int64_t vectors = std::min(max_rows, rows - first) * vectors_per_row;
    p.vectors = static_cast<uint32_t>(vectors);
    p.out = a.out.data<char>() + first * p.out_row_stride * bytes;
    p.input = a.input.data<char>() + first * p.input_row_stride * bytes;
    Launch launch{(vectors + vectors_per_cta - 1) / vectors_per_cta};
    launch.pdl = kernel.pdl(a.enable_pdl);
    kernel.launch(entry, launch, a.input.device(), p);
  }
#else
  (void)kernel, (void)a.enable_pdl;
  run_cpu(p, rows, static_cast<Activation>(a.act), a.input.dtype());
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::act_and_mul)
