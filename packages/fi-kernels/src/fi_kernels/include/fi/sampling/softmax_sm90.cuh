// Computes softmax on sm_90 in one read: each cluster keeps its row on chip, as ratios to the maximum of each tile.
#pragma once
#include "fi/cuda/ptx/bulk_sm90.cuh"
#include "fi/cuda/ptx/math.cuh"
#include "fi/cuda/vec.cuh"
#include "fi/sampling/cluster_sm90.cuh"

namespace fi {
namespace sampling {

// The exponential sum of a tile, known to all CTAs of the cluster. Floats are added in a fixed order.
struct alignas(8) TileExpSum {
  float sum;
  uint32_t max_key;  // ordered bits of the tile maximum; 0 if the tile has no number
};

template <class T>
struct SoftmaxRow {
  static constexpr int kVec = 16 / sizeof(T), kPerLane = kTileSize / 32;  // elements of a tile per lane
  const T* row;
  float* out;
  int vocab;
  float factor;

  // Offset in the tile of the lane's i-th vector.
  FI_DEVICE static int offset_of(int i) { return (i * 32 + threadIdx.x % 32) * kVec; }
  // How many elements of a tile a bulk copy can bring: whole vectors of an aligned row.
  FI_DEVICE int bulk_count(int begin) const {
    return reinterpret_cast<uint64_t>(row) % 16 ? 0 : min(kTileSize, (vocab - begin) / kVec * kVec);
  }
  // Loads a tile through `fetch(offset)`, from global memory or from the bulk copy in shared memory; NaN past the end
  // of the row.
  template <class Fetch>
  FI_DEVICE void load(int begin, float (&x)[kPerLane], Fetch&& fetch) const {
    const int bulk = bulk_count(begin);
    const auto convert = [&](int i, const uint4& words) {
      Vec<T, kVec> values;
      float wide[kVec];
      memcpy(&values, &words, sizeof values);
      to_float(values, wide);
#pragma unroll
      for (int k = 0; k < kVec; ++k) x[i * kVec + k] = wide[k];
    };
    if (bulk == kTileSize) {
      uint4 words[kPerLane / kVec];
#pragma unroll
      for (int i = 0; i < kPerLane / kVec; ++i) words[i] = fetch(offset_of(i));
#pragma unroll
      for (int i = 0; i < kPerLane / kVec; ++i) convert(i, words[i]);
      return;
    }
#pragma unroll
    for (int i = 0; i < kPerLane / kVec; ++i) {
      const int at = begin + offset_of(i);
      if (offset_of(i) < bulk) {
        convert(i, fetch(offset_of(i)));
      } else {
#pragma unroll
        for (int k = 0; k < kVec; ++k)
          x[i * kVec + k] = at + k < vocab ? to_float(row[at + k]) : __int_as_float(0x7fffffff);
      }
    }
  }
  FI_DEVICE static uint32_t max_key(const float (&x)[kPerLane]) {
    float largest = x[0];
#pragma unroll
    for (int i = 1; i < kPerLane; ++i) largest = fmaxf(largest, x[i]);
    return __reduce_max_sync(0xffffffffu, largest >= -__uint_as_float(kMaxFiniteBits) ? key_of(largest) : 0u);
  }
  // Replaces elements by exp(x - max) of the tile, about 0 below 2^-126; NaN stays. Returns their sum.
  FI_DEVICE float exponentiate(float (&x)[kPerLane], uint32_t key) const {
    constexpr float aligner = 0x1p23f;  // its last bit is worth one
    const float largest = value_of(key);
    float sum = 0.f;
    if (key == 0 || key == kInfinityKey) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const float ratio = key != 0 && x[i] == largest;
        sum += ratio;
        x[i] = x[i] != x[i] ? x[i] : ratio;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const float distance = add_rn(largest, -x[i]);
        const float aligned = fminf(fma_rn(distance, factor, aligner), aligner + 126.f);  // not NaN
        const float f = fma_rn(-distance, factor, add_rn(aligned, -aligner));             // NaN of NaN, -inf of -inf
        x[i] = mul_rn(exp2_approx(f), from_bits(0x3f800000u - (bits_of(aligned) << 23)));
        sum += fmaxf(x[i], 0.f);  // NaN adds 0
      }
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    return sum;
  }
  FI_DEVICE void write(int begin, const float (&y)[kPerLane], float scale) const {
    const bool aligned = reinterpret_cast<uint64_t>(out) % 16 == 0;
#pragma unroll
    for (int i = 0; i < kPerLane; i += 4) {
      const int token = begin + offset_of(i / kVec) + i % kVec;
      float z[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float product = mul_rn(y[i + k], scale);
        z[k] = product > 1.f ? 1.f : product;
      }
      if (aligned && token + 4 <= vocab) {
        store_global(out + token, make_uint4(bits_of(z[0]), bits_of(z[1]), bits_of(z[2]), bits_of(z[3])));
      } else {
#pragma unroll
        for (int k = 0; k < 4; ++k)
          if (token + k < vocab) out[token + k] = z[k];
      }
    }
  }
};

}  // namespace sampling

// Computes one row per cluster. A warp keeps the ratios of its first tile in registers and of p.warp_cached more in
// shared memory, to which bulk copies bring them all at once.
template <class T, int kThreads, int kMaxCached>
FI_DEVICE void softmax_cluster(const SampleParams& p) {
  using namespace sampling;
  constexpr int kWarps = kThreads / 32;
  using Row = SoftmaxRow<T>;
  extern __shared__ uint4 dynamic[];
  __shared__ Barrier arrived[kWarps][kMaxCached];
  __shared__ CtaCluster::TransactionBarrier tile_barrier;
  __shared__ uint64_t warp_sums[kWarps];
  const int size = CtaCluster::size(), n = (p.vocab + kTileSize - 1) / kTileSize, tiles_per_cta = (n + size - 1) / size;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int cta_first = CtaCluster::rank() * tiles_per_cta, first = cta_first + warp,
            last = min(cta_first + tiles_per_cta, n);
  auto* sums = reinterpret_cast<TileExpSum*>(dynamic);
  float* cached = reinterpret_cast<float*>(dynamic + (n + 1) / 2) + warp * p.warp_cached * kTileSize;
  const int64_t index = blockIdx.x / size;
  if (lane < p.warp_cached) arrived[warp][lane].init(1);
  if (threadIdx.x == 0) tile_barrier.init();
  fence_barrier_init();
  CtaCluster::arrive_relaxed();
  pdl_wait();
  const float temperature = at(p.temperature, index);
  const Row row{static_cast<const T*>(p.input) + index * p.input_stride,
                static_cast<float*>(p.out) + index * p.out_stride,
                // Positive, so that -inf times it is not NaN.
                p.vocab, max_number(logits_scale(0.f, temperature).factor, 0x1p-149f)};
  float y[Row::kPerLane];
  if (first < last) row.load(first * kTileSize, y, [&](int at) { return load_once(row.row + first * kTileSize + at); });
  if (const int j = first + (lane + 1) * kWarps; lane < p.warp_cached && j < last) {
    const unsigned bytes = row.bulk_count(j * kTileSize) * sizeof(T);
    arrived[warp][lane].arrive_expect(bytes);
    if (bytes) bulk_load(cached + lane * kTileSize, row.row + j * kTileSize, bytes, arrived[warp][lane], kEvictFirst);
  }
  CtaCluster::wait();
  if (threadIdx.x == 0) tile_barrier.expect(n * sizeof(uint64_t));
#pragma unroll 1
  for (int i = -1, j = first; j < last; ++i, j += kWarps) {
    float* tile = cached + i * kTileSize;
    float x[Row::kPerLane];
    if (i >= 0) {
      arrived[warp][i].wait(0);
      const T* copy = reinterpret_cast<const T*>(tile);
      row.load(j * kTileSize, x, [&](int at) { return *reinterpret_cast<const uint4*>(copy + at); });
    } else {
#pragma unroll
      for (int k = 0; k < Row::kPerLane; ++k) x[k] = y[k];
    }
    const uint32_t key = row.max_key(x);
    const float sum = row.exponentiate(x, key);
    if (lane < size)
      tile_barrier.send(*reinterpret_cast<uint64_t*>(sums + j), lane, uint64_t{key} << 32 | bits_of(sum));
    __syncwarp();
    if (i >= 0) {
#pragma unroll
      for (int k = 0; k < Row::kPerLane; k += 4)
        reinterpret_cast<float4*>(tile)[k * 8 + lane] = make_float4(x[k], x[k + 1], x[k + 2], x[k + 3]);
    } else {
#pragma unroll
      for (int k = 0; k < Row::kPerLane; ++k) y[k] = x[k];
    }
  }
  tile_barrier.wait();

  uint32_t max_key = 0;
#pragma unroll 4
  for (int j = lane; j < n; j += 32) max_key = max(max_key, sums[j].max_key);
  max_key = __reduce_max_sync(0xffffffffu, max_key);
  const Scale scale{value_of(max_key), row.factor, 0.f};
  const auto tile_factor = [&](int j) {
    const uint32_t key = sums[j].max_key;
    if (max_key == kInfinityKey) return key == max_key ? 1.f : 0.f;
    return key ? logit_ratio(value_of(key), scale) : 0.f;
  };
  uint64_t total = 0;  // in units of 2^-32
#pragma unroll 1
  for (int j = threadIdx.x; j < n; j += kThreads)
    total += __float2ull_rn(mul_rn(mul_rn(sums[j].sum, tile_factor(j)), 0x1p32f));
  total = warp_sum_u64(total);
  if (lane == 0) warp_sums[warp] = total;
  __syncthreads();
  total = warp_sum_u64(lane < kWarps ? warp_sums[lane] : 0);
  pdl_launch_dependents();
  const float inverse = total ? __fdiv_rn(0x1p32f, static_cast<float>(total)) : 0.f;
#pragma unroll 1
  for (int i = -1, j = first; j < last; ++i, j += kWarps) {
    if (i >= 0) {
#pragma unroll
      for (int k = 0; k < Row::kPerLane; k += 4) {
        const float4 values = reinterpret_cast<const float4*>(cached + i * kTileSize)[k * 8 + lane];
        y[k] = values.x, y[k + 1] = values.y, y[k + 2] = values.z, y[k + 3] = values.w;
      }
    }
    row.write(j * kTileSize, y, mul_rn(tile_factor(j), inverse));
  }
}

}  // namespace fi
