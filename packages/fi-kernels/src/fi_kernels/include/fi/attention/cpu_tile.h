// A tile of packed query rows of one kv head against a range of keys, on the CPU: blocks of keys, online softmax, fp32.
// Scores are kept transposed, [key][row]: rows are the vector lanes, so neither K nor the softmax needs a transpose.
#pragma once
#include <algorithm>
#include <vector>

#include "fi/attention/cpu_block.h"
#include "fi/attention/problem.h"
#include "fi/cpu/rows.h"

namespace fi {

class CpuTile {
 public:
  static constexpr int32_t kRows = 128;  // most rows of a tile

  CpuTile(const AttentionProblem& p, DType q, DType kv)
      : p_(p),
        q_bytes_(q.bytes()),
        kv_bytes_(kv.bytes()),
        load_q_(cpu::row_loader(q)),
        load_kv_(cpu::row_loader(kv)),
        qk_(cpu::padded(p.dim_qk)),
        vo_(cpu::padded(p.dim_vo)),
        q_(size(kRows * qk_)),
        k_(size(kBlock * qk_)),
        v_(size(kBlock * vo_)),
        o_(size(kRows * vo_)),
        s_(size(kBlock * kRows)),
        m_(size(kRows)),
        d_(size(kRows)),
        alpha_(size(kRows)),
        slope_(size(kRows)),
        position_(size(kRows)),
        line_(size(qk_)) {
    if (p.rotary.enabled)
      for (int32_t k = 0; k < p.dim_qk / 2; ++k) steps_.push_back(p.rotary.step(k));
  }

  // Rows [first, first + rows) of kv_head against keys [begin, end); rows <= kRows.
  void attend(int32_t kv_head, int32_t first, int32_t rows, int32_t begin, int32_t end) {
    kv_head_ = kv_head, first_ = first, rows_ = rows;
    pitch_ = cpu::padded(rows);
    std::fill(m_.begin(), m_.end(), kMinusInf);
    std::fill(d_.begin(), d_.end(), 0.f);
    std::fill(o_.begin(), o_.begin() + rows * vo_, 0.f);
    load_queries();
    for (int32_t key = begin; key < end; key += kBlock) step(key, std::min(kBlock, end - key));
  }

  float m(int32_t r) const { return m_[static_cast<size_t>(r)]; }
  float d(int32_t r) const { return d_[static_cast<size_t>(r)]; }
  float* output(int32_t r) { return o_.data() + r * vo_; }  // unnormalised, [dim_vo]

 private:
  static constexpr int32_t kBlock = 64;  // keys a step
  static constexpr int32_t kAhead = 16;  // rows prefetched
  static constexpr int32_t kFew = 4;     // up to here dot products beat a product whose lanes are mostly empty

  static size_t size(int64_t n) { return static_cast<size_t>(n); }
  bool few() const { return rows_ <= kFew; }

  void load_queries() {
    for (int32_t r = 0; r < rows_; ++r) {
      const Row row = p_.row(kv_head_, first_ + r);
      const HeadScores head = p_.head_scores<CpuMath>(row.head);
      load_q_(static_cast<const char*>(p_.q) + (row.i * p_.q_token + row.head * p_.q_head) * q_bytes_, line_.data(),
              p_.dim_qk);
      rotate(line_.data(), p_.mask.position(row.i));
      cpu::multiply_row<16>(line_.data(), head.scale, p_.dim_qk);
      for (int64_t d = 0; d < qk_; ++d) q_[size(few() ? r * qk_ + d : d * pitch_ + r)] = line_[size(d)];
      cap_ = head.cap;
      slope_[size(r)] = head.slope;
      position_[size(r)] = static_cast<float>(row.i);
    }
  }

  void rotate(float* row, int64_t position) const {
    if (p_.rotary.enabled) cpu::rotate_row<8>(row, steps_.data(), p_.dim_qk / 2, position);
  }

  void step(int32_t key, int32_t keys) {
    const int32_t row_begin = packed(p_.mask.first_row(key)), row_end = packed(p_.mask.end_row(key + keys - 1));
    if (row_begin >= row_end) return;
    const int64_t begin = row_begin / 16 * 16, end = cpu::padded(row_end);
    load(p_.k, p_.k_token, p_.k_head, p_.dim_qk, k_.data(), qk_, key, keys);
    if (p_.rotary.enabled)
      for (int32_t j = 0; j < keys; ++j) rotate(k_.data() + j * qk_, key + j);
    if (few())
      cpu::dots({{k_.data(), qk_, 1}, q_.data(), s_.data(), qk_, pitch_, keys, rows_, qk_, false});
    else
      cpu::multiply({{k_.data(), qk_, 1},
                     q_.data() + begin,
                     s_.data() + begin,
                     pitch_,
                     pitch_,
                     keys,
                     end - begin,
                     p_.dim_qk,
                     false});
    if (p_.scores.alibi || cap_ > 0.f)
      for (int32_t j = 0; j < keys; ++j)
        cpu::finish_scores<16>(s_.data() + j * pitch_, cap_, slope_.data(), position_.data(), begin, end,
                               static_cast<float>(key + j));
    for (int32_t j = 0; j < keys; ++j) hide(key + j, s_.data() + j * pitch_, begin, end);
    cpu::softmax_step<16>(s_.data(), pitch_, keys, begin, end, m_.data(), d_.data(), alpha_.data());
    load(p_.v, p_.v_token, p_.v_head, p_.dim_vo, v_.data(), vo_, key, keys);
    for (int32_t r = row_begin; r < row_end; ++r)
      if (alpha_[size(r)] != 1.f) cpu::multiply_row<16>(o_.data() + r * vo_, alpha_[size(r)], vo_);
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
    return static_cast<int32_t>(std::clamp<int64_t>(static_cast<int64_t>(i) * p_.group - first_, 0, rows_));
  }

  void load(const void* from, int64_t token, int64_t head, int32_t dim, float* to, int64_t pitch, int32_t key,
            int32_t keys) const {
    const char* base = static_cast<const char*>(from) + kv_head_ * head * kv_bytes_;
    const int64_t row = token * kv_bytes_;
    for (int32_t j = 0; j < keys; ++j) {
      const char* line = base + (key + j) * row;
      // Rows of one head lie far apart, where the hardware does not look ahead (measured on Zen 5, 8 heads of 128
      // bf16).
      for (int64_t byte = 0; byte < dim * kv_bytes_; byte += 64) __builtin_prefetch(line + kAhead * row + byte);
      load_kv_(line, to + j * pitch, dim);
    }
  }

  void hide(int32_t key, float* s, int64_t begin, int64_t end) const {
    const int64_t from = packed(p_.mask.first_row(key)), to = packed(p_.mask.end_row(key));
    std::fill(s + begin, s + std::max(begin, from), kMinusInf);
    std::fill(s + std::min(end, to), s + end, kMinusInf);
    if (!p_.mask.selects()) return;
    for (int64_t r = from; r < to; ++r)
      if (!p_.mask.keeps(static_cast<int32_t>(first_ + r) / p_.group, key)) s[r] = kMinusInf;
  }

  const AttentionProblem& p_;
  int64_t q_bytes_, kv_bytes_;
  cpu::LoadRow load_q_, load_kv_;
  int64_t qk_, vo_, pitch_ = 0;  // row lengths in floats: of q and k, of v and o, of s
  int32_t kv_head_ = 0, first_ = 0, rows_ = 0;
  float cap_ = 0.f;
  std::vector<float> q_, k_, v_, o_, s_, m_, d_, alpha_, slope_, position_, line_;
  std::vector<uint64_t> steps_;
};

}  // namespace fi
