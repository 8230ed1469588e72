// packbits and segment_packbits: packs boolean masks into bits.
#include "fi/quantization/packbits.h"

#include "fi/generated/packbits.h"
#include "fi/host/contents.h"
#include "fi/host/tile.h"

#if !FI_CUDA
#include <algorithm>
#include <cstring>

#include "fi/cpu/parallel.h"
#include "fi/cpu/target.h"
#include "fi/find_segment.h"
#endif

namespace fi {
namespace {

#if FI_CUDA
// The entry with 8 elements per thread supports segments and any alignment; an entry with more supports one segment
// with x aligned to 16 bytes and y to 2.
const Entry& tile(const Kernel& kernel, const PackbitsParams& p) {
  const bool vectorizable =
      !p.indptr && reinterpret_cast<uint64_t>(p.x) % 16 == 0 && reinterpret_cast<uint64_t>(p.y) % 2 == 0;
  return kernel.first_entry(
      [&](const Entry& entry) { return vectorizable || PackbitsConfig::of(entry).elements_per_thread <= 8; });
}
#else
FI_CLONES void pack_bytes(const uint8_t* x, uint8_t* y, int64_t bytes, bool big_endian) {
  for (int64_t i = 0; i < bytes; ++i) {
    uint64_t eight;
    std::memcpy(&eight, x + 8 * i, sizeof eight);
    y[i] = pack(eight, big_endian);
  }
}

// Writes bytes [first, last) of the output of one segment.
void pack_segment(const uint8_t* x, int64_t elements, uint8_t* y, int64_t first, int64_t last, bool big_endian) {
  const int64_t whole = std::min(last, elements / 8);
  pack_bytes(x + 8 * first, y + first, whole - first, big_endian);
  if (last > whole) {
    uint64_t eight = 0;
    std::memcpy(&eight, x + 8 * whole, static_cast<size_t>(elements - 8 * whole));
    y[whole] = pack(eight, big_endian);
  }
}

void run_cpu(const PackbitsParams& p) {
  cpu::parallel_for(p.bytes, 16384, [&](int64_t begin, int64_t end) {
    if (!p.indptr) return pack_segment(p.x, p.elements, p.y, begin, end, p.big_endian);
    for (int32_t s = find_segment(p.new_indptr, p.segments, begin); begin < end; ++s) {
      const int64_t y_begin = p.new_indptr[s], y_end = std::min<int64_t>(end, p.new_indptr[s + 1]),
                    x_begin = indptr_at(p, s);
      if (y_end <= begin) continue;
      pack_segment(p.x + x_begin, indptr_at(p, s + 1) - x_begin, p.y + y_begin, begin - y_begin, y_end - y_begin,
                   p.big_endian);
      begin = y_end;
    }
  });
}
#endif

void packbits(const Kernel& kernel, const PackbitsArgs& a) {
  // 1 check
  a.x.is({kBool, kU8}).contiguous();
  Dim bytes{"num_bytes"};
  if (a.indptr) {
    Dim bounds{"num_segments + 1"};
    a.indptr.is({kI32, kI64}).on(a.x).contiguous().shape(bounds);
    FI_CHECK(bounds > 0 && bounds <= 0x7fffffff, ValueError,
             "indptr must have one element more than there are segments; got %s", a.indptr.shape_str().c_str());
    FI_CHECK(a.new_indptr, TypeError, "new_indptr must be given with indptr");
    a.new_indptr.is({kI32}).on(a.x).contiguous().shape(bounds);
  } else {
    bytes.value = (a.x.numel() + 7) / 8;
  }
  a.y.is({kU8}).on(a.x).contiguous().shape(bytes);

  // 2 shape
  PackbitsParams p{};
  p.x = a.x.data<const uint8_t>();
  p.y = a.y.data<uint8_t>();
  p.elements = a.x.numel();
  p.bytes = bytes;
  p.big_endian = static_cast<int32_t>(a.big);
  if (a.indptr) {
    p.indptr = a.indptr.data();
    p.new_indptr = a.new_indptr.data<const int32_t>();
    p.segments = static_cast<int32_t>(a.indptr.size(0) - 1);
    p.indptr_is_int64 = a.indptr.dtype() == kI64;
  }
  if (p.bytes == 0) return;
  if (a.indptr && kernel.checks_contents(a.x.device())) {
    check_offsets(Integers(kernel, a.indptr), p.elements);
    check_offsets(Integers(kernel, a.new_indptr), p.bytes);
  }

  // 3 launch
#if FI_CUDA
  const Entry& entry = tile(kernel, p);
  const int64_t elements = PackbitsConfig::of(entry).elements_per_thread;
  launch_threads(kernel, entry, (p.bytes * 8 + elements - 1) / elements, a.x.device(), p);
#else
  (void)kernel;
  run_cpu(p);
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::packbits)
