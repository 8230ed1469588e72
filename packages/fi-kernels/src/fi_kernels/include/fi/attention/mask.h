// Which keys a query row sees: causal, sliding window, custom, draft or items mask; shared by device and CPU code.
#pragma once
#include "fi/types.h"

namespace fi {

// Row i of qo_len stands at position kv_len - qo_len + i, so masks are aligned to the bottom right. The causal mask
// and the window give ranges of keys; inside them `keeps` reads the custom mask. A custom mask replaces the causal one:
// set causal = 0 with it.
struct Mask {
  const uint8_t* custom;  // null: none; else element e = i * custom_row + j
  int64_t custom_row;
  int32_t custom_packed;  // 1: element e is bit e % 8 of byte e / 8; 0: one byte an element
  int32_t causal;
  int32_t window_left;  // row at position p sees keys >= p - window_left; negative: all
  int32_t qo_len, kv_len;
  const uint8_t* draft;  // null: none; else bit t of row i, from byte i * draft_row on, for key kv_len - qo_len + t
  int32_t draft_row;
  // Multi-item scoring (needs causal): null, or for each position from prefix_len on the distance to the delimiter
  // before its item, 0 at the delimiter. A row sees the prefix and its item.
  const uint16_t* items;
  int32_t prefix_len;

  // Causal or not, with a window, and nothing else.
  FI_HOST_DEVICE static Mask of_range(int32_t causal, int32_t window_left, int32_t qo_len, int32_t kv_len) {
    Mask mask{};
    mask.causal = causal, mask.window_left = window_left, mask.qo_len = qo_len, mask.kv_len = kv_len;
    return mask;
  }

  FI_HOST_DEVICE int64_t position(int32_t i) const { return static_cast<int64_t>(kv_len) - qo_len + i; }

  // Row i may see keys [first_key, end_key).
  FI_HOST_DEVICE int32_t first_key(int32_t i) const {
    return window_left < 0 ? 0 : clamp(position(i) - window_left, kv_len);
  }
  FI_HOST_DEVICE int32_t end_key(int32_t i) const { return causal ? clamp(position(i) + 1, kv_len) : kv_len; }

  // Key j may be seen by rows [first_row, end_row).
  FI_HOST_DEVICE int32_t first_row(int32_t j) const { return causal ? clamp(j - position(0), qo_len) : 0; }
  FI_HOST_DEVICE int32_t end_row(int32_t j) const {
    return window_left < 0 ? qo_len : clamp(j - position(0) + window_left + 1, qo_len);
  }

  // Bit b: whether row i sees key j + b by range and draft mask, and the key is in [low, high).
  FI_HOST_DEVICE uint32_t seen(int32_t i, int32_t j, int32_t low, int32_t high) const {
    const int32_t first = first_key(i), end = end_key(i);
    const uint32_t range = lowest((end < high ? end : high) - j) & ~lowest((first > low ? first : low) - j);
    if (!draft) return range;
    const uint8_t* row = draft + static_cast<int64_t>(i) * draft_row;
    const auto t = static_cast<int32_t>(j - position(0));
    uint64_t bits = 0;  // of the bytes in which the 32 begin and end
    for (int32_t n = 0; n < 5; ++n) {
      const int32_t at = (t >> 3) + n;
      bits |= static_cast<uint64_t>(at < 0 ? 0xff : at < draft_row ? row[at] : 0) << 8 * n;
    }
    return range & static_cast<uint32_t>(bits >> (t & 7));
  }

  // Whether a custom, draft or items mask exists, that is, whether `keeps` can be false.
  FI_HOST_DEVICE bool selects() const { return custom || draft || items; }
  FI_HOST_DEVICE bool keeps(int32_t i, int32_t j) const {
    if (draft) {  // speculative tokens, the last qo_len keys, may form a tree; all rows see the keys before them
      const int64_t t = j - position(0);
      if (t >= 0 && !((draft[static_cast<int64_t>(i) * draft_row + (t >> 3)] >> (t & 7)) & 1)) return false;
    }
    if (items) {
      const int64_t p = position(i);
      if (p >= prefix_len && j >= prefix_len && j <= p - items[p - prefix_len]) return false;
    }
    if (!custom) return true;
    const int64_t e = i * custom_row + j;
    return custom_packed ? (custom[e >> 3] >> (e & 7)) & 1 : custom[e] != 0;
  }

 private:
  FI_HOST_DEVICE static uint32_t lowest(int32_t bits) {
    return bits <= 0 ? 0u : bits >= 32 ? 0xffffffffu : (1u << bits) - 1;
  }
  FI_HOST_DEVICE static int32_t clamp(int64_t x, int32_t limit) {
    return static_cast<int32_t>(x < 0 ? 0 : x > limit ? limit : x);
  }
};

}  // namespace fi
