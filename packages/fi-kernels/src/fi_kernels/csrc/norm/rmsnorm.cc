// rmsnorm and its residual-add, gemma and fp8 forms: one contract, one launch, and the CPU kernel.
#include "fi/norm/rmsnorm.h"

#include "fi/host/op.h"

#if !FI_CUDA
#include <algorithm>
#include <cmath>
#include <vector>

#include "fi/cpu/parallel.h"
#include "fi/cpu/rows.h"
#endif

namespace fi {
namespace {

#if FI_CUDA
// Entries in order of preference; config = {kind, vector elements, vectors a thread or lanes a row, largest d}.
enum Kind { kLanes = 0, kBlock = 1, kLoop = 2 };

void launch(const Kernel& kernel, const RmsnormParams& p, int64_t vector, DLDevice device, bool pdl) {
  for (const Entry& entry : kernel.entries) {
    const int64_t kind = entry.config[0], vec = entry.config[1], count = entry.config[2], largest = entry.config[3];
    if (vec > vector || p.d % vec || p.d > largest) continue;
    Launch config{p.rows};
    config.pdl = pdl;
    if (kind == kLanes) config.grid_x = (p.rows + entry.threads / count - 1) / (entry.threads / count);
    if (kind == kBlock) {
      const int64_t lanes = (p.d + vec * count - 1) / (vec * count);
      config.threads = (lanes + 31) / 32 * 32;
    }
    return kernel.launch(entry, config, device, p);
  }
  raise("RuntimeError", "no entry for d = %d", p.d);
}
#else
FI_CLONES float add(float* s, const float* r, int32_t d) {
  float sum = 0.f;
#pragma omp simd reduction(+ : sum)
  for (int32_t i = 0; i < d; ++i) {
    s[i] += r[i];
    sum += s[i] * s[i];
  }
  return sum;
}

FI_CLONES float squares(const float* s, int32_t d) {
  float sum = 0.f;
#pragma omp simd reduction(+ : sum)
  for (int32_t i = 0; i < d; ++i) sum += s[i] * s[i];
  return sum;
}

FI_CLONES void scale(float* s, const float* weight, float r, float out_scale, int32_t d) {
#pragma omp simd
  for (int32_t i = 0; i < d; ++i) s[i] = s[i] * r * weight[i] * out_scale;
}

void run_cpu(const RmsnormParams& p, DType in, DType out) {
  const cpu::LoadRow load = cpu::row_loader(in);
  const cpu::StoreRow store_in = cpu::row_storer(in), store_out = cpu::row_storer(out);
  const float out_scale = out.bits == 8 ? 1.f / *p.scale : 1.f;
  const auto d = static_cast<size_t>(p.d);
  std::vector<float> weight(d);
  load(p.weight, weight.data(), p.d);
  for (float& w : weight) w += p.weight_bias;
  cpu::parallel_for(p.rows, std::max<int64_t>(1, 16384 / p.d), [&](int64_t begin, int64_t end) {
    std::vector<float> s(d), other(d);
    for (int64_t index = begin; index < end; ++index) {
      const int64_t row = index / p.heads, head = index % p.heads;
      float sum;
      load(static_cast<const char*>(p.input) + (row * p.input_row + head * p.input_head) * in.bytes(), s.data(), p.d);
      if (p.residual) {
        char* residual = static_cast<char*>(p.residual) + row * p.residual_row * in.bytes();
        load(residual, other.data(), p.d);
        sum = add(s.data(), other.data(), p.d);
        store_in(s.data(), residual, p.d);
      } else {
        sum = squares(s.data(), p.d);
      }
      scale(s.data(), weight.data(), 1.f / std::sqrt(sum / static_cast<float>(p.d) + p.eps), out_scale, p.d);
      store_out(s.data(), static_cast<char*>(p.out) + (row * p.out_row + head * p.out_head) * out.bytes(), p.d);
    }
  });
}
#endif

void rmsnorm(const Kernel& kernel, Tensor out, Tensor input, OptionalTensor residual, Tensor weight, OptionalTensor scale, double eps,
             double weight_bias, int64_t enable_pdl) {
  // 1 check
  Dim n{"n"}, heads{"heads", 1}, d{"d"};
  FI_CHECK(input.ndim() == 2 || input.ndim() == 3, ValueError, "input must have shape [n, d] or [n, heads, d]; got %s",
           input.shape_str().c_str());
  input.is({kF16, kBF16, kF32}).inner_contiguous();
  if (input.ndim() == 2) {
    input.shape(n, d);
    out.shape(n, d);
  } else {
    heads.value = -1;
    input.shape(n, heads, d);
    out.shape(n, heads, d);
  }
  const bool quantized = out.dtype().bits == 8;
  out.on(input).inner_contiguous();
  if (quantized) {
    out.is({kE4M3, kE5M2});
    FI_CHECK(scale, TypeError, "scale must be a float32 tensor with one element when out is fp8; got None");
    scale.is({kF32}).on(input);
    FI_CHECK(scale.numel() == 1, ValueError, "scale must have one element; got shape %s", scale.shape_str().c_str());
  } else {
    out.like(input);
  }
  weight.like(input).inner_contiguous().shape(d);
  if (residual) residual.like(input).inner_contiguous().shape(n, d);
  FI_CHECK(d <= 0x7fffffff && heads <= 0x7fffffff, ValueError, "input is too wide: %s", input.shape_str().c_str());

  // 2 shape
  const bool three = input.ndim() == 3;
  RmsnormParams p{};
  p.out = out.data();
  p.input = input.data();
  p.residual = residual ? residual.data() : nullptr;
  p.weight = weight.data();
  p.scale = quantized ? scale.data<float>() : nullptr;
  p.out_row = out.stride(0);
  p.out_head = three ? out.stride(1) : 0;
  p.input_row = input.stride(0);
  p.input_head = three ? input.stride(1) : 0;
  p.residual_row = residual ? residual.stride(0) : 0;
  p.rows = n * heads;
  p.heads = static_cast<int32_t>(heads);
  p.d = static_cast<int32_t>(d);
  p.eps = static_cast<float>(eps);
  p.weight_bias = static_cast<float>(weight_bias);
  if (p.rows == 0 || p.d == 0) return;

  // 3 launch
#if FI_CUDA
  const int64_t bytes = input.dtype().bytes();
  int64_t vector = input.alignment(16, {p.input_row, p.input_head}) / bytes;
  vector = std::min(vector, weight.alignment(16, {}) / bytes);
  vector = std::min(vector, out.alignment(16 / bytes * out.dtype().bytes(), {p.out_row, p.out_head}) / out.dtype().bytes());
  if (residual) vector = std::min(vector, residual.alignment(16, {p.residual_row}) / bytes);
  launch(kernel, p, vector, input.device(), kernel.pdl(enable_pdl));
#else
  (void)kernel, (void)enable_pdl;
  run_cpu(p, input.dtype(), out.dtype());
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::rmsnorm, "out", "input", "residual", "weight", "scale", "eps", "weight_bias", "enable_pdl")
