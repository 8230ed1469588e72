// Rows of an e4m3 cache on Hopper: looked up in the page table, loaded to registers, stored as 16-bit values.
#pragma once
#include "fi/attention/mla/batch_mla.h"
#include "fi/attention/mla/mla_dequantize.cuh"
#include "fi/cuda/ptx/cluster_sm90.cuh"
#include "fi/cuda/ptx/global.cuh"

namespace fi {

template <class T>
struct MlaRows {
  static constexpr int kPartBlocks = 4, kBlock = 64 * 64;  // blocks of 64 columns of a part; elements of one

  const BatchMlaParams& params;

  // A lane has 16 columns of each 64 of a key. Lanes store 16 bytes of eight different bank groups.
  struct Source {
    int page, slot;  // page -1: no token
  };
  // Its entry of the page table, some time ahead of `source`, which waits for it.
  FI_DEVICE int look_up(const MlaWorkTile& s, int key, int high) const {
    const auto index = static_cast<int>(divide(static_cast<uint32_t>(key), params.page_size));
    return key < high ? params.page_indices[s.request.first_page + index] : -1;
  }
  FI_DEVICE Source source(int key, int entry) const {
    const auto index = static_cast<int>(divide(static_cast<uint32_t>(key), params.page_size));
    return {params.checked_page(entry), key - index * static_cast<int>(params.page_size.value)};
  }
  // Not to be read where there is no token.
  FI_DEVICE const char* ckv_row(const Source& x, int column) const {
    return static_cast<const char*>(params.ckv) + params.ckv_offset(x.page, x.slot) + column;
  }
  FI_DEVICE const char* kpe_row(const Source& x, int column) const {
    const int64_t at = params.kpe_offset(x.page, x.slot) + column;
    return static_cast<const char*>(params.kpe) + (params.wide_rope ? 2 * at : at);
  }
  // A part of a key's latent columns, and the scales of its two groups of 128.
  struct RawPart {
    uint4 pieces[kPartBlocks];
    float2 scales;
  };
  FI_DEVICE void load_part(RawPart& raw, const Source& x, int part, int quad) const {
    const char* from = ckv_row(x, part * (kPartBlocks * 64) + quad * 16);
    const bool exists = x.page >= 0, again = params.sparse;
#pragma unroll
    for (int k = 0; k < kPartBlocks; ++k) raw.pieces[k] = exists ? load_once(from + k * 64, again) : uint4{0, 0, 0, 0};
    raw.scales = make_float2(1.f, 1.f);
    if (params.ckv_scales && exists)
      raw.scales = *reinterpret_cast<const float2*>(params.ckv_scales + x.page * params.scales_page +
                                                    x.slot * params.scales_token + part * 2);
  }
  // The rotary columns of a lane: 16 of e4m3, or 16 of T.
  struct RawRope {
    uint4 pieces[2];
  };
  FI_DEVICE void load_rope(RawRope& raw, const Source& x, int quad) const {
    const char* from = kpe_row(x, quad * 16);
    const bool exists = x.page >= 0;
    raw.pieces[0] = exists ? load_once(from, params.sparse) : uint4{0, 0, 0, 0};
    raw.pieces[1] = exists && params.wide_rope ? load_once(from + 16, params.sparse) : uint4{0, 0, 0, 0};
  }

  FI_DEVICE static unsigned shared_address(const void* x) { return static_cast<unsigned>(__cvta_generic_to_shared(x)); }
  // From an address of this CTA to that of the same variable of another CTA of the cluster.
  FI_DEVICE static unsigned distance(const void* shared, unsigned rank) {
    return cluster_address(shared, rank) - shared_address(shared);
  }
  // Where the two chunks of 16 bytes of 16 values go.
  struct Target {
    char *to, *other;

    FI_DEVICE void store(int offset, const uint4& x, const uint4& y) const {
      *reinterpret_cast<uint4*>(to + offset) = x;
      *reinterpret_cast<uint4*>(other + offset) = y;
    }
  };
  template <MlaScale kScale>
  FI_DEVICE static void store_dequantized(const Target& target, int offset, const uint4& raw,
                                          const MlaFactor<kScale>& factor) {
    const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
    unsigned pairs[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) pairs[i] = factor.times(mla_shifted(words[i / 2], i % 2 ? kMlaUpper : kMlaLower, T()));
    target.store(offset, {pairs[0], pairs[1], pairs[2], pairs[3]}, {pairs[4], pairs[5], pairs[6], pairs[7]});
  }
  template <MlaScale kScale>
  FI_DEVICE static void store_part(const Target& target, const RawPart& raw) {
    const MlaFactor<kScale> factors[2] = {raw.scales.x, raw.scales.y};
#pragma unroll
    for (int k = 0; k < kPartBlocks; ++k) store_dequantized(target, k * (kBlock * 2), raw.pieces[k], factors[k / 2]);
  }
  FI_DEVICE void store_part(const Target& target, const RawPart& raw) const {
    if (!params.ckv_scales)
      store_part<MlaScale::kNone>(target, raw);
    else if (!__any_sync(0xffffffffu, mla_is_large(raw.scales.x) || mla_is_large(raw.scales.y)))
      store_part<MlaScale::kSmall>(target, raw);
    else
      store_part<MlaScale::kAny>(target, raw);
  }
};

}  // namespace fi
