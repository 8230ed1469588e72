// Reads segments of memory once and writes zeros: the least time of a kernel that reads and writes as many bytes.
#include "fi/cuda/ptx/bulk_sm90.cuh"

namespace fi {

constexpr int kGroups = 6, kSegments = 512, kStages = 64;

// `count` segments of `bytes` each, `stride` bytes apart, read in pieces of `chunk` bytes, all multiples of 16. Of a
// gathered group segment i lies at the place index[i] of the parameters.
struct Group {
  const char* base;
  int64_t stride;
  uint32_t bytes, count, chunks, gathered;  // chunks: of a segment
};

struct StreamParams {
  Group groups[kGroups];
  char* out;
  uint32_t out_bytes, num_groups, num_chunks, chunk;
  uint32_t range;   // chunks of a CTA that reads neighbouring ones; 0: it reads every gridDim.x-th
  uint32_t stages;  // of the ring
  uint64_t policy;  // of L2
  uint32_t never;   // a sum that is not expected: keeps loads alive
  uint16_t index[kSegments];
};

struct Piece {
  const char* address;
  uint32_t bytes;
};

FI_DEVICE Piece piece_of(const StreamParams& p, uint32_t chunk) {
  for (uint32_t g = 0; g < p.num_groups; g++) {
    const Group& group = p.groups[g];
    uint32_t all = group.count * group.chunks;
    if (chunk < all) {
      uint32_t segment = group.count > 1 ? chunk / group.chunks : 0, begin = (chunk - segment * group.chunks) * p.chunk;
      uint32_t place = group.gathered ? p.index[segment] : segment;
      return {group.base + place * group.stride + begin, min(p.chunk, group.bytes - begin)};
    }
    chunk -= all;
  }
  return {nullptr, 0};
}

// This CTA's share of the output, by threads `first` and later.
FI_DEVICE void write_zeros(const StreamParams& p, uint32_t first) {
  uint32_t lanes = blockDim.x - first, lane = threadIdx.x - first;
  for (uint32_t at = (blockIdx.x * lanes + lane) * 16; at < p.out_bytes; at += gridDim.x * lanes * 16) {
    *reinterpret_cast<uint4*>(p.out + at) = uint4{0, 0, 0, 0};
  }
}

// One thread keeps the whole ring in flight by bulk copies; nothing reads the ring.
extern "C" __global__ void __launch_bounds__(128, 1) stream_bulk(const __grid_constant__ StreamParams p) {
  extern __shared__ __align__(128) char ring[];
  __shared__ Barrier full[kStages];
  if (threadIdx.x >= 32) return write_zeros(p, 32);
  if (threadIdx.x != 0) return;
  uint32_t chunk = p.range ? blockIdx.x * p.range : blockIdx.x, step = p.range ? 1 : gridDim.x;
  uint32_t end = p.range ? min(p.num_chunks, chunk + p.range) : p.num_chunks;
  uint32_t stage = 0, round = 0;
#pragma unroll 1
  for (; chunk < end; chunk += step) {
    if (round == 0) {  // barriers begin one by one, so that the first copy waits for one only
      full[stage].init(1);
      fence_barrier_init();
    } else {
      full[stage].wait((round - 1) & 1);
    }
    Piece piece = piece_of(p, chunk);
    full[stage].arrive_expect(piece.bytes);
    bulk_load(ring + stage * p.chunk, piece.address, piece.bytes, full[stage], p.policy);
    if (++stage == p.stages) stage = 0, round++;
  }
#pragma unroll 1
  for (uint32_t s = 0; s < p.stages; s++) {
    if (s < stage || round > 0) full[s].wait((s < stage ? round : round - 1) & 1);
  }
}

// 16 bytes a load, eight loads of each thread in flight; a warp reads a chunk of 4 KB.
extern "C" __global__ void __launch_bounds__(1024, 1) stream_loads(const __grid_constant__ StreamParams p) {
  uint32_t warp = threadIdx.x / 32 * gridDim.x + blockIdx.x, lane = threadIdx.x % 32, sum = 0;
  for (uint32_t chunk = warp; chunk < p.num_chunks; chunk += gridDim.x * 32) {
    Piece piece = piece_of(p, chunk);
    uint4 words[8];
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) {
      uint32_t at = (i * 32 + lane) * 16;
      words[i] = {0, 0, 0, 0};
      if (at < piece.bytes) {
        asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                     : "=r"(words[i].x), "=r"(words[i].y), "=r"(words[i].z), "=r"(words[i].w)
                     : "l"(piece.address + at), "l"(p.policy));
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) sum ^= words[i].x ^ words[i].y ^ words[i].z ^ words[i].w;
  }
  if (sum == p.never) *p.out = 1;
  write_zeros(p, 0);
}

extern "C" __global__ void __launch_bounds__(128, 1) stream_nothing(const __grid_constant__ StreamParams p) {
  if (p.num_chunks == 0) *p.out = 1;
}

}  // namespace fi
