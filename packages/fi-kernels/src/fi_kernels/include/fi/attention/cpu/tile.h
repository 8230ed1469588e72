// A tile of packed query rows of one kv head against a range of keys, on the CPU: blocks of keys, online softmax, fp32.
#pragma once
#include <algorithm>
#include <limits>
#include <vector>

#include "fi/attention/cpu/block.h"
#include "fi/attention/cpu/kv_rows.h"
#include "fi/attention/variant.h"
#include "fi/cpu/aligned_floats.h"
#include "fi/cpu/row_convert.h"

namespace fi {

// The page table of a request: token j is slot j % page_size of page pages[j / page_size], and pages begin at multiples
// of k_page and v_page elements. Contiguous keys are one page of unlimited length.
struct TokenPages {
  const int32_t* pages;
  int32_t page_size;
  int64_t k_page, v_page;
  int32_t v_table_offset = 0;  // entries from the page table of K to that of V

  static TokenPages one() {
    static constexpr int32_t zero = 0;
    return {&zero, std::numeric_limits<int32_t>::max(), 0, 0};
  }
};

// Rows of NVFP4 without their scales: two values a byte, the first in the lower half.
inline void load_e2m1(const void* from, float* to, int64_t n) {
  const auto* bytes = static_cast<const uint8_t*>(from);
  for (int64_t i = 0; i < n; i += 2)
    to[i] = cpu::e2m1_to_float(bytes[i / 2] & 15u), to[i + 1] = cpu::e2m1_to_float(bytes[i / 2] >> 4);
}

// Vector lanes are rows, over scores [key][row]; with few rows they are keys, over scores [row][key]. Neither order
// transposes K or the scores.
class CpuTile {
 public:
  static constexpr int32_t kRows = 128;  // most rows of a tile
  static constexpr int32_t kBlock = 64;  // keys a step

  // The problem has the head dims and rotary frequencies of all calls of attend. rows: the maximum of any call.
  // products: of the dtype of kv, if calls with few rows are frequent. fixed_order: a row is summed in the same order
  // whatever rows are beside it, if calls begin at multiples of kBlock keys.
  CpuTile(const AttentionProblem& p, DType q, DType kv, int32_t rows, cpu::KvRowProducts products = {},
          bool fixed_order = false)
      : fixed_order_(fixed_order),
        q_bytes_(q.bytes()),
        kv_bytes_(kv.bytes()),
        load_q_(cpu::row_loader(q)),
        load_kv_(kv == kU8 ? load_e2m1 : cpu::row_loader(kv)),
        products_(products),
        qk_(cpu::padded(p.head_dim_qk)),
        vo_(cpu::padded(p.head_dim_vo)),
        q_(cpu::padded(rows) * qk_),
        k_(in_place(p, p.rows()) ? 0 : kBlock * qk_),
        v_(in_place(p, p.rows()) ? 0 : kBlock * vo_),
        o_(cpu::padded(rows) * vo_),
        s_(kBlock * cpu::padded(rows)),
        row_max_(cpu::padded(rows)),
        row_sum_(cpu::padded(rows)),
        rescale_(cpu::padded(rows)),
        slope_(cpu::padded(rows)),
        position_(cpu::padded(rows)),
        q_row_(qk_) {
    if (p.rotary.enabled)
      for (int32_t k = 0; k < p.head_dim_qk / 2; ++k) steps_.push_back(p.rotary.step(k));
  }

  // The number of kv heads of a tile, if each has `rows` rows: their tokens are neighbours in memory.
  static int32_t heads(int32_t rows) { return rows <= kFewRows ? kMaxRowsOfHeads / std::max(rows, 1) : 1; }

  // Rows [first, first + rows) of kv_head against keys [begin, end); rows <= kRows. count: kv heads of so many rows
  // each; at most heads(rows).
  void attend(const AttentionProblem& p, const TokenPages& pages, Variant& variant, int32_t kv_head, int32_t first,
              int32_t rows, int32_t begin, int32_t end, int32_t count = 1) {
    p_ = &p, variant_ = &variant, pages_ = pages, kv_head_ = kv_head, first_ = first, end_ = end;
    in_place_ = in_place(p, rows), heads_ = count, rows_per_head_ = rows, rows = rows_ = rows * count;
    pitch_ = few_rows() ? kBlock : cpu::padded(rows);
    std::fill_n(row_max_.data(), rows, Variant::kSoftmax ? kMinusInf : 0.f);
    std::fill_n(row_sum_.data(), rows, 0.f);
    std::fill_n(o_.data(), rows * vo_, 0.f);
    load_queries();
    for (int32_t key = begin; key < end; key += kBlock) {
      const int32_t keys = std::min(kBlock, end - key);
      if (few_rows())
        step_few_rows(key, keys);
      else
        step(key, keys);
    }
  }

  // The query row of row r of the last attend.
  Row row(int32_t r) const { return p_->row(kv_head_ + r / rows_per_head_, first_ + r % rows_per_head_); }
  float row_max(int32_t r) const { return row_max_[r]; }
  float row_sum(int32_t r) const { return row_sum_[r]; }
  float* output(int32_t r) { return o_.data() + r * vo_; }  // unnormalised, [head_dim_vo]

 private:
  static constexpr int32_t kKeysPerPart = cpu::kMaxKvRows;  // keys converted at a time with few rows: they stay in L1
  static constexpr int32_t kPrefetchRows = 16;              // rows prefetched
  static constexpr int32_t kFewRows = 8;          // up to this many rows most lanes would be empty if they were rows
  static constexpr int32_t kInPlace = 4;          // more rows share a conversion
  static constexpr int32_t kMaxRowsOfHeads = 16;  // rows of all heads at once

  // A variant computes scores row by row.
  bool few_rows() const { return Variant::kCustom || (rows_per_head_ <= kFewRows && !fixed_order_); }
  // Whether products read K and V in their dtype: to convert them for each of a few rows is no slower than to store
  // them as floats first.
  bool in_place(const AttentionProblem& p, int32_t rows) const {
    return !Variant::kCustom && !fixed_order_ && rows <= kInPlace && !p.rotary.enabled && products_.dots &&
           cpu::KvRowProducts::supports(p.head_dim_qk) && cpu::KvRowProducts::supports(p.head_dim_vo);
  }

  void load_queries() {
    const AttentionProblem& p = *p_;
    for (int32_t r = 0; r < rows_; ++r) {
      const Row row = this->row(r);
      const HeadScores head = p.head_scores<CpuMath>(row.head);
      load_q_(static_cast<const char*>(p.q) + (row.i * p.q_token + row.head * p.q_head) * q_bytes_, q_row_.data(),
              p.head_dim_qk);
      rotate(q_row_.data(), p.mask.position(row.i));
      if constexpr (!Variant::kCustom) cpu::multiply_row<16>(q_row_.data(), head.scale, p.head_dim_qk);
      for (int64_t d = 0; d < qk_; ++d) q_[few_rows() ? r * qk_ + d : d * pitch_ + r] = q_row_[d];
      cap_ = head.cap;
      slope_[r] = head.slope;
      position_[r] = static_cast<float>(row.i);
    }
  }

  void rotate(float* row, int64_t position) const {
    if (p_->rotary.enabled) cpu::rotate_row<8>(row, steps_.data(), p_->head_dim_qk / 2, position);
  }

  // Of head kv_head_ + h.
  void load_keys(int32_t key, int32_t keys, int32_t h = 0) {
    load(key_rows(), p_->head_dim_qk, k_.data(), qk_, h, key, keys);
    const KvScales& s = p_->kv_scales;
    if (s.k)
      multiply_scales({s.k, s.k_token, s.k_head, s.k_page, pages_.pages}, p_->head_dim_qk, k_.data(), qk_, h, key,
                      keys);
    if (p_->rotary.enabled)
      for (int32_t j = 0; j < keys; ++j) rotate(k_.data() + j * qk_, key + j);
  }

  void load_values(int32_t key, int32_t keys, int32_t h = 0) {
    load(value_rows(), p_->head_dim_vo, v_.data(), vo_, h, key, keys);
    const KvScales& s = p_->kv_scales;
    if (s.v)
      multiply_scales({s.v, s.v_token, s.v_head, s.v_page, pages_.pages + pages_.v_table_offset}, p_->head_dim_vo,
                      v_.data(), vo_, h, key, keys);
  }

  void step_few_rows(int32_t key, int32_t keys) {
    const Mask& mask = p_->mask;
    if (mask.first_row(key) >= mask.end_row(key + keys - 1)) return;
    for (int32_t j = 0; j < keys; j += kKeysPerPart) {
      const int32_t part = std::min(kKeysPerPart, keys - j);
      for (int32_t h = 0; h < heads_; ++h) {
        const float* q = q_.data() + h * rows_per_head_ * qk_;
        float* s = s_.data() + h * rows_per_head_ * pitch_ + j;
        if (in_place_) {
          gather_rows(key_rows(), qk_, h, key + j, part);
          for (int32_t i = 0; i < rows_per_head_; ++i) products_.dots(q + i * qk_, kv_rows_, s + i * pitch_);
        } else {
          load_keys(key + j, part, h);
          cpu::dots({{q, qk_, 1}, k_.data(), s, qk_, pitch_, rows_per_head_, part, qk_, false});
        }
      }
    }
    for (int32_t r = 0; r < rows_; ++r) {
      float* s = s_.data() + r * pitch_;
      const int32_t i = row(r).i;
      const int32_t from = std::clamp(mask.first_key(i) - key, 0, keys),
                    to = std::clamp(mask.end_key(i) - key, 0, keys);
      if constexpr (Variant::kCustom) {
        for (int32_t j = from; j < to; ++j)
          s[j] = mask.keeps(i, key + j) ? variant_->score(s[j], row(r), kv_head_ + r / rows_per_head_, key + j)
                                        : Variant::kHidden;
      } else {
        if (cap_ > 0.f) cpu::soft_cap<16>(s, cap_, keys);
        if (p_->scores.alibi) cpu::add_slope<16>(s, slope_[r], static_cast<float>(key) - position_[r], keys);
        if (mask.selects())
          for (int32_t j = from; j < to; ++j)
            if (!mask.keeps(i, key + j)) s[j] = kMinusInf;
      }
      std::fill(s, s + from, Variant::kHidden);
      std::fill(s + to, s + cpu::padded(keys), Variant::kHidden);
      if constexpr (!Variant::kSoftmax) continue;
      const float rescale = cpu::softmax_row<16>(s, cpu::padded(keys), &row_max_[r], &row_sum_[r]);
      if (rescale != 1.f) cpu::multiply_row<16>(output(r), rescale, vo_);
    }
    for (int32_t j = 0; j < keys; j += kKeysPerPart) {
      const int32_t part = std::min(kKeysPerPart, keys - j);
      for (int32_t h = 0; h < heads_; ++h) {
        const float* s = s_.data() + h * rows_per_head_ * pitch_ + j;
        if (in_place_) {
          gather_rows(value_rows(), vo_, h, key + j, part);
          for (int32_t i = 0; i < rows_per_head_; ++i)
            products_.sum(s + i * pitch_, kv_rows_, output(h * rows_per_head_ + i));
        } else {
          load_values(key + j, part, h);
          cpu::multiply(
              {{s, pitch_, 1}, v_.data(), output(h * rows_per_head_), vo_, vo_, rows_per_head_, vo_, part, true});
        }
      }
    }
  }

  void step(int32_t key, int32_t keys) {
    const AttentionProblem& p = *p_;
    const int32_t row_begin = packed(p.mask.first_row(key)), row_end = packed(p.mask.end_row(key + keys - 1));
    if (row_begin >= row_end) return;
    const int64_t begin = row_begin / 16 * 16, end = cpu::padded(row_end);
    load_keys(key, keys);
    cpu::multiply({{k_.data(), qk_, 1},
                   q_.data() + begin,
                   s_.data() + begin,
                   pitch_,
                   pitch_,
                   keys,
                   end - begin,
                   p.head_dim_qk,
                   false});
    for (int32_t j = 0; j < keys; ++j) {
      float* row = s_.data() + j * pitch_;
      if (cap_ > 0.f) cpu::soft_cap<16>(row + begin, cap_, end - begin);
      if (p.scores.alibi)
        cpu::add_slopes<16>(row + begin, slope_.data() + begin, position_.data() + begin, end - begin,
                            static_cast<float>(key + j));
      apply_mask(key + j, row, begin, end);
    }
    cpu::softmax_step<16>(s_.data(), pitch_, keys, begin, end, row_max_.data(), row_sum_.data(), rescale_.data());
    load_values(key, keys);
    for (int32_t r = row_begin; r < row_end; ++r)
      if (rescale_[r] != 1.f) cpu::multiply_row<16>(output(r), rescale_[r], vo_);
    cpu::multiply({{s_.data() + row_begin, 1, pitch_},
                   v_.data(),
                   output(row_begin),
                   vo_,
                   vo_,
                   row_end - row_begin,
                   vo_,
                   keys,
                   true});
  }

  // The index in this tile of the first packed row of query i.
  int32_t packed(int32_t i) const {
    return static_cast<int32_t>(std::clamp<int64_t>(static_cast<int64_t>(i) * p_->group() - first_, 0, rows_));
  }

  // The rows of K or of V: page 0, strides in elements, and the page table.
  struct CacheRows {
    const void* data;
    int64_t token, head, page;
    const int32_t* pages;
  };
  CacheRows key_rows() const { return {p_->k, p_->k_token, p_->k_head, pages_.k_page, pages_.pages}; }
  CacheRows value_rows() const {
    return {p_->v, p_->v_token, p_->v_head, pages_.v_page, pages_.pages + pages_.v_table_offset};
  }

  // Calls f with the address of each row of [key, key + keys) of head kv_head_ + h, page after page.
  template <class F>
  void each_row(const CacheRows& from, int32_t h, int32_t key, int32_t keys, F&& f) const {
    const char* base = static_cast<const char*>(from.data) + (kv_head_ + h) * from.head * kv_bytes_;
    while (keys > 0) {
      const int32_t slot = key % pages_.page_size, run = std::min(keys, pages_.page_size - slot);
      const char* row = base + (from.pages[key / pages_.page_size] * from.page + slot * from.token) * kv_bytes_;
      for (int32_t j = 0; j < run; ++j, row += from.token * kv_bytes_) f(row);
      key += run, keys -= run;
    }
  }

  // Collects the addresses of those rows; keys <= kKeysPerPart. Heads alternate, so memory is read in order and the
  // hardware prefetches.
  void gather_rows(const CacheRows& from, int64_t width, int32_t h, int32_t key, int32_t keys) {
    int64_t count = 0;
    each_row(from, h, key, keys, [&](const char* row) { kv_rows_.at[count++] = row; });
    std::fill(kv_rows_.at + count, std::end(kv_rows_.at), kv_rows_.at[count - 1]);
    kv_rows_.count = count, kv_rows_.width = width;
  }

  void load(const CacheRows& from, int32_t dim, float* to, int64_t pitch, int32_t h, int32_t key, int32_t keys) const {
    // Rows of one head are far apart, so the hardware does not prefetch them
    // (docs/notes/decode-cpu.md).
    each_row(from, h, key + kPrefetchRows, std::min(keys, end_ - key - kPrefetchRows), [&](const char* row) {
      for (int64_t byte = 0; byte < dim * kv_bytes_; byte += 64) __builtin_prefetch(row + byte);
    });
    each_row(from, h, key, keys, [&](const char* row) {
      load_kv_(row, to, dim);
      to += pitch;
    });
  }

  // Multiplies rows of NVFP4 by their scales, of 16 elements each.
  void multiply_scales(const CacheRows& from, int32_t dim, float* to, int64_t pitch, int32_t h, int32_t key,
                       int32_t keys) const {
    each_row(from, h, key, keys, [&](const char* row) {
      for (int32_t x = 0; x < dim; x += 16) {
        const float scale = cpu::to_float(cpu::e4m3_t{static_cast<uint8_t>(row[x / 16])});
        for (int32_t i = x; i < x + 16; ++i) to[i] *= scale;
      }
      to += pitch;
    });
  }

  void apply_mask(int32_t key, float* s, int64_t begin, int64_t end) const {
    const Mask& mask = p_->mask;
    const int64_t from = packed(mask.first_row(key)), to = packed(mask.end_row(key));
    std::fill(s + begin, s + std::max(begin, from), kMinusInf);
    std::fill(s + std::min(end, to), s + end, kMinusInf);
    if (!mask.selects()) return;
    for (int64_t r = from; r < to; ++r)
      if (!mask.keeps(static_cast<int32_t>(first_ + r) / p_->group(), key)) s[r] = kMinusInf;
  }

  const AttentionProblem* p_ = nullptr;
  Variant* variant_ = nullptr;
  TokenPages pages_{};
  bool fixed_order_;
  int64_t q_bytes_, kv_bytes_;
  cpu::LoadRow load_q_, load_kv_;
  cpu::KvRowProducts products_;
  cpu::KvRows kv_rows_;
  bool in_place_ = false;
  int64_t qk_, vo_, pitch_ = 0;  // row lengths in floats: of q and k, of v and o, of s
  int32_t kv_head_ = 0, heads_ = 1, rows_per_head_ = 1, first_ = 0, rows_ = 0, end_ = 0;
  float cap_ = 0.f;
  cpu::AlignedFloats q_, k_, v_, o_, s_, row_max_, row_sum_, rescale_, slope_, position_, q_row_;
  std::vector<uint64_t> steps_;
};

}  // namespace fi
