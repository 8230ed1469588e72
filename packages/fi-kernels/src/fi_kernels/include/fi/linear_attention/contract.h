// What the host entries of the recurrences check alike: heads, numbers, index tables and states.
#pragma once
#include <initializer_list>

#include "fi/divisor.h"
#include "fi/host/contents.h"
#include "fi/host/op.h"
#include "fi/tables.h"

namespace fi {

inline Numbers numbers_of(const Tensor& t) {
  return {t.data(), t.dtype() == kF32 ? NumberType::kF32 : t.dtype() == kF16 ? NumberType::kF16 : NumberType::kBF16};
}

// A table of [batch] or [batch, tokens] slots; none if absent.
inline IndexTable index_table(const OptionalTensor& t, const Tensor& other, int64_t batch, int64_t tokens) {
  if (!t) return {};
  t.is({kI32, kI64}).on(other);
  Dim rows{"batch", batch}, columns{"tokens", tokens};
  if (tokens) {
    t.shape(rows, columns);
  } else {
    t.shape(rows);
  }
  return {t.data(), t.stride(0), tokens ? t.stride(1) : 0, t.dtype().bits == 64};
}

// How many of `heads` share one of the `own` heads of a tensor.
inline Divisor head_group(const Tensor& t, int64_t own, int64_t heads) {
  FI_CHECK(own > 0 && heads % own == 0, ValueError,
           "%s must have a number of heads that divides %lld, the heads of the state; got %lld", t.name(),
           static_cast<long long>(heads), static_cast<long long>(own));
  return divisor(static_cast<uint32_t>(heads / own));
}

template <int kCount>
void strides_of(const Tensor& t, int64_t (&strides)[kCount]) {
  for (int i = 0; i < kCount; ++i) strides[i] = t.stride(i);
}

// Raises unless each slot is below `slots`; negative ones, and `pad`, are padding.
inline void check_slots(const Kernel& kernel, const OptionalTensor& table, int64_t slots, int64_t pad = -1) {
  if (!table) return;
  const int64_t numel = table.numel(), columns = table.ndim() == 2 ? table.size(1) : 1;
  if (numel == 0) return;
  const auto at = [&](int64_t i) {
    return i / columns * table.stride(0) + (table.ndim() == 2 ? i % columns * table.stride(1) : 0);
  };
  const Integers values(kernel, table, at(numel - 1) + 1);  // with what lies between elements that are strided
  for (int64_t i = 0; i < numel; ++i) {
    const int64_t slot = values[at(i)];
    FI_CHECK(slot < slots || slot == pad, ValueError, "%s must be below %lld, the slots of the state; got %lld at %lld",
             table.name(), static_cast<long long>(slots), static_cast<long long>(slot), static_cast<long long>(i));
  }
}

#if FI_CUDA
struct StateTile {
  const Entry* entry;
  int64_t rows, threads;  // of a CTA: a multiple of the rows of a pass
};
// Which entries a call may take: `once` of their configs.
enum StateForm : int64_t { kAnyTokens, kOneToken, kElements };

// The entry and the rows of a state that a CTA has.
template <class Config>
StateTile tile(const Kernel& kernel, StateForm form, int64_t states, int64_t rows, int64_t multiprocessors) {
  const auto leaves = [=](int64_t own, int64_t ctas) {
    return states * ((rows + own - 1) / own) >= ctas * multiprocessors;
  };
  // Warps of one token: one where there are many, else as many as leave three CTAs for four SMs
  // (docs/notes/linear-attention-decode.md).
  for (const Entry& entry : kernel.entries) {
    if (form != kOneToken) break;
    const int64_t own = Config::of(entry).rows_per_pass;
    if (Config::of(entry).once != kOneToken || rows % own != 0) continue;
    const int64_t warps = states * (rows / own);
    for (int64_t count = warps >= 32 * multiprocessors ? 1 : 4;; count /= 2)
      if (count == 1 || (rows % (count * own) == 0 && 4 * warps >= 3 * count * multiprocessors))
        return {&entry, count * own, 32 * count};
  }
  // Else the most rows of a lane that leave `entry_ctas` CTAs for each SM, and for them the most passes that leave
  // `pass_ctas`; entries are in order of growing rows.
  const StateForm wanted = form == kElements ? kElements : kAnyTokens;
  const Entry* best = &kernel.first_entry([=](const Entry& entry) { return Config::of(entry).once == wanted; });
  int64_t own = Config::of(*best).rows_per_pass;
  if (form == kElements) return {best, own, best->threads};
  for (const Entry& entry : kernel.entries)
    if (Config::of(entry).once == kAnyTokens && leaves(Config::of(entry).rows_per_pass, Config::of(entry).entry_ctas))
      best = &entry;
  own = Config::of(*best).rows_per_pass;
  while (2 * own <= rows && leaves(2 * own, Config::of(*best).pass_ctas)) own *= 2;
  return {best, own, best->threads};
}
#endif

}  // namespace fi
