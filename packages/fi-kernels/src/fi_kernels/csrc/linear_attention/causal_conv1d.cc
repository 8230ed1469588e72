// causal_conv1d: checks the arguments, launches the CUDA kernel or runs the CPU one.
#include "fi/linear_attention/causal_conv1d.h"

#include "fi/generated/causal_conv1d.h"
#include "fi/linear_attention/contract.h"

#if !FI_CUDA
#include <array>

#include "fi/cpu/math.h"
#include "fi/cpu/row_convert.h"
#endif

namespace fi {
namespace {

constexpr int64_t kMostWidth = 5;

#if !FI_CUDA
constexpr int64_t kTileTokens = 64, kPieceChannels = 512;

// out = act(bias + sum_k weight[k] rows[k]), of n channels; weight: [width][n].
FI_CLONES void conv_row(const float* const* rows, const float* weight, const float* bias, int64_t width, bool silu,
                        float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = bias[i];
  for (int64_t k = 0; k < width; ++k) {
    const float *x = rows[k], *w = weight + k * n;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) out[i] += w[i] * x[i];
  }
  if (!silu) return;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = cpu::silu(out[i]);
}

// Copies n elements, of strides in elements.
template <class Bits>
void copy_as(const void* from, int64_t from_stride, void* to, int64_t to_stride, int64_t n) {
  const auto* source = static_cast<const Bits*>(from);
  auto* target = static_cast<Bits*>(to);
  for (int64_t i = 0; i < n; ++i) target[i * to_stride] = source[i * from_stride];
}

// The channels [first, first + count) of a sequence of the call.
struct Piece {
  const CausalConv1dParams& p;
  DType dtype;
  int64_t width, n, first, count;

  int64_t from() const { return p.slot_in(n, p.from_column); }
  const char* input(int64_t t) const {
    const int64_t row = p.offsets.data ? 0 : n;
    return at(p.x, row * p.x_strides[0] + (p.begin_of(n) + t) * p.x_strides[1] + first * p.x_strides[2]);
  }
  char* output(int64_t t) const {
    const int64_t row = p.offsets.data ? 0 : n;
    return at(p.out, row * p.out_strides[0] + (p.begin_of(n) + t) * p.out_strides[1] + first * p.out_strides[2]);
  }
  char* state(int64_t slot, int64_t input) const {
    return at(p.states, slot * p.state_strides[0] + first * p.state_strides[1] + input * p.state_strides[2]);
  }
  char* at(const void* base, int64_t i) const {
    return static_cast<char*>(const_cast<void*>(base)) + i * dtype.bytes();
  }
  // An input of the call or, with t < 0, before it, as f(address, stride of channels); null where there is none.
  template <class F>
  void any_input(int64_t t, F&& f) const {
    if (t >= 0) return f(input(t), p.x_strides[2]);
    if (!p.has_history(n)) return f(nullptr, 0);
    f(state(from(), p.first_input(n) + width - 1 + t), p.state_strides[1]);
  }
  void load(int64_t t, float* to) const {
    const cpu::LoadRow load_row = cpu::row_loader(dtype);
    any_input(t, [&](const char* x, int64_t stride) {
      if (!x) return (void)std::fill_n(to, count, 0.f);
      if (stride == 1) return load_row(x, to, count);
      std::array<float, kPieceChannels> elements;
      copy(x, stride, elements.data(), 1);
      load_row(elements.data(), to, count);
    });
  }
  void copy(const void* from, int64_t from_stride, void* to, int64_t to_stride) const {
    (dtype.bytes() == 4 ? copy_as<uint32_t> : copy_as<uint16_t>)(from, from_stride, to, to_stride, count);
  }
  void store(const float* x, int64_t t) const {
    const cpu::StoreRow store_row = cpu::row_storer(dtype);
    if (p.out_strides[2] == 1) return store_row(x, output(t), count);
    std::array<float, kPieceChannels> elements;
    store_row(x, elements.data(), count);
    copy(elements.data(), 1, output(t), p.out_strides[2]);
  }
  // The state after so many tokens: bits, from the oldest input on, so that it may move within its slot.
  void store_state(int64_t slot, int64_t after) const {
    const int64_t inputs = p.accepted.data ? width - 2 + after : width - 1;
    constexpr uint32_t zero = 0;
    for (int64_t i = 0; i < inputs; ++i)
      any_input(after - inputs + i, [&](const void* x, int64_t stride) {
        copy(x ? x : &zero, stride, state(slot, i), p.state_strides[1]);
      });
  }
};

void compute_tile(const Piece& piece, int64_t begin, int64_t end, float* scratch) {
  const CausalConv1dParams& p = piece.p;
  const int64_t n = piece.count, width = piece.width;
  float *weight = scratch, *bias = weight + width * n, *out = bias + n, *rows = out + n;
  if (p.is_padding(piece.from())) {
    std::fill_n(out, n, 0.f);
    for (int64_t t = begin; t < end; ++t) piece.store(out, t);
    return;
  }
  const cpu::LoadRow load_row = cpu::row_loader(piece.dtype);
  for (int64_t k = 0; k < width; ++k) {
    piece.copy(piece.at(p.weight, piece.first * p.weight_strides[0] + k * p.weight_strides[1]), p.weight_strides[0],
               out, 1);
    load_row(out, weight + k * n, n);
  }
  std::fill_n(out, n, 0.f);
  if (p.bias) piece.copy(piece.at(p.bias, piece.first * p.bias_stride), p.bias_stride, out, 1);
  load_row(out, bias, n);
  std::array<const float*, kMostWidth> window{};
  const auto row_of = [&](int64_t t) { return rows + (t + width) % width * n; };
  for (int64_t t = begin - width + 1; t < end; ++t) {
    piece.load(t, row_of(t));
    if (t < begin) continue;
    for (int64_t k = 0; k < width; ++k) window[static_cast<size_t>(k)] = row_of(t - width + 1 + k);
    conv_row(window.data(), weight, bias, width, p.silu, out, n);
    piece.store(out, t);
  }
}

// Those in other slots first: what they need may be in the slot that the inputs before come from.
void store_states(const Piece& piece) {
  const CausalConv1dParams& p = piece.p;
  const int64_t n = piece.n, from = piece.from(), length = p.length_of(n);
  if (length <= 0 || p.is_padding(from)) return;
  for (const bool own : {false, true})
    for (int64_t i = 0; i < p.stored_states(n); ++i) {
      const int64_t slot = p.stored_slot(n, from, i);
      if ((slot == from) == own && !p.is_padding(slot)) piece.store_state(slot, p.stored_after(n, length, i));
    }
}

// States are stored after all outputs: a slot may be read and written.
void run_cpu(const CausalConv1dParams& p, DType dtype, int64_t width) {
  struct Tile {
    int64_t n, begin, end;
  };
  std::vector<Tile> tiles;
  for (int64_t n = 0; n < p.sequences; ++n) {
    const int64_t length = p.length_of(n);
    for (int64_t t = 0; t < length; t += kTileTokens) tiles.push_back({n, t, std::min(t + kTileTokens, length)});
  }
  const int64_t pieces = (p.dim + kPieceChannels - 1) / kPieceChannels;
  const auto piece_of = [&](int64_t n, int64_t index) {
    const int64_t first = index % pieces * kPieceChannels;
    return Piece{p, dtype, width, n, first, std::min<int64_t>(kPieceChannels, p.dim - first)};
  };
  const int64_t channels = std::min<int64_t>(p.dim, kPieceChannels);
  const auto count = static_cast<int64_t>(tiles.size());
  const int64_t work = channels * std::min(kTileTokens, std::max<int64_t>(p.tokens, 1));
  cpu::for_rows(count * pieces, work, (2 * width + 2) * channels, [&](int64_t index, float* scratch) {
    const Tile& tile = tiles[static_cast<size_t>(index / pieces)];
    compute_tile(piece_of(tile.n, index), tile.begin, tile.end, scratch);
  });
  cpu::for_rows(p.sequences * pieces, channels, 1,
                [&](int64_t index, float*) { store_states(piece_of(index / pieces, index)); });
}
#endif

// The table of a number for each sequence, or none.
IndexTable numbers_of_rows(const OptionalTensor& t, const Tensor& x, int64_t sequences) {
  return index_table(t, x, sequences, 0);
}

// Raises unless the columns of each sequence are in the table of slots.
void check_columns_of(const Kernel& kernel, const OptionalTensor& columns, int64_t blocks) {
  if (!columns) return;
  const Integers values(kernel, columns);
  for (int64_t i = 0; i < values.size(); ++i)
    FI_CHECK(values[i] >= 0 && values[i] < blocks, ValueError,
             "%s must be in 0 to %lld, the columns of cache_indices or conv_state_indices; got %lld at %lld",
             columns.name(), static_cast<long long>(blocks - 1), static_cast<long long>(values[i]),
             static_cast<long long>(i));
}

// What integers hold: offsets, slots, columns, accepted tokens, and lengths that the states have room for.
void check_contents(const Kernel& kernel, const CausalConv1dArgs& a, const CausalConv1dParams& p, int64_t slots,
                    int64_t total, int64_t width) {
  const int64_t room = a.conv_states.size(2) - (width - 1),
                blocks = a.slots && a.slots.ndim() == 2 ? a.slots.size(1) : 1;
  check_slots(kernel, a.slots, slots, a.pad_slot_id);
  for (const OptionalTensor* columns :
       {&a.initial_state_idx, &a.block_idx_first_scheduled_token, &a.block_idx_last_scheduled_token})
    check_columns_of(kernel, *columns, blocks);
  int64_t most = p.tokens;
  if (a.query_start_loc) {
    const Integers offsets(kernel, a.query_start_loc);
    check_offsets(offsets, total);
    most = 0;
    for (int64_t i = 1; i < offsets.size(); ++i) most = std::max(most, offsets[i] - offsets[i - 1]);
    FI_CHECK(a.max_query_len < 0 || most <= a.max_query_len, ValueError,
             "max_query_len must be at least %lld, the most tokens of a sequence; got %lld",
             static_cast<long long>(most), static_cast<long long>(a.max_query_len));
  }
  if (!a.num_accepted_tokens) return;
  const Integers accepted(kernel, a.num_accepted_tokens);
  for (int64_t i = 0; i < accepted.size(); ++i)
    FI_CHECK(accepted[i] >= 1 && accepted[i] <= room + 1, ValueError,
             "num_accepted_tokens must be in 1 to %lld, what a state of %lld inputs has room for; got %lld at %lld",
             static_cast<long long>(room + 1), static_cast<long long>(room + width - 1),
             static_cast<long long>(accepted[i]), static_cast<long long>(i));
}

#if FI_CUDA
// Tokens of a CTA: about 64, so that few inputs are read twice, in whole waves of four CTAs an SM: with a little more
// than four waves 16,384 tokens of 8,192 channels took 168 us on an H200, where a copy took 128.
int32_t tile_tokens(int64_t tokens, int64_t sequences, int64_t channel_tiles, int64_t multiprocessors) {
  const int64_t wave = std::max<int64_t>(4 * multiprocessors / channel_tiles, 1);  // tiles
  const int64_t waves = std::max<int64_t>((tokens + 32 * wave) / (64 * wave), 1);
  const int64_t tiles = std::max<int64_t>(waves * wave - sequences, 1);
  return static_cast<int32_t>(std::clamp<int64_t>((tokens / tiles + 4) / 4 * 4, 8, 128));
}

// Channels that a copy of 16 bytes may load or store: 1 unless they lie next to each other, and rows at 16 bytes.
int64_t vector_of(const Tensor& t, int channels) {
  const int64_t vec = 16 / t.dtype().bytes();
  if (t.size(channels) > 1 && t.stride(channels) != 1) return 1;
  for (int i = 0; i < t.ndim(); ++i)
    if (i != channels && t.size(i) > 1 && t.stride(i) % vec != 0) return 1;
  return t.alignment(16, {}) == 16 && t.size(channels) % vec == 0 ? vec : 1;
}

// The entry of the width with the widest copies that all tensors allow.
const Entry& tile(const Kernel& kernel, const CausalConv1dArgs& a, int64_t width) {
  const int channels = a.x.ndim() - 1;
  int64_t vec = std::min(vector_of(a.x, channels), vector_of(a.out, channels));
  if (a.weight.stride(1) != 1 || a.weight.stride(0) != width || a.weight.alignment(16, {}) != 16) vec = 1;
  return kernel.first_entry([&](const Entry& e) {
    const auto config = CausalConv1dConfig::of(e);
    return config.width == width && config.vec_size <= vec;
  });
}
#endif

CausalConv1dRequest request_of(const CausalConv1dArgs& a) { return {a.x.dtype()}; }

void causal_conv1d(const Kernel& kernel, const CausalConv1dArgs& a) {
  // 1 check
  Dim sequences{"sequences"}, tokens{"tokens"}, total{"total_tokens"}, dim{"dim"}, width{"width"}, slots{"slots"};
  Dim length{"inputs"}, ends{"sequences + 1"};
  CausalConv1dParams p{};
  a.x.is({kF32, kF16, kBF16});
  a.out.like(a.x);
  const bool packed{a.query_start_loc};
  if (packed) {
    a.x.shape(total, dim);
    a.out.shape(total, dim);
    a.query_start_loc.is({kI32, kI64}).on(a.x).contiguous().shape(ends);
    FI_CHECK(ends >= 1, ValueError, "query_start_loc must have shape [sequences + 1]; got %s",
             a.query_start_loc.shape_str().c_str());
    sequences.value = ends - 1;
    p.offsets = {a.query_start_loc.data(), 1, 0, a.query_start_loc.dtype().bits == 64};
  } else {
    a.x.shape(sequences, tokens, dim);
    a.out.shape(sequences, tokens, dim);
  }
  a.weight.like(a.x).shape(dim, width);
  FI_CHECK(width >= 2 && width <= kMostWidth, ValueError, "weight must have shape [dim, width], width 2 to 5; got %s",
           a.weight.shape_str().c_str());
  if (a.bias) a.bias.like(a.x).shape(dim);
  a.conv_states.like(a.x).shape(slots, dim, length);
  const int64_t most = packed ? a.max_query_len : tokens.value;  // negative: not known
  const int64_t needed = a.num_accepted_tokens ? width - 2 + std::max<int64_t>(most, 1) : width - 1;
  FI_CHECK(length >= needed, ValueError, "%s must hold %lld inputs of each channel; got %s", a.conv_states.name(),
           static_cast<long long>(needed), a.conv_states.shape_str().c_str());
  const int64_t blocks = a.slots && a.slots.ndim() == 2 ? a.slots.size(1) : 0;
  p.slots = index_table(a.slots, a.x, sequences, blocks);
  FI_CHECK(p.slots.data || slots >= sequences, ValueError,
           "%s must have %lld slots, one for each sequence, if there are no indices; got %s", a.conv_states.name(),
           static_cast<long long>(sequences), a.conv_states.shape_str().c_str());
  p.from_column = numbers_of_rows(a.initial_state_idx, a.x, sequences);
  p.first_column = numbers_of_rows(a.block_idx_first_scheduled_token, a.x, sequences);
  p.to_column = numbers_of_rows(a.block_idx_last_scheduled_token, a.x, sequences);
  p.computed = numbers_of_rows(a.num_computed_tokens, a.x, sequences);
  p.accepted = numbers_of_rows(a.num_accepted_tokens, a.x, sequences);
  FI_CHECK(
      p.first_column.data ? blocks > 0 && p.to_column.data && a.block_size_to_align > 0 : a.block_size_to_align >= 0,
      ValueError,
      "block_size_to_align must be above 0, and block_idx_last_scheduled_token and cache_indices [sequences, "
      "blocks] given, with block_idx_first_scheduled_token; got block_size_to_align = %lld",
      static_cast<long long>(a.block_size_to_align));
  p.block_tokens = p.first_column.data ? a.block_size_to_align : 0;
  if (a.has_initial_state) {
    a.has_initial_state.is({kBool, kU8, kI8}).on(a.x).shape(sequences);
    p.has_state = a.has_initial_state.data<uint8_t>(), p.has_stride = a.has_initial_state.stride(0);
  }
  if (sequences == 0 || dim == 0 || (packed ? total == 0 : tokens == 0)) return;
  p.sequences = static_cast<int32_t>(sequences);
  p.tokens = static_cast<int32_t>(packed ? 0 : tokens.value);
  if (kernel.checks_contents(a.x.device())) check_contents(kernel, a, p, slots, packed ? total.value : tokens, width);

  // 2 shape
  p.out = a.out.data();
  p.x = a.x.data();
  p.weight = a.weight.data();
  p.bias = a.bias ? a.bias.data() : nullptr;
  p.states = a.conv_states.data();
  for (int i = packed ? 1 : 0; i < 3; ++i) {
    p.x_strides[i] = a.x.stride(packed ? i - 1 : i);
    p.out_strides[i] = a.out.stride(packed ? i - 1 : i);
  }
  strides_of(a.weight, p.weight_strides);
  p.bias_stride = a.bias ? a.bias.stride(0) : 0;
  strides_of(a.conv_states, p.state_strides);
  p.pad_slot = a.pad_slot_id;
  p.null_slot = a.null_block_id;
  p.dim = static_cast<int32_t>(dim);
  p.reads_states = a.reads_states;
  p.silu = a.silu;

  // 3 launch
#if FI_CUDA
  p.state_vectors = vector_of(a.conv_states, 1) > 1;
  const Entry& entry = tile(kernel, a, width);
  const int64_t cta = entry.threads * CausalConv1dConfig::of(entry).vec_size, channel_tiles = (dim + cta - 1) / cta;
  p.channel_tiles = divisor(static_cast<uint32_t>(channel_tiles));
  int64_t tiles = sequences;
  if (packed && a.max_query_len < 0) {
    p.tile_tokens = tile_tokens(total, sequences, channel_tiles, kernel.multiprocessors(a.x.device()));
    tiles += total / p.tile_tokens;
  }
  Launch launch{tiles * channel_tiles};
  launch.pdl = kernel.pdl(a.enable_pdl);
  kernel.launch(entry, launch, a.x.device(), p);
#else
  (void)a.enable_pdl;
  run_cpu(p, a.x.dtype(), width);
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::causal_conv1d, fi::request_of)
