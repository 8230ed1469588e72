// moe_sort: checks the arguments, launches the CUDA kernel or runs the CPU one.
#include "fi/fused_moe/moe_sort.h"

#include <algorithm>

#include "fi/generated/moe_sort.h"
#include "fi/host/steps.h"

#if !FI_CUDA
#include <vector>
#endif

namespace fi {
namespace {

#if !FI_CUDA
template <class Id>
void run_cpu(const MoeSortParams& p) {
  const auto expert_of = [&](int64_t slot) {
    const int64_t id =
        static_cast<const Id*>(p.ids)[slot / p.top_k * p.ids_token_stride + slot % p.top_k * p.ids_slot_stride];
    if (id < p.first_expert) return int64_t{-1};
    const uint64_t local =
        static_cast<uint64_t>(id) - static_cast<uint64_t>(p.first_expert);  // the difference may overflow
    return local < static_cast<uint64_t>(p.experts) ? static_cast<int64_t>(local) : int64_t{-1};
  };
  std::vector<int32_t> next(static_cast<size_t>(p.experts + 1), 0);
  for (int64_t slot = 0; slot < p.slots; ++slot)
    if (const int64_t e = expert_of(slot); e >= 0) ++next[static_cast<size_t>(e + 1)];
  int32_t active = 0;
  for (int32_t e = 0; e < p.experts; ++e) {
    if (next[static_cast<size_t>(e + 1)] > 0) p.active[++active] = e;
    next[static_cast<size_t>(e + 1)] += next[static_cast<size_t>(e)];
  }
  p.active[0] = active;
  std::fill(p.active + 1 + active, p.active + 1 + p.experts, -1);
  std::copy(next.begin(), next.end(), p.offsets);
  std::fill(p.rows + p.offsets[p.experts], p.rows + p.slots, -1);
  std::fill(p.zeros, p.zeros + p.zeros_count, 0);
  for (int64_t slot = 0; slot < p.slots; ++slot) {
    const int64_t e = expert_of(slot);
    p.positions[slot] = e < 0 ? -1 : next[static_cast<size_t>(e)]++;
    if (e >= 0) p.rows[p.positions[slot]] = static_cast<int32_t>(slot / p.top_k);
  }
}
#else
// A cluster pays for its two barriers where warps of one CTA would have more than a few steps of 32 slots.
const Entry& tile(const Kernel& kernel, const MoeSortParams& p) {
  const bool cluster = MoeSortConfig::of(kernel.entries.front()).ctas > 1 && p.slots > 32 * 4 * kMoeSortWarps;
  return kernel.first_entry([&](const Entry& e) { return (MoeSortConfig::of(e).ctas > 1) == cluster; });
}
#endif

MoeSortRequest request_of(const MoeSortArgs& a) { return {a.ids.dtype()}; }

void moe_sort(const Kernel& kernel, const MoeSortArgs& a) {
  // 1 check
  Dim tokens{"tokens"}, top_k{"top_k"}, ends{"experts + 1"};
  a.ids.is({kI32, kI64, {kDLInt, 16}}).shape(tokens, top_k);
  Dim slots{"tokens * top_k", tokens * top_k};
  a.offsets.is({kI32}).on(a.ids).contiguous().shape(ends);
  a.rows.is({kI32}).on(a.ids).contiguous().shape(slots);
  a.positions.is({kI32}).on(a.ids).contiguous().shape(tokens, top_k);
  a.active.is({kI32}).on(a.ids).contiguous().shape(ends);
  Dim count{"count"};
  if (a.zeros) a.zeros.is({kI32}).on(a.ids).contiguous().shape(count);
  FI_CHECK(ends >= 2 && ends <= 513, ValueError, "offsets must be for 1 to 512 experts; got %s",
           a.offsets.shape_str().c_str());
  FI_CHECK(slots <= 1 << 24, ValueError, "ids must have at most 2^24 elements; got %s", a.ids.shape_str().c_str());

  // 2 shape
  MoeSortParams p{};
  p.offsets = a.offsets.data<int32_t>();
  p.rows = a.rows.data<int32_t>();
  p.positions = a.positions.data<int32_t>();
  p.active = a.active.data<int32_t>();
  p.ids = a.ids.data();
  p.ids_token_stride = a.ids.stride(0);
  p.ids_slot_stride = a.ids.stride(1);
  p.slots = static_cast<int32_t>(slots);
  p.top_k = static_cast<int32_t>(std::max<int64_t>(1, top_k));
  p.experts = static_cast<int32_t>(ends - 1);
  if (a.zeros) p.zeros = a.zeros.data<int32_t>(), p.zeros_count = static_cast<int32_t>(count);
  p.first_expert = a.first_expert;

  // 3 launch
#if FI_CUDA
  const Entry& entry = tile(kernel, p);
  Launch launch{MoeSortConfig::of(entry).ctas};
  const int64_t steps = (p.slots + 31) / 32, warps = launch.grid_x * kMoeSortWarps;
  p.warp_slots = static_cast<int32_t>(std::max<int64_t>(1, (steps + warps - 1) / warps) * 32);
  p.warps = static_cast<int32_t>(std::clamp<int64_t>((p.slots + p.warp_slots - 1) / p.warp_slots, 1, kMoeSortWarps));
  launch.cluster = static_cast<unsigned>(launch.grid_x);
  launch.shared_bytes = (int64_t{p.warps} + 1) * p.experts * 4;
  launch.pdl = kernel.pdl(a.enable_pdl);
  kernel.launch(entry, launch, a.ids.device(), p);
#else
  (void)kernel, (void)a.enable_pdl;
  const auto run = a.ids.dtype() == kI32   ? run_cpu<int32_t>
                   : a.ids.dtype() == kI64 ? run_cpu<int64_t>
                                           : run_cpu<int16_t>;
  run(p);
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::moe_sort, fi::request_of)
FI_STEPS
