// append_paged_kv_cache and its MLA form: checks the arguments, and copies the bytes of rows of any dtype into pages.
#include "fi/page/append_paged_kv_cache.h"

#include "fi/generated/append_paged_kv_cache.h"
#include "fi/host/contents.h"

#if FI_CUDA
#include "fi/host/tile.h"
#else
#include <algorithm>
#include <cstring>

#include "fi/cpu/parallel.h"
#endif

namespace fi {
namespace {

#if FI_CUDA
struct Tile {
  const Entry& entry;
  RowTile rows;
  int64_t grid;  // CTAs for all rows
};

// Entries are in order of preference. A small grid is bound by latency: more CTAs with one row per thread are faster
// than several rows in flight.
Tile tile(const Kernel& kernel, const AppendParams& p, DLDevice device) {
  uint64_t bits = 16;  // its lowest set bit is the widest vector that all addresses, strides and sizes allow
  for (const AppendOperand& s : {p.k, p.v})
    bits |= reinterpret_cast<uint64_t>(s.src) | reinterpret_cast<uint64_t>(s.dst) |
            static_cast<uint64_t>(s.src_row_stride | s.src_head_stride | s.dst_page_stride | s.dst_slot_stride |
                                  s.dst_head_stride | s.head_bytes);
  const int64_t max_vec_bytes = static_cast<int64_t>(bits & -bits), min_ctas = 8 * kernel.multiprocessors(device);
  const auto tile_of = [&](const Entry& entry) -> Tile {
    const auto [vec_bytes, rows_per_thread] = AppendPagedKvCacheConfig::of(entry);
    const RowTile rows((p.k.head_bytes + p.v.head_bytes) / vec_bytes * p.heads, entry.threads);
    const int64_t rows_per_cta = rows.rows * rows_per_thread;
    return {entry, rows, (p.rows + rows_per_cta - 1) / rows_per_cta};
  };
  return tile_of(kernel.first_entry([&](const Entry& entry) {
    const auto [vec_bytes, rows_per_thread] = AppendPagedKvCacheConfig::of(entry);
    if (vec_bytes > max_vec_bytes) return false;
    const Tile tile = tile_of(entry);
    return rows_per_thread == 1 || tile.grid * tile.rows.parts >= min_ctas;
  }));
}

void launch_append(const Kernel& kernel, AppendParams& p, DLDevice device) {
  const auto [entry, rows, grid] = tile(kernel, p, device);
  p.threads_per_row = static_cast<int32_t>(rows.lanes);
  Launch launch{grid, rows.parts};
  launch.threads = rows.threads;
  launch.pdl = kernel.pdl(-1);
  kernel.launch(entry, launch, device, p);
}
#else
void copy(const AppendOperand& operand, const AppendParams& p, int64_t row, int64_t page, int64_t slot) {
  const char* src = operand.src + row * operand.src_row_stride;
  char* dst = operand.dst + page * operand.dst_page_stride + slot * operand.dst_slot_stride;
  const auto bytes = static_cast<size_t>(operand.head_bytes);
  if (p.heads == 1 ||
      (operand.src_head_stride == operand.head_bytes && operand.dst_head_stride == operand.head_bytes)) {
    std::memcpy(dst, src, bytes * static_cast<size_t>(p.heads));
    return;
  }
  for (int64_t head = 0; head < p.heads; ++head)
    std::memcpy(dst + head * operand.dst_head_stride, src + head * operand.src_head_stride, bytes);
}

void run_cpu(const AppendParams& p) {
  const auto page_size = static_cast<int32_t>(p.page_size.value);
  const int64_t row_bytes = static_cast<int64_t>(p.k.head_bytes + p.v.head_bytes) * p.heads;
  cpu::parallel_for(p.rows, std::max<int64_t>(1, 65536 / row_bytes), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (p.batch_indices[row] < 0) continue;
      const int64_t page_index = p.kv_indptr[p.batch_indices[row]] + p.positions[row] / page_size;
      const int64_t page = p.kv_indices[page_index], slot = p.positions[row] % page_size;
      copy(p.k, p, row, page, slot);
      copy(p.v, p, row, page, slot);
    }
  });
}
#endif

// Describes the copy of K (kv = 0) or V (kv = 1). cache: [pages, page_size, heads, d] (NHD), [pages, heads, page_size,
// d] (head_major), or [pages, page_size, d] (MLA). A fused cache has a K/V axis of size 2 after the page axis.
AppendOperand make_operand(Tensor rows, Tensor cache, bool head_major, bool has_heads, bool fused, int kv) {
  const int64_t bytes = rows.dtype().bytes();
  const auto byte_stride = [bytes](Tensor t, int axis) { return t.size(axis) > 1 ? t.stride(axis) * bytes : 0; };
  AppendOperand s{};
  s.src = rows.data<const char>();
  s.dst = cache.data<char>() + (fused ? kv * cache.stride(1) * bytes : 0);
  s.src_row_stride = byte_stride(rows, 0);
  s.dst_page_stride = byte_stride(cache, 0);
  s.dst_slot_stride = byte_stride(cache, fused + (head_major ? 2 : 1));
  if (has_heads) {
    s.src_head_stride = byte_stride(rows, 1);
    s.dst_head_stride = byte_stride(cache, fused + (head_major ? 1 : 2));
  }
  FI_CHECK(rows.size(-1) * bytes <= 0x7fffffff, ValueError, "%s is too wide: %s", rows.name(),
           rows.shape_str().c_str());
  s.head_bytes = static_cast<int32_t>(rows.size(-1) * bytes);
  return s;
}

void append_paged_kv_cache(const Kernel& kernel, const AppendPagedKvCacheArgs& given) {
  AppendPagedKvCacheArgs a = given;  // the checks below rename tensors as the caller names them
  // 1 check
  Dim nnz{"nnz"}, heads{"num_heads"}, k_dim{a.mla ? "head_dim_ckv" : "head_dim"},
      v_dim{a.mla ? "head_dim_kpe" : "v_head_dim"};
  const bool fused = !a.v_cache;  // K and V are one tensor
  Tensor v_cache = fused ? a.k_cache : Tensor(a.v_cache);
  Dim two{"2", 2};
  Dim pages{"num_pages"}, page_size{"page_size"}, batch{"batch_size"}, indices{"num_indices"};
  if (a.mla) {
    a.append_key = a.append_key.as("append_ckv"), a.append_value = a.append_value.as("append_kpe");
    FI_CHECK(!fused, TypeError, "kpe_cache must be a tensor");
    a.k_cache = a.k_cache.as("ckv_cache"), v_cache = v_cache.as("kpe_cache");
    heads.value = 1;
    a.append_key.shape(nnz, k_dim);
    a.append_value.shape(nnz, v_dim);
    a.k_cache.shape(pages, page_size, k_dim);
    v_cache.shape(pages, page_size, v_dim);
  } else {
    a.append_key.shape(nnz, heads, k_dim);
    a.append_value.shape(nnz, heads, v_dim);
    Dim &second = a.head_major ? heads : page_size, &third = a.head_major ? page_size : heads;
    if (fused) {
      a.k_cache = v_cache = a.k_cache.as("paged_kv_cache");
      a.k_cache.shape(pages, two, second, third, k_dim);
      a.append_value.like(a.append_key).shape(nnz, heads, k_dim);
    } else {
      a.k_cache.shape(pages, second, third, k_dim);
      v_cache.shape(pages, second, third, v_dim);
    }
  }
  const bool one_cache = !fused && a.k_cache.data() == v_cache.data() && a.k_cache.numel() > 0;
  FI_CHECK(!one_cache || a.append_key.data() == a.append_value.data(), ValueError,
           "%s and %s are written, so they must not share memory: pass a tensor for each", a.k_cache.name(),
           v_cache.name());
  FI_CHECK(a.append_key.dtype().bits % 8 == 0 && a.append_value.dtype().bits % 8 == 0, TypeError,
           "%s must have a dtype of whole bytes; got %s", a.append_key.name(), a.append_key.dtype().str().c_str());
  a.append_key.inner_contiguous();
  a.append_value.inner_contiguous().on(a.append_key);
  a.k_cache.inner_contiguous().like(a.append_key);
  v_cache.inner_contiguous().like(a.append_value);
  a.kv_last_page_len.shape(batch);
  Dim bounds{"batch_size + 1", batch + 1};
  a.kv_indptr.shape(bounds);
  a.batch_indices.shape(nnz);
  a.positions.shape(nnz);
  a.kv_indices.shape(indices);
  for (const Tensor& t : {a.batch_indices, a.positions, a.kv_indices, a.kv_indptr, a.kv_last_page_len})
    t.is({kI32}).on(a.append_key).contiguous();
  FI_CHECK(page_size > 0, ValueError, "%s must have page_size > 0; got %s", a.k_cache.name(),
           a.k_cache.shape_str().c_str());
  FI_CHECK(page_size <= 0x7fffffff && heads <= 0x7fffffff, ValueError, "%s is too large: %s", a.k_cache.name(),
           a.k_cache.shape_str().c_str());

  // 2 shape
  AppendParams p{};
  p.k = make_operand(a.append_key, a.k_cache, a.head_major, !a.mla, fused, 0);
  p.v = make_operand(a.append_value, v_cache, a.head_major, !a.mla, fused, 1);
  p.batch_indices = a.batch_indices.data<int32_t>();
  p.positions = a.positions.data<int32_t>();
  p.kv_indices = a.kv_indices.data<int32_t>();
  p.kv_indptr = a.kv_indptr.data<int32_t>();
  p.rows = nnz;
  p.last_page = last_page(a.k_cache);
  p.heads = static_cast<int32_t>(heads);
  p.page_size = divisor(static_cast<uint32_t>(page_size));
  if (p.rows == 0 || p.heads == 0 || p.k.head_bytes + p.v.head_bytes == 0) return;
  FI_CHECK((static_cast<int64_t>(p.k.head_bytes) + p.v.head_bytes) * p.heads <= 0x7fffffff, ValueError,
           "%s is too wide: %s", a.append_key.name(), a.append_key.shape_str().c_str());

  if (kernel.checks_contents(a.k_cache.device()))
    check_append(kernel, a.batch_indices, a.positions, a.kv_indices, a.kv_indptr, pages, page_size);

  // 3 launch
#if FI_CUDA
  launch_append(kernel, p, a.append_key.device());
#else
  (void)kernel;
  run_cpu(p);
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::append_paged_kv_cache)
