// Argument checks that all attention ops share, and the conversion of arguments to parts of AttentionProblem.
#pragma once
#include <algorithm>
#include <cmath>
#include <utility>

#include "fi/attention/problem.h"
#include "fi/host/op.h"

namespace fi {

enum PosEncoding { kRopeOnTheFly = 1, kAlibi = 2 };

inline Rotary rotary(int64_t dim, double scale, double theta) {
  Rotary r{1, {}};
  for (int i = 0; i < RopeFrequencies::kPowers; ++i)
    r.frequencies.power[i] = std::pow(theta, -2.0 * (1 << i) / static_cast<double>(dim));
  r.frequencies.inverse_scale = 1 / scale;
  return r;
}

inline OutType out_type(DType d) {
  if (d == kF16) return OutType::kF16;
  if (d == kBF16) return OutType::kBF16;
  if (d == kF32) return OutType::kF32;
  return d == kE4M3 ? OutType::kE4M3 : OutType::kE5M2;
}

inline const float* factors(const OptionalTensor& scale, const Tensor& q, Dim& heads) {
  if (!scale) return nullptr;
  scale.is({kF32}).on(q).contiguous().shape(heads);
  return scale.data<float>();
}

inline const float* scalar(const OptionalTensor& x, const Tensor& q) {
  if (!x) return nullptr;
  FI_CHECK(x.is({kF32}).on(q).numel() == 1, ValueError, "%s must have one element; got %s", x.name(),
           x.shape_str().c_str());
  return x.data<const float>();
}

inline void check_head_dim(const Tensor& t, int64_t dim) {
  FI_CHECK(dim >= 8 && dim <= 512 && dim % 8 == 0, ValueError,
           "Unsupported head_dim: the last dimension of %s must be a multiple of 8 up to 512; got %lld", t.name(),
           static_cast<long long>(dim));
}

// Keys and values of uint8 are NVFP4: two elements a byte, with scales.
inline bool is_nvfp4(const Tensor& k) { return k.dtype() == kU8; }

// nvfp4: whether the op takes it.
inline void check_dtypes(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, bool nvfp4) {
  q.is({kF16, kBF16, kF32, kE4M3, kE5M2});
  k.on(q);
  const bool other = q.dtype().bits == 16 && (k.dtype().bits == 8 || k.dtype().bits == 16) && k.dtype().code != kDLInt;
  if (!other) k.like(q);
  if (!nvfp4 || !is_nvfp4(k)) k.is({kF16, kBF16, kF32, kE4M3, kE5M2});
  v.like(k);
  out.is({kF16, kBF16, kF32, kE4M3, kE5M2}).on(q);
}

// Keys and values: two tensors, or the halves of a cache that has an axis of 2 behind the pages. It must not move.
struct KvCache {
  DLTensor half[2];
  int64_t sizes[2][8];
  Tensor k, v;

  KvCache(const Tensor& keys, const OptionalTensor& values) : k(keys), v(values) {
    if (values) return;
    FI_CHECK(keys.ndim() == 5 && keys.size(1) == 2, ValueError,
             "%s must have shape [pages, 2, ...] where v is None; got %s", keys.name(), keys.shape_str().c_str());
    for (int side = 0; side < 2; ++side) {
      DLTensor& t = half[side] = *keys.dlpack();
      t.ndim = 4, t.shape = sizes[side], t.strides = sizes[side] + 4;
      t.byte_offset += static_cast<uint64_t>(side * keys.stride(1) * keys.dtype().bytes());
      for (int i = 0; i < 4; ++i) t.shape[i] = keys.size(i + (i > 0)), t.strides[i] = keys.stride(i + (i > 0));
    }
    k = Tensor(&half[0], "k"), v = Tensor(&half[1], "v");
  }
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;
};

// The sizes that every attention op binds by its shapes.
struct AttentionDims {
  Dim qo_heads{"num_qo_heads"}, kv_heads{"num_kv_heads"}, head_dim_qk{"head_dim_qk"}, head_dim_vo{"head_dim_vo"};
};

// Checks the arguments of every attention op after their shapes are bound. k, v: the caches, or ragged keys.
template <class Args>
void check_attention(const Args& a, const Tensor& k, const Tensor& v, const AttentionDims& dims, bool nvfp4) {
  check_dtypes(a.q, k, v, a.out, nvfp4);
  check_head_dim(a.q, dims.head_dim_qk);
  check_head_dim(v, dims.head_dim_vo);
  FI_CHECK(dims.kv_heads > 0 && dims.qo_heads % dims.kv_heads == 0, ValueError,
           "q must have a multiple of %s's heads: num_qo_heads = %lld, num_kv_heads = %lld", k.name(),
           static_cast<long long>(dims.qo_heads), static_cast<long long>(dims.kv_heads));
  FI_CHECK(a.rope_scale > 0 && a.rope_theta > 0, ValueError,
           "rope_scale and rope_theta must be positive; got %g and %g", a.rope_scale, a.rope_theta);
}

// The scales of NVFP4 keys and values, with the axes of the caches or of ragged keys; for other types there are none.
inline KvScales kv_scales(const OptionalTensor& k_scales, const OptionalTensor& v_scales, const Tensor& k,
                          const Tensor& v, int64_t kv_layout) {
  KvScales s{};
  if (!is_nvfp4(k)) {
    FI_CHECK(!k_scales && !v_scales, ValueError, "kv_cache_sf requires NVFP4 keys and values, of uint8; got %s",
             k.dtype().str().c_str());
    return s;
  }
  FI_CHECK(k_scales && v_scales, ValueError,
           "kv_cache_sf must hold the scales of %s and %s, which are uint8 (NVFP4); got None", k.name(), v.name());
  for (const auto& [scales, of] : {std::pair<Tensor, Tensor>(k_scales, k), std::pair<Tensor, Tensor>(v_scales, v)}) {
    FI_CHECK(of.size(-1) % 8 == 0, ValueError,
             "%s must have a head_dim that is a multiple of 16; got bytes of shape %s", of.name(),
             of.shape_str().c_str());
    scales.is({kE4M3, kU8}).on(k).inner_contiguous().shape_of(of, Dim{"head_dim / 16", of.size(-1) / 8});
  }
  const int token = kv_layout == 0 ? -3 : -2, head = kv_layout == 0 ? -2 : -3;
  s.k = k_scales.data<const uint8_t>();
  s.v = v_scales.data<const uint8_t>();
  if (k.ndim() == 4) s.k_page = k_scales.stride(0), s.v_page = v_scales.stride(0);
  s.k_token = k_scales.stride(token), s.v_token = v_scales.stride(token);
  s.k_head = k_scales.stride(head), s.v_head = v_scales.stride(head);
  return s;
}

// Fills what the attention ops have in common: tensors with their strides, heads, scales and scores. The mask is the
// op's own, but for its window. q may lack the axis of tokens.
template <class Args>
void fill_attention(AttentionProblem& p, const Args& a, const Tensor& k, const Tensor& v, AttentionDims& dims) {
  const int token = a.kv_layout == 0 ? -3 : -2, head = a.kv_layout == 0 ? -2 : -3;
  const bool one = a.q.ndim() == 2;
  p.q = a.q.data();
  p.k = k.data();
  p.v = v.data();
  p.out = a.out.data();
  p.lse = a.lse ? a.lse.template data<float>() : nullptr;
  p.scale_q = factors(a.scale_q, a.q, dims.qo_heads);
  p.scale_k = factors(a.scale_k, a.q, dims.kv_heads);
  p.scale_v = factors(a.scale_v, a.q, dims.kv_heads);
  p.q_token = one ? 0 : a.q.stride(0);
  p.q_head = a.q.stride(-2);
  p.k_token = k.stride(token);
  p.k_head = k.stride(head);
  p.v_token = v.stride(token);
  p.v_head = v.stride(head);
  p.out_token = one ? 0 : a.out.stride(0);
  p.out_head = a.out.stride(-2);
  p.qo_heads = static_cast<int32_t>(dims.qo_heads);
  p.kv_heads = static_cast<int32_t>(dims.kv_heads);
  p.group_size = divisor(static_cast<uint32_t>(std::max<int64_t>(dims.qo_heads / dims.kv_heads, 1)));
  p.head_dim_qk = static_cast<int32_t>(dims.head_dim_qk);
  p.head_dim_vo = static_cast<int32_t>(dims.head_dim_vo);
  p.out_type = out_type(a.out.dtype());
  p.out_scale = static_cast<float>(a.out_scale);
  p.mask.window_left = static_cast<int32_t>(std::min<int64_t>(std::max<int64_t>(a.window_left, -1), 0x7fffffff));
  p.scores = {static_cast<float>(a.sm_scale), static_cast<float>(a.soft_cap), a.pos_encoding == kAlibi};
  if (a.pos_encoding == kRopeOnTheFly) p.rotary = rotary(dims.head_dim_qk, a.rope_scale, a.rope_theta);
}

// Whether rows of q, k and v begin at multiples of one load: 8 elements, in two loads of 16 bytes for fp32.
inline bool rows_aligned(const AttentionProblem& p, const Tensor& q, const Tensor& k, const Tensor& v, int64_t k_page,
                         int64_t v_page) {
  const auto load = [](const Tensor& t) { return is_nvfp4(t) ? 4 : std::min<int64_t>(16, 8 * t.dtype().bytes()); };
  return q.alignment(load(q), {p.q_token, p.q_head}) == load(q) &&
         k.alignment(load(k), {k_page, p.k_token, p.k_head}) == load(k) &&
         v.alignment(load(v), {v_page, p.v_token, p.v_head}) == load(v);
}

// Whether four scales of a row can be loaded at once, and are those of 64 elements.
inline bool scales_aligned(const Tensor& k_scales, const Tensor& v_scales) {
  for (const Tensor& t : {k_scales, v_scales})
    if (t.size(-1) % 4 || t.row_alignment(4) < 4) return false;
  return true;
}

// The largest power of 2, up to 16, that divides the addresses of all rows, in bytes. scales: of NVFP4, whose rows are
// loaded whole, or by 16 bytes.
inline int64_t alignment_of(std::initializer_list<Tensor> tensors, std::initializer_list<Tensor> scales = {}) {
  int64_t found = 16;
  for (const Tensor& t : tensors) found = std::min(found, t.row_alignment(16));
  for (const Tensor& t : scales) {
    const int64_t row = std::min<int64_t>(16, t.size_or_0(-1));
    if (const int64_t width = t.row_alignment(16); width < row) found = std::min(found, width);
  }
  return found;
}

// Of kernels that load rows by 16 bytes, where no request has chosen another one: a user's variant has one kernel.
inline void check_alignment(int64_t alignment) {
  FI_CHECK(alignment == 16, ValueError, "alignment 16 is required of the rows of tensors; got %lld",
           static_cast<long long>(alignment));
}

// The fields that requests of batches share. page_size: 0 for ragged keys.
template <class Request, class Args>
Request attention_request(const Args& a, const Tensor& k, const Tensor& v, bool paged) {
  const int first = paged ? 1 : 0;  // of the axes of kv heads and tokens
  const bool nhd = a.kv_layout == 0, nvfp4 = is_nvfp4(k), whole = a.q.ndim() > 2;
  const int64_t kv_heads = k.size_or_0(nhd ? first + 1 : first);
  Request r{};
  r.q = a.q.dtype(), r.kv = nvfp4 ? kE2M1 : k.dtype(), r.out = a.out.dtype();
  r.head_dim_qk = whole ? a.q.size(-1) : 0;
  r.head_dim_vo = v.size_or_0(-1) * (nvfp4 ? 2 : 1);
  r.group_size = whole && kv_heads > 0 ? a.q.size(-2) / kv_heads : 0;
  r.page_size = paged ? k.size_or_0(nhd ? 1 : 2) : 0;
  r.pos_encoding = static_cast<typename Request::PosEncoding>(a.pos_encoding);
  r.soft_cap = a.soft_cap > 0;
  r.scaled = a.scale_q || a.scale_k || a.scale_v || a.bmm1_scale || a.bmm2_scale;
  r.split_tables = a.v_table_offset != 0;
  return r;
}

}  // namespace fi
