// rmsnorm and its residual-add, gemma and fp8 forms: one contract, one launch, and the CPU kernel.
#include "fi/norm/rmsnorm.h"

#include "fi/norm/contract.h"
#include "fi/norm/entry.h"

#if !FI_CUDA
#include <algorithm>
#include <cmath>
#include <vector>

#include "fi/cpu/parallel.h"
#include "fi/cpu/rows.h"
#include "fi/norm/row.h"
#endif

namespace fi {
namespace {

#if !FI_CUDA
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
      const int64_t row = index / p.heads.value, head = index % p.heads.value;
      load(static_cast<const char*>(p.input) + (row * p.input_row + head * p.input_head) * in.bytes(), s.data(), p.d);
      if (p.residual) {
        char* residual = static_cast<char*>(p.residual) + row * p.residual_row * in.bytes();
        load(residual, other.data(), p.d);
        cpu::add_to(s.data(), other.data(), p.d);
        store_in(s.data(), residual, p.d);
      }
      const float r = 1.f / std::sqrt(cpu::squares(s.data(), 0.f, p.d) * p.inverse_d + p.eps);
      cpu::multiply(s.data(), weight.data(), r * out_scale, p.d);
      store_out(s.data(), static_cast<char*>(p.out) + (row * p.out_row + head * p.out_head) * out.bytes(), p.d);
    }
  });
}
#endif

void rmsnorm(const Kernel& kernel, Tensor out, Tensor input, OptionalTensor residual, Tensor weight,
             OptionalTensor scale, double eps, double weight_bias, int64_t enable_pdl) {
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
  const bool quantized = check_norm_output(out, input, scale);
  weight.like(input).inner_contiguous().shape(d);
  if (residual) {
    FI_CHECK(input.ndim() == 2, ValueError, "input must have shape [n, d] when a residual is added; got %s",
             input.shape_str().c_str());
    residual.like(input).inner_contiguous().shape(n, d);
  }
  check_norm_size(input, n * heads, d);
  if (n == 0 || heads == 0 || d == 0) return;

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
  p.rows = static_cast<int32_t>(n * heads);
  p.d = static_cast<int32_t>(d);
  p.heads = divisor(static_cast<uint32_t>(heads));
  p.eps = static_cast<float>(eps);
  p.weight_bias = static_cast<float>(weight_bias);
  p.inverse_d = 1.f / static_cast<float>(p.d);

  // 3 launch
#if FI_CUDA
  const int64_t bytes = input.dtype().bytes();
  int64_t vector = input.alignment(16, {p.input_row, p.input_head}) / bytes;
  vector = std::min(vector, weight.alignment(16, {}) / bytes);
  vector =
      std::min(vector, out.alignment(16 / bytes * out.dtype().bytes(), {p.out_row, p.out_head}) / out.dtype().bytes());
  if (residual) vector = std::min(vector, residual.alignment(16, {p.residual_row}) / bytes);
  const Entry& entry = norm_entry(kernel, p.d, vector);
  kernel.launch(entry, norm_launch(entry, p.rows, p.d, kernel.pdl(enable_pdl)), input.device(), p);
#else
  (void)kernel, (void)enable_pdl;
  run_cpu(p, input.dtype(), out.dtype());
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::rmsnorm, "out", "input", "residual", "weight", "scale", "eps", "weight_bias", "enable_pdl")
