// The part of ssd_combined that goes through the chunks of a sequence, with the state in registers.
#pragma once
#include "fi/cuda/math.cuh"
#include "fi/cuda/ptx/movmatrix.cuh"
#include "fi/cuda/vec.cuh"
#include "fi/linear_attention/ssd_prepare.cuh"

namespace fi {

// A CTA has kColumns of the dim of a head, a warp 16 of them, which are rows of the state. All products are of
// transposed matrices: the state is, rounded, the operand a of C S^T, and x^T that of the others, so warps exchange
// nothing, and the state never leaves registers. Products computes them, by mma.sync or wgmma; both have the same
// accumulators. kCheckpoints: states are also stored in between. kPair: two CTAs next to each other are a cluster with
// one sequence and one group, and copy B and C for each other: without that all CTAs together read 4.5 TB/s from L2 on
// an H200, 46 KB of each chunk and head.
template <class T, int kD, int kColumns, class Products, bool kCheckpoints, bool kPair, int kStages>
struct SsdStates {
  static constexpr int kThreads = 2 * kColumns, kSteps = kD / 16, kBlocks = kChunkTokens / 16, kAhead = kStages - 1;
  static constexpr int kCount = kChunkTokens / 2, kStateCount = kD / 2;  // accumulators of a lane
  using Tile = ChunkTile<kD>;
  using Matrix = typename Products::Matrix;
  using Values = ChunkTile<kColumns>;

  struct Shared {
    alignas(Products::kAlignment) char b[kStages][Tile::kBytes];
    alignas(Products::kAlignment) char c[kStages][Tile::kBytes];
    alignas(Products::kAlignment) char x[kStages][Values::kBytes];
    alignas(128) char scores[kStages][Matrix::kBytes];
    alignas(16) float factors[kStages][kSsdFactors];
    typename Products::Arrivals arrivals;
  };
  struct Place {
    int64_t token, tokens;                      // the first of the sequence, and how many
    int sequence, head, column, chunk, chunks;  // column: the first of the CTA; chunk: number of the first
    int64_t group;
    float skip[2];  // D, of the two rows of this lane
  };
  enum Factor { kSum, kDecay, kWeight, kStep };  // as SsdCombinedParams::factors

  const SsdCombinedParams& p;
  Shared& shared;

  FI_DEVICE void run() const {
    const int unit = divide(blockIdx.x, p.slices), sequence = divide(unit, p.heads);
    Place place;
    place.sequence = sequence;
    place.head = unit - sequence * p.heads.value;
    place.column = (blockIdx.x - unit * p.slices.value) * kColumns;
    place.group = divide(place.head, p.group);
    pdl_wait();
    place.token = p.begin_of(sequence), place.tokens = p.length_of(sequence);
    place.chunk = p.first_chunk(sequence);
    place.chunks = static_cast<int>((place.tokens + kChunkTokens - 1) / kChunkTokens);
    const int64_t row = place.column + 16 * warp() + lane() / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      place.skip[half] = p.d.data ? number(p.d, place.head * p.d_stride + (row + 8 * half) * p.d_dim_stride) : 0.f;
    Matrix::template clear<kThreads>(shared.scores);
    Products::prepare(shared.arrivals);
    if constexpr (kPair) Products::meet();
    if constexpr (Products::kAsync && !kPair) __syncthreads();  // barriers are ready before another warp copies
    for (int c = 0; c < kAhead && c < place.chunks; ++c) load_stage(place, c);
    float state[kStateCount] = {};
    const int64_t from = p.from_slots.or_row(sequence), to = p.to_slots.or_row(sequence);
    if (p.initial.data && from >= 0) move_state<false>(p.initial, from, place, state);
    int64_t next = kCheckpoints ? next_checkpoint(place, 0) : 0;  // tokens that the next checkpoint has seen
    if (kCheckpoints && next == 0) store_checkpoints(place, next, state);
    for (int c = 0; c < place.chunks; ++c) {
      if (!has_tiles(place, c)) {
        cp_async_wait<0>();
        Products::fence();  // NOTE: it waits for all copies of this thread, also later ones
      }
      __syncthreads();
      if constexpr (kPair) {
        if (threadIdx.x == kThreads - 32 && c > 0 && c + kAhead < place.chunks)
          Products::give_stage(shared.arrivals, c + kAhead);
      }
      Products::wait(shared.arrivals, c);
      compute(place, c, c + kAhead < place.chunks, next, state);
    }
    pdl_launch_dependents();
    if (p.final.data && to >= 0) move_state<true>(p.final, to, place, state);
  }

 private:
  FI_DEVICE static unsigned address(const void* shared) {
    return static_cast<unsigned>(__cvta_generic_to_shared(shared));
  }
  FI_DEVICE static int lane() { return threadIdx.x % 32; }
  FI_DEVICE static int warp() { return threadIdx.x / 32; }
  FI_DEVICE static int rows_of(const Place& place, int c) {
    return static_cast<int>(min(place.tokens - int64_t{c} * kChunkTokens, int64_t{kChunkTokens}));
  }
  // Whether TMA copies b, c and x: of a chunk that is a part it would copy tokens of another sequence.
  FI_DEVICE bool has_tiles(const Place& place, int c) const {
    return Products::kAsync && p.has_tiles && rows_of(place, c) == kChunkTokens;
  }

  FI_DEVICE void load_stage(const Place& place, int c) const {
    const int stage = c % kStages;
    const int64_t matrix = int64_t{place.chunk + c} * p.heads.value + place.head;
    const char* scores = static_cast<const char*>(p.scores) + matrix * LowerTriangle::kBytes;
    const float* factors = p.factors + matrix * kSsdFactors;
    const int64_t token = place.token + int64_t{c} * kChunkTokens;
    if constexpr (Products::kAsync) {
      if (lane() == 0) load_at_once(place, c, scores, factors, static_cast<int>(token));
      if (has_tiles(place, c)) return;
    }
    const int rows = rows_of(place, c);
    const auto at = [&](const void* base, const int64_t (&strides)[2], int64_t head) {
      return static_cast<const T*>(base) + token * strides[0] + head * strides[1];
    };
    load_ssd_tile<kD, kThreads>(shared.b[stage], at(p.b, p.b_strides, place.group), p.b_strides[0], rows, p.dstate);
    load_ssd_tile<kD, kThreads>(shared.c[stage], at(p.c, p.c_strides, place.group), p.c_strides[0], rows, p.dstate);
    load_ssd_tile<kColumns, kThreads>(shared.x[stage], at(p.x, p.x_strides, place.head) + place.column, p.x_strides[0],
                                      rows, kColumns);
    if constexpr (!Products::kAsync) {
      Matrix::template load<kThreads>(
          [&](int to, int source) { cp_async_16(address(shared.scores[stage]) + to, scores + source); });
      for (int i = threadIdx.x; i < kSsdFactors / 4; i += kThreads)
        cp_async_16(&shared.factors[stage][4 * i], factors + 4 * i);
    }
    cp_async_commit();
  }
  // By one thread of each warp, with TMA: a warp that issues all copies keeps the others waiting.
  FI_DEVICE void load_at_once(const Place& place, int c, const char* scores, const float* factors, int token) const {
    const int stage = c % kStages;
    const bool tiles = has_tiles(place, c);
    auto& full = Products::arrival(shared.arrivals, c);
    if (warp() == 0)
      full.arrive_expect(LowerTriangle::kBytes + sizeof shared.factors[0] +
                         (tiles ? 2 * Tile::kBytes + Values::kBytes : 0));
    const int group = static_cast<int>(place.group);
    if constexpr (kPair) {
      Products::take_stage(shared.arrivals, c);
      const bool is_first = Products::rank() == 0;  // copies C, the other one B
      if (tiles && warp() < kD / 64)
        Products::share_block(is_first ? shared.c[stage] : shared.b[stage], is_first ? p.c_tiles : p.b_tiles, full,
                              warp(), group, token);
    } else {
      if (warp() == 0 && tiles) Products::template load_tile<kD>(shared.c[stage], p.c_tiles, full, 0, group, token);
      if (warp() == 1 && tiles) Products::template load_tile<kD>(shared.b[stage], p.b_tiles, full, 0, group, token);
    }
    if (warp() == 2) {
      Products::template load_matrix<false>(shared.scores[stage], scores, full);
      Products::template load_bytes<false>(shared.factors[stage], factors, sizeof shared.factors[0], full);
    }
    if (warp() == 3 && tiles)
      Products::template load_tile<kColumns>(shared.x[stage], p.x_tiles, full, place.column, place.head, token);
  }

  // Between accumulators of this lane, of columns from `first` on, and a state in global memory.
  template <bool kStores, int kSize>
  FI_DEVICE void move_state(const ChunkStatesView& view, int64_t row, const Place& place, float (&state)[kSize],
                            int first = 0) const {
    switch (view.type) {
      case NumberType::kF32:
        return move_state_of<kStores, float>(view, row, place, state, first);
      case NumberType::kF16:
        return move_state_of<kStores, __half>(view, row, place, state, first);
      case NumberType::kBF16:
        return move_state_of<kStores, __nv_bfloat16>(view, row, place, state, first);
    }
  }
  template <bool kStores, class S, int kSize>
  FI_DEVICE void move_state_of(const ChunkStatesView& view, int64_t row, const Place& place, float (&state)[kSize],
                               int first) const {
    S* base = static_cast<S*>(view.data) + row * view.strides[0] + place.head * view.strides[1] +
              (place.column + 16 * warp() + lane() / 4) * view.strides[2] + first + 2 * (lane() % 4);
#pragma unroll
    for (int n = 0; n < kSize / 4; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (first + 8 * n >= p.dstate) continue;
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

  // The first checkpoint after so many tokens or more; far behind the end if there is none.
  FI_DEVICE int64_t next_checkpoint(const Place& place, int64_t begin) const {
    int64_t next = int64_t{1} << 62;
    for (int i = p.checkpoint_begin(place.sequence), end = p.checkpoint_end(place.sequence); i < end; ++i) {
      const int64_t at = p.checkpoint_of(place.sequence, i);
      if (at >= begin && at < next) next = at;
    }
    return next;
  }
  // Stores the state that has seen `done` tokens where checkpoints of them ask for it.
  template <int kSize>
  FI_DEVICE void store_checkpoints(const Place& place, int64_t done, float (&state)[kSize], int first = 0) const {
    for (int i = p.checkpoint_begin(place.sequence), end = p.checkpoint_end(place.sequence); i < end; ++i)
      if (p.checkpoint_of(place.sequence, i) == done)
        move_state<true>(p.checkpoints, p.checkpoint_slot(place.sequence, i), place, state, first);
  }
  // The state inside a chunk, from the one before it: a product of its own, so the other results stay as they are.
  FI_DEVICE void compute_checkpoint(const Place& place, int c, int64_t at, const float (&before)[kStateCount]) const {
    const int stage = c % kStages, inside = static_cast<int>(at - int64_t{c} * kChunkTokens);
    const float* factors = shared.factors[stage];
    const float sum = factors[kSum * kChunkTokens + inside - 1], decay = exp2_approx(sum);
    unsigned x[kBlocks][4];
    load_values(x, stage);
    scale_values(x, [&](int t) {
      const float2 of = *reinterpret_cast<const float2*>(factors + kSum * kChunkTokens + t);
      const float2 dt = *reinterpret_cast<const float2*>(factors + kStep * kChunkTokens + t);
      return make_float2(t < inside ? dt.x * exp2_approx(sum - of.x) : 0.f,
                         t + 1 < inside ? dt.y * exp2_approx(sum - of.y) : 0.f);
    });
#pragma unroll
    for (int block = 0; block < kD / 64; ++block) {
      float state[32];
#pragma unroll
      for (int e = 0; e < 32; ++e) state[e] = before[32 * block + e] * decay;
      Products::column_block(state, x, shared.b[stage], block);
      Products::template finish<0>(state);
      store_checkpoints(place, at, state, 64 * block);
    }
  }

  FI_DEVICE static void split(unsigned word, float (&f)[2]) {
    Vec<T, 2> pair;
    memcpy(&pair, &word, sizeof word);
    to_float(pair, f);
  }
  // x^T of a stage as operand a.
  FI_DEVICE void load_values(unsigned (&x)[kBlocks][4], int stage) const {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) Values::transposed(x[block], address(shared.x[stage]), warp(), block);
  }
  // Multiplies the values of tokens t and t + 1 by weight(t).
  template <class Weight>
  FI_DEVICE static void scale_values(unsigned (&x)[kBlocks][4], const Weight& weight) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 w = weight(16 * block + i / 2 * 8 + 2 * (lane() % 4));
        float f[2];
        split(x[block][i], f);
        x[block][i] = pack_pair(f[0] * w.x, f[1] * w.y, T());
      }
  }

  // more: a chunk follows kAhead chunks later, whose copies begin while the products run.
  FI_DEVICE void compute(const Place& place, int c, bool more, int64_t& next, float (&state)[kStateCount]) const {
    const int stage = c % kStages;
    const float* factors = shared.factors[stage];
    const auto factor = [&](int which, int t) {
      return *reinterpret_cast<const float2*>(factors + which * kChunkTokens + t);
    };
    const int64_t done = int64_t{c} * kChunkTokens + rows_of(place, c);
    if constexpr (kCheckpoints) {
      for (; next < done; next = next_checkpoint(place, next + 1))
        if (next > int64_t{c} * kChunkTokens) compute_checkpoint(place, c, next, state);
    }
    float o[2][kCount / 2];  // S C^T, then also x^T P^T
    unsigned x[kBlocks][4];
    if (more && !Products::kAsync) load_stage(place, c + kAhead);
    {
      unsigned s[kSteps][4];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) operand_of<T>(s[step], state, step);
      Products::rows(reinterpret_cast<float (&)[kCount]>(o), s, shared.c[stage]);
      if (more && Products::kAsync) load_stage(place, c + kAhead);
      load_values(x, stage);
      scale_values(x, [&](int t) { return factor(kWeight, t); });
      const float last = factors[kDecay * kChunkTokens + kChunkTokens - 1];
#pragma unroll
      for (int e = 0; e < kStateCount; ++e) state[e] *= last;
      Products::columns(state, x, shared.b[stage]);
      Products::template finish<1>(reinterpret_cast<float (&)[kCount]>(o));
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 f = factor(kDecay, 8 * n + 2 * (lane() % 4));
#pragma unroll
      for (int i = 0; i < 4; ++i) o[n / 4][4 * (n % 4) + i] *= i % 2 ? f.y : f.x;
    }
    unsigned values[kBlocks][4];
    load_values(values, stage);
    Products::template lower<true>(o, values, shared.scores[stage]);
    Products::template finish<0>(reinterpret_cast<float (&)[kCount]>(o));
    Products::template finish<0>(state);
    write(place, c, o, values);
    if constexpr (kCheckpoints) {
      if (next == done) store_checkpoints(place, done, state), next = next_checkpoint(place, done + 1);
    }
  }

  // Stores the transposed outputs: 4 bytes a lane, 32 contiguous ones of a token by a warp.
  FI_DEVICE void write(const Place& place, int c, const float (&o)[2][kCount / 2],
                       const unsigned (&x)[kBlocks][4]) const {
    const int64_t first = place.token + int64_t{c} * kChunkTokens + lane() / 4;
    const int rows = rows_of(place, c) - lane() / 4, column = place.column + 16 * warp();
    const int64_t own = column + 2 * (lane() % 4);
    T* out = static_cast<T*>(p.out) + first * p.out_strides[0] + place.head * p.out_strides[1] + own;
    const T* z =
        p.z ? static_cast<const T*>(p.z) + first * p.z_strides[0] + place.head * p.z_strides[1] + own : nullptr;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      unsigned words[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* own_y = &o[n / 4][4 * (n % 4) + 2 * half];
        float y[2] = {own_y[0], own_y[1]}, value[2];
        split(x[n / 2][n % 2 * 2 + half], value);
        y[0] = fmaf(place.skip[half], value[0], y[0]), y[1] = fmaf(place.skip[half], value[1], y[1]);
        if (p.z) {
          unsigned word = 0;
          if (8 * n < rows) word = *reinterpret_cast<const unsigned*>(z + 8 * n * p.z_strides[0] + 8 * half);
          float gate[2];
          split(movmatrix_trans(word), gate);
          y[0] *= CudaMath::scaled_sigmoid(gate[0], gate[0]), y[1] *= CudaMath::scaled_sigmoid(gate[1], gate[1]);
        }
        words[half] = movmatrix_trans(pack_pair(y[0], y[1], T()));
      }
      if (8 * n < rows) {
        reinterpret_cast<unsigned*>(out)[0] = words[0];
        reinterpret_cast<unsigned*>(out)[4] = words[1];
      }
      out += 8 * p.out_strides[0];
    }
  }
};

}  // namespace fi
