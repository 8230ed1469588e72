// moe_gated_gemm: checks the arguments, launches the CUDA kernel or runs the CPU one.
#include "fi/fused_moe/moe_gated_gemm.h"

#include <algorithm>

#include "fi/fused_moe/expert_activation.h"
#include "fi/gemm/gemm_cost.h"
#include "fi/gemm/gemm_operand.h"
#include "fi/generated/moe_gated_gemm.h"
#include "fi/host/contents.h"

#if !FI_CUDA
#include <vector>

#include "fi/cpu/math.h"
#include "fi/fused_moe/moe_cpu.h"
#include "fi/gemm/gemm_cpu.h"
#endif

namespace fi {
namespace {

constexpr int64_t kBlock = 128;  // columns, and rows of weights, that share a scale

#if !FI_CUDA
void run_cpu(const MoeGatedGemmParams& params) {
  GemmProblem p = params.gemm.problem;
  const int64_t width = p.n / 2, rows = std::min(p.m, p.row_groups[p.batch]);
  std::vector<float> projected(static_cast<size_t>(p.m) * static_cast<size_t>(p.n));
  auto* out = static_cast<char*>(p.out);
  const int64_t out_row_stride = p.out_row_stride;
  p.out = projected.data();
  p.out_row_stride = p.n;
  cpu::gemm(p, kE4M3, kE4M3, kF32);
  cpu::for_rows(rows, 4 * width, width, [&](int64_t row, float* x) {
    const float *u = projected.data() + row * p.n, *g = u + width;
    for (int64_t i = 0; i < width; ++i) x[i] = activate_expert<CpuMath, kExpertSwiglu>(u[i], g[i], {});
    cpu::quantize_blocks(x, out + row * out_row_stride, params.out_scale + row * (width / kBlock), width);
  });
}
#endif

void moe_gated_gemm(const Kernel& kernel, const MoeGatedGemmArgs& a) {
  // 1 check
  Dim rows{"rows"}, width{"width"}, k{"k"}, experts{"experts"};
  a.x.is({kE4M3}).inner_contiguous().shape(rows, k);
  a.out.is({kE4M3}).on(a.x).inner_contiguous().shape(rows, width);
  Dim columns{"2 * width", 2 * width};
  a.weight.is({kE4M3}).on(a.x).inner_contiguous().shape(experts, columns, k);
  FI_CHECK(width % kBlock == 0 && k % kBlock == 0 && k > 0, ValueError,
           "width and k must be multiples of 128; got weight %s", a.weight.shape_str().c_str());
  Dim blocks{"width / 128", width / kBlock}, k_blocks{"k / 128", k / kBlock}, ends{"experts + 1", experts + 1};
  Dim row_blocks{"2 * width / 128", 2 * width / kBlock};
  a.out_scale.is({kF32}).on(a.x).contiguous().shape(rows, blocks);
  a.x_scale.is({kF32}).on(a.x).contiguous().shape(rows, k_blocks);
  a.weight_scale.is({kF32}).on(a.x).shape(experts, row_blocks, k_blocks);
  a.offsets.is({kI32}).on(a.x).contiguous().shape(ends);
  FI_CHECK(rows < 1 << 24 && width < 1 << 24 && k < 1 << 24 && experts < 1 << 24, ValueError,
           "x and weight must have fewer than 2^24 rows, columns and experts; got x %s, weight %s",
           a.x.shape_str().c_str(), a.weight.shape_str().c_str());
  for (const Tensor* t : {&a.out, &a.x, &a.weight})
    FI_CHECK(t->row_alignment(16) == 16, ValueError,
             "%s must have rows at multiples of 16 bytes; got strides %lld, %lld", t->name(),
             static_cast<long long>(t->stride(0)), static_cast<long long>(t->stride(-2)));
  if (rows == 0 || width == 0 || experts == 0) return;
  if (kernel.checks_contents(a.x.device())) check_offsets(Integers(kernel, a.offsets), rows);

  // 2 shape
  MoeGatedGemmParams params{};
  params.out_scale = a.out_scale.data<float>();
  GemmProblem& p = params.gemm.problem;
  p.out = a.out.data();
  p.a = a.x.data();
  p.b = a.weight.data();
  p.a_scale = a.x_scale.data<float>();
  p.b_scale = a.weight_scale.data<float>();
  p.row_groups = a.offsets.data<int32_t>();
  p.out_row_stride = a.out.stride(0);
  p.a_row_stride = a.x.stride(0);
  p.b_batch_stride = a.weight.stride(0);
  p.b_row_stride = a.weight.stride(1);
  p.b_k_stride = p.a_scale_k_stride = 1;
  p.a_scale_row_stride = k_blocks;
  p.b_scale_batch_stride = a.weight_scale.stride(0);
  p.b_scale_row_stride = a.weight_scale.stride(1);
  p.b_scale_k_stride = a.weight_scale.stride(2);
  p.m = static_cast<int32_t>(rows);
  p.n = static_cast<int32_t>(columns);
  p.k = static_cast<int32_t>(k);
  p.batch = p.matrices = static_cast<int32_t>(experts);
  p.a_scale_rows = 1;
  p.b_scale_rows = static_cast<int32_t>(kBlock);
  p.rows = GemmRows::kIndptr;

  // 3 launch
#if FI_CUDA
  const Entry& entry = kernel.entries.front();
  const int64_t tile_rows = MoeGatedGemmConfig::of(entry).rows, multiprocessors = kernel.multiprocessors(a.x.device());
  const int64_t expected = a.expected_m >= 0 ? a.expected_m : gemm_ceil(rows, experts);
  GemmSm90Params& g = params.gemm;
  describe_operand(kernel, g.a, p.a, 1, k, rows, 1, p.a_row_stride, 0, tile_rows);
  describe_operand(kernel, g.b, p.b, 1, k, columns, experts, p.b_row_stride, p.b_batch_stride, kBlock);
  g.k_blocks = static_cast<int32_t>(k_blocks);
  g.b_once = expected <= tile_rows;
  g.group_m = static_cast<int32_t>(gemm_group_m({tile_rows, 2 * kBlock, 0}, multiprocessors));
  g.whole_rows = true;
  Launch launch{std::min((rows / tile_rows + experts) * blocks, multiprocessors)};
  launch.pdl = kernel.pdl(a.enable_pdl);
  kernel.launch(entry, launch, a.x.device(), params);
#else
  (void)a.expected_m, (void)a.enable_pdl;
  run_cpu(params);
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::moe_gated_gemm)
