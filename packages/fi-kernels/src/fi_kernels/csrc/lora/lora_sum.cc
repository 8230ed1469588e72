// lora_sum: checks the arguments, launches the CUDA kernel or runs the CPU one.
#include "fi/lora/lora_sum.h"

#include "fi/generated/lora_sum.h"
#include "fi/host/steps.h"
#include "fi/lora/contract.h"

#if !FI_CUDA
#include "fi/cpu/row_convert.h"
#endif

namespace fi {
namespace {

#if !FI_CUDA
void run_cpu(const LoraSumParams& p, const LoraSumArgs& a) {
  const cpu::LoadRow load = cpu::row_loader(a.x.dtype()), load_out = cpu::row_loader(a.out.dtype());
  const cpu::StoreRow store = cpu::row_storer(a.out.dtype());
  const int64_t width = p.width;
  cpu::for_rows(p.token_count, 2 * width * p.top_k, 3 * width, [&](int64_t token, float* sum) {
    if (p.adapters.at(token) < 0) return;
    float *x = sum + width, *out = x + width;
    std::fill(sum, sum + width, 0.f);
    const auto add = [&](int32_t pair) {
      const int32_t row = p.row_of(pair);
      if (row < 0) return;
      load(a.x.at(row * p.x_row_stride), x, width);
      const float weight = p.weight_of(pair);
      for (int64_t i = 0; i < width; ++i) sum[i] += weight * x[i];
    };
    const auto first = static_cast<int32_t>(token) * p.top_k;
    if (p.tokens.data) {
      for (int32_t pair = 0; pair < p.count; ++pair)
        if (p.tokens.at(pair) == token) add(pair);
    } else {
      for (int32_t j = 0; j < p.top_k; ++j) add(first + j);
    }
    load_out(a.out.at(token * p.out_row_stride), out, width);
    for (int64_t i = 0; i < width; ++i) out[i] += sum[i];
    store(out, a.out.at(token * p.out_row_stride), width);
  });
}
#endif

LoraSumRequest request_of(const LoraSumArgs& a) { return {a.x.dtype(), a.out.dtype()}; }

void lora_sum(const Kernel& kernel, const LoraSumArgs& a) {
  // 1 check
  Dim tokens{"tokens"}, width{"width"}, rows{"rows"}, count{"pairs"};
  a.out.is({kF32, kBF16, kF16}).inner_contiguous().shape(tokens, width);
  a.x.is({kF32, kBF16, kF16}).on(a.out).inner_contiguous().shape(rows, width);
  LoraSumParams p{};
  p.adapters = lora_table(a.lora_indices, a.out, tokens);
  if (a.tokens) {
    p.tokens = lora_table(a.tokens, a.out, count);
    p.top_k = 1;
  } else {
    count.value = a.rows ? a.rows.numel() : rows.value;
    FI_CHECK(tokens > 0 ? count % tokens == 0 : count == 0, ValueError,
             "%s must have a multiple of %lld rows, as many for each token; got %lld", a.rows ? "rows" : "x",
             static_cast<long long>(tokens), static_cast<long long>(count));
    p.top_k = tokens > 0 ? static_cast<int32_t>(count / tokens) : 1;
  }
  if (a.weights) {
    a.weights.is({kF32}).on(a.out).contiguous();
    FI_CHECK(a.weights.numel() == count, ValueError, "weights must have %lld elements, one for each pair; got %s",
             static_cast<long long>(count), a.weights.shape_str().c_str());
  }
  if (a.rows) a.rows.is({kI32}).on(a.out).contiguous();
  FI_CHECK(a.rows ? a.rows.numel() == count : rows >= count, ValueError, "%s must have %lld elements; got %s",
           a.rows ? "rows" : "x", static_cast<long long>(count),
           (a.rows ? a.rows.shape_str() : a.x.shape_str()).c_str());
  FI_CHECK(width % 4 == 0 && width < 1 << 24 && tokens < 1 << 24 && count < 1 << 24, ValueError,
           "out must have a multiple of 4 columns, and fewer than 2^24 rows and columns; got %s",
           a.out.shape_str().c_str());
  if (tokens == 0 || width == 0 || count == 0) return;
  if (kernel.checks_contents(a.out.device()) && a.rows) {
    const Integers values(kernel, a.rows);
    for (int64_t i = 0; i < values.size(); ++i)
      FI_CHECK(values[i] < rows, ValueError, "rows must be below %lld; got %lld at %lld", static_cast<long long>(rows),
               static_cast<long long>(values[i]), static_cast<long long>(i));
  }

  // 2 shape
  p.out = a.out.data();
  p.x = a.x.data();
  p.weights = a.weights ? a.weights.data<float>() : nullptr;
  p.rows = a.rows ? a.rows.data<int32_t>() : nullptr;
  p.out_row_stride = a.out.stride(0);
  p.x_row_stride = a.x.stride(0);
  p.count = static_cast<int32_t>(count);
  p.token_count = static_cast<int32_t>(tokens);
  p.width = static_cast<int32_t>(width);

  // 3 launch
#if FI_CUDA
  const Entry& entry = kernel.entries.front();
  const int64_t vec = LoraSumConfig::of(entry).vec_size, cta = vec * entry.threads;
  for (const Tensor& t : {a.x, a.out})
    FI_CHECK(t.row_alignment(vec * t.dtype().bytes()) == vec * t.dtype().bytes(), ValueError,
             "%s must have rows at multiples of %lld elements; got stride %lld", t.name(), static_cast<long long>(vec),
             static_cast<long long>(t.stride(0)));
  Launch launch{tokens, (width + cta - 1) / cta};
  launch.pdl = kernel.pdl(a.enable_pdl);
  kernel.launch(entry, launch, a.out.device(), p);
#else
  (void)a.enable_pdl;
  run_cpu(p, a);
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::lora_sum, fi::request_of)
FI_STEPS
