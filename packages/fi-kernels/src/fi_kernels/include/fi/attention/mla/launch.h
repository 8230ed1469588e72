// Launches batch_mla on CUDA: chooses the kernel entry, describes the cache for TMA.
#pragma once
#include <algorithm>
#include <numeric>

#include "fi/attention/contract.h"
#include "fi/attention/mla/batch_mla.h"
#include "fi/generated/batch_mla.h"

#if FI_CUDA
namespace fi {

// A cache as [pages, tokens of a page, columns]: one box has 64 columns of `tokens`.
inline void describe_cache(const Kernel& kernel, TensorMap& map, const Tensor& cache, int64_t tokens) {
  const int64_t bytes = cache.dtype().bytes();
  const auto size = [&](int axis) { return static_cast<uint64_t>(std::max<int64_t>(1, cache.size(axis))); };
  const auto step = [&](int axis) {
    return static_cast<uint64_t>(cache.size(axis) > 1 ? cache.stride(axis) * bytes : 128);
  };
  const uint64_t sizes[] = {size(2), size(1), size(0)}, strides[] = {step(1), step(0)};
  const uint32_t box[] = {64, static_cast<uint32_t>(tokens), 1};
  kernel.describe(map, bytes, 3, cache.data(), sizes, strides, box);
}

inline const Entry& tile(const Kernel& kernel, const BatchMlaParams& p, const BatchMlaArgs& a) {
  const auto page_size = static_cast<int64_t>(p.page_size.value);
  const int64_t limit = kernel.shared_limit(a.q_nope.device());
  return kernel.first_entry([&](const Entry& e) {
    const auto config = BatchMlaConfig::of(e);
    if (e.shared_bytes > limit) return false;
    if (config.kind != MlaKind::TMA && (config.kind != MlaKind::SWAPPED || a.fine_splits)) return true;
    return !p.sparse && !a.exact_max && p.has_rope && page_size % kMlaKvTile == 0 && a.ckv_cache.size(0) > 0;
  });
}

// schedule_words: from one schedule to the next.
inline void launch_batch_mla(const Kernel& kernel, BatchMlaParams& p, const BatchMlaArgs& a, int64_t schedule_words,
                             bool pdl) {
  std::initializer_list<Tensor> all = {a.q_nope, a.ckv_cache, a.out},
                                with_rope = {a.q_nope, a.q_pe, a.ckv_cache, a.kpe_cache, a.out},
                                packed = {a.q_nope, a.out};
  const int64_t alignment = alignment_of(p.is_packed ? packed : p.has_rope ? with_rope : all);
  FI_CHECK(alignment == 16, ValueError,
           "q_nope, q_pe, ckv_cache, kpe_cache and out must have rows at multiples of 16 bytes; got %lld",
           static_cast<long long>(alignment));
  FI_CHECK(!a.ckv_scales || alignment_of({a.ckv_scales}) == 16, ValueError,
           "ckv_scales must have rows at multiples of 16 bytes; got %lld",
           static_cast<long long>(alignment_of({a.ckv_scales})));
  const Entry& entry = tile(kernel, p, a);
  const auto config = BatchMlaConfig::of(entry);
  const bool wide = config.kind >= MlaKind::GATHER;
  const int64_t ranges = wide ? a.wide_ranges : a.narrow_ranges;
  if (wide) p.schedule += schedule_words, p.cluster = static_cast<int32_t>(a.cluster);
  p.tile_rows = static_cast<int32_t>(config.rows * p.cluster);
  FI_CHECK(a.workspace.numel() >= 2 * ranges * p.partial_floats(), ValueError,
           "workspace must have %lld floats or more for %lld work ranges; got %lld",
           static_cast<long long>(2 * ranges * p.partial_floats()), static_cast<long long>(ranges),
           static_cast<long long>(a.workspace.numel()));
  FI_CHECK(!a.fine_splits || config.kind == MlaKind::SWAPPED, ValueError,
           "fine_splits must come with 16-bit caches with a rotary part, on Hopper");
  if (config.kind == MlaKind::TMA || config.kind == MlaKind::SWAPPED) {
    p.box = static_cast<int32_t>(std::gcd(static_cast<int64_t>(p.page_size.value), int64_t{kMlaKvTile}));
    describe_cache(kernel, p.ckv_map, a.ckv_cache, p.box);
    describe_cache(kernel, p.kpe_map, a.kpe_cache, p.box);
  }
  Launch launch{ranges * p.cluster};
  launch.cluster = static_cast<unsigned>(p.cluster);
  launch.pdl = pdl;
  kernel.launch(entry, launch, a.q_nope.device(), p);
}

}  // namespace fi
#endif
