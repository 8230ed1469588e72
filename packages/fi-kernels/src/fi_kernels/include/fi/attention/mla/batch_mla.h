// Parameters of batch_mla, shared by launcher, device code and CPU code.
#pragma once
#include "fi/attention/mla/mla_schedule.h"
#include "fi/attention/scores.h"
#include "fi/attention/softmax.h"
#include "fi/divisor.h"
#include "fi/tensor_map.h"

namespace fi {

constexpr int32_t kMlaLatent = 512, kMlaRope = 64, kMlaWidth = kMlaLatent + kMlaRope, kMlaScaleGroup = 128;

// A page of DeepSeek-V4's cache: rows of 448 e4m3 and 64 bf16, then 8 bytes for each row, of which 7 are ue8m0 scales
// of 64 columns each.
constexpr int32_t kMlaPackedCodes = 448, kMlaPackedRow = 576, kMlaPackedScales = 8, kMlaPackedGroup = 64;

// row_max may stay where no score exceeds it by more than this, in powers of 2: the output is then rescaled in the
// first tiles of a row only. Probabilities up to 2^8 are as exact as those up to 1.
constexpr float kMlaKeepMax = 8.f;

// The state of a row over the chunks so far and over the next one. A chunk without visible keys changes no bits.
struct MlaFold {
  float row_max, row_sum;
  float before, next;  // factors of the two outputs, which are relative to their row_max

  FI_HOST_DEVICE float value(float so_far, float of_next) const {
#if defined(__CUDACC__)  // the same roundings wherever a kernel folds
    return fmaf(next, of_next, before * so_far);
#else
    return next * of_next + before * so_far;
#endif
  }
};
template <class Math>
FI_HOST_DEVICE MlaFold mla_fold(float max_before, float sum_before, float max_next, float sum_next) {
  MlaFold fold;
  fold.row_max = max_next > max_before ? max_next : max_before;
  const float reference = softmax_reference(fold.row_max);
  fold.before = softmax_exp2<Math>(max_before, reference), fold.next = softmax_exp2<Math>(max_next, reference);
  fold.row_sum = fold.value(sum_before, sum_next);
  return fold;
}

// Token j of request b lies in page page_indices[first_page + j / page_size], slot j % page_size. With sparse tables
// page_size is 1 and an index of -1 is no token. Strides are in elements.
struct BatchMlaParams {
  TensorMap ckv_map, kpe_map;  // of whole pages, for the kernel that loads by TMA
  const void* q_nope;          // [tokens, heads, 512]
  const void* q_pe;            // [tokens, heads, 64]; not read without has_rope
  const void* ckv;             // [num_pages, page_size, 512]
  const void* kpe;             // [num_pages, page_size, 64], of ckv's type or of q's (wide_rope)
  const float* ckv_scales;     // [num_pages * page_size, 4], of 128 columns each; null: none
  void* out;                   // [tokens, heads, 512]
  float* lse;                  // [tokens, heads]; null: none
  float* score_stats;          // [2, tokens, heads]: row_max, and lse without sinks, natural; null: none
  int64_t q_nope_token, q_nope_head, q_pe_token, q_pe_head;
  int64_t ckv_page, ckv_token, kpe_page, kpe_token, scales_page, scales_token, out_token, out_head;
  const int32_t* page_indices;
  int32_t* schedule;          // the one of this kernel's q tiles
  float* workspace;           // partials of tile_rows * (512 + 2) floats
  float score_scale;          // sm_scale * log2(e) * the scale of ckv
  float rope_factor;          // scale of kpe / scale of ckv
  float out_scale;            // the scale of ckv
  float lse_factor;           // 1, or ln(2) for natural logarithms
  const float* sinks;         // [heads], logits that join each softmax; null: none
  const float* score_scales;  // [1], a further factor of the scores on the device; null: none
  const float* out_scales;    // [1], of the output
  Divisor page_size, heads, ranks;
  uint32_t last_page;  // num_pages - 1
  int32_t batch, max_ranges, tokens, tile_rows, cluster;
  int32_t causal, has_rope, sparse;
  int32_t rank;       // token j of a request here is token j ranks + rank of its context
  int32_t wide_rope;  // e4m3 ckv with a kpe of q's type; rope_factor is 1
  // Of packed pages: ckv are bytes, ckv_page the bytes of a page, and an entry of page_indices is a slot.
  Divisor packed_page;  // tokens of a page
  int32_t is_packed;
  float keep_max;  // the kernel that gathers keys raises row_max by more: kMlaKeepMax; 0: to the largest score
  int32_t box;     // tokens of a TMA copy of the kernel with fine chunks

  FI_HOST_DEVICE MlaSchedule view() const { return {schedule, max_ranges, batch}; }

  // The partial of a slot: the output of each row relative to row_max, unnormalised, then row_max and row_sum.
  FI_HOST_DEVICE int64_t partial_floats() const { return static_cast<int64_t>(tile_rows) * (kMlaLatent + 2); }
  FI_HOST_DEVICE float* partial_output(int32_t slot) const { return workspace + slot * partial_floats(); }
  FI_HOST_DEVICE float* partial_states(int32_t slot) const {
    return partial_output(slot) + static_cast<int64_t>(tile_rows) * kMlaLatent;
  }

  // An entry of the page table; -1 if it names no page of the cache.
  FI_HOST_DEVICE int32_t checked_page(int32_t id) const { return static_cast<uint32_t>(id) <= last_page ? id : -1; }
  FI_HOST_DEVICE int32_t page(int64_t index) const { return checked_page(page_indices[index]); }

  // Packed row r of a request: its token there, and its head.
  struct RowOf {
    int32_t token, head;
  };
  FI_HOST_DEVICE RowOf row(int32_t r) const {
    const auto token = static_cast<int32_t>(divide(static_cast<uint32_t>(r), heads));
    return {token, r - token * static_cast<int32_t>(heads.value)};
  }
  // The keys that query token i of a request attends to: [0, end).
  FI_HOST_DEVICE int32_t end_key(const MlaRequest& request, int32_t token) const {
    if (!causal) return request.kv_len;
    int32_t end = request.context - request.qo_len + token + static_cast<int32_t>(ranks.value) - rank;
    if (end <= 0) return 0;
    end = static_cast<int32_t>(divide(static_cast<uint32_t>(end), ranks));
    return end < request.kv_len ? end : request.kv_len;
  }
  // The keys that a work tile of rows [first, first + count) of a request reads end here.
  FI_HOST_DEVICE int32_t high(const MlaWorkTile& s, int32_t first, int32_t count) const {
    const int32_t rows = s.request.qo_len * static_cast<int32_t>(heads.value);
    if (first >= rows) return 0;
    const int32_t last = first + count < rows ? first + count : rows;
    const int32_t end = end_key(s.request, row(last - 1).token);
    const int64_t stop = static_cast<int64_t>(s.end) * kMlaKvTile;
    return stop < end ? static_cast<int32_t>(stop) : end;
  }
  // What turns products of queries and keys into scores in base 2.
  FI_HOST_DEVICE float score_factor() const { return score_scales ? score_scale * *score_scales : score_scale; }
  // Adds the sink of a head to the state of a row; returns the factor of its output.
  template <class Math>
  FI_HOST_DEVICE float finish(int32_t head, float& row_max, float& row_sum) const {
    constexpr float kWhole = 1e30f;  // takes the whole softmax, as infinity does; inf - inf would be NaN
    const float rescale = sinks ? add_sink<Math>(sinks[head] > kWhole ? kWhole : sinks[head], row_max, row_sum) : 1.f;
    return rescale * inverse_row_sum(row_sum) * (out_scales ? out_scale * *out_scales : out_scale);
  }
  FI_HOST_DEVICE int64_t state_of(int64_t token, int32_t head) const { return token * heads.value + head; }
  template <class Math>
  FI_HOST_DEVICE void write_lse(int64_t token, int32_t head, float row_max, float row_sum) const {
    lse[state_of(token, head)] = softmax_lse<Math>(row_max, row_sum) * lse_factor;
  }
  // Writes the state of a row before its sink is added.
  template <class Math>
  FI_HOST_DEVICE void write_stats(int64_t token, int32_t head, float row_max, float row_sum) const {
    constexpr float kLn2 = 1.f / kLog2e;
    float* at = score_stats + state_of(token, head);
    *at = row_max * kLn2;
    at[state_of(tokens, 0)] = row_sum == 0.f ? -kMinusInf : softmax_lse<Math>(row_max, row_sum) * kLn2;
  }
  FI_HOST_DEVICE int64_t ckv_offset(int32_t page, int32_t slot) const { return page * ckv_page + slot * ckv_token; }
  FI_HOST_DEVICE int64_t kpe_offset(int32_t page, int32_t slot) const { return page * kpe_page + slot * kpe_token; }
  // A row of packed pages, and its scales.
  struct PackedRow {
    const char *row, *scales;
  };
  FI_HOST_DEVICE PackedRow packed_row(int32_t slot) const {
    const auto page = static_cast<int32_t>(divide(static_cast<uint32_t>(slot), packed_page));
    const auto size = static_cast<int32_t>(packed_page.value);
    const char* from = static_cast<const char*>(ckv) + page * ckv_page;
    const int64_t place = slot - page * size;
    return {from + place * kMlaPackedRow, from + int64_t{size} * kMlaPackedRow + place * kMlaPackedScales};
  }
};

}  // namespace fi
