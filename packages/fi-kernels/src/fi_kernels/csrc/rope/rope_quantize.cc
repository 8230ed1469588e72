// Rope with fp8 output to tensors, or for k and v to a paged cache: checks, the CUDA launch, the CPU kernel.
#include "fi/rope/rope_quantize.h"

#include "fi/generated/rope_quantize.h"
#include "fi/host/contents.h"
#include "fi/rope/rope_launch.h"

#if !FI_CUDA
#include "fi/rope/rope_cpu.h"
#endif

namespace fi {
namespace {

// The stride of an axis; 0 for an axis of size 1, whose stride is never used and must not restrict the vector width.
int64_t stride_of(const Tensor& t, int axis) { return t.size(axis) > 1 ? t.stride(axis) : 0; }

// rows: [nnz, heads, width], or [nnz, width] for k of MLA; out has the same shape.
RopeOperand make_operand(const Tensor& rows, const Tensor& out) {
  const bool has_heads = rows.ndim() == 3;
  return {rows.data(),
          out.data(),
          stride_of(rows, 0),
          has_heads ? stride_of(rows, 1) : 0,
          stride_of(out, 0),
          has_heads ? stride_of(out, 1) : 0,
          0};
}

// cache: [pages, page_size, heads, width] (NHD), [pages, heads, page_size, width] (head_major) or [pages, page_size,
// width] (MLA).
RopeOperand make_paged_operand(const Tensor& rows, const Tensor& cache, bool head_major, int64_t skip) {
  const bool has_heads = cache.ndim() == 4;
  const int slots = has_heads && head_major ? 2 : 1;
  return {rows.data(),
          cache.data<char>() + skip,
          stride_of(rows, 0),
          rows.ndim() == 3 ? stride_of(rows, 1) : 0,
          stride_of(cache, slots),
          has_heads ? stride_of(cache, 3 - slots) : 0,
          stride_of(cache, 0)};
}

RopeQuantizeRequest request_of(const RopeQuantizeArgs& a) { return {a.q_rope.dtype(), a.q_rope_out.dtype()}; }

void rope_quantize(const Kernel& kernel, const RopeQuantizeArgs& a) {
  // 1 check
  Dim nnz{"nnz"}, q_heads{"num_qo_heads"}, k_heads{"num_kv_heads", 1}, rope_dim{"rotary_dim"}, q_dim{"no_rope_dim", 0},
      k_dim{"no_rope_dim", 0}, v_dim{"v_head_dim", 0}, max_pos{"max_pos"};
  const bool mla = a.k_rope.ndim() == 2, append = static_cast<bool>(a.k_cache);
  a.q_rope.is({kF16, kBF16}).inner_contiguous().shape(nnz, q_heads, rope_dim);
  a.q_rope_out.is({kE4M3, kE5M2}).on(a.q_rope).inner_contiguous().shape(nnz, q_heads, rope_dim);
  const auto check_k = [&](const Tensor& t, Dim& width) { mla ? t.shape(nnz, width) : t.shape(nnz, k_heads, width); };
  if (!mla) k_heads.value = -1;
  a.k_rope.like(a.q_rope).inner_contiguous();
  check_k(a.k_rope, rope_dim);
  if (a.q_nope) {
    q_dim.value = -1;
    a.q_nope.like(a.q_rope).inner_contiguous().shape(nnz, q_heads, q_dim);
    FI_CHECK(a.q_nope_out, TypeError, "q_nope_out must be a tensor where q_nope is given; got None");
    a.q_nope_out.like(a.q_rope_out).inner_contiguous().shape(nnz, q_heads, q_dim);
  }
  if (a.k_nope) {
    k_dim.value = -1;
    a.k_nope.like(a.q_rope).inner_contiguous();
    check_k(a.k_nope, k_dim);
  }
  FI_CHECK(a.cos_sin_cache.dtype() == kF32, ValueError, "cos_sin_cache should be float32; got %s",
           a.cos_sin_cache.dtype().str().c_str());
  a.cos_sin_cache.on(a.q_rope).inner_contiguous().shape(max_pos, rope_dim);
  a.pos_ids.is({kI32, kI64}).on(a.q_rope).contiguous().shape(nnz);
  FI_CHECK(rope_dim > 0 && rope_dim % 2 == 0 && rope_dim <= 0x7fffffff && q_dim <= 0x7fffffff && k_dim <= 0x7fffffff,
           ValueError, "q_rope must have an even last dimension; got %s", a.q_rope.shape_str().c_str());
  if (append) {
    Dim pages{"num_pages"}, slots{"page_size", a.page_size}, bounds{"batch_size + 1"}, indices{"num_indices"};
    FI_CHECK(a.page_size > 0 && a.page_size <= 0x7fffffff, ValueError, "page_size must be positive; got %lld",
             static_cast<long long>(a.page_size));
    FI_CHECK(a.v_cache && a.kv_indices && a.kv_indptr && a.batch_indices && a.positions, TypeError,
             "paged_kv_cache, kv_indices, kv_indptr, batch_indices and positions must be tensors");
    if (mla) {
      FI_CHECK(!a.v, ValueError, "v must be None for MLA (k_rope of two dimensions)");
      a.k_cache.as("ckv_cache").shape(pages, slots, k_dim);
      a.v_cache.as("kpe_cache").shape(pages, slots, rope_dim);
    } else {
      FI_CHECK(a.v, ValueError, "v must be a tensor where k_rope has heads; got None");
      v_dim.value = -1;
      a.v.like(a.q_rope).inner_contiguous().shape(nnz, k_heads, v_dim);
      Dim &second = a.head_major ? k_heads : slots, &third = a.head_major ? slots : k_heads,
          row{"rotary_dim + no_rope_dim", rope_dim + k_dim};
      a.k_cache.shape(pages, second, third, row);
      a.v_cache.shape(pages, second, third, v_dim);
      FI_CHECK(v_dim <= 0x7fffffff, ValueError, "v is too wide: %s", a.v.shape_str().c_str());
    }
    a.k_cache.like(a.q_rope_out).inner_contiguous();
    a.v_cache.like(a.q_rope_out).inner_contiguous();
    for (const Tensor& t : {a.kv_indices, a.kv_indptr, a.batch_indices, a.positions})
      t.is({kI32, kI64}).on(a.q_rope).contiguous();
    a.kv_indices.shape(indices);
    a.kv_indptr.shape(bounds);
    a.batch_indices.shape(nnz);
    a.positions.shape(nnz);
  } else {
    FI_CHECK(!a.v, ValueError, "v must be None without a paged cache");
    FI_CHECK(a.k_rope_out && (a.k_nope_out || !a.k_nope), TypeError,
             "k_rope_out and k_nope_out must be tensors without a paged cache; got None");
    a.k_rope_out.like(a.q_rope_out).inner_contiguous();
    check_k(a.k_rope_out, rope_dim);
    if (a.k_nope) {
      a.k_nope_out.like(a.q_rope_out).inner_contiguous();
      check_k(a.k_nope_out, k_dim);
    }
  }
  FI_CHECK(q_heads + 2 * k_heads <= 0x7fffffff, ValueError, "q_rope and k_rope have too many heads: %s and %s",
           a.q_rope.shape_str().c_str(), a.k_rope.shape_str().c_str());

  // 2 shape
  RopeQuantizeParams p{};
  RopeCommon& c = p.common;
  c.rope[kRopeQ] = make_operand(a.q_rope, a.q_rope_out);
  if (a.q_nope) c.nope[kRopeQ] = make_operand(a.q_nope, a.q_nope_out);
  if (append) {
    c.rope[kRopeK] = make_paged_operand(a.k_rope, mla ? a.v_cache : a.k_cache, a.head_major, 0);
    if (a.k_nope) c.nope[kRopeK] = make_paged_operand(a.k_nope, a.k_cache, a.head_major, mla ? 0 : rope_dim);
    if (a.v) c.nope[kRopeV] = make_paged_operand(a.v, a.v_cache, a.head_major, 0);
    p.pages = {index_array(a.kv_indices), index_array(a.kv_indptr),          index_array(a.batch_indices),
               index_array(a.positions),  static_cast<int32_t>(a.page_size), a.k_cache.size(0)};
  } else {
    c.rope[kRopeK] = make_operand(a.k_rope, a.k_rope_out);
    if (a.k_nope) c.nope[kRopeK] = make_operand(a.k_nope, a.k_nope_out);
  }
  const Dim* widths[] = {&q_dim, &k_dim, &v_dim};
  const int64_t heads[] = {q_heads, k_heads, a.v ? k_heads : 0};
  for (int kind : {kRopeQ, kRopeK, kRopeV}) {
    c.heads[kind] = static_cast<int32_t>(heads[kind]);
    c.nope_dim[kind] = static_cast<int32_t>(*widths[kind]);
    c.scale[kind] = static_cast<float>(kind == kRopeQ ? a.quant_scale_q : a.quant_scale_kv);
  }
  c.rotary_dim = static_cast<int32_t>(rope_dim);
  c.rows = nnz;
  c.pos_ids = index_array(a.pos_ids);
  c.cos_sin = a.cos_sin_cache.data<float>();
  c.cos_sin_stride = stride_of(a.cos_sin_cache, 0);
  c.max_pos = max_pos;
  if (nnz == 0 || q_heads + k_heads == 0) return;
  if (append && kernel.checks_contents(a.q_rope.device()))
    check_append(kernel, a.batch_indices, a.positions, a.kv_indices, a.kv_indptr, a.k_cache.size(0), a.page_size);

  // 3 launch
#if FI_CUDA
  launch_rope<RopeQuantizeConfig>(kernel, p, a.q_rope.dtype(), a.q_rope_out.dtype(), !a.is_neox, a.q_rope.device(),
                                  kernel.pdl(a.enable_pdl));
#else
  (void)kernel, (void)a.enable_pdl;
  const auto angles = [&](int64_t row, float* cosine, float* sine) {
    cached_angles(c, c.pos_ids.at(row), cosine, sine);
  };
  const auto row_offset = [&](int kind, const RopeOperand& operand, int64_t row) -> int64_t {
    if (kind == kRopeQ || !append) return row * operand.out_row_stride;
    int64_t page, slot;
    return p.pages.find(row, &page, &slot) ? page * operand.out_page_stride + slot * operand.out_row_stride : -1;
  };
  rope_cpu(c, a.q_rope.dtype(), a.q_rope_out.dtype(), !a.is_neox, angles, row_offset);
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::rope_quantize, fi::request_of)
