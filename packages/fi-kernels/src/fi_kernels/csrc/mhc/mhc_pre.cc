// mhc_pre: checks the arguments, launches the CUDA kernel or runs the CPU one.
#include "fi/mhc/mhc_pre.h"

#include "fi/generated/mhc_pre.h"
#include "fi/host/op.h"

#if !FI_CUDA
#include <algorithm>
#include <cmath>

#include "fi/cpu/reduce.h"
#include "fi/mhc/mhc_cpu.h"
#endif

namespace fi {
namespace {

#if !FI_CUDA
constexpr int kElements = kMhcStreams * kMhcStreams;

FI_CLONES float sum_of_squares(const float* x, int64_t n) {
  return cpu::sum(n, [=](int64_t i) __attribute__((always_inline)) { return x[i] * x[i]; });
}

// Divides each of the four rows (step 4, stride 1) or columns (step 1, stride 4) by its sum plus eps.
void normalize(float* x, int step, int stride, float eps) {
  for (int line = 0; line < kMhcStreams; ++line) {
    float sum = eps;
    for (int i = 0; i < kMhcStreams; ++i) sum += x[line * step + i * stride];
    for (int i = 0; i < kMhcStreams; ++i) x[line * step + i * stride] /= sum;
  }
}

void sinkhorn(float* x, int32_t repeat, float eps) {
  for (int row = 0; row < kMhcStreams; ++row) {
    float* first = x + row * kMhcStreams;
    const float top = *std::max_element(first, first + kMhcStreams);
    for (int i = 0; i < kMhcStreams; ++i) first[i] = std::exp(first[i] - top);
  }
  normalize(x, kMhcStreams, 1, 0.f);
  for (int i = 0; i < kElements; ++i) x[i] += eps;
  normalize(x, 1, kMhcStreams, eps);
  for (int32_t i = 1; i < repeat; ++i) {
    normalize(x, kMhcStreams, 1, eps);
    normalize(x, 1, kMhcStreams, eps);
  }
}

// Writes post and comb of a token, and the four numbers of pre.
void mix(const MhcPreParams& p, int64_t token, float squares, float (&pre)[kMhcStreams]) {
  float logits[kMhcLogits] = {};
  for (int64_t s = 0; s < p.splits; ++s) {
    const int64_t row = s * p.tokens + token;
    for (int i = 0; i < kMhcLogits; ++i) logits[i] += p.logits[row * kMhcLogits + i];
    if (p.squares) squares += p.squares[row];
  }
  const float inv_rms = 1.f / std::sqrt(squares * p.inv_k + p.rms_eps);
  for (int i = 0; i < kMhcLogits; ++i)
    logits[i] = logits[i] * inv_rms * p.scale[std::min(i / kMhcStreams, 2)] + p.base[i];
  for (int i = 0; i < kMhcStreams; ++i) {
    pre[i] = 1.f / (1.f + std::exp(-logits[i])) + p.pre_eps;
    p.post[token * kMhcStreams + i] = p.post_factor / (1.f + std::exp(-logits[kMhcStreams + i]));
  }
  float* comb = p.comb + token * kElements;
  std::copy_n(logits + 2 * kMhcStreams, kElements, comb);
  sinkhorn(comb, p.repeat, p.sinkhorn_eps);
}

void run_cpu(const MhcPreParams& p, DType dtype) {
  const cpu::LoadRow load = cpu::row_loader(dtype);
  const cpu::StoreRow store = cpu::row_storer(dtype);
  const int64_t bytes = dtype.bytes(), h = p.h;
  cpu::for_rows(p.tokens, 8 * h, (kMhcStreams + 1) * h, [&](int64_t token, float* y) {
    float *streams = y + h, squares = 0.f, pre[kMhcStreams];
    for (int m = 0; m < kMhcStreams; ++m) {
      load(static_cast<const char*>(p.residual) + (token * p.residual_token + m * p.residual_stream) * bytes,
           streams + m * h, h);
      if (!p.squares) squares += sum_of_squares(streams + m * h, h);
    }
    mix(p, token, squares, pre);
    std::fill_n(y, h, 0.f);
    for (int m = 0; m < kMhcStreams; ++m) cpu::add_scaled(y, streams + m * h, pre[m], h);
    store(y, static_cast<char*>(p.layer_input) + token * p.input_token * bytes, h);
  });
}
#endif

#if FI_CUDA
const Entry& tile(const Kernel& kernel, const MhcPreParams& p, const MhcPreArgs& a) {
  const int64_t vec = vec_size(p.h, {a.layer_input, a.residual});
  return kernel.first_entry([&](const Entry& entry) {
    const auto config = MhcPreConfig::of(entry);
    return config.vec_size <= vec && config.own_squares == !p.squares;
  });
}
#endif

MhcPreRequest request_of(const MhcPreArgs& a) { return {a.residual.dtype()}; }

void mhc_pre(const Kernel& kernel, const MhcPreArgs& a) {
  // 1 check
  Dim tokens{"tokens"}, h{"h"}, four{"4", kMhcStreams}, logits{"24", kMhcLogits}, splits{"num_splits"}, three{"3", 3};
  a.residual.is({kF16, kBF16, kF32}).inner_contiguous().shape(tokens, four, h);
  a.dot_mix.is({kF32}).on(a.residual).contiguous().shape(splits, tokens, logits);
  if (a.sqrsum) a.sqrsum.is({kF32}).on(a.residual).contiguous().shape(splits, tokens);
  a.mhc_scale.is({kF32}).on(a.residual).contiguous().shape(three);
  a.mhc_base.is({kF32}).on(a.residual).contiguous().shape(logits);
  a.post_mix.is({kF32}).on(a.residual).contiguous().shape(tokens, four);
  a.comb_mix.is({kF32}).on(a.residual).contiguous().shape(tokens, four, four);
  a.layer_input.like(a.residual).inner_contiguous().shape(tokens, h);
  FI_CHECK(a.k > 0 && a.k < 1ll << 31, ValueError, "k must be positive; got %lld", static_cast<long long>(a.k));
  FI_CHECK(a.sinkhorn_repeat >= 1 && a.sinkhorn_repeat <= 1 << 20, ValueError,
           "sinkhorn_repeat must be 1 or more; got %lld", static_cast<long long>(a.sinkhorn_repeat));
  FI_CHECK(h <= 1 << 23 && splits <= 1 << 20, ValueError, "residual must have at most 2^23 columns; got shape %s",
           a.residual.shape_str().c_str());
  if (tokens == 0) return;

  // 2 shape
  MhcPreParams p{};
  p.post = a.post_mix.data<float>(), p.comb = a.comb_mix.data<float>(), p.layer_input = a.layer_input.data();
  p.logits = a.dot_mix.data<float>(), p.squares = a.sqrsum ? a.sqrsum.data<float>() : nullptr;
  p.residual = a.residual.data(), p.scale = a.mhc_scale.data<float>(), p.base = a.mhc_base.data<float>();
  p.input_token = a.layer_input.stride(0), p.residual_token = a.residual.stride(0);
  p.residual_stream = a.residual.stride(1), p.tokens = tokens;
  p.splits = static_cast<int32_t>(splits), p.h = static_cast<int32_t>(h);
  p.repeat = static_cast<int32_t>(a.sinkhorn_repeat);
  p.inv_k = 1.f / static_cast<float>(a.k), p.rms_eps = static_cast<float>(a.rms_eps);
  p.pre_eps = static_cast<float>(a.mhc_pre_eps), p.sinkhorn_eps = static_cast<float>(a.mhc_sinkhorn_eps);
  p.post_factor = static_cast<float>(a.mhc_post_mult_value);

  // 3 launch
#if FI_CUDA
  const Entry& entry = tile(kernel, p, a);
  const int64_t columns = MhcPreConfig::of(entry).vec_size * entry.threads;
  Launch launch{tokens, p.squares ? std::max<int64_t>(1, (h + columns - 1) / columns) : 1};
  launch.pdl = kernel.pdl(a.enable_pdl);
  kernel.launch(entry, launch, a.residual.device(), p);
#else
  (void)kernel, (void)a.enable_pdl;
  run_cpu(p, a.residual.dtype());
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::mhc_pre, fi::request_of)
