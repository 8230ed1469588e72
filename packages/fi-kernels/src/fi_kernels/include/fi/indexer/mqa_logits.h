// Parameters of mqa_logits, shared by the launcher, the CUDA kernels and the CPU kernel.
#pragma once
#include "fi/tensor_map.h"
#include "fi/types.h"

namespace fi {

constexpr int kMqaSelectBins = 4096, kMqaSelectParts = 128;
constexpr int kMqaSelectCandidates = 2048;  // of a row; the largest top_k too

// What CTAs tell each other of a row that they select from.
struct MqaSelectRow {
  uint32_t bins[kMqaSelectBins];    // logits in each bin
  uint32_t above[kMqaSelectParts];  // keys of each part above the bin of the top_k-th
  uint32_t candidate_count, unused[3];
  uint64_t candidates[kMqaSelectCandidates];
};

// logits[t, j] = scale[j] * sum over heads h of weights[t, h] * max(0, q[t, h] . key[j]). A row sees the keys from
// `begin` to before `end`. Ragged rows share one array of keys; paged rows belong to requests, next_n rows to each, and
// see the first keys of their own. Strides are in elements, those of pages in bytes.
struct MqaLogitsParams {
  TensorMap q_map, key_map;  // sm_90 only: [rows, heads, dim] and [keys, dim] or [pages, page_size, dim]
  float* logits;             // [rows, columns]
  const void* q;             // [rows, heads, dim] e4m3
  const float* weights;      // [rows, heads]
  const void* keys;          // [keys, dim] e4m3; paged: a page is page_size rows of values, then page_size fp32 scales
  const float* scales;       // [keys]; paged: null
  const int32_t* starts;     // [rows]; paged: null
  const int32_t* ends;       // [rows]; paged: keys of each row, or of each request with all its rows
  const int32_t* block_table;  // [requests, table_columns]; ragged: null
  int64_t logits_stride, weights_stride, page_stride, table_stride;
  int32_t rows, columns, heads, keys_in_all;  // keys_in_all: ragged, of the array
  int32_t requests, next_n, page_size, table_columns;
  int32_t ends_of_rows;  // whether `ends` has a number for each row
  int32_t clean;         // -inf where a row sees no key; otherwise nothing is written there
  int32_t relative;      // column c is key begin + c
  int32_t orders_nan;    // NaN becomes -inf, so that every logit has a place in an order
  int32_t chunk_tiles;   // of keys, of a CTA; not on sm_90
  int32_t box_keys;      // paged: keys that one bulk copy loads
  // Top-k of paged rows, sm_90 only: the results of each row by rising key.
  MqaSelectRow* state;  // [rows]
  int32_t* indices;     // [rows, top_k]
  float* scores;        // [rows, top_k], or null
  int32_t top_k;
  int32_t mapped;       // indices are slots of the pages; else they count from the first key of the request
  int32_t prefer_last;  // of the logits equal to the top_k-th, those of the last keys

  FI_HOST_DEVICE int32_t begin_of(int32_t row) const {
    return starts && row < rows && starts[row] > 0 ? starts[row] : 0;
  }
  FI_HOST_DEVICE int32_t end_of(int32_t row) const {
    if (row >= rows) return 0;
    if (starts) return end_in_array(row);
    if (ends_of_rows) return within_pages(ends[row]);
    const int32_t end = ends[row / next_n];
    return end > 0 ? within_pages(end - next_n + 1 + row % next_n) : 0;
  }
  FI_HOST_DEVICE int32_t end_in_array(int32_t row) const {
    const int32_t end = ends[row] < keys_in_all ? ends[row] : keys_in_all;
    if (end <= 0) return 0;
    return relative && end - begin_of(row) > columns ? begin_of(row) + columns : end;
  }
  // Of a number of keys of a request, as many as there are columns and pages.
  FI_HOST_DEVICE int32_t within_pages(int32_t end) const {
    const int64_t most = static_cast<int64_t>(table_columns) * page_size;
    if (end > columns) end = columns;
    if (end > most) end = static_cast<int32_t>(most);
    return end > 0 ? end : 0;
  }
  // The first row of a tile of `most` rows; paged rows of a tile are of one request.
  FI_HOST_DEVICE int32_t first_row(int32_t tile, int32_t most) const {
    if (starts) return tile * most;
    const int32_t parts = (next_n + most - 1) / most;
    return tile / parts * next_n + tile % parts * most;
  }
  // The row behind the last of the tile that begins at `row`.
  FI_HOST_DEVICE int32_t last_row(int32_t row, int32_t most) const {
    const int32_t last = starts ? rows : (row / next_n + 1) * next_n;
    return row + most < last ? row + most : last;
  }
};

}  // namespace fi
