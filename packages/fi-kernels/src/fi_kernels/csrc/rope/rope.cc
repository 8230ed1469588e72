// Rotary embedding of q and k in its ragged, position-id and cached forms: checks, the CUDA launch, the CPU kernel.
#include "fi/rope/rope.h"

#include <cmath>

#include "fi/generated/rope.h"
#include "fi/host/contents.h"
#include "fi/rope/rope_launch.h"

#if !FI_CUDA
#include "fi/rope/rope_cpu.h"
#endif

namespace fi {
namespace {

// The heads of q or k: [nnz, heads, head_dim], or [nnz, heads * head_dim] if the caller passes head_dim.
struct Heads {
  int64_t count, row_stride, head_stride;
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

// The part of q or k from element `skip` of each head on. A dimension of size 1 gets stride 0, because its stride is
// never used and must not restrict the vector width.
RopeOperand make_operand(const Tensor& in, const Heads& in_heads, const Tensor& out, const Heads& out_heads,
                         int64_t skip) {
  const auto stride_of = [](int64_t count, int64_t stride) { return count > 1 ? stride : 0; };
  const int64_t rows = in.size(0);
  RopeOperand operand{};
  operand.in = in.at(skip);
  operand.out = out.at(skip);
  operand.in_row_stride = stride_of(rows, in_heads.row_stride);
  operand.in_head_stride = stride_of(in_heads.count, in_heads.head_stride);
  operand.out_row_stride = stride_of(rows, out_heads.row_stride);
  operand.out_head_stride = stride_of(out_heads.count, out_heads.head_stride);
  return operand;
}

bool is_in_place(const RopeOperand& operand) {
  return operand.in == operand.out && operand.in_row_stride == operand.out_row_stride &&
         operand.in_head_stride == operand.out_head_stride;
}

RopeFrequencies frequencies_of(int64_t rotary_dim, double scale, double theta, double low, double high,
                               double old_context_len) {
  FI_CHECK(scale > 0 && std::isfinite(scale), ValueError, "rope_scale must be positive and finite; got %g", scale);
  FI_CHECK(theta > 0 && std::isfinite(theta), ValueError, "rope_theta must be positive and finite; got %g", theta);
  RopeFrequencies f{};
  f.power[0] = std::pow(theta, -2.0 / static_cast<double>(rotary_dim));
  for (int i = 1; i < RopeFrequencies::kPowers; ++i) f.power[i] = f.power[i - 1] * f.power[i - 1];
  f.inverse_scale = 1.0 / scale;
  if (low != 0 || high != 0 || old_context_len != 0) {  // all zero: no smoothing
    FI_CHECK(high > low, ValueError, "high_freq_factor must be greater than low_freq_factor; got %g and %g", high, low);
    FI_CHECK(old_context_len > 0, ValueError, "old_context_len must be positive; got %g", old_context_len);
    f.smooth_slope = old_context_len / (high - low);
    f.smooth_offset = -low / (high - low);
  }
  return f;
}

// The weights of the norms of heads. A head is then the work of a power of two of lanes with two vectors each.
void check_norm(const RopeArgs& a, int64_t dim) {
  FI_CHECK(a.q_weight && a.k_weight, TypeError, "q_weight and k_weight must both be tensors, or None");
  const int64_t most = 32 * 2 * 16 / a.q.dtype().bytes(), vectors = 2 * 16 / a.q.dtype().bytes();
  FI_CHECK((dim & (dim - 1)) == 0 && dim >= vectors && dim <= most && a.rotary_dim % vectors == 0, ValueError,
           "head_size must be a power of two from %lld to %lld, and rotary_dim a multiple of %lld, with q_weight; got "
           "%lld and %lld",
           static_cast<long long>(vectors), static_cast<long long>(most), static_cast<long long>(vectors),
           static_cast<long long>(dim), static_cast<long long>(a.rotary_dim));
  for (const Tensor& weight : {a.q_weight, a.k_weight}) {
    Dim width{"head_size", dim};
    weight.like(a.q).contiguous().shape(width);
  }
}

// Has k and v go to the pages of a cache, [pages, page_size, heads, dim], at the slots of their rows.
void append(const Kernel& kernel, const RopeArgs& a, const Heads& k_heads, Dim& nnz, Dim& dim, RopeParams& p) {
  FI_CHECK(a.v && a.k_cache && a.v_cache && a.q_weight, TypeError,
           "value, paged_kv_cache and q_weight must be given with slot_mapping");
  const Heads v_heads = heads_of(a.v, nnz, dim);
  a.v.like(a.q).inner_contiguous();
  FI_CHECK(v_heads.count == k_heads.count, ValueError, "value must have the %lld heads of key; got %s",
           static_cast<long long>(k_heads.count), a.v.shape_str().c_str());
  Dim pages{"pages"}, page_size{"page_size"}, heads{"heads", k_heads.count};
  for (const Tensor& cache : {a.k_cache, a.v_cache})
    cache.like(a.q).inner_contiguous().shape(pages, page_size, heads, dim);
  a.slot_mapping.is({kI32, kI64}).on(a.q).contiguous().shape(nnz);
  FI_CHECK(page_size > 0 && pages * page_size < 0x7fffffff, ValueError,
           "paged_kv_cache must have pages of at least one token and fewer than 2^31 tokens; got %s",
           a.k_cache.shape_str().c_str());
  if (kernel.checks_contents(a.q.device())) {
    const Integers slots(kernel, a.slot_mapping);
    for (int64_t i = 0; i < slots.size(); ++i)
      FI_CHECK(slots[i] < pages * page_size, ValueError,
               "slot_mapping must be below %lld, the tokens of the cache; got %lld at %lld",
               static_cast<long long>(pages * page_size), static_cast<long long>(slots[i]), static_cast<long long>(i));
  }
  const Heads k_places{k_heads.count, a.k_cache.stride(1), a.k_cache.stride(2)},
      v_places{k_heads.count, a.v_cache.stride(1), a.v_cache.stride(2)};
  p.common.rope[kRopeK] = make_operand(a.k, k_heads, a.k_cache, k_places, 0);
  p.common.nope[kRopeK] = make_operand(a.k, k_heads, a.k_cache, k_places, a.rotary_dim);
  p.common.nope[kRopeV] = make_operand(a.v, v_heads, a.v_cache, v_places, 0);
  for (RopeOperand* operand : {&p.common.rope[kRopeK], &p.common.nope[kRopeK], &p.common.nope[kRopeV]}) {
    const Tensor& cache = operand == &p.common.nope[kRopeV] ? a.v_cache : a.k_cache;
    operand->out_row_stride = cache.stride(1), operand->out_page_stride = cache.stride(0);
  }
  p.common.heads[kRopeV] = p.common.heads[kRopeK];
  p.common.nope_dim[kRopeV] = static_cast<int32_t>(dim);
  p.slots = index_array(a.slot_mapping);
  p.page_size = divisor(static_cast<uint32_t>(page_size));
}

RopeRequest request_of(const RopeArgs& a) {
  return {a.q_out.dtype(), static_cast<bool>(a.q_weight), static_cast<bool>(a.slot_mapping)};
}

void rope(const Kernel& kernel, const RopeArgs& given) {
  RopeArgs a = given;  // the checks below rename tensors as the caller names them
  // 1 check
  Dim nnz{"nnz"}, dim{"head_dim"}, segments{"segments"}, max_pos{"max_pos"}, table_width{"rotary_dim"};
  Tensor position = a.pos_ids;
  if (a.cos_sin_cache) {
    a.q = a.q.as("query"), a.k = a.k.as("key"), position = a.pos_ids.as("positions");
    dim.name = "head_size";
  }
  if (a.head_dim >= 0) dim.value = a.head_dim;
  a.q.is({kF32, kF16, kBF16}).inner_contiguous();
  a.k.like(a.q).inner_contiguous();
  a.q_out.like(a.q).inner_contiguous();
  a.k_out.like(a.k).inner_contiguous();
  const Heads q_heads = heads_of(a.q, nnz, dim), k_heads = heads_of(a.k, nnz, dim);
  const Heads q_out_heads = heads_of(a.q_out, nnz, dim), k_out_heads = heads_of(a.k_out, nnz, dim);
  FI_CHECK(q_out_heads.count == q_heads.count && k_out_heads.count == k_heads.count, ValueError,
           "outputs must have the shapes of q %s and k %s; got %s and %s", a.q.shape_str().c_str(),
           a.k.shape_str().c_str(), a.q_out.shape_str().c_str(), a.k_out.shape_str().c_str());
  if (a.pos_ids) {
    position.is({kI32, kI64}).on(a.q).contiguous().shape(nnz);
  } else {
    FI_CHECK(a.indptr && a.offsets, TypeError, "indptr and offsets must be tensors if pos_ids is None");
    a.indptr.is({kI32, kI64}).on(a.q).contiguous();
    a.offsets.like(a.indptr).contiguous().shape(segments);
    Dim bounds{"segments + 1", segments + 1};
    a.indptr.shape(bounds);
  }
  if (a.cos_sin_cache) {
    FI_CHECK(a.cos_sin_cache.dtype() == kF32, ValueError, "cos_sin_cache should be float32; got %s",
             a.cos_sin_cache.dtype().str().c_str());
    a.cos_sin_cache.on(a.q).inner_contiguous().shape(max_pos, table_width);
    a.rotary_dim = table_width;
  }
  if (a.rotary_dim == -1) a.rotary_dim = dim;  // None
  FI_CHECK(a.rotary_dim > 0 && a.rotary_dim % 2 == 0 && a.rotary_dim <= dim, ValueError,
           "rotary_dim must be even and between 2 and %s = %lld; got %lld", dim.name, static_cast<long long>(dim),
           static_cast<long long>(a.rotary_dim));
  FI_CHECK(dim <= 2 << RopeFrequencies::kPowers, ValueError, "%s must be at most %d; got %lld", dim.name,
           2 << RopeFrequencies::kPowers, static_cast<long long>(dim));
  if (a.q_weight || a.k_weight) check_norm(a, dim);
  FI_CHECK(q_heads.count + k_heads.count <= 0x7fffffff, ValueError, "q and k have too many heads: %s and %s",
           a.q.shape_str().c_str(), a.k.shape_str().c_str());

  // 2 shape
  RopeParams p{};
  p.common.rope[kRopeQ] = make_operand(a.q, q_heads, a.q_out, q_out_heads, 0);
  p.common.rope[kRopeK] = make_operand(a.k, k_heads, a.k_out, k_out_heads, 0);
  p.common.nope[kRopeQ] = make_operand(a.q, q_heads, a.q_out, q_out_heads, a.rotary_dim);
  p.common.nope[kRopeK] = make_operand(a.k, k_heads, a.k_out, k_out_heads, a.rotary_dim);
  for (int kind : {kRopeQ, kRopeK}) {
    p.common.heads[kind] = static_cast<int32_t>(kind == kRopeQ ? q_heads.count : k_heads.count);
    const Tensor& weight = kind == kRopeQ ? a.q_weight : a.k_weight;
    p.common.weight[kind] = weight ? weight.data() : nullptr;
    p.common.nope_dim[kind] =
        is_in_place(p.common.nope[kind]) && !weight ? 0 : static_cast<int32_t>(dim - a.rotary_dim);
  }
  FI_CHECK(a.slot_mapping || !(a.v || a.k_cache), TypeError,
           "slot_mapping must be given with value and paged_kv_cache; got None");
  if (a.slot_mapping) append(kernel, a, k_heads, nnz, dim, p);
  p.common.eps = static_cast<float>(a.eps);
  p.common.rotary_dim = static_cast<int32_t>(a.rotary_dim);
  p.common.rows = nnz;
  if (a.pos_ids) {
    p.common.pos_ids = index_array(position);
  } else {
    p.indptr = index_array(a.indptr);
    p.offsets = index_array(a.offsets);
    p.segments = segments;
  }
  if (a.cos_sin_cache) {
    p.common.cos_sin = a.cos_sin_cache.data<float>();
    p.common.cos_sin_stride = a.cos_sin_cache.stride(0);
    p.common.max_pos = max_pos;
  } else {
    p.frequencies = frequencies_of(a.rotary_dim, a.rope_scale, a.rope_theta, a.low_freq_factor, a.high_freq_factor,
                                   a.old_context_len);
  }
  if (nnz == 0 || q_heads.count + k_heads.count == 0) return;
  if (!a.pos_ids && kernel.checks_contents(a.q.device())) check_offsets(Integers(kernel, a.indptr), INT64_MAX);

  // 3 launch
#if FI_CUDA
  const auto aligned = [](const Tensor& weight) { return reinterpret_cast<uintptr_t>(weight.data()) % 16 == 0; };
  FI_CHECK(!a.q_weight ||
               (aligned(a.q_weight) && aligned(a.k_weight) &&
                detail::max_vec_size(p.common, a.q.dtype().bytes(), a.q.dtype().bytes()) * a.q.dtype().bytes() >= 16),
           ValueError, "%s, %s and weights must have heads at multiples of 16 bytes with q_weight", a.q.name(),
           a.k.name());
  launch_rope<RopeConfig>(kernel, p, a.q.dtype(), a.q.dtype(), a.interleave, a.q.device(), kernel.pdl(-1));
#else
  (void)kernel;
  std::vector<uint64_t> phase_steps;
  if (!a.cos_sin_cache)
    for (int32_t pair = 0; pair < p.common.rotary_dim / 2; ++pair)
      phase_steps.push_back(p.frequencies.phase_step(p.frequencies.revolutions(pair)));
  const auto angles = [&](int64_t row, float* cosine, float* sine) {
    const int64_t pos = p.position(row);
    if (phase_steps.empty())
      cached_angles(p.common, pos, cosine, sine);
    else
      detail::compute_angles(phase_steps.data(), pos, cosine, sine, p.common.rotary_dim / 2);
  };
  const auto row_offset = [&](int kind, const RopeOperand& operand, int64_t row) {
    return p.place(kind, operand, row);
  };
  rope_cpu(p.common, a.q.dtype(), a.q.dtype(), a.interleave != 0, angles, row_offset);
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::rope, fi::request_of)
