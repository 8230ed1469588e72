// A MoE layer of at most 8 tokens in one cooperative launch on Hopper: both products, activation and weighted sum.
//
// Each warp streams its own lines of weights, 16 rows of 128 bytes, through a ring of cp.async slots: no warp waits for
// another, and the weights of the second product arrive while the first computes. Rows of weights are the rows of
// mma.sync m16n8k16 and tokens its columns, so up to 8 tokens cost what one costs. k is permuted alike for weights and
// tokens: a lane uses the bytes that lie beside each other.
//
// Work tiles are shared out statically and the sums of the warps added in a fixed order: runs are equal to the bit.
// The order depends on the experts that the whole batch has chosen.
#pragma once
#include "fi/cuda/math.cuh"
#include "fi/cuda/pack.cuh"
#include "fi/cuda/ptx/bulk_sm90.cuh"
#include "fi/cuda/ptx/cp_async.cuh"
#include "fi/cuda/ptx/fp8.cuh"
#include "fi/cuda/ptx/grid_sync.cuh"
#include "fi/cuda/ptx/mma_sm80.cuh"
#include "fi/cuda/reduce.cuh"
#include "fi/cuda/shared_memory.cuh"
#include "fi/e4m3_block.h"
#include "fi/fused_moe/active_experts.cuh"

namespace fi {

// W: of weights; e4m3 has scales of 128 x 128, and tokens are quantised alike. T: of tokens and results. kSlots: of the
// ring of a warp. kRowBytes: of shared memory for the rows of tokens, with their scales.
template <class W, class T, int kSlots, int kRowBytes, ExpertActivation kAct>
struct MoeFewTokens {
  static constexpr bool kFp8 = sizeof(W) == 1;
  static constexpr int kLineK = kLineBytes / sizeof(W), kThreads = 32 * kFewWarps;
  // Slots of the ring that are requested before the tokens are converted.
  static constexpr int kAhead = kSlots - 1;
  static_assert(is_gated(kAct), "the two halves of an mma are rows of up and of gate");

  struct Shared {
    char ring[kFewWarps][kSlots][16 * kLineBytes];
    float scales[kFewWarps][kSlots][kFp8 ? 16 : 1];
    float sums[2][kFewWarps][kFewTokens * 16];
    ActiveExperts active;
    Barrier rows_here;
    alignas(16) char rows[kRowBytes];
  };
  static_assert(sizeof(Shared::sums) >= (2 * kFewSlots + kFewExperts) * sizeof(int), "scratch of the table");

  // What a warp loads next: a lane has 16 bytes of four rows.
  struct Cursor {
    bool second;               // product
    int tile, expert, step;    // expert: its place among the active ones; step: line of k
    int stride, lines;         // of step, of a row
    int left, rows;            // bytes of a row from this lane's on; rows of weights
    int64_t row_bytes, apart;  // apart: bytes from rows 0-7 to rows 8-15
    const char* from;
    const float* scale;
  };

  const MoeFewTokensParams& p;
  Shared& s;
  int warp, lane, row, column;  // row, column: of this lane in an mma
  int unit, unit_warp;          // of this warp in the first product
  int active, tiles;            // experts, work tiles of the first product

  FI_DEVICE void run() {
    warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, column = lane % 4;
    pdl_wait();
    if (threadIdx.x == 0) request_tokens();
    active = p.tokens == 1 ? s.active.build_one(p) : s.active.build(p, reinterpret_cast<int*>(s.sums));
    unit = static_cast<unsigned>(warp) / static_cast<unsigned>(p.k_warps), unit_warp = warp - unit * p.k_warps;
    tiles = active * p.feature_tiles;
    Cursor cursor{};
    cursor.tile = static_cast<int>(blockIdx.x), cursor.step = unit_warp, cursor.stride = p.k_warps;
    cursor.lines = p.up.lines, cursor.row_bytes = p.up.row_bytes, cursor.apart = p.width * p.up.row_bytes;
    settle(cursor);
#pragma unroll 1
    for (int i = 0; i <= kSlots; ++i) {
      if (i == kAhead) {
        pdl_launch_dependents();
        __syncthreads();
        s.rows_here.wait(0);
        convert_tokens();
      }
      if (i < kSlots) load(cursor, i);
    }
    __syncthreads();
    int slot = 0, buffer = 0;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, buffer ^= 1) up_tile(tile, cursor, slot, buffer);
    grid_sync();
    convert_activated();
    __syncthreads();
    for (int tile = blockIdx.x; tile < p.row_tiles; tile += gridDim.x, buffer ^= 1)
      down_tile(tile, cursor, slot, buffer);
  }

 private:
  // Scales of rows of tokens, fp32 [place of the expert, line][token], and the rows behind them.
  FI_DEVICE float* token_scales() const { return reinterpret_cast<float*>(s.rows); }
  FI_DEVICE char* token_rows() const {
    return s.rows + (kFp8 ? 32 * max(p.up.lines, p.tokens * p.top_k * p.down.lines) : 0);
  }

  FI_DEVICE void request_tokens() const {
    s.rows_here.init(1);
    fence_barrier_init();
    s.rows_here.arrive_expect(p.tokens * p.hidden * 2);
#pragma unroll 1
    for (int t = 0; t < p.tokens; ++t)
      bulk_load(token_rows() + t * p.up.pitch, static_cast<const T*>(p.x) + t * p.x_row_stride, p.hidden * 2,
                s.rows_here);
  }

  // Moves to the next line of this warp: from its tile to the next, from the first product to the second.
  FI_DEVICE void settle(Cursor& c) const {
    if (!c.second) {
      if (c.step >= c.lines) c.tile += gridDim.x, c.step = unit_warp;
      if (c.tile >= tiles || c.step >= c.lines) {
        c.second = true, c.tile = static_cast<int>(blockIdx.x), c.expert = 0, c.step = warp;
        c.stride = kFewWarps, c.lines = p.down.lines, c.row_bytes = p.down.row_bytes, c.apart = 8 * c.row_bytes;
      }
    }
    int first;
    if (!c.second) {
      c.expert = static_cast<unsigned>(c.tile) / static_cast<unsigned>(p.feature_tiles);
      first = (c.tile - c.expert * p.feature_tiles) * p.features + unit * p.unit;
      c.rows = min(min(p.unit, p.width - first), p.features - unit * p.unit);
    } else {
      while (c.step >= c.lines && c.tile < p.row_tiles) {
        c.step -= c.lines;
        if (++c.expert >= active) c.expert = 0, c.tile += gridDim.x, c.step = warp;
      }
      if (active == 0) c.tile = p.row_tiles;
      if (c.tile >= p.row_tiles) return;
      first = c.tile * p.rows;
      c.rows = min(p.rows, p.hidden - first);
    }
    const FewTokensProduct& g = c.second ? p.down : p.up;
    const int expert = s.active.experts[c.expert], at = c.step * kLineBytes + lane % 8 * 16;
    c.left = (c.second ? p.width : p.hidden) * static_cast<int>(sizeof(W)) - at;
    c.from = g.weight + expert * g.expert_bytes + (first + lane / 8) * c.row_bytes + at;
    if constexpr (kFp8) {
      const int of = c.second ? min(first + lane % 16, p.hidden - 1)
                              : min(first + lane % 8, p.width - 1) + (lane & 8 ? p.width : 0);
      c.scale = g.scale + expert * g.scale_expert_stride + of / 128 * g.scale_row_stride + c.step;
    }
  }
  // Requests a line; one group of copies in any case. Chunks of a line of odd rows are rotated by 64 bytes.
  FI_DEVICE void load(Cursor& c, int slot) const {
    if (!c.second || c.tile < p.row_tiles) {
      const int r = lane / 8, chunk = lane % 8 ^ (r & 1) << 2;
      const auto to = static_cast<unsigned>(__cvta_generic_to_shared(s.ring[warp][slot])) + r * kLineBytes + chunk * 16;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const bool here = c.left > 0 && r + j % 2 * 4 + (c.second ? j / 2 * 8 : 0) < c.rows;
        cp_async_16_hinted(to + j * 4 * kLineBytes,
                           here ? c.from + j % 2 * 4 * c.row_bytes + j / 2 * c.apart : p.up.weight, here, kEvictFirst);
      }
      c.left -= c.stride * kLineBytes, c.from += c.stride * kLineBytes;
      if constexpr (kFp8) {
        if (lane < 16) cp_async_4(&s.scales[warp][slot][lane], c.scale);
        c.scale += c.stride;
      }
      c.step += c.stride;
      if (c.step >= c.lines) settle(c);
    }
    cp_async_commit();
  }
  FI_DEVICE static void advance(int& slot) { slot = slot + 1 == kSlots ? 0 : slot + 1; }

  // Rows of n values to shared memory, quantised, zeros behind n. has(row): is it needed; from(row, k): eight values,
  // which are loaded one round ahead. A thread reads and writes the same places.
  template <class Has, class From, class ScaleOf>
  FI_DEVICE void convert(const FewTokensProduct& g, int count, int n, Has has, From from, ScaleOf scale_of) const {
    const int pieces = g.lines * (kLineK / 8), end = (count * pieces + 31) / 32 * 32;
    const auto fetch = [&](int i) {
      const int r = static_cast<unsigned>(i) / static_cast<unsigned>(pieces), k = (i - r * pieces) * 8;
      return r < count && k < n && has(r) ? from(r, k) : make_uint4(0, 0, 0, 0);
    };
    uint4 next = fetch(threadIdx.x);
#pragma unroll 1
    for (int i = threadIdx.x; i < end; i += kThreads) {
      const int r = static_cast<unsigned>(i) / static_cast<unsigned>(pieces), k = (i - r * pieces) * 8;
      const bool here = r < count && has(r);
      uint4 x = next;
      if (i + kThreads < end) next = fetch(i + kThreads);
      if constexpr (kFp8) {
        const float scale = quantize(x);
        if (here && lane % 16 == 0) *scale_of(r, k / 128) = scale;
      }
      if (here) *reinterpret_cast<uint4*>(token_rows() + r * g.pitch + k * 2) = x;
    }
  }
  // Eight of the 128 values of 16 lanes to e4m3, as halves. Returns their scale.
  // NOTE: the division is rounded. Values of 16 bits are often halfway between two e4m3, where an ulp decides.
  FI_DEVICE static float quantize(uint4& x) {
    const T* values = reinterpret_cast<const T*>(&x);
    float f[8], most = 0.f;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      f[j] = to_float(values[j]);
      most = fmaxf(most, fabsf(f[j]));
    }
    most = fmaxf(warp_max(most, 16), kMinBlockMax);
    const float inverse = __fdiv_rn(kE4m3Max, most);
    unsigned quads[2];
#pragma unroll
    for (int j = 0; j < 2; ++j)
      quads[j] = e4m3_quad(f[4 * j] * inverse, f[4 * j + 1] * inverse, f[4 * j + 2] * inverse, f[4 * j + 3] * inverse);
    const __nv_fp8_e4m3 e4m3{};
    x = {halves(quads[0] & 0xffffu, e4m3), upper_halves(quads[0], e4m3), halves(quads[1] & 0xffffu, e4m3),
         upper_halves(quads[1], e4m3)};
    return most * (1.f / kE4m3Max);
  }
  FI_DEVICE void convert_tokens() const {
    convert(
        p.up, p.tokens, p.hidden, [](int) { return true; },
        [&](int r, int k) { return *reinterpret_cast<const uint4*>(token_rows() + r * p.up.pitch + k * 2); },
        [&](int r, int line) { return token_scales() + line * kFewTokens + r; });
  }
  FI_DEVICE int token_of(int slot) const { return p.tokens == 1 ? 0 : slot / p.top_k; }
  FI_DEVICE void convert_activated() const {
    convert(
        p.down, p.tokens * p.top_k, p.width,
        [&](int r) {
          const int place = s.active.places[r];
          return place >= 0 && s.active.slots[place][token_of(r)] == r;
        },
        [&](int r, int k) {
          return __ldcg(reinterpret_cast<const uint4*>(static_cast<const T*>(p.activated) + int64_t{r} * p.width + k));
        },
        [&](int r, int line) {
          return token_scales() + (s.active.places[r] * p.down.lines + line) * kFewTokens + token_of(r);
        });
  }

  // d += the 16 rows of a slot of the ring times a line of the tokens; tokens: that of this lane, if it is `here`.
  FI_DEVICE void multiply(float (&d)[4], int slot, const char* tokens, bool here, int step) const {
    const char* at = s.ring[warp][slot] + row * kLineBytes;
    const uint4 zero = make_uint4(0, 0, 0, 0);
    float e[4] = {};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int offset = ((h * 4 + column) ^ (row & 1) << 2) * 16;
      const uint4 low = *reinterpret_cast<const uint4*>(at + offset);
      const uint4 high = *reinterpret_cast<const uint4*>(at + 8 * kLineBytes + offset);
      float (&c)[4] = h ? e : d;
      const char* from = tokens + (step * kLineK + (h * 4 + column) * (kLineK / 8)) * 2;
      const uint4 b = here ? *reinterpret_cast<const uint4*>(from) : zero;
      if constexpr (kFp8) {
        const uint4 after = here ? *reinterpret_cast<const uint4*>(from + 16) : zero;
        mma_e4m3(c, low.x, high.x, b.x, b.y);
        mma_e4m3(c, low.y, high.y, b.z, b.w);
        mma_e4m3(c, low.z, high.z, after.x, after.y);
        mma_e4m3(c, low.w, high.w, after.z, after.w);
      } else {
        mma_m16n8k16(c, {low.x, high.x, low.y, high.y}, b.x, b.y, T());
        mma_m16n8k16(c, {low.z, high.z, low.w, high.w}, b.z, b.w, T());
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] += e[i];
  }
  // Four e4m3 of two rows, which halves hold exactly.
  FI_DEVICE static void mma_e4m3(float (&d)[4], unsigned low, unsigned high, unsigned b0, unsigned b1) {
    const __nv_fp8_e4m3 e4m3{};
    mma_m16n8k16(
        d,
        {halves(low & 0xffffu, e4m3), halves(high & 0xffffu, e4m3), upper_halves(low, e4m3), upper_halves(high, e4m3)},
        b0, b1, __half());
  }

  // sums[token][row]: of this warp.
  FI_DEVICE void store_sums(const float (&d)[4], int buffer) const {
    float* to = s.sums[buffer][warp];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = column * 2 + i;
      if (token < p.tokens) to[token * 16 + row] = d[i], to[token * 16 + row + 8] = d[i + 2];
    }
  }

  // Features of an expert: the first product and the activation. In an mma, rows 0-7 are of up, rows 8-15 of gate.
  FI_DEVICE void up_tile(int tile, Cursor& cursor, int& slot, int buffer) const {
    const int place = tile / p.feature_tiles, begin = (tile - place * p.feature_tiles) * p.features;
    const int features = min(p.features, p.width - begin), expert = s.active.experts[place];
    // This thread sums feature f of token t; the divisions are done while weights arrive.
    const int t = static_cast<unsigned>(threadIdx.x) / static_cast<unsigned>(features);
    const int f = static_cast<int>(threadIdx.x) - t * features;
    const int of_unit = static_cast<unsigned>(f) / static_cast<unsigned>(p.unit);
    const int own = t < p.tokens ? s.active.slots[place][t] : -1;
    const ExpertConstants constants{p.alpha ? p.alpha[expert] : p.constants.alpha,
                                    p.beta ? p.beta[expert] : p.constants.beta,
                                    p.limit ? p.limit[expert] : p.constants.limit};
    float up = 0.f, gate = 0.f, d[4] = {};
    if (p.up.bias) {
      const T* bias = static_cast<const T*>(p.up.bias) + expert * p.up.bias_row_stride + begin + f;
      up = to_float(bias[0]), gate = to_float(bias[p.width]);
    }
    if (p.delta && own >= 0) {
      const T* delta = static_cast<const T*>(p.delta) + own * p.delta_row_stride + begin + f;
      up += to_float(delta[p.width]), gate += to_float(delta[0]);
    }
#pragma unroll 1
    for (int step = unit_warp; step < p.up.lines; step += p.k_warps) {
      cp_async_wait<kSlots - 1>();
      __syncwarp();
      const char* tokens = token_rows() + row * p.up.pitch;
      if constexpr (kFp8) {
        float c[4] = {};
        multiply(c, slot, tokens, row < p.tokens, step);
        const float2 of_tokens = *reinterpret_cast<const float2*>(token_scales() + step * kFewTokens + column * 2);
        const float low = s.scales[warp][slot][row], high = s.scales[warp][slot][row + 8];
        d[0] += c[0] * (low * of_tokens.x), d[1] += c[1] * (low * of_tokens.y);
        d[2] += c[2] * (high * of_tokens.x), d[3] += c[3] * (high * of_tokens.y);
      } else {
        multiply(d, slot, tokens, row < p.tokens, step);
      }
      __syncwarp();
      load(cursor, slot);
      advance(slot);
    }
    store_sums(d, buffer);
    __syncthreads();
    if (own < 0) return;
    const float* from = s.sums[buffer][of_unit * p.k_warps] + t * 16 + f - of_unit * p.unit;
#pragma unroll 2
    for (int w = 0; w < p.k_warps; ++w) up += from[w * kFewTokens * 16], gate += from[w * kFewTokens * 16 + 8];
    static_cast<T*>(p.activated)[int64_t{own} * p.width + begin + f] =
        from_float<T>(activate_expert<CudaMath, kAct>(up, gate, constants));
  }

  // Rows of all active experts: the second product and the weighted sums of all tokens.
  FI_DEVICE void down_tile(int tile, Cursor& cursor, int& slot, int buffer) const {
    const int begin = tile * p.rows, rows = min(p.rows, p.hidden - begin);
    const int t = static_cast<unsigned>(threadIdx.x) / static_cast<unsigned>(rows);
    const int r = static_cast<int>(threadIdx.x) - t * rows;
    float bias = 0.f, d[4] = {};
    if (p.down.bias && t < p.tokens) {
#pragma unroll 1
      for (int i = 0; i < active; ++i) {
        const T* of_expert = static_cast<const T*>(p.down.bias) + s.active.experts[i] * p.down.bias_row_stride;
        if (s.active.tokens[i] >> t & 1) bias += s.active.weights[i][t] * to_float(of_expert[begin + r]);
      }
    }
    int place = 0, step = warp;
    while (true) {
      while (step >= p.down.lines && place < active) step -= p.down.lines, ++place;
      if (place >= active) break;
      cp_async_wait<kSlots - 1>();
      __syncwarp();
      const int own = s.active.slots[place][row];
      float c[4] = {};
      multiply(c, slot, token_rows() + own * p.down.pitch, own >= 0, step);
      const int tokens = s.active.tokens[place] >> column * 2;
      float2 factor = *reinterpret_cast<const float2*>(s.active.weights[place] + column * 2);
      float low = 1.f, high = 1.f;
      if constexpr (kFp8) {
        const float2 of_tokens =
            *reinterpret_cast<const float2*>(token_scales() + (place * p.down.lines + step) * kFewTokens + column * 2);
        factor.x *= of_tokens.x, factor.y *= of_tokens.y;
        low = s.scales[warp][slot][row], high = s.scales[warp][slot][row + 8];
      }
      if (tokens & 1) d[0] += c[0] * (low * factor.x), d[2] += c[2] * (high * factor.x);
      if (tokens & 2) d[1] += c[1] * (low * factor.y), d[3] += c[3] * (high * factor.y);
      __syncwarp();
      load(cursor, slot);
      advance(slot);
      step += kFewWarps;
    }
    store_sums(d, buffer);
    __syncthreads();
    if (t >= p.tokens) return;
    const float* from = s.sums[buffer][0] + t * 16 + r;
    float sums[4] = {bias, 0.f, 0.f, 0.f};
#pragma unroll
    for (int w = 0; w < kFewWarps; ++w) sums[w % 4] += from[w * kFewTokens * 16];
    static_cast<T*>(p.out)[t * p.out_row_stride + begin + r] = from_float<T>((sums[0] + sums[1]) + (sums[2] + sums[3]));
  }
};

// kBytes: of shared memory that the launch requests.
template <class W, class T, int kSlots, int kRowBytes, ExpertActivation kAct, int kBytes>
FI_DEVICE void moe_few_tokens(const MoeFewTokensParams& p) {
  using Kernel = MoeFewTokens<W, T, kSlots, kRowBytes, kAct>;
  Kernel{p, dynamic_shared<typename Kernel::Shared, 128, kBytes>()}.run();
}

}  // namespace fi
