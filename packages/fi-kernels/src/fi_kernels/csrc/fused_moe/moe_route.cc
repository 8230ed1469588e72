// moe_route: checks the arguments, launches the CUDA kernel or runs the CPU one.
#include "fi/fused_moe/moe_route.h"

#include "fi/generated/moe_route.h"

#if !FI_CUDA
#include <algorithm>
#include <vector>

#include "fi/cpu/math.h"
#include "fi/cpu/reduce.h"
#include "fi/cpu/row_convert.h"
#endif

namespace fi {
namespace {

#if !FI_CUDA
constexpr float kLowest = -HUGE_VALF;

// logits = row, or -inf for NaN; scores = what experts are chosen by, less the bias.
template <bool kSigmoid>
FI_CLONES void score(const float* row, float* logits, float* scores, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    logits[i] = cpu::select(row[i] == row[i], row[i], kLowest);
    scores[i] = kSigmoid ? cpu::sigmoid(logits[i]) : logits[i];
  }
}
FI_CLONES float sum_of_exp(const float* x, float top, int64_t n) {
  return cpu::sum(n, [=](int64_t i) __attribute__((always_inline)) { return cpu::exp(x[i] - top); });
}

// The numbers of the `count` largest of n scores, in their order; ties to the lower number.
void largest(const float* scores, int64_t n, int64_t count, int32_t* found) {
  for (int64_t i = 0; i < n; ++i) {
    if (i >= count && !(scores[i] > scores[found[count - 1]])) continue;
    int64_t place = std::min(i, count - 1);
    for (; place > 0 && scores[i] > scores[found[place - 1]]; --place) found[place] = found[place - 1];
    found[place] = static_cast<int32_t>(i);
  }
}

void keep_groups(float* scores, int64_t experts, int64_t n_group, int64_t topk_group) {
  const int64_t size = experts / n_group;
  float of_group[kMostGroups];
  int32_t kept[kMostGroups];
  for (int64_t g = 0; g < n_group; ++g) {
    int32_t two[2];
    const float* own = scores + g * size;
    largest(own, size, std::min<int64_t>(size, 2), two);
    of_group[g] = size > 1 ? own[two[0]] + own[two[1]] : own[0];
  }
  largest(of_group, n_group, topk_group, kept);
  for (int64_t g = 0; g < n_group; ++g)
    if (std::find(kept, kept + topk_group, g) == kept + topk_group) std::fill_n(scores + g * size, size, kLowest);
}

// row: the logits; scores and logits: room for as many.
void route(const MoeRouteParams& p, const float* bias, const float* row, float* logits, float* scores, int32_t* ids,
           float* weights) {
  (routes_by_sigmoid(p.method) ? score<true> : score<false>)(row, logits, scores, p.experts);
  for (int32_t e = 0; e < p.experts && bias && routes_by_bias(p.method); ++e) scores[e] += bias[e];
  for (int32_t e = 0; e < p.experts; ++e)
    if (scores[e] != scores[e]) scores[e] = kLowest;
  if (p.n_group > 1) keep_groups(scores, p.experts, p.n_group, p.topk_group);
  largest(scores, p.experts, p.top_k, ids);
  const bool by_softmax = p.method == kRouteDefault || p.method == kRouteRenormalizeNaive;
  const float top = by_softmax ? *std::max_element(logits, logits + p.experts) : 0.f;
  const float all = by_softmax ? sum_of_exp(logits, top, p.experts) : 1.f;
  float total = 0.f, chosen_top = kLowest;
  for (int32_t j = 0; j < p.top_k; ++j) chosen_top = std::max(chosen_top, logits[ids[j]]);
  for (int32_t j = 0; j < p.top_k; ++j) {
    const float x = logits[ids[j]];
    float weight = cpu::sigmoid(x);
    if (by_softmax) weight = cpu::exp(x - top) / all;
    if (p.method == kRouteRenormalize) weight = cpu::exp(x - chosen_top);
    if (p.method == kRouteTopK) weight = x;
    total += weights[j] = weight == weight ? weight : 0.f;
  }
  const bool by_sum = p.method == kRouteRenormalize || p.method == kRouteRenormalizeNaive || routes_by_bias(p.method) ||
                      (p.normalize && p.method == kRouteSigmoidRenorm);
  for (int32_t j = 0; j < p.top_k; ++j) {
    if (by_sum) weights[j] /= total + 1e-20f;
    if (routes_by_bias(p.method)) weights[j] *= p.scale;
  }
}

void run_cpu(const MoeRouteParams& p, const MoeRouteArgs& a) {
  const cpu::LoadRow load = cpu::row_loader(a.logits.dtype());
  const cpu::StoreRow store = cpu::row_storer(a.weights.dtype());
  std::vector<float> bias(static_cast<size_t>(p.experts));
  if (p.bias) cpu::row_loader(a.bias.dtype())(p.bias, bias.data(), p.experts);
  cpu::for_rows(p.tokens, 16 * p.experts, 3 * p.experts + p.top_k + p.shared, [&](int64_t token, float* row) {
    float *logits = row + p.experts, *scores = logits + p.experts, *weights = scores + p.experts;
    load(a.logits.at(token * p.logits_row_stride), row, p.experts);
    const int64_t columns = p.top_k + p.shared;
    int32_t* ids = p.ids + token * columns;
    route(p, p.bias ? bias.data() : nullptr, row, logits, scores, ids, weights);
    for (int32_t j = 0; j < p.shared; ++j) ids[p.top_k + j] = p.experts + j, weights[p.top_k + j] = 1.f;
    store(weights, a.weights.at(token * columns), columns);
    for (int32_t j = 0; p.replay && j < p.top_k; ++j) p.replay[token * p.top_k + j] = static_cast<int16_t>(ids[j]);
  });
}
#else
const Entry& tile(const Kernel& kernel, const MoeRouteParams& p) {
  return kernel.first_entry(
      [&](const Entry& e) { return MoeRouteConfig::of(e).experts << p.group_bits >= p.group_size; });
}
#endif

MoeRouteRequest request_of(const MoeRouteArgs& a) { return {a.logits.dtype(), a.weights.dtype()}; }

void moe_route(const Kernel& kernel, const MoeRouteArgs& a) {
  // 1 check
  Dim tokens{"tokens"}, experts{"experts"}, columns{"top_k + shared"};
  a.logits.is({kF16, kBF16, kF32}).inner_contiguous().shape(tokens, experts);
  a.ids.is({kI32}).on(a.logits).contiguous().shape(tokens, columns);
  a.weights.is({kF16, kBF16, kF32}).on(a.logits).contiguous().shape(tokens, columns);
  FI_CHECK(a.shared >= 0 && a.shared < columns && columns <= kMostTopK, ValueError,
           "ids must have at most %d columns, and more than shared = %lld; got %s", kMostTopK,
           static_cast<long long>(a.shared), a.ids.shape_str().c_str());
  Dim top_k{"top_k", columns - a.shared};
  if (a.bias) a.bias.is({kF16, kBF16, kF32}).on(a.logits).contiguous().shape(experts);
  if (a.replay) {
    Dim rows{"tokens or more"};
    a.replay.is({{kDLInt, 16}}).on(a.logits).contiguous().shape(rows, top_k);
    FI_CHECK(rows >= tokens, ValueError, "replay must have %lld rows or more; got %s", static_cast<long long>(tokens),
             a.replay.shape_str().c_str());
  }
  FI_CHECK(experts >= 1 && experts <= kMostExperts, ValueError, "logits must be of 1 to %d experts; got %s",
           kMostExperts, a.logits.shape_str().c_str());
  FI_CHECK(top_k >= 1 && top_k <= kMostTopK && top_k <= experts, ValueError, "top_k must be in 1..%lld; got %lld",
           static_cast<long long>(std::min<int64_t>(kMostTopK, experts)), static_cast<long long>(top_k));
  FI_CHECK(a.method >= 0 && a.method <= kRouteTopKSigmoid, ValueError, "routing_method_type must be in 0..9; got %lld",
           static_cast<long long>(a.method));
  FI_CHECK(a.n_group >= 1 && a.n_group <= kMostGroups && experts % a.n_group == 0, ValueError,
           "n_group must be in 1..%d and divide %lld experts; got %lld", kMostGroups, static_cast<long long>(experts),
           static_cast<long long>(a.n_group));
  FI_CHECK(a.topk_group >= 1 && a.topk_group <= a.n_group, ValueError, "topk_group must be in 1..%lld; got %lld",
           static_cast<long long>(a.n_group), static_cast<long long>(a.topk_group));
  FI_CHECK(tokens < 1 << 30, ValueError, "logits must have fewer than 2^30 rows; got %s", a.logits.shape_str().c_str());
  if (tokens == 0) return;

  // 2 shape
  MoeRouteParams p{};
  p.ids = a.ids.data<int32_t>();
  p.weights = a.weights.data();
  p.replay = a.replay ? a.replay.data<int16_t>() : nullptr;
  p.logits = a.logits.data();
  p.bias = a.bias ? a.bias.data() : nullptr;
  p.logits_row_stride = a.logits.stride(0);
  p.tokens = static_cast<int32_t>(tokens);
  p.experts = static_cast<int32_t>(experts);
  p.top_k = static_cast<int32_t>(top_k);
  p.shared = static_cast<int32_t>(a.shared);
  p.n_group = a.method == kRouteDeepSeekV3 ? static_cast<int32_t>(a.n_group) : 1;
  p.topk_group = static_cast<int32_t>(a.topk_group);
  p.group_size = p.experts / p.n_group;
  p.bias_type = !a.bias || a.bias.dtype() == kF32 ? 0 : a.bias.dtype() == kBF16 ? 1 : 2;
  p.method = static_cast<RoutingMethod>(a.method);
  p.normalize = a.normalize;
  p.scale = static_cast<float>(a.scale);

  // 3 launch
#if FI_CUDA
  for (p.group_bits = 5; p.n_group << p.group_bits > 32;) --p.group_bits;
  const int64_t vector = 4 * a.logits.dtype().bytes();
  p.vectors = p.group_size % 4 == 0 && a.logits.row_alignment(vector) == vector &&
              (!a.bias || a.bias.row_alignment(4 * a.bias.dtype().bytes()) == 4 * a.bias.dtype().bytes());
  const Entry& entry = tile(kernel, p);
  const int64_t warps = entry.threads / 32;
  Launch launch{(tokens + warps - 1) / warps};
  launch.pdl = kernel.pdl(a.enable_pdl);
  kernel.launch(entry, launch, a.logits.device(), p);
#else
  (void)kernel, (void)a.enable_pdl;
  run_cpu(p, a);
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::moe_route, fi::request_of)
