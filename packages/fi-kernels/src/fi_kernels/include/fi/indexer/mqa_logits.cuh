// mqa_logits on sm_80 and later: 64 columns (queries times heads) by 64 keys of a CTA, mma.sync on halves, to which
// e4m3 converts exactly. A lane takes a quarter of each row of keys and queries: any order of columns gives the same
// sums.
#pragma once
#include "fi/cuda/ptx/fp8.cuh"
#include "fi/cuda/ptx/mma_sm80.cuh"
#include "fi/indexer/mqa_logits_rows.cuh"

namespace fi {

template <int kHeads, int kDim, bool kPaged>
struct MqaLogitsMmaKernel {
  static constexpr int kRows = 64 / kHeads, kTiles = 8, kSteps = kDim / 16, kKeys = 64, kWarps = 4;
  using E4m3 = __nv_fp8_e4m3;
  using Rows = MqaLogitsRows<kHeads, kRows>;
  struct Shared {
    uint2 q[kTiles][kSteps][32];
  };
  // The keys that a row of the CTA sees are those before `last`.
  struct Keys {
    const MqaLogitsParams& p;
    int request, last;

    FI_DEVICE const char* page_of(int key) const {
      const int page = p.block_table[request * p.table_stride + key / p.page_size];
      return static_cast<const char*>(p.keys) + page * p.page_stride;
    }
    // Null beyond the last key.
    FI_DEVICE const char* values_of(int key) const {
      if (key >= last) return nullptr;
      if constexpr (kPaged) return page_of(key) + key % p.page_size * kDim;
      return static_cast<const char*>(p.keys) + static_cast<int64_t>(key) * kDim;
    }
    FI_DEVICE float scale_of(int key) const {
      if (key >= last) return 0.f;
      if constexpr (kPaged)
        return reinterpret_cast<const float*>(page_of(key) +
                                              static_cast<int64_t>(p.page_size) * kDim)[key % p.page_size];
      return p.scales[key];
    }
  };

  const MqaLogitsParams& p;
  Shared& shared;

  FI_DEVICE void run() const {
    pdl_wait();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row0 = p.first_row(blockIdx.x, kRows);
    load_queries(row0, lane, warp);
    const int last_row = p.last_row(row0, kRows);
    const Rows rows(p, row0, last_row, lane);
    const MqaLogitsWindow<kRows, kPaged> window(p, row0, last_row);
    const Keys keys{p, kPaged ? row0 / p.next_n : 0, window.end};
    __syncthreads();
    const int end = p.clean ? p.columns : keys.last;
    for (int i = 0; i < p.chunk_tiles; ++i) {
      const int first = (blockIdx.y * p.chunk_tiles + i) * kKeys, key = first + warp * 16;
      if (first >= end) break;
      if (first >= window.end || first + kKeys <= window.begin) {
        rows.clear(key, lane);
        continue;
      }
      float d[kTiles * 4];
      multiply(d, keys, key, lane);
      rows.store(p, d, key, lane, [&](int own) { return keys.scale_of(own); }, [](int, float) {});
    }
    pdl_launch_dependents();
  }

 private:
  FI_DEVICE void load_queries(int row0, int lane, int warp) const {
    for (int tile = warp; tile < kTiles; tile += kWarps) {
      const int column = tile * 8 + lane / 4;
      const bool exists = row0 + column / kHeads < p.rows;
      const char* row = static_cast<const char*>(p.q) + (static_cast<int64_t>(row0) * kHeads + column) * kDim;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const unsigned quad = exists ? reinterpret_cast<const unsigned*>(row + lane % 4 * (kDim / 4))[s] : 0;
        shared.q[tile][s][lane] = {halves(quad, E4m3()), upper_halves(quad, E4m3())};
      }
    }
  }

  // d = keys q^T: 16 keys of the warp by 64 columns.
  FI_DEVICE void multiply(float (&d)[kTiles * 4], const Keys& keys, int key, int lane) const {
#pragma unroll
    for (float& x : d) x = 0.f;
    const char *low = keys.values_of(key + lane / 4), *high = keys.values_of(key + lane / 4 + 8);
    unsigned quads[kSteps][2];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int at = lane % 4 * (kDim / 4) + s * 4;
      quads[s][0] = low ? *reinterpret_cast<const unsigned*>(low + at) : 0;
      quads[s][1] = high ? *reinterpret_cast<const unsigned*>(high + at) : 0;
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const unsigned a[4] = {halves(quads[s][0], E4m3()), halves(quads[s][1], E4m3()),
                             upper_halves(quads[s][0], E4m3()), upper_halves(quads[s][1], E4m3())};
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const uint2 q = shared.q[tile][s][lane];
        mma_m16n8k16(reinterpret_cast<float (&)[4]>(d[tile * 4]), a, q.x, q.y, __half());
      }
    }
  }
};

template <int kHeads, int kDim, bool kPaged>
FI_DEVICE void mqa_logits(const MqaLogitsParams& p) {
  using Kernel = MqaLogitsMmaKernel<kHeads, kDim, kPaged>;
  __shared__ typename Kernel::Shared shared;
  Kernel{p, shared}.run();
}

}  // namespace fi
