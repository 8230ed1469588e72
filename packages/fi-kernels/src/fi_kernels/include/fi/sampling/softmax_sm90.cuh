// softmax on sm_90 in one read of each row, which a cluster keeps as ratios to the largest of each piece.
#pragma once
#include "fi/cuda/ptx/bulk_sm90.cuh"
#include "fi/cuda/ptx/math.cuh"
#include "fi/cuda/vec.cuh"
#include "fi/sampling/team_sm90.cuh"

namespace fi {
namespace sampling {

// What all blocks know of a piece. Sums are of floats, always in the same order.
struct alignas(8) RatioSum {
  float sum;
  uint32_t key;  // of the largest element, ordered; 0 where there is no number
};

template <class T>
struct SoftmaxRow {
  static constexpr int kVec = 16 / sizeof(T), kEach = kPiece / 32;  // elements of a piece for a lane
  const T* row;
  float* out;
  int vocab;
  float factor;

  // Where the i-th vector of a lane begins in its piece.
  FI_DEVICE static int place(int i) { return (i * 32 + threadIdx.x % 32) * kVec; }
  // How many elements of a piece a bulk copy may bring.
  FI_DEVICE int copied(int begin) const {
    return reinterpret_cast<uint64_t>(row) % 16 ? 0 : min(kPiece, (vocab - begin) / kVec * kVec);
  }
  // A piece, from global memory or what a bulk copy brought of it; NaN where the row has ended.
  template <class Fetch>
  FI_DEVICE void load(int begin, float (&x)[kEach], Fetch&& fetch) const {
    const int there = copied(begin);
    const auto widen = [&](int i, const uint4& words) {
      Vec<T, kVec> some;
      float wide[kVec];
      memcpy(&some, &words, sizeof some);
      to_float(some, wide);
#pragma unroll
      for (int k = 0; k < kVec; ++k) x[i * kVec + k] = wide[k];
    };
    if (there == kPiece) {
      uint4 words[kEach / kVec];
#pragma unroll
      for (int i = 0; i < kEach / kVec; ++i) words[i] = fetch(place(i));
#pragma unroll
      for (int i = 0; i < kEach / kVec; ++i) widen(i, words[i]);
      return;
    }
#pragma unroll
    for (int i = 0; i < kEach / kVec; ++i) {
      const int at = begin + place(i);
      if (place(i) < there) {
        widen(i, fetch(place(i)));
      } else {
#pragma unroll
        for (int k = 0; k < kVec; ++k)
          x[i * kVec + k] = at + k < vocab ? to_float(row[at + k]) : __int_as_float(0x7fffffff);
      }
    }
  }
  FI_DEVICE static uint32_t largest(const float (&x)[kEach]) {
    float largest = x[0];
#pragma unroll
    for (int i = 1; i < kEach; ++i) largest = fmaxf(largest, x[i]);
    return __reduce_max_sync(0xffffffffu, largest >= -__uint_as_float(kLargest) ? key_of(largest) : 0u);
  }
  // The ratios of elements to the largest, about 0 below 2^-126; NaN stays. Returns their sum.
  FI_DEVICE float ratios(float (&x)[kEach], uint32_t key) const {
    constexpr float aligner = 0x1p23f;  // its last bit is worth one
    const float largest = value_of(key);
    float sum = 0.f;
    if (key == 0 || key == kInfinityKey) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const float ratio = key != 0 && x[i] == largest;
        sum += ratio;
        x[i] = x[i] != x[i] ? x[i] : ratio;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const float distance = plus(largest, -x[i]);
        const float aligned = fminf(fused(distance, factor, aligner), aligner + 126.f);  // not NaN
        const float f = fused(-distance, factor, plus(aligned, -aligner));               // NaN of NaN, -inf of -inf
        x[i] = times(exp2_approx(f), of_bits(0x3f800000u - (bits_of(aligned) << 23)));
        sum += fmaxf(x[i], 0.f);  // 0 of NaN
      }
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    return sum;
  }
  FI_DEVICE void write(int begin, const float (&y)[kEach], float scale) const {
    const bool aligned = reinterpret_cast<uint64_t>(out) % 16 == 0;
#pragma unroll
    for (int i = 0; i < kEach; i += 4) {
      const int token = begin + place(i / kVec) + i % kVec;
      float z[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float product = times(y[i + k], scale);
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

// One cluster a row. A warp keeps the ratios of its first piece in registers, of p.held more in shared memory, where
// bulk copies bring all of them at once.
template <class T, int kThreads, int kHeld>
FI_DEVICE void softmax_cluster(const SampleParams& p) {
  using namespace sampling;
  constexpr int kWarps = kThreads / 32;
  using Row = SoftmaxRow<T>;
  extern __shared__ uint4 dynamic[];
  __shared__ Barrier arrived[kWarps][kHeld];
  __shared__ Cluster::Gathering gathering;
  __shared__ uint64_t parts[kWarps];
  const int size = Cluster::size(), n = (p.vocab + kPiece - 1) / kPiece, share = (n + size - 1) / size;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int block_first = Cluster::rank() * share, first = block_first + warp, last = min(block_first + share, n);
  auto* sums = reinterpret_cast<RatioSum*>(dynamic);
  float* held = reinterpret_cast<float*>(dynamic + (n + 1) / 2) + warp * p.held * kPiece;
  const int64_t index = blockIdx.x / size;
  if (lane < p.held) arrived[warp][lane].init(1);
  if (threadIdx.x == 0) gathering.begin(n * sizeof(uint64_t));
  fence_barrier_init();
  Cluster::appear();
  pdl_wait();
  const float temperature = at(p.temperature, index);
  const Row row{static_cast<const T*>(p.input) + index * p.input_row, static_cast<float*>(p.out) + index * p.out_row,
                p.vocab, greater(logits_scale(0.f, temperature).factor, 0x1p-149f)};  // -inf times it is not NaN
  float y[Row::kEach];
  if (first < last) row.load(first * kPiece, y, [&](int at) { return load_once(row.row + first * kPiece + at); });
  if (const int j = first + (lane + 1) * kWarps; lane < p.held && j < last) {
    const unsigned bytes = row.copied(j * kPiece) * sizeof(T);
    arrived[warp][lane].arrive_expect(bytes);
    if (bytes) bulk_load(held + lane * kPiece, row.row + j * kPiece, bytes, arrived[warp][lane], kEvictFirst);
  }
  Cluster::meet();
#pragma unroll 1
  for (int i = -1, j = first; j < last; ++i, j += kWarps) {
    float* place = held + i * kPiece;
    float x[Row::kEach];
    if (i >= 0) {
      arrived[warp][i].wait(0);
      const T* copy = reinterpret_cast<const T*>(place);
      row.load(j * kPiece, x, [&](int at) { return *reinterpret_cast<const uint4*>(copy + at); });
    } else {
#pragma unroll
      for (int k = 0; k < Row::kEach; ++k) x[k] = y[k];
    }
    const uint32_t key = row.largest(x);
    const float sum = row.ratios(x, key);
    if (lane < size) gathering.give(*reinterpret_cast<uint64_t*>(sums + j), lane, uint64_t{key} << 32 | bits_of(sum));
    __syncwarp();
    if (i >= 0) {
#pragma unroll
      for (int k = 0; k < Row::kEach; k += 4)
        reinterpret_cast<float4*>(place)[k * 8 + lane] = make_float4(x[k], x[k + 1], x[k + 2], x[k + 3]);
    } else {
#pragma unroll
      for (int k = 0; k < Row::kEach; ++k) y[k] = x[k];
    }
  }
  gathering.await();

  uint32_t top = 0;
#pragma unroll 4
  for (int j = lane; j < n; j += 32) top = max(top, sums[j].key);
  top = __reduce_max_sync(0xffffffffu, top);
  const Scale scale{value_of(top), row.factor, 0.f};
  const auto share_of_piece = [&](int j) {
    const uint32_t key = sums[j].key;
    if (top == kInfinityKey) return key == top ? 1.f : 0.f;
    return key ? logit_ratio(value_of(key), scale) : 0.f;
  };
  uint64_t total = 0;  // of 2^-32
#pragma unroll 1
  for (int j = threadIdx.x; j < n; j += kThreads)
    total += __float2ull_rn(times(times(sums[j].sum, share_of_piece(j)), 0x1p32f));
  total = warp_sum_u64(total);
  if (lane == 0) parts[warp] = total;
  __syncthreads();
  total = warp_sum_u64(lane < kWarps ? parts[lane] : 0);
  pdl_launch_dependents();
  const float inverse = total ? __fdiv_rn(0x1p32f, static_cast<float>(total)) : 0.f;
#pragma unroll 1
  for (int i = -1, j = first; j < last; ++i, j += kWarps) {
    if (i >= 0) {
#pragma unroll
      for (int k = 0; k < Row::kEach; k += 4) {
        const float4 some = reinterpret_cast<const float4*>(held + i * kPiece)[k * 8 + lane];
        y[k] = some.x, y[k + 1] = some.y, y[k + 2] = some.z, y[k + 3] = some.w;
      }
    }
    row.write(j * kPiece, y, times(share_of_piece(j), inverse));
  }
}

}  // namespace fi
