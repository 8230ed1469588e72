// Parameters of append_latent_rows, and the scales that its device and CPU forms share.
#pragma once
#include "fi/divisor.h"
#include "fi/quantization/block_quantize.h"

namespace fi {

constexpr int32_t kLatentColumns = 512, kRopeColumns = 64;
// A row of 656 bytes: 512 e4m3, fp32 scales of 128 columns, 64 16-bit values. Of packed pages: 448 e4m3 and 64 16-bit
// values, then, behind all rows of the page, 8 bytes for each: ue8m0 scales of 64 columns, and a zero.
constexpr int32_t kRowBytes = 656, kRowGroup = 128, kPackedCodes = 448, kPackedRowBytes = 576, kPackedScaleBytes = 8,
                  kPackedGroup = 64;

// Row i goes to slot slots[i] % page_size of page slots[i] / page_size; none if slots[i] < 0 or there is no such page.
struct AppendLatentRowsParams {
  const void* rows;                               // [n, 576], packed: [n, 512]; bf16
  uint8_t* cache;                                 // [pages, page bytes]
  const void* slots;                              // [n], int32 or int64
  int64_t row_stride, page_stride, n, num_slots;  // row_stride in elements, page_stride in bytes
  Divisor page_size;
  int32_t wide_slots, is_packed, power_of_two;

  FI_HOST_DEVICE int64_t slot(int64_t row) const {
    const int64_t at = wide_slots ? static_cast<const int64_t*>(slots)[row] : static_cast<const int32_t*>(slots)[row];
    return at < num_slots ? at : -1;
  }
  struct Place {
    uint8_t *row, *scales;
  };
  FI_HOST_DEVICE Place place(int64_t slot) const {
    const int64_t page = divide(static_cast<uint32_t>(slot), page_size), offset = slot - page * page_size.value;
    uint8_t* from = cache + page * page_stride;
    if (!is_packed) return {from + offset * kRowBytes, from + offset * kRowBytes + kLatentColumns};
    return {from + offset * kPackedRowBytes,
            from + int64_t{page_size.value} * kPackedRowBytes + offset * kPackedScaleBytes};
  }
  FI_HOST_DEVICE int32_t codes() const { return is_packed ? kPackedCodes : kLatentColumns; }
  FI_HOST_DEVICE int32_t group() const { return is_packed ? kPackedGroup : kRowGroup; }
};

// The scale of a group by the bits of its amax: a biased exponent, or amax / 448 as a normal number.
FI_HOST_DEVICE uint32_t latent_exponent(uint32_t amax_bits) {
  const uint32_t exponent = ceil_exponent(amax_bits, 0x43e00000u);  // 448
  return exponent ? exponent : 1;
}
FI_HOST_DEVICE float latent_scale(float amax) {
  const float scale = amax / kE4m3Limit;
  return scale > 0x1p-126f ? scale : 0x1p-126f;
}

}  // namespace fi
