// Launches batch_decode on CUDA: chooses the kernel entry, and describes the caches for TMA.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <numeric>

#include "fi/attention/contract.h"
#include "fi/attention/decode/batch_decode.h"
#include "fi/attention/extras.h"
#include "fi/generated/batch_decode.h"

#if FI_CUDA
namespace fi {

// A cache as [pages, heads, lines, tokens of a page, elements of a line], a line being 128 bytes, or of NVFP4 a row: a
// copy writes the first line of all its tokens, then the second. `whole`: one copy loads all lines; otherwise each line
// takes a copy, and lines are offsets in a row. joined: bytes to another cache of NVFP4, which a copy loads, too; 0:
// none. box_heads: the heads of a copy.
inline void describe_cache(const Kernel& kernel, TensorMap& map, const Tensor& cache, int64_t heads, int64_t page_size,
                           int64_t head, int64_t token, int64_t box_rows, bool whole, int64_t joined = 0,
                           int64_t box_heads = 1) {
  const int64_t bytes = cache.dtype().bytes(), dim = cache.size(-1), line = is_nvfp4(cache) ? dim : 128 / bytes;
  const int64_t lines = joined ? 2 : whole ? (dim + line - 1) / line : 1;
  const auto step = [&](int64_t n, int64_t stride) { return static_cast<uint64_t>(n > 1 ? stride * bytes : 128); };
  const uint64_t sizes[] = {static_cast<uint64_t>(whole ? std::min(dim, line) : dim), static_cast<uint64_t>(page_size),
                            static_cast<uint64_t>(lines), static_cast<uint64_t>(heads),
                            static_cast<uint64_t>(cache.size(0))};
  const uint64_t strides[] = {step(page_size, token), static_cast<uint64_t>(joined ? joined : 128), step(heads, head),
                              step(cache.size(0), cache.stride(0))};
  const uint32_t box[] = {static_cast<uint32_t>(line), static_cast<uint32_t>(box_rows), static_cast<uint32_t>(lines),
                          static_cast<uint32_t>(box_heads), 1};
  kernel.describe(map, bytes, 5, cache.data(), sizes, strides, box, line * bytes);
}

// The bytes from k to v if one tensor map can describe two caches of NVFP4, else 0: their pages are the same, and they
// differ in nothing else.
inline int64_t bytes_between(const Tensor& k, const Tensor& v, int32_t v_table_offset) {
  if (!is_nvfp4(k) || v_table_offset != 0) return 0;
  for (int i = 0; i < 4; ++i)
    if (k.size(i) != v.size(i) || k.stride(i) != v.stride(i)) return 0;
  const auto bytes = static_cast<const char*>(v.data()) - static_cast<const char*>(k.data());
  return bytes % 16 == 0 && std::abs(bytes) < int64_t{1} << 40 ? bytes : 0;  // what a tensor map allows
}

// CTAs of a cluster for each q tile of a request if the cluster kernel is faster than the schedule, else 0. Depends
// only on what a CUDA graph replay does not change; both kernels support all lengths. tokens: the most of all requests.
inline int64_t cluster_ctas(const BatchDecodeParams& params, int64_t tokens, int64_t multiprocessors) {
  // Keys of a CTA, on average and if one request has all: with more, the schedule is faster. Few CTAs have a limit of
  // their own (docs/notes/decode-cluster.md).
  constexpr int64_t kMaxKeys = 2048, kMaxKeysFewCtas = 1024, kFewCtas = 32, kMaxKeysOneRequest = 4096;
  const AttentionProblem& p = params.problem;
  if (p.mask.qo_len > 1 || params.masks.mask || p.scores.soft_cap > 0.f || p.scores.alibi) return 0;
  int64_t of_one = tokens;
  if (p.mask.window_left >= 0) {
    of_one = std::min<int64_t>(tokens, static_cast<int64_t>(p.mask.window_left) + 1);
    tokens = std::min(tokens, params.schedule.batch * of_one);
  }
  const int64_t output_tiles = static_cast<int64_t>(params.schedule.batch) * p.kv_heads * params.q_tiles_per_head.value;
  // An H200 (132 SMs) holds 7 clusters of 16 CTAs at once, 15 of 8, 30 of 4 and 66 of 2.
  int64_t ctas = 16;
  while (output_tiles * ctas > (ctas > 2 ? multiprocessors * 7 / 8 : multiprocessors)) ctas /= 2;
  const int64_t keys = output_tiles * ctas < kFewCtas ? kMaxKeysFewCtas : kMaxKeys;
  return ctas > 1 && tokens <= params.schedule.batch * keys * ctas && of_one <= kMaxKeysOneRequest * ctas ? ctas : 0;
}

// The entry of the persistent kernel.
inline const Entry& tile(const Kernel& kernel, const BatchDecodeParams& params, DLDevice device) {
  const AttentionProblem& p = params.problem;
  const int64_t rows = std::min<int64_t>(static_cast<int64_t>(p.group()) * p.mask.qo_len, kDecodeQTile);
  for (const Entry& e : kernel.entries) {
    const auto config = BatchDecodeConfig::of(e);
    const bool is_general = config.kind == DecodeKind::CUDA_CORE;
    if (config.q_rows < rows || (!is_general && config.heads != params.heads_per_tile)) continue;
    if (config.ctas_per_sm > 0 && params.num_ctas > config.ctas_per_sm * kernel.multiprocessors(device)) continue;
    if (is_general ? std::max(p.head_dim_qk, p.head_dim_vo) <= config.head_dim
                   : p.head_dim_qk == config.head_dim && p.head_dim_vo == config.head_dim)
      return e;
  }
  raise("ValueError", "backend must be fa2 for head dims %d and %d", p.head_dim_qk, p.head_dim_vo);
}

// alignment: of the rows of q and the caches.
inline void launch_batch_decode(const Kernel& kernel, BatchDecodeParams& params, const Extras& extras, const Tensor& k,
                                const Tensor& v, int64_t alignment, int64_t split, bool pdl) {
  AttentionProblem& p = params.problem;
  const Entry* entry = &tile(kernel, params, k.device());
  Launch config{params.num_ctas};
  config.pdl = pdl;
  if (BatchDecodeConfig::of(*entry).kind != DecodeKind::CUDA_CORE) {
    FI_CHECK(!p.rotary.enabled, ValueError, "backend must be fa2 for ROPE_LLAMA, which rotates keys on the fly");
    check_alignment(alignment);
  }
  const auto page_size = static_cast<int64_t>(params.pages.page_size.value);
  // A box stays within its page. TMA fills zeros beyond the end of an only page.
  const bool one_page = k.size(0) == 1 && v.size(0) == 1;
  const Entry& last = kernel.entries.back();
  const auto by_cluster = BatchDecodeConfig::of(last);
  if (by_cluster.kind == DecodeKind::CLUSTER && split == 0 && (one_page || page_size % by_cluster.keys_per_copy == 0)) {
    const int64_t tokens = params.copies.index_bytes / 4 * page_size;
    if (const int64_t ctas = cluster_ctas(params, tokens, kernel.multiprocessors(k.device()))) {
      entry = &last;
      config.cluster = static_cast<unsigned>(ctas);
      config.grid_x = ctas * p.kv_heads * static_cast<int64_t>(params.q_tiles_per_head.value),
      config.grid_y = params.schedule.batch;
    }
  }
  const auto chosen = BatchDecodeConfig::of(*entry);
  params.copies.evict_first_tiles =
      static_cast<int32_t>((chosen.evict_first_mb << 20) /
                           (kDecodeKvTile * params.heads_per_tile * (k.size(-1) + v.size(-1)) * k.dtype().bytes()));
  if (chosen.kind >= DecodeKind::TMA && chosen.keys_per_copy > 1) {
    const bool whole = chosen.whole_rows != 0;
    const int64_t box_rows = one_page ? chosen.keys_per_copy : std::gcd(page_size, chosen.keys_per_copy);
    params.copies.box_keys_log2 = __builtin_ctzll(static_cast<uint64_t>(box_rows));
    params.copies.multiprocessors = static_cast<int32_t>(kernel.multiprocessors(k.device()));
    const int64_t between = bytes_between(k, v, params.pages.v_table_offset);
    params.copies.joined = between == 0 ? 0 : between > 0 ? 1 : -1;
    describe_cache(kernel, params.copies.k, between < 0 ? v : k, p.kv_heads, page_size, p.k_head, p.k_token, box_rows,
                   whole, std::abs(between), between ? chosen.heads : 1);
    describe_cache(kernel, params.copies.v, v, p.kv_heads, page_size, p.v_head, p.v_token, box_rows, whole);
  }
  kernel.launch(*entry, config, k.device(), params, extras.data());
}

}  // namespace fi
#endif
