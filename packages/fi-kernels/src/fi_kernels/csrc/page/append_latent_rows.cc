// append_latent_rows: checks the arguments, and quantizes latent rows to bytes of pages.
#include "fi/page/append_latent_rows.h"

#include "fi/generated/append_latent_rows.h"
#include "fi/host/contents.h"

#if !FI_CUDA
#include <cmath>
#include <cstring>

#include "fi/cpu/row_convert.h"
#endif

namespace fi {
namespace {

#if FI_CUDA
// The entry for packed rows, or for the others.
const Entry& tile(const Kernel& kernel, const AppendLatentRowsParams& p) {
  return kernel.first_entry([&](const Entry& e) { return AppendLatentRowsConfig::of(e).packed == p.is_packed; });
}
#else
void run_cpu(const AppendLatentRowsParams& p) {
  const cpu::LoadRow load = cpu::row_loader(kBF16);
  const cpu::StoreRow store = cpu::row_storer(kE4M3);
  cpu::for_rows(p.n, 4 * kLatentColumns, kRowGroup, [&](int64_t row, float* x) {
    const int64_t slot = p.slot(row);
    if (slot < 0) return;
    const auto* from = static_cast<const uint16_t*>(p.rows) + row * p.row_stride;
    const auto to = p.place(slot);
    const int32_t group = p.group();
    for (int32_t g = 0; g < p.codes() / group; ++g) {
      load(from + g * group, x, group);
      float amax = 0.f;
      for (int32_t i = 0; i < group; ++i) amax = std::fabs(x[i]) > amax ? std::fabs(x[i]) : amax;
      uint32_t bits;
      std::memcpy(&bits, &amax, sizeof bits);
      const uint32_t exponent = latent_exponent(bits), power = power_of_two_bits(exponent);
      float scale = latent_scale(amax);
      if (p.is_packed || p.power_of_two) std::memcpy(&scale, &power, sizeof scale);
      for (int32_t i = 0; i < group; ++i) x[i] /= scale;
      store(x, to.row + g * group, group);
      if (p.is_packed)
        to.scales[g] = static_cast<uint8_t>(exponent);
      else
        std::memcpy(to.scales + g * 4, &scale, sizeof scale);
    }
    if (p.is_packed) to.scales[kPackedCodes / kPackedGroup] = 0;
    const int32_t rest = p.codes() + (p.is_packed ? 0 : kLatentColumns / kRowGroup * 4);
    std::memcpy(to.row + rest, from + p.codes(), kRopeColumns * 2);
  });
}
#endif

void append_latent_rows(const Kernel& kernel, const AppendLatentRowsArgs& a) {
  // 1 check
  Dim n{"n"}, width{"width"}, pages{"num_pages"}, page_size{"page_size"};
  a.kv.is({kBF16}).inner_contiguous().shape(n, width);
  const bool is_packed = width == kLatentColumns;
  FI_CHECK(is_packed || width == kLatentColumns + kRopeColumns, ValueError, "kv must have rows of 576 or 512; got %s",
           a.kv.shape_str().c_str());
  const int64_t bytes = is_packed ? kPackedRowBytes + kPackedScaleBytes : kRowBytes;
  Dim token{is_packed ? "584" : "656", bytes};
  a.kv_cache.is({kU8}).on(a.kv).inner_contiguous().shape(pages, page_size, token);
  a.slot_mapping.is({kI32, kI64}).on(a.kv).contiguous().shape(n);
  FI_CHECK(page_size > 0 && pages * page_size <= 0x7fffffff, ValueError,
           "kv_cache must have pages of a token or more, and less than 2^31 tokens; got %s",
           a.kv_cache.shape_str().c_str());
  FI_CHECK((page_size == 1 || a.kv_cache.stride(1) == bytes) && (pages == 1 || a.kv_cache.stride(0) % 16 == 0),
           ValueError,
           "kv_cache must have tokens %lld bytes apart and pages at multiples of 16 bytes; got %lld and %lld",
           static_cast<long long>(bytes), static_cast<long long>(a.kv_cache.stride(1)),
           static_cast<long long>(a.kv_cache.stride(0)));
  FI_CHECK(!is_packed || a.power_of_two, ValueError, "power_of_two must be true for packed pages");
  if (n == 0 || pages == 0) return;
  if (kernel.checks_contents(a.kv.device())) {
    const Integers slots(kernel, a.slot_mapping);
    for (int64_t i = 0; i < slots.size(); ++i)
      FI_CHECK(slots[i] < pages * page_size, ValueError,
               "slot_mapping must name slots of the cache, below %lld, or be negative; got %lld at %lld",
               static_cast<long long>(pages * page_size), static_cast<long long>(slots[i]), static_cast<long long>(i));
  }

  // 2 shape
  AppendLatentRowsParams p{};
  p.rows = a.kv.data();
  p.cache = a.kv_cache.data<uint8_t>();
  p.slots = a.slot_mapping.data();
  p.row_stride = a.kv.stride(0), p.page_stride = a.kv_cache.stride(0);
  p.n = n, p.num_slots = pages * page_size;
  p.page_size = divisor(static_cast<uint32_t>(page_size));
  p.wide_slots = a.slot_mapping.dtype() == kI64;
  p.is_packed = is_packed, p.power_of_two = a.power_of_two;

  // 3 launch
#if FI_CUDA
  FI_CHECK(a.kv.row_alignment(16) == 16 && reinterpret_cast<uintptr_t>(p.cache) % 16 == 0, ValueError,
           "kv and kv_cache must have rows at multiples of 16 bytes; got strides %lld of kv",
           static_cast<long long>(a.kv.stride(0)));
  const Entry& entry = tile(kernel, p);
  const int64_t rows = entry.threads / 32;
  Launch launch{(p.n + rows - 1) / rows};
  launch.pdl = kernel.pdl(-1);
  kernel.launch(entry, launch, a.kv.device(), p);
#else
  run_cpu(p);
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::append_latent_rows)
