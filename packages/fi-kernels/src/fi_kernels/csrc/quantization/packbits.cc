// packbits and segment_packbits: boolean masks to bits.
#include "fi/quantization/packbits.h"

#include "fi/host/op.h"

#if !FI_CUDA
#include <algorithm>
#include <cstring>

#include "fi/cpu/parallel.h"
#include "fi/cpu/target.h"
#include "fi/segments.h"
#endif

namespace fi {
namespace {

#if FI_CUDA
// Entries in order of preference; config = {elements a thread}: 8 takes any segments and addresses, more only one
// segment at addresses of whole vectors.
void launch(const Kernel& kernel, const PackbitsParams& p, DLDevice device) {
  const bool vectors =
      !p.indptr && reinterpret_cast<uint64_t>(p.x) % 16 == 0 && reinterpret_cast<uint64_t>(p.y) % 2 == 0;
  for (const Entry& entry : kernel.entries) {
    const int64_t elements = entry.config[0];
    if (elements > 8 && !vectors) continue;
    const int64_t threads = (p.bytes * 8 + elements - 1) / elements;
    Launch config{(threads + entry.threads - 1) / entry.threads};
    config.pdl = kernel.pdl(-1);
    return kernel.launch(entry, config, device, p);
  }
  raise("RuntimeError", "no entry");
}
#else
FI_CLONES void pack_run(const uint8_t* x, uint8_t* y, int64_t bytes, bool big) {
  for (int64_t i = 0; i < bytes; ++i) {
    uint64_t eight;
    std::memcpy(&eight, x + 8 * i, sizeof eight);
    y[i] = pack(eight, big);
  }
}

// Bytes [first, last) of the output of one segment.
void pack_segment(const uint8_t* x, int64_t elements, uint8_t* y, int64_t first, int64_t last, bool big) {
  const int64_t whole = std::min(last, elements / 8);
  pack_run(x + 8 * first, y + first, whole - first, big);
  if (last > whole) {
    uint64_t eight = 0;
    std::memcpy(&eight, x + 8 * whole, static_cast<size_t>(elements - 8 * whole));
    y[whole] = pack(eight, big);
  }
}

void run_cpu(const PackbitsParams& p) {
  cpu::parallel_for(p.bytes, 16384, [&](int64_t begin, int64_t end) {
    if (!p.indptr) return pack_segment(p.x, p.elements, p.y, begin, end, p.big);
    for (int32_t s = segment_of(p.new_indptr, p.segments, begin); begin < end; ++s) {
      const int64_t first = p.new_indptr[s], last = std::min<int64_t>(end, p.new_indptr[s + 1]),
                    start = element_at(p, s);
      if (last <= begin) continue;
      pack_segment(p.x + start, element_at(p, s + 1) - start, p.y + first, begin - first, last - first, p.big);
      begin = last;
    }
  });
}
#endif

void packbits(const Kernel& kernel, Tensor y, Tensor x, OptionalTensor indptr, OptionalTensor new_indptr, int64_t big) {
  // 1 check
  x.is({kBool, kU8}).contiguous();
  Dim bytes{"num_bytes"};
  if (indptr) {
    Dim bounds{"num_segments + 1"};
    indptr.is({kI32, kI64}).on(x).contiguous().shape(bounds);
    FI_CHECK(bounds > 0 && bounds <= 0x7fffffff, ValueError,
             "indptr must have one element more than there are segments; got %s", indptr.shape_str().c_str());
    FI_CHECK(new_indptr, TypeError, "new_indptr must be given with indptr");
    new_indptr.is({kI32}).on(x).contiguous().shape(bounds);
  } else {
    bytes.value = (x.numel() + 7) / 8;
  }
  y.is({kU8}).on(x).contiguous().shape(bytes);

  // 2 shape
  PackbitsParams p{};
  p.x = x.data<const uint8_t>();
  p.y = y.data<uint8_t>();
  p.elements = x.numel();
  p.bytes = bytes;
  p.big = static_cast<int32_t>(big);
  if (indptr) {
    p.indptr = indptr.data();
    p.new_indptr = new_indptr.data<const int32_t>();
    p.segments = static_cast<int32_t>(indptr.size(0) - 1);
    p.wide = indptr.dtype() == kI64;
  }
  if (p.bytes == 0) return;

  // 3 launch
#if FI_CUDA
  launch(kernel, p, x.device());
#else
  (void)kernel;
  run_cpu(p);
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::packbits, "y", "x", "indptr", "new_indptr", "big")
