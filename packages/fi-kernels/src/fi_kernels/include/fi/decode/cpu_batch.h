// batch_decode on the CPU: one query row after another over the paged keys, fp32.
#pragma once
#include <vector>

#include "fi/attention/cpu_block.h"
#include "fi/cpu/rows.h"
#include "fi/decode/batch_decode.h"
#include "fi/host/tensor.h"

namespace fi {

// kv_len and first page of each request come from the schedule; how it divides the work is of no interest here.
inline void batch_decode_cpu(const BatchDecodeParams& params, DType q, DType kv, DType out) {
  const cpu::LoadRow load_q = cpu::row_loader(q), load_kv = cpu::row_loader(kv);
  const cpu::StoreRow store = cpu::row_storer(out);
  const DecodeRequest* requests = params.view().requests();
  std::vector<uint64_t> steps;
  for (int32_t k = 0; params.problem.rotary.enabled && k < params.problem.dim_qk / 2; ++k)
    steps.push_back(params.problem.rotary.step(k));
  std::vector<float> query(static_cast<size_t>(params.problem.dim_qk)), key(query.size()),
      value(static_cast<size_t>(params.problem.dim_vo)), sum(value.size());
  for (int32_t b = 0; b < params.batch; ++b) {
    const AttentionProblem p = params.request(b, requests[b].kv_len, q.bytes(), out.bytes());
    const int32_t* pages = params.page_indices + requests[b].first_page;
    const auto token = [&](const void* cache, int64_t page, int64_t slot, int64_t head, int32_t j) {
      const auto place = static_cast<int32_t>(params.page_size.value);
      return static_cast<const char*>(cache) + (pages[j / place] * page + j % place * slot + head) * kv.bytes();
    };
    for (int32_t i = 0; i < p.mask.qo_len; ++i)
      for (int32_t head = 0; head < p.qo_heads; ++head) {
        const int32_t kv_head = head / p.group;
        const HeadScores scores = p.head_scores<CpuMath>(head);
        load_q(static_cast<const char*>(p.q) + (i * p.q_token + head * p.q_head) * q.bytes(), query.data(), p.dim_qk);
        if (p.rotary.enabled) cpu::rotate_row<8>(query.data(), steps.data(), p.dim_qk / 2, p.mask.position(i));
        float m = kMinusInf, d = 0.f;
        std::fill(sum.begin(), sum.end(), 0.f);
        for (int32_t j = p.mask.first_key(i); j < p.mask.end_key(i); ++j) {
          if (!p.mask.keeps(i, j)) continue;
          load_kv(token(p.k, params.k_page, p.k_token, kv_head * p.k_head, j), key.data(), p.dim_qk);
          if (p.rotary.enabled) cpu::rotate_row<8>(key.data(), steps.data(), p.dim_qk / 2, j);
          float dot = 0.f;
          for (size_t x = 0; x < query.size(); ++x) dot += query[x] * key[x];
          const float s = scores.score<CpuMath>(dot * scores.scale, static_cast<float>(j - i));
          const float top = std::max(m, s), base = softmax_base(top);
          const float factor = softmax_weight<CpuMath>(m, base), weight = softmax_weight<CpuMath>(s, base);
          m = top, d = d * factor + weight;
          load_kv(token(p.v, params.v_page, p.v_token, kv_head * p.v_head, j), value.data(), p.dim_vo);
          for (size_t x = 0; x < sum.size(); ++x) sum[x] = sum[x] * factor + weight * value[x];
        }
        const float factor = params.sinks ? add_sink<CpuMath>(params.sinks[head], m, d) : 1.f;
        cpu::multiply_row<16>(sum.data(), factor * softmax_inverse(d) * p.value_scale(kv_head), p.dim_vo);
        store(sum.data(), static_cast<char*>(p.out) + (i * p.out_token + head * p.out_head) * out.bytes(), p.dim_vo);
        if (p.lse) p.lse[static_cast<int64_t>(i) * p.qo_heads + head] = softmax_lse<CpuMath>(m, d);
      }
  }
}

}  // namespace fi
