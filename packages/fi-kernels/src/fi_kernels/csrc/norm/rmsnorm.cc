// rmsnorm and its residual-add, gemma and fp8 forms: checks the arguments, launches the CUDA kernel or runs the CPU
// one.
#include "fi/norm/rmsnorm.h"

#include "fi/generated/rmsnorm.h"
#include "fi/norm/norm_contract.h"
#include "fi/norm/norm_launch.h"

#if !FI_CUDA
#include <algorithm>
#include <cmath>
#include <vector>

#include "fi/cpu/parallel.h"
#include "fi/cpu/row_convert.h"
#include "fi/norm/norm_cpu.h"
#endif

namespace fi {
namespace {

#if !FI_CUDA
void run_cpu(const RmsnormParams& p, DType in, DType out) {
  const cpu::LoadRow load = cpu::row_loader(in);
  const cpu::StoreRow store_in = cpu::row_storer(in), store_out = cpu::row_storer(out);
  const float out_factor = out.bits == 8 ? 1.f / *p.scale : 1.f;
  const auto d = static_cast<size_t>(p.d);
  std::vector<float> weight(d);
  load(p.weight, weight.data(), p.d);
  for (float& w : weight) w += p.weight_bias;
  cpu::parallel_for(p.rows, std::max<int64_t>(1, 16384 / p.d), [&](int64_t begin, int64_t end) {
    std::vector<float> s(d), residual_row(d);
    for (int64_t index = begin; index < end; ++index) {
      const int64_t row = index / p.heads.value, head = index % p.heads.value;
      load(static_cast<const char*>(p.input) + (row * p.input_row_stride + head * p.input_head_stride) * in.bytes(),
           s.data(), p.d);
      if (p.residual) {
        char* residual = static_cast<char*>(p.residual) + row * p.residual_row_stride * in.bytes();
        load(residual, residual_row.data(), p.d);
        cpu::add_residual(s.data(), residual_row.data(), p.d);
        store_in(s.data(), residual, p.d);
      }
      const float inv_rms = 1.f / std::sqrt(cpu::sum_of_squares(s.data(), 0.f, p.d) * p.inv_d + p.eps);
      cpu::scale_by_weight(s.data(), weight.data(), inv_rms * out_factor, p.d);
      store_out(s.data(), static_cast<char*>(p.out) + (row * p.out_row_stride + head * p.out_head_stride) * out.bytes(),
                p.d);
    }
  });
}
#endif

void rmsnorm(const Kernel& kernel, const RmsnormArgs& a) {
  // 1 check
  Dim n{"n"}, heads{"heads", 1}, d{"d"};
  FI_CHECK(a.input.ndim() == 2 || a.input.ndim() == 3, ValueError,
           "input must have shape [n, d] or [n, heads, d]; got %s", a.input.shape_str().c_str());
  a.input.is({kF16, kBF16, kF32}).inner_contiguous();
  if (a.input.ndim() == 2) {
    a.input.shape(n, d);
    a.out.shape(n, d);
  } else {
    heads.value = -1;
    a.input.shape(n, heads, d);
    a.out.shape(n, heads, d);
  }
  const bool quantized = check_norm_output(a.out, a.input, a.scale);
  a.weight.like(a.input).inner_contiguous().shape(d);
  if (a.residual) {
    FI_CHECK(a.input.ndim() == 2, ValueError, "input must have shape [n, d] when a residual is added; got %s",
             a.input.shape_str().c_str());
    a.residual.like(a.input).inner_contiguous().shape(n, d);
  }
  check_norm_size(a.input, n * heads, d);
  if (n == 0 || heads == 0 || d == 0) return;

  // 2 shape
  const bool has_heads = a.input.ndim() == 3;
  RmsnormParams p{};
  p.out = a.out.data();
  p.input = a.input.data();
  p.residual = a.residual ? a.residual.data() : nullptr;
  p.weight = a.weight.data();
  p.scale = quantized ? a.scale.data<float>() : nullptr;
  p.out_row_stride = a.out.stride(0);
  p.out_head_stride = has_heads ? a.out.stride(1) : 0;
  p.input_row_stride = a.input.stride(0);
  p.input_head_stride = has_heads ? a.input.stride(1) : 0;
  p.residual_row_stride = a.residual ? a.residual.stride(0) : 0;
  p.rows = static_cast<int32_t>(n * heads);
  p.d = static_cast<int32_t>(d);
  p.heads = divisor(static_cast<uint32_t>(heads));
  p.eps = static_cast<float>(a.eps);
  p.weight_bias = static_cast<float>(a.weight_bias);
  p.inv_d = 1.f / static_cast<float>(p.d);

  // 3 launch
#if FI_CUDA
  const int64_t bytes = a.input.dtype().bytes();
  int64_t vec_size = a.input.alignment(16, {p.input_row_stride, p.input_head_stride}) / bytes;
  vec_size = std::min(vec_size, a.weight.alignment(16, {}) / bytes);
  vec_size =
      std::min(vec_size, a.out.alignment(16 / bytes * a.out.dtype().bytes(), {p.out_row_stride, p.out_head_stride}) /
                             a.out.dtype().bytes());
  if (a.residual) vec_size = std::min(vec_size, a.residual.alignment(16, {p.residual_row_stride}) / bytes);
  const Entry& entry = norm_entry<RmsnormConfig>(kernel, p.d, vec_size);
  kernel.launch(entry, norm_launch<RmsnormConfig>(entry, p.rows, p.d, kernel.pdl(a.enable_pdl)), a.input.device(), p);
#else
  (void)kernel, (void)a.enable_pdl;
  run_cpu(p, a.input.dtype(), a.out.dtype());
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::rmsnorm)
