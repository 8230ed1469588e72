// qk_rmsnorm_rope: checks the arguments, launches the CUDA kernel or runs the CPU one.
#include "fi/rope/qk_rmsnorm_rope.h"

#include <cmath>

#include "fi/generated/qk_rmsnorm_rope.h"
#include "fi/host/op.h"

#if !FI_CUDA
#include "fi/cpu/reduce.h"
#include "fi/cpu/row_convert.h"
#endif

namespace fi {
namespace {

constexpr int64_t kVec = 8;  // elements that a thread owns in a head

// The phase of each pair of one axis: base^(-2 i / channels) radians a position; with a factor, blended with itself
// divided by the factor where pair i lies between low and high (YaRN, arXiv:2309.00071).
void fill_steps(uint64_t* steps, int64_t channels, const QkRmsnormRopeArgs& a) {
  for (int64_t i = 0; i < channels / 2; ++i) {
    const auto pair = static_cast<double>(i);
    double revolutions = std::pow(a.base, -2.0 * pair / static_cast<double>(channels)) * 0.15915494309189535;
    if (a.factor != 1.0) {
      const double high = std::abs(a.low - a.high) <= 1e-6 ? a.high + 0.001 : a.high;
      const double ramp = std::min(std::max((pair - a.low) / (high - a.low), 0.0), 1.0);
      revolutions = revolutions / a.factor * ramp + revolutions * (1.0 - ramp);
    }
    steps[i] = static_cast<uint64_t>((revolutions - std::floor(revolutions)) * 0x1p64);
  }
}

#if !FI_CUDA
FI_CLONES float sum_of_squares(const float* x, int64_t n) {
  return cpu::sum(n, [=](int64_t i) __attribute__((always_inline)) { return x[i] * x[i]; });
}

// Normalizes and rotates one row of heads of q or k.
void rotate_row(const QkRmsnormRopeParams& p, int kind, bool interleave, const float* weight, const float* cosine,
                const float* sine, float* x) {
  const int64_t n = int64_t{p.heads[kind]} * p.head_dim;
  if (p.weight[kind]) {
    const float inv = 1.f / std::sqrt(sum_of_squares(x, n) * p.inv_d[kind] + p.eps);
    for (int64_t i = 0; i < n; ++i) x[i] *= inv * weight[i];
  }
  const int pairs = p.rotary_dim / 2, step = interleave ? 2 : 1, apart = interleave ? 1 : pairs;
  for (float* head = x; head < x + n; head += p.head_dim)
    for (int i = 0; i < pairs; ++i) {
      float &first = head[i * step], &second = head[i * step + apart], old = first;
      first = old * cosine[i] - second * sine[i];
      second = second * cosine[i] + old * sine[i];
    }
}

void run_cpu(const QkRmsnormRopeParams& p, int64_t tokens, bool interleave, DType in, DType out) {
  const cpu::LoadRow load = cpu::row_loader(in);
  const cpu::StoreRow store = cpu::row_storer(out);
  const int64_t widest = int64_t{std::max({p.heads[0], p.heads[1], p.heads[2]})} * p.head_dim;
  cpu::for_rows(tokens, 8 * widest, 2 * widest + 2 * kMaxRopePairs, [&](int64_t token, float* x) {
    float *weight = x + widest, *cosine = weight + widest, *sine = cosine + kMaxRopePairs;
    const auto at = p.place(static_cast<uint32_t>(token));
    for (int i = 0; i < p.rotary_dim / 2; ++i) p.angle(at, i, cosine + i, sine + i);
    int64_t before = 0;
    for (int kind = 0; kind < 3; before += p.heads[kind++]) {
      const int64_t n = int64_t{p.heads[kind]} * p.head_dim;
      for (int64_t h = 0; h < p.heads[kind]; ++h)
        load(static_cast<const char*>(p.qkv) + (token * p.qkv_row + (before + h) * p.qkv_head) * in.bytes(),
             x + h * p.head_dim, p.head_dim);
      if (kind < 2) {
        if (p.weight[kind]) load(p.weight[kind], weight, n);
        rotate_row(p, kind, interleave, weight, cosine, sine, x);
      }
      if (out.bits == 8)
        for (int64_t i = 0; i < n; ++i) x[i] *= p.scale[kind];
      for (int64_t h = 0; h < p.heads[kind]; ++h)
        store(x + h * p.head_dim,
              static_cast<char*>(p.out[kind]) + (token * p.out_row[kind] + h * p.out_head[kind]) * out.bytes(),
              p.head_dim);
    }
  });
}
#endif

#if FI_CUDA
// threads: that a token would take with one head each.
const Entry& tile(const Kernel& kernel, bool interleave, int64_t threads) {
  return kernel.first_entry([&](const Entry& entry) {
    const auto config = QkRmsnormRopeConfig::of(entry);
    return config.interleave == interleave && config.heads_per_thread * entry.threads >= threads;
  });
}
#endif

QkRmsnormRopeRequest request_of(const QkRmsnormRopeArgs& a) { return {a.qkv.dtype(), a.q_out.dtype()}; }

void check_grid(const QkRmsnormRopeArgs& a, int64_t head_dim, int64_t rotary_dim) {
  FI_CHECK(head_dim % kVec == 0 && head_dim <= 2 * kMaxRopePairs, ValueError,
           "head_dim must be a multiple of 8 and at most 256; got %lld", static_cast<long long>(head_dim));
  for (int64_t channels : {a.frame_channels, a.height_channels, a.width_channels})
    FI_CHECK(channels >= 0 && channels <= head_dim && channels % 2 == 0, ValueError,
             "num_frame_channels, num_height_channels and num_width_channels must be even and at most head_dim; got "
             "%lld",
             static_cast<long long>(channels));
  FI_CHECK(rotary_dim % (2 * kVec) == 0 && rotary_dim <= head_dim, ValueError,
           "num_frame_channels + num_height_channels + num_width_channels must be a multiple of 16 and at most "
           "head_dim, %lld; got %lld",
           static_cast<long long>(head_dim), static_cast<long long>(rotary_dim));
  for (int64_t n : {a.ppf, a.pph, a.ppw})
    FI_CHECK(n > 0 && n < 1 << 20, ValueError, "ppf, pph and ppw must be positive; got %lld",
             static_cast<long long>(n));
  FI_CHECK(a.ppf * a.pph < 1ll << 31 && a.ppf * a.pph * a.ppw < 1ll << 31, ValueError,
           "ppf * pph * ppw must be below 2^31; got %lld", static_cast<long long>(a.ppf * a.pph * a.ppw));
  FI_CHECK(a.base > 0 && a.factor > 0 && a.eps >= 0, ValueError,
           "base and factor must be positive, and eps 0 or more; got %g, %g, %g", a.base, a.factor, a.eps);
}

void qk_rmsnorm_rope(const Kernel& kernel, const QkRmsnormRopeArgs& a) {
  // 1 check
  Dim tokens{"num_tokens"}, heads{"num_heads_q + num_heads_k + num_heads_v"}, d{"head_dim"};
  Dim q_heads{"num_heads_q"}, k_heads{"num_heads_k"}, v_heads{"num_heads_v"};
  a.qkv.is({kF16, kBF16}).inner_contiguous().shape(tokens, heads, d);
  a.q_out.is({kF16, kBF16, kE4M3}).on(a.qkv).inner_contiguous().shape(tokens, q_heads, d);
  if (a.q_out.dtype() != kE4M3) a.q_out.like(a.qkv);
  a.k_out.like(a.q_out).inner_contiguous().shape(tokens, k_heads, d);
  a.v_out.like(a.q_out).inner_contiguous().shape(tokens, v_heads, d);
  FI_CHECK(q_heads + k_heads + v_heads == heads, ValueError, "qkv must have the heads of q, k and v; got shape %s",
           a.qkv.shape_str().c_str());
  Dim q_width{"num_heads_q * head_dim", q_heads * d}, k_width{"num_heads_k * head_dim", k_heads * d};
  a.q_weight.like(a.qkv).contiguous().shape(q_width);
  a.k_weight.like(a.qkv).contiguous().shape(k_width);
  const int64_t rotary_dim = a.frame_channels + a.height_channels + a.width_channels;
  check_grid(a, d, rotary_dim);
  FI_CHECK(tokens < 0x7fffffff && heads * d <= 1 << 24, ValueError,
           "qkv must have fewer than 2^31 tokens of at most 2^24 elements; got shape %s", a.qkv.shape_str().c_str());
  for (const Tensor& t : {a.qkv, a.q_weight, a.k_weight, a.q_out, a.k_out, a.v_out})
    FI_CHECK(t.numel() == 0 || t.row_alignment(kVec * t.dtype().bytes()) == kVec * t.dtype().bytes(), ValueError,
             "%s must have heads that start at multiples of 8 elements: call .clone() on it", t.name());
  if (tokens == 0 || heads == 0 || d == 0) return;

  // 2 shape
  QkRmsnormRopeParams p{};
  p.qkv = a.qkv.data(), p.qkv_row = a.qkv.stride(0), p.qkv_head = a.qkv.stride(1);
  if (a.is_qk_norm) p.weight[0] = a.q_weight.data(), p.weight[1] = a.k_weight.data();
  const Tensor outs[] = {a.q_out, a.k_out, a.v_out};
  for (int kind = 0; kind < 3; ++kind) {
    p.out[kind] = outs[kind].data(), p.heads[kind] = static_cast<int32_t>(outs[kind].size(1));
    p.out_row[kind] = outs[kind].stride(0), p.out_head[kind] = outs[kind].stride(1);
    p.scale[kind] = static_cast<float>(kind < 2 ? a.qk_scale : a.v_scale);
    if (kind < 2) p.inv_d[kind] = 1.f / static_cast<float>(std::max<int64_t>(1, p.heads[kind] * d));
  }
  p.head_dim = static_cast<int32_t>(d), p.rotary_dim = static_cast<int32_t>(rotary_dim);
  for (p.lanes = 1; p.lanes * kVec < d;) p.lanes *= 2;
  const int64_t threads = std::max({q_heads.value, k_heads.value, v_heads.value}) * p.lanes;
  FI_CHECK(threads <= 2048, ValueError, "q, k and v must have at most %d heads of %lld elements; got shape %s of qkv",
           2048 / p.lanes, static_cast<long long>(d), a.qkv.shape_str().c_str());
  p.sequence = divisor(static_cast<uint32_t>(a.ppf * a.pph * a.ppw));
  p.plane = divisor(static_cast<uint32_t>(a.pph * a.ppw)), p.width = divisor(static_cast<uint32_t>(a.ppw));
  p.first_row_pair = static_cast<int32_t>(a.frame_channels / 2);
  p.first_column_pair = static_cast<int32_t>((a.frame_channels + a.height_channels) / 2);
  p.eps = static_cast<float>(a.eps), p.attention_factor = static_cast<float>(a.attention_factor);
  fill_steps(p.phase_step, a.frame_channels, a);
  fill_steps(p.phase_step + p.first_row_pair, a.height_channels, a);
  fill_steps(p.phase_step + p.first_column_pair, a.width_channels, a);

  // 3 launch
#if FI_CUDA
  const Entry& entry = tile(kernel, a.interleave, threads);
  Launch launch{tokens, 3};
  launch.threads = std::min(entry.threads, (threads + 31) / 32 * 32);
  launch.pdl = kernel.pdl(-1);
  kernel.launch(entry, launch, a.qkv.device(), p);
#else
  (void)kernel;
  run_cpu(p, tokens, a.interleave, a.qkv.dtype(), a.q_out.dtype());
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::qk_rmsnorm_rope, fi::request_of)
