// The epilogue of the GEMM kernels for few tokens: sums partial tiles over a cluster, then scales, adds bias and stores
// from registers.
#pragma once
#include "fi/cuda/convert.cuh"
#include "fi/cuda/pack.cuh"
#include "fi/cuda/ptx/cluster_sm90.cuh"
#include "fi/cuda/ptx/mbarrier_sm90.cuh"
#include "fi/cuda/ptx/movmatrix.cuh"
#include "fi/cuda/warp_roles_sm90.cuh"
#include "fi/gemm/work_tiles.cuh"

namespace fi {

// A tile has kTokens rows of a and kRows rows of b. Warps hold it as fragments: eight rows of b (a block) by eight
// tokens (a group), lane l with row l / 4 and tokens 2 (l % 4) and the next, as mma and wgmma leave them.
// kRowScales: a_scale and b_scale are multiplied here. kSplits: a cluster may split k.
template <class Out, int kTokens, int kRows, bool kRowScales, bool kSplits>
struct SmallMOutput {
  static constexpr int kGroups = kTokens / 8, kFragments = kRows / 8 * kGroups;
  using Fragment = float2[32];

  // Of a row of b.
  struct Factors {
    float scale, bias;
  };
  struct Shared {
    // [CTA of the cluster][own fragment]. Each CTA owns as many of a tile; what is left over fills the last one.
    alignas(16) Fragment partial[kSplits ? kFragments + kGemmSmallMSplits - 1 : 1];
    Factors rows[kSplits ? kRows : 1];
    alignas(8) float tokens[kSplits ? kTokens : 2];
    Barrier partial_full;
  };

  const GemmSm90Params& p;
  Shared& shared;
  int splits, rank;

  // Of row `row` of b of the tile.
  FI_DEVICE Factors row_factors(const GemmTile& tile, int row) const {
    const GemmProblem& q = p.problem;
    const int n = min(tile.column + row, q.n - 1);
    Factors f{1.f, 0.f};
    if (kRowScales && q.b_scale) f.scale = q.b_scale[tile.b_batch * q.b_scale_batch_stride + n * q.b_scale_row_stride];
    if (q.bias) f.bias = to_float(static_cast<const Out*>(q.bias)[n]);
    return f;
  }
  FI_DEVICE float token_factor(const GemmTile& tile, int token) const {
    const GemmProblem& q = p.problem;
    if (!kRowScales || !q.a_scale) return 1.f;
    const int row = tile.row + min(token, max(tile.rows, 1) - 1);
    return q.a_scale[tile.a_batch * q.a_scale_batch_stride + row * q.a_scale_row_stride];
  }

  // Whether pairs of out are aligned and exist or not together.
  FI_DEVICE bool stores_pairs() const { return p.whole_rows && p.problem.n % 2 == 0; }

  // By a warp: where its lane stores the first element of a fragment.
  FI_DEVICE Out* place(const GemmTile& tile, int block, int group) const {
    const GemmProblem& q = p.problem;
    const int lane = threadIdx.x % 32, by_token = lane / 4, in_pair = lane % 4 * 2;
    const bool transposed = sizeof(Out) == 2;
    return static_cast<Out*>(q.out) + tile.a_batch * q.out_batch_stride +
           (tile.row + group * 8 + (transposed ? by_token : in_pair)) * q.out_row_stride + tile.column + block * 8 +
           (transposed ? in_pair : by_token);
  }
  // By a warp: stores a fragment to `place`. kPairs: stores_pairs.
  template <bool kPairs>
  FI_DEVICE void store(Out* out, const GemmTile& tile, int block, int group, float2 d, Factors f,
                       float2 of_tokens) const {
    const GemmProblem& q = p.problem;
    const int lane = threadIdx.x % 32;
    d = {d.x * (f.scale * of_tokens.x) + f.bias, d.y * (f.scale * of_tokens.y) + f.bias};
    if constexpr (sizeof(Out) == 2) {
      const unsigned pair = movmatrix_trans(pack_pair(d.x, d.y, Out()));
      const int n = tile.column + block * 8 + lane % 4 * 2;
      const bool exists = group * 8 + lane / 4 < tile.rows && n < q.n;
      if constexpr (kPairs) {
        if (exists) *reinterpret_cast<unsigned*>(out) = pair;
      } else {
        const Out* x = reinterpret_cast<const Out*>(&pair);
        if (exists) out[0] = x[0];
        if (exists && n + 1 < q.n) out[1] = x[1];
      }
    } else {
      const int token = group * 8 + lane % 4 * 2;
      const bool exists = tile.column + block * 8 + lane / 4 < q.n;
      if (exists && token < tile.rows) out[0] = d.x;
      if (exists && token + 1 < tile.rows) out[q.out_row_stride] = d.y;
    }
  }
  // By a warp: its two blocks. sum: [group][block][token of a pair]; tokens: lane l has the factors of tokens l, l
  // + 32.
  template <bool kPairs>
  FI_DEVICE void store_blocks(const GemmTile& tile, int block, int groups, const float (&sum)[kGroups * 4],
                              const Factors (&rows)[2], const float (&tokens)[(kTokens + 31) / 32]) const {
    Out* out = place(tile, block, 0);
#pragma unroll
    for (int g = 0; g < kGroups; ++g, out += 8 * p.problem.out_row_stride) {
      if (g >= groups) break;
      float2 of_tokens{1.f, 1.f};
      if constexpr (kRowScales) {
        const int lane = g % 4 * 8 + threadIdx.x % 4 * 2;
        of_tokens = {__shfl_sync(0xffffffffu, tokens[g / 4], lane), __shfl_sync(0xffffffffu, tokens[g / 4], lane + 1)};
      }
#pragma unroll
      for (int h = 0; h < 2; ++h)
        store<kPairs>(out + h * 8, tile, block + h, g, {sum[g * 4 + h * 2], sum[g * 4 + h * 2 + 1]}, rows[h],
                      of_tokens);
    }
  }

  // Fragment number block * groups + group belongs to CTA number / own of the cluster.
  FI_DEVICE int own_fragments(int groups) const { return (kRows / 8 * groups + splits - 1) / splits; }

  // By a warp: sends the fragments of two blocks, which lie in `staged`, to the CTAs of the cluster that own them,
  // where they complete as bytes on the barrier. The barriers of the cluster are ready before. NOTE: one bulk copy a
  // CTA takes 1.3 us less (H200, 64 x 2112 x 7168), but memcheck takes its remote address for one out of bounds.
  FI_DEVICE void send(const Fragment* staged, int block, int groups) const {
    constexpr int kVectors = sizeof(Fragment) / sizeof(float4);
    __syncwarp();
    const int own = own_fragments(groups);
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < 2 * groups * kVectors; i += 32) {
      const int at = block * groups + i / kVectors, owner = at / own, element = i % kVectors * 2;
      const Fragment& to = shared.partial[rank * own + at - owner * own];
      cluster_send_f32x4(cluster_address(&to[element], owner), *reinterpret_cast<const float4*>(&staged[at][element]),
                         cluster_address(&shared.partial_full, owner));
    }
  }
  FI_DEVICE void expect(int groups) const {
    const int own = own_fragments(groups), here = max(0, min(own, kRows / 8 * groups - rank * own));
    shared.partial_full.arrive_expect(splits * here * static_cast<int>(sizeof(Fragment)));
  }

  // Adds the fragments of this CTA in the order of ranks and stores the sums; by warp `warp` of kWarps. The loop is not
  // unrolled: its code is not in the instruction cache, and 64 tokens took 2 us to fetch it.
  template <int kWarps>
  FI_DEVICE void store_sums(const GemmTile& tile, int groups, int warp) const {
    const int own = own_fragments(groups), end = min(own, kRows / 8 * groups - rank * own), lane = threadIdx.x % 32;
    int block = (rank * own + warp) / groups, group = rank * own + warp - block * groups;
    const bool pairs = stores_pairs();
    shared.partial_full.wait(0);  // by all warps: shared memory ends with the CTA
#pragma unroll 1
    for (int at = warp; at < end; at += kWarps) {
      float2 d{0, 0};
#pragma unroll 1
      for (int cta = 0; cta < splits; cta += 4) {
        float2 x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = cta + i < splits ? shared.partial[(cta + i) * own + at][lane] : float2{0, 0};
#pragma unroll
        for (int i = 0; i < 4; ++i) d = {d.x + x[i].x, d.y + x[i].y};
      }
      const Factors rows = shared.rows[block * 8 + lane / 4];
      const float2 of_tokens = *reinterpret_cast<const float2*>(&shared.tokens[group * 8 + lane % 4 * 2]);
      Out* out = place(tile, block, group);
      if (pairs)
        store<true>(out, tile, block, group, d, rows, of_tokens);
      else
        store<false>(out, tile, block, group, d, rows, of_tokens);
      for (group += kWarps; group >= groups; group -= groups) ++block;
    }
  }
};

}  // namespace fi
