// Rotation with fp8 output, of k and v into pages if there are any: the loop of rope.cuh with another target.
#pragma once
#include "fi/rope/rope.cuh"
#include "fi/rope/rope_quantize.h"

namespace fi {

template <class Lane>
struct RopeTable {
  const RopeRows& p;
  Lane lane;

  FI_DEVICE void prepare(RopeAngles<Lane::kPairs>&) const {}
  FI_DEVICE int64_t position(int64_t row) const { return p.pos_ids.at(row); }
  FI_DEVICE void fill(int64_t position, RopeAngles<Lane::kPairs>& angles) const {
    table_angles(p, lane, position, angles);
  }
};

template <class T, class O, int kVec, int kUnroll, bool kInterleave>
FI_DEVICE void rope_quantize(const RopeQuantizeParams& p) {
#if __CUDA_ARCH__ >= 890
  constexpr int kAtOnce = kUnroll;
#else
  constexpr int kAtOnce = 1;  // the cast to fp8 is a hundred instructions there
#endif
  const RopeShare share(p.rows);
  const RopeTable<RopeLane<kVec, kInterleave>> source{p.rows, {share.lane, p.rows.rotary_dim}};
  const auto place = [&](int kind, const RopePart& part, int64_t row) -> int64_t {
    if (kind == kRopeQ || !p.pages.batch_indices.data) return row * part.out_row;
    int64_t page, slot;
    return p.pages.find(row, &page, &slot) ? page * part.out_page + slot * part.out_row : -1;
  };
  rope_rows<T, O, kAtOnce, 3, kVec, kInterleave>(p.rows, share, source, place);
}

}  // namespace fi
