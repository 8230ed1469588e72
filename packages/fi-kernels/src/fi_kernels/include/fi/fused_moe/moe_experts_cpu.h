// The experts of a layer on the CPU: rows of tokens times the weights of their expert, activation, second product.
#pragma once

#include <vector>

#include "fi/cpu/math.h"
#include "fi/find_segment.h"
#include "fi/fused_moe/moe_cpu.h"
#include "fi/fused_moe/moe_experts.h"

namespace fi::cpu {

using ActivateExpert = float (*)(float u, float g, const ExpertConstants& c);

template <ExpertActivation kAct>
float activate_one(float u, float g, const ExpertConstants& c) {
  return activate_expert<CpuMath, kAct>(u, g, c);
}
inline ActivateExpert activation_of(int64_t activation) {
  switch (activation) {
    case kExpertSwiglu:
      return activate_one<kExpertSwiglu>;
    case kExpertSwigluBias:
      return activate_one<kExpertSwigluBias>;
    case kExpertRelu2:
      return activate_one<kExpertRelu2>;
    default:
      raise("ValueError", "activation must be Swiglu, SwigluBias or Relu2; got %lld",
            static_cast<long long>(activation));
  }
}

// Rounds 16-bit rows as the kernel multiplies them: to e4m3 with a scale of each 128, if `quantizes`.
inline void round_row(float* x, int64_t n, bool quantizes, std::vector<char>& bytes, std::vector<float>& scales) {
  if (!quantizes) return;
  bytes.resize(static_cast<size_t>(n));
  scales.resize(static_cast<size_t>(n / 128));
  quantize_blocks(x, bytes.data(), scales.data(), n);
  row_loader(kE4M3)(bytes.data(), x, n);
  for (int64_t i = 0; i < n; ++i) x[i] *= scales[static_cast<size_t>(i / 128)];
}

// Row `row` of the weight of an expert, with its scales. Blocks of its columns may be apart.
inline void weight_row(const Tensor& weight, const OptionalTensor& scale, int64_t expert, int64_t row, float* w,
                       int64_t n) {
  const char* from = weight.at(expert * weight.stride(0) + row * weight.stride(1));
  if (weight.dtype() == kU8) {  // mxfp4
    const auto* codes = scale.data<uint8_t>() + expert * scale.stride(0) + row * scale.stride(1);
    for (int64_t i = 0; i < n; ++i) {
      const unsigned code = static_cast<uint8_t>(from[i / 2]) >> 4 * (i % 2) & 15u;
      w[i] = e2m1_to_float(code) * ue8m0_to_float(codes[i / 32]);
    }
    return;
  }
  const LoadRow load = row_loader(weight.dtype());
  if (weight.ndim() == 4) {
    const int64_t block = weight.size(3);
    for (int64_t b = 0; b < weight.size(1); ++b)
      load(weight.at(expert * weight.stride(0) + b * weight.stride(1) + row * block), w + b * block, block);
  } else {
    load(from, w, n);
  }
  if (!scale) return;
  const float* s = scale.data<float>() + expert * scale.stride(0) + row / 128 * scale.stride(1);
  for (int64_t i = 0; i < n; ++i) w[i] *= s[i / 128];
}

// The same times x, in fp32; w: scratch of n floats.
inline float dot_row(const Tensor& weight, const OptionalTensor& scale, int64_t expert, int64_t row, const float* x,
                     float* w, int64_t n) {
  weight_row(weight, scale, expert, row, w, n);
  float sum = 0.f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += w[i] * x[i];
  return sum;
}

// Of a row, for a feature of the projection whose features begin at `first`.
inline float delta_at(const Tensor& delta, int64_t row, int64_t feature, int64_t first) {
  float x = 0.f;
  row_loader(delta.dtype())(delta.at(row * delta.stride(0) + first + feature), &x, 1);
  return x;
}

template <class Args>
void run_experts(const ExpertGemmParams& p, const Args& a, bool gated) {
  const int64_t hidden = a.x.size(1), width = a.activated.size(1);
  const int64_t rows = std::min<int64_t>(a.rows.numel(), p.offsets[p.experts]);
  const bool quantizes = a.up.dtype() == kE4M3;
  const LoadRow load = row_loader(a.x.dtype());
  const StoreRow store = row_storer(a.x.dtype());
  const ActivateExpert activate = activation_of(a.activation);
  check_rows(a.rows, a.x.size(0));
  for_rows(rows, hidden * width, 2 * (hidden + width), [&](int64_t row, float* x) {
    float *act = x + hidden, *w = act + width;
    std::vector<char> bytes;
    std::vector<float> scales;
    const int32_t e = find_segment(p.offsets, p.experts, row);
    const ExpertConstants c{p.alpha ? p.alpha[e] : p.constants.alpha, p.beta ? p.beta[e] : p.constants.beta,
                            p.limit ? p.limit[e] : p.constants.limit};
    load(a.x.at(int64_t{a.rows.template data<int32_t>()[row]} * a.x.stride(0)), x, hidden);
    round_row(x, hidden, quantizes, bytes, scales);
    const auto up = [&](int64_t i, int64_t half) {
      const int64_t at = row_of_feature(row_order(a.shuffle_tile, gated), i, half, width);
      float bias = 0.f;
      if (a.bias) load(a.bias.at(e * a.bias.stride(0) + at), &bias, 1);
      const float projected = dot_row(a.up, a.up_scale, e, at, x, w, hidden) + bias;
      return a.delta ? projected + delta_at(a.delta, row, i, gated && half == 0 ? width : 0) : projected;
    };
    for (int64_t i = 0; i < width; ++i) act[i] = activate(up(i, 0), gated ? up(i, 1) : 0.f, c);
    store(act, a.activated.at(row * a.activated.stride(0)), width);
    load(a.activated.at(row * a.activated.stride(0)), act, width);
    round_row(act, width, quantizes, bytes, scales);
    for (int64_t i = 0; i < hidden; ++i)
      x[i] = dot_row(a.down, a.down_scale, e, row_of_feature(row_order(a.shuffle_tile, false), i, 0, hidden), act, w,
                     width);
    store(x, a.out.at(row * a.out.stride(0)), hidden);
  });
}

// The sums of ExpertSlots, of rows that run_experts has written. Slots of one expert have its rows in order.
template <class Args>
void sum_slots(const ExpertGemmParams& p, const Args& a) {
  const ExpertSlots& s = p.slots;
  const int64_t hidden = a.x.size(1);
  int32_t positions[kMaxSlots];
  std::vector<int32_t> next(p.offsets, p.offsets + p.experts);
  for (int32_t slot = 0; slot < s.count; ++slot) {
    const int64_t e = int64_t{s.ids[slot]} - s.first_expert;
    positions[slot] = e >= 0 && e < p.experts ? next[static_cast<size_t>(e)]++ : -1;
    FI_CHECK(positions[slot] < s.count, ValueError, "offsets must be those of ids");
  }
  const LoadRow load = row_loader(a.x.dtype());
  const StoreRow store = row_storer(a.x.dtype());
  for_rows(s.count / s.top_k, 2 * hidden * s.top_k, 3 * hidden, [&](int64_t token, float* sum) {
    float *x = sum + hidden, *bias = x + hidden;
    std::fill(sum, sum + hidden, 0.f);
    for (int64_t slot = token * s.top_k; slot < (token + 1) * s.top_k; ++slot) {
      const int32_t row = positions[slot];
      if (row < 0) continue;
      const float weight = s.weights ? s.weights[slot] : 1.f;
      load(a.out.at(row * a.out.stride(0)), x, hidden);
      if (s.bias) load(a.down_bias.at((s.ids[slot] - s.first_expert) * s.bias_row_stride), bias, hidden);
      for (int64_t i = 0; i < hidden; ++i) sum[i] += weight * (x[i] + (s.bias ? bias[i] : 0.f));
    }
    store(sum, a.sum.at(token * s.sum_row_stride), hidden);
  });
}

}  // namespace fi::cpu
