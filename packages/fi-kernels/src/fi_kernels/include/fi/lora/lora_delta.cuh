// lora_delta on sm_80 and later: a CTA, or on sm_90 a cluster, takes up to 8 kTiles pairs of one adapter and one expert
// and reads both of their weights once. Weights are the 16 rows of mma.sync, straight from global memory: rank 16 is
// bytes, not products. The pairs of a window of kLoraWindow are grouped by ballots, so nothing is sorted before.
#pragma once
#include "fi/cuda/pack.cuh"
#include "fi/cuda/ptx/cluster_sm90.cuh"
#include "fi/cuda/ptx/mma_sm80.cuh"
#include "fi/cuda/ptx/movmatrix.cuh"
#include "fi/cuda/vec.cuh"
#include "fi/lora/lora_delta.h"

namespace fi {

constexpr int kLoraWarps = 8, kLoraThreads = 32 * kLoraWarps, kLoraWindow = 2 * kLoraThreads;
constexpr int kLoraRankRows = 32;  // of `a` that a pass over x multiplies
constexpr int kLoraStep = 32;      // values of k of a lane's 16 bytes, in four lanes
constexpr int kLoraLine = 64;      // values of a line of L2

// T: of the weights.
template <class T, class X, class Out, LoraStage kStage, int kTiles>
struct LoraDelta {
  static constexpr int kRows = 8 * kTiles, kPartialPitch = kRows + 1;
  static constexpr int kUnroll = kTiles == 2 ? 2 : 1;      // steps of k that a warp loads at once
  static constexpr int kColumnTiles = kTiles > 2 ? 1 : 2;  // and tiles of 16 columns

  struct Shared {
    int keys[kLoraWindow];
    unsigned same[2][kLoraWindow / 32];  // pairs with the key of a candidate
    int pairs[kRows];
  };

  const LoraDeltaParams& p;
  Shared& s;
  const int warp = static_cast<int>(threadIdx.x) / 32, row = static_cast<int>(threadIdx.x) % 32 / 4,
            column = static_cast<int>(threadIdx.x) % 4;  // of a fragment
  int count = 0, key = 0;                                // of the pairs at hand

  // The CTA in its cluster; what is cheap to make again takes no registers.
  FI_DEVICE static unsigned cta() {
#if __CUDA_ARCH__ >= 900
    return cluster_rank();
#else
    return 0;
#endif
  }
  FI_DEVICE static unsigned ctas() {
#if __CUDA_ARCH__ >= 900
    return cluster_size();
#else
    return 1;
#endif
  }
  FI_DEVICE int part() const { return static_cast<int>(cta()) * kLoraWarps + warp; }
  FI_DEVICE static int parts() { return static_cast<int>(ctas()) * kLoraWarps; }
  FI_DEVICE int ranks() const { return p.slice_count * p.rank; }
  FI_DEVICE int pitch() const { return ranks() + 4; }  // of a row of sums
  FI_DEVICE static float* sums() {                     // [kRows, pitch], of this CTA
    extern __shared__ uint4 bytes[];
    return reinterpret_cast<float*>(bytes);
  }
  FI_DEVICE float* total() const { return sums() + (ctas() > 1 ? kRows * pitch() : 0); }  // the same of the cluster
  FI_DEVICE float* partial() const { return total() + kRows * pitch(); }  // [warps, kLoraRankRows, kPartialPitch]
  FI_DEVICE int adapter() const { return key >> 16; }
  FI_DEVICE int expert() const { return key & 0xffff; }

  FI_DEVICE void run() {
    const int groups = p.groups, cluster = static_cast<int>(blockIdx.x / ctas());
    const int window = cluster / groups, first = window * kLoraWindow, own = cluster - window * groups;
    const int here = min(kLoraWindow, p.pairs.count - first);
    pdl_wait();
    pdl_launch_dependents();  // who reads what this kernel writes waits for its end
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = h * kLoraThreads + static_cast<int>(threadIdx.x);
      s.keys[at] = at < here ? p.pairs.key_of(first + at) : LoraPairs::kNoPair;
    }
    __syncthreads();
    int turn = 0;
#pragma unroll 1
    for (int candidate = own; candidate < here; candidate += groups) {
      key = s.keys[candidate];
      if (key < 0) {
        if (p.fills(key)) fill_row(first + candidate);
        continue;
      }
      turn ^= 1;
      if (!collect(first, candidate, s.same[turn])) continue;
      compute();
    }
  }

 private:
  // The pairs of a candidate, if it is the first of a tile of its key. By all threads.
  FI_DEVICE bool collect(int first, int candidate, unsigned* same) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const unsigned lanes = __ballot_sync(0xffffffffu, s.keys[h * kLoraThreads + threadIdx.x] == key);
      if (threadIdx.x % 32 == 0) same[h * kLoraWarps + warp] = lanes;
    }
    __syncthreads();
    const auto before = [&](int at) {
      int sum = 0;
#pragma unroll
      for (int w = 0; w < kLoraWindow / 32; ++w) {
        const unsigned below = w < at / 32 ? 0xffffffffu : w == at / 32 ? (1u << at % 32) - 1 : 0u;
        sum += __popc(same[w] & below);
      }
      return sum;
    };
    const int earlier = before(candidate);
    if (earlier % kRows != 0) return false;
    count = min(kRows, before(kLoraWindow) - earlier);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = h * kLoraThreads + static_cast<int>(threadIdx.x);
      if (s.keys[at] != key || at < candidate) continue;
      const int place = before(at) - earlier;
      if (place < kRows) s.pairs[place] = first + at;
    }
    __syncthreads();
    return true;
  }

  FI_DEVICE void compute() {
    prefetch();
    if constexpr (kStage == kLoraExpand) {
      load_sums();
      __syncthreads();
    } else {
      shrink();
      if (ctas() > 1) {
        add_sums();
      } else {
        __syncthreads();
      }
    }
    if constexpr (kStage == kLoraShrink) {
      store_sums();
    } else {
      expand();
    }
    __syncthreads();  // pairs and sums may be written again
  }

  FI_DEVICE const T* weights_of(const LoraWeights& w) const {
    const T* first = w.table ? reinterpret_cast<const T*>(w.table[expert()])
                             : static_cast<const T*>(w.first) + expert() * w.expert_stride;
    return first + adapter() * w.lora_stride;
  }
  // All weights of this CTA at once: registers hold too few of them for the latency of memory.
  FI_DEVICE void prefetch() const {
#pragma unroll 1
    for (int slice = 0; slice < p.slice_count; ++slice) {
      const LoraSlice& own = p.slices[slice];
      if constexpr (kStage != kLoraExpand) {
        const int steps = (p.in + kLoraStep - 1) / kLoraStep, first = part() - warp;
        const int begin = steps * first / parts() * kLoraStep;
        const int count = min(steps * (first + kLoraWarps) / parts() * kLoraStep, p.in) - begin;
        const int lines = (count + kLoraLine - 1) / kLoraLine;
        const T* a = weights_of(own.a) + begin;
#pragma unroll 1
        for (int i = static_cast<int>(threadIdx.x); i < lines * p.rank; i += kLoraThreads)
          prefetch_l2(a + i / lines * own.a.row_stride + i % lines * kLoraLine);
      }
      if constexpr (kStage != kLoraShrink) {
        const int tiles = (own.columns + 15) / 16, first = part() - warp;
        const int begin = tiles * first / parts() * 16;
        const int count = min(tiles * (first + kLoraWarps) / parts() * 16, own.columns) - begin;
        const T* b = weights_of(own.b) + begin * own.b.row_stride;
#pragma unroll 1
        for (int i = static_cast<int>(threadIdx.x) * kLoraLine; i < count * static_cast<int>(own.b.row_stride);
             i += kLoraThreads * kLoraLine)
          prefetch_l2(b + i);
      }
    }
  }
  FI_DEVICE static uint4 load_if(bool exists, const void* from) {
    return exists ? __ldg(static_cast<const uint4*>(from)) : make_uint4(0, 0, 0, 0);
  }
  // 16 rows times 32 k: a lane has 8 values of k of rows `row` and `row + 8`; the order of k is that of its bytes in
  // both operands.
  FI_DEVICE static void multiply(float (&d)[4], const uint4& low, const uint4& high, const uint4& b) {
    mma_m16n8k16(d, {low.x, high.x, low.y, high.y}, b.x, b.y, T());
    mma_m16n8k16(d, {low.z, high.z, low.w, high.w}, b.z, b.w, T());
  }

  // sums()[pair, slice and rank]: each warp of the cluster has a part of k; the warps of this CTA are added in order.
  FI_DEVICE void shrink() {
    const int steps = (p.in + kLoraStep - 1) / kLoraStep, groups = p.rank / 8, all = p.slice_count * groups;
    const int begin = steps * part() / parts(), end = steps * (part() + 1) / parts();
    const uint4* x = static_cast<const uint4*>(p.x) + column;
    int from[kTiles];  // vectors of 16 bytes; -1: no pair
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int at = n * 8 + row;
      from[n] = -1;
      if (at < count) {
        const int pair = s.pairs[at];
        from[n] = static_cast<int>((p.per_pair ? pair : p.pairs.token_of(pair)) * (p.x_row_stride / 8));
      }
    }
#pragma unroll 1
    for (int group = 0; group < all; group += 4) {
      const T* a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[i] = nullptr;
        if (group + i < all) {
          const int slice = (group + i) / groups, of_slice = (group + i) % groups;
          const LoraWeights& w = p.slices[slice].a;
          a[i] = weights_of(w) + (of_slice * 8 + row) * w.row_stride + column * 8;
        }
      }
      float d[2][kTiles][4] = {};
#pragma unroll 1
      for (int step = begin; step < end; step += kUnroll) {
        uint4 w[kUnroll][4], b[kUnroll][kTiles];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const int k = (step + u) * kLoraStep;
          const bool in = step + u < end && k + column * 8 < p.in;
#pragma unroll
          for (int i = 0; i < 4; ++i) w[u][i] = load_if(in && a[i], a[i] + k);
#pragma unroll
          for (int n = 0; n < kTiles; ++n) b[u][n] = load_if(in && from[n] >= 0, x + from[n] + k / 8);
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u)
#pragma unroll
          for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int n = 0; n < kTiles; ++n) multiply(d[i][n], w[u][2 * i], w[u][2 * i + 1], b[u][n]);
      }
      if (group > 0) __syncthreads();  // the partial sums of the group before are read
      float* to = partial() + warp * kLoraRankRows * kPartialPitch;
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
          for (int j = 0; j < 4; ++j)
            to[(i * 16 + j / 2 * 8 + row) * kPartialPitch + n * 8 + column * 2 + j % 2] = d[i][n][j];
      __syncthreads();
      const int ranks = min(kLoraRankRows, (all - group) * 8);
#pragma unroll 1
      for (int i = static_cast<int>(threadIdx.x); i < kLoraRankRows * count; i += kLoraThreads) {
        const int rank = i % kLoraRankRows, pair = i / kLoraRankRows;
        if (rank >= ranks) continue;
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < kLoraWarps; ++w) sum += partial()[(w * kLoraRankRows + rank) * kPartialPitch + pair];
        sums()[pair * pitch() + group * 8 + rank] = sum;
      }
    }
  }
  // The sums of the CTAs of the cluster, in order.
  FI_DEVICE void add_sums() const {
#if __CUDA_ARCH__ >= 900
    cluster_sync();
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < count * ranks(); i += kLoraThreads) {
      const int at = i / ranks() * pitch() + i % ranks();
      float sum = 0.f;
      for (unsigned c = 0; c < ctas(); ++c) sum += __uint_as_float(cluster_load_u32(cluster_address(sums() + at, c)));
      total()[at] = sum;
    }
    cluster_sync();
#endif
  }
  FI_DEVICE void load_sums() const {
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < count * ranks(); i += kLoraThreads) {
      const int pair = i / ranks(), at = i % ranks(), slice = at / p.rank;
      total()[pair * pitch() + at] = to_float(
          static_cast<const X*>(p.x)[slice * p.x_slice_stride + s.pairs[pair] * p.x_row_stride + at - slice * p.rank]);
    }
  }
  FI_DEVICE void store_sums() const {
    const float scale = p.scale_of(adapter());
#pragma unroll 1
    for (int i = static_cast<int>(cta() * kLoraThreads + threadIdx.x); i < count * ranks();
         i += static_cast<int>(ctas()) * kLoraThreads) {
      const int pair = i / ranks(), at = i % ranks(), slice = at / p.rank;
      Out& to =
          static_cast<Out*>(p.out)[slice * p.out_slice_stride + s.pairs[pair] * p.out_row_stride + at - slice * p.rank];
      const float sum = scale * total()[pair * pitch() + at];
      to = from_float<Out>(p.add ? to_float(to) + sum : sum);
    }
  }

  // A warp takes tiles of 16 columns, a few at a time.
  FI_DEVICE void expand() const {
#pragma unroll 1
    for (int slice = 0; slice < p.slice_count; ++slice) {
      const LoraSlice& own = p.slices[slice];
      const T* b = weights_of(own.b);
      const int tiles = (own.columns + 15) / 16, begin = tiles * part() / parts(), end = tiles * (part() + 1) / parts();
#pragma unroll 1
      for (int tile = begin; tile < end; tile += kColumnTiles) expand_tiles(own, slice, b, tile, end);
    }
  }
  FI_DEVICE void expand_tiles(const LoraSlice& own, int slice, const T* b, int tile, int end) const {
    const int stride = static_cast<int>(own.b.row_stride);
    float d[kColumnTiles][kTiles][4] = {};
#pragma unroll 1
    for (int k = column * 8; k - column * 8 < p.rank; k += kLoraStep) {
      uint4 w[kColumnTiles][2], h[kTiles];
#pragma unroll
      for (int c = 0; c < kColumnTiles; ++c)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int of = (tile + c) * 16 + i * 8 + row;
          w[c][i] = load_if(tile + c < end && k < p.rank && of < own.columns, b + of * stride + k);
        }
#pragma unroll
      for (int n = 0; n < kTiles; ++n) h[n] = rank_values(n * 8 + row, slice, k);
#pragma unroll
      for (int c = 0; c < kColumnTiles; ++c)
#pragma unroll
        for (int n = 0; n < kTiles; ++n) multiply(d[c][n], w[c][0], w[c][1], h[n]);
    }
    const int64_t begin = p.begin_of(slice);
    const float scale = p.scale_of(adapter());
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c) {
      if (tile + c >= end) break;
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int of = (tile + c) * 16 + i * 8;
          if (of < own.columns && n * 8 < count)
            store_block(begin + of, n * 8, scale * d[c][n][2 * i], scale * d[c][n][2 * i + 1]);
        }
    }
  }
  // Eight sums of a pair, rounded as the weights are.
  FI_DEVICE uint4 rank_values(int pair, int slice, int k) const {
    if (pair >= count || k >= p.rank) return make_uint4(0, 0, 0, 0);
    const float4* from = reinterpret_cast<const float4*>(total() + pair * pitch() + slice * p.rank + k);
    const float4 x = from[0], y = from[1];
    return {pack_pair(x.x, x.y, T()), pack_pair(x.z, x.w, T()), pack_pair(y.x, y.y, T()), pack_pair(y.z, y.w, T())};
  }
  // 8 columns of 8 pairs: a lane gives column `row` of pairs 2 `column` and the next.
  FI_DEVICE void store_block(int64_t first, int pair, float x, float y) const {
    Out* out = static_cast<Out*>(p.out);
    if constexpr (sizeof(Out) == 2) {
      const unsigned both = movmatrix_trans(pack_pair(x, y, Out()));  // of pair `row`
      if (pair + row >= count) return;
      unsigned* to = reinterpret_cast<unsigned*>(out + s.pairs[pair + row] * p.out_row_stride + first + column * 2);
      *to = p.add ? added(*to, both) : both;
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int own = pair + column * 2 + i;
        if (own >= count) continue;
        Out& to = out[s.pairs[own] * p.out_row_stride + first + row];
        to = p.add ? to + (i ? y : x) : (i ? y : x);
      }
    }
  }
  FI_DEVICE static unsigned added(unsigned x, unsigned y) {
    const Out *a = reinterpret_cast<const Out*>(&x), *b = reinterpret_cast<const Out*>(&y);
    return pack_pair(to_float(a[0]) + to_float(b[0]), to_float(a[1]) + to_float(b[1]), Out());
  }

  FI_DEVICE void fill_row(int pair) const {
    const int columns = kStage == kLoraShrink ? ranks() : p.columns;
#pragma unroll 1
    for (int i = static_cast<int>(cta() * kLoraThreads + threadIdx.x); i < columns;
         i += static_cast<int>(ctas()) * kLoraThreads) {
      const int slice = kStage == kLoraShrink ? i / p.rank : 0;
      static_cast<Out*>(p.out)[slice * p.out_slice_stride + pair * p.out_row_stride + i - slice * p.rank] =
          from_float<Out>(-0.f);
    }
  }
};

template <class T, class X, class Out, LoraStage kStage, int kTiles>
FI_DEVICE void lora_delta(const LoraDeltaParams& p) {
  using Kernel = LoraDelta<T, X, Out, kStage, kTiles>;
  __shared__ typename Kernel::Shared shared;
  Kernel{p, shared}.run();
}

}  // namespace fi
