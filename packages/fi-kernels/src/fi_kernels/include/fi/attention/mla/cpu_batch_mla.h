// Batch MLA on the CPU: one task for each query token and group of heads, in fp32, one KV tile after another.
#pragma once
#include <algorithm>
#include <vector>

#include "fi/attention/cpu/block.h"
#include "fi/attention/mla/batch_mla.h"
#include "fi/cpu/math.h"
#include "fi/cpu/parallel.h"
#include "fi/cpu/row_convert.h"

namespace fi {

FI_CLONES inline void mla_scale(float* x, float factor, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) x[i] *= factor;
}

FI_CLONES inline void mla_fold_rows(float* out, const MlaFold& fold, const float* next, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = fold.value(out[i], next[i]);
}

class CpuBatchMla {
 public:
  CpuBatchMla(const BatchMlaParams& p, DType q, DType kv, bool fixed_splits)
      : p_(p),
        chunk_(fixed_splits ? kMlaChunkTiles * kMlaKvTile : 0x7fffffff),
        load_q_(cpu::row_loader(q)),
        load_kv_(cpu::row_loader(p.is_packed ? kE4M3 : kv)),
        load_rope_(cpu::row_loader(p.wide_rope || p.is_packed ? q : kv)),
        store_(cpu::row_storer(q)),
        q_bytes_(q.bytes()),
        kv_bytes_(kv.bytes()),
        rope_bytes_(p.wide_rope ? q.bytes() : kv.bytes()) {}

  void run() const {
    const int32_t heads = static_cast<int32_t>(p_.heads.value), groups = (heads + kHeads - 1) / kHeads;
    std::vector<Task> tasks;
    const MlaRequest* requests = p_.view().requests();
    for (int32_t b = 0; b < p_.batch; ++b)
      for (int32_t token = 0; token < requests[b].qo_len; ++token)
        for (int32_t g = 0; g < groups; ++g) tasks.push_back({b, token, g * kHeads});
    cpu::parallel_for(static_cast<int64_t>(tasks.size()), 1, [&](int64_t begin, int64_t end) {
      std::vector<float> room(kHeads * (kMlaWidth + 2 * kMlaLatent) + kMlaKvTile * kMlaWidth);
      for (int64_t i = begin; i < end; ++i) attend(tasks[static_cast<size_t>(i)], room.data());
    });
  }

 private:
  static constexpr int32_t kHeads = 16;  // of a task: they share the conversion of a KV tile
  struct Task {
    int32_t request, token, head;
  };

  void attend(const Task& task, float* room) const {
    const MlaRequest& request = p_.view().requests()[task.request];
    const int32_t heads = std::min(kHeads, static_cast<int32_t>(p_.heads.value) - task.head);
    const int64_t row = request.qo_begin + task.token;
    float *queries = room, *out = queries + kHeads * kMlaWidth, *next = out + kHeads * kMlaLatent,
          *keys = next + kHeads * kMlaLatent;
    float row_max[kHeads], row_sum[kHeads];
    for (int32_t h = 0; h < heads; ++h) {
      float* q = queries + h * kMlaWidth;
      load_q_(at(p_.q_nope, row * p_.q_nope_token + (task.head + h) * p_.q_nope_head, q_bytes_), q, kMlaLatent);
      std::fill_n(q + kMlaLatent, kMlaRope, 0.f);
      if (p_.has_rope) {
        load_q_(at(p_.q_pe, row * p_.q_pe_token + (task.head + h) * p_.q_pe_head, q_bytes_), q + kMlaLatent, kMlaRope);
        mla_scale(q + kMlaLatent, p_.rope_factor, kMlaRope);
      }
    }
    const int32_t end = p_.end_key(request, task.token);
    float next_max[kHeads], next_sum[kHeads];
    attend(request, {0, std::min(chunk_, end)}, heads, queries, keys, out, row_max, row_sum);
    for (int64_t begin = chunk_; begin < end; begin += chunk_) {
      const auto stop = static_cast<int32_t>(std::min<int64_t>(begin + chunk_, end));
      attend(request, {static_cast<int32_t>(begin), stop}, heads, queries, keys, next, next_max, next_sum);
      for (int32_t h = 0; h < heads; ++h) {
        const auto fold = mla_fold<CpuMath>(row_max[h], row_sum[h], next_max[h], next_sum[h]);
        mla_fold_rows(out + h * kMlaLatent, fold, next + h * kMlaLatent, kMlaLatent);
        row_max[h] = fold.row_max, row_sum[h] = fold.row_sum;
      }
    }
    for (int32_t h = 0; h < heads; ++h) {
      float* o = out + h * kMlaLatent;
      if (p_.score_stats) p_.write_stats<CpuMath>(row, task.head + h, row_max[h], row_sum[h]);
      mla_scale(o, p_.finish<CpuMath>(task.head + h, row_max[h], row_sum[h]), kMlaLatent);
      store_(o, static_cast<char*>(p_.out) + (row * p_.out_token + (task.head + h) * p_.out_head) * q_bytes_,
             kMlaLatent);
      if (p_.lse) p_.write_lse<CpuMath>(row, task.head + h, row_max[h], row_sum[h]);
    }
  }

  struct Keys {
    int32_t begin, end;
  };
  // The states of some heads over these keys.
  void attend(const MlaRequest& request, Keys of, int32_t heads, const float* queries, float* keys, float* out,
              float* row_max, float* row_sum) const {
    std::fill_n(out, heads * kMlaLatent, 0.f);
    std::fill_n(row_max, heads, kMinusInf);
    std::fill_n(row_sum, heads, 0.f);
    for (int32_t first = of.begin; first < of.end; first += kMlaKvTile) {
      const int32_t count = load_tile(request, first, std::min(kMlaKvTile, of.end - first), keys);
      if (count > 0) add_tile(queries, keys, heads, count, out, row_max, row_sum);
    }
  }

  // Loads the tokens of a KV tile that exist, one after another; returns their number.
  int32_t load_tile(const MlaRequest& request, int32_t first, int32_t count, float* keys) const {
    int32_t found = 0;
    for (int32_t i = 0; i < count; ++i) {
      const auto key = static_cast<uint32_t>(first + i), index = divide(key, p_.page_size);
      const int64_t entry = request.first_page + static_cast<int32_t>(index);
      const int32_t page = p_.sparse ? p_.page(entry) : p_.page_indices[entry];
      const auto slot = static_cast<int32_t>(key - index * p_.page_size.value);
      if (p_.sparse && page < 0) continue;
      float* to = keys + found++ * kMlaWidth;
      if (p_.is_packed) {
        load_packed(page, to);
        continue;
      }
      load_kv_(at(p_.ckv, p_.ckv_offset(page, slot), kv_bytes_), to, kMlaLatent);
      if (p_.ckv_scales) {
        const float* scales = p_.ckv_scales + page * p_.scales_page + slot * p_.scales_token;
        for (int32_t g = 0; g < kMlaLatent / kMlaScaleGroup; ++g)
          mla_scale(to + g * kMlaScaleGroup, scales[g], kMlaScaleGroup);
      }
      std::fill_n(to + kMlaLatent, kMlaRope, 0.f);
      if (p_.has_rope) load_rope_(at(p_.kpe, p_.kpe_offset(page, slot), rope_bytes_), to + kMlaLatent, kMlaRope);
    }
    return found;
  }

  // A row of packed pages.
  void load_packed(int32_t slot, float* to) const {
    const auto from = p_.packed_row(slot);
    load_kv_(from.row, to, kMlaPackedCodes);
    for (int32_t g = 0; g < kMlaPackedCodes / kMlaPackedGroup; ++g)
      mla_scale(to + g * kMlaPackedGroup, cpu::ue8m0_to_float(static_cast<uint8_t>(from.scales[g])), kMlaPackedGroup);
    load_rope_(from.row + kMlaPackedCodes, to + kMlaPackedCodes, kMlaLatent - kMlaPackedCodes);
    std::fill_n(to + kMlaLatent, kMlaRope, 0.f);
  }

  // Adds a tile to the states of all heads: the products are of all of them, so that a key is loaded once.
  void add_tile(const float* queries, const float* keys, int32_t heads, int32_t count, float* out, float* row_max,
                float* row_sum) const {
    float scores[kHeads * kMlaKvTile];
    cpu::dots({{queries, kMlaWidth, 1}, keys, scores, kMlaWidth, kMlaKvTile, heads, count, kMlaWidth, false});
    for (int32_t h = 0; h < heads; ++h) {
      float* row = scores + h * kMlaKvTile;
      mla_scale(row, p_.score_factor(), count);
      std::fill(row + count, row + cpu::padded(count), kMinusInf);
      const float rescale = cpu::softmax_row<16>(row, cpu::padded(count), row_max + h, row_sum + h);
      if (rescale != 1.f) mla_scale(out + h * kMlaLatent, rescale, kMlaLatent);
    }
    cpu::multiply({{scores, kMlaKvTile, 1}, keys, out, kMlaWidth, kMlaLatent, heads, kMlaLatent, count, true});
  }

  static const char* at(const void* base, int64_t offset, int64_t bytes) {
    return static_cast<const char*>(base) + offset * bytes;
  }

  const BatchMlaParams& p_;
  const int32_t chunk_;  // keys
  cpu::LoadRow load_q_, load_kv_, load_rope_;
  cpu::StoreRow store_;
  int64_t q_bytes_, kv_bytes_, rope_bytes_;
};

}  // namespace fi
