// softmax on sm_90 in one read of each row: a cluster holds what it read, as ratios to the largest of each piece.
#pragma once
#include "fi/sampling/stream.cuh"
#include "fi/sampling/team_sm90.cuh"

namespace fi {
namespace sampling {

template <class T>
struct SoftmaxRow {
  static constexpr int kEach = StreamedRow<T>::kEach, kVec = StreamedRow<T>::kVec;
  StreamedRow<T> row;
  float* out;
  float factor;

  // The ratios of elements of a piece to its largest; those of no number stay. Returns this lane's part of their sum.
  FI_DEVICE uint64_t ratios(float (&x)[kEach], uint32_t key) const {
    uint64_t sum = 0;
    if (key == 0 || key == kInfinityKey) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const bool counts = key != 0 && x[i] == __int_as_float(0x7f800000);
        x[i] = x[i] != x[i] ? x[i] : counts;
        sum += counts ? uint64_t{1} << 39 : 0;
      }
      return sum;
    }
    const float largest = value_of(key);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const Power p = power(plus(largest, -x[i]), factor);
      sum += fine({bits_of(p.y) << 8, p.shift});
      const float ratio = p.shift < 126 ? of_bits(bits_of(p.y) - (p.shift << 23)) : 0.f;
      x[i] = x[i] != x[i] ? x[i] : ratio;
    }
    return sum;
  }
  FI_DEVICE void write(int begin, const float (&y)[kEach], float scale) const {
    const int lane = threadIdx.x % 32;
    float z[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const float product = times(y[i], scale);
      z[i] = product > 1.f ? 1.f : product;
    }
    if (!row.whole(begin)) {
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        if (begin + 32 * i + lane < row.vocab) out[begin + 32 * i + lane] = z[i];
      return;
    }
    const bool aligned = reinterpret_cast<uint64_t>(out) % 16 == 0;
#pragma unroll
    for (int i = 0; i < kEach; i += 4) {
      float* to = out + begin + (32 * (i / kVec) + lane) * kVec + i % kVec;
      if (aligned) {
        store_global(to, make_uint4(bits_of(z[i]), bits_of(z[i + 1]), bits_of(z[i + 2]), bits_of(z[i + 3])));
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) to[j] = z[i + j];
      }
    }
  }
};

}  // namespace sampling

// One cluster a row; a warp keeps the ratios of its first p.held pieces in shared memory, of its last in registers, and
// reads the others again.
template <class T, int kThreads>
FI_DEVICE void softmax_cluster(const SampleParams& p) {
  using namespace sampling;
  constexpr int kWarps = kThreads / 32;
  using Row = SoftmaxRow<T>;
  extern __shared__ uint4 dynamic[];
  __shared__ uint64_t parts[kWarps];
  pdl_wait();
  Cluster::arrive();
  const int size = Cluster::size(), n = (p.vocab + kPiece - 1) / kPiece, share = (n + size - 1) / size;
  const int first = Cluster::rank() * share, last = min(first + share, n);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t index = blockIdx.x / size;
  const float temperature = at(p.temperature, index);
  const Row row{{static_cast<const T*>(p.input) + index * p.input_row, p.vocab, true},
                static_cast<float*>(p.out) + index * p.out_row,
                logits_scale(0.f, temperature).factor};
  auto* pieces = reinterpret_cast<PieceSum*>(dynamic);
  float4* held = reinterpret_cast<float4*>(pieces + n) + warp * p.held * (kPiece / 4) + lane;

  float y[Row::kEach];
  int j = first + warp, i = 0;
  if (j < last) row.row.load(j * kPiece, y);
  Cluster::meet();
#pragma unroll 1
  while (j < last) {
    float next[Row::kEach];
    const bool more = j + kWarps < last;
    if (more) row.row.load((j + kWarps) * kPiece, next);
    const uint32_t key = row.row.largest(y);
    const uint64_t sum = warp_sum_u64(row.ratios(y, key));
    if (lane < size)
      cluster_store_u32x4(cluster_address(pieces + j, lane),
                          make_uint4(static_cast<uint32_t>(sum >> 12), static_cast<uint32_t>(sum >> 44), key, 0));
    if (!more) break;
    if (i < p.held) {
#pragma unroll
      for (int k = 0; k < Row::kEach; k += 4)
        held[(i * Row::kEach + k) * 8] = make_float4(y[k], y[k + 1], y[k + 2], y[k + 3]);
    }
#pragma unroll
    for (int k = 0; k < Row::kEach; ++k) y[k] = next[k];
    j += kWarps, ++i;
  }
  Cluster::sync();

  const uint32_t top = largest_of(pieces, n);
  const Scale scale = logits_scale(value_of(top), temperature);
  const bool infinite = top == kInfinityKey;
  uint64_t total = 0;
#pragma unroll 1
  for (int k = threadIdx.x; k < n; k += kThreads) {
    const PieceSum piece = pieces[k];
    if (piece.key) total += portion_of(value_of(piece.key), scale, infinite, true).of(piece.sum);
  }
  total = warp_sum_u64(total);
  if (lane == 0) parts[warp] = total;
  __syncthreads();
  total = warp_sum_u64(lane < kWarps ? parts[lane] : 0);
  pdl_launch_dependents();
  if (first + warp >= last) return;
  const float inverse = total ? __fdiv_rn(0x1p33f, static_cast<float>(total)) : 0.f;  // of portions, one is 2^33
#pragma unroll 1
  for (; j >= first + warp; j -= kWarps, --i) {
    const uint32_t key = pieces[j].key;
    float own = 0.f;
    if (key) own = infinite ? key == top : logit_ratio(value_of(key), scale);
    row.write(j * kPiece, y, times(own, inverse));
    if (i > p.held) {
      row.row.load((j - kWarps) * kPiece, y);
      row.ratios(y, pieces[j - kWarps].key);
    } else if (i > 0) {
#pragma unroll
      for (int k = 0; k < Row::kEach; k += 4) {
        const float4 some = held[((i - 1) * Row::kEach + k) * 8];
        y[k] = some.x, y[k + 1] = some.y, y[k + 2] = some.z, y[k + 3] = some.w;
      }
    }
  }
}

}  // namespace fi
