// append_paged_kv_cache and its MLA form: one contract, one launch, and the CPU kernel; a raw copy of any dtype.
#include "fi/page/append_paged_kv_cache.h"

#include "fi/host/op.h"

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
// Entries in order of preference; config = {bytes a vector, rows a thread}.
void launch(const Kernel& kernel, AppendParams& p, DLDevice device) {
  uint64_t low = 16;  // the lowest bit set is the widest vector that every address and length allows
  for (const AppendSide& s : {p.k, p.v})
    low |= reinterpret_cast<uint64_t>(s.from) | reinterpret_cast<uint64_t>(s.to) |
           static_cast<uint64_t>(s.from_row | s.from_head | s.to_page | s.to_slot | s.to_head | s.bytes);
  const int64_t widest = static_cast<int64_t>(low & -low), blocks_wanted = 8 * Kernel::multiprocessors(device);
  for (const Entry& entry : kernel.entries) {
    const int64_t bytes = entry.config[0], rows = entry.config[1];
    if (bytes > widest) continue;
    const RowTile tile((p.k.bytes + p.v.bytes) / bytes * p.heads, entry.threads);
    const int64_t blocks = (p.rows + tile.rows * rows - 1) / (tile.rows * rows);
    if (rows > 1 && blocks * tile.parts < blocks_wanted) continue;  // few rows: latency counts, not bytes in flight
    p.lanes = static_cast<int32_t>(tile.lanes);
    Launch config{blocks, tile.parts};
    config.threads = tile.threads;
    config.pdl = kernel.pdl(-1);
    return kernel.launch(entry, config, device, p);
  }
  raise("RuntimeError", "no entry for vectors of %lld bytes", static_cast<long long>(widest));
}
#else
void copy(const AppendSide& side, const AppendParams& p, int64_t row, int64_t page, int64_t slot) {
  const char* from = side.from + row * side.from_row;
  char* to = side.to + page * side.to_page + slot * side.to_slot;
  const auto bytes = static_cast<size_t>(side.bytes);
  if (p.heads == 1 || (side.from_head == side.bytes && side.to_head == side.bytes)) {
    std::memcpy(to, from, bytes * static_cast<size_t>(p.heads));
    return;
  }
  for (int64_t head = 0; head < p.heads; ++head)
    std::memcpy(to + head * side.to_head, from + head * side.from_head, bytes);
}

void run_cpu(const AppendParams& p) {
  const auto page_size = static_cast<int32_t>(p.page_size.value);
  const int64_t row_bytes = static_cast<int64_t>(p.k.bytes + p.v.bytes) * p.heads;
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

// cache: [pages, page_size, heads, d], or with heads and page_size exchanged; without a head axis for MLA. A fused
// cache has an axis of two behind the pages, of which this side is `which`.
AppendSide side(Tensor rows, Tensor cache, bool head_major, bool has_heads, bool fused, int which) {
  const int64_t bytes = rows.dtype().bytes();
  const auto step = [bytes](Tensor t, int axis) { return t.size(axis) > 1 ? t.stride(axis) * bytes : 0; };
  AppendSide s{};
  s.from = rows.data<const char>();
  s.to = cache.data<char>() + (fused ? which * cache.stride(1) * bytes : 0);
  s.from_row = step(rows, 0);
  s.to_page = step(cache, 0);
  s.to_slot = step(cache, fused + (head_major ? 2 : 1));
  if (has_heads) {
    s.from_head = step(rows, 1);
    s.to_head = step(cache, fused + (head_major ? 1 : 2));
  }
  FI_CHECK(rows.size(-1) * bytes <= 0x7fffffff, ValueError, "%s is too wide: %s", rows.name(),
           rows.shape_str().c_str());
  s.bytes = static_cast<int32_t>(rows.size(-1) * bytes);
  return s;
}

void append(const Kernel& kernel, Tensor append_key, Tensor append_value, Tensor batch_indices, Tensor positions,
            Tensor k_cache, OptionalTensor second_cache, Tensor kv_indices, Tensor kv_indptr, Tensor kv_last_page_len,
            int64_t head_major, int64_t mla) {
  // 1 check
  Dim nnz{"nnz"}, heads{"num_heads"}, k_dim{mla ? "head_dim_ckv" : "head_dim"},
      v_dim{mla ? "head_dim_kpe" : "v_head_dim"};
  const bool fused = !second_cache;  // K and V in one tensor
  Tensor v_cache = fused ? k_cache : Tensor(second_cache);
  Dim two{"2", 2};
  Dim pages{"num_pages"}, page_size{"page_size"}, batch{"batch_size"}, indices{"num_indices"};
  if (mla) {
    append_key = append_key.as("append_ckv"), append_value = append_value.as("append_kpe");
    FI_CHECK(!fused, TypeError, "kpe_cache must be a tensor");
    k_cache = k_cache.as("ckv_cache"), v_cache = v_cache.as("kpe_cache");
    heads.value = 1;
    append_key.shape(nnz, k_dim);
    append_value.shape(nnz, v_dim);
    k_cache.shape(pages, page_size, k_dim);
    v_cache.shape(pages, page_size, v_dim);
  } else {
    append_key.shape(nnz, heads, k_dim);
    append_value.shape(nnz, heads, v_dim);
    Dim &second = head_major ? heads : page_size, &third = head_major ? page_size : heads;
    if (fused) {
      k_cache = v_cache = k_cache.as("paged_kv_cache");
      k_cache.shape(pages, two, second, third, k_dim);
      append_value.like(append_key).shape(nnz, heads, k_dim);
    } else {
      k_cache.shape(pages, second, third, k_dim);
      v_cache.shape(pages, second, third, v_dim);
    }
  }
  FI_CHECK(append_key.dtype().bits % 8 == 0 && append_value.dtype().bits % 8 == 0, TypeError,
           "%s must have a dtype of whole bytes; got %s", append_key.name(), append_key.dtype().str().c_str());
  append_key.inner_contiguous();
  append_value.inner_contiguous().on(append_key);
  k_cache.inner_contiguous().like(append_key);
  v_cache.inner_contiguous().like(append_value);
  kv_last_page_len.shape(batch);
  Dim bounds{"batch_size + 1", batch + 1};
  kv_indptr.shape(bounds);
  batch_indices.shape(nnz);
  positions.shape(nnz);
  kv_indices.shape(indices);
  for (const Tensor& t : {batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len})
    t.is({kI32}).on(append_key).contiguous();
  FI_CHECK(page_size > 0, ValueError, "%s must have page_size > 0; got %s", k_cache.name(),
           k_cache.shape_str().c_str());
  FI_CHECK(page_size <= 0x7fffffff && heads <= 0x7fffffff, ValueError, "%s is too large: %s", k_cache.name(),
           k_cache.shape_str().c_str());

  // 2 shape
  AppendParams p{};
  p.k = side(append_key, k_cache, head_major, !mla, fused, 0);
  p.v = side(append_value, v_cache, head_major, !mla, fused, 1);
  p.batch_indices = batch_indices.data<int32_t>();
  p.positions = positions.data<int32_t>();
  p.kv_indices = kv_indices.data<int32_t>();
  p.kv_indptr = kv_indptr.data<int32_t>();
  p.rows = nnz;
  p.heads = static_cast<int32_t>(heads);
  p.page_size = divisor(static_cast<uint32_t>(page_size));
  if (p.rows == 0 || p.heads == 0 || p.k.bytes + p.v.bytes == 0) return;
  FI_CHECK((static_cast<int64_t>(p.k.bytes) + p.v.bytes) * p.heads <= 0x7fffffff, ValueError, "%s is too wide: %s",
           append_key.name(), append_key.shape_str().c_str());

  // 3 launch
#if FI_CUDA
  launch(kernel, p, append_key.device());
#else
  (void)kernel;
  run_cpu(p);
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::append, "append_key", "append_value", "batch_indices", "positions", "k_cache", "v_cache", "kv_indices",
      "kv_indptr", "kv_last_page_len", "head_major", "mla")
