// A tile of packed query rows of one kv head against a range of keys, on the CPU: blocks of keys, online softmax, fp32.
#pragma once
#include <algorithm>
#include <limits>
#include <vector>

#include "fi/attention/cpu/block.h"
#include "fi/attention/cpu/rows.h"
#include "fi/attention/variant.h"
#include "fi/cpu/aligned_floats.h"
#include "fi/cpu/row_convert.h"

namespace fi {

// Where the tokens of a request lie: token j is slot j % page_size of page pages[j / page_size], and pages begin at
// multiples of k_page and v_page elements. Keys that are not paged are one page of any length.
struct TokenPages {
  const int32_t* pages;
  int32_t page_size;
  int64_t k_page, v_page;

  static TokenPages one() {
    static constexpr int32_t zero = 0;
    return {&zero, std::numeric_limits<int32_t>::max(), 0, 0};
  }
};

// Vector lanes are rows, over scores [key][row], or with few rows keys, over scores [row][key]. Neither order needs a
// transpose of K, nor one in the softmax.
class CpuTile {
 public:
  static constexpr int32_t kRows = 128;  // most rows of a tile

  // The problem gives what is common to all calls of attend: head dims and rotary frequencies. rows: most of any call.
  // products: for kv, where calls with few rows are frequent.
  CpuTile(const AttentionProblem& p, DType q, DType kv, int32_t rows, cpu::LineProducts products = {})
      : q_bytes_(q.bytes()),
        kv_bytes_(kv.bytes()),
        load_q_(cpu::row_loader(q)),
        load_kv_(cpu::row_loader(kv)),
        products_(products),
        qk_(cpu::padded(p.head_dim_qk)),
        vo_(cpu::padded(p.head_dim_vo)),
        q_(cpu::padded(rows) * qk_),
        k_(in_place(p, p.rows()) ? 0 : kBlock * qk_),
        v_(in_place(p, p.rows()) ? 0 : kBlock * vo_),
        o_(cpu::padded(rows) * vo_),
        s_(kBlock * cpu::padded(rows)),
        m_(cpu::padded(rows)),
        d_(cpu::padded(rows)),
        alpha_(cpu::padded(rows)),
        slope_(cpu::padded(rows)),
        position_(cpu::padded(rows)),
        line_(qk_) {
    if (p.rotary.enabled)
      for (int32_t k = 0; k < p.head_dim_qk / 2; ++k) steps_.push_back(p.rotary.step(k));
  }

  // How many kv heads, of so many rows each, a tile takes at once: their tokens lie side by side in memory.
  static int32_t heads(int32_t rows) { return rows <= kFew ? kTogether / std::max(rows, 1) : 1; }

  // Rows [first, first + rows) of kv_head against keys [begin, end); rows <= kRows. count: kv heads, of so many rows
  // each; at most heads(rows), for whose rows there is room.
  void attend(const AttentionProblem& p, const TokenPages& pages, Variant& variant, int32_t kv_head, int32_t first,
              int32_t rows, int32_t begin, int32_t end, int32_t count = 1) {
    p_ = &p, variant_ = &variant, pages_ = pages, kv_head_ = kv_head, first_ = first, end_ = end;
    in_place_ = in_place(p, rows), heads_ = count, each_ = rows, rows = rows_ = rows * count;
    pitch_ = few() ? kBlock : cpu::padded(rows);
    std::fill_n(m_.data(), rows, Variant::kSoftmax ? kMinusInf : 0.f);
    std::fill_n(d_.data(), rows, 0.f);
    std::fill_n(o_.data(), rows * vo_, 0.f);
    load_queries();
    for (int32_t key = begin; key < end; key += kBlock) {
      const int32_t keys = std::min(kBlock, end - key);
      if (few())
        step_few(key, keys);
      else
        step(key, keys);
    }
  }

  // Which query row is row r of the last attend.
  Row row(int32_t r) const { return p_->row(kv_head_ + r / each_, first_ + r % each_); }
  float m(int32_t r) const { return m_[r]; }
  float d(int32_t r) const { return d_[r]; }
  float* output(int32_t r) { return o_.data() + r * vo_; }  // unnormalised, [head_dim_vo]

 private:
  static constexpr int32_t kBlock = 64;          // keys a step
  static constexpr int32_t kPart = cpu::kLines;  // of few rows, keys converted at once: they stay in L1
  static constexpr int32_t kAhead = 16;          // rows prefetched
  static constexpr int32_t kFew = 8;             // up to here lanes that are rows would be mostly empty
  static constexpr int32_t kInPlace = 4;         // more rows share a conversion (8: 2250 us, in place 2550)
  static constexpr int32_t kTogether = 16;       // rows of all heads at once

  // Scores of a variant are made row by row.
  bool few() const { return Variant::kCustom || each_ <= kFew; }
  // Whether rows are multiplied with keys and values where they lie: converting them again for each of a few rows takes
  // no longer than to store them as floats first.
  bool in_place(const AttentionProblem& p, int32_t rows) const {
    return !Variant::kCustom && rows <= kInPlace && !p.rotary.enabled && products_.dots &&
           cpu::LineProducts::take(p.head_dim_qk) && cpu::LineProducts::take(p.head_dim_vo);
  }

  void load_queries() {
    const AttentionProblem& p = *p_;
    for (int32_t r = 0; r < rows_; ++r) {
      const Row row = this->row(r);
      const HeadScores head = p.head_scores<CpuMath>(row.head);
      load_q_(static_cast<const char*>(p.q) + (row.i * p.q_token + row.head * p.q_head) * q_bytes_, line_.data(),
              p.head_dim_qk);
      rotate(line_.data(), p.mask.position(row.i));
      if constexpr (!Variant::kCustom) cpu::multiply_row<16>(line_.data(), head.scale, p.head_dim_qk);
      for (int64_t d = 0; d < qk_; ++d) q_[few() ? r * qk_ + d : d * pitch_ + r] = line_[d];
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
    load(p_->k, p_->k_token, p_->k_head, pages_.k_page, p_->head_dim_qk, k_.data(), qk_, h, key, keys);
    if (p_->rotary.enabled)
      for (int32_t j = 0; j < keys; ++j) rotate(k_.data() + j * qk_, key + j);
  }

  void load_values(int32_t key, int32_t keys, int32_t h = 0) {
    load(p_->v, p_->v_token, p_->v_head, pages_.v_page, p_->head_dim_vo, v_.data(), vo_, h, key, keys);
  }

  void step_few(int32_t key, int32_t keys) {
    const Mask& mask = p_->mask;
    if (mask.first_row(key) >= mask.end_row(key + keys - 1)) return;
    for (int32_t j = 0; j < keys; j += kPart) {
      const int32_t part = std::min(kPart, keys - j);
      for (int32_t h = 0; h < heads_; ++h) {
        const float* q = q_.data() + h * each_ * qk_;
        float* s = s_.data() + h * each_ * pitch_ + j;
        if (in_place_) {
          lines(p_->k, p_->k_token, p_->k_head, pages_.k_page, qk_, h, key + j, part);
          for (int32_t i = 0; i < each_; ++i) products_.dots(q + i * qk_, lines_, s + i * pitch_);
        } else {
          load_keys(key + j, part, h);
          cpu::dots({{q, qk_, 1}, k_.data(), s, qk_, pitch_, each_, part, qk_, false});
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
          s[j] =
              mask.keeps(i, key + j) ? variant_->score(s[j], row(r), kv_head_ + r / each_, key + j) : Variant::kHidden;
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
      const float alpha = cpu::softmax_row<16>(s, cpu::padded(keys), &m_[r], &d_[r]);
      if (alpha != 1.f) cpu::multiply_row<16>(output(r), alpha, vo_);
    }
    for (int32_t j = 0; j < keys; j += kPart) {
      const int32_t part = std::min(kPart, keys - j);
      for (int32_t h = 0; h < heads_; ++h) {
        const float* s = s_.data() + h * each_ * pitch_ + j;
        if (in_place_) {
          lines(p_->v, p_->v_token, p_->v_head, pages_.v_page, vo_, h, key + j, part);
          for (int32_t i = 0; i < each_; ++i) products_.sum(s + i * pitch_, lines_, output(h * each_ + i));
        } else {
          load_values(key + j, part, h);
          cpu::multiply({{s, pitch_, 1}, v_.data(), output(h * each_), vo_, vo_, each_, vo_, part, true});
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
      hide(key + j, row, begin, end);
    }
    cpu::softmax_step<16>(s_.data(), pitch_, keys, begin, end, m_.data(), d_.data(), alpha_.data());
    load_values(key, keys);
    for (int32_t r = row_begin; r < row_end; ++r)
      if (alpha_[r] != 1.f) cpu::multiply_row<16>(output(r), alpha_[r], vo_);
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

  // The place in this tile of the first packed row of query i.
  int32_t packed(int32_t i) const {
    return static_cast<int32_t>(std::clamp<int64_t>(static_cast<int64_t>(i) * p_->group_size - first_, 0, rows_));
  }

  // Calls f with the address of each row of [key, key + keys) of head kv_head_ + h: a run of slots of a page after
  // another.
  template <class F>
  void each_row(const void* from, int64_t token, int64_t head, int64_t page, int32_t h, int32_t key, int32_t keys,
                F&& f) const {
    const char* base = static_cast<const char*>(from) + (kv_head_ + h) * head * kv_bytes_;
    while (keys > 0) {
      const int32_t slot = key % pages_.page_size, run = std::min(keys, pages_.page_size - slot);
      const char* line = base + (pages_.pages[key / pages_.page_size] * page + slot * token) * kv_bytes_;
      for (int32_t j = 0; j < run; ++j, line += token * kv_bytes_) f(line);
      key += run, keys -= run;
    }
  }

  // lines_ becomes those rows; keys <= kPart. Heads in turns read memory in its order, which the hardware sees.
  void lines(const void* from, int64_t token, int64_t head, int64_t page, int64_t width, int32_t h, int32_t key,
             int32_t keys) {
    int64_t count = 0;
    each_row(from, token, head, page, h, key, keys, [&](const char* line) { lines_.at[count++] = line; });
    std::fill(lines_.at + count, std::end(lines_.at), lines_.at[count - 1]);
    lines_.count = count, lines_.width = width;
  }

  void load(const void* from, int64_t token, int64_t head, int64_t page, int32_t dim, float* to, int64_t pitch,
            int32_t h, int32_t key, int32_t keys) const {
    // Rows of one head lie far apart, in pages that are anywhere: the hardware does not look ahead (8 heads of 128,
    // bf16, pages of 16, one core of a Xeon: 15.5 GB/s, without 10).
    each_row(from, token, head, page, h, key + kAhead, std::min(keys, end_ - key - kAhead), [&](const char* line) {
      for (int64_t byte = 0; byte < dim * kv_bytes_; byte += 64) __builtin_prefetch(line + byte);
    });
    each_row(from, token, head, page, h, key, keys, [&](const char* line) {
      load_kv_(line, to, dim);
      to += pitch;
    });
  }

  void hide(int32_t key, float* s, int64_t begin, int64_t end) const {
    const Mask& mask = p_->mask;
    const int64_t from = packed(mask.first_row(key)), to = packed(mask.end_row(key));
    std::fill(s + begin, s + std::max(begin, from), kMinusInf);
    std::fill(s + std::min(end, to), s + end, kMinusInf);
    if (!mask.selects()) return;
    for (int64_t r = from; r < to; ++r)
      if (!mask.keeps(static_cast<int32_t>(first_ + r) / p_->group_size, key)) s[r] = kMinusInf;
  }

  const AttentionProblem* p_ = nullptr;
  Variant* variant_ = nullptr;
  TokenPages pages_{};
  int64_t q_bytes_, kv_bytes_;
  cpu::LoadRow load_q_, load_kv_;
  cpu::LineProducts products_;
  cpu::Lines lines_;
  bool in_place_ = false;
  int64_t qk_, vo_, pitch_ = 0;  // row lengths in floats: of q and k, of v and o, of s
  int32_t kv_head_ = 0, heads_ = 1, each_ = 1, first_ = 0, rows_ = 0, end_ = 0;
  float cap_ = 0.f;
  cpu::AlignedFloats q_, k_, v_, o_, s_, m_, d_, alpha_, slope_, position_, line_;
  std::vector<uint64_t> steps_;
};

}  // namespace fi
