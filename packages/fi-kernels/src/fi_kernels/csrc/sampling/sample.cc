// sample: rows of probabilities or logits are filtered by k, p and min-p; then a token is drawn, or the row rewritten.
#include "fi/sampling/sample.h"

#include "fi/host/op.h"
#include "fi/sampling/contract.h"
#include "fi/sampling/piece.h"

#if FI_CUDA
#include <algorithm>
#else
#include "fi/cpu/parallel.h"
#include "fi/cpu/rows.h"
#include "fi/sampling/cpu_row.h"
#endif

namespace fi {
namespace {

#if FI_CUDA
int64_t pieces_of(int64_t n) { return (n + kPiece - 1) / kPiece; }

// Whether some rows may be streamed, and whether others may not: a tensor has any value.
void count_streamed(const SampleParams& p, bool& some, bool& others) {
  some = false, others = p.output != kDrawToken;
  if (others) return;
  const auto streamed = [&](int32_t k, float top_p, float min_p) {
    return sampling::is_streamed(p.top_k.rows ? k : p.top_k.value, p.top_p.rows ? top_p : p.top_p.value,
                                 p.min_p.rows ? min_p : p.min_p.value, p.vocab, p.joint);
  };
  for (const int32_t k : {0, 1, p.vocab - 1}) {
    some |= streamed(k, 1.f, 0.f);
    others |= !streamed(k, 0.f, 1.f);
  }
}

// softmax, but of rows that are changed first.
bool is_softmax(const SampleParams& p) {
  return p.output == kRenormalise && p.logits && p.wide_out && !p.top_k.rows && p.top_k.value <= 0 && !p.top_p.rows &&
         p.top_p.value >= 1.f && !p.min_p.rows && !(p.min_p.value > 0.f) && !p.bias && !p.bitmask && !p.seen;
}

// Of the blocks that are there at once; clusters do not fill the device to the last.
int64_t resident(const Entry& entry, DLDevice device) {
  return entry.config[0] * Kernel::multiprocessors(device) * 15 / 16;
}

// config = {blocks on an SM}.
void launch_stream(const Kernel& kernel, const Entry& entry, SampleParams& p, DLDevice device) {
  const int64_t pieces = pieces_of(p.vocab), warps = entry.threads / 32;
  int64_t blocks = 1;
  while (blocks < 16 && blocks * warps < pieces && p.rows * blocks * 2 <= resident(entry, device)) blocks *= 2;
  Launch config{p.rows * blocks};
  config.pdl = kernel.pdl(-1);
  config.cluster = static_cast<unsigned>(blocks);
  config.shared_bytes = pieces * kPieceRoom;
  kernel.launch(entry, config, device, p);
}

// config = {blocks on an SM, pieces that a warp holds in shared memory}; it has one more in registers, so all of a row
// is held by 16 blocks at most. Small blocks hide behind each other, but large ones are chosen where they are one wave
// and small ones are not: 64 x 128256 fp32 takes 25.4 us (H200), with small blocks 25.8; 256 rows 84.7 and 76.3.
void launch_softmax(const Kernel& kernel, SampleParams& p, DLDevice device) {
  const int64_t pieces = pieces_of(p.vocab);
  const auto blocks_of = [&](const Entry& entry) {
    const int64_t warps = entry.threads / 32;
    int64_t blocks = 1;
    while (blocks * warps * (entry.config[1] + 1) < pieces) blocks *= 2;
    return blocks;
  };
  const Entry &small = kernel.entries[2], &large = kernel.entries[3];
  const bool fits = blocks_of(small) <= 16, waves = p.rows * blocks_of(small) > resident(small, device);
  const bool one_wave = p.rows * blocks_of(large) <= Kernel::multiprocessors(device);
  const Entry& entry = fits && !(waves && one_wave) ? small : large;
  const int64_t warps = entry.threads / 32;
  int64_t blocks = blocks_of(entry);
  while (blocks < 16 && blocks * warps < pieces && p.rows * blocks * 2 <= resident(entry, device)) blocks *= 2;
  p.held = static_cast<int32_t>((pieces + blocks * warps - 1) / (blocks * warps) - 1);
  Launch config{p.rows * blocks};
  config.pdl = kernel.pdl(-1);
  config.cluster = static_cast<unsigned>(blocks);
  config.shared_bytes = (pieces + 1) / 2 * 16 + warps * p.held * kPiece * int64_t{sizeof(float)};
  kernel.launch(entry, config, device, p);
}

// config = {blocks on an SM, bytes of a row that a block should hold}; none where rows are read from global memory by
// one block each.
void launch(const Kernel& kernel, SampleParams& p, int64_t bytes, DLDevice device) {
  if (kernel.entries.size() > 1) {
    if (is_softmax(p)) return launch_softmax(kernel, p, device);
    bool others;
    count_streamed(p, p.streamed, others);
    if (p.streamed) launch_stream(kernel, kernel.entries[1], p, device);
    if (!others) return;
  }
  const Entry& entry = kernel.entries[0];
  const auto pieces = [](int64_t n) { return pieces_of(n) * kPiece; };
  const int64_t slots = p.vocab + 16 / bytes - 1, warps = entry.threads / 32;  // wherever the row begins
  const auto slice = [&](int64_t blocks) { return pieces((slots + blocks - 1) / blocks); };
  int64_t blocks = 1, room = 0;
  const bool all = p.bias || p.bitmask || p.seen;  // is changed where it lies
  if (!entry.config.empty()) {
    const int64_t resident = entry.config[0] * Kernel::multiprocessors(device);
    room = entry.config[1];
    const auto fits = [&](int64_t n) {
      const int64_t whole = pieces((slice(n) + warps - 1) / warps) * warps * bytes;
      return slice(n) <= 65536 && (all ? whole <= room : slice(n) * bytes * 3 <= room * 4);
    };
    while (blocks < 16 && !fits(blocks)) blocks *= 2;
    while (blocks < 16 && p.rows * blocks * 2 <= resident && slice(blocks) >= 4096) blocks *= 2;
    p.ahead = p.rows * blocks > resident ? static_cast<int32_t>(resident / blocks) : 0;
  }
  p.slice = static_cast<int32_t>(slice(blocks));
  p.share = static_cast<int32_t>(pieces((p.slice + warps - 1) / warps));
  p.held =
      static_cast<int32_t>(room && all ? p.share : std::min<int64_t>(p.share, room / bytes / warps / kPiece * kPiece));
  Launch config{p.rows * blocks};
  config.pdl = kernel.pdl(-1);
  config.cluster = static_cast<unsigned>(blocks);
  config.shared_bytes = warps * kListRoom + (room ? warps * p.held : 2 * kPiece) * bytes;  // lone blocks hold the ends
  kernel.launch(entry, config, device, p);
}
#else
void adjust(const SampleParams& p, float* x, int64_t output, int64_t row) {
  if (p.seen) {
    const float repetition = sampling::at(p.repetition, row), frequency = sampling::at(p.frequency, row);
    const float presence = sampling::at(p.presence, row);
    for (int64_t i = 0; i < p.seen_slots; ++i) {
      const int32_t token = p.seen[output * p.seen_row + i];
      if (token < 0 || token >= p.vocab) continue;
      const int32_t count = p.seen_count ? p.seen_count[output * p.seen_row + i] : 0;
      x[token] = sampling::penalised(x[token], repetition, frequency, presence, count);
    }
  }
  for (int64_t t = 0; p.bias && t < p.vocab; ++t) x[t] += p.bias[output * p.bias_row + t];
  for (int64_t t = 0; p.bitmask && t < p.vocab; ++t)
    if (!(p.bitmask[output * p.bitmask_row + t / 32] >> (t % 32) & 1)) x[t] = -HUGE_VALF;
}

void run_row(const SampleParams& p, sampling::CpuRow& s, DType in, DType out, int64_t output) {
  const int64_t row = sampling::source_row(p, output);
  const bool there = sampling::is_drawable(p, row);
  float temperature = 1.f;
  bool valid = false;
  const auto put = [&](int64_t token, bool drawn) {
    if (p.wide_tokens)
      static_cast<int64_t*>(p.out)[output] = token;
    else
      static_cast<int32_t*>(p.out)[output] = static_cast<int32_t>(token);
    if (p.valid) p.valid[output] = drawn;
  };
  const auto random = [&](uint32_t i = 0) { return sampling::random_number(p, output, i); };
  if (there) {
    const char* input = static_cast<const char*>(p.input) + row * p.input_row * in.bytes();
    const bool adjusted = p.bias || p.bitmask || p.seen;
    s.x = reinterpret_cast<const float*>(input);
    if (in != kF32 || adjusted) cpu::row_loader(in)(input, s.own(), p.vocab);
    if (adjusted) adjust(p, s.buffer.data(), output, row);
    temperature = sampling::at(p.temperature, row);
    valid = s.prepare(temperature);
  }
  const bool greedy = sampling::is_greedy(p, temperature), share = there && sampling::is_share(p, row);
  if (valid && !greedy && (share || sampling::is_plain(p, row))) s.sum_pieces();
  if (valid && !greedy && !share && sampling::is_plain(p, row)) return put(s.draw_plain(random()), true);
  const float top_p = there ? sampling::at(p.top_p, row) : 1.f;
  float lowest = HUGE_VALF;
  if (valid && (p.output == kDrawToken || !(top_p >= 1.f))) s.weigh();
  if (valid)
    lowest = greedy ? s.top : s.threshold(sampling::at(p.top_k, row), top_p, sampling::at(p.min_p, row), p.joint);
  uint32_t turn = 0;
  for (; valid && share && turn < sampling::kTurns * sampling::kDraws; ++turn) {
    const int64_t token = s.draw_plain(random(turn));
    if (s.x[token] >= lowest) return put(token, true);
  }
  if (p.output == kDrawToken) {
    const uint64_t total = valid ? s.total(lowest) : 0;
    int64_t token = 0;
    if (total > 0) token = s.locate(lowest, greedy ? 0 : sampling::uniform_below(total, random(turn)));
    return put(token, total > 0);
  }
  char* to = static_cast<char*>(p.out) + output * p.out_row * out.bytes();
  if (out != kF32) s.results.resize(static_cast<size_t>(p.vocab));
  float* y = out == kF32 ? reinterpret_cast<float*>(to) : s.results.data();
  if (p.output == kMaskOut)
    s.mask(lowest, y);
  else
    s.renormalise(valid, lowest, y);
  if (out != kF32) cpu::row_storer(out)(y, to, p.vocab);
}

void run_cpu(const SampleParams& p, DType in, DType out) {
  cpu::parallel_for(p.rows, std::max<int64_t>(1, 16384 / p.vocab), [&](int64_t begin, int64_t end) {
    sampling::CpuRow row(p.vocab, p.logits);
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
// What changes logits before they are sampled; each has one row an output.
void check_adjustments(SampleParams& p, const Tensor& input, Dim& batch, Dim& vocab, OptionalTensor bias,
                       OptionalTensor bitmask, OptionalTensor seen, OptionalTensor seen_count,
                       OptionalTensor adjusted) {
  if (!bias && !bitmask && !seen) return;
  FI_CHECK(p.logits && input.dtype() == kF32, TypeError,
           "logits must be float32 for a bias, a bitmask or penalties; got %s", input.dtype().str().c_str());
  adjusted.is({kF32}).on(input).inner_contiguous().shape(batch, vocab);
  p.adjusted = adjusted.data<float>();
  p.adjusted_row = adjusted.stride(0);
  if (bias) {
    bias.is({kF32}).on(input).inner_contiguous();
    FI_CHECK(bias.ndim() <= 2 && bias.size(-1) == vocab && (bias.ndim() == 1 || bias.size(0) == batch), ValueError,
             "bias must have shape [vocab] or [batch, vocab] with vocab = %lld; got %s", static_cast<long long>(vocab),
             bias.shape_str().c_str());
    p.bias = bias.data<const float>();
    p.bias_row = bias.ndim() == 2 ? bias.stride(0) : 0;
  }
  if (bitmask) {
    Dim words{"ceil(vocab / 32)", (vocab + 31) / 32};
    bitmask.is({kI32}).on(input).inner_contiguous().shape(batch, words);
    p.bitmask = bitmask.data<const uint32_t>();
    p.bitmask_row = bitmask.stride(0);
  }
  if (seen) {
    Dim slots{"slots"};
    seen.is({kI32}).on(input).contiguous().shape(batch, slots);
    p.seen = seen.data<const int32_t>();
    p.seen_row = p.seen_slots = static_cast<int32_t>(slots);
    if (seen_count) p.seen_count = seen_count.like(seen).contiguous().shape(batch, slots).data<const int32_t>();
  }
}

void sample(const Kernel& kernel, Tensor out, OptionalTensor valid, OptionalTensor adjusted, Tensor input,
            OptionalTensor indices, OptionalTensor temperature, double temperature_value, OptionalTensor top_k,
            int64_t top_k_value, OptionalTensor top_p, double top_p_value, OptionalTensor min_p, double min_p_value,
            OptionalTensor seed, int64_t seed_value, OptionalTensor offset, int64_t offset_value, OptionalTensor bias,
            OptionalTensor bitmask, OptionalTensor seen, OptionalTensor seen_count, OptionalTensor repetition,
            double repetition_value, OptionalTensor frequency, double frequency_value, OptionalTensor presence,
            double presence_value, int64_t output, int64_t logits, int64_t joint) {
  // 1 check
  Dim rows{"rows"}, vocab{"vocab"}, batch{"batch"};
  input.is({kF32, kF16, kBF16}).inner_contiguous().shape(rows, vocab);
  FI_CHECK(vocab >= 1 && vocab <= 1 << 19 && rows <= 0x7fffffff, ValueError,
           "%s must have 1 <= vocab <= 2^19 and rows < 2^31; got %s", input.name(), input.shape_str().c_str());
  if (indices)
    indices.is({kI32, kI64}).on(input).contiguous().shape(batch);
  else
    batch.value = rows;
  if (output == kDrawToken) {
    out.is({kI32, kI64}).on(input).contiguous().shape(batch);
    if (valid) valid.is({kBool}).on(input).contiguous().shape(batch);
  } else {
    out.on(input).inner_contiguous().shape(batch, vocab);
    if (output == kMaskOut || out.dtype() != kF32) out.like(input);
  }

  // 2 shape
  SampleParams p{};
  p.input = input.data();
  p.out = out.data();
  p.valid = valid ? valid.data<uint8_t>() : nullptr;
  p.indices = indices ? indices.data() : nullptr;
  p.temperature = per_row(temperature, temperature_value, input, rows);
  p.top_p = per_row(top_p, top_p_value, input, rows);
  p.min_p = per_row(min_p, min_p_value, input, rows);
  p.top_k.value = static_cast<int32_t>(std::min<int64_t>(top_k_value, vocab));
  if (top_k) p.top_k.rows = top_k.is({kI32}).on(input).contiguous().shape(rows).data<const int32_t>();
  p.seed = per_row_seed(seed, seed_value, input, batch);
  p.offset = per_row_seed(offset, offset_value, input, batch);
  p.per_row_random = p.seed.step != 0 || p.offset.step != 0;
  p.repetition = per_row(repetition, repetition_value, input, rows);
  p.frequency = per_row(frequency, frequency_value, input, rows);
  p.presence = per_row(presence, presence_value, input, rows);
  p.input_row = input.stride(0);
  p.out_row = output == kDrawToken ? 1 : out.stride(0);
  p.input_rows = rows;
  p.rows = static_cast<int32_t>(batch);
  p.vocab = static_cast<int32_t>(vocab);
  p.output = static_cast<int32_t>(output);
  p.logits = logits != 0;
  p.joint = joint != 0;
  p.wide_indices = indices && indices.dtype() == kI64;
  p.wide_tokens = out.dtype() == kI64;
  p.wide_out = out.dtype() == kF32;
  check_adjustments(p, input, batch, vocab, bias, bitmask, seen, seen_count, adjusted);
  if (p.rows == 0) return;

  // 3 launch
#if FI_CUDA
  launch(kernel, p, input.dtype().bytes(), input.device());
#else
  (void)kernel;
  run_cpu(p, input.dtype(), out.dtype());
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::sample, "out", "valid", "adjusted", "input", "indices", "temperature", "temperature", "top_k", "top_k",
      "top_p", "top_p", "min_p", "min_p", "seed", "seed", "offset", "offset", "bias", "bitmask", "seen", "seen_count",
      "repetition_penalty", "repetition_penalty", "frequency_penalty", "frequency_penalty", "presence_penalty",
      "presence_penalty", "output", "logits", "joint")
