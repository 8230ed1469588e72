// lora_delta: checks the arguments, launches the CUDA kernel or runs the CPU one.
#include "fi/lora/lora_delta.h"

#include <algorithm>

#include "fi/generated/lora_delta.h"
#include "fi/host/steps.h"
#include "fi/lora/contract.h"

#if !FI_CUDA
#include "fi/cpu/products.h"
#include "fi/cpu/row_convert.h"
#endif

namespace fi {
namespace {

#if !FI_CUDA
FI_CLONES void multiply(float* x, float factor, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) x[i] *= factor;
}
FI_CLONES void add(float* x, const float* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) x[i] += y[i];
}

// Rows of weights of k columns, or of none, that are converted at once: they stay in L1 or L2, and eight sums hide
// their latency.
int64_t rows_of_block(int64_t k) { return std::clamp<int64_t>(16384 / cpu::padded(std::max<int64_t>(k, 1)), 8, 64); }

// The products of a pair, of one slice after another.
struct CpuPair {
  const LoraDeltaParams& p;
  DType dtype;  // of the weights
  int32_t key;

  const char* weights(const LoraWeights& w, int64_t row) const {
    const int64_t expert = key & 0xffff,
                  at = (key >> 16) * w.lora_stride + (w.table ? 0 : expert * w.expert_stride) + row * w.row_stride;
    const void* first = w.table ? reinterpret_cast<const void*>(w.table[expert]) : w.first;
    return static_cast<const char*>(first) + at * dtype.bytes();
  }
  // out = w x, of w [rows, n]; x is padded with zeros, and block has room for rows_of_block(n) padded rows.
  void multiply(const LoraWeights& w, const float* x, int64_t n, float* out, int64_t rows, float* block) const {
    const cpu::LoadRow load = cpu::row_loader(dtype);
    const int64_t pitch = cpu::padded(n), most = rows_of_block(n);
    for (int64_t first = 0; first < rows; first += most) {
      const int64_t count = std::min(most, rows - first);
      if (w.row_stride == pitch) {
        load(weights(w, first), block, count * pitch);
      } else {
        for (int64_t i = 0; i < count; ++i) {
          load(weights(w, first + i), block + i * pitch, n);
          std::fill(block + i * pitch + n, block + (i + 1) * pitch, 0.f);
        }
      }
      cpu::dots({{x, pitch, 1}, block, out + first, pitch, count, 1, count, pitch, false});
    }
  }
};

void run_pair(const LoraDeltaParams& p, const LoraDeltaArgs& a, DType dtype, int32_t pair, float* scratch) {
  const int32_t key = p.pairs.key_of(pair);
  const cpu::LoadRow load = cpu::row_loader(a.x.dtype()), load_out = cpu::row_loader(a.out.dtype());
  const cpu::StoreRow store = cpu::row_storer(a.out.dtype()), round = cpu::row_storer(dtype);
  const int64_t most = cpu::padded(std::max<int64_t>({p.in, p.rank, p.columns})), rank = cpu::padded(p.rank);
  float *x = scratch, *h = x + most, *rounded = h + rank, *out = rounded + rank, *old = out + most, *block = old + most;
  std::fill(x + p.in, x + most, 0.f);
  std::fill(h + p.rank, h + rank, 0.f);
  if (p.fills(key)) {
    const bool shrinks = a.stage == kLoraShrink;
    const int64_t n = shrinks ? p.rank : p.columns;
    std::fill(out, out + n, -0.f);
    for (int32_t s = 0; s < (shrinks ? p.slice_count : 1); ++s)
      store(out, a.out.at(s * p.out_slice_stride + pair * p.out_row_stride), n);
  }
  if (key < 0) return;
  const CpuPair own{p, dtype, key};
  const float scale = p.scale_of(key >> 16);
  const int64_t from = p.per_pair ? pair : p.pairs.token_of(pair);
  const auto finish = [&](int64_t at, int64_t n) {
    multiply(out, scale, n);
    if (p.add) {
      load_out(a.out.at(at), old, n);
      add(out, old, n);
    }
    store(out, a.out.at(at), n);
  };
  if (a.stage != kLoraExpand) load(a.x.at(from * p.x_row_stride), x, p.in);
  for (int32_t s = 0; s < p.slice_count; ++s) {
    const LoraSlice& slice = p.slices[s];
    if (a.stage == kLoraExpand)
      load(a.x.at(s * p.middle_slice_stride + pair * p.middle_row_stride), h, p.rank);
    else
      own.multiply(slice.a, x, p.in, a.stage == kLoraShrink ? out : h, p.rank, block);
    if (a.stage == kLoraShrink) {
      finish(s * p.out_slice_stride + pair * p.out_row_stride, p.rank);
      continue;
    }
    round(h, rounded, p.rank);
    cpu::row_loader(dtype)(rounded, h, p.rank);
    own.multiply(slice.b, h, p.rank, out, slice.columns, block);
    finish(pair * p.out_row_stride + p.begin_of(s), slice.columns);
  }
}

void run_cpu(const LoraDeltaParams& p, const LoraDeltaArgs& a, DType dtype) {
  const int64_t most = cpu::padded(std::max<int64_t>({p.in, p.rank, p.columns})), rank = cpu::padded(p.rank);
  const int64_t block = std::max(rows_of_block(p.in) * cpu::padded(p.in), rows_of_block(p.rank) * rank);
  cpu::for_rows(p.pairs.count, int64_t{p.slice_count} * p.rank * (p.in + p.columns), 3 * most + 2 * rank + block,
                [&](int64_t pair, float* scratch) { run_pair(p, a, dtype, static_cast<int32_t>(pair), scratch); });
}
#endif

// [loras, experts, rows, k] or a table [slices, experts] of addresses, whose slice `s` is meant.
LoraWeights weights_of(const Tensor& t, int64_t s, int64_t lora_stride, int64_t k, Dim& loras, Dim& experts, Dim& rows,
                       Dim& columns) {
  if (t.dtype() == kI64) {
    FI_CHECK(t.ndim() == 2 && t.size(1) == experts, ValueError, "%s must have shape [slices, %lld]; got %s", t.name(),
             static_cast<long long>(experts), t.shape_str().c_str());
    return {nullptr, t.data<int64_t>() + s * t.stride(0), lora_stride, 0, k};
  }
  t.inner_contiguous().shape(loras, experts, rows, columns);
  return {t.data(), nullptr, t.stride(0), t.stride(1), t.stride(2)};
}

// Parts of `in` whose sums are added in order: few pairs of an adapter and an expert leave SMs without work unless `in`
// is shared. They follow from the adapters, not from the batch, and so do the bits. sums_shape in Python says the same.
int64_t parts_of(int64_t in, int64_t bins) {
  constexpr int64_t kFewBins = 32;
  return bins <= kFewBins ? std::min<int64_t>(8, (in + 511) / 512) : (in + 2047) / 2048;
}

void check_keys(const Kernel& kernel, const LoraDeltaArgs& a, int64_t loras, int64_t tokens) {
  const Integers adapters(kernel, a.lora_indices);
  for (int64_t i = 0; i < adapters.size(); ++i)
    FI_CHECK(adapters[i] < loras, ValueError,
             "lora_indices must be below %lld, the number of adapters, or negative; got %lld at %lld",
             static_cast<long long>(loras), static_cast<long long>(adapters[i]), static_cast<long long>(i));
  if (a.tokens) {
    const Integers of_pairs(kernel, a.tokens);
    for (int64_t i = 0; i < of_pairs.size(); ++i)
      FI_CHECK(of_pairs[i] >= -1 && of_pairs[i] < tokens, ValueError,
               "sorted_token_ids must be in -1..%lld; got %lld at %lld", static_cast<long long>(tokens - 1),
               static_cast<long long>(of_pairs[i]), static_cast<long long>(i));
  }
}

// Raises unless each slice of the output lies within its columns.
void check_begins(const Kernel& kernel, const LoraDeltaArgs& a, const LoraDeltaParams& p, int64_t width) {
  const Integers begins(kernel, a.begins);
  for (int64_t s = 0; s < begins.size(); ++s) {
    const int64_t last = width - p.slices[s].columns;
    FI_CHECK(begins[s] >= 0 && begins[s] <= last, ValueError,
             "slice_start_loc must be in 0..%lld for the %d columns of slice %lld; got %lld",
             static_cast<long long>(last), p.slices[s].columns, static_cast<long long>(s),
             static_cast<long long>(begins[s]));
  }
}

// The dtype of the weights: of x or, of banks, their own.
DType weights_dtype(const LoraDeltaArgs& a) {
  const OptionalTensor& w = a.a ? a.a : a.b;
  return w && w.dtype() != kI64 ? w.dtype() : a.x.dtype();
}

LoraDeltaRequest request_of(const LoraDeltaArgs& a) {
  const DType dtype = weights_dtype(a);  // which x must have, but for an expand
  return {dtype, a.stage == kLoraExpand ? a.x.dtype() : dtype, a.out.dtype(),
          static_cast<LoraDeltaRequest::Stage>(a.stage)};
}

#if FI_CUDA
// Mean pairs of an adapter and an expert up to which tiles of 8 and of 16 pairs are taken.
constexpr int64_t kFewPairs = 4, kSomePairs = 10;

enum LoraStep : int64_t { kShrinkStep, kExpandStep, kAddStep };  // of LoraDeltaConfig

// The entry of a step for tiles of as many pairs.
const Entry& tile(const Kernel& kernel, LoraStep step, int64_t rows) {
  return kernel.first_entry([&](const Entry& e) {
    const auto config = LoraDeltaConfig::of(e);
    return config.step == step && config.rows == rows;
  });
}

// Launches the steps of a stage, each of which reads what the one before wrote.
struct LoraLaunches {
  const Kernel& kernel;
  DLDevice device;
  LoraDeltaParams& p;
  int64_t bins;  // pairs of an adapter and an expert
  bool pdl;

  void run(LoraStage stage) {
    const int64_t mean_pairs = p.pairs.count / std::max<int64_t>(bins, 1);
    const int64_t rows = mean_pairs <= kFewPairs ? 8 : mean_pairs <= kSomePairs ? 16 : 32;
    if (stage != kLoraExpand) {
      tasks(tile(kernel, kShrinkStep, rows), (p.slice_count * p.rank + kRanksOfTask - 1) / kRanksOfTask * p.parts);
      p.ready = 1;  // a shrink begins what follows when it has waited for all of that itself
    }
    if (stage == kLoraShrink) {
      Launch launch{p.pairs.count};
      launch.pdl = pdl;
      kernel.launch(tile(kernel, kAddStep, 0), launch, device, p);
      return;
    }
    // Chunks of so many columns that each CTA has about two, as far as there are tiles, and that weights fit its
    // memory.
    const Entry& expand = tile(kernel, kExpandStep, rows);
    const int64_t wave = LoraDeltaConfig::of(expand).ctas * kernel.multiprocessors(device);
    int32_t columns = 0;
    for (int32_t s = 0; s < p.slice_count; ++s) columns = std::max(columns, p.slices[s].columns);
    const int64_t groups = (columns + kGroupColumns - 1) / kGroupColumns, bytes = 2 * kGroupColumns * p.rank;
    const int64_t least = std::clamp<int64_t>(kLeastBytes / bytes, 4, 8), most = std::max(kMostBytes / bytes, least);
    const int64_t tiles = windows(expand) * tiles_of(expand), passes = (groups + least - 1) / least;
    const int64_t own = least * std::max<int64_t>(passes * tiles * p.slice_count / (2 * wave), 1);
    p.chunk_groups = static_cast<int32_t>(std::min({own, most / least * least, groups}));
    p.chunks = static_cast<int32_t>((groups + p.chunk_groups - 1) / p.chunk_groups);
    tasks(expand, p.slice_count * p.chunks);
  }

 private:
  static constexpr int64_t kRanksOfTask = 32, kGroupColumns = 32;  // kLoraRanks, kLoraColumns
  // Weights of a chunk. H200, us of 4096 x 4096 with 8 adapters, 64 tokens of rank 64: 16 KB 15.7, 32 KB 19.7; 1024
  // tokens: 66 and 51. Of rank 16, 1024 tokens: about one chunk for each CTA 38.9, two 30.6.
  static constexpr int64_t kLeastBytes = 16 << 10, kMostBytes = 32 << 10;

  int64_t windows(const Entry& entry) const {
    const int64_t pairs = LoraDeltaConfig::of(entry).window;
    return (p.pairs.count + pairs - 1) / pairs;
  }
  // Of a window, at most; where tables of addresses do not tell the number of adapters, an estimate.
  int64_t tiles_of(const Entry& entry) const {
    const auto config = LoraDeltaConfig::of(entry);
    const int64_t pairs = std::min<int64_t>(p.pairs.count, config.window), used = std::min(pairs, bins);
    return used + (pairs - used) / config.rows;
  }
  void tasks(const Entry& entry, int64_t of_tile) {
    p.of_tile = divisor(static_cast<uint32_t>(of_tile));
    const auto config = LoraDeltaConfig::of(entry);
    const int64_t wave = config.ctas * kernel.multiprocessors(device), count = windows(entry);
    p.groups = static_cast<int32_t>(
        std::clamp<int64_t>((wave + count - 1) / count, 1, std::max<int64_t>(1, tiles_of(entry)) * of_tile));
    Launch launch{count * p.groups};
    launch.shared_bytes = config.step == kShrinkStep
                              ? 4 * 256 * (config.rows + 1)
                              : 2 * config.rows * (p.rank + 8) + 2 * kGroupColumns * p.rank * p.chunk_groups;
    launch.pdl = pdl;
    kernel.launch(entry, launch, device, p);
  }
};
#endif

void lora_delta(const Kernel& kernel, const LoraDeltaArgs& a) {
  // 1 check
  const bool shrinks = a.stage != kLoraExpand, expands = a.stage != kLoraShrink;
  const DType dtype = weights_dtype(a);
  LoraDeltaParams p{};
  Dim tokens{"tokens"}, pairs{"pairs"}, in{"in"}, rank{"rank"}, loras{"loras"}, experts{"experts"}, slices{"slices"},
      width{"columns"};
  FI_CHECK(bool(a.a) == shrinks && bool(a.b) == expands, ValueError,
           "lora_a_weights and lora_b_weights must be given where they are used");
  a.x.is({kBF16, kF16, kF32}).inner_contiguous();
  a.out.is({kBF16, kF16, kF32}).on(a.x).inner_contiguous();
  FI_CHECK(dtype == kBF16 || dtype == kF16, TypeError, "adapters must be bfloat16 or float16; got %s%s",
           dtype.str().c_str(), dtype == kF32 ? ": with addresses they have the dtype of x" : "");
  FI_CHECK(a.stage == kLoraExpand || a.x.dtype() == dtype, TypeError,
           "x must have the dtype of the adapters, %s; got %s", dtype.str().c_str(), a.x.dtype().str().c_str());
  if (shrinks && !a.per_pair) a.x.shape(tokens, in);
  p.pairs.adapters = lora_table(a.lora_indices, a.x, tokens);

  // Pairs: each has a token, or they are the slots of the tokens.
  p.pairs.top_k = divisor(1);
  if (a.tokens) {
    p.pairs.tokens = lora_table(a.tokens, a.x, pairs);
    if (a.experts) p.pairs.experts = lora_table(a.experts, a.x, pairs);
  } else if (a.experts) {
    Dim top_k{"top_k"};
    a.experts.is({kI32, kI64}).on(a.x).shape(tokens, top_k);
    p.pairs.experts = {a.experts.data(), a.experts.stride(0), a.experts.stride(1), a.experts.dtype().bits == 64};
    p.pairs.top_k = divisor(static_cast<uint32_t>(std::max<int64_t>(1, top_k)));
    pairs.value = tokens * top_k;
  } else {
    pairs.value = tokens;
  }
  if (a.offsets) {
    Dim ends{"experts + 1"};
    a.offsets.is({kI32}).on(a.x).contiguous().shape(ends);
    FI_CHECK(ends >= 2, ValueError, "offsets must be for one expert or more; got %s", a.offsets.shape_str().c_str());
    experts.value = ends - 1;
    p.pairs.offsets = a.offsets.data<int32_t>();
  }
  const OptionalTensor* banks_a[] = {&a.a, &a.a1, &a.a2};
  const OptionalTensor* banks_b[] = {&a.b, &a.b1, &a.b2};
  const OptionalTensor& first = shrinks ? a.a : a.b;
  const bool tables = first.dtype() == kI64;
  if (tables) {
    FI_CHECK(first.ndim() == 2, ValueError, "%s must have shape [slices, experts]; got %s", first.name(),
             first.shape_str().c_str());
    slices.value = first.size(0), experts.value = first.size(1);
  } else {
    slices.value = 0;
    while (slices < p.kMostSlices && *(shrinks ? banks_a : banks_b)[slices]) ++slices.value;
  }
  FI_CHECK(slices >= 1 && slices <= p.kMostSlices, ValueError, "1 to %d slices are taken at a time; got %lld",
           p.kMostSlices, static_cast<long long>(slices));
  // x and out
  const auto shape_sums = [&](const Tensor& t) {  // of each slice, or of the only one
    slices == 1 && t.ndim() == 2 ? t.shape(pairs, rank) : t.shape(slices, pairs, rank);
  };
  if (a.stage == kLoraExpand) {
    shape_sums(a.x);
  } else if (a.per_pair) {
    a.x.shape(pairs, in);
  }
  if (a.stage == kLoraShrink) {
    shape_sums(a.out);
  } else {
    a.out.shape(pairs, width);
  }
  if (a.rank >= 0) {
    FI_CHECK(rank.value < 0 || rank == a.rank, ValueError, "rank must be %lld; got %lld", static_cast<long long>(rank),
             static_cast<long long>(a.rank));
    rank.value = a.rank;
  }
  int64_t begin = 0;
  for (int32_t s = 0; s < slices; ++s) {
    LoraSlice& slice = p.slices[s];
    Dim columns{"out", tables ? a.columns : -1};
    if (shrinks) {
      const OptionalTensor& w = tables ? a.a : *banks_a[s];
      if (!tables) w.as("lora_a_weights").on(a.x).is({dtype});
      slice.a = weights_of(w.as("lora_a_weights"), s, a.a_stride, in, loras, experts, rank, in);
    }
    if (expands) {
      const OptionalTensor& w = tables ? a.b : *banks_b[s];
      FI_CHECK(bool(w), ValueError, "lora_b_weights must have as many slices as lora_a_weights, %lld",
               static_cast<long long>(slices));
      if (!tables) w.as("lora_b_weights").on(a.x).is({dtype});
      slice.b = weights_of(w.as("lora_b_weights"), s, a.b_stride, rank, loras, experts, columns, rank);
      slice.begin = begin, slice.columns = static_cast<int32_t>(columns);
      FI_CHECK(columns > 0 && columns % 8 == 0, ValueError,
               "lora_b_weights must have a multiple of 8 columns of the output; got %lld",
               static_cast<long long>(columns));
      begin += columns;
    }
  }
  FI_CHECK(!expands || a.begins || (a.begin >= 0 && begin + a.begin <= width), ValueError,
           "out must have %lld columns; got %s", static_cast<long long>(begin + a.begin), a.out.shape_str().c_str());
  if (a.begins) {
    a.begins.is({kI64}).on(a.x).contiguous().shape(slices);
    p.begins = a.begins.data<int64_t>();
  }
  if (tables) loras.value = a.loras >= 0 ? a.loras : kMostLoras;
  FI_CHECK(rank >= 8 && rank <= 256 && rank % 8 == 0, ValueError,
           "lora_a_weights and lora_b_weights must have a rank of 8 to 256, a multiple of 8; got %lld: pad with zeros",
           static_cast<long long>(rank));
  FI_CHECK(!shrinks || (in % 8 == 0 && in > 0 && in < 1 << 24), ValueError,
           "x must have a multiple of 8 columns; got %s", a.x.shape_str().c_str());
  FI_CHECK(experts <= kMostLoraExperts && loras <= kMostLoras, ValueError,
           "adapters must be at most %lld, for at most %lld experts; got %lld and %lld",
           static_cast<long long>(kMostLoras), static_cast<long long>(kMostLoraExperts), static_cast<long long>(loras),
           static_cast<long long>(experts));
  FI_CHECK(pairs < 1 << 24 && tokens < 1 << 24, ValueError, "pairs must be fewer than 2^24; got %lld",
           static_cast<long long>(pairs));
  FI_CHECK(!shrinks || a.x.stride(0) * a.x.size(0) < int64_t{1} << 34, ValueError,
           "x must have fewer than 2^34 elements; got %s", a.x.shape_str().c_str());
  const int64_t bins = experts * (tables ? 8 : loras);  // a table does not tell the number of adapters
  Dim parts{"parts", shrinks ? parts_of(in, bins) : 1}, ranks{"slices * rank", slices * rank};
  if (a.sums) a.sums.is({kF32}).on(a.x).contiguous().shape(parts, pairs, ranks);
  if (a.scales) {
    a.scales.is({kF32}).on(a.x).contiguous();
    FI_CHECK(a.scales.ndim() == 1 && (tables || a.scales.size(0) == loras), ValueError,
             "scale must have shape [%lld], one for each adapter; got %s", static_cast<long long>(loras),
             a.scales.shape_str().c_str());
    p.scales = a.scales.data<float>();
  }
  if (pairs == 0) return;
  if (kernel.checks_contents(a.x.device())) {
    check_keys(kernel, a, loras, tokens);
    if (a.begins) check_begins(kernel, a, p, width);
  }

  // 2 shape
  p.pairs.first_expert = a.first_expert;
  p.pairs.count = static_cast<int32_t>(pairs);
  p.pairs.token_count = static_cast<int32_t>(tokens);
  p.pairs.expert_count = static_cast<int32_t>(experts);
  p.pairs.loras = static_cast<int32_t>(loras);
  for (LoraSlice& slice : p.slices) slice.begin += a.begin;
  p.out = a.out.data();
  p.x = a.x.data();
  if (shrinks) {
    p.x_row_stride = a.x.stride(-2);
    p.middle_slice_stride = rank, p.middle_row_stride = ranks, p.middle_part_stride = pairs * ranks;
  } else {
    p.middle = const_cast<void*>(a.x.data());
    p.middle_slice_stride = a.x.ndim() == 3 ? a.x.stride(0) : 0, p.middle_row_stride = a.x.stride(-2);
  }
  p.out_row_stride = a.out.stride(-2);
  p.out_slice_stride = a.out.ndim() == 3 ? a.out.stride(0) : 0;
  p.scale = static_cast<float>(a.scale);
  p.parts = static_cast<int32_t>(parts);
  p.part_steps = static_cast<int32_t>(((shrinks ? in.value : 0) + 32 * parts - 1) / (32 * parts));
  p.of_part = divisor(static_cast<uint32_t>(p.parts)), p.of_rank = divisor(static_cast<uint32_t>(rank));
  p.slice_count = static_cast<int32_t>(slices);
  p.rank = static_cast<int32_t>(rank);
  p.in = static_cast<int32_t>(shrinks ? in.value : 0);
  p.columns = static_cast<int32_t>(expands ? width.value : 0);
  p.per_pair = a.per_pair, p.add = a.add, p.fill = a.fill, p.ready = a.ready && shrinks;
  p.wide = expands && !a.begins && a.begin * a.out.dtype().bytes() % 16 == 0 && a.out.row_alignment(16) == 16;

  // 3 launch
#if FI_CUDA
  const auto aligned = [&](const Tensor& t, int64_t bytes) {
    FI_CHECK(t.row_alignment(bytes) == bytes, ValueError,
             "%s must have rows at multiples of %lld bytes; got stride %lld", t.name(), static_cast<long long>(bytes),
             static_cast<long long>(t.stride(-2)));
  };
  if (shrinks) aligned(a.x, 16);
  if (expands) aligned(a.out, 4);
  for (int32_t s = 0; !tables && s < slices; ++s) {
    if (shrinks) aligned(*banks_a[s], 16);
    if (expands) aligned(*banks_b[s], 16);
  }
  Object memory;
  if (shrinks && a.sums)
    p.middle = a.sums.data();
  else if (shrinks && kernel.library)  // a rehearsal needs no memory
    p.middle = reinterpret_cast<void*>(allocate(a.x.device(), 4 * parts * pairs * ranks, memory));
  LoraLaunches launches{kernel, a.x.device(), p, bins, kernel.pdl(a.enable_pdl)};
  launches.run(static_cast<LoraStage>(a.stage));
#else
  (void)a.enable_pdl;
  run_cpu(p, a, dtype);
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::lora_delta, fi::request_of)
FI_STEPS
