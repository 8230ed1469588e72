// lora_delta on sm_80 and later, in two launches: sums of parts of `a x`, and `b` times what they add up to. CTAs take
// tasks of up to 8 kTiles pairs of one adapter and one expert, and read their weights once: rank 16 is bytes, not
// products. A shrink has 16 ranks as the rows of mma.sync, an expand has pairs; its weights of a task are all on their
// way through shared memory before it waits for sums. A row's bits depend on k and on the parts only. The second launch
// begins while the first drains: what tells its pairs, and its weights, wait for nothing.
#pragma once
#include "fi/cuda/ptx/cp_async.cuh"
#include "fi/cuda/ptx/mma_sm80.cuh"
#include "fi/lora/lora_output.cuh"

namespace fi {

constexpr int kLoraRanks = 32;  // of `a` that a task multiplies, of all slices
constexpr int kLoraStep = 32;   // values of k of a lane's 16 bytes, in four lanes
constexpr int kLoraLine = 64;   // values of a line of L2

template <class T>
FI_DEVICE const T* lora_weights(const LoraWeights& w, int adapter, int expert) {
  const T* first =
      w.table ? reinterpret_cast<const T*>(w.table[expert]) : static_cast<const T*>(w.first) + expert * w.expert_stride;
  return first + adapter * w.lora_stride;
}
// Who reads what a kernel writes waits for its end.
FI_DEVICE void lora_wait() {
  pdl_wait();
  pdl_launch_dependents();
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
  FI_DEVICE Task task_of(int index) const {
    const int tile = divide(index, p.of_tile), rest = index - tile * static_cast<int>(p.of_tile.value);
    const int group = divide(rest, p.of_part), begin = (rest - group * p.parts) * p.part_steps;
    return {window.tile(tile), group * (kLoraRanks / 8), rest - group * p.parts, begin,
            min(begin + p.part_steps, (p.in + kLoraStep - 1) / kLoraStep)};
  }
  // Rows of `a` from 8 * group on.
  FI_DEVICE const T* rows_of(const Task& task, int group, int64_t& stride) const {
    const int slice = divide(group * 8, p.of_rank);
    const LoraWeights& w = p.slices[slice].a;
    stride = w.row_stride;
    return lora_weights<T>(w, task.tile.adapter, task.tile.expert) + (group * 8 - slice * p.rank) * w.row_stride;
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

  FI_DEVICE void run() const {
    if (!p.ready) lora_wait();
    window.build(p, share.first);
    const int tasks = window.tiles * static_cast<int>(p.of_tile.value);
    if (p.ready) {
      if (share.own < tasks) prefetch(share.own);
      lora_wait();
    }
#pragma unroll 1
    for (int task = share.own; task < tasks; task += p.groups) compute(task);
  }

  // Each warp has a part of the task's k; their sums are added in order. The next task's weights wait for those of this
  // one: with both on the way, experts with adapters took 261 us in place of 254 (Qwen3-30B fp8, 64 tokens, H200).
  FI_DEVICE void compute(int index) const {
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

// -0 to the rows of this CTA that are to be filled.
template <class Out, int kRows>
FI_DEVICE void lora_fill(const LoraDeltaParams& p, const LoraWindow<kRows>& window, const LoraShare& share) {
  constexpr int kPart = 4 / sizeof(Out);  // elements of a word
  const unsigned zeros = kPart == 2 ? 0x80008000u : 0x80000000u;
#pragma unroll 1
  for (int i = share.own; i < min(kLoraWindow, p.pairs.count - share.first); i += p.groups) {
    if (!p.fills(window.key(i))) continue;
    Out* out = static_cast<Out*>(p.out) + (share.first + i) * p.out_row_stride;
#pragma unroll 1
    for (int j = static_cast<int>(threadIdx.x) * kPart; j < p.columns; j += kLoraThreads * kPart) {
      if (j + kPart <= p.columns)
        *reinterpret_cast<unsigned*>(out + j) = zeros;
      else
        out[j] = from_float<Out>(-0.f);
    }
  }
}

// A task: a chunk of the columns of a slice for the pairs of a tile. X: of the sums, which are rounded to T. Pairs are
// the rows of mma.sync and columns of the slice its columns, in an order that gives a lane 8 that lie side by side.
template <class T, class X, class Out, int kTiles>
struct LoraExpand {
  static constexpr int kRows = 8 * kTiles, kBlocks = (kTiles + 1) / 2;  // blocks: of 16 pairs
  static constexpr int kRanks = 16;                                     // of a product
  using Output = LoraOutput<Out, kTiles>;

  struct Task {
    typename LoraWindow<kRows>::Tile tile;
    int slice, begin, end;  // groups of kLoraColumns columns
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
  FI_DEVICE Task task_of(int index) const {
    const int tile = divide(index, p.of_tile), rest = index - tile * static_cast<int>(p.of_tile.value);
    const int slice = (rest >= p.chunks) + (rest >= 2 * p.chunks), begin = (rest - slice * p.chunks) * p.chunk_groups;
    const int groups = (p.slices[slice].columns + kLoraColumns - 1) / kLoraColumns;
    return {window.tile(tile), slice, begin, min(begin + p.chunk_groups, groups)};
  }
  FI_DEVICE const T* weights_of(const Task& task) const {
    return lora_weights<T>(p.slices[task.slice].b, task.tile.adapter, task.tile.expert);
  }

  FI_DEVICE void prefetch(int index) const {
    const Task task = task_of(index);
    const int stride = static_cast<int>(p.slices[task.slice].b.row_stride);
    const int end = min(task.end * kLoraColumns, p.slices[task.slice].columns);
    const T* b = weights_of(task);
#pragma unroll 1
    for (int i = task.begin * kLoraColumns * stride + static_cast<int>(threadIdx.x) * kLoraLine; i < end * stride;
         i += kLoraThreads * kLoraLine)
      prefetch_l2(b + i);
  }

  // After a shrink, which has waited for all but its own sums before this kernel began, nothing else is waited for.
  FI_DEVICE void run() const {
    if (!p.ready) lora_wait();
    window.build(p, share.first);
    const int tasks = window.tiles * static_cast<int>(p.of_tile.value);
    bool waits = p.ready;
#pragma unroll 1
    for (int task = share.own; task < tasks; task += p.groups) {
      if (task + p.groups < tasks) prefetch(task + p.groups);
      compute(task, waits);
      waits = false;
    }
    if (waits) lora_wait();
    if (p.fill) lora_fill<Out>(p, window, share);
  }

  FI_DEVICE void compute(int index, bool waits) const {
    const Task task = task_of(index);
    const Output out(p, window, share.first, lane, task.tile, task.slice);
    load_weights(task);
    const int columns = p.slices[task.slice].columns;
    int group = task.begin + lane.warp;
    typename Output::Vector old[kTiles];
    const auto exists = [&] { return group * kLoraColumns + lane.column * kLoraVector < columns; };
    if (group < task.end) out.load(group * kLoraColumns, exists(), old);
    if (waits) lora_wait();
    load_sums(task);
    const float scale = p.scale_of(task.tile.adapter);
    cp_async_wait<0>();
    __syncthreads();
#pragma unroll 1
    while (group < task.end) {
      float d[kBlocks][4][4] = {};
#pragma unroll 1
      for (int k = 0; k < p.rank; k += kRanks) multiply(group - task.begin, k, d);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        float of_pair[4][2];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          of_pair[i][0] = d[n / 2][i][n % 2 * 2];
          of_pair[i][1] = d[n / 2][i][n % 2 * 2 + 1];
        }
        if (exists()) out.store(group * kLoraColumns, n, scale, old[n], of_pair);
      }
      group += kLoraWarps;
      if (group < task.end) out.load(group * kLoraColumns, exists(), old);
    }
    __syncthreads();  // sums and weights may be written again
  }

 private:
  FI_DEVICE T* weights() const { return sums() + kRows * pitch(); }  // [columns of a chunk, rank]
  FI_DEVICE void load_weights(const Task& task) const {
    const int64_t stride = p.slices[task.slice].b.row_stride;
    const int first = task.begin * kLoraColumns;
    const int values = (min(task.end * kLoraColumns, p.slices[task.slice].columns) - first) * p.rank;
    const T* b = weights_of(task) + first * stride;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) * 8; i < values; i += kLoraThreads * 8) {
      const int row = divide(i, p.of_rank);
      cp_async_16(weights() + i, b + row * stride + (i - row * p.rank));
    }
    cp_async_commit();
  }
  // What the parts add up to, rounded as the weights are.
  FI_DEVICE void load_sums(const Task& task) const {
    constexpr int kLoads = 8;
    const X* first = static_cast<const X*>(p.middle) + task.slice * p.middle_slice_stride;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < task.tile.count * p.rank; i += kLoraThreads) {
      const int pair = divide(i, p.of_rank), rank = i - pair * p.rank;
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
  // Of a group of columns. Rows of no pair and columns behind the last have any values: their products are not stored.
  FI_DEVICE void multiply(int group, int k, float (&d)[kBlocks][4][4]) const {
    k += lane.column * 4;
    const bool exists = k < p.rank;
    const T* column =
        weights() + (exists ? k : 0) + (group * kLoraColumns + lane.row / 2 * kLoraVector + lane.row % 2) * p.rank;
    uint2 w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = *reinterpret_cast<const uint2*>(column + i * 2 * p.rank);
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      uint2 h[2] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (m * 2 + i < kTiles && exists)
          h[i] = *reinterpret_cast<const uint2*>(sums() + (m * 16 + i * 8 + lane.row) * pitch() + k);
#pragma unroll
      for (int i = 0; i < 4; ++i) mma_m16n8k16(d[m][i], {h[0].x, h[1].x, h[0].y, h[1].y}, w[i].x, w[i].y, T());
    }
  }
};

template <class T, int kTiles>
FI_DEVICE void lora_shrink(const LoraDeltaParams& p) {
  using Kernel = LoraShrink<T, kTiles>;
  __shared__ LoraWindow<Kernel::kRows> window;
  const LoraShare share(p.groups);
  Kernel{p, window, share}.run();
}

template <class T, class X, class Out, int kTiles>
FI_DEVICE void lora_expand(const LoraDeltaParams& p) {
  using Kernel = LoraExpand<T, X, Out, kTiles>;
  __shared__ LoraWindow<Kernel::kRows> window;
  const LoraShare share(p.groups);
  Kernel{p, window, share}.run();
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
