// The choice of a tile among the entries of the Hopper GEMM, by launchers.
#pragma once
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "fi/gemm/gemm_operand.h"
#include "fi/gemm/gemm_sm90.h"
#include "fi/gemm/gemm_small_m_cost.h"
#include "fi/host/kernel.h"

namespace fi {
#if FI_CUDA

// Clusters of so many CTAs that run at a time, where each CTA takes an SM: SMs come in groups of different sizes. Asked
// once for each device. A rehearsal has those of an H200, whose groups of SMs leave some without a cluster.
inline int64_t gemm_clusters(const Kernel& kernel, unsigned ctas, DLDevice device) {
  static cu::OfDevices<int> known[kGemmSmallMSplits + 1];
  constexpr int64_t kSms = 132, kOfSms[kGemmSmallMSplits + 1] = {0, 132, 66, 36, 30, 22, 18, 15, 15};
  if (ctas == 1 || !kernel.library) return kernel.multiprocessors(device) * kOfSms[ctas] / kSms;
  std::atomic<int>& count = known[ctas][device.device_id];
  int found = count.load(std::memory_order_relaxed);
  if (found) return found;
  const Entry& entry = kernel.entries.front();
  cu::DeviceGuard guard(device.device_id);
  const cu::Driver& driver = cu::Driver::get();
  Kernel::allow<cu::kMaxDynamicSharedBytes>(entry, entry.shared_allowed, kGemmSharedBytes, device.device_id);
  cu::LaunchAttribute attribute{};
  attribute.id = cu::kClusterDimension;
  attribute.value.cluster = {ctas, 1, 1};
  const cu::LaunchConfig config{ctas,    1,          1, static_cast<unsigned>(entry.threads), 1, 1, kGemmSharedBytes,
                                nullptr, &attribute, 1};
  driver.check(driver.OccupancyMaxActiveClusters(&found, reinterpret_cast<cu::Function>(entry.kernel), &config),
               "cuOccupancyMaxActiveClusters");
  count.store(found, std::memory_order_relaxed);
  return found;
}

// What the driver tells of a card, asked once for each device; without clusters. A rehearsal is for an H200.
inline GemmCard card_of(const Kernel& kernel, DLDevice device) {
  constexpr cu::DeviceAttribute kClockKhz{13}, kMemoryKhz{36}, kBusBits{37}, kL2Bytes{38};
  static cu::OfDevices<const GemmCard*> known;
  if (!kernel.library) return {kernel.multiprocessors(device), {}};
  const int id = device.device_id;
  if (const GemmCard* card = known[id].load(std::memory_order_acquire)) return *card;
  GemmCard card{kernel.multiprocessors(device), {}};
  const double khz = cu::attribute<kClockKhz>(id),
               bits = 2.0 * cu::attribute<kMemoryKhz>(id) * cu::attribute<kBusBits>(id);
  if (khz > 0 && bits > 0) card.clock_mhz = khz * 1e-3, card.memory_bytes = bits * 1e-3 / 8;
  if (const int bytes = cu::attribute<kL2Bytes>(id)) card.l2_bytes = bytes;
  known[id].store(new GemmCard(card), std::memory_order_release);  // as long as the process
  return card;
}

inline GemmCard card_with_clusters(const Kernel& kernel, DLDevice device) {
  GemmCard card = card_of(kernel, device);
  for (unsigned ctas = 2; ctas <= kGemmSplits; ++ctas) card.clusters[ctas] = gemm_clusters(kernel, ctas, device);
  return card;
}

// An entry, its config, and the CTAs of a cluster that split k.
template <class Config>
struct GemmChoice {
  const Entry* entry = nullptr;
  Config config{};
  int64_t splits = 1;
  bool transposed = false;  // of the exchanged operands
};

// The tiles of a shape of a batched product, of which group_m along m are walked together.
inline GemmRaster gemm_raster(const GemmProblem& p, int64_t rows, int64_t columns, int64_t group_m) {
  const int64_t m_tiles = gemm_ceil(p.m, rows), n_tiles = gemm_ceil(p.n, columns), tiles = m_tiles * n_tiles;
  const int64_t group = std::min(group_m, m_tiles), last = m_tiles % group ? m_tiles % group : group;
  const auto of = [](int64_t value) { return divisor(static_cast<uint32_t>(value)); };
  return {static_cast<int32_t>(p.rows == GemmRows::kIndices ? tiles : tiles * p.batch),
          static_cast<int32_t>(tiles),
          static_cast<int32_t>(m_tiles),
          static_cast<int32_t>(n_tiles),
          static_cast<int32_t>(group),
          of(tiles),
          of(group * n_tiles),
          of(group),
          of(last)};
}

// The problem with its operands exchanged; out stays [m, n] of the given one.
inline GemmProblem transposed(GemmProblem p) {
  std::swap(p.a, p.b);
  std::swap(p.a_scale, p.b_scale);
  std::swap(p.m, p.n);
  std::swap(p.a_batch_stride, p.b_batch_stride);
  std::swap(p.a_row_stride, p.b_row_stride);
  std::swap(p.a_scale_batch_stride, p.b_scale_batch_stride);
  std::swap(p.a_scale_row_stride, p.b_scale_row_stride);
  std::swap(p.a_scale_rows, p.b_scale_rows);
  return p;
}

// What a cost model predicts in us for the choices of a rehearsal. `log` leaves the three shortest times with its
// launches.
template <class Config>
struct GemmPredictions {
  std::vector<std::pair<double, GemmChoice<Config>>> found{};

  void add(const Kernel& kernel, double clocks, const GemmChoice<Config>& choice) {
    if (!kernel.library) found.emplace_back(clocks / gemm_clocks_of_us(card_of(kernel, {})), choice);
  }
  void log() {
    std::stable_sort(found.begin(), found.end(), [](const auto& x, const auto& y) { return x.first < y.first; });
    for (size_t i = 0; i < std::min<size_t>(3, found.size()); ++i) {
      const auto& [us, choice] = found[i];
      std::string& words = Kernel::rehearsed();
      words += "~ " + std::to_string(us) + " " + choice.entry->name;
      if (choice.transposed) words += ", exchanged operands";
      if (choice.splits > 1) words += ", k split by " + std::to_string(choice.splits);
      words += "\n";
    }
  }
};

// The cheapest of the entries, or the one that `tactic` counts: entries, then the same with exchanged operands for each
// number of CTAs that split k. clocks(choice): of the model; negative where the entry does not take the problem. It may
// say that entries do not exchange operands to split k.
template <class Config, class Clocks>
GemmChoice<Config> cheapest_entry(const Kernel& kernel, int64_t tactic, const Clocks& clocks) {
  GemmChoice<Config> best;
  GemmPredictions<Config> predictions;
  double least = 0;
  int64_t number = 0;
  for (int64_t splits = 0; splits <= kGemmSplits; ++splits)
    for (const Entry& entry : kernel.entries) {
      GemmChoice<Config> choice{&entry, Config::of(entry), std::max<int64_t>(1, splits), splits > 0};
      const double cost = clocks(choice);
      if (cost >= 0 && tactic == number) return choice;
      if (cost >= 0) predictions.add(kernel, cost, choice);
      if (cost >= 0 && (!best.entry || cost < least)) best = choice, least = cost;
      ++number;
    }
  FI_CHECK(best.entry && tactic < 0, ValueError, "tactic must be -1, or one of this problem below %lld; got %lld",
           static_cast<long long>(number), static_cast<long long>(tactic));
  predictions.log();
  return best;
}

// The cheapest of the entries that add k in `parts`: those of few tokens, whose stages have a size, have a part for
// each CTA of a cluster; a CTA of the others computes one part after the other.
template <class Config>
GemmChoice<Config> entry_of_parts(const Kernel& kernel, const GemmShape& s, int64_t parts, DLDevice device) {
  GemmCard card = card_with_clusters(kernel, device);
  card.clusters[parts] = gemm_clusters(kernel, static_cast<unsigned>(parts), device);
  const GemmSmallMShape few{s.rows, s.n, gemm_ceil(s.k * s.bytes, 128), 1};
  GemmChoice<Config> best;
  GemmPredictions<Config> predictions;
  double least = 0;
  for (const Entry& entry : kernel.entries) {
    const auto t = Config::of(entry);
    const bool shares = t.stage_blocks > 0;
    const int64_t splits = shares ? parts : 1;
    if (shares && !gemm_small_m_fits(few, {t.rows, t.columns, t.stage_blocks, splits})) continue;
    const double cost = gemm_cost(s, {t.rows, t.columns, t.alone_clocks, splits, shares, false}, card);
    predictions.add(kernel, cost, {&entry, t, splits});
    if (!best.entry || cost < least) best = {&entry, t, splits}, least = cost;
  }
  predictions.log();
  return best;
}

#endif
}  // namespace fi
