// GEMM on the CPU: blocks of 32 rows of b times panels of 16 rows of a, by AMX or VDPBF16PS where the operands fit
// bf16, else in fp32.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "fi/cpu/amx.h"
#include "fi/cpu/dot_bf16.h"
#include "fi/cpu/parallel.h"
#include "fi/cpu/row_convert.h"
#include "fi/gemm/gemm.h"

namespace fi::cpu {
namespace detail {

constexpr int64_t kPanel = 16, kBlockN = 32;     // rows of a of a panel, rows of b of a block
constexpr int64_t kChunkM = 512, kBlockK = 512;  // rows of a that are packed at once, k of a step
// k of a step if no block of b is copied, where AMX multiplies few rows, or VDPBF16PS any number. 6144 x 4096, time
// over torch.mm on one core with steps of 512 and 4096: AMX 64 rows 1.05 and 0.75, 256 rows 0.99 and 1.22; VDPBF16PS
// (Zen 4) 1 row 1.05 and 0.98, 256 rows 1.04 and 1.00. With copies of b AMX takes 1.43 for 64 rows and 1.10 for 256.
constexpr int64_t kLongStepK = 4096, kAmxLongStepRows = 64;
// Rows of a that meet rows of b in place by VDPBF16PS, without panels. n = k = 4096 over torch.mm, one core of Zen 5: 1
// row 0.61, 4 rows 0.83, 8 rows 0.98; with panels 1.22, 1.31 and 1.14.
constexpr int64_t kFewRows = 8;
constexpr int64_t kScaleK = 128, kAlignK = 32;  // k of a scale; panels are padded to a multiple of kAlignK
// Blocks whose sums, of so many floats at most, advance together by a step of k: the panels of the step are read from
// L2 then. One after another, 256 rows of k = 4096 come from L3 for each block: 27.3 -> 18.7 ms of one core (6144
// columns).
constexpr int64_t kGroup = 8, kGroupFloats = 65536;

// c[32][16 panels] += w[32][k] panel^T in fp32; a panel is [k][16].
FI_CLONES inline void multiply_floats(const float* w, int64_t w_stride, const float* panels, int64_t panel_stride,
                                      int64_t count, int64_t k, float* c, int64_t c_stride) {
  constexpr int kRows = 4;
  for (int64_t i = 0; i < count; ++i) {
    const float* x = panels + i * panel_stride;
    for (int64_t j = 0; j < kBlockN; j += kRows) {
      float sum[kRows][kPanel] = {};
      for (int64_t at = 0; at < k; ++at) {
        for (int r = 0; r < kRows; ++r) {
          const float weight = w[(j + r) * w_stride + at];
#pragma omp simd
          for (int l = 0; l < kPanel; ++l) sum[r][l] += weight * x[at * kPanel + l];
        }
      }
      for (int r = 0; r < kRows; ++r) {
#pragma omp simd
        for (int l = 0; l < kPanel; ++l) c[(j + r) * c_stride + i * kPanel + l] += sum[r][l];
      }
    }
  }
}

// Upper halves of floats: exact for values that bf16 holds.
FI_CLONES inline void narrow(const float* src, bf16_t* dst, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) dst[i].bits = static_cast<uint16_t>(float_bits(src[i]) >> 16);
}
FI_CLONES inline void add_scaled_rows(float* sum, float* part, const float* a_scale, float b_scale, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) sum[i] += part[i] * (a_scale[i] * b_scale), part[i] = 0.f;
}
// Scales rows of kBlockN sums and adds the bias. stride: bytes between rows of out.
template <class T>
FI_CLONES void finish_rows(const float* sums, int64_t rows, const float* a_scale, const float* b_scale,
                           const float* bias, char* out, int64_t stride) {
  for (int64_t i = 0; i < rows; ++i, sums += kBlockN) {
    T* to = reinterpret_cast<T*>(out + i * stride);
#pragma omp simd
    for (int64_t j = 0; j < kBlockN; ++j) to[j] = from_float<T>(sums[j] * (a_scale[i] * b_scale[j]) + bias[j]);
  }
}

// Rows of one matrix of a that meet one matrix of b.
struct GemmSegment {
  int64_t a_batch, b_batch, row, rows;
};

// The segments of a problem, less the rows that a does not have.
inline std::vector<GemmSegment> gemm_segments(const GemmProblem& p) {
  std::vector<GemmSegment> found;
  const auto matrix = [&](int64_t group) { return p.b_indices ? int64_t{p.b_indices[group]} : group; };
  if (p.rows == GemmRows::kIndices) {
    for (int64_t row = 0, end = 0; row < p.m; row = end) {
      for (end = row + 1; end < p.m && p.row_groups[end] == p.row_groups[row]; ++end) continue;
      if (p.row_groups[row] >= 0) found.push_back({0, p.row_groups[row], row, end - row});
    }
  } else {
    for (int64_t group = 0; group < p.batch; ++group) {
      GemmSegment s{group, matrix(group), 0, p.m};
      if (p.rows == GemmRows::kMasked) s.rows = std::min<int64_t>(p.row_groups[group], p.m);
      if (p.rows == GemmRows::kIndptr)
        s = {0, matrix(group), p.row_groups[group],
             std::min<int64_t>(p.row_groups[group + 1], p.m) - p.row_groups[group]};
      if (s.rows > 0) found.push_back(s);
    }
  }
  return found;
}

class GemmCpu {
 public:
  GemmCpu(const GemmProblem& problem, DType a, DType b, DType out, bool fixed_order)
      : p_(problem),
        fixed_order_(fixed_order),
        a_bytes_(a.bytes()),
        b_bytes_(b.bytes()),
        out_bytes_(out.bytes()),
        load_a_(row_loader(a)),
        load_b_(row_loader(b)),
        load_out_(row_loader(out)),
        store_(row_storer(out)),
        a_is_bf16_(a == kBF16),
        b_is_bf16_(b == kBF16),
        out_is_bf16_(out == kBF16),
        pairs_(a == kF16 || !has_dot_bf16() ? nullptr
               : has_amx()                  ? amx_multiply
                                            : dot_multiply),
        blocks_(problem.a_scale_k_stride || problem.b_scale_k_stride),
        k_((problem.k + kAlignK - 1) / kAlignK * kAlignK),
        element_(pairs_ ? 2 : 4) {}

  void run() const {
    const std::vector<GemmSegment> segments = gemm_segments(p_);
    const auto count = static_cast<int64_t>(segments.size());
    // Many segments run beside each other, few ones one after another with all threads.
    parallel_for(count, count >= 8 ? 1 : count, [&](int64_t begin, int64_t end) {
      std::unique_ptr<char[]> panels;
      int64_t size = 0;
      for (int64_t i = begin; i < end; ++i) {
        const GemmSegment& s = segments[static_cast<size_t>(i)];
        for (int64_t first = 0; first < s.rows; first += kChunkM) {
          const GemmSegment chunk{s.a_batch, s.b_batch, s.row + first, std::min(kChunkM, s.rows - first)};
          if (has_few_rows(chunk)) {
            multiply_few(chunk);
            continue;
          }
          GemmSegment main = chunk, rest = chunk;
          rest.rows = chunk.rows % kPanel;
          // Sums of few rows have another order, and rows of a group have no fixed place.
          if (p_.rows != GemmRows::kBatched || !has_few_rows(rest)) rest.rows = 0;
          main.rows -= rest.rows, rest.row += main.rows;
          const int64_t bytes = (main.rows + kPanel - 1) / kPanel * kPanel * k_ * element_;
          if (bytes > size) panels.reset(new char[static_cast<size_t>(size = bytes) + 64]);
          char* aligned = panels.get() + (64 - reinterpret_cast<uintptr_t>(panels.get()) % 64) % 64;
          pack(main, aligned);
          multiply(main, rest, aligned);
        }
      }
    });
  }

 private:
  bool has_few_rows(const GemmSegment& s) const {
    return !fixed_order_ && s.rows > 0 && s.rows <= kFewRows && pairs_ == dot_multiply && b_is_bf16_ &&
           p_.b_k_stride == 1 && !blocks_;
  }
  const char* a_at(const GemmSegment& s, int64_t row) const {
    return static_cast<const char*>(p_.a) +
           (s.a_batch * p_.a_batch_stride + (s.row + row) * p_.a_row_stride) * a_bytes_;
  }

  // A row of a in bf16; row is scratch.
  void narrow_row(const char* from, float* row, bf16_t* to) const {
    if (a_is_bf16_) return (void)std::memcpy(to, from, static_cast<size_t>(p_.k * a_bytes_));
    load_a_(from, row, p_.k);
    narrow(row, to, p_.k);
  }
  // Rows of a in bf16, padded with zeros to k_.
  std::vector<bf16_t> narrowed_rows(const GemmSegment& s) const {
    std::vector<float> row(static_cast<size_t>(k_));
    std::vector<bf16_t> x(static_cast<size_t>(s.rows * k_));
    for (int64_t i = 0; i < s.rows; ++i) narrow_row(a_at(s, i), row.data(), x.data() + i * k_);
    return x;
  }
  void multiply_few(const GemmSegment& s) const {
    const std::vector<bf16_t> x = narrowed_rows(s);
    const int64_t blocks = (p_.n + kBlockN - 1) / kBlockN;
    parallel_for(blocks, std::max<int64_t>(1, (int64_t{1} << 18) / (kBlockN * k_)), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) multiply_few(s, x.data(), i * kBlockN);
    });
  }
  void multiply_few(const GemmSegment& s, const bf16_t* x, int64_t column) const {
    float c[kFewRows * kBlockN] = {};  // where the CPU has no VDPBF16PS, `dot_few` writes nothing
    const int64_t columns = std::min(kBlockN, p_.n - column);
    dot_few(reinterpret_cast<const bf16_t*>(b_at(s, column, 0)), p_.b_row_stride, columns, x, k_, s.rows, p_.k, c,
            kBlockN);
    Columns(*this, s, column, columns).store(c, 0, s.rows);
  }

  // Panels of 16 rows of a: [k / 2][16][2] bf16, or [k][16] fp32; zeros beyond the rows and beyond k.
  void pack(const GemmSegment& s, char* panels) const {
    const int64_t count = (s.rows + kPanel - 1) / kPanel;
    parallel_for(count, std::max<int64_t>(1, 65536 / (k_ * kPanel)), [&](int64_t begin, int64_t end) {
      std::vector<float> row(static_cast<size_t>(k_));
      std::vector<bf16_t> narrowed(static_cast<size_t>(pairs_ ? kPanel * k_ : 0));
      for (int64_t i = begin * kPanel; i < end * kPanel; ++i) {
        const int64_t lane = i % kPanel;
        char* panel = panels + i / kPanel * kPanel * k_ * element_;
        if (pairs_ && a_is_bf16_ && lane == 0 && i + kPanel <= s.rows && p_.k == k_ && p_.a_row_stride % 2 == 0) {
          for (int64_t at = 0; at < k_; at += kAlignK)
            transpose_words(a_at(s, i) + at * 2, p_.a_row_stride / 2, panel + at * kPanel * 2, kPanel);
          i += kPanel - 1;
          continue;
        }
        bf16_t* own = narrowed.data() + (pairs_ ? lane * k_ : 0);
        if (i >= s.rows) {
          std::fill(row.begin(), row.end(), 0.f);
          if (pairs_) std::memset(own, 0, static_cast<size_t>(k_) * sizeof(bf16_t));
        } else if (pairs_) {
          narrow_row(a_at(s, i), row.data(), own);
        } else {
          load_a_(a_at(s, i), row.data(), p_.k);
        }
        if (pairs_) {
          if (lane < kPanel - 1) continue;
          for (int64_t at = 0; at < k_; at += kAlignK)
            transpose_words(narrowed.data() + at, k_ / 2, panel + at * kPanel * element_, kPanel);
        } else {
          for (int64_t at = 0; at < k_; ++at)
            std::memcpy(panel + (at * kPanel + lane) * 4, &row[static_cast<size_t>(at)], 4);
        }
      }
    });
  }

  // rest: the rows behind the panels, which would fill half of one or less.
  void multiply(const GemmSegment& s, const GemmSegment& rest, const char* panels) const {
    const std::vector<bf16_t> x = narrowed_rows(rest);
    const int64_t blocks = (p_.n + kBlockN - 1) / kBlockN;
    const int64_t work = kBlockN * k_ * s.rows;
    parallel_for(blocks, std::max<int64_t>(1, (int64_t{1} << 18) / work), [&](int64_t begin, int64_t end) {
      if (pairs_ == amx_multiply) {
        const AmxTiles tiles;
        multiply_blocks(s, panels, rest, x.data(), begin, end);
      } else {
        multiply_blocks(s, panels, rest, x.data(), begin, end);
      }
    });
  }

  // One step of k of one block of b, as the product reads it; strides of rows and of 32 k in bytes.
  struct Weights {
    const char* data;
    int64_t stride, step;
    Prefetch next;  // the next step of these rows, or the rows of the next block
  };
  // Rows of b in place, or copied: fp32 [32][kBlockK], or bf16 [k / 32][32][32], whose tiles are contiguous.
  Weights weights(const GemmSegment& s, int64_t column, int64_t k, int64_t count, Prefetch next, float* scratch,
                  float* row, bf16_t* narrowed) const {
    const int64_t rows = std::min(kBlockN, p_.n - column), padded = (count + kAlignK - 1) / kAlignK * kAlignK;
    const char* from = b_at(s, column, k);
    const bool bf16_rows = pairs_ && b_is_bf16_ && p_.b_k_stride == 1;
    if (bf16_rows && rows == kBlockN && padded == count)
      return {from, p_.b_row_stride * 2, 64, pairs_ == dot_multiply ? next : Prefetch{}};
    if (rows < kBlockN || padded > count) std::memset(scratch, 0, static_cast<size_t>(kBlockN * kBlockK * element_));
    auto* tiles = reinterpret_cast<bf16_t*>(scratch);
    if (p_.b_k_stride != 1) {  // MN-major: `rows` neighbours for each k
      for (int64_t i = 0; i < count; ++i) {
        load_b_(from + i * p_.b_k_stride * b_bytes_, row, rows);
        narrow(row, narrowed, rows);
        for (int64_t r = 0; r < rows; ++r) {
          if (pairs_)
            tiles[i / kAlignK * kBlockN * kAlignK + r * kAlignK + i % kAlignK] = narrowed[r];
          else
            scratch[r * kBlockK + i] = row[r];
        }
      }
    } else {
      for (int64_t r = 0; r < rows; ++r, from += p_.b_row_stride * b_bytes_) {
        const auto* source = reinterpret_cast<const bf16_t*>(from);
        if (!bf16_rows) load_b_(from, pairs_ ? row : scratch + r * kBlockK, count);
        if (!pairs_) continue;
        if (!bf16_rows) narrow(row, narrowed, count), source = narrowed;
        bf16_t* to = tiles + r * kAlignK;
        const int64_t whole = count / kAlignK;
        for (int64_t i = 0; i < whole; ++i)  // a cache line each
          std::memcpy(to + i * kBlockN * kAlignK, source + i * kAlignK, kAlignK * sizeof(bf16_t));
        std::memcpy(to + whole * kBlockN * kAlignK, source + whole * kAlignK,
                    static_cast<size_t>(count % kAlignK) * sizeof(bf16_t));
      }
    }
    if (pairs_) return {reinterpret_cast<const char*>(scratch), kAlignK * 2, kBlockN * kAlignK * 2, next};
    return {reinterpret_cast<const char*>(scratch), kBlockK * 4, 0, {}};
  }
  const char* b_at(const GemmSegment& s, int64_t column, int64_t k) const {
    return static_cast<const char*>(p_.b) +
           (s.b_batch * p_.b_batch_stride + column * p_.b_row_stride + k * p_.b_k_stride) * b_bytes_;
  }
  Prefetch prefetch(const GemmSegment& s, int64_t column, int64_t k, int64_t step) const {
    if (p_.b_k_stride != 1 || column >= p_.n || k >= p_.k) return {};
    return {b_at(s, column, k), p_.b_row_stride * b_bytes_, std::min<int64_t>(step, p_.k - k) * b_bytes_,
            std::min(kBlockN, p_.n - column)};
  }

  // Steps that are longer than a copy of b.
  bool has_long_steps(const GemmSegment& s) const {
    const bool in_place = pairs_ && b_is_bf16_ && p_.b_k_stride == 1 && p_.n % kBlockN == 0 && p_.k % kAlignK == 0;
    return in_place && (pairs_ != amx_multiply || (!fixed_order_ && s.rows <= kAmxLongStepRows));
  }

  void multiply_blocks(const GemmSegment& s, const char* panels, const GemmSegment& rest, const bf16_t* rest_rows,
                       int64_t begin, int64_t end) const {
    const int64_t count = (s.rows + kPanel - 1) / kPanel, width = count * kPanel;
    const int64_t step = blocks_ ? kScaleK : has_long_steps(s) ? kLongStepK : kBlockK;
    const int64_t floats = kBlockN * width;
    const int64_t most = count > 2 && step < p_.k ? std::clamp<int64_t>(kGroupFloats / floats, 1, kGroup) : 1;
    std::vector<float> part(static_cast<size_t>(blocks_ ? floats : 0)), a_scale(static_cast<size_t>(width));
    // Not zeroed: a small product would take longer for that than for its sums.
    const std::unique_ptr<float[]> sums(new float[static_cast<size_t>(floats * most)]);
    const std::unique_ptr<float[]> scratch(new float[static_cast<size_t>(kBlockN * kBlockK)]);
    std::vector<float> row(kBlockK);
    std::vector<bf16_t> narrowed(kBlockK);
    for (int64_t first = begin; first < end; first += most) {
      const int64_t group = std::min(most, end - first);
      std::fill_n(sums.get(), floats * group, 0.f);
      for (int64_t k = 0; k < p_.k; k += step) {
        const int64_t own = std::min<int64_t>(step, p_.k - k), padded = (own + kAlignK - 1) / kAlignK * kAlignK;
        const char* x = panels + k * kPanel * element_;
        if (blocks_)
          for (int64_t i = 0; i < s.rows; ++i) a_scale[static_cast<size_t>(i)] = a_scale_at(s, s.row + i, k / kScaleK);
        for (int64_t i = 0; i < group; ++i) {
          const int64_t column = (first + i) * kBlockN;
          if (rest.rows > 0 && k == 0) multiply_few(rest, rest_rows, column);
          const bool last = i == group - 1, ends = last && k + own >= p_.k;
          const Prefetch next = prefetch(s, (last && !ends ? first : first + i + 1) * kBlockN,
                                         ends   ? 0
                                         : last ? k + own
                                                : k,
                                         step);
          const Weights w = weights(s, column, k, own, next, scratch.get(), row.data(), narrowed.data());
          float* sum = sums.get() + i * floats;
          float* to = blocks_ ? part.data() : sum;
          if (pairs_)
            pairs_(reinterpret_cast<const bf16_t*>(w.data), w.stride, w.step, reinterpret_cast<const bf16_t*>(x),
                   kPanel * k_, count, padded, to, width, w.next);
          else
            multiply_floats(reinterpret_cast<const float*>(w.data), w.stride / 4, reinterpret_cast<const float*>(x),
                            kPanel * k_, count, padded, to, width);
          if (!blocks_) continue;
          for (int64_t j = 0; j < std::min(kBlockN, p_.n - column); ++j)
            add_scaled_rows(sum + j * width, to + j * width, a_scale.data(), b_scale_at(s, column + j, k / kScaleK),
                            s.rows);
        }
      }
      for (int64_t i = 0; i < group; ++i) {
        const int64_t column = (first + i) * kBlockN;
        store(s, column, std::min(kBlockN, p_.n - column), sums.get() + i * floats, width);
      }
    }
  }

  float a_scale_at(const GemmSegment& s, int64_t row, int64_t block) const {
    if (!p_.a_scale) return 1.f;
    return p_.a_scale[s.a_batch * p_.a_scale_batch_stride + row / p_.a_scale_rows * p_.a_scale_row_stride +
                      block * p_.a_scale_k_stride];
  }
  float b_scale_at(const GemmSegment& s, int64_t row, int64_t block) const {
    if (!p_.b_scale) return 1.f;
    return p_.b_scale[s.b_batch * p_.b_scale_batch_stride + row / p_.b_scale_rows * p_.b_scale_row_stride +
                      block * p_.b_scale_k_stride];
  }

  // A block of columns of the output, with what they share.
  struct Columns {
    Columns(const GemmCpu& gemm, const GemmSegment& s, int64_t column, int64_t columns)
        : g(gemm), s(s), column(column), columns(columns) {
      const GemmProblem& p = g.p_;
      std::fill_n(a_scale, kPanel, 1.f);
      std::fill_n(b_scale, kBlockN, 1.f);
      for (int64_t j = 0; j < columns && p.b_scale && !g.blocks_; ++j) b_scale[j] = g.b_scale_at(s, column + j, 0);
      if (p.bias) g.load_out_(static_cast<const char*>(p.bias) + column * g.out_bytes_, bias, columns);
    }
    // Rows [first, first + rows), at most kPanel, of kBlockN sums.
    void store(const float* sums, int64_t first, int64_t rows) {
      const GemmProblem& p = g.p_;
      for (int64_t i = 0; i < rows && p.a_scale && !g.blocks_; ++i) a_scale[i] = g.a_scale_at(s, s.row + first + i, 0);
      const int64_t at = s.a_batch * p.out_batch_stride + (s.row + first) * p.out_row_stride + column;
      const int64_t stride = p.out_row_stride * g.out_bytes_;
      char* to = static_cast<char*>(p.out) + at * g.out_bytes_;
      if (g.out_is_bf16_ && columns == kBlockN)
        return finish_rows<bf16_t>(sums, rows, a_scale, b_scale, bias, to, stride);
      alignas(64) float out[kPanel * kBlockN];
      finish_rows<float>(sums, rows, a_scale, b_scale, bias, reinterpret_cast<char*>(out), kBlockN * 4);
      for (int64_t i = 0; i < rows; ++i) g.store_(out + i * kBlockN, to + i * stride, columns);
    }

    const GemmCpu& g;
    const GemmSegment& s;
    int64_t column, columns;
    float a_scale[kPanel], b_scale[kBlockN], bias[kBlockN] = {};
  };

  // c: [columns][width] sums.
  void store(const GemmSegment& s, int64_t column, int64_t columns, const float* c, int64_t width) const {
    Columns to(*this, s, column, columns);
    alignas(64) float sums[kPanel * kBlockN];
    if (columns < kBlockN) std::fill_n(sums, kPanel * kBlockN, 0.f);
    for (int64_t first = 0; first < s.rows; first += kPanel) {
      const int64_t rows = std::min(kPanel, s.rows - first);
      for (int64_t j = 0; j < columns; ++j) {
        if (pairs_ && j % kPanel == 0) transpose_words(c + j * width + first, width, sums + j, kBlockN);
        for (int64_t i = 0; i < rows && !pairs_; ++i) sums[i * kBlockN + j] = c[j * width + first + i];
      }
      to.store(sums, first, rows);
    }
  }

  const GemmProblem& p_;
  bool fixed_order_;
  int64_t a_bytes_, b_bytes_, out_bytes_;
  LoadRow load_a_, load_b_, load_out_;
  StoreRow store_;
  bool a_is_bf16_, b_is_bf16_, out_is_bf16_;
  decltype(&amx_multiply) pairs_;  // multiplies panels of bf16, if the CPU and the operands can
  bool blocks_;
  int64_t k_, element_;  // padded k; bytes of an element that the product reads
};

}  // namespace detail

// fixed_order: the sums of a row do not depend on the number of rows.
inline void gemm(const GemmProblem& problem, DType a, DType b, DType out, bool fixed_order) {
  detail::GemmCpu(problem, a, b, out, fixed_order).run();
}

}  // namespace fi::cpu
