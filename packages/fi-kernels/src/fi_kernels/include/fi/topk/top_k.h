// Parameters of the top_k kernels, shared by launcher and device code: the k largest of a segment of each row.
#pragma once
#include "fi/ordered.h"

namespace fi {

// Row i selects from x in [0, length): input[i, start + x], start = row_starts[i], length = lengths[i] cut to the row.
// NaN of either sign is the largest value, -0 equals +0. Results are in the order of x, or, if sorted, from the largest
// value down, equal values in the order of x; slots beyond the length get index -1.
struct TopKParams {
  const void* input;            // [rows, width], rows input_row elements apart
  void* values;                 // [rows, k] of the input's type, with `indices`; else null
  int64_t* indices;             // [rows, k] x; else null
  int32_t* mapped;              // [rows, k] x through the page table or by the offset; else null
  int32_t* raw;                 // [rows, k] x, or null; with `mapped`
  const int32_t* lengths;       // [rows], or null: the width
  const int32_t* row_starts;    // [rows], or null: 0
  const int32_t* page_table;    // [batch, pages], or null; x is in slot x % page_size of page x / page_size
  const int32_t* table_rows;    // [rows] row of the page table, or null: row i
  const int32_t* table_starts;  // [rows] column of page 0, or null: row_starts
  const int32_t* offsets;       // [rows] added to x, or null: 0
  int64_t input_row, page_table_row;
  int32_t rows, width, k, page_size;
  int32_t prefer_last;  // of equal values at the boundary the last in the row are taken, not the first
  int32_t sorted;
  // The launch: vectors of 16 bytes of a slice (what one block of the row's cluster works on) that it holds in shared
  // memory, the others being read again; where the parts of dynamic shared memory lie, in bytes.
  int32_t held;
  int32_t bitmap_at, sort_at, fixed_at;
};

constexpr int kTopKFirstBins = 4096;  // the first digit has 12 bits, the others 10
constexpr int kTopKBins = 1024;
constexpr int kTopKEntries = 4096;  // elements that one block can search at once for the k-th largest
constexpr int kTopKWindow = 2048;   // words of the bitmap whose vectors have 16-bit numbers
// Vectors that have a marked element, and two that are partial, whose invalid elements may be.
constexpr int kTopKListed = kTopKEntries + 8;
constexpr int kTopKSortable = 4096;  // largest k that is sorted in shared memory
constexpr int kTopKChunks = 8;       // parts in which a slice arrives
constexpr int kTopKLargestCluster = 16;

// The part of shared memory that does not depend on the shape.
struct TopKShared {
  union {
    struct {
      uint32_t histogram[kTopKFirstBins];  // of this block's slice
      uint32_t total[kTopKFirstBins];      // of the row
    };
    uint64_t entries[kTopKEntries];  // later, in the first block: bits of the value in the upper half, x in the lower
  };
  uint32_t digits[kTopKBins];
  uint16_t vectors[kTopKListed];  // marked ones, counted from the first of a window
  uint64_t barriers[kTopKChunks];
  uint64_t block_counts[kTopKLargestCluster];
  uint64_t warp_counts[32];
  uint32_t warp_sums[32];
  uint32_t bin, above, in_bin, unused;
};

}  // namespace fi
