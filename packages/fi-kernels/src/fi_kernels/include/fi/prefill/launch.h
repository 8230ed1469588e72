// Launches batch_prefill on CUDA: the generic kernel with the problem as it is, the Hopper kernel with tensor maps.
#pragma once
#include <algorithm>
#include <numeric>

#include "fi/host/kernel.h"
#include "fi/prefill/batch_prefill.h"
#include "fi/prefill/prefill_problem.h"

#if FI_CUDA
namespace fi {

// The first number of an entry's config.
enum PrefillKind { kPrefillTilesKind = 0, kPrefillHopperKind = 1 };

constexpr int64_t kPrefillCachedBytes = 32 << 20;  // of keys and values in L2 at a time; H200: 50 MB

// A 16-bit tensor of four dimensions, the innermost contiguous, for copies of boxes of 64 columns.
inline void describe(TensorMap& map, const void* data, const int64_t (&sizes)[4], const int64_t (&strides)[3],
                     const int64_t (&box)[3]) {
  uint64_t size[4], step[3];
  uint32_t part[4] = {64};
  const uint32_t ones[] = {1, 1, 1, 1};
  for (int i = 0; i < 4; ++i) size[i] = static_cast<uint64_t>(std::max<int64_t>(sizes[i], 1));
  for (int i = 0; i < 3; ++i) {
    step[i] = static_cast<uint64_t>(sizes[i + 1] > 1 ? strides[i] * 2 : 128);  // where it is never taken, any will do
    part[i + 1] = static_cast<uint32_t>(box[i]);
  }
  const cu::Driver& driver = cu::Driver::get();
  driver.check(driver.TensorMapEncodeTiled(&map, cu::kTensorU16, 4, const_cast<void*>(data), size, step, part, ones, 0,
                                           cu::kSwizzle128B, cu::kPromoteL2To128B, 0),
               "cuTensorMapEncodeTiled");
}

// The parameters of the Hopper kernel; `keys` is how many it takes a step.
inline BatchPrefillParams hopper_params(const PrefillProblem& problem, const Tensor& q, const Tensor& k,
                                        const Tensor& v, int64_t page_size, int64_t kv_tokens, int64_t keys) {
  const AttentionProblem& p = problem.problem;
  const bool paged = problem.pages != nullptr;
  const int64_t pages = paged ? k.size(0) : 1, box = paged ? std::gcd(page_size, keys) : keys;
  BatchPrefillParams h{};
  describe(h.q, p.q, {p.dim_qk, p.group, p.kv_heads, q.size(0)}, {p.q_head, p.q_head * p.group, p.q_token},
           {p.group, 1, problem.tile_tokens});
  describe(h.k, p.k, {p.dim_qk, page_size, p.kv_heads, pages}, {p.k_token, p.k_head, problem.k_page}, {box, 1, 1});
  describe(h.v, p.v, {p.dim_vo, page_size, p.kv_heads, pages}, {p.v_token, p.v_head, problem.v_page}, {box, 1, 1});
  h.out = p.out;
  h.lse = p.lse;
  h.sinks = problem.sinks;
  h.pages = problem.pages;
  h.schedule = problem.schedule;
  h.out_token = p.out_token;
  h.out_head = p.out_head;
  h.group = divisor(static_cast<uint32_t>(p.group));
  h.page_size = problem.page_size;
  h.qo_heads = p.qo_heads;
  h.kv_heads = p.kv_heads;
  const int64_t bytes_per_head = std::max<int64_t>(kv_tokens, 1) * (p.dim_qk + p.dim_vo) * k.dtype().bytes();
  h.section = static_cast<int32_t>(std::clamp<int64_t>(kPrefillCachedBytes / bytes_per_head, 1, p.kv_heads));
  h.tile_tokens = problem.tile_tokens;
  h.box = static_cast<int32_t>(box);
  h.causal = p.mask.causal;
  h.window_left = p.mask.window_left;
  h.scale = p.scores.sm_scale * (p.scores.soft_cap > 0 ? 1 / p.scores.soft_cap : kLog2e);
  h.cap = p.scores.cap();
  h.out_scale = p.out_scale;
  return h;
}

inline void launch_batch_prefill(const Kernel& kernel, const PrefillProblem& problem, const Tensor& q, const Tensor& k,
                                 const Tensor& v, int64_t page_size, int64_t kv_tokens, int64_t batch, bool pdl) {
  const AttentionProblem& p = problem.problem;
  const Entry& entry = kernel.entries.front();
  const int64_t multiprocessors = Kernel::multiprocessors(q.device());
  const int64_t items = (q.size(0) / problem.tile_tokens + batch) * p.kv_heads;  // or a few less
  Launch config{0};
  config.pdl = pdl;
  if (entry.config[0] == kPrefillTilesKind) {
    const int64_t rows = entry.config[1], parts = (int64_t{problem.tile_tokens} * p.group + rows - 1) / rows;
    const int64_t units = items * parts * ((p.dim_vo + 127) / 128);
    FI_CHECK(units <= 0x7fffffff, ValueError, "q is too large: %s", q.shape_str().c_str());
    config.grid_x = std::min(units, multiprocessors * entry.config[2]);
    kernel.launch(entry, config, q.device(), problem);
    return;
  }
  FI_CHECK(!problem.custom_mask && !problem.items && !p.scale_q && !p.scale_k && !p.scale_v && !problem.bmm1_scale &&
               !problem.bmm2_scale && !p.scores.alibi && !p.rotary.enabled && p.group <= 128 && p.aligned,
           ValueError,
           "impl must be fa2 for masks, position encodings, scales by head or on the device, more than 128 query heads "
           "a kv head, and tensors that are not aligned to 16 bytes");
  config.grid_x = std::min(items, multiprocessors);
  kernel.launch(entry, config, q.device(),
                hopper_params(problem, q, k, v, page_size, kv_tokens, entry.config[1]));
}

}  // namespace fi
#endif
