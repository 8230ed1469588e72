// batch_prefill on the CPU: threads take tiles of query rows in the order of the schedule, longest first; fp32.
#pragma once
#include <atomic>
#include <cstring>

#include "fi/attention/cpu/epilogue.h"
#include "fi/attention/cpu/tile.h"
#include "fi/attention/prefill/batch_prefill.h"
#include "fi/cpu/parallel.h"

namespace fi {

class CpuBatchPrefill {
 public:
  // fixed_order: of CpuTile.
  CpuBatchPrefill(const BatchPrefillParams& params, const Variant::Arguments& arguments, DType q, DType kv, DType out,
                  bool fixed_order)
      : params_(params), arguments_(arguments), q_(q), kv_(kv), out_(out), fixed_order_(fixed_order) {}

  void run() const {
    const AttentionProblem& p = params_.problem;
    const int64_t units = static_cast<int64_t>(params_.schedule.header->num_tiles) * p.kv_heads;
    std::atomic<int64_t> next{0};
    cpu::parallel_for(units, grain(units), [&](int64_t, int64_t) {
      CpuTile tile(p, q_, kv_, std::min(CpuTile::kRows, params_.tile_tokens * p.group()), {}, fixed_order_);
      for (int64_t unit; (unit = next.fetch_add(1, std::memory_order_relaxed)) < units;)
        attend(params_.schedule.tiles[unit / p.kv_heads], static_cast<int32_t>(unit % p.kv_heads), tile);
    });
    const PaddingRows rest = PaddingRows::of(params_.padded_rows, params_.batch_size, params_.schedule.requests);
    const int64_t bytes = out_.bytes();
    for (int32_t i = 0; i < rest.count(); ++i)
      for (int32_t head = 0; head < p.qo_heads; ++head)
        std::memset(static_cast<char*>(p.out) + (rest.row(i) * p.out_token + head * p.out_head) * bytes, 0,
                    static_cast<size_t>(p.head_dim_vo * bytes));
  }

 private:
  // Units that pay for waking a thread.
  int64_t grain(int64_t units) const {
    const AttentionProblem& p = params_.problem;
    double work = 0;
    for (int32_t i = 0; i < params_.schedule.header->num_tiles; ++i)
      work += params_.schedule.requests[params_.schedule.tiles[i].request].kv_len;
    work *= static_cast<double>(params_.tile_tokens) * p.qo_heads * (p.head_dim_qk + p.head_dim_vo);
    return 1 + static_cast<int64_t>(2e5 / (work / static_cast<double>(units) + 1));
  }

  void attend(const PrefillWorkTile& work_tile, int32_t kv_head, CpuTile& tile) const {
    const AttentionProblem p = params_.request(work_tile.request, static_cast<int32_t>(q_.bytes()),
                                               static_cast<int32_t>(kv_.bytes()), static_cast<int32_t>(out_.bytes()));
    Variant::Params variant_params;
    variant_params.set(arguments_, p);
    Variant variant(variant_params, work_tile.request);
    TokenPages pages = TokenPages::one();
    if (params_.pages.page_indices)
      pages = {params_.pages.page_indices + params_.schedule.requests[work_tile.request].kv_begin,
               static_cast<int32_t>(params_.pages.page_size.value), params_.pages.k_page, params_.pages.v_page,
               params_.pages.v_table_offset};
    const int32_t begin = work_tile.q_tile * params_.tile_tokens * p.group(),
                  end = std::min(begin + params_.tile_tokens * p.group(), p.rows());
    for (int32_t first = begin; first < end; first += CpuTile::kRows) {
      const int32_t rows = std::min(CpuTile::kRows, end - first);
      const int32_t first_key = p.mask.first_key(first / p.group());
      tile.attend(p, pages, variant, kv_head, first, rows, fixed_order_ ? first_key & -CpuTile::kBlock : first_key,
                  p.mask.end_key((first + rows - 1) / p.group()));
      for (int32_t r = 0; r < rows; ++r)
        store_row(p, variant, params_.scales.sinks, p.row(kv_head, first + r), tile.row_max(r), tile.row_sum(r),
                  tile.output(r), out_);
    }
  }

  const BatchPrefillParams& params_;
  const Variant::Arguments& arguments_;
  DType q_, kv_, out_;
  bool fixed_order_;
};

}  // namespace fi
