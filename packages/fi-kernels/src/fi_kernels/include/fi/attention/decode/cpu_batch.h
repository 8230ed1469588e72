// batch_decode on the CPU, in fp32: threads process the ranges of the schedule, then merge the split output tiles.
#pragma once
#include <vector>

#include "fi/attention/cpu/epilogue.h"
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
      CpuTile tile(params_.problem, q_, kv_, kDecodeQTile, cpu::KvRowProducts::of(kv_));
      const int32_t max_heads = params_.q_tiles_per_head.value == 1 ? CpuTile::heads(params_.problem.rows()) : 1;
      for_each_work_tile(begin, end, max_heads,
                         [&](const DecodeWorkTile* s, int32_t heads) { attend(s, heads, tile); });
    });
    if (!has_splits()) return;
    const int64_t merged = 2 * kDecodeQTile * static_cast<int64_t>(params_.problem.head_dim_vo);  // floats, of a range
    cpu::parallel_for(ranges(), 1 + 65536 / merged, [&](int64_t begin, int64_t end) {
      std::vector<float> sum(static_cast<size_t>(params_.problem.head_dim_vo));
      for_each_work_tile(begin, end, 1, [&](const DecodeWorkTile* s, int32_t) {
        if (!s->is_whole() && s->split_idx == 0) merge(*s, sum.data());
      });
    });
  }

 private:
  int32_t ranges() const {
    const DecodeHeader& header = params_.schedule.header();
    return header.range_groups * (header.static_ranges + header.dynamic_ranges);
  }
  bool has_splits() const {
    const DecodeSchedule schedule = params_.schedule;
    const DecodeRangeStart* starts = schedule.starts();
    return schedule.header().chunk_tiles > 0 ||
           std::any_of(starts, starts + ranges(), [](const DecodeRangeStart& s) { return s.num_splits > 1; });
  }

  // The number of ranges that outweigh the cost of waking a thread.
  int64_t grain() const {
    const AttentionProblem& p = params_.problem;
    int64_t tokens = 0;
    for (int32_t b = 0; b < params_.schedule.batch; ++b) tokens += params_.schedule.requests()[b].kv_len;
    const double work = static_cast<double>(tokens) * p.rows() * p.kv_heads * (p.head_dim_qk + p.head_dim_vo);
    return 1 + static_cast<int64_t>(2e5 / (work / ranges() + 1));
  }

  // Calls f(work_tiles, count) for the work tiles of ranges [begin, end). Ranges with the same index in their group are
  // consecutive here: they read neighbouring heads of the same tokens, that is, whole pages. One call has up to
  // `max_heads` work tiles, of consecutive heads and the same keys.
  template <class F>
  void for_each_work_tile(int64_t begin, int64_t end, int32_t max_heads, F&& f) const {
    const int64_t groups = params_.schedule.header().range_groups, ranges_per_group = ranges() / groups;
    DecodeTileScheduler schedulers[kDecodeQTile];
    DecodeWorkTile work_tiles[kDecodeQTile];
    for (int64_t i = begin; i < end;) {
      const auto count = static_cast<int32_t>(std::min<int64_t>({max_heads, groups - i % groups, end - i}));
      for (int32_t w = 0; w < count; ++w, ++i) {
        schedulers[w].begin(params_.schedule, 0, params_.queries());
        schedulers[w].enter(static_cast<int32_t>(i % groups * ranges_per_group + i / groups));
      }
      while (true) {
        int32_t found = 0;
        for (int32_t w = 0; w < count; ++w) found += schedulers[w].next(work_tiles[found]);
        if (found == 0) break;
        for (int32_t first = 0, last = 0; first < found; first = last) {
          do ++last;
          while (last < found && follows(work_tiles[last - 1], work_tiles[last]));
          f(work_tiles + first, last - first);
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
  void attend(const DecodeWorkTile* work_tiles, int32_t heads, CpuTile& tile) const {
    const DecodeWorkTile& s = work_tiles[0];
    const AttentionProblem p = problem(s);
    Variant::Params variant_params;
    variant_params.set(arguments_, p);
    Variant variant(variant_params, s.request);
    const TokenPages pages{params_.pages.page_indices + s.first_page,
                           static_cast<int32_t>(params_.pages.page_size.value), params_.pages.k_page,
                           params_.pages.v_page, params_.pages.v_table_offset};
    const int32_t count = params_.rows(s.request, s.q_tile);
    if (count == 0) return;
    tile.attend(p, pages, variant, params_.kv_head(s.q_tile), params_.first_row(s.q_tile), count,
                s.begin * kDecodeKvTile, params_.end_key(s), heads);
    for (int32_t r = 0; r < heads * count; ++r) {
      const DecodeWorkTile& own = work_tiles[r / count];
      const int32_t row = r % count;
      if (own.is_whole()) {
        finish(p, variant, own.q_tile, row, tile.row_max(r), tile.row_sum(r), tile.output(r));
      } else {
        const int32_t slot = own.partial_of(own.split_idx);
        std::copy_n(tile.output(r), p.head_dim_vo, params_.partial_output(slot) + row * p.head_dim_vo);
        params_.partial_state(slot)[2 * row] = tile.row_max(r),
                                        params_.partial_state(slot)[2 * row + 1] = tile.row_sum(r);
      }
    }
  }

  // Merges the partials of an output tile in order of position.
  void merge(const DecodeWorkTile& s, float* sum) const {
    const AttentionProblem p = problem(s);
    Variant::Params variant_params;
    variant_params.set(arguments_, p);
    Variant variant(variant_params, s.request);
    for (int32_t r = 0; r < params_.rows(s.request, s.q_tile); ++r) {
      const auto state = [&](int32_t part) { return params_.partial_state(s.partial_of(part)) + 2 * r; };
      float row_max = kMinusInf, row_sum = 0.f;
      for (int32_t part = 0; part < s.num_splits; ++part) row_max = std::max(row_max, state(part)[0]);
      std::fill_n(sum, p.head_dim_vo, 0.f);
      for (int32_t part = 0; part < s.num_splits; ++part) {
        const float rescale = softmax_exp2<CpuMath>(state(part)[0], softmax_reference(row_max));
        row_sum += rescale * state(part)[1];
        cpu::add_scaled<16>(sum, params_.partial_output(s.partial_of(part)) + r * p.head_dim_vo, rescale,
                            p.head_dim_vo);
      }
      finish(p, variant, s.q_tile, r, row_max, row_sum, sum);
    }
  }

  void finish(const AttentionProblem& p, Variant& variant, int32_t q_tile, int32_t r, float row_max, float row_sum,
              float* sum) const {
    store_row(p, variant, params_.scales.sinks, p.row(params_.kv_head(q_tile), params_.first_row(q_tile) + r), row_max,
              row_sum, sum, out_);
  }

  const BatchDecodeParams& params_;
  const Variant::Arguments& arguments_;
  DType q_, kv_, out_;
};

}  // namespace fi
