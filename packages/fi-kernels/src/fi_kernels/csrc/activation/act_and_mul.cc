// silu_and_mul, gelu_and_mul and gelu_tanh_and_mul: one contract, one launch, and the CPU kernel.
#include "fi/activation/act_and_mul.h"

#include <algorithm>

#include "fi/host/op.h"

#if !FI_CUDA
#include "fi/cpu/math.h"
#include "fi/cpu/parallel.h"
#include "fi/cpu/rows.h"
#endif

namespace fi {
namespace {

#if FI_CUDA
// Entries in order of preference; config = {activation, elements a vector, vectors a thread, blocks an SM it is worth}.
const Entry& entry_for(const Kernel& kernel, int64_t act, int64_t vector, int64_t elements, DLDevice device) {
  for (const Entry& entry : kernel.entries) {
    const int64_t elements_a_block = entry.config[1] * entry.config[2] * entry.threads;
    if (entry.config[0] == act && entry.config[1] <= vector &&
        elements / elements_a_block >= entry.config[3] * Kernel::multiprocessors(device))
      return entry;
  }
  raise("RuntimeError", "no entry of %s takes act = %lld", kernel.spec.c_str(), static_cast<long long>(act));
}
#else
constexpr int64_t kChunk = 1024;  // floats of gate and up that stay in L1

FI_CLONES void silu(float* gate, const float* up, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) gate[i] = cpu::silu(gate[i]) * up[i];
}

FI_CLONES void gelu(float* gate, const float* up, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float x = gate[i], a = cpu::detail::magnitude(x);
    const float tail = cpu::detail::at_most(a, 200.f) * cpu::exp2(log2_gelu_tail(a));
    gate[i] = (cpu::detail::at_least(x, 0.f) - tail) * up[i];
  }
}

FI_CLONES void gelu_by_erf(float* gate, const float* up, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float x = cpu::detail::at_least(gate[i], -200.f);
    gate[i] = 0.5f * x * (1.f + cpu::erf(gate[i] * 0.7071067811865476f)) * up[i];
  }
}

FI_CLONES void gelu_tanh(float* gate, const float* up, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float x = gate[i];
    // 0.5 (1 + tanh(u)) = sigmoid(2 u), without the cancellation for x < 0.
    const float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    gate[i] = cpu::detail::at_least(x, -200.f) * cpu::sigmoid(2.f * u) * up[i];
  }
}

void run_cpu(const ActAndMulParams& p, int64_t act, int64_t rows, DType dtype) {
  const cpu::LoadRow load = cpu::row_loader(dtype);
  const cpu::StoreRow store = cpu::row_storer(dtype);
  const auto apply = act == kSilu ? silu : act == kGeluTanh ? gelu_tanh : dtype == kF32 ? gelu_by_erf : gelu;
  const int64_t chunks = (p.h + kChunk - 1) / kChunk, bytes = dtype.bytes();
  cpu::parallel_for(rows * chunks, 4, [&](int64_t begin, int64_t end) {
    float gate[kChunk], up[kChunk];
    for (int64_t index = begin; index < end; ++index) {
      const int64_t row = index / chunks, first = index % chunks * kChunk, n = std::min(kChunk, p.h - first);
      const char* input = static_cast<const char*>(p.input) + (row * p.input_row + first) * bytes;
      load(input, gate, n);
      load(input + p.h * bytes, up, n);
      apply(gate, up, n);
      store(gate, static_cast<char*>(p.out) + (row * p.out_row + first) * bytes, n);
    }
  });
}
#endif

// [..., size] as rows: the leading dimensions, and the stride between rows in elements. Two dimensions may be strided.
int64_t rows_of(const Tensor& tensor, int64_t* stride) {
  if (tensor.ndim() == 2) {
    tensor.inner_contiguous();
    *stride = tensor.stride(0);
    return tensor.size(0);
  }
  tensor.contiguous();
  *stride = tensor.size(-1);
  int64_t rows = 1;
  for (int i = 0; i + 1 < tensor.ndim(); ++i) rows *= tensor.size(i);
  return rows;
}

void act_and_mul(const Kernel& kernel, Tensor out, Tensor input, int64_t act, int64_t enable_pdl) {
  // 1 check
  input.is({kF16, kBF16, kF32});
  FI_CHECK(input.ndim() >= 1 && input.size(-1) % 2 == 0, ValueError,
           "input must have shape [..., 2 h], the last dimension even; got %s", input.shape_str().c_str());
  FI_CHECK(act >= kSilu && act <= kGeluTanh, ValueError, "act must be 0 (silu), 1 (gelu) or 2 (gelu_tanh); got %lld",
           static_cast<long long>(act));
  out.like(input);
  const int64_t h = input.size(-1) / 2;
  bool fits = out.ndim() == input.ndim() && out.size(-1) == h;
  for (int i = 0; fits && i + 1 < input.ndim(); ++i) fits = out.size(i) == input.size(i);
  FI_CHECK(fits, ValueError, "out must have the shape of input with the last dimension halved, input being %s; got %s",
           input.shape_str().c_str(), out.shape_str().c_str());

  // 2 shape
  ActAndMulParams p{};
  const int64_t rows = rows_of(input, &p.input_row);
  rows_of(out, &p.out_row);
  p.out = out.data();
  p.input = input.data();
  p.h = h;
  if (rows == 0 || h == 0) return;

  // 3 launch
#if FI_CUDA
  const int64_t bytes = input.dtype().bytes();
  int64_t vector = std::min(input.alignment(16, {p.input_row, h}), out.alignment(16, {p.out_row})) / bytes;
  while (h % vector) vector /= 2;
  const Entry& entry = entry_for(kernel, act, vector, rows * h, input.device());
  const int64_t vectors_a_row = h / entry.config[1], vectors_a_block = entry.config[2] * entry.threads;
  const int64_t most_rows = 0x7fffffff / vectors_a_row;  // what the kernel's 31-bit index reaches
  FI_CHECK(most_rows > 0, ValueError, "input is too wide: got shape %s", input.shape_str().c_str());
  p.vectors_a_row = divisor(static_cast<uint32_t>(vectors_a_row));
  for (int64_t first = 0; first < rows; first += most_rows) {
    const int64_t vectors = std::min(most_rows, rows - first) * vectors_a_row;
    p.vectors = static_cast<uint32_t>(vectors);
    p.out = out.data<char>() + first * p.out_row * bytes;
    p.input = input.data<char>() + first * p.input_row * bytes;
    Launch launch{(vectors + vectors_a_block - 1) / vectors_a_block};
    launch.pdl = kernel.pdl(enable_pdl);
    kernel.launch(entry, launch, input.device(), p);
  }
#else
  (void)kernel, (void)enable_pdl;
  run_cpu(p, act, rows, input.dtype());
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::act_and_mul, "out", "input", "act", "enable_pdl")
