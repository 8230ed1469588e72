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
  static constexpr int kGroups = kTokens / 8;
  using Fragment = float2[32];

  struct Shared {
    alignas(16) Fragment partial[kSplits ? kRows / 8 * kGroups : 1];  // [CTA of the cluster][own block][group]
    Barrier partial_full;
  };
  // Of a row of b.
  struct Factors {
    float scale, bias;
  };

  const GemmSm90Params& p;
  Shared& shared;
  int splits, rank;

  FI_DEVICE Factors factors_of(const GemmTile& tile, int block) const {
    const GemmProblem& q = p.problem;
    const int n = min(tile.column + block * 8 + static_cast<int>(threadIdx.x) % 32 / 4, q.n - 1);
    Factors f{1.f, 0.f};
    if (kRowScales && q.b_scale) f.scale = q.b_scale[tile.b_batch * q.b_scale_batch_stride + n * q.b_scale_row_stride];
    if (q.bias) f.bias = to_float(static_cast<const Out*>(q.bias)[n]);
    return f;
  }
  FI_DEVICE float2 token_factors(const GemmTile& tile, int group) const {
    const GemmProblem& q = p.problem;
    if (!kRowScales || !q.a_scale) return {1.f, 1.f};
    const float* from = q.a_scale + tile.a_batch * q.a_scale_batch_stride;
    const int token = tile.row + group * 8 + static_cast<int>(threadIdx.x) % 4 * 2;
    const int last = tile.row + max(tile.rows, 1) - 1;
    return {from[min(token, last) * q.a_scale_row_stride], from[min(token + 1, last) * q.a_scale_row_stride]};
  }

  // By a warp.
  FI_DEVICE void store(const GemmTile& tile, int block, int group, float2 d, Factors f, float2 of_tokens) const {
    const GemmProblem& q = p.problem;
    const int lane = threadIdx.x % 32;
    d = {d.x * (f.scale * of_tokens.x) + f.bias, d.y * (f.scale * of_tokens.y) + f.bias};
    Out* out = static_cast<Out*>(q.out) + tile.a_batch * q.out_batch_stride;
    if constexpr (sizeof(Out) == 2) {
      const unsigned pair = movmatrix_trans(pack_pair(d.x, d.y, Out()));
      const int token = group * 8 + lane / 4, n = tile.column + block * 8 + lane % 4 * 2;
      if (token >= tile.rows) return;
      out += (tile.row + token) * q.out_row_stride + n;
      if (p.whole_rows && n + 1 < q.n) {
        *reinterpret_cast<unsigned*>(out) = pair;
      } else {
        const Out* x = reinterpret_cast<const Out*>(&pair);
        if (n < q.n) out[0] = x[0];
        if (n + 1 < q.n) out[1] = x[1];
      }
    } else {
      const int token = group * 8 + lane % 4 * 2, n = tile.column + block * 8 + lane / 4;
      if (n >= q.n) return;
      out += (tile.row + token) * q.out_row_stride + n;
      if (token < tile.rows) out[0] = d.x;
      if (token + 1 < tile.rows) out[q.out_row_stride] = d.y;
    }
  }

  // Sends a fragment to the CTA of the cluster that owns its rows, where it completes as bytes on the barrier.
  // `barrier_ready` of all CTAs comes before.
  FI_DEVICE void send(int block, int group, float2 d) const {
    const int own = kRows / 8 / splits, owner = block / own;
    Fragment& to = shared.partial[(rank * own + block % own) * kGroups + group];
    cluster_send_f32x2(cluster_address(&to[threadIdx.x % 32], owner), d, cluster_address(&shared.partial_full, owner));
  }
  FI_DEVICE void expect(int groups) const {
    shared.partial_full.arrive_expect(kRows / 8 * groups * static_cast<int>(sizeof(Fragment)));
  }
  // Adds the fragments of this CTA's rows in the order of ranks and stores the sums; by warp `warp` of kWarps.
  template <int kWarps>
  FI_DEVICE void store_sums(const GemmTile& tile, int groups, int warp) const {
    const int own = kRows / 8 / splits;
    for (int i = warp; i < own * groups; i += kWarps) {
      const int row = i / groups, group = i % groups;
      const Factors factors = factors_of(tile, rank * own + row);
      const float2 of_tokens = token_factors(tile, group);
      shared.partial_full.wait(0);
      float2 d{0, 0};
      for (int cta = 0; cta < splits; ++cta) {
        const float2 x = shared.partial[(cta * own + row) * kGroups + group][threadIdx.x % 32];
        d = {d.x + x.x, d.y + x.y};
      }
      store(tile, rank * own + row, group, d, factors, of_tokens);
    }
    shared.partial_full.wait(0);  // shared memory ends with the CTA
  }
};

}  // namespace fi
