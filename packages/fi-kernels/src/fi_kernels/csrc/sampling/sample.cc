// Launches sample: filters rows of probabilities or logits by top-k, top-p and min-p, then draws a token or rewrites
// the row.
#include "fi/sampling/sample.h"

#include "fi/generated/sample.h"
#include "fi/sampling/contract.h"
#include "fi/sampling/tile.h"

#if FI_CUDA
#include <algorithm>
#else
#include "fi/cpu/parallel.h"
#include "fi/cpu/row_convert.h"
#include "fi/sampling/sample_cpu.h"
#endif

namespace fi {
namespace {

#if FI_CUDA
int64_t tiles_of(int64_t n) { return (n + kTileSize - 1) / kTileSize; }

// Whether a draw has rows for the single-pass kernel, and whether it has others. A tensor argument may have any value.
void find_row_kinds(const SampleParams& p, bool& single_pass, bool& others) {
  single_pass = others = false;
  const auto is_single_pass = [&](int32_t k, float top_p, float min_p) {
    return sampling::is_single_pass(p.top_k.rows ? k : p.top_k.value, p.top_p.rows ? top_p : p.top_p.value,
                                    p.min_p.rows ? min_p : p.min_p.value, p.vocab, p.joint);
  };
  for (const int32_t k : {0, 1, p.vocab - 1}) {
    single_pass |= is_single_pass(k, 1.f, 0.f);
    others |= !is_single_pass(k, 0.f, 1.f);
  }
}

// Whether the op is a plain softmax: fp32 output, no filter, no adjusted logits.
bool is_softmax(const SampleParams& p) {
  return p.output == kRenormalise && p.logits && p.float32_out && !p.top_k.rows && p.top_k.value <= 0 &&
         !p.top_p.rows && p.top_p.value >= 1.f && !p.min_p.rows && !(p.min_p.value > 0.f) && !p.bias && !p.bitmask &&
         !p.seen;
}

// The number of resident CTAs. Clusters do not fill the last SMs.
int64_t resident(const Kernel& kernel, const Entry& entry, DLDevice device) {
  return SampleConfig::of(entry).ctas_per_sm * kernel.multiprocessors(device) * 15 / 16;
}

enum class Pass { kRows, kSinglePass, kSoftmax };

struct Tile {
  const Entry& entry;
  int64_t ctas;  // of the cluster that works on a row
};

int64_t whole_tiles(int64_t n) { return tiles_of(n) * kTileSize; }

// Elements of a row for each CTA, for any alignment of the row.
int64_t cta_slots(const SampleParams& p, int64_t ctas, int64_t bytes) {
  return whole_tiles((p.vocab + 16 / bytes - 1 + ctas - 1) / ctas);
}

// Whether all of a row is cached, and adjusted in place.
bool is_adjusted(const SampleParams& p) { return p.bias || p.bitmask || p.seen; }

// A warp of the softmax caches tiles in shared memory and holds one more in registers, so at most 16 CTAs hold the
// whole row. Several small CTAs on an SM hide each other's latency; large CTAs are chosen only where they form one wave
// and small ones do not (docs/notes/sampling-softmax.md).
Tile softmax_tile(const Kernel& kernel, const SampleParams& p, DLDevice device) {
  const auto ctas_of = [&](const Entry& entry) {
    const int64_t tiles = entry.threads / 32 * (SampleConfig::of(entry).tiles_per_warp + 1);
    int64_t ctas = 1;
    while (ctas * tiles < tiles_of(p.vocab)) ctas *= 2;
    return ctas;
  };
  const Entry &small = kernel.entries[1], &large = kernel.entries[2];
  const bool fits = ctas_of(small) <= 16, waves = p.rows * ctas_of(small) > resident(kernel, small, device);
  const bool one_wave = p.rows * ctas_of(large) <= kernel.multiprocessors(device);
  const Entry& entry = fits && !(waves && one_wave) ? small : large;
  return {entry, ctas_of(entry)};
}

// The fewest CTAs whose shared memory holds the row, then more while all of them are resident and work on long parts.
// An entry that caches no bytes of a row reads rows from global memory, one CTA each.
Tile rows_tile(const Kernel& kernel, const SampleParams& p, int64_t bytes, DLDevice device) {
  const Entry& entry = kernel.entries[0];
  const auto config = SampleConfig::of(entry);
  const int64_t capacity = config.row_bytes, warps = entry.threads / 32;
  const auto fits = [&](int64_t ctas) {
    const int64_t slots = cta_slots(p, ctas, bytes), all = whole_tiles((slots + warps - 1) / warps) * warps * bytes;
    return slots <= 65536 && (is_adjusted(p) ? all <= capacity : slots * bytes * 3 <= capacity * 4);
  };
  const int64_t most = config.ctas_per_sm * kernel.multiprocessors(device);
  int64_t ctas = 1;
  if (!capacity) return {entry, ctas};
  while (ctas < 16 && !fits(ctas)) ctas *= 2;
  while (ctas < 16 && p.rows * ctas * 2 <= most && cta_slots(p, ctas, bytes) >= 4096) ctas *= 2;
  return {entry, ctas};
}

// The unit of a draw and that of rewritten rows have other entries after the one for all rows.
Tile tile(const Kernel& kernel, const SampleParams& p, Pass pass, int64_t bytes, DLDevice device) {
  if (pass == Pass::kRows) return rows_tile(kernel, p, bytes, device);
  auto [entry, ctas] = pass == Pass::kSoftmax ? softmax_tile(kernel, p, device) : Tile{kernel.entries[1], 1};
  const int64_t warps = entry.threads / 32, most = resident(kernel, entry, device);
  while (ctas < 16 && ctas * warps < tiles_of(p.vocab) && p.rows * ctas * 2 <= most) ctas *= 2;
  return {entry, ctas};
}

void launch(const Kernel& kernel, SampleParams& p, Pass pass, int64_t bytes, DLDevice device) {
  const auto [entry, ctas] = tile(kernel, p, pass, bytes, device);
  const int64_t warps = entry.threads / 32, tiles = tiles_of(p.vocab);
  Launch config{p.rows * ctas};
  config.pdl = kernel.pdl(-1);
  config.cluster = static_cast<unsigned>(ctas);
  if (pass == Pass::kSinglePass) {
    config.shared_bytes = tiles * kTileSumBytes;
  } else if (pass == Pass::kSoftmax) {
    p.warp_cached = static_cast<int32_t>((tiles + ctas * warps - 1) / (ctas * warps) - 1);
    config.shared_bytes = (tiles + 1) / 2 * 16 + warps * p.warp_cached * kTileSize * int64_t{sizeof(float)};
  } else {
    const auto chosen = SampleConfig::of(entry);
    const int64_t most = chosen.ctas_per_sm * kernel.multiprocessors(device), capacity = chosen.row_bytes;
    p.prefetch_rows = capacity && p.rows * ctas > most ? static_cast<int32_t>(most / ctas) : 0;
    p.cta_slots = static_cast<int32_t>(cta_slots(p, ctas, bytes));
    p.warp_slots = static_cast<int32_t>(whole_tiles((p.cta_slots + warps - 1) / warps));
    const int64_t cacheable = capacity / bytes / warps / kTileSize * kTileSize;
    p.warp_cached =
        static_cast<int32_t>(capacity && is_adjusted(p) ? p.warp_slots : std::min<int64_t>(p.warp_slots, cacheable));
    // Without a cluster, only the first and the last tile of the row are cached.
    config.shared_bytes = warps * kWarpListBytes + (capacity ? warps * p.warp_cached : 2 * kTileSize) * bytes;
  }
  kernel.launch(entry, config, device, p);
}

void launch(const Kernel& kernel, SampleParams& p, int64_t bytes, DLDevice device) {
  if (kernel.entries.size() > 1 && is_softmax(p)) return launch(kernel, p, Pass::kSoftmax, bytes, device);
  if (kernel.entries.size() > 1 && p.output == kDrawToken) {
    bool others;
    find_row_kinds(p, p.single_pass, others);
    if (p.single_pass) launch(kernel, p, Pass::kSinglePass, bytes, device);
    if (!others) return;
  }
  launch(kernel, p, Pass::kRows, bytes, device);
}
#else
void adjust(const SampleParams& p, float* x, int64_t output, int64_t row) {
  if (p.seen) {
    const float repetition = sampling::at(p.repetition, row), frequency = sampling::at(p.frequency, row);
    const float presence = sampling::at(p.presence, row);
    for (int64_t i = 0; i < p.seen_slots; ++i) {
      const int32_t token = p.seen[output * p.seen_stride + i];
      if (token < 0 || token >= p.vocab) continue;
      const int32_t count = p.seen_count ? p.seen_count[output * p.seen_stride + i] : 0;
      x[token] = sampling::penalised_logit(x[token], repetition, frequency, presence, count);
    }
  }
  for (int64_t t = 0; p.bias && t < p.vocab; ++t) x[t] += p.bias[output * p.bias_stride + t];
  for (int64_t t = 0; p.bitmask && t < p.vocab; ++t)
    if (!(p.bitmask[output * p.bitmask_stride + t / 32] >> (t % 32) & 1)) x[t] = -HUGE_VALF;
}

void run_row(const SampleParams& p, sampling::CpuRowSampler& s, DType in, DType out, int64_t output) {
  const int64_t row = sampling::input_row(p, output);
  const bool drawable = sampling::is_drawable(p, row);
  float temperature = 1.f;
  bool valid = false;
  const auto write = [&](int64_t token, bool drawn) {
    if (p.int64_tokens)
      static_cast<int64_t*>(p.out)[output] = token;
    else
      static_cast<int32_t*>(p.out)[output] = static_cast<int32_t>(token);
    if (p.valid) p.valid[output] = drawn;
  };
  const auto random = [&](uint32_t i = 0) { return sampling::random_number(p, output, i); };
  if (drawable) {
    const char* input = static_cast<const char*>(p.input) + row * p.input_stride * in.bytes();
    const bool adjusted = p.bias || p.bitmask || p.seen;
    s.x = reinterpret_cast<const float*>(input);
    if (in != kF32 || adjusted) cpu::row_loader(in)(input, s.use_buffer(), p.vocab);
    if (adjusted) adjust(p, s.buffer.data(), output, row);
    temperature = sampling::at(p.temperature, row);
    valid = s.prepare(temperature);
  }
  const bool greedy = sampling::is_greedy(p, temperature);
  const bool rejection = drawable && sampling::uses_top_p_rejection(p, row),
             unfiltered = drawable && sampling::is_unfiltered(p, row);
  if (valid && !greedy && (rejection || unfiltered)) s.sum_tiles();
  if (valid && !greedy && !rejection && unfiltered) return write(s.draw_unfiltered(random()), true);
  const float top_p = drawable ? sampling::at(p.top_p, row) : 1.f;
  float lowest = HUGE_VALF;
  if (valid && (p.output == kDrawToken || !(top_p >= 1.f))) s.weigh();
  if (valid)
    lowest = greedy ? s.maximum : s.threshold(sampling::at(p.top_k, row), top_p, sampling::at(p.min_p, row), p.joint);
  uint32_t draw = 0;
  for (; valid && rejection && draw < sampling::kRounds * sampling::kProposals; ++draw) {
    const int64_t token = s.draw_unfiltered(random(draw));
    if (s.x[token] >= lowest) return write(token, true);
  }
  if (p.output == kDrawToken) {
    const uint64_t total = valid ? s.total(lowest) : 0;
    int64_t token = 0;
    if (total > 0) token = s.locate(lowest, greedy ? 0 : sampling::uniform_below(total, random(draw)));
    return write(token, total > 0);
  }
  char* to = static_cast<char*>(p.out) + output * p.out_stride * out.bytes();
  if (out != kF32) s.results.resize(static_cast<size_t>(p.vocab));
  float* y = out == kF32 ? reinterpret_cast<float*>(to) : s.results.data();
  if (p.output == kMaskOut)
    s.mask(lowest, y);
  else
    s.renormalise(lowest, y);
  if (out != kF32) cpu::row_storer(out)(y, to, p.vocab);
}

void run_cpu(const SampleParams& p, DType in, DType out) {
  cpu::parallel_for(p.rows, std::max<int64_t>(1, 16384 / p.vocab), [&](int64_t begin, int64_t end) {
    sampling::CpuRowSampler row(p.vocab, p.logits);
    for (int64_t output = begin; output < end; ++output) run_row(p, row, in, out, output);
  });
}
#endif

PerRowFloat per_row(OptionalTensor rows, double value, const Tensor& input, int64_t n) {
  if (!rows) return {nullptr, static_cast<float>(value)};
  Dim length{"rows", n};
  rows.is({kF32}).on(input).contiguous().shape(length);
  return {rows.data<const float>(), 0.f};
}
// Checks what adjusts logits before sampling: bias, bitmask and seen tokens, with one row per output.
void check_adjustments(SampleParams& p, const Tensor& input, Dim& batch, Dim& vocab, OptionalTensor bias,
                       OptionalTensor bitmask, OptionalTensor seen, OptionalTensor seen_count,
                       OptionalTensor adjusted) {
  if (!bias && !bitmask && !seen) return;
  FI_CHECK(p.logits && input.dtype() == kF32, TypeError,
           "logits must be float32 for a bias, a bitmask or penalties; got %s", input.dtype().str().c_str());
  adjusted.is({kF32}).on(input).inner_contiguous().shape(batch, vocab);
  p.adjusted = adjusted.data<float>();
  p.adjusted_stride = adjusted.stride(0);
  if (bias) {
    bias.is({kF32}).on(input).inner_contiguous();
    FI_CHECK(bias.ndim() <= 2 && bias.size(-1) == vocab && (bias.ndim() == 1 || bias.size(0) == batch), ValueError,
             "bias must have shape [vocab] or [batch, vocab] with vocab = %lld; got %s", static_cast<long long>(vocab),
             bias.shape_str().c_str());
    p.bias = bias.data<const float>();
    p.bias_stride = bias.ndim() == 2 ? bias.stride(0) : 0;
  }
  if (bitmask) {
    Dim words{"ceil(vocab / 32)", (vocab + 31) / 32};
    bitmask.is({kI32}).on(input).inner_contiguous().shape(batch, words);
    p.bitmask = bitmask.data<const uint32_t>();
    p.bitmask_stride = bitmask.stride(0);
  }
  if (seen) {
    Dim slots{"slots"};
    seen.is({kI32}).on(input).contiguous().shape(batch, slots);
    p.seen = seen.data<const int32_t>();
    p.seen_stride = p.seen_slots = static_cast<int32_t>(slots);
    if (seen_count) p.seen_count = seen_count.like(seen).contiguous().shape(batch, slots).data<const int32_t>();
  }
}

SampleRequest request_of(const SampleArgs& a) { return {a.input.dtype(), a.output == 0}; }

void sample(const Kernel& kernel, const SampleArgs& a) {
  // 1 check
  Dim rows{"rows"}, vocab{"vocab"}, batch{"batch"};
  a.input.is({kF32, kF16, kBF16}).inner_contiguous().shape(rows, vocab);
  FI_CHECK(vocab >= 1 && vocab <= 1 << 19 && rows <= 0x7fffffff, ValueError,
           "%s must have 1 <= vocab <= 2^19 and rows < 2^31; got %s", a.input.name(), a.input.shape_str().c_str());
  if (a.indices)
    a.indices.is({kI32, kI64}).on(a.input).contiguous().shape(batch);
  else
    batch.value = rows;
  if (a.output == kDrawToken) {
    a.out.is({kI32, kI64}).on(a.input).contiguous().shape(batch);
    if (a.valid) a.valid.is({kBool}).on(a.input).contiguous().shape(batch);
  } else {
    a.out.on(a.input).inner_contiguous().shape(batch, vocab);
    if (a.output == kMaskOut || a.out.dtype() != kF32) a.out.like(a.input);
  }

  // 2 shape
  SampleParams p{};
  p.input = a.input.data();
  p.out = a.out.data();
  p.valid = a.valid ? a.valid.data<uint8_t>() : nullptr;
  p.indices = a.indices ? a.indices.data() : nullptr;
  p.temperature = per_row(a.temperature, a.temperature_value, a.input, rows);
  p.top_p = per_row(a.top_p, a.top_p_value, a.input, rows);
  p.min_p = per_row(a.min_p, a.min_p_value, a.input, rows);
  p.top_k.value = static_cast<int32_t>(std::min<int64_t>(a.top_k_value, vocab));
  if (a.top_k) p.top_k.rows = a.top_k.is({kI32}).on(a.input).contiguous().shape(rows).data<const int32_t>();
  p.seed = per_row_seed(a.seed, a.seed_value, a.input, batch);
  p.offset = per_row_seed(a.offset, a.offset_value, a.input, batch);
  p.per_row_seeds = p.seed.step != 0 || p.offset.step != 0;
  p.repetition = per_row(a.repetition_penalty, a.repetition_penalty_value, a.input, rows);
  p.frequency = per_row(a.frequency_penalty, a.frequency_penalty_value, a.input, rows);
  p.presence = per_row(a.presence_penalty, a.presence_penalty_value, a.input, rows);
  p.input_stride = a.input.stride(0);
  p.out_stride = a.output == kDrawToken ? 1 : a.out.stride(0);
  p.input_rows = rows;
  p.rows = static_cast<int32_t>(batch);
  p.vocab = static_cast<int32_t>(vocab);
  p.output = static_cast<int32_t>(a.output);
  p.logits = a.logits != 0;
  p.joint = a.joint != 0;
  p.int64_indices = a.indices && a.indices.dtype() == kI64;
  p.int64_tokens = a.out.dtype() == kI64;
  p.float32_out = a.out.dtype() == kF32;
  check_adjustments(p, a.input, batch, vocab, a.bias, a.bitmask, a.seen, a.seen_count, a.adjusted);
  if (p.rows == 0) return;

  // 3 launch
#if FI_CUDA
  launch(kernel, p, a.input.dtype().bytes(), a.input.device());
#else
  (void)kernel;
  run_cpu(p, a.input.dtype(), a.out.dtype());
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::sample, fi::request_of)
