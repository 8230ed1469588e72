// Launches top_k: the k largest of a segment of each row, as values and indices, or as slots of a page table.
#include "fi/topk/top_k.h"

#include "fi/generated/top_k.h"
#include "fi/host/contents.h"

#include <algorithm>

#if !FI_CUDA
#include "fi/cpu/parallel.h"
#include "fi/topk/top_k_cpu.h"
#endif

namespace fi {
namespace {

#if FI_CUDA
int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The shared memory layout of a CTA that has `limit` bytes, when `cluster` CTAs share a row.
struct Layout {
  int64_t cluster, slice, cached, bitmap, sort, bytes;  // slice and cached in vectors of 16 bytes

  Layout(const TopKParams& p, int64_t element_bytes, int64_t cluster, int64_t limit) : cluster(cluster) {
    const int64_t per_vector = 16 / element_bytes, all = ceil_div(p.width, per_vector) + 1;  // 1: rows may be unaligned
    slice = ceil_div(ceil_div(all, cluster), 32) * 32;
    bitmap = ceil_div(slice / 32, 4) * 16;
    sort = 0;
    if (p.sorted)
      for (sort = 32; sort < p.k * 8; sort *= 2) {
      }
    const int64_t fixed = static_cast<int64_t>(sizeof(TopKShared)) + bitmap + sort;
    cached = std::min(slice, std::max<int64_t>(limit - fixed, 0) / 512 * 32);
    bytes = fixed + cached * 16;
  }
};

Layout tile(const Kernel& kernel, const TopKParams& p, int64_t element_bytes, DLDevice device) {
  const Entry& entry = kernel.entries[0];
  const int64_t limit = kernel.shared_limit(device), sms = kernel.multiprocessors(device);
  // Clusters of 16 are not portable, and untested beyond data centre GPUs.
  const int64_t most = std::min<int64_t>(TopKConfig::of(entry).largest_cluster, kernel.capability < 120 ? 16 : 8);
  // The fewest CTAs that fill the device, one per SM while there are few rows: fastest in docs/notes/topk-threshold.md.
  // Large clusters do not fit on all SMs at once. The smallest slice, 2048 elements, is not tuned.
  const auto fits = [&](int64_t cluster) {
    return p.rows * cluster <= (cluster > 4 ? sms / 2 : sms) && p.width / cluster >= 2048;
  };
  int64_t cluster = 1;
  while (cluster < most && fits(cluster * 2)) cluster *= 2;
  const int64_t ctas_per_sm = p.rows * cluster <= sms ? 1 : 2;
  // The driver reserves 1 KB of shared memory per CTA.
  Layout layout(p, element_bytes, cluster, (limit + 1024) / ctas_per_sm - 1024);
  while (layout.cluster < most && layout.bytes > limit) layout = Layout(p, element_bytes, layout.cluster * 2, limit);
  return layout;
}

void launch(const Kernel& kernel, TopKParams& p, int64_t element_bytes, DLDevice device) {
  const Layout layout = tile(kernel, p, element_bytes, device);
  FI_CHECK(layout.bytes <= kernel.shared_limit(device), ValueError,
           "input: rows of %d elements need %lld bytes of shared memory per CTA, the device has %lld", p.width,
           static_cast<long long>(layout.bytes), static_cast<long long>(kernel.shared_limit(device)));
  p.cached = static_cast<int32_t>(layout.cached);
  p.bitmap_at = static_cast<int32_t>(layout.cached * 16);
  p.sort_at = static_cast<int32_t>(p.bitmap_at + layout.bitmap);
  p.fixed_at = static_cast<int32_t>(p.sort_at + layout.sort);
  Launch config{p.rows * layout.cluster};
  config.shared_bytes = layout.bytes;
  config.cluster = static_cast<unsigned>(layout.cluster);
  config.pdl = kernel.pdl(-1);
  kernel.launch(kernel.entries[0], config, device, p);
}
#else
void run_cpu(const TopKParams& p, DType dtype) {
  const cpu::LoadRow load = cpu::row_loader(dtype);
  const int64_t bytes = dtype.bytes();
  cpu::parallel_for(p.rows, std::max<int64_t>(1, 16384 / std::max(p.width, 1)), [&](int64_t begin, int64_t end) {
    cpu::TopKSelector work(p.width);
    std::vector<int32_t> all;
    for (int64_t row = begin; row < end; ++row) {
      const int64_t start = p.row_starts ? std::clamp(p.row_starts[row], 0, p.width) : 0;
      const int64_t length = std::min<int64_t>(p.lengths ? std::max(p.lengths[row], 0) : p.width, p.width - start);
      const char* x = static_cast<const char*>(p.input) + (row * p.input_stride + start) * bytes;
      const int64_t count = std::min<int64_t>(p.k, length);
      const std::vector<int32_t>* selected = &all;
      if (length > p.k || p.sorted) {
        selected = &work.select(x, length, count, p, load);
      } else {
        for (int64_t i = static_cast<int64_t>(all.size()); i < length; ++i) all.push_back(static_cast<int32_t>(i));
      }
      const int32_t* table = nullptr;
      if (p.page_table) {
        const int32_t* starts = p.table_starts ? p.table_starts : p.row_starts;
        table =
            p.page_table + (p.table_rows ? p.table_rows[row] : row) * p.page_table_stride + (starts ? starts[row] : 0);
      }
      const int32_t offset = p.offsets ? p.offsets[row] : 0;
      for (int64_t i = 0, at = row * p.k; i < p.k; ++i, ++at) {
        const int32_t index = i < count ? (*selected)[i] : -1;
        if (p.indices) {
          p.indices[at] = index;
          std::memcpy(static_cast<char*>(p.values) + at * bytes, x + index * bytes, bytes);
          continue;
        }
        int32_t found = index;
        if (index >= 0)
          found = static_cast<int32_t>(table ? int64_t{table[index / p.page_size]} * p.page_size + index % p.page_size
                                             : int64_t{index} + offset);
        p.mapped[at] = found;
        if (p.raw) p.raw[at] = index;
      }
    }
  });
}
#endif

// Raises unless the segment of each row is within a row of the page table.
void check_page_table(const Kernel& kernel, const TopKArgs& a, int64_t rows, int64_t width) {
  const int64_t batch = a.src_page_table.size(0), pages = a.src_page_table.size(1);
  const auto values = [&](const OptionalTensor& t) { return Integers(kernel, t ? Tensor(t) : a.input, t ? rows : 0); };
  const Integers lengths = values(a.lengths), row_starts = values(a.row_starts), table_rows = values(a.row_to_batch);
  const Integers table_starts = values(a.page_table_row_starts);
  const auto at = [](const Integers& x, int64_t i, int64_t otherwise) { return x.size() ? x[i] : otherwise; };
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t start = std::clamp<int64_t>(at(row_starts, i, 0), 0, width);
    const int64_t length = std::min(at(lengths, i, width), width - start);
    if (length <= 0) continue;
    const int64_t row = at(table_rows, i, i), first = at(table_starts, i, at(row_starts, i, 0));
    FI_CHECK(row >= 0 && row < batch, ValueError,
             "row_to_batch must be in 0..%lld, the rows of src_page_table; got %lld at %lld",
             static_cast<long long>(batch - 1), static_cast<long long>(row), static_cast<long long>(i));
    const int64_t end = first + (length + a.page_size - 1) / a.page_size;
    FI_CHECK(first >= 0 && end <= pages, ValueError,
             "src_page_table must have columns %lld to %lld for row %lld of input; got %lld columns",
             static_cast<long long>(first), static_cast<long long>(end), static_cast<long long>(i),
             static_cast<long long>(pages));
  }
}

// Returns the data of a tensor with one int32 per row, or null.
const int32_t* per_row(const OptionalTensor& t, const Tensor& input, Dim& rows) {
  if (!t) return nullptr;
  t.is({kI32}).on(input).contiguous().shape(rows);
  return t.data<const int32_t>();
}

TopKRequest request_of(const TopKArgs& a) { return {a.input.dtype()}; }

void top_k(const Kernel& kernel, const TopKArgs& a) {
  // 1 check
  Dim rows{"rows"}, width{"width"}, columns{"k"}, batch{"batch"}, pages{"pages"};
  columns.value = a.k;
  a.input.is({kF32, kF16, kBF16}).inner_contiguous().shape(rows, width);
  FI_CHECK(width < (int64_t{1} << 30) && rows < (int64_t{1} << 26), ValueError,
           "input must have fewer than 2^26 rows of fewer than 2^30 elements; got %s", a.input.shape_str().c_str());
  FI_CHECK(a.k >= 0 && a.k < (int64_t{1} << 30), ValueError, "k must be 0 or more and less than 2^30; got %lld",
           static_cast<long long>(a.k));
  FI_CHECK(!!a.values == !!a.indices && !!a.indices == !a.out, TypeError,
           "values and indices must be given together, or mapped alone");
  if (a.indices) {
    FI_CHECK(a.k <= width && !a.lengths, ValueError, "k must be at most the length of a row, %lld; got %lld",
             static_cast<long long>(width), static_cast<long long>(a.k));
    a.values.like(a.input).contiguous().shape(rows, columns);
    a.indices.is({kI64}).on(a.input).contiguous().shape(rows, columns);
  } else {
    a.out.is({kI32}).on(a.input).contiguous().shape(rows, columns);
    if (a.out_raw_indices) a.out_raw_indices.is({kI32}).on(a.input).contiguous().shape(rows, columns);
  }
  FI_CHECK(a.page_size >= 1 && a.page_size < (int64_t{1} << 30), ValueError,
           "page_size must be 1 or more and less than 2^30; got %lld", static_cast<long long>(a.page_size));
  if (a.src_page_table) {
    a.src_page_table.is({kI32}).on(a.input).inner_contiguous().shape(batch, pages);
    FI_CHECK(a.row_to_batch || batch >= rows, ValueError,
             "src_page_table must have a row for each row of input, %lld, where row_to_batch is None; got %s",
             static_cast<long long>(rows), a.src_page_table.shape_str().c_str());
    FI_CHECK(a.page_size == 1 || !a.row_starts || a.page_table_row_starts, ValueError,
             "page_table_row_starts is required with row_starts where page_size is not 1; got page_size %lld",
             static_cast<long long>(a.page_size));
  }

  // 2 shape
  TopKParams p{};
  p.input = a.input.data();
  p.values = a.values ? a.values.data() : nullptr;
  p.indices = a.indices ? a.indices.data<int64_t>() : nullptr;
  p.mapped = a.out ? a.out.data<int32_t>() : nullptr;
  p.raw = a.out_raw_indices ? a.out_raw_indices.data<int32_t>() : nullptr;
  p.lengths = per_row(a.lengths, a.input, rows);
  p.row_starts = per_row(a.row_starts, a.input, rows);
  p.page_table = a.src_page_table ? a.src_page_table.data<const int32_t>() : nullptr;
  p.table_rows = per_row(a.row_to_batch, a.input, rows);
  p.table_starts = per_row(a.page_table_row_starts, a.input, rows);
  p.offsets = per_row(a.offsets, a.input, rows);
  p.input_stride = a.input.stride(0);
  p.page_table_stride = a.src_page_table ? a.src_page_table.stride(0) : 0;
  p.rows = static_cast<int32_t>(rows);
  p.width = static_cast<int32_t>(width);
  p.k = static_cast<int32_t>(a.k);
  p.page_size = static_cast<int32_t>(a.page_size);
  p.prefer_last = a.prefer_last > 0;
  p.sorted = a.sorted > 0;
  if (rows == 0 || a.k == 0) return;
  if (a.src_page_table && kernel.checks_contents(a.input.device())) check_page_table(kernel, a, rows, width);

  // 3 launch
#if FI_CUDA
  FI_CHECK(!p.sorted || a.k <= kTopKSortable, ValueError, "k must be at most %d to be sorted; got %lld", kTopKSortable,
           static_cast<long long>(a.k));
  launch(kernel, p, a.input.dtype().bytes(), a.input.device());
#else
  (void)kernel;
  run_cpu(p, a.input.dtype());
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::top_k, fi::request_of)
