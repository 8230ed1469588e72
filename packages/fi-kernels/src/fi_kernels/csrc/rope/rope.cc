// Rotary embedding of q and k: one contract for ragged, position-id and cached forms, one launch, and the CPU kernel.
#include "fi/rope/rope.h"

#include <cmath>

#include "fi/host/op.h"
#include "fi/rope/run.h"

namespace fi {
namespace {

// [nnz, heads, head_dim], or [nnz, heads * head_dim] where the head dimension is given.
struct Heads {
  int64_t count, row, head;
};

Heads heads_of(const Tensor& x, Dim& nnz, Dim& dim) {
  Dim heads{"heads"}, width{"heads * head_dim"};
  if (x.ndim() == 2 && dim >= 0) {
    x.shape(nnz, width);
    FI_CHECK(dim > 0 && width % dim == 0, ValueError,
             "%s must have a last dimension that is a multiple of %s = %lld; got %s", x.name(), dim.name,
             static_cast<long long>(dim), x.shape_str().c_str());
    return {width / dim, x.stride(0), dim};
  }
  x.shape(nnz, heads, dim);
  return {heads, x.stride(0), x.stride(1)};
}

RopePart part_of(const Tensor& in, const Heads& from, const Tensor& out, const Heads& to, int64_t skip) {
  const auto step = [](int64_t count, int64_t stride) { return count > 1 ? stride : 0; };
  const int64_t rows = in.size(0);
  RopePart part{};
  part.in = in.data<const char>() + skip * in.dtype().bytes();
  part.out = out.data<char>() + skip * out.dtype().bytes();
  part.in_row = step(rows, from.row);
  part.in_head = step(from.count, from.head);
  part.out_row = step(rows, to.row);
  part.out_head = step(to.count, to.head);
  return part;
}

bool same(const RopePart& part) {
  return part.in == part.out && part.in_row == part.out_row && part.in_head == part.out_head;
}

RopeFrequencies frequencies_of(int64_t rotary_dim, double scale, double theta, double low, double high,
                               double old_context_len) {
  FI_CHECK(scale > 0 && std::isfinite(scale), ValueError, "rope_scale must be positive and finite; got %g", scale);
  FI_CHECK(theta > 0 && std::isfinite(theta), ValueError, "rope_theta must be positive and finite; got %g", theta);
  RopeFrequencies f{};
  f.power[0] = std::pow(theta, -2.0 / static_cast<double>(rotary_dim));
  for (int i = 1; i < RopeFrequencies::kPowers; ++i) f.power[i] = f.power[i - 1] * f.power[i - 1];
  f.inverse_scale = 1.0 / scale;
  if (low != 0 || high != 0 || old_context_len != 0) {  // else not smoothed
    FI_CHECK(high > low, ValueError, "high_freq_factor must be greater than low_freq_factor; got %g and %g", high, low);
    FI_CHECK(old_context_len > 0, ValueError, "old_context_len must be positive; got %g", old_context_len);
    f.smooth_slope = old_context_len / (high - low);
    f.smooth_offset = -low / (high - low);
  }
  return f;
}

void rope(const Kernel& kernel, Tensor q_out, Tensor k_out, Tensor q, Tensor k, OptionalTensor pos_ids,
          OptionalTensor indptr, OptionalTensor offsets, OptionalTensor cos_sin_cache, int64_t head_dim,
          int64_t rotary_dim, int64_t interleave, double rope_scale, double rope_theta, double low_freq_factor,
          double high_freq_factor, double old_context_len) {
  // 1 check
  Dim nnz{"nnz"}, dim{"head_dim"}, segments{"segments"}, max_pos{"max_pos"}, table_width{"rotary_dim"};
  Tensor position = pos_ids;
  if (cos_sin_cache) {
    q = q.as("query"), k = k.as("key"), position = pos_ids.as("positions");
    dim.name = "head_size";
  }
  if (head_dim >= 0) dim.value = head_dim;
  q.is({kF32, kF16, kBF16}).inner_contiguous();
  k.like(q).inner_contiguous();
  q_out.like(q).inner_contiguous();
  k_out.like(k).inner_contiguous();
  const Heads q_heads = heads_of(q, nnz, dim), k_heads = heads_of(k, nnz, dim);
  const Heads q_to = heads_of(q_out, nnz, dim), k_to = heads_of(k_out, nnz, dim);
  FI_CHECK(q_to.count == q_heads.count && k_to.count == k_heads.count, ValueError,
           "outputs must have the shapes of q %s and k %s; got %s and %s", q.shape_str().c_str(), k.shape_str().c_str(),
           q_out.shape_str().c_str(), k_out.shape_str().c_str());
  if (pos_ids) {
    position.is({kI32, kI64}).on(q).contiguous().shape(nnz);
  } else {
    FI_CHECK(indptr && offsets, TypeError, "indptr and offsets must be tensors where no positions are given");
    indptr.is({kI32, kI64}).on(q).contiguous();
    offsets.like(indptr).contiguous().shape(segments);
    Dim bounds{"segments + 1", segments + 1};
    indptr.shape(bounds);
  }
  if (cos_sin_cache) {
    FI_CHECK(cos_sin_cache.dtype() == kF32, ValueError, "cos_sin_cache should be float32; got %s",
             cos_sin_cache.dtype().str().c_str());
    cos_sin_cache.on(q).inner_contiguous().shape(max_pos, table_width);
    rotary_dim = table_width;
  }
  if (rotary_dim < 0) rotary_dim = dim;
  FI_CHECK(rotary_dim > 0 && rotary_dim % 2 == 0 && rotary_dim <= dim, ValueError,
           "rotary_dim must be even and between 2 and %s = %lld; got %lld", dim.name, static_cast<long long>(dim),
           static_cast<long long>(rotary_dim));
  FI_CHECK(dim <= 2 << RopeFrequencies::kPowers, ValueError, "%s must be at most %d; got %lld", dim.name,
           2 << RopeFrequencies::kPowers, static_cast<long long>(dim));
  FI_CHECK(q_heads.count + k_heads.count <= 0x7fffffff, ValueError, "q and k have too many heads: %s and %s",
           q.shape_str().c_str(), k.shape_str().c_str());

  // 2 shape
  RopeParams p{};
  p.rows.rotated[kRopeQ] = part_of(q, q_heads, q_out, q_to, 0);
  p.rows.rotated[kRopeK] = part_of(k, k_heads, k_out, k_to, 0);
  p.rows.rest[kRopeQ] = part_of(q, q_heads, q_out, q_to, rotary_dim);
  p.rows.rest[kRopeK] = part_of(k, k_heads, k_out, k_to, rotary_dim);
  for (int kind : {kRopeQ, kRopeK}) {
    p.rows.heads[kind] = static_cast<int32_t>(kind == kRopeQ ? q_heads.count : k_heads.count);
    p.rows.rest_dim[kind] = same(p.rows.rest[kind]) ? 0 : static_cast<int32_t>(dim - rotary_dim);
  }
  p.rows.rotary_dim = static_cast<int32_t>(rotary_dim);
  p.rows.rows = nnz;
  if (pos_ids) {
    p.rows.pos_ids = index_of(position);
  } else {
    p.indptr = index_of(indptr);
    p.offsets = index_of(offsets);
    p.segments = segments;
  }
  if (cos_sin_cache) {
    p.rows.cos_sin = cos_sin_cache.data<float>();
    p.rows.cos_sin_row = cos_sin_cache.stride(0);
    p.rows.max_pos = max_pos;
  } else {
    p.frequencies =
        frequencies_of(rotary_dim, rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len);
  }
  if (nnz == 0 || q_heads.count + k_heads.count == 0) return;

  // 3 launch
#if FI_CUDA
  run_rope(kernel, p, q.dtype(), q.dtype(), interleave, q.device(), kernel.pdl(-1));
#else
  (void)kernel;
  std::vector<uint64_t> step;
  if (!cos_sin_cache)
    for (int32_t pair = 0; pair < p.rows.rotary_dim / 2; ++pair)
      step.push_back(p.frequencies.step(p.frequencies.turns(pair)));
  const auto angles = [&](int64_t row, float* cosine, float* sine) {
    const int64_t at = p.position(row);
    if (step.empty())
      table_angles(p.rows, at, cosine, sine);
    else
      detail::angles_of(step.data(), at, cosine, sine, p.rows.rotary_dim / 2);
  };
  const auto place = [](int, const RopePart& part, int64_t row) { return row * part.out_row; };
  run_rope(p.rows, q.dtype(), q.dtype(), interleave != 0, angles, place);
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::rope, "q_out", "k_out", "q", "k", "pos_ids", "indptr", "offsets", "cos_sin_cache", "head_dim", "rotary_dim",
      "interleave", "rope_scale", "rope_theta", "low_freq_factor", "high_freq_factor", "old_context_len")
