// moe_gated_gemm: checks the arguments, launches the CUDA kernel or runs the CPU one.
#include "fi/fused_moe/moe_gated_gemm.h"

#include <algorithm>

#include "fi/gemm/gemm_operand.h"
#include "fi/gemm/gemm_plan.h"
#include "fi/generated/moe_gated_gemm.h"
#include "fi/host/contents.h"

#if !FI_CUDA
#include <vector>

#include "fi/find_segment.h"
#include "fi/fused_moe/moe_activation_cpu.h"
#include "fi/gemm/gemm_cpu.h"
#endif

namespace fi {
namespace {

constexpr int64_t kBlock = 128;  // columns, and rows of weights, that share a scale

#if !FI_CUDA
void run_cpu(const MoeGatedGemmParams& params, const MoeGatedGemmArgs& a) {
  GemmProblem p = params.gemm.problem;
  const int64_t width = p.n / 2, rows = std::min(p.m, p.row_groups[p.batch]);
  std::vector<float> projected(static_cast<size_t>(p.m) * static_cast<size_t>(p.n));
  p.out = projected.data();
  p.out_row_stride = p.n;
  cpu::gemm(p, a.x.dtype(), a.x.dtype(), kF32, batch_invariant());
  const cpu::LoadRow load_bias = cpu::row_loader(a.bias ? a.bias.dtype() : kF32);
  const cpu::StoreRow store = cpu::row_storer(a.out.dtype());
  const cpu::ActivateRow activate = cpu::row_activation(a.activation);
  cpu::for_rows(rows, 4 * width, 3 * width, [&](int64_t row, float* x) {
    float *u = projected.data() + row * p.n, *bias = x + width;
    const int32_t e = find_segment(p.row_groups, p.batch, row);
    if (params.bias) {
      load_bias(a.bias.at(e * params.bias_row_stride), bias, p.n);
      for (int64_t i = 0; i < p.n; ++i) u[i] += bias[i];
    }
    if (params.delta) {
      cpu::row_loader(a.delta.dtype())(a.delta.at(row * params.delta_row_stride), bias, p.n);
      for (int64_t i = 0; i < p.n; ++i) u[i] += bias[(i + width) % p.n];
    }
    const ExpertConstants& c = params.constants;
    std::copy(u, u + width, x);
    activate(x, u + width,
             {params.alpha ? params.alpha[e] : c.alpha, params.beta ? params.beta[e] : c.beta,
              params.limit ? params.limit[e] : c.limit},
             width);
    if (params.out_scale)
      cpu::quantize_blocks(x, a.out.at(row * a.out.stride(0)), params.out_scale + row * (width / kBlock), width);
    else
      store(x, a.out.at(row * a.out.stride(0)), width);
  });
}
#endif

MoeGatedGemmRequest request_of(const MoeGatedGemmArgs& a) {
  using Scales = MoeGatedGemmRequest::Scales;
  const bool copied = a.x_scale && a.x_scale.row_alignment(16) == 16;  // four of a row
  return {a.x.dtype(), static_cast<MoeGatedGemmRequest::Activation>(a.activation),
          copied ? Scales::kRowBlocks : Scales::kBlocks};
}

void moe_gated_gemm(const Kernel& kernel, const MoeGatedGemmArgs& a) {
  // 1 check
  Dim rows{"rows"}, width{"width"}, k{"k"}, experts{"experts"};
  a.x.is({kF16, kBF16, kE4M3}).inner_contiguous().shape(rows, k);
  a.out.like(a.x).inner_contiguous().shape(rows, width);
  Dim columns{"2 * width", 2 * width};
  a.weight.like(a.x).inner_contiguous().shape(experts, columns, k);
  Dim ends{"experts + 1", experts + 1};
  a.offsets.is({kI32}).on(a.x).contiguous().shape(ends);
  const bool fp8 = a.x.dtype() == kE4M3;
  FI_CHECK(is_gated(static_cast<ExpertActivation>(a.activation)), ValueError,
           "activation must be one of two projections; got %lld", static_cast<long long>(a.activation));
  FI_CHECK(fp8 == bool{a.x_scale} && fp8 == bool{a.weight_scale} && fp8 == bool{a.out_scale}, ValueError,
           "out_scale, x_scale and weight_scale must be given for float8_e4m3fn and for nothing else; got %s and "
           "out_scale %s, x_scale %s, weight_scale %s",
           a.x.dtype().str().c_str(), a.out_scale ? "given" : "None", a.x_scale ? "given" : "None",
           a.weight_scale ? "given" : "None");
  Dim blocks{"width / 128", width / kBlock}, k_blocks{"k / 128", k / kBlock};
  Dim row_blocks{"2 * width / 128", 2 * width / kBlock};
  if (fp8) {
    FI_CHECK(width % kBlock == 0 && k % kBlock == 0 && k > 0, ValueError,
             "width and k must be multiples of 128; got weight %s", a.weight.shape_str().c_str());
    a.out_scale.is({kF32}).on(a.x).contiguous().shape(rows, blocks);
    a.x_scale.is({kF32}).on(a.x).contiguous().shape(rows, k_blocks);
    a.weight_scale.is({kF32}).on(a.x).shape(experts, row_blocks, k_blocks);
  }
  if (a.bias) {
    if (a.bias.dtype() != kF32) FI_CHECK(!fp8, TypeError, "bias must be float32; got %s", a.bias.dtype().str().c_str());
    if (a.bias.dtype() != kF32) a.bias.like(a.x);
    a.bias.on(a.x).inner_contiguous().shape(experts, columns);
  }
  if (a.delta) {
    a.delta.is({kBF16, kF16}).on(a.x).inner_contiguous().shape(rows, columns);
    if (!fp8) a.delta.like(a.x);
  }
  for (const OptionalTensor& constant : {a.alpha, a.beta, a.limit})
    if (constant) constant.is({kF32}).on(a.x).contiguous().shape(experts);
  FI_CHECK(rows < 1 << 24 && width < 1 << 24 && k >= 1 && k < 1 << 24 && experts < 1 << 24, ValueError,
           "x and weight must have fewer than 2^24 rows, columns and experts, and at least one column; got x %s, "
           "weight %s",
           a.x.shape_str().c_str(), a.weight.shape_str().c_str());
  for (const Tensor* t : {&a.out, &a.x, &a.weight})
    FI_CHECK(t->row_alignment(16) == 16, ValueError,
             "%s must have rows that are 16-byte aligned; got strides %lld, %lld", t->name(),
             static_cast<long long>(t->stride(0)), static_cast<long long>(t->stride(-2)));
  if (rows == 0 || width == 0 || experts == 0) return;
  if (kernel.checks_contents(a.x.device())) check_offsets(Integers(kernel, a.offsets), rows);

  // 2 shape
  MoeGatedGemmParams params{};
  const auto floats = [](const OptionalTensor& t) { return t ? t.data<float>() : nullptr; };
  params.out_scale = floats(a.out_scale);
  params.bias = a.bias ? a.bias.data() : nullptr;
  params.bias_row_stride = a.bias ? a.bias.stride(0) : 0;
  params.bias_is_float = a.bias && a.bias.dtype() == kF32;
  params.delta = a.delta ? a.delta.data() : nullptr;
  params.delta_row_stride = a.delta ? a.delta.stride(0) : 0;
  params.delta_is_half = a.delta && a.delta.dtype() == kF16;
  params.alpha = floats(a.alpha);
  params.beta = floats(a.beta);
  params.limit = floats(a.limit);
  params.constants = {static_cast<float>(a.alpha_value), static_cast<float>(a.beta_value),
                      static_cast<float>(a.limit_value)};
  GemmProblem& p = params.gemm.problem;
  p.out = a.out.data();
  p.a = a.x.data();
  p.b = a.weight.data();
  p.row_groups = a.offsets.data<int32_t>();
  p.out_row_stride = a.out.stride(0);
  p.a_row_stride = a.x.stride(0);
  p.b_batch_stride = a.weight.stride(0);
  p.b_row_stride = a.weight.stride(1);
  p.b_k_stride = 1;
  p.m = static_cast<int32_t>(rows);
  p.n = static_cast<int32_t>(columns);
  p.k = static_cast<int32_t>(k);
  p.batch = p.matrices = static_cast<int32_t>(experts);
  p.a_scale_rows = p.b_scale_rows = 1;
  p.rows = GemmRows::kIndptr;
  if (fp8) {
    p.a_scale = a.x_scale.data<float>();
    p.b_scale = a.weight_scale.data<float>();
    p.a_scale_k_stride = 1;
    p.a_scale_row_stride = k_blocks;
    p.b_scale_batch_stride = a.weight_scale.stride(0);
    p.b_scale_row_stride = a.weight_scale.stride(1);
    p.b_scale_k_stride = a.weight_scale.stride(2);
    p.b_scale_rows = static_cast<int32_t>(kBlock);
  }

  // 3 launch
#if FI_CUDA
  const int64_t bytes = a.x.dtype().bytes();
  const int64_t expected = a.expected_m >= 0 ? std::max<int64_t>(a.expected_m, 1) : gemm_ceil(rows, experts);
  // A tile stores half as many columns as it has.
  const GemmShape shape{expected, columns, k, experts, bytes, bytes / 2, true};
  const GemmCard card = card_of(kernel, a.x.device());
  const auto clocks = [&](const GemmChoice<MoeGatedGemmConfig>& choice) {
    const MoeGatedGemmConfig& t = choice.config;
    return choice.transposed ? -1.0 : gemm_cost(shape, {t.rows, t.columns, t.k_block_clocks}, card);
  };
  const auto [entry, t, splits, transposed] = cheapest_entry<MoeGatedGemmConfig>(kernel, a.tactic, clocks);
  GemmSm90Params& g = params.gemm;
  describe_operand(kernel, g.a, p.a, bytes, k, rows, 1, p.a_row_stride, 0, t.rows);
  describe_operand(kernel, g.b, p.b, bytes, k, columns, experts, p.b_row_stride, p.b_batch_stride,
                   t.columns / (t.rows == 64 ? 4 : 2));
  g.k_blocks = static_cast<int32_t>(gemm_ceil(k * bytes, 128));
  g.b_once = expected <= t.rows;
  g.group_m = static_cast<int32_t>(gemm_group_m({t.rows, t.columns, 0}, card.multiprocessors));
  g.whole_rows = true;
  Launch launch{std::min((rows / t.rows + experts) * gemm_ceil(columns, t.columns), card.multiprocessors)};
  launch.pdl = kernel.pdl(a.enable_pdl);
  launch.shared_bytes = kGemmSharedBytes;
  kernel.launch(*entry, launch, a.x.device(), params);
#else
  (void)a.expected_m, (void)a.tactic, (void)a.enable_pdl;
  run_cpu(params, a);
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::moe_gated_gemm, fi::request_of)
