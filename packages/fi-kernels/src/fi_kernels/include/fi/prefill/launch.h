// Launches batch_prefill on CUDA: the generic kernel with the problem as it is, the Hopper kernel with tensor maps.
#pragma once
#include <algorithm>
#include <initializer_list>
#include <numeric>

#include "fi/host/op.h"
#include "fi/prefill/batch_prefill.h"
#include "fi/prefill/prefill_problem.h"

#if FI_CUDA
namespace fi {

// The first number of an entry's config.
enum PrefillKind { kPrefillTilesKind = 0, kPrefillHopperKind = 1, kPrefillFp8Kind = 2 };

constexpr int64_t kPrefillCachedBytes = 32 << 20;  // of keys and values in L2 at a time; H200: 50 MB

using Extents = std::initializer_list<int64_t>;

// A tensor of 8 or 16 bits, the innermost dimension contiguous, for copies of boxes of it; strides in elements.
inline void describe(TensorMap& map, const void* data, int64_t bytes, Extents sizes, Extents strides, Extents box) {
  uint64_t size[5], step[4];
  uint32_t part[5];
  const uint32_t ones[] = {1, 1, 1, 1, 1};
  const auto rank = static_cast<uint32_t>(sizes.size());
  for (uint32_t i = 0; i < rank; ++i) {
    size[i] = static_cast<uint64_t>(std::max<int64_t>(sizes.begin()[i], 1));
    part[i] = static_cast<uint32_t>(box.begin()[i]);
  }
  for (uint32_t i = 0; i + 1 < rank; ++i)  // a stride that is never taken may be anything
    step[i] = size[i + 1] > 1 ? static_cast<uint64_t>(strides.begin()[i] * bytes) : 128;
  const cu::Driver& driver = cu::Driver::get();
  driver.check(
      driver.TensorMapEncodeTiled(&map, bytes == 1 ? cu::kTensorU8 : cu::kTensorU16, rank, const_cast<void*>(data),
                                  size, step, part, ones, 0, cu::kSwizzle128B, cu::kPromoteL2To128B, 0),
      "cuTensorMapEncodeTiled");
}

// How keys and values are copied: whole rows of a page at once, where the head can be counted in with another
// dimension (a tensor map has five), else 128 bytes of columns at a time, which is all that rows of the fp8 kernel
// have.
enum class KeyRows { kColumns, kWholeNHD, kWholeHND };

inline KeyRows key_rows(const PrefillProblem& problem, int64_t bytes, int64_t page_size, int64_t box) {
  const AttentionProblem& p = problem.problem;
  if (!problem.pages || box % 8 || bytes == 1) return KeyRows::kColumns;
  if (p.k_head == p.dim_qk && p.v_head == p.dim_vo) return KeyRows::kWholeNHD;
  if (p.k_head == page_size * p.k_token && p.v_head == page_size * p.v_token) return KeyRows::kWholeHND;
  return KeyRows::kColumns;
}

inline void describe_keys(TensorMap& map, const void* data, int64_t bytes, KeyRows rows, int64_t dim, int64_t token,
                          int64_t head, int64_t page, int64_t heads, int64_t page_size, int64_t pages, int64_t box) {
  if (rows == KeyRows::kColumns) {
    describe(map, data, bytes, {dim, page_size, heads, pages}, {token, head, page}, {128 / bytes, box, 1, 1});
    return;
  }
  const bool nhd = rows == KeyRows::kWholeNHD;
  describe(map, data, bytes, {64, 8, dim / 64 * (nhd ? heads : 1), page_size / 8 * (nhd ? 1 : heads), pages},
           {token, 64, 8 * token, page}, {64, 8, dim / 64, box / 8, 1});
}

// The parameters of the Hopper kernel; `keys` is how many it takes a step.
inline BatchPrefillParams hopper_params(const PrefillProblem& problem, const Tensor& q, const Tensor& k,
                                        int64_t page_size, int64_t kv_tokens, int64_t box, KeyRows rows) {
  const AttentionProblem& p = problem.problem;
  const int64_t pages = problem.pages ? k.size(0) : 1, q_bytes = q.dtype().bytes(), bytes = k.dtype().bytes();
  BatchPrefillParams h{};
  describe(h.q, p.q, q_bytes, {p.dim_qk, p.group, p.kv_heads, q.size(0)}, {p.q_head, p.q_head * p.group, p.q_token},
           {128 / q_bytes, p.group, 1, problem.tile_tokens});
  describe_keys(h.k, p.k, bytes, rows, p.dim_qk, p.k_token, p.k_head, problem.k_page, p.kv_heads, page_size, pages,
                box);
  describe_keys(h.v, p.v, bytes, rows, p.dim_vo, p.v_token, p.v_head, problem.v_page, p.kv_heads, page_size, pages,
                box);
  h.out = p.out;
  h.lse = p.lse;
  h.sinks = problem.sinks;
  h.pages = problem.pages;
  h.scale_q = p.scale_q;
  h.scale_k = p.scale_k;
  h.scale_v = p.scale_v;
  h.bmm1_scale = problem.bmm1_scale;
  h.bmm2_scale = problem.bmm2_scale;
  h.schedule = problem.schedule;
  h.parts = problem.parts;
  h.out_token = p.out_token;
  h.out_head = p.out_head;
  h.group = divisor(static_cast<uint32_t>(p.group));
  h.page_size = problem.page_size;
  h.qo_heads = p.qo_heads;
  h.kv_heads = p.kv_heads;
  const int64_t bytes_per_head = std::max<int64_t>(kv_tokens, 1) * (p.dim_qk + p.dim_vo) * bytes;
  h.section = static_cast<int32_t>(std::clamp<int64_t>(kPrefillCachedBytes / bytes_per_head, 1, p.kv_heads));
  h.tile_tokens = problem.tile_tokens;
  h.box = static_cast<int32_t>(box);
  h.dim_vo = p.dim_vo;
  h.rest_rows = problem.rest_rows;
  h.batch = problem.batch;
  h.heads_in_blocks = rows == KeyRows::kWholeNHD;
  h.head_groups = rows == KeyRows::kWholeHND ? static_cast<int32_t>(page_size / 8) : 0;
  h.causal = p.mask.causal;
  h.window_left = p.mask.window_left;
  h.out_type = p.out_type;
  h.scale = p.scores.sm_scale * (p.scores.soft_cap > 0 ? 1 / p.scores.soft_cap : kLog2e);
  h.cap = p.scores.cap();
  h.out_scale = p.out_scale;
  return h;
}

inline void launch_batch_prefill(const Kernel& kernel, const PrefillProblem& problem, const Extras& extras,
                                 const Tensor& q, const Tensor& k, int64_t page_size, int64_t kv_tokens, int64_t batch,
                                 bool pdl) {
  const AttentionProblem& p = problem.problem;
  const Entry& entry = kernel.entries.front();
  const int64_t multiprocessors = Kernel::multiprocessors(q.device());
  const auto units = [&](int64_t tokens) {  // or a few less
    return std::max<int64_t>((q.size(0) / tokens + batch) * p.kv_heads, 1);
  };
  Launch config{0};
  config.pdl = pdl;
  if (entry.config[0] == kPrefillTilesKind) {
    const int64_t rows = entry.config[1], parts = (int64_t{problem.tile_tokens} * p.group + rows - 1) / rows;
    const int64_t blocks = units(problem.tile_tokens) * parts * ((p.dim_vo + entry.config[2] - 1) / entry.config[2]);
    FI_CHECK(blocks <= 0x7fffffff, ValueError, "q is too large: %s", q.shape_str().c_str());
    config.grid_x = std::min(blocks, multiprocessors * entry.config[3]);
    kernel.launch(entry, config, q.device(), problem, extras.data());
    return;
  }
  const bool scaled = p.scale_q || p.scale_k || p.scale_v || problem.bmm1_scale || problem.bmm2_scale;
  FI_CHECK(
      !problem.custom_mask && !problem.items && !(scaled && entry.config[0] == kPrefillHopperKind) && !p.scores.alibi &&
          !p.rotary.enabled && p.group <= 128 && p.aligned,
      ValueError,
      "impl must be fa2 for masks, position encodings, 16-bit q with scales by head or on the device, more than 128 "
      "query heads a kv head, and tensors that are not aligned to 16 bytes");
  // Tiles may be of two thirds of the rows, and split.
  const int64_t least = std::max<int64_t>(1, problem.tile_tokens * 2 / 3);
  config.grid_x = problem.parts ? multiprocessors : std::min(units(least), multiprocessors);
  const int64_t keys = entry.config[1], box = problem.pages ? std::gcd(page_size, keys) : keys;
  const KeyRows rows = key_rows(problem, k.dtype().bytes(), page_size, box);
  const Entry& chosen = kernel.entries[rows == KeyRows::kColumns ? 0 : 1];
  kernel.launch(chosen, config, q.device(), hopper_params(problem, q, k, page_size, kv_tokens, box, rows));
}

}  // namespace fi
#endif
