// Launches batch_prefill on CUDA: the mma kernel, and the wgmma kernels with tensor maps.
#pragma once
#include <algorithm>
#include <initializer_list>
#include <numeric>

#include "fi/attention/contract.h"
#include "fi/attention/extras.h"
#include "fi/attention/prefill/batch_prefill.h"
#include "fi/generated/batch_prefill.h"

#if FI_CUDA
namespace fi {

constexpr int64_t kPrefillCachedBytes = 32 << 20;  // of keys and values that should stay in L2; an H200 has 50 MB

using Extents = std::initializer_list<int64_t>;

// Describes a tensor of 8 or 16 bits, with a contiguous innermost dimension, for TMA; strides in elements.
inline void describe(const Kernel& kernel, TensorMap& map, const void* data, int64_t bytes, Extents sizes,
                     Extents strides, Extents box) {
  uint64_t size[5], step[4];
  uint32_t part[5];
  const auto rank = static_cast<uint32_t>(sizes.size());
  for (uint32_t i = 0; i < rank; ++i) {
    size[i] = static_cast<uint64_t>(std::max<int64_t>(sizes.begin()[i], 1));
    part[i] = static_cast<uint32_t>(box.begin()[i]);
  }
  for (uint32_t i = 0; i + 1 < rank; ++i)  // the stride of a dimension of one element is not used
    step[i] = size[i + 1] > 1 ? static_cast<uint64_t>(strides.begin()[i] * bytes) : 128;
  kernel.describe(map, bytes, rank, const_cast<void*>(data), size, step, part);
}

// The TMA boxes of keys and values: whole rows of a page, if the head shares a dimension with another one (a tensor map
// has five), else 128 bytes of columns, which is a whole row of the fp8 kernel.
enum class KeyRows { kColumns, kWholeNHD, kWholeHND };

inline KeyRows key_rows(const BatchPrefillParams& params, int64_t bytes, int64_t page_size, int64_t box) {
  const AttentionProblem& p = params.problem;
  if (!params.pages.page_indices || box % 8 || bytes == 1) return KeyRows::kColumns;
  if (p.k_head == p.head_dim_qk && p.v_head == p.head_dim_vo) return KeyRows::kWholeNHD;
  if (p.k_head == page_size * p.k_token && p.v_head == page_size * p.v_token) return KeyRows::kWholeHND;
  return KeyRows::kColumns;
}

inline void describe_keys(const Kernel& kernel, TensorMap& map, const void* data, int64_t bytes, KeyRows rows,
                          int64_t dim, int64_t token, int64_t head, int64_t page, int64_t heads, int64_t page_size,
                          int64_t pages, int64_t box) {
  if (rows == KeyRows::kColumns) {
    describe(kernel, map, data, bytes, {dim, page_size, heads, pages}, {token, head, page}, {128 / bytes, box, 1, 1});
    return;
  }
  const bool nhd = rows == KeyRows::kWholeNHD;
  describe(kernel, map, data, bytes, {64, 8, dim / 64 * (nhd ? heads : 1), page_size / 8 * (nhd ? 1 : heads), pages},
           {token, 64, 8 * token, page}, {64, 8, dim / 64, box / 8, 1});
}

// How the wgmma kernels load q, k and v. key_step: KV tiles begin at a multiple of so many keys. They are written where
// they stay: gcc 12 does not align the temporary that a function returns to the 64 bytes of a TensorMap.
inline void describe_copies(const Kernel& kernel, BatchPrefillParams& params, const Tensor& q, const Tensor& k,
                            int64_t page_size, int64_t kv_tokens, int64_t box, int64_t key_step, KeyRows rows) {
  const AttentionProblem& p = params.problem;
  const PagedKeys& paged = params.pages;
  const int64_t pages = paged.page_indices ? k.size(0) : 1, q_bytes = q.dtype().bytes(), bytes = k.dtype().bytes();
  PrefillCopies& c = params.copies;
  describe(kernel, c.q, p.q, q_bytes, {p.head_dim_qk, p.group(), p.kv_heads, q.size(0)},
           {p.q_head, p.q_head * p.group(), p.q_token}, {128 / q_bytes, p.group(), 1, params.tile_tokens});
  describe_keys(kernel, c.k, p.k, bytes, rows, p.head_dim_qk, p.k_token, p.k_head, paged.k_page, p.kv_heads, page_size,
                pages, box);
  describe_keys(kernel, c.v, p.v, bytes, rows, p.head_dim_vo, p.v_token, p.v_head, paged.v_page, p.kv_heads, page_size,
                pages, box);
  c.k_rows = {p.k, paged.k_page * bytes, p.k_token * bytes, p.k_head * bytes};
  c.v_rows = {p.v, paged.v_page * bytes, p.v_token * bytes, p.v_head * bytes};
  c.scores = p.scores.without_alibi(1.f);
  c.key_step = divisor(static_cast<uint32_t>(key_step));
  const int64_t bytes_per_head = std::max<int64_t>(kv_tokens, 1) * (p.head_dim_qk + p.head_dim_vo) * bytes;
  c.l2_kv_heads = static_cast<int32_t>(std::clamp<int64_t>(kPrefillCachedBytes / bytes_per_head, 1, p.kv_heads));
  c.box_keys = static_cast<int32_t>(box);
  c.gathered = paged.page_indices && box % 8;
  c.heads_in_column_blocks = rows == KeyRows::kWholeNHD;
  c.row_groups_per_head = rows == KeyRows::kWholeHND ? static_cast<int32_t>(page_size / 8) : 0;
}

// The entry that copies keys in this form.
inline const Entry& tile(const Kernel& kernel, bool gathered, KeyRows rows) {
  return kernel.entries[gathered || rows != KeyRows::kColumns ? 1 : 0];
}

// alignment: of the rows of q, k, v and out. num_ctas: the most; 0: as many as fit.
inline void launch_batch_prefill(const Kernel& kernel, BatchPrefillParams& params, const Extras& extras,
                                 const Tensor& q, const Tensor& k, int64_t alignment, int64_t page_size,
                                 int64_t kv_tokens, int64_t num_ctas, bool pdl) {
  const AttentionProblem& p = params.problem;
  // Small pages of fp8 keys have an entry, and tiles, of their own.
  const bool gathered = params.pages.page_indices && page_size % 8 && kernel.entries.size() > 1 && k.dtype().bits == 8;
  const Entry& entry = tile(kernel, gathered, KeyRows::kColumns);
  const auto chosen = BatchPrefillConfig::of(entry);
  const int64_t multiprocessors = kernel.multiprocessors(q.device());
  const auto work_tiles = [&](int64_t tokens) {  // an estimate, at most a few too many
    return std::max<int64_t>((q.size(0) / tokens + params.batch_size) * p.kv_heads, 1);
  };
  Launch config{0};
  config.pdl = pdl;
  if (chosen.kind == PrefillKind::MMA) {
    const int64_t rows = chosen.rows_per_cta, row_tiles = (int64_t{params.tile_tokens} * p.group() + rows - 1) / rows;
    const int64_t blocks = work_tiles(params.tile_tokens) * row_tiles *
                           ((p.head_dim_vo + chosen.columns_per_cta - 1) / chosen.columns_per_cta);
    FI_CHECK(blocks <= 0x7fffffff, ValueError, "q is too large: %s", q.shape_str().c_str());
    config.grid_x = std::min(blocks, num_ctas > 0 ? num_ctas : multiprocessors * chosen.ctas_per_sm);
    // More than 1: this kernel begins tiles at multiples of their size, and each row follows its own maximum.
    params.copies.key_step = divisor(static_cast<uint32_t>(batch_invariant() ? chosen.keys_per_stage : 1));
    kernel.launch(entry, config, q.device(), params, extras.data());
    return;
  }
  const bool scaled = p.scale_q || p.scale_k || p.scale_v || params.scales.bmm1 || params.scales.bmm2;
  FI_CHECK(!params.masks.mask && !params.masks.items && !(scaled && k.dtype().bits == 16) && !p.scores.alibi &&
               !p.rotary.enabled && p.group() <= 128,
           ValueError,
           "backend must be fa2 for masks, position encodings, 16-bit keys with scales by head or on the device, and "
           "more than 128 query heads a kv head");
  check_alignment(alignment);
  // The planner may choose tiles of two thirds of the rows, and split them.
  const int64_t min_tokens = std::max<int64_t>(1, params.tile_tokens * 2 / 3);
  const int64_t most = num_ctas > 0 ? std::min(num_ctas, multiprocessors) : multiprocessors;
  config.grid_x = params.partials ? most : std::min(work_tiles(min_tokens), most);
  const int64_t keys = chosen.keys_per_stage, box = params.pages.page_indices ? std::gcd(page_size, keys) : keys;
  const KeyRows rows =
      kernel.entries.size() > 1 ? key_rows(params, k.dtype().bytes(), page_size, box) : KeyRows::kColumns;
  // Else a window moves the tiles of a row with the rows beside it, and with the page size.
  const int64_t key_step = batch_invariant() ? keys : params.pages.page_indices ? box : 8;
  describe_copies(kernel, params, q, k, page_size, kv_tokens, box, key_step, rows);
  kernel.launch(tile(kernel, gathered, rows), config, q.device(), params, extras.data());
}

}  // namespace fi
#endif
