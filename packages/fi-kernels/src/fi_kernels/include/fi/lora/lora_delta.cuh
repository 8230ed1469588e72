// lora_delta on sm_80 and later, in two launches: sums of parts of `a x`, and `b` times what they add up to. CTAs take
// tasks of up to 8 kTiles pairs of one adapter and one expert, and read their weights once. Weights are the 16 rows of
// mma.sync, straight from global memory: rank 16 is bytes, not products. A row's bits depend on k and on the parts
// only. The second launch begins while the first drains: what tells its pairs, and its weights, wait for nothing.
#pragma once
#include "fi/cuda/pack.cuh"
#include "fi/cuda/ptx/mma_sm80.cuh"
#include "fi/cuda/ptx/movmatrix.cuh"
#include "fi/cuda/vec.cuh"
#include "fi/lora/lora_window.cuh"

namespace fi {

constexpr int kLoraRanks = 32;  // of `a` that a task multiplies, of all slices
constexpr int kLoraStep = 32;   // values of k of a lane's 16 bytes, in four lanes
constexpr int kLoraLine = 64;   // values of a line of L2

// Where a lane's values lie in the fragments of a warp.
struct LoraLane {
  int warp = static_cast<int>(threadIdx.x) / 32, row = static_cast<int>(threadIdx.x) % 32 / 4,
      column = static_cast<int>(threadIdx.x) % 4;
};

template <class T>
FI_DEVICE const T* lora_weights(const LoraWeights& w, int adapter, int expert) {
  const T* first =
      w.table ? reinterpret_cast<const T*>(w.table[expert]) : static_cast<const T*>(w.first) + expert * w.expert_stride;
  return first + adapter * w.lora_stride;
}
FI_DEVICE uint4 load_if(bool exists, const void* from) {
  return exists ? __ldg(static_cast<const uint4*>(from)) : make_uint4(0, 0, 0, 0);
}
// 16 rows times 32 k: a lane has 8 values of k of rows `row` and `row + 8`; the order of k is that of its bytes in both
// operands.
template <class T>
FI_DEVICE void multiply_lora(float (&d)[4], const uint4& low, const uint4& high, const uint4& b) {
  mma_m16n8k16(d, {low.x, high.x, low.y, high.y}, b.x, b.y, T());
  mma_m16n8k16(d, {low.z, high.z, low.w, high.w}, b.z, b.w, T());
}

// The order of a kernel with `prefetch(task)`, which brings a task's weights to L2, and `compute(task, next)`, which
// calls that for the next task, if there is one.
template <class Kernel>
FI_DEVICE void run_lora(Kernel&& kernel, const LoraDeltaParams& p, const LoraShare& share) {
  if (!p.ready) {
    pdl_wait();
    pdl_launch_dependents();  // who reads what this kernel writes waits for its end
  }
  kernel.window.build(p, share.first);
  const int tasks = kernel.window.tiles * kernel.tasks_of_tile();
  if (p.ready) {
    if (share.own < tasks) kernel.prefetch(share.own);
    pdl_wait();
    pdl_launch_dependents();
  }
#pragma unroll 1
  for (int task = share.own; task < tasks; task += p.groups) {
    const int next = task + p.groups;
    kernel.compute(task, next < tasks ? next : -1);
  }
}

// A task: 32 rows of `a` of all slices, times a part of k, for the pairs of a tile. T: of the weights and of x.
template <class T, int kTiles>
struct LoraShrink {
  static constexpr int kRows = 8 * kTiles, kPitch = kRows + 1;
  static constexpr int kUnroll = kTiles == 1 ? 4 : kTiles == 2 ? 2 : 1;  // steps of k that a warp loads at once

  struct Task {
    typename LoraWindow<kRows>::Tile tile;
    int group, part, begin, end;  // group: its first 8 rows; begin, end: steps of k
  };

  const LoraDeltaParams& p;
  LoraWindow<kRows>& window;
  const LoraShare& share;
  const LoraLane lane{};

  FI_DEVICE int groups() const { return p.slice_count * p.rank / 8; }
  FI_DEVICE int tasks_of_tile() const { return (groups() + kLoraRanks / 8 - 1) / (kLoraRanks / 8) * p.parts; }
  FI_DEVICE Task task_of(int index) const {
    const int of_tile = tasks_of_tile(), tile = index / of_tile, rest = index - tile * of_tile;
    const int group = rest / p.parts, part = rest - group * p.parts, steps = (p.in + kLoraStep - 1) / kLoraStep;
    return {window.tile(tile), group * (kLoraRanks / 8), part, steps * part / p.parts, steps * (part + 1) / p.parts};
  }
  // Rows of `a` from 8 * group on.
  FI_DEVICE const T* rows_of(const Task& task, int group, int64_t& stride) const {
    const int of_slice = p.rank / 8, slice = group / of_slice;
    const LoraWeights& w = p.slices[slice].a;
    stride = w.row_stride;
    return lora_weights<T>(w, task.tile.adapter, task.tile.expert) + (group - slice * of_slice) * 8 * w.row_stride;
  }

  FI_DEVICE void prefetch(int index) const {
    const Task task = task_of(index);
    const int first = task.begin * kLoraStep, count = min(task.end * kLoraStep, p.in) - first;
    const int lines = (count + kLoraLine - 1) / kLoraLine;
#pragma unroll 1
    for (int g = task.group; g < min(task.group + kLoraRanks / 8, groups()); ++g) {
      int64_t stride;
      const T* a = rows_of(task, g, stride);
      a += lane.warp * stride + first;
#pragma unroll 1
      for (int i = static_cast<int>(threadIdx.x) % 32; i < lines; i += 32) prefetch_l2(a + i * kLoraLine);
    }
  }

  // Each warp has a part of the task's k; their sums are added in order. The next task's weights wait for those of this
  // one: with both on the way, experts with adapters took 261 us in place of 254 (Qwen3-30B fp8, 64 tokens, H200).
  FI_DEVICE void compute(int index, int /*next*/) const {
    extern __shared__ uint4 bytes[];
    float* partial = reinterpret_cast<float*>(bytes);  // [warps, kLoraRanks, kPitch]
    const Task task = task_of(index);
    float d[2][kTiles][4] = {};
    multiply(task, d);
    __syncthreads();  // the sums of the task before are read
    float* to = partial + lane.warp * kLoraRanks * kPitch;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          to[(i * 16 + j / 2 * 8 + lane.row) * kPitch + n * 8 + lane.column * 2 + j % 2] = d[i][n][j];
    __syncthreads();
    const int rank = static_cast<int>(threadIdx.x) % kLoraRanks, ranks = (groups() - task.group) * 8;
#pragma unroll 1
    for (int i = lane.warp; i < task.tile.count && rank < ranks; i += kLoraWarps) {
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < kLoraWarps; ++w) sum += partial[(w * kLoraRanks + rank) * kPitch + i];
      const int64_t pair = share.first + window.members[task.tile.first + i];
      static_cast<float*>(
          p.middle)[task.part * p.middle_part_stride + pair * p.middle_row_stride + task.group * 8 + rank] = sum;
    }
  }

 private:
  FI_DEVICE void multiply(const Task& task, float (&d)[2][kTiles][4]) const {
    const int steps = task.end - task.begin;
    const int begin = task.begin + steps * lane.warp / kLoraWarps;
    const int end = task.begin + steps * (lane.warp + 1) / kLoraWarps;
    const uint4* x = static_cast<const uint4*>(p.x) + lane.column;
    int from[kTiles];  // vectors of 16 bytes; -1: no pair
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int at = n * 8 + lane.row;
      from[n] = -1;
      if (at < task.tile.count)
        from[n] = static_cast<int>(window.rows[window.members[task.tile.first + at]] * (p.x_row_stride / 8));
    }
    const T* a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i] = nullptr;
      if (task.group + i >= groups()) continue;
      int64_t stride;
      const T* rows = rows_of(task, task.group + i, stride);
      a[i] = rows + lane.row * stride + lane.column * 8;
    }
#pragma unroll 1
    for (int step = begin; step < end; step += kUnroll) {
      uint4 w[kUnroll][4], b[kUnroll][kTiles];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int k = (step + u) * kLoraStep;
        const bool in = step + u < end && k + lane.column * 8 < p.in;
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
          for (int n = 0; n < kTiles; ++n) multiply_lora<T>(d[i][n], w[u][2 * i], w[u][2 * i + 1], b[u][n]);
    }
  }
};

// A task: a chunk of the columns of a slice for the pairs of a tile. X: of the sums, which are rounded to T.
template <class T, class X, class Out, int kTiles>
struct LoraExpand {
  static constexpr int kRows = 8 * kTiles;
  static constexpr int kColumnTiles = kTiles > 2 ? 2 : 3;  // of 16 columns, that a warp has in registers
  static constexpr bool kPacked = sizeof(Out) == 2;

  struct Task {
    typename LoraWindow<kRows>::Tile tile;
    int slice, begin, end;  // tiles of columns
  };
  struct Columns {
    uint4 w[kColumnTiles][2];
    unsigned old[kColumnTiles][kTiles][2];  // what a packed output is added to
  };

  const LoraDeltaParams& p;
  LoraWindow<kRows>& window;
  const LoraShare& share;
  const LoraLane lane{};

  FI_DEVICE int pitch() const { return p.rank + 8; }  // of a row of sums
  FI_DEVICE static T* sums() {                        // [kRows, pitch]
    extern __shared__ uint4 bytes[];
    return reinterpret_cast<T*>(bytes);
  }
  FI_DEVICE int tasks_of_tile() const { return p.slice_count * p.chunks; }
  FI_DEVICE Task task_of(int index) const {
    const int of_tile = tasks_of_tile(), tile = index / of_tile, rest = index - tile * of_tile;
    const int slice = rest / p.chunks, chunk = rest - slice * p.chunks, tiles = (p.slices[slice].columns + 15) / 16;
    return {window.tile(tile), slice, tiles * chunk / p.chunks, tiles * (chunk + 1) / p.chunks};
  }
  FI_DEVICE const T* weights_of(const Task& task) const {
    return lora_weights<T>(p.slices[task.slice].b, task.tile.adapter, task.tile.expert);
  }

  FI_DEVICE void prefetch(int index) const {
    const Task task = task_of(index);
    const int stride = static_cast<int>(p.slices[task.slice].b.row_stride);
    const int end = min(task.end * 16, p.slices[task.slice].columns);
    const T* b = weights_of(task);
#pragma unroll 1
    for (int i = task.begin * 16 * stride + static_cast<int>(threadIdx.x) * kLoraLine; i < end * stride;
         i += kLoraThreads * kLoraLine)
      prefetch_l2(b + i);
  }

  FI_DEVICE void compute(int index, int next) const {
    if (next >= 0) prefetch(next);  // the weights of this one are in L2
    const Task task = task_of(index);
    const T* b = weights_of(task);
    const int tiles = task.end - task.begin, begin = task.begin + tiles * lane.warp / kLoraWarps;
    const int end = task.begin + tiles * (lane.warp + 1) / kLoraWarps;
    int64_t rows[kTiles];  // where the rows of a lane's pairs begin in a packed output
#pragma unroll
    for (int n = 0; n < kTiles; ++n) rows[n] = row_of(task, n * 8 + lane.row) + p.begin_of(task.slice);
    Columns c;
    load_weights(task, b, begin, end, 0, c);
    load_old(task, rows, begin, end, c);
    load_sums(task);
    __syncthreads();
#pragma unroll 1
    for (int tile = begin; tile < end; tile += kColumnTiles) {
      if (tile > begin) load_old(task, rows, tile, end, c);
      float d[kColumnTiles][kTiles][4] = {};
#pragma unroll 1
      for (int k = 0; k < p.rank; k += kLoraStep) {
        if (tile > begin || k > 0) load_weights(task, b, tile, end, k, c);
        multiply(k, c, d);
      }
      store(task, rows, tile, end, c, d);
    }
    __syncthreads();  // sums may be written again
  }

  // -0 to the rows of this CTA that are to be filled.
  FI_DEVICE void fill() const {
#pragma unroll 1
    for (int i = share.own; i < min(kLoraWindow, p.pairs.count - share.first); i += p.groups) {
      if (!p.fills(window.key(i))) continue;
      Out* out = static_cast<Out*>(p.out) + (share.first + i) * p.out_row_stride;
#pragma unroll 1
      for (int j = static_cast<int>(threadIdx.x); j < p.columns; j += kLoraThreads) out[j] = from_float<Out>(-0.f);
    }
  }

 private:
  FI_DEVICE int64_t row_of(const Task& task, int pair) const {
    return pair < task.tile.count ? (share.first + window.members[task.tile.first + pair]) * p.out_row_stride : 0;
  }
  // Of 32 ranks from k on.
  FI_DEVICE void load_weights(const Task& task, const T* b, int tile, int end, int k, Columns& to) const {
    const int stride = static_cast<int>(p.slices[task.slice].b.row_stride), columns = p.slices[task.slice].columns;
    k += lane.column * 8;
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int of = (tile + c) * 16 + i * 8 + lane.row;
        to.w[c][i] = load_if(tile + c < end && k < p.rank && of < columns, b + of * stride + k);
      }
  }
  FI_DEVICE bool has(const Task& task, int tile, int end, int half, int pair) const {
    return tile < end && tile * 16 + half * 8 < p.slices[task.slice].columns && pair < task.tile.count;
  }
  FI_DEVICE void load_old(const Task& task, const int64_t (&rows)[kTiles], int tile, int end, Columns& to) const {
    if constexpr (kPacked) {
#pragma unroll
      for (int c = 0; c < kColumnTiles; ++c)
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            to.old[c][n][i] = 0;
            if (p.add && has(task, tile + c, end, i, n * 8 + lane.row))
              to.old[c][n][i] = *word_at(rows[n], tile + c, i);
          }
    }
  }
  FI_DEVICE unsigned* word_at(int64_t row, int tile, int half) const {
    return reinterpret_cast<unsigned*>(static_cast<Out*>(p.out) + row + tile * 16 + half * 8 + lane.column * 2);
  }
  // What the parts add up to, rounded as the weights are.
  FI_DEVICE void load_sums(const Task& task) const {
    constexpr int kLoads = 8;
    const X* first = static_cast<const X*>(p.middle) + task.slice * p.middle_slice_stride;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < task.tile.count * p.rank; i += kLoraThreads) {
      const int pair = i / p.rank, rank = i - pair * p.rank;
      const X* from = first + (share.first + window.members[task.tile.first + pair]) * p.middle_row_stride + rank;
      float sum = to_float(from[0]);
#pragma unroll 1
      for (int part = 1; part < p.parts; part += kLoads) {
        float x[kLoads];
#pragma unroll
        for (int j = 0; j < kLoads; ++j)
          x[j] = part + j < p.parts ? to_float(from[(part + j) * p.middle_part_stride]) : -0.f;
#pragma unroll
        for (int j = 0; j < kLoads; ++j) sum += x[j];
      }
      sums()[pair * pitch() + rank] = from_float<T>(sum);
    }
  }
  FI_DEVICE void multiply(int k, const Columns& c, float (&d)[kColumnTiles][kTiles][4]) const {
    k += lane.column * 8;
    uint4 h[kTiles];  // rows of no pair have any values: their products are not stored
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
      h[n] = k < p.rank ? *reinterpret_cast<const uint4*>(sums() + (n * 8 + lane.row) * pitch() + k)
                        : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int t = 0; t < kColumnTiles; ++t)
#pragma unroll
      for (int n = 0; n < kTiles; ++n) multiply_lora<T>(d[t][n], c.w[t][0], c.w[t][1], h[n]);
  }
  // A lane has column `row` of pairs 2 `column` and the next, of blocks of 8 columns by 8 pairs.
  FI_DEVICE void store(const Task& task, const int64_t (&rows)[kTiles], int tile, int end, const Columns& columns,
                       const float (&d)[kColumnTiles][kTiles][4]) const {
    const float scale = p.scale_of(task.tile.adapter);
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c) {
      if (tile + c >= end) break;
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float x = scale * d[c][n][2 * i], y = scale * d[c][n][2 * i + 1];
          if constexpr (kPacked) {
            const unsigned both = movmatrix_trans(pack_pair(x, y, Out()));  // of pair `row`
            if (has(task, tile + c, end, i, n * 8 + lane.row))
              *word_at(rows[n], tile + c, i) = p.add ? added(columns.old[c][n][i], both) : both;
          } else {
            store_floats(task, tile + c, n, i, x, y);
          }
        }
    }
  }
  FI_DEVICE void store_floats(const Task& task, int tile, int n, int half, float x, float y) const {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int pair = n * 8 + lane.column * 2 + j, column = tile * 16 + half * 8;
      if (pair >= task.tile.count || column >= p.slices[task.slice].columns) continue;
      Out& to = static_cast<Out*>(p.out)[row_of(task, pair) + p.begin_of(task.slice) + column + lane.row];
      to = p.add ? to + (j ? y : x) : (j ? y : x);
    }
  }
  FI_DEVICE static unsigned added(unsigned x, unsigned y) {
    const Out *a = reinterpret_cast<const Out*>(&x), *b = reinterpret_cast<const Out*>(&y);
    return pack_pair(to_float(a[0]) + to_float(b[0]), to_float(a[1]) + to_float(b[1]), Out());
  }
};

template <class T, int kTiles>
FI_DEVICE void lora_shrink(const LoraDeltaParams& p) {
  using Kernel = LoraShrink<T, kTiles>;
  __shared__ LoraWindow<Kernel::kRows> window;
  const LoraShare share(p.groups);
  run_lora(Kernel{p, window, share}, p, share);
}

template <class T, class X, class Out, int kTiles>
FI_DEVICE void lora_expand(const LoraDeltaParams& p) {
  using Kernel = LoraExpand<T, X, Out, kTiles>;
  __shared__ LoraWindow<Kernel::kRows> window;
  const LoraShare share(p.groups);
  const Kernel kernel{p, window, share};
  run_lora(kernel, p, share);
  if (p.fill) kernel.fill();
}

// What the parts of a shrink add up to, a thread for each pair, slice and rank.
template <class Out>
FI_DEVICE void lora_add_parts(const LoraDeltaParams& p) {
  const int ranks = p.slice_count * p.rank, pair = static_cast<int>(blockIdx.x);
  pdl_wait();
  pdl_launch_dependents();
  const int key = p.pairs.key_of(pair);
  if (key < 0 && !p.fills(key)) return;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < ranks; i += kLoraThreads) {
    const int slice = i / p.rank;
    Out& to = static_cast<Out*>(p.out)[slice * p.out_slice_stride + pair * p.out_row_stride + i - slice * p.rank];
    float sum = -0.f;
    if (key >= 0) {
      for (int part = 0; part < p.parts; ++part)
        sum += static_cast<const float*>(p.middle)[part * p.middle_part_stride + pair * p.middle_row_stride + i];
      sum *= p.scale_of(key >> 16);
      if (p.add) sum += to_float(to);
    }
    to = from_float<Out>(sum);
  }
}

}  // namespace fi
