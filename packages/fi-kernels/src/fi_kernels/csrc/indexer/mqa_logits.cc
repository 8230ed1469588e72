// mqa_logits: checks the arguments, launches the CUDA kernel or runs the CPU one.
#include "fi/indexer/mqa_logits.h"

#include "fi/generated/mqa_logits.h"
#include "fi/host/contents.h"

#if !FI_CUDA
#include <cmath>
#include <limits>

#include "fi/cpu/row_convert.h"
#endif

namespace fi {
namespace {

#if !FI_CUDA
constexpr int64_t kBlockKeys = 64;

FI_CLONES float dot(const float* a, const float* b, int64_t n) {
  float sum = 0.f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

// The keys [first, first + count) of a row's array or request: their values and scales.
void load_keys(const MqaLogitsParams& p, int64_t dim, int64_t request, int64_t first, int64_t count, float* values,
               float* scales) {
  const cpu::LoadRow load = cpu::row_loader(kE4M3);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t key = first + i;
    const auto* from = static_cast<const char*>(p.keys) + key * dim;
    const float* scale = p.scales + key;
    if (!p.starts) {
      const int64_t page = p.block_table[request * p.table_stride + key / p.page_size], slot = key % p.page_size;
      const char* base = static_cast<const char*>(p.keys) + page * p.page_stride;
      from = base + slot * dim, scale = reinterpret_cast<const float*>(base + p.page_size * dim) + slot;
    }
    load(from, values + i * dim, dim);
    scales[i] = *scale;
  }
}

void run_cpu(const MqaLogitsParams& p, int64_t dim) {
  const int64_t blocks = (std::max(p.columns, p.keys_in_all) + kBlockKeys - 1) / kBlockKeys, heads = p.heads;
  const cpu::LoadRow load = cpu::row_loader(kE4M3);
  // A task is a block of keys and the rows of one request, or 16 ragged ones: keys are converted once for them.
  const int32_t tile_rows = p.starts ? 16 : p.next_n;
  const int64_t tiles = (p.rows + tile_rows - 1) / tile_rows;
  const int64_t floats = kBlockKeys * (dim + 1) + heads * dim;
  cpu::for_rows(tiles * blocks, kBlockKeys * heads * dim, floats, [&](int64_t index, float* scratch) {
    float *keys = scratch, *scales = keys + kBlockKeys * dim, *q = scales + kBlockKeys;
    const int64_t first = index % blocks * kBlockKeys;
    const auto row0 = static_cast<int32_t>(index / blocks * tile_rows);
    const int32_t last_row = std::min(row0 + tile_rows, p.rows);
    int64_t low = first + kBlockKeys, high = first;
    for (int32_t row = row0; row < last_row; ++row) {
      if (p.begin_of(row) >= p.end_of(row)) continue;
      low = std::min<int64_t>(low, std::max<int64_t>(first, p.begin_of(row)));
      high = std::max<int64_t>(high, std::min<int64_t>(first + kBlockKeys, p.end_of(row)));
    }
    if (low < high) load_keys(p, dim, p.starts ? 0 : row0 / p.next_n, low, high - low, keys, scales);
    for (int32_t row = row0; row < last_row; ++row) {
      const int64_t begin = std::max<int64_t>(first, p.begin_of(row)),
                    end = std::min<int64_t>(first + kBlockKeys, p.end_of(row));
      float* logits = p.logits + row * p.logits_stride;
      if (p.clean)
        for (int64_t key = first; key < std::min<int64_t>(first + kBlockKeys, p.columns); ++key)
          if (key < begin || key >= end) logits[key] = -std::numeric_limits<float>::infinity();
      if (begin >= end) continue;
      load(static_cast<const char*>(p.q) + row * heads * dim, q, heads * dim);
      for (int64_t key = begin; key < end; ++key) {
        float sum = 0.f;
        for (int64_t h = 0; h < heads; ++h) {
          const float product = dot(q + h * dim, keys + (key - low) * dim, dim);
          sum += p.weights[row * p.weights_stride + h] * (product < 0.f ? 0.f : product);  // NaN stays
        }
        sum *= scales[key - low];
        if (p.orders_nan && std::isnan(sum)) sum = -std::numeric_limits<float>::infinity();
        logits[key - (p.relative ? p.begin_of(row) : 0)] = sum;
      }
    }
  });
}
#endif

// Raises unless every page that a row sees exists.
void check_pages(const Kernel& kernel, const MqaLogitsArgs& a, const MqaLogitsParams& p, int64_t pages) {
  if (p.table_columns == 0) return;
  const Integers table(kernel, a.block_table, (p.requests - 1) * p.table_stride + p.table_columns),
      lengths(kernel, a.ends);
  for (int64_t b = 0; b < p.requests; ++b) {
    int64_t last = 0;
    for (int64_t t = 0; t < (p.ends_of_rows ? p.next_n : 1); ++t)
      last = std::max(last, lengths[b * (p.ends_of_rows ? p.next_n : 1) + t]);
    FI_CHECK(last <= a.logits.size(1) && last <= int64_t{p.table_columns} * p.page_size, ValueError,
             "context_lens must be at most max_context_len and what block_table has pages for, %lld and %lld; got %lld",
             static_cast<long long>(a.logits.size(1)), static_cast<long long>(int64_t{p.table_columns} * p.page_size),
             static_cast<long long>(last));
    for (int64_t i = 0; i * p.page_size < last; ++i) {
      const int64_t page = table[b * p.table_stride + i];
      FI_CHECK(page >= 0 && page < pages, ValueError,
               "block_table must be in 0..%lld, the pages; got %lld at [%lld, %lld]", static_cast<long long>(pages - 1),
               static_cast<long long>(page), static_cast<long long>(b), static_cast<long long>(i));
    }
  }
}

int64_t heads_of(const Tensor& q) { return q.size_or_0(-2); }
int64_t dim_of(const Tensor& q) { return q.size_or_0(-1); }

// Whether keys lie as TMA needs them.
bool is_aligned(const MqaLogitsArgs& a) {
  return a.keys.alignment(16, {a.keys.stride_or_0(0)}) == 16 && a.q.alignment(16, {}) == 16;
}

MqaLogitsRequest request_of(const MqaLogitsArgs& a) {
  constexpr int64_t kMostRows = 4;  // more are several tiles of these
  const int64_t rows = a.indices ? std::min(a.q.size_or_0(-3), kMostRows) : 1;
  return {heads_of(a.q), dim_of(a.q), is_aligned(a), bool{a.indices}, bool{a.block_table}, rows};
}

#if FI_CUDA
constexpr int64_t kWarpgroups = 2;  // that compute, on Hopper

// Key tiles of a CTA: what gives each SM one to six CTAs, the more the more tiles there are.
int32_t chunk_tiles(int64_t tiles, int64_t key_tiles, int64_t multiprocessors) {
  const int64_t all = tiles * key_tiles, waves = std::clamp<int64_t>(all / (16 * multiprocessors), 1, 6);
  const int64_t chunk = (all + waves * multiprocessors - 1) / (waves * multiprocessors);
  return static_cast<int32_t>(std::clamp<int64_t>(chunk, (key_tiles + 65534) / 65535, key_tiles));
}

void describe(const Kernel& kernel, MqaLogitsParams& p, const MqaLogitsArgs& a, const MqaLogitsConfig& config) {
  const auto heads = static_cast<uint64_t>(p.heads), dim = static_cast<uint64_t>(dim_of(a.q));
  const uint64_t q_sizes[] = {dim, heads, static_cast<uint64_t>(p.rows)}, q_strides[] = {dim, dim * heads};
  const uint32_t q_box[] = {static_cast<uint32_t>(dim), static_cast<uint32_t>(heads),
                            static_cast<uint32_t>(config.rows)};
  kernel.describe(p.q_map, 1, 3, const_cast<void*>(p.q), q_sizes, q_strides, q_box);
  const auto keys = static_cast<uint32_t>(64 * (kWarpgroups / config.row_groups));
  if (p.starts) {
    const uint64_t sizes[] = {dim, static_cast<uint64_t>(p.keys_in_all)}, strides[] = {dim};
    const uint32_t box[] = {static_cast<uint32_t>(dim), keys};
    kernel.describe(p.key_map, 1, 2, const_cast<void*>(p.keys), sizes, strides, box);
    return;
  }
  const auto page = static_cast<uint32_t>(p.page_size);
  p.box_keys = static_cast<int32_t>(std::min<uint32_t>(page & (~page + 1), 64));
  const uint64_t sizes[] = {dim, page, static_cast<uint64_t>(a.keys.size(0))},
                 strides[] = {dim, static_cast<uint64_t>(p.page_stride)};
  const uint32_t box[] = {static_cast<uint32_t>(dim), static_cast<uint32_t>(p.box_keys), 1};
  kernel.describe(p.key_map, 1, 3, const_cast<void*>(p.keys), sizes, strides, box);
}

// The entry whose CTA has all rows of a request, or of the call; else the last.
const Entry& tile(const Kernel& kernel, bool paged, int64_t rows) {
  return kernel.first_entry([&](const Entry& e) {
    const auto config = MqaLogitsConfig::of(e);
    return config.paged == paged && (config.rows * config.row_groups >= rows || config.is_last);
  });
}

void launch(const Kernel& kernel, MqaLogitsParams& p, const MqaLogitsArgs& a) {
  const bool paged = !p.starts;
  const int64_t rows = paged ? p.next_n : p.rows;
  const Entry& entry = tile(kernel, paged, rows);
  const auto config = MqaLogitsConfig::of(entry);
  const int64_t cta_rows = config.rows * std::max<int64_t>(config.row_groups, 1),
                tiles = (rows + cta_rows - 1) / cta_rows;
  const int64_t multiprocessors = kernel.multiprocessors(a.q.device());
  Launch launch{paged ? p.requests * tiles : tiles};
  launch.pdl = kernel.pdl(a.enable_pdl);
  if (config.row_groups) {
    launch.grid_x = multiprocessors;
    launch.cooperative = bool{a.indices};
    describe(kernel, p, a, config);
  } else {
    const int64_t key_tiles = (std::max(p.columns, p.keys_in_all) + 63) / 64;
    p.chunk_tiles = chunk_tiles(launch.grid_x, key_tiles, multiprocessors);
    launch.grid_y = (key_tiles + p.chunk_tiles - 1) / p.chunk_tiles;
  }
  kernel.launch(entry, launch, a.q.device(), p);
}
#endif

// The arguments by the names that callers of the two forms know them by.
MqaLogitsArgs named(const MqaLogitsArgs& given) {
  MqaLogitsArgs a = given;
  const bool paged{a.block_table};
  a.keys = a.keys.as(paged ? "kv_cache" : "kv");
  a.ends = a.ends.as(paged ? "context_lens" : "cu_seq_len_k_end");
  if (a.starts) a.starts = a.starts.as("cu_seq_len_k_start");
  if (a.key_scales) a.key_scales = a.key_scales.as("kv[1]");
  return a;
}

// The arguments of top-k: logits are memory of the call then.
void select(MqaLogitsParams& p, const MqaLogitsArgs& a, Dim& rows) {
  Dim top_k{"top_k"}, words{"state of a row", sizeof(MqaSelectRow) / 4};
  a.indices.is({kI32}).on(a.q).contiguous().shape(rows, top_k);
  a.state.is({kI32}).on(a.q).contiguous().shape(rows, words);
  if (a.scores) a.scores.is({kF32}).on(a.q).contiguous().shape(rows, top_k);
  FI_CHECK(top_k >= 1 && top_k <= kMqaSelectCandidates && !a.clean && a.block_table, ValueError,
           "indices must be [rows, 1 to %d] of logits that are paged and not clean; got %s", kMqaSelectCandidates,
           a.indices.shape_str().c_str());
  FI_CHECK(a.logits.alignment(16, {a.logits.stride(0)}) == 16 && a.state.alignment(16, {}) == 16, ValueError,
           "logits and state must lie at multiples of 16 bytes");
  p.indices = a.indices.data<int32_t>(), p.scores = a.scores ? a.scores.data<float>() : nullptr;
  p.state = static_cast<MqaSelectRow*>(a.state.data()), p.top_k = static_cast<int32_t>(top_k);
  p.mapped = a.mapped, p.prefer_last = a.prefer_last, p.orders_nan = 1;
}

void mqa_logits(const Kernel& kernel, const MqaLogitsArgs& given) {
  // 1 check
  const MqaLogitsArgs a = named(given);
  Dim rows{"rows"}, heads{"heads"}, dim{"dim"}, keys{"keys"}, columns{"columns"};
  MqaLogitsParams p{};
  a.q.is({kE4M3}).contiguous();
  a.logits.is({kF32}).on(a.q).inner_contiguous();
  a.weights.is({kF32}).on(a.q).inner_contiguous();
  a.keys.on(a.q);
  a.ends.is({kI32}).on(a.q).contiguous();
  const bool paged{a.block_table};
  int64_t pages = 0;
  if (paged) {
    Dim requests{"batch"}, next_n{"next_n"}, table{"pages of a request"}, page_size{"page_size"}, one{"1", 1},
        bytes{"dim + 4"};
    a.q.shape(requests, next_n, heads, dim);
    rows.value = requests * next_n;
    bytes.value = dim + 4;
    Dim count{"pages"};
    a.keys.is({kU8}).shape(count, page_size, one, bytes);
    FI_CHECK(
        page_size > 0 && page_size % 16 == 0 && (page_size == 0 || a.keys.stride(1) == bytes) &&
            a.keys.stride(3) == 1 && a.keys.stride(0) % 4 == 0,
        ValueError,
        "kv_cache must have pages of a multiple of 16 tokens, whose bytes lie together and begin at multiples of 4 "
        "bytes; got %s",
        a.keys.shape_str().c_str());
    a.block_table.is({kI32}).on(a.q).inner_contiguous().shape(requests, table);
    if (a.ends.ndim() == 2) {
      a.ends.shape(requests, next_n);
      p.ends_of_rows = 1;
    } else {
      a.ends.shape(requests);
    }
    pages = count;
    p.requests = static_cast<int32_t>(requests), p.next_n = static_cast<int32_t>(next_n);
    p.page_size = static_cast<int32_t>(page_size), p.table_columns = static_cast<int32_t>(table);
    p.block_table = a.block_table.data<const int32_t>(), p.table_stride = a.block_table.stride(0);
    p.page_stride = a.keys.stride(0);
  } else {
    a.q.shape(rows, heads, dim);
    a.keys.is({kE4M3}).contiguous().shape(keys, dim);
    a.key_scales.is({kF32}).on(a.q).contiguous().shape(keys);
    a.starts.is({kI32}).on(a.q).contiguous().shape(rows);
    a.ends.shape(rows);
    p.scales = a.key_scales.data<const float>(), p.starts = a.starts.data<const int32_t>();
    p.keys_in_all = static_cast<int32_t>(keys);
  }
  a.weights.shape(rows, heads);
  a.logits.shape(rows, columns);
  FI_CHECK(dim == 32 || dim == 64 || dim == 128, ValueError, "q must have a dim of 32, 64 or 128; got %s",
           a.q.shape_str().c_str());
  FI_CHECK(heads == 8 || heads == 16 || heads == 32 || heads == 64, ValueError,
           "q must have 8, 16, 32 or 64 heads; got %s", a.q.shape_str().c_str());
  FI_CHECK(rows < 0x7fffffff / 64 && columns < 0x7fff0000 && keys < 0x7fff0000, ValueError,
           "q, kv and the logits are too large: got %s and logits %s", a.q.shape_str().c_str(),
           a.logits.shape_str().c_str());
  if (rows == 0 || columns == 0 || (!paged && keys == 0)) return;

  // 2 shape
  p.logits = a.logits.data<float>(), p.logits_stride = a.logits.stride(0), p.weights_stride = a.weights.stride(0);
  p.q = a.q.data(), p.weights = a.weights.data<const float>(), p.keys = a.keys.data();
  p.ends = a.ends.data<const int32_t>();
  p.rows = static_cast<int32_t>(rows), p.columns = static_cast<int32_t>(columns), p.heads = static_cast<int32_t>(heads);
  p.clean = a.clean && !a.relative, p.relative = a.relative, p.orders_nan = a.orders_nan;
  if (a.indices) select(p, a, rows);
  if (paged && kernel.checks_contents(a.q.device())) check_pages(kernel, a, p, pages);

  // 3 launch
#if FI_CUDA
  launch(kernel, p, a);
#else
  (void)a.enable_pdl;
  run_cpu(p, dim);
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::mqa_logits, fi::request_of)
