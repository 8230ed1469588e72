// The CPU twins of moe_dispatch and moe_combine: each rank publishes all it has, and takes what is for it.
#pragma once
#include <algorithm>
#include <vector>

#include "fi/comm/exchange_cpu.h"
#include "fi/comm/moe_combine.h"
#include "fi/comm/moe_dispatch.h"
#include "fi/cpu/row_convert.h"

namespace fi::cpu {

// Calls take(token, row) for each token of `experts` that goes to `target`.
template <class Take>
int32_t for_target(const MoeDispatchParams& p, const int32_t* experts, int64_t tokens, int32_t target, Take take) {
  int32_t row = 0;
  for (int64_t token = 0; token < tokens; ++token) {
    const int32_t* own = experts + token * p.top_k;
    const bool goes = std::any_of(own, own + p.top_k, [&](int32_t expert) {
      return expert >= 0 && expert < p.num_experts && expert / p.experts_per_rank == target;
    });
    take(token, goes && row < p.max_tokens ? row : -1);
    row += goes;
  }
  return std::min(row, p.max_tokens);
}

inline void moe_dispatch(const MoeDispatchParams& p) {
  const CommParams& c = p.comm;
  for (int32_t r = 0; r < kMaxWorld; ++r)
    for_target(p, p.experts, p.tokens, r, [&](int64_t token, int32_t row) { p.rows[token * kMaxWorld + r] = row; });
  // The number of tokens, then their experts.
  std::vector<int32_t> own{p.tokens};
  own.insert(own.end(), p.experts, p.experts + static_cast<int64_t>(p.tokens) * p.top_k);
  if (!publish(c, own.data(), static_cast<int64_t>(own.size()) * 4)) return;
  std::vector<std::vector<int32_t>> rows(static_cast<size_t>(c.world));
  for (int32_t source = 0; source < c.world; ++source) {
    const auto* theirs = reinterpret_cast<const int32_t*>(published_data(c, source));
    auto& found = rows[static_cast<size_t>(source)];
    p.counts[source] =
        for_target(p, theirs + 1, theirs[0], c.rank, [&](int64_t, int32_t row) { found.push_back(row); });
  }
  for (int32_t j = 0; j < p.num_payloads; ++j) {
    const auto& payload = p.payloads[j];
    if (!publish(c, payload.from, static_cast<int64_t>(p.tokens) * payload.bytes)) return;
    for (int32_t source = 0; source < c.world; ++source) {
      const char* from = published_data(c, source);
      char* to = c.peers[c.rank] + payload.offset + static_cast<int64_t>(source) * p.max_tokens * payload.bytes;
      for (const int32_t row : rows[static_cast<size_t>(source)]) {
        if (row >= 0) memcpy(to + static_cast<int64_t>(row) * payload.bytes, from, static_cast<size_t>(payload.bytes));
        from += payload.bytes;
      }
    }
  }
}

inline void moe_combine(const MoeCombineParams& p, DType dtype) {
  const CommParams& c = p.comm;
  const int64_t bytes = int64_t{p.vectors} * 16, d = bytes / dtype.bytes();
  if (!publish(c, c.peers[c.rank] + p.offset, c.world * p.max_tokens * bytes)) return;
  const LoadRow load = row_loader(dtype);
  const StoreRow store = row_storer(dtype);
  for_rows(p.tokens, d * c.world, 2 * d, [&](int64_t token, float* sum) {
    std::fill(sum, sum + d, 0.f);
    for (int32_t r = 0; r < c.world; ++r) {
      const int32_t row = p.rows[token * kMaxWorld + r];
      if (row < 0) continue;
      load(published_data(c, r) + (static_cast<int64_t>(c.rank) * p.max_tokens + row) * bytes, sum + d, d);
      for (int64_t i = 0; i < d; ++i) sum[i] += sum[d + i];
    }
    store(sum, static_cast<char*>(p.out) + token * bytes, d);
  });
}

}  // namespace fi::cpu
