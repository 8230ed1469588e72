// Rotation of q and k with fp8 output, to tensors or, for k and v, to a paged cache: one contract, one launch, CPU too.
#include "fi/rope/rope_quantize.h"

#include "fi/host/op.h"
#include "fi/rope/run.h"

namespace fi {
namespace {

int64_t step(const Tensor& t, int axis) { return t.size(axis) > 1 ? t.stride(axis) : 0; }

// rows: [nnz, heads, width] or, for MLA's k, [nnz, width]; out like rows.
RopePart part_of(const Tensor& rows, const Tensor& out) {
  const bool has_heads = rows.ndim() == 3;
  return {rows.data(),
          out.data(),
          step(rows, 0),
          has_heads ? step(rows, 1) : 0,
          step(out, 0),
          has_heads ? step(out, 1) : 0,
          0};
}

// cache: [pages, page_size, heads, width], or with heads and page_size exchanged; without a head axis for MLA.
RopePart paged(const Tensor& rows, const Tensor& cache, bool head_major, int64_t skip) {
  const bool has_heads = cache.ndim() == 4;
  const int slots = has_heads && head_major ? 2 : 1;
  return {rows.data(),        cache.data<char>() + skip,
          step(rows, 0),      rows.ndim() == 3 ? step(rows, 1) : 0,
          step(cache, slots), has_heads ? step(cache, 3 - slots) : 0,
          step(cache, 0)};
}

void rope_quantize(const Kernel& kernel, Tensor q_rope, Tensor k_rope, OptionalTensor q_nope, OptionalTensor k_nope,
                   OptionalTensor v, Tensor cos_sin_cache, Tensor pos_ids, Tensor q_rope_out, OptionalTensor k_rope_out,
                   OptionalTensor q_nope_out, OptionalTensor k_nope_out, OptionalTensor k_cache, OptionalTensor v_cache,
                   OptionalTensor kv_indices, OptionalTensor kv_indptr, OptionalTensor batch_indices,
                   OptionalTensor positions, int64_t is_neox, double quant_scale_q, double quant_scale_kv,
                   int64_t page_size, int64_t head_major, int64_t enable_pdl) {
  // 1 check
  Dim nnz{"nnz"}, q_heads{"num_qo_heads"}, k_heads{"num_kv_heads", 1}, rope_dim{"rotary_dim"}, q_dim{"no_rope_dim", 0},
      k_dim{"no_rope_dim", 0}, v_dim{"v_head_dim", 0}, max_pos{"max_pos"};
  const bool mla = k_rope.ndim() == 2, append = static_cast<bool>(k_cache);
  q_rope.is({kF16, kBF16}).inner_contiguous().shape(nnz, q_heads, rope_dim);
  q_rope_out.is({kE4M3, kE5M2}).on(q_rope).inner_contiguous().shape(nnz, q_heads, rope_dim);
  const auto check_k = [&](const Tensor& t, Dim& width) { mla ? t.shape(nnz, width) : t.shape(nnz, k_heads, width); };
  if (!mla) k_heads.value = -1;
  k_rope.like(q_rope).inner_contiguous();
  check_k(k_rope, rope_dim);
  if (q_nope) {
    q_dim.value = -1;
    q_nope.like(q_rope).inner_contiguous().shape(nnz, q_heads, q_dim);
    FI_CHECK(q_nope_out, TypeError, "q_nope_out must be a tensor where q_nope is given; got None");
    q_nope_out.like(q_rope_out).inner_contiguous().shape(nnz, q_heads, q_dim);
  }
  if (k_nope) {
    k_dim.value = -1;
    k_nope.like(q_rope).inner_contiguous();
    check_k(k_nope, k_dim);
  }
  FI_CHECK(cos_sin_cache.dtype() == kF32, ValueError, "cos_sin_cache should be float32; got %s",
           cos_sin_cache.dtype().str().c_str());
  cos_sin_cache.on(q_rope).inner_contiguous().shape(max_pos, rope_dim);
  pos_ids.is({kI32, kI64}).on(q_rope).contiguous().shape(nnz);
  FI_CHECK(rope_dim > 0 && rope_dim % 2 == 0 && rope_dim <= 0x7fffffff && q_dim <= 0x7fffffff && k_dim <= 0x7fffffff,
           ValueError, "q_rope must have an even last dimension; got %s", q_rope.shape_str().c_str());
  if (append) {
    Dim pages{"num_pages"}, slots{"page_size", page_size}, bounds{"batch_size + 1"}, indices{"num_indices"};
    FI_CHECK(page_size > 0 && page_size <= 0x7fffffff, ValueError, "page_size must be positive; got %lld",
             static_cast<long long>(page_size));
    FI_CHECK(v_cache && kv_indices && kv_indptr && batch_indices && positions, TypeError,
             "paged_kv_cache, kv_indices, kv_indptr, batch_indices and positions must be tensors");
    if (mla) {
      FI_CHECK(!v, ValueError, "v must be None for MLA (k_rope of two dimensions)");
      k_cache.as("ckv_cache").shape(pages, slots, k_dim);
      v_cache.as("kpe_cache").shape(pages, slots, rope_dim);
    } else {
      FI_CHECK(v, ValueError, "v must be a tensor where k_rope has heads; got None");
      v_dim.value = -1;
      v.like(q_rope).inner_contiguous().shape(nnz, k_heads, v_dim);
      Dim &second = head_major ? k_heads : slots, &third = head_major ? slots : k_heads,
          row{"rotary_dim + no_rope_dim", rope_dim + k_dim};
      k_cache.shape(pages, second, third, row);
      v_cache.shape(pages, second, third, v_dim);
      FI_CHECK(v_dim <= 0x7fffffff, ValueError, "v is too wide: %s", v.shape_str().c_str());
    }
    k_cache.like(q_rope_out).inner_contiguous();
    v_cache.like(q_rope_out).inner_contiguous();
    for (const Tensor& t : {kv_indices, kv_indptr, batch_indices, positions})
      t.is({kI32, kI64}).on(q_rope).contiguous();
    kv_indices.shape(indices);
    kv_indptr.shape(bounds);
    batch_indices.shape(nnz);
    positions.shape(nnz);
  } else {
    FI_CHECK(!v, ValueError, "v must be None without a paged cache");
    FI_CHECK(k_rope_out && (k_nope_out || !k_nope), TypeError,
             "k_rope_out and k_nope_out must be tensors without a paged cache; got None");
    k_rope_out.like(q_rope_out).inner_contiguous();
    check_k(k_rope_out, rope_dim);
    if (k_nope) {
      k_nope_out.like(q_rope_out).inner_contiguous();
      check_k(k_nope_out, k_dim);
    }
  }
  FI_CHECK(q_heads + 2 * k_heads <= 0x7fffffff, ValueError, "q_rope and k_rope have too many heads: %s and %s",
           q_rope.shape_str().c_str(), k_rope.shape_str().c_str());

  // 2 shape
  RopeQuantizeParams p{};
  RopeRows& r = p.rows;
  r.rotated[kRopeQ] = part_of(q_rope, q_rope_out);
  if (q_nope) r.rest[kRopeQ] = part_of(q_nope, q_nope_out);
  if (append) {
    r.rotated[kRopeK] = paged(k_rope, mla ? v_cache : k_cache, head_major, 0);
    if (k_nope) r.rest[kRopeK] = paged(k_nope, k_cache, head_major, mla ? 0 : rope_dim);
    if (v) r.rest[kRopeV] = paged(v, v_cache, head_major, 0);
    p.pages = {index_of(kv_indices), index_of(kv_indptr), index_of(batch_indices), index_of(positions),
               static_cast<int32_t>(page_size)};
  } else {
    r.rotated[kRopeK] = part_of(k_rope, k_rope_out);
    if (k_nope) r.rest[kRopeK] = part_of(k_nope, k_nope_out);
  }
  const Dim* widths[] = {&q_dim, &k_dim, &v_dim};
  const int64_t heads[] = {q_heads, k_heads, v ? k_heads : 0};
  for (int kind : {kRopeQ, kRopeK, kRopeV}) {
    r.heads[kind] = static_cast<int32_t>(heads[kind]);
    r.rest_dim[kind] = static_cast<int32_t>(*widths[kind]);
    r.scale[kind] = static_cast<float>(kind == kRopeQ ? quant_scale_q : quant_scale_kv);
  }
  r.rotary_dim = static_cast<int32_t>(rope_dim);
  r.rows = nnz;
  r.pos_ids = index_of(pos_ids);
  r.cos_sin = cos_sin_cache.data<float>();
  r.cos_sin_row = step(cos_sin_cache, 0);
  r.max_pos = max_pos;
  if (nnz == 0 || q_heads + k_heads == 0) return;

  // 3 launch
#if FI_CUDA
  run_rope(kernel, p, q_rope.dtype(), q_rope_out.dtype(), !is_neox, q_rope.device(), kernel.pdl(enable_pdl));
#else
  (void)kernel, (void)enable_pdl;
  const auto angles = [&](int64_t row, float* cosine, float* sine) {
    table_angles(r, r.pos_ids.at(row), cosine, sine);
  };
  const auto place = [&](int kind, const RopePart& part, int64_t row) -> int64_t {
    if (kind == kRopeQ || !append) return row * part.out_row;
    int64_t page, slot;
    return p.pages.find(row, &page, &slot) ? page * part.out_page + slot * part.out_row : -1;
  };
  run_rope(r, q_rope.dtype(), q_rope_out.dtype(), !is_neox, angles, place);
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::rope_quantize, "q_rope", "k_rope", "q_nope", "k_nope", "v", "cos_sin_cache", "pos_ids", "q_rope_out",
      "k_rope_out", "q_nope_out", "k_nope_out", "k_cache", "v_cache", "kv_indices", "kv_indptr", "batch_indices",
      "positions", "is_neox", "quant_scale_q", "quant_scale_kv", "page_size", "head_major", "enable_pdl")
