// batch_decode on the CPU: threads walk through the ranges of the schedule, then merge what those cut, fp32.
#pragma once
#include <vector>

#include "fi/attention/cpu/finish.h"
#include "fi/attention/cpu/tile.h"
#include "fi/attention/decode/batch_decode.h"
#include "fi/cpu/parallel.h"

namespace fi {

class CpuBatchDecode {
 public:
  CpuBatchDecode(const BatchDecodeParams& params, const Variant::Arguments& arguments, DType q, DType kv, DType out)
      : params_(params), arguments_(arguments), q_(q), kv_(kv), out_(out) {}

  void run() const {
    cpu::parallel_for(ranges(), grain(), [&](int64_t begin, int64_t end) {
      CpuTile tile(params_.problem, q_, kv_, kDecodeQTile, cpu::LineProducts::of(kv_));
      const int32_t together = params_.q_tiles_per_head.value == 1 ? CpuTile::heads(params_.problem.rows()) : 1;
      walk(begin, end, together, [&](const DecodeWorkTile* s, int32_t heads) { attend(s, heads, tile); });
    });
    if (!cut()) return;
    const int64_t merged = 2 * kDecodeQTile * static_cast<int64_t>(params_.problem.head_dim_vo);  // floats, of a range
    cpu::parallel_for(ranges(), 1 + 65536 / merged, [&](int64_t begin, int64_t end) {
      std::vector<float> sum(static_cast<size_t>(params_.problem.head_dim_vo));
      walk(begin, end, 1, [&](const DecodeWorkTile* s, int32_t) {
        if (!s->is_whole() && s->split_idx == 0) merge(*s, sum.data());
      });
    });
  }

 private:
  int32_t ranges() const {
    const DecodeHeader& header = params_.view().header();
    return header.range_groups * (header.static_ranges + header.dynamic_ranges);
  }
  bool cut() const {
    const DecodeSchedule schedule = params_.view();
    const DecodeRangeStart* starts = schedule.starts();
    return schedule.header().chunk_tiles > 0 ||
           std::any_of(starts, starts + ranges(), [](const DecodeRangeStart& s) { return s.num_splits > 1; });
  }

  // Ranges that pay for waking a thread.
  int64_t grain() const {
    const AttentionProblem& p = params_.problem;
    int64_t tokens = 0;
    for (int32_t b = 0; b < params_.batch; ++b) tokens += params_.view().requests()[b].kv_len;
    const double work = static_cast<double>(tokens) * p.rows() * p.kv_heads * (p.head_dim_qk + p.head_dim_vo);
    return 1 + static_cast<int64_t>(2e5 / (work / ranges() + 1));
  }

  // The segments of some ranges. Those at the same place in their group follow each other: heads of a token lie side by
  // side in memory, so this reads whole pages. f also gets up to `most` segments at once, of heads that follow each
  // other and the same keys.
  template <class F>
  void walk(int64_t begin, int64_t end, int32_t most, F&& f) const {
    const Mask& mask = params_.problem.mask;
    const int64_t groups = params_.view().header().range_groups, each = ranges() / groups;
    DecodeTileScheduler walks[kDecodeQTile];
    DecodeWorkTile segments[kDecodeQTile];
    for (int64_t i = begin; i < end;) {
      const auto count = static_cast<int32_t>(std::min<int64_t>({most, groups - i % groups, end - i}));
      for (int32_t w = 0; w < count; ++w, ++i) {
        walks[w].begin(params_.view(), 0, mask.qo_len, mask.window_left);
        walks[w].enter(static_cast<int32_t>(i % groups * each + i / groups));
      }
      while (true) {
        int32_t found = 0;
        for (int32_t w = 0; w < count; ++w) found += walks[w].next(segments[found]);
        if (found == 0) break;
        for (int32_t first = 0, last = 0; first < found; first = last) {
          do ++last;
          while (last < found && follows(segments[last - 1], segments[last]));
          f(segments + first, last - first);
        }
      }
    }
  }
  static bool follows(const DecodeWorkTile& a, const DecodeWorkTile& b) {
    return b.q_tile == a.q_tile + 1 && b.request == a.request && b.begin == a.begin && b.end == a.end;
  }

  AttentionProblem problem(const DecodeWorkTile& s) const {
    return params_.request(s.request, s.kv_len, q_.bytes(), out_.bytes());
  }

  // Of one head, or of several.
  void attend(const DecodeWorkTile* segments, int32_t heads, CpuTile& tile) const {
    const DecodeWorkTile& s = segments[0];
    const AttentionProblem p = problem(s);
    Variant::Params variant_params;
    variant_params.set(arguments_, p);
    Variant variant(variant_params, s.request);
    const TokenPages pages{params_.page_indices + s.first_page, static_cast<int32_t>(params_.page_size.value),
                           params_.k_page, params_.v_page};
    const int32_t count = params_.rows(s.request, s.q_tile);
    if (count == 0) return;
    tile.attend(p, pages, variant, params_.kv_head(s.q_tile), params_.first_row(s.q_tile), count,
                s.begin * kDecodeKvTile, params_.end_key(s), heads);
    for (int32_t r = 0; r < heads * count; ++r) {
      const DecodeWorkTile& own = segments[r / count];
      const int32_t row = r % count;
      if (own.is_whole()) {
        finish(p, variant, own.q_tile, row, tile.m(r), tile.d(r), tile.output(r));
      } else {
        const int32_t slot = own.partial_of(own.split_idx);
        std::copy_n(tile.output(r), p.head_dim_vo, params_.partial_output(slot) + row * p.head_dim_vo);
        params_.partial_state(slot)[2 * row] = tile.m(r), params_.partial_state(slot)[2 * row + 1] = tile.d(r);
      }
    }
  }

  // The parts of an item, in order of position.
  void merge(const DecodeWorkTile& s, float* sum) const {
    const AttentionProblem p = problem(s);
    Variant::Params variant_params;
    variant_params.set(arguments_, p);
    Variant variant(variant_params, s.request);
    for (int32_t r = 0; r < params_.rows(s.request, s.q_tile); ++r) {
      const auto state = [&](int32_t part) { return params_.partial_state(s.partial_of(part)) + 2 * r; };
      float m = kMinusInf, d = 0.f;
      for (int32_t part = 0; part < s.num_splits; ++part) m = std::max(m, state(part)[0]);
      std::fill_n(sum, p.head_dim_vo, 0.f);
      for (int32_t part = 0; part < s.num_splits; ++part) {
        const float weight = softmax_exp2<CpuMath>(state(part)[0], softmax_reference(m));
        d += weight * state(part)[1];
        cpu::add_scaled<16>(sum, params_.partial_output(s.partial_of(part)) + r * p.head_dim_vo, weight, p.head_dim_vo);
      }
      finish(p, variant, s.q_tile, r, m, d, sum);
    }
  }

  void finish(const AttentionProblem& p, Variant& variant, int32_t q_tile, int32_t r, float m, float d,
              float* sum) const {
    finish_row(p, variant, params_.sinks, p.row(params_.kv_head(q_tile), params_.first_row(q_tile) + r), m, d, sum,
               out_);
  }

  const BatchDecodeParams& params_;
  const Variant::Arguments& arguments_;
  DType q_, kv_, out_;
};

}  // namespace fi
