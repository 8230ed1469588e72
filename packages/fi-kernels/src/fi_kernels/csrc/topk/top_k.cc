// top_k: the k largest of a segment of each row, as values and indices, or as slots of a page table.
#include "fi/topk/top_k.h"

#include "fi/host/op.h"

#if FI_CUDA
#include <algorithm>
#else
#include "fi/cpu/parallel.h"
#include "fi/topk/cpu_row.h"
#endif

namespace fi {
namespace {

#if FI_CUDA
int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How a row is laid over the shared memory of `cluster` blocks, of which one has `limit` bytes.
struct Plan {
  int64_t cluster, slice, held, bitmap, sort, bytes;  // slice and held in vectors of 16 bytes

  Plan(const TopKParams& p, int64_t element_bytes, int64_t cluster, int64_t limit) : cluster(cluster) {
    const int64_t per_vector = 16 / element_bytes, all = ceil_div(p.width, per_vector) + 1;  // 1: rows not aligned
    slice = ceil_div(ceil_div(all, cluster), 32) * 32;
    bitmap = ceil_div(slice / 32, 4) * 16;
    sort = 0;
    if (p.sorted)
      for (sort = 32; sort < p.k * 8; sort *= 2) {
      }
    const int64_t fixed = static_cast<int64_t>(sizeof(TopKShared)) + bitmap + sort;
    held = std::min(slice, std::max<int64_t>(limit - fixed, 0) / 512 * 32);
    bytes = fixed + held * 16;
  }
};

// config = {largest cluster, blocks an SM is to have or 0: choose, cluster to use or 0: choose}.
Plan choose(const Kernel& kernel, const TopKParams& p, int64_t element_bytes, DLDevice device) {
  const Entry& entry = kernel.entries[0];
  const int64_t limit = Kernel::shared_limit(device), processors = Kernel::multiprocessors(device);
  // Clusters of 16 are not portable, and untried beyond the data centre parts.
  const int64_t most = std::min<int64_t>(entry.config[0], kernel.capability < 120 ? 16 : 8);
  // The fewest blocks that fill the machine, one an SM while there are few rows. Large clusters do not find place on
  // all SMs at once. H200, fp32, k 2048, us: 64 x 131072 with 1, 2, 4 blocks a row 51, 38, 51; 16 x 131072 with 4,
  // 8: 25.5, 27.7; 256 x 131072 with one and two blocks an SM 126, 120. The least slice, 2048 elements, is not tuned.
  const auto fits = [&](int64_t cluster) {
    return p.rows * cluster <= (cluster > 4 ? processors / 2 : processors) && p.width / cluster >= 2048;
  };
  int64_t cluster = 1, blocks = entry.config[1];
  while (cluster < most && fits(cluster * 2)) cluster *= 2;
  if (entry.config[2]) cluster = entry.config[2];
  if (!blocks) blocks = p.rows * cluster <= processors ? 1 : 2;
  // A block costs 1 KB that its program does not see.
  Plan plan(p, element_bytes, cluster, (limit + 1024) / blocks - 1024);
  while (plan.cluster < most && plan.bytes > limit) plan = Plan(p, element_bytes, plan.cluster * 2, limit);
  return plan;
}

void launch(const Kernel& kernel, TopKParams& p, int64_t element_bytes, DLDevice device) {
  const Plan plan = choose(kernel, p, element_bytes, device);
  FI_CHECK(plan.bytes <= Kernel::shared_limit(device), ValueError,
           "input: rows of %d elements need %lld bytes of shared memory a block, the device has %lld", p.width,
           static_cast<long long>(plan.bytes), static_cast<long long>(Kernel::shared_limit(device)));
  p.held = static_cast<int32_t>(plan.held);
  p.bitmap_at = static_cast<int32_t>(plan.held * 16);
  p.sort_at = static_cast<int32_t>(p.bitmap_at + plan.bitmap);
  p.fixed_at = static_cast<int32_t>(p.sort_at + plan.sort);
  Launch config{p.rows * plan.cluster};
  config.shared_bytes = plan.bytes;
  config.cluster = static_cast<unsigned>(plan.cluster);
  config.pdl = kernel.pdl(-1);
  kernel.launch(kernel.entries[0], config, device, p);
}
#else
void run_cpu(const TopKParams& p, DType dtype) {
  const cpu::LoadRow load = cpu::row_loader(dtype);
  const int64_t bytes = dtype.bytes();
  cpu::parallel_for(p.rows, std::max<int64_t>(1, 16384 / std::max(p.width, 1)), [&](int64_t begin, int64_t end) {
    cpu::TopKRow work(p.width);
    std::vector<int32_t> all;
    for (int64_t row = begin; row < end; ++row) {
      const int64_t start = p.row_starts ? std::clamp(p.row_starts[row], 0, p.width) : 0;
      const int64_t length = std::min<int64_t>(p.lengths ? std::max(p.lengths[row], 0) : p.width, p.width - start);
      const char* x = static_cast<const char*>(p.input) + (row * p.input_row + start) * bytes;
      const int64_t count = std::min<int64_t>(p.k, length);
      const std::vector<int32_t>* taken = &all;
      if (length > p.k || p.sorted) {
        taken = &work.select(x, length, count, p, load);
      } else {
        for (int64_t i = static_cast<int64_t>(all.size()); i < length; ++i) all.push_back(static_cast<int32_t>(i));
      }
      const int32_t* table = nullptr;
      if (p.page_table) {
        const int32_t* starts = p.table_starts ? p.table_starts : p.row_starts;
        table = p.page_table + (p.table_rows ? p.table_rows[row] : row) * p.page_table_row + (starts ? starts[row] : 0);
      }
      const int32_t offset = p.offsets ? p.offsets[row] : 0;
      for (int64_t i = 0, at = row * p.k; i < p.k; ++i, ++at) {
        const int32_t place = i < count ? (*taken)[i] : -1;
        if (p.indices) {
          p.indices[at] = place;
          std::memcpy(static_cast<char*>(p.values) + at * bytes, x + place * bytes, bytes);
          continue;
        }
        int32_t found = place;
        if (place >= 0) found = table ? table[place / p.page_size] * p.page_size + place % p.page_size : place + offset;
        p.mapped[at] = found;
        if (p.raw) p.raw[at] = place;
      }
    }
  });
}
#endif

// A tensor of one int32 a row, or null.
const int32_t* per_row(const OptionalTensor& t, const Tensor& input, Dim& rows) {
  if (!t) return nullptr;
  t.is({kI32}).on(input).contiguous().shape(rows);
  return t.data<const int32_t>();
}

void top_k(const Kernel& kernel, Tensor input, int64_t k, OptionalTensor values, OptionalTensor indices,
           OptionalTensor mapped, OptionalTensor raw, OptionalTensor lengths, OptionalTensor row_starts,
           OptionalTensor page_table, OptionalTensor row_to_batch, OptionalTensor table_starts, OptionalTensor offsets,
           int64_t page_size, int64_t prefer_last, int64_t sorted) {
  // 1 check
  Dim rows{"rows"}, width{"width"}, columns{"k"}, batch{"batch"}, pages{"pages"};
  columns.value = k;
  input.is({kF32, kF16, kBF16}).inner_contiguous().shape(rows, width);
  FI_CHECK(width < (int64_t{1} << 30) && rows < (int64_t{1} << 26), ValueError,
           "input must have fewer than 2^26 rows of fewer than 2^30 elements; got %s", input.shape_str().c_str());
  FI_CHECK(k >= 0 && k < (int64_t{1} << 30), ValueError, "k must be 0 or more and less than 2^30; got %lld",
           static_cast<long long>(k));
  FI_CHECK(!!values == !!indices && !!indices == !mapped, TypeError,
           "values and indices must be given together, or mapped alone");
  if (indices) {
    FI_CHECK(k <= width && !lengths, ValueError, "k must be at most the length of a row, %lld; got %lld",
             static_cast<long long>(width), static_cast<long long>(k));
    values.like(input).contiguous().shape(rows, columns);
    indices.is({kI64}).on(input).contiguous().shape(rows, columns);
  } else {
    mapped.is({kI32}).on(input).contiguous().shape(rows, columns);
    if (raw) raw.is({kI32}).on(input).contiguous().shape(rows, columns);
  }
  FI_CHECK(page_size >= 1 && page_size < (int64_t{1} << 30), ValueError,
           "page_size must be 1 or more and less than 2^30; got %lld", static_cast<long long>(page_size));
  if (page_table) {
    page_table.is({kI32}).on(input).inner_contiguous().shape(batch, pages);
    FI_CHECK(row_to_batch || batch >= rows, ValueError,
             "src_page_table must have a row for each row of input, %lld, where row_to_batch is None; got %s",
             static_cast<long long>(rows), page_table.shape_str().c_str());
    FI_CHECK(page_size == 1 || !row_starts || table_starts, ValueError,
             "page_table_row_starts is required with row_starts where page_size is not 1; got page_size %lld",
             static_cast<long long>(page_size));
  }

  // 2 shape
  TopKParams p{};
  p.input = input.data();
  p.values = values ? values.data() : nullptr;
  p.indices = indices ? indices.data<int64_t>() : nullptr;
  p.mapped = mapped ? mapped.data<int32_t>() : nullptr;
  p.raw = raw ? raw.data<int32_t>() : nullptr;
  p.lengths = per_row(lengths, input, rows);
  p.row_starts = per_row(row_starts, input, rows);
  p.page_table = page_table ? page_table.data<const int32_t>() : nullptr;
  p.table_rows = per_row(row_to_batch, input, rows);
  p.table_starts = per_row(table_starts, input, rows);
  p.offsets = per_row(offsets, input, rows);
  p.input_row = input.stride(0);
  p.page_table_row = page_table ? page_table.stride(0) : 0;
  p.rows = static_cast<int32_t>(rows);
  p.width = static_cast<int32_t>(width);
  p.k = static_cast<int32_t>(k);
  p.page_size = static_cast<int32_t>(page_size);
  p.prefer_last = prefer_last > 0;
  p.sorted = sorted > 0;
  if (rows == 0 || k == 0) return;

  // 3 launch
#if FI_CUDA
  FI_CHECK(!p.sorted || k <= kTopKSortable, ValueError, "k must be at most %d to be sorted; got %lld", kTopKSortable,
           static_cast<long long>(k));
  launch(kernel, p, input.dtype().bytes(), input.device());
#else
  (void)kernel;
  run_cpu(p, input.dtype());
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::top_k, "input", "k", "values", "indices", "out", "out_raw_indices", "lengths", "row_starts", "src_page_table",
      "row_to_batch", "page_table_row_starts", "offsets", "page_size", "prefer_last", "sorted")
