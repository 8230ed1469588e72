// A MoE layer of few tokens on the CPU: the experts of each token, one after another, and their weighted sum.
#pragma once

#include <vector>

#include "fi/fused_moe/moe_experts_cpu.h"

namespace fi::cpu {

template <class Args>
void few_tokens(const Args& a) {
  const int64_t hidden = a.x.size(1), width = a.activated.size(1), top_k = a.ids.size(1), experts = a.up.size(0);
  const bool quantizes = a.up.dtype() == kE4M3;
  const LoadRow load = row_loader(a.x.dtype());
  const StoreRow store = row_storer(a.x.dtype());
  const ActivateExpert activate = activation_of(a.activation);
  const auto constant = [](const OptionalTensor& t, int64_t e, double value) {
    return t ? t.template data<float>()[e] : static_cast<float>(value);
  };
  for_rows(a.x.size(0), top_k * hidden * width, 3 * hidden + width, [&](int64_t token, float* x) {
    float *sum = x + hidden, *bias = sum + hidden, *act = bias + hidden;
    std::vector<char> bytes;
    std::vector<float> scales, row(static_cast<size_t>(std::max(hidden, width)));
    load(a.x.at(token * a.x.stride(0)), x, hidden);
    round_row(x, hidden, quantizes, bytes, scales);
    std::fill(sum, sum + hidden, 0.f);
    for (int64_t slot = token * top_k; slot < (token + 1) * top_k; ++slot) {
      const int64_t e = int64_t{a.ids.template data<int32_t>()[slot]} - a.first_expert;
      if (e < 0 || e >= experts) continue;
      const ExpertConstants c{constant(a.alpha, e, a.alpha_value), constant(a.beta, e, a.beta_value),
                              constant(a.limit, e, a.limit_value)};
      const auto up = [&](int64_t i) {
        const float delta = a.delta ? delta_at(a.delta, slot, (i + width) % (2 * width), 0) : -0.f;
        float of_row = 0.f;
        if (a.bias) load(a.bias.at(e * a.bias.stride(0) + i), &of_row, 1);
        return dot_row(a.up, a.up_scale, e, i, x, row.data(), hidden) + of_row + delta;
      };
      for (int64_t i = 0; i < width; ++i) act[i] = activate(up(i), up(width + i), c);
      store(act, a.activated.at(slot * a.activated.stride(0)), width);
      load(a.activated.at(slot * a.activated.stride(0)), act, width);
      round_row(act, width, quantizes, bytes, scales);
      if (a.down_bias) load(a.down_bias.at(e * a.down_bias.stride(0)), bias, hidden);
      const float weight = a.weights ? a.weights.template data<float>()[slot] : 1.f;
      for (int64_t i = 0; i < hidden; ++i)
        sum[i] +=
            weight * (dot_row(a.down, a.down_scale, e, i, act, row.data(), width) + (a.down_bias ? bias[i] : 0.f));
    }
    store(sum, a.out.at(token * a.out.stride(0)), hidden);
  });
}

}  // namespace fi::cpu
