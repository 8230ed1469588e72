// The part of chunk_gated_delta_rule that goes through the chunks of a sequence, with the state in registers.
#pragma once
#include "fi/cuda/ptx/movmatrix.cuh"
#include "fi/cuda/shared_memory.cuh"
#include "fi/cuda/vec.cuh"
#include "fi/linear_attention/chunk_tiles.cuh"

namespace fi {

// kChannels: with a gate for each channel of k, tiles and factors are those that prepare_channel_chunks has written. A
// third tile then leaves mma.sync one stage, so that CTAs fit an SM of 100 KB.
template <int kD, int kColumns, class Products, bool kOutputs, bool kChannels>
struct ChunkStages {
  static constexpr int kStages = kChannels && !Products::kAsync ? 1 : 2, kFactors = kChannels ? kD : 4 * kChunkTokens;
  alignas(Products::kAlignment) char k[kStages][ChunkTile<kD>::kBytes];
  alignas(128) char solved[kStages][Products::Matrix::kBytes];
  alignas(Products::kAlignment) char v[kStages][ChunkTile<kColumns>::kBytes];
  alignas(16) float factors[kStages][kFactors];
  typename Products::Arrivals arrivals;
};
template <int kD, int kColumns, class Products, bool kChannels>
struct ChunkStages<kD, kColumns, Products, true, kChannels> : ChunkStages<kD, kColumns, Products, false, kChannels> {
  using ChunkStages<kD, kColumns, Products, false, kChannels>::kStages;
  alignas(Products::kAlignment) char q[kStages][ChunkTile<kD>::kBytes];
  alignas(128) char scores[kStages][Products::Matrix::kBytes];
};
// And k as the update of the state takes it, if that is another tile.
template <class Stages, int kD, int kAlignment, bool kChannels>
struct ChunkUpdates : Stages {};
template <class Stages, int kD, int kAlignment>
struct ChunkUpdates<Stages, kD, kAlignment, true> : Stages {
  alignas(kAlignment) char update[Stages::kStages][ChunkTile<kD>::kBytes];
};

// A CTA has kColumns of the V columns of the state of a head, a warp 16 of them. All products are of transposed
// matrices: the accumulators of one are, rounded, the operand a of the next, so warps exchange nothing, and the state
// never leaves registers. Products computes them, by mma.sync or wgmma; both have the same accumulators.
// kMaps: without outputs. The first CTAs of a segment and head compute N, from a state of 0; the others M, from the
// identity and without v.
template <class T, int kD, int kColumns, class Products, bool kChannels, bool kMaps = false>
struct ChunkStates {
  static constexpr int kThreads = 2 * kColumns, kSteps = kD / 16, kBlocks = kChunkTokens / 16;
  // The two CTAs of a head are a cluster, and copy for each other what both read
  // (docs/notes/linear-attention-chunk-states.md).
  static constexpr bool kPair = Products::kAsync && !kMaps && kD == 2 * kColumns;
  static constexpr int kCount = kChunkTokens / 2, kStateCount = kD / 2;  // accumulators of a lane
  using Tile = ChunkTile<kD>;
  using Matrix = typename Products::Matrix;
  using Values = ChunkTile<kColumns>;

  using Stages = ChunkStages<kD, kColumns, Products, !kMaps, kChannels>;
  using Shared = ChunkUpdates<Stages, kD, Products::kAlignment, kChannels>;
  static constexpr int kStages = Stages::kStages, kFactors = Stages::kFactors;
  struct Place {
    TokenSpan span;
    int head, column;    // column: the first of the CTA
    int chunk;           // number of the first
    bool is_map;         // of M
    const T *k, *q, *v;  // where this thread begins to copy the first chunk
  };

  const ChunkGatedDeltaRuleParams& p;
  Shared& shared;

  FI_DEVICE void run() const {
    const Divisor& slices = kMaps ? p.map_slices : p.slices;
    const int unit = divide(blockIdx.x, slices), number = divide(unit, p.heads);
    Place place;
    place.head = unit - number * p.heads.value;
    place.column = (blockIdx.x - unit * slices.value) * kColumns;
    place.is_map = kMaps && place.column >= kD;
    if (place.is_map) place.column -= kD;
    pdl_wait();
    place.span =
        p.segment_tokens.value ? TokenSpan::numbered(p, number, p.segment_tokens) : TokenSpan::whole(p, number);
    const TokenSpan& span = place.span;
    if (!span.exists || (kMaps && span.is_last(p))) return pdl_launch_dependents();
    place.chunk =
        TokenSpan::first_number(p, span.sequence, kChunkDivisor) + static_cast<int>(span.begin / kChunkTokens);
    place.k =
        Tile::template source<kThreads>(head_of(p.k, p.k_strides, span.token, place.head, p.k_group), p.k_strides[0]);
    place.q =
        Tile::template source<kThreads>(head_of(p.q, p.q_strides, span.token, place.head, p.q_group), p.q_strides[0]);
    place.v = Values::template source<kThreads>(
        head_of(p.v, p.v_strides, span.token, place.head, p.v_group) + place.column, p.v_strides[0]);
    const int chunks = static_cast<int>((span.tokens + kChunkTokens - 1) / kChunkTokens);

    if (place.is_map) clear_values();
    Matrix::template clear<kThreads>(shared.solved);
    if constexpr (!kMaps) Matrix::template clear<kThreads>(shared.scores);
    const int64_t slot = p.slots.or_row(span.sequence);
    float state[kStateCount] = {};
    Products::prepare(shared.arrivals);
    if constexpr (kPair) Products::meet();
    if constexpr (Products::kAsync && !kPair) __syncthreads();  // barriers are ready before another warp copies
    if (chunks > 0) load_stage(place, 0);
    if constexpr (kMaps) {
      if (place.is_map) make_identity(place, state);
    } else if (p.segment_tokens.value) {
      move_state_of<false, float>(segment_states(p.carried, 1), number, place, state);
    } else if (p.initial.data) {
      if (slot >= 0) move_state<false>(p.initial, slot, place, state);
    }
    for (int c = 0; c < chunks; ++c) {
      if (!has_tiles(place, c)) {
        cp_async_wait<0>();
        Products::fence();  // NOTE: it waits for all copies of this thread, also later ones
      }
      __syncthreads();
      if constexpr (kPair) {
        if (threadIdx.x == kThreads - 32 && c > 0 && c + 1 < chunks) Products::give_stage(shared.arrivals, c + 1);
      }
      Products::wait(shared.arrivals, c);
      compute(place, c, c + 1 < chunks, state);
      const uint32_t done = (c + 1) * kChunkTokens;
      if (!kMaps && p.checkpoint_tokens.value && done <= span.tokens) {
        const uint32_t in_all = static_cast<uint32_t>(span.begin) + done, count = divide(in_all, p.checkpoint_tokens);
        if (count * p.checkpoint_tokens.value == in_all)
          move_state<true>(p.checkpoints, p.checkpoint_starts.at(span.sequence) + count - 1, place, state);
      }
      if (kStages == 1 && c + 1 < chunks) {
        __syncthreads();
        load_stage(place, c + 1);
      }
    }
    pdl_launch_dependents();
    if constexpr (kMaps) {
      move_state_of<true, float>(segment_states(p.maps + (place.is_map ? kD * kD : 0), 2), number, place, state);
    } else {
      const int64_t to = p.output_slot(span.sequence);
      if (p.output.data && to >= 0 && span.is_last(p)) move_state<true>(p.output, to, place, state);
    }
  }

 private:
  FI_DEVICE static unsigned address(const void* shared) {
    return static_cast<unsigned>(__cvta_generic_to_shared(shared));
  }
  FI_DEVICE static int lane() { return threadIdx.x % 32; }
  FI_DEVICE static int warp() { return threadIdx.x / 32; }

  FI_DEVICE static const T* head_of(const void* base, const int64_t (&strides)[2], int64_t token, int head,
                                    const Divisor& group) {
    return static_cast<const T*>(base) + token * strides[0] + divide(head, group) * strides[1];
  }
  // States in the workspace, `each` for a segment and head.
  FI_DEVICE ChunkStatesView segment_states(float* data, int each) const {
    const int64_t size = int64_t{each} * kD * kD;
    return {data, NumberType::kF32, {p.heads.value * size, size, kD}};
  }
  FI_DEVICE static void make_identity(const Place& place, float (&state)[kStateCount]) {
    const int row = place.column + 16 * warp() + lane() / 4;
#pragma unroll
    for (int i = 0; i < kStateCount; ++i)
      state[i] = row + i / 2 % 2 * 8 == i / 4 * 8 + 2 * (lane() % 4) + i % 2 ? 1.f : 0.f;
  }

  FI_DEVICE void clear_values() const {
    for (int at = 16 * threadIdx.x; at < static_cast<int>(sizeof shared.v); at += 16 * kThreads)
      *reinterpret_cast<uint4*>(&shared.v[0][0] + at) = make_uint4(0, 0, 0, 0);
  }
  FI_DEVICE static int rows_of(const Place& place, int c) {
    return static_cast<int>(min(place.span.tokens - int64_t{c} * kChunkTokens, int64_t{kChunkTokens}));
  }
  // Whether TMA copies k, q and v: of a chunk that is a part it would copy tokens of another sequence.
  FI_DEVICE bool has_tiles(const Place& place, int c) const {
    return Products::kAsync && p.has_tiles && rows_of(place, c) == kChunkTokens;
  }
  FI_DEVICE void load_stage(const Place& place, int c) const {
    const int stage = c % kStages;
    const int64_t matrix = int64_t{place.chunk + c} * p.heads.value + place.head;
    const char* solved = static_cast<const char*>(p.solved) + matrix * LowerTriangle::kBytes;
    const char* scores = static_cast<const char*>(p.scores) + matrix * LowerTriangle::kBytes;
    const float* factors = p.factors + matrix * kFactors;
    const char* decayed = static_cast<const char*>(p.decayed) + matrix * 3 * Tile::kBytes;
    if constexpr (Products::kAsync) {
      if (lane() == 0) load_at_once(place, c, solved, scores, factors, decayed);
      if (has_tiles(place, c)) return;
    }
    const int rows = rows_of(place, c);
    const int64_t token = int64_t{c} * kChunkTokens;
    if constexpr (!kChannels) {
      Tile::template load<kThreads>(address(shared.k[stage]), place.k + token * p.k_strides[0], p.k_strides[0], rows);
      if constexpr (!kMaps)
        Tile::template load<kThreads>(address(shared.q[stage]), place.q + token * p.q_strides[0], p.q_strides[0], rows);
    } else if constexpr (!Products::kAsync) {
#pragma unroll
      for (int i = 0; i < Tile::kBytes / (16 * kThreads); ++i) {
        const int at = 16 * (threadIdx.x + i * kThreads);
        cp_async_16(address(shared.k[stage]) + at, decayed + at);
        if constexpr (!kMaps) cp_async_16(address(shared.q[stage]) + at, decayed + Tile::kBytes + at);
        cp_async_16(address(shared.update[stage]) + at, decayed + 2 * Tile::kBytes + at);
      }
    }
    Values::template load<kThreads>(address(shared.v[stage]), place.v + token * p.v_strides[0], p.v_strides[0],
                                    place.is_map ? 0 : rows);
    if constexpr (!Products::kAsync) {
      Matrix::template load<kThreads>([&](int at, int source) {
        cp_async_16(address(shared.solved[stage]) + at, solved + source);
        if constexpr (!kMaps) cp_async_16(address(shared.scores[stage]) + at, scores + source);
      });
      if (threadIdx.x < kFactors / 4) cp_async_16(&shared.factors[stage][4 * threadIdx.x], factors + 4 * threadIdx.x);
    }
    cp_async_commit();
  }
  // By one thread of each warp, with TMA: a warp that issues all copies keeps the others waiting. M has no values.
  FI_DEVICE void load_at_once(const Place& place, int c, const char* solved, const char* scores, const float* factors,
                              const char* decayed) const {
    const int stage = c % kStages, token = static_cast<int>(place.span.token) + c * kChunkTokens;
    const bool tiles = has_tiles(place, c);
    auto& full = Products::arrival(shared.arrivals, c);
    if (warp() == 0) {
      unsigned bytes = (kMaps ? 1 : 2) * LowerTriangle::kBytes + sizeof shared.factors[0];
      if (kChannels) bytes += (kMaps ? 2 : 3) * Tile::kBytes;
      if (tiles && !kChannels) bytes += (kMaps ? 1 : 2) * Tile::kBytes;
      if (tiles && !place.is_map) bytes += Values::kBytes;
      full.arrive_expect(bytes);
    }
    if constexpr (kPair) {
      Products::take_stage(shared.arrivals, c);
      const bool is_first = Products::rank() == 0;  // copies k and T, the other one q and the scores
      if constexpr (kChannels) {
        // Of both: halves of k or q, and one half of the update.
        const int half = Tile::kBytes / 2 * warp(), own = Tile::kBytes / 2 * Products::rank();
        if (warp() < 2)
          Products::template load_bytes<true>((is_first ? shared.k[stage] : shared.q[stage]) + half,
                                              decayed + (is_first ? 0 : Tile::kBytes) + half, Tile::kBytes / 2, full);
        if (warp() == 3)
          Products::template load_bytes<true>(shared.update[stage] + own, decayed + 2 * Tile::kBytes + own,
                                              Tile::kBytes / 2, full);
      }
      if (warp() < 2) {
        if (tiles && !kChannels)
          Products::share_block(is_first ? shared.k[stage] : shared.q[stage], is_first ? p.k_tiles : p.q_tiles, full,
                                warp(), divide(place.head, is_first ? p.k_group : p.q_group), token);
      } else if (warp() == 2) {
        Products::template load_matrix<true>(is_first ? shared.solved[stage] : shared.scores[stage],
                                             is_first ? solved : scores, full);
      } else {
        if (tiles)
          Products::template load_tile<kColumns>(shared.v[stage], p.v_tiles, full, place.column,
                                                 divide(place.head, p.v_group), token);
        if (is_first)
          Products::template load_bytes<true>(shared.factors[stage], factors, sizeof shared.factors[0], full);
      }
      return;
    }
    if constexpr (kChannels) {
      if (warp() == 0) Products::template load_bytes<false>(shared.k[stage], decayed, Tile::kBytes, full);
      if constexpr (!kMaps) {
        if (warp() == 1)
          Products::template load_bytes<false>(shared.q[stage], decayed + Tile::kBytes, Tile::kBytes, full);
      }
      if (warp() == 3)
        Products::template load_bytes<false>(shared.update[stage], decayed + 2 * Tile::kBytes, Tile::kBytes, full);
    }
    if (warp() == 0 && tiles && !kChannels)
      Products::template load_tile<kD>(shared.k[stage], p.k_tiles, full, 0, divide(place.head, p.k_group), token);
    if (warp() == 2) {
      Products::template load_matrix<false>(shared.solved[stage], solved, full);
      Products::template load_bytes<false>(shared.factors[stage], factors, sizeof shared.factors[0], full);
    }
    if constexpr (!kMaps) {
      if (warp() == 1) {
        if (tiles && !kChannels)
          Products::template load_tile<kD>(shared.q[stage], p.q_tiles, full, 0, divide(place.head, p.q_group), token);
        Products::template load_matrix<false>(shared.scores[stage], scores, full);
      }
    }
    if (warp() == 3 && tiles && !place.is_map)
      Products::template load_tile<kColumns>(shared.v[stage], p.v_tiles, full, place.column,
                                             divide(place.head, p.v_group), token);
  }

  // Between the accumulators of this lane and a state in global memory.
  template <bool kStores>
  FI_DEVICE void move_state(const ChunkStatesView& view, int64_t row, const Place& place,
                            float (&state)[kStateCount]) const {
    switch (view.type) {
      case NumberType::kF32:
        return move_state_of<kStores, float>(view, row, place, state);
      case NumberType::kF16:
        return move_state_of<kStores, __half>(view, row, place, state);
      case NumberType::kBF16:
        return move_state_of<kStores, __nv_bfloat16>(view, row, place, state);
    }
  }
  template <bool kStores, class S>
  FI_DEVICE void move_state_of(const ChunkStatesView& view, int64_t row, const Place& place,
                               float (&state)[kStateCount]) const {
    S* base = static_cast<S*>(view.data) + row * view.strides[0] + place.head * view.strides[1] +
              (place.column + 16 * warp() + lane() / 4) * view.strides[2] + 2 * (lane() % 4);
#pragma unroll
    for (int n = 0; n < kD / 8; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        S* at = base + 8 * half * view.strides[2] + 8 * n;
        const int own = 4 * n + 2 * half;
        Vec<S, 2> pair;
        if constexpr (kStores) {
          const float f[2] = {state[own], state[own + 1]};
          from_float(f, pair);
          store(at, pair);
        } else {
          float f[2];
          pair = fi::load<S, 2>(at);
          to_float(pair, f);
          state[own] = f[0], state[own + 1] = f[1];
        }
      }
  }

  // more: another chunk follows, whose copies begin while the first products run.
  FI_DEVICE void compute(const Place& place, int c, bool more, float (&state)[kStateCount]) const {
    const int stage = c % kStages;
    const float* factors = shared.factors[stage];
    const auto factor = [&](int which, int n) {
      if constexpr (kChannels) return make_float2(1.f, 1.f);
      return *reinterpret_cast<const float2*>(factors + which * kChunkTokens + 8 * n + 2 * (lane() % 4));
    };
    unsigned s[kSteps][4];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) operand_of<T>(s[step], state, step);

    // X^T = V^T - S K^T diag(G)
    float d[kCount], o[kCount];
    if (!Products::kAsync && kStages > 1 && more) load_stage(place, c + 1);
    Products::rows(d, s, shared.k[stage]);
    if constexpr (Products::kAsync && !kMaps) Products::template rows_of<0, kSteps / 2>(o, s, shared.q[stage]);
    if (Products::kAsync && more) load_stage(place, c + 1);
    Products::template finish<kMaps ? 0 : 1>(d);
    unsigned x[kBlocks][4];
#pragma unroll
    for (int pair = 0; pair < kBlocks; ++pair) {
      unsigned v[4];
      Values::transposed(v, address(shared.v[stage]), warp(), pair);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int own = 8 * pair + 4 * half;
        const float2 f = factor(0, 2 * pair + half);
        float low[2], high[2];
        split(v[2 * half], low);
        split(v[2 * half + 1], high);
        d[own] = low[0] - f.x * d[own], d[own + 1] = low[1] - f.y * d[own + 1];
        d[own + 2] = high[0] - f.x * d[own + 2], d[own + 3] = high[1] - f.y * d[own + 3];
      }
      operand_of<T>(x[pair], d, pair);
    }

    // U^T = X^T T^T, as operand of the output, and scaled as that of the state.
    float u[2][kCount / 2];
    Products::lower(u, x, shared.solved[stage]);
    // The other half of S Q^T, under what follows T.
    if constexpr (Products::kAsync && !kMaps) Products::template rows_of<kSteps / 2, kSteps>(o, s, shared.q[stage]);
    finish_halves<Products::kAsync && !kMaps ? 1 : 0>(u);
    unsigned scaled[kBlocks][4];
#pragma unroll
    for (int pair = 0; pair < kBlocks; ++pair) {
      float (&own)[kCount / 2] = u[pair / 2];
      operand_of<T>(x[pair], own, pair % 2);
      scale(own, 2 * (pair % 2), factor(2, 2 * pair));
      scale(own, 2 * (pair % 2) + 1, factor(2, 2 * pair + 1));
      operand_of<T>(scaled[pair], own, pair % 2);
    }

    if constexpr (!kMaps) {  // O^T = S Q^T diag(scale G) + U^T scores^T, in two parts
      if constexpr (!Products::kAsync) Products::rows(o, s, shared.q[stage]);
      if constexpr (!Products::kAsync) Products::template finish<0>(o);
      Products::lower(u, x, shared.scores[stage]);
      if constexpr (!Products::kAsync) write(place, c, o, u, factor);
    }

    // S = G_last S + U^T diag(G_last / G) K, while the outputs are stored.
#pragma unroll
    for (int n = 0; n < kD / 8; ++n) {
      const float* last = factors + (kChannels ? 8 * n + 2 * (lane() % 4) : 3 * kChunkTokens);
      scale(state, n, kChannels ? *reinterpret_cast<const float2*>(last) : make_float2(*last, *last));
    }
    if constexpr (kChannels)
      Products::columns(state, scaled, shared.update[stage]);
    else
      Products::columns(state, scaled, shared.k[stage]);
    if constexpr (Products::kAsync && !kMaps) {
      finish_halves<1>(u);
      Products::template finish<1>(o);
      write(place, c, o, u, factor);
    }
    Products::template finish<0>(state);
  }

  template <int kPending>
  FI_DEVICE static void finish_halves(float (&d)[2][kCount / 2]) {
    Products::template finish<kPending>(d[0]);
    Products::template finish<kPending>(d[1]);
  }
  FI_DEVICE static void split(unsigned word, float (&f)[2]) {
    Vec<T, 2> pair;
    memcpy(&pair, &word, sizeof word);
    to_float(pair, f);
  }
  template <int kSize>
  FI_DEVICE static void scale(float (&d)[kSize], int n, float2 f) {
    d[4 * n] *= f.x, d[4 * n + 1] *= f.y, d[4 * n + 2] *= f.x, d[4 * n + 3] *= f.y;
  }

  // Stores the transposed outputs, o scaled plus u: 4 bytes a lane, 32 contiguous ones of a token by a warp.
  template <class Factor>
  FI_DEVICE void write(const Place& place, int c, const float (&o)[kCount], const float (&u)[2][kCount / 2],
                       const Factor& factor) const {
    const int64_t first = int64_t{c} * kChunkTokens, stride = p.out_strides[0];
    const int rows = static_cast<int>(min(place.span.tokens - first, int64_t{kChunkTokens})) - lane() / 4;
    T* out = static_cast<T*>(p.out) + (place.span.token + first + lane() / 4) * stride + place.head * p.out_strides[1] +
             place.column + 16 * warp() + 2 * (lane() % 4);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 f = factor(1, n);
      const auto pair = [&](int i) {
        const float* more = &u[n / 4][4 * (n % 4) + i];
        return movmatrix_trans(pack_pair(o[4 * n + i] * f.x + more[0], o[4 * n + i + 1] * f.y + more[1], T()));
      };
      const unsigned low = pair(0), high = pair(2);
      if (8 * n < rows) {
        reinterpret_cast<unsigned*>(out)[0] = low;
        reinterpret_cast<unsigned*>(out)[4] = high;
      }
      out += 8 * stride;
    }
  }
};

}  // namespace fi
