// Declares the parameters of top_k, shared by launcher and device code: the k largest elements of a segment of each
// row.
#pragma once
#include "fi/ordered.h"

namespace fi {

// Row i selects from x in [0, length): input[i, start + x], start = row_starts[i], length = lengths[i] clamped to the
// row. NaN of either sign is the largest value, -0 equals +0. Results are in the order of x, or, if sorted, in
// descending order of value with equal values in the order of x. Results beyond the length have index -1.
struct TopKParams {
  const void* input;            // [rows, width], rows input_stride elements apart
  void* values;                 // [rows, k] of the input's type, with `indices`; else null
  int64_t* indices;             // [rows, k] x; else null
  int32_t* mapped;              // [rows, k] x mapped by the page table or the offset; else null
  int32_t* raw;                 // [rows, k] x, or null; with `mapped`
  const int32_t* lengths;       // [rows], or null: the width
  const int32_t* row_starts;    // [rows], or null: 0
  const int32_t* page_table;    // [batch, pages], or null; x is in slot x % page_size of page x / page_size
  const int32_t* table_rows;    // [rows] row of the page table, or null: row i
  const int32_t* table_starts;  // [rows] column of page 0, or null: row_starts
  const int32_t* offsets;       // [rows] added to x, or null: 0
  int64_t input_stride, page_table_stride;
  int32_t rows, width, k, page_size;
  int32_t prefer_last;  // of the values equal to the k-th largest, select the last in the row, not the first
  int32_t sorted;
  // The launch: how many 16-byte vectors of its slice a CTA caches in shared memory (it reads the others again), and
  // byte offsets into dynamic shared memory.
  int32_t cached;
  int32_t bitmap_at, sort_at, fixed_at;
};

constexpr int kTopKFirstBins = 4096;  // the first digit has 12 bits, the others 10
constexpr int kTopKBins = 1024;
constexpr int kTopKCandidates = 4096;  // candidates among which one CTA finds the k-th largest
constexpr int kTopKWindow = 2048;      // bitmap words whose vectors have 16-bit numbers
// Flagged vectors: one per candidate, and partial vectors, whose invalid elements may set a flag.
constexpr int kTopKFlaggedVectors = kTopKCandidates + 8;
constexpr int kTopKSortable = 4096;  // largest k that is sorted in shared memory
constexpr int kTopKChunks = 8;       // bulk copies of a slice
constexpr int kTopKLargestCluster = 16;

// The part of shared memory whose size does not depend on the shape.
struct TopKShared {
  union {
    struct {
      uint32_t histogram[kTopKFirstBins];  // of this CTA's slice
      uint32_t total[kTopKFirstBins];      // of the row
    };
    uint64_t candidates[kTopKCandidates];  // later, in CTA 0: bits of the value in the high half, x in the low half
  };
  uint32_t digits[kTopKBins];
  uint16_t vectors[kTopKFlaggedVectors];  // flagged vectors, numbered from the first of a window
  uint64_t barriers[kTopKChunks];
  uint64_t cta_counts[kTopKLargestCluster];
  uint64_t warp_counts[32];
  uint32_t warp_sums[32];
  uint32_t bin, above, in_bin, unused;
};

}  // namespace fi
