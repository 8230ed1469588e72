// Products of chunks by wgmma, on Hopper, and the copies that feed them.
#pragma once
#include "fi/cuda/ptx/cluster_sm90.cuh"
#include "fi/cuda/ptx/wgmma_sm90.cuh"
#include "fi/cuda/tma_tile_sm90.cuh"
#include "fi/linear_attention/chunk_tiles.cuh"

namespace fi {

// Products of 64 rows in registers of a warpgroup with tiles of 64 tokens.
template <class T, int kD, int kStages = 2>
struct WgmmaProducts {
  using Tile = ChunkTile<kD>;
  using Matrix = PairedTriangle;
  static constexpr bool kAsync = true;
  static constexpr int kAlignment = 1024, kSteps = kD / 16, kBlocks = kChunkTokens / 16;

  // Of the copies of each stage; empty: the other CTA of a pair has read its stage.
  struct Arrivals {
    Barrier full[kStages], empty[kStages];
  };
  FI_DEVICE static void prepare(Arrivals& arrivals) {
    fence();  // zeros that this thread has written
    if (threadIdx.x > 0) return;
    for (Barrier& barrier : arrivals.full) barrier.init(1);
    for (Barrier& barrier : arrivals.empty) barrier.init(1);
    fence_barrier_init();
    fence();
  }
  FI_DEVICE static void wait(Arrivals& arrivals, int c) { arrivals.full[c % kStages].wait(c / kStages % 2); }
  // The barrier of a chunk.
  FI_DEVICE static Barrier& arrival(Arrivals& arrivals, int c) { return arrivals.full[c % kStages]; }
  template <int kColumns>
  FI_DEVICE static void load_tile(char* tile, const TensorMap& map, Barrier& full, int column, int head, int token) {
    tma_load_tile<kColumns>(reinterpret_cast<T*>(tile), Tile::kBlockBytes / 2, map, full, column, head, token);
  }
  // A block of 64 columns, to both CTAs of a pair.
  FI_DEVICE static void share_block(char* tile, const TensorMap& map, Barrier& full, int block, int head, int token) {
    tma_load_multicast(tile + block * Tile::kBlockBytes, map, full, 3, 64 * block, head, token);
  }
  // kPair: to both CTAs of a pair.
  template <bool kPair>
  FI_DEVICE static void load_matrix(char* to, const char* from, Barrier& full) {
#pragma unroll
    for (int i = 0; i < Matrix::kRuns; ++i)
      load_bytes<kPair>(to + Matrix::run_place(i), from + Matrix::run_begin(i),
                        Matrix::run_begin(i + 1) - Matrix::run_begin(i), full);
  }
  template <bool kPair>
  FI_DEVICE static void load_bytes(void* to, const void* from, unsigned bytes, Barrier& full) {
    if constexpr (kPair)
      bulk_load_multicast(to, from, bytes, full, 3);
    else
      bulk_load(to, from, bytes, full);
  }

  // The CTAs of a pair are there, with their barriers.
  FI_DEVICE static void meet() {
    __syncwarp();
    cluster_arrive_relaxed();
    cluster_wait();
  }
  FI_DEVICE static unsigned rank() { return cluster_rank(); }
  // By one thread: tells the other CTA that it may write the stage of a chunk here.
  FI_DEVICE static void give_stage(Arrivals& arrivals, int c) {
    arrivals.empty[c % kStages].arrive_at(cluster_rank() ^ 1);  // order: cluster: counts only; data completes bytes
  }
  // By one thread: until this CTA may write it there. No chunk has had the first stages.
  FI_DEVICE static void take_stage(Arrivals& arrivals, int c) {
    if (c >= kStages) arrivals.empty[c % kStages].wait((c / kStages + 1) % 2);
  }

  // order: writer: by each thread before the barrier behind which wgmma and TMA see what it has stored or cp.async
  // copied
  FI_DEVICE static void fence() { fence_async_shared(); }
  template <int kPending, int kCount>
  FI_DEVICE static void finish(float (&d)[kCount]) {
    wgmma_wait<kPending>();
    wgmma_keep(d);
  }

  // d = a times the rows of a tile, transposed.
  FI_DEVICE static void rows(float (&d)[32], const unsigned (&a)[kSteps][4], const char* tile) {
    rows_of<0, kSteps>(d, a, tile);
  }
  // Steps kBegin to kEnd of the same.
  template <int kBegin, int kEnd>
  FI_DEVICE static void rows_of(float (&d)[32], const unsigned (&a)[kSteps][4], const char* tile) {
    const uint64_t b = wgmma_operand(tile, 1024);
    wgmma_fence();
#pragma unroll
    for (int step = kBegin; step < kEnd; ++step)
      wgmma<false>(d, a[step], wgmma_further(b, step / 4 * Tile::kBlockBytes + step % 4 * 32), step > 0, T(), T());
    wgmma_commit();
  }
  // d = a times a lower triangular matrix, transposed, or with kAdd d += that: columns 0 to 31, and 32 to 63.
  template <bool kAdd = false>
  FI_DEVICE static void lower(float (&d)[2][16], const unsigned (&a)[kBlocks][4], const char* matrix) {
    const uint64_t b = wgmma_operand(matrix, 256, 128, kWgmmaNone);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlocks; ++step) {
      if (step < 2)
        wgmma<false>(d[0], a[step], wgmma_further(b, step * Matrix::kColumnBytes), kAdd || step > 0, T(), T());
      wgmma<false>(d[1], a[step], wgmma_further(b, Matrix::kLowerRows + step * Matrix::kColumnBytes), kAdd || step > 0,
                   T(), T());
    }
    wgmma_commit();
  }
  // d += a times a tile.
  FI_DEVICE static void columns(float (&d)[kD / 2], const unsigned (&a)[kBlocks][4], const char* tile) {
    const uint64_t b = wgmma_operand(tile, 1024, Tile::kBlockBytes);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlocks; ++step) wgmma(d, a[step], wgmma_further(b, step * 2048), true, T(), T());
    wgmma_commit();
  }
  // The same of 64 columns.
  FI_DEVICE static void column_block(float (&d)[32], const unsigned (&a)[kBlocks][4], const char* tile, int block) {
    const uint64_t b = wgmma_operand(tile + block * Tile::kBlockBytes, 1024, Tile::kBlockBytes);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlocks; ++step) wgmma(d, a[step], wgmma_further(b, step * 2048), true, T(), T());
    wgmma_commit();
  }
};

}  // namespace fi
