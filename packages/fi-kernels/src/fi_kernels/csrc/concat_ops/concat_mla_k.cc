// concat_mla_k: checks the arguments, launches the CUDA kernel or copies on the CPU.
#include "fi/concat_ops/concat_mla_k.h"

#include <cstring>

#include "fi/generated/concat_mla_k.h"
#include "fi/host/op.h"

#if !FI_CUDA
#include "fi/cpu/parallel.h"
#endif

namespace fi {
namespace {

#if FI_CUDA
const Entry& tile(const Kernel& kernel, int64_t vec) {
  return kernel.first_entry([&](const Entry& entry) { return ConcatMlaKConfig::of(entry).vec_bytes <= vec; });
}
#endif

void concat_mla_k(const Kernel& kernel, const ConcatMlaKArgs& a) {
  // 1 check
  Dim n{"n"}, heads{"heads"}, nope{"nope"}, rope{"rope"}, one{"1", 1};
  a.k_nope.inner_contiguous().shape(n, heads, nope);
  a.k_rope.like(a.k_nope).inner_contiguous().shape(n, one, rope);
  Dim width{"nope + rope", nope + rope};
  a.k.like(a.k_nope).inner_contiguous().shape(n, heads, width);
  const int64_t bytes = a.k.dtype().bytes();
  FI_CHECK(bytes > 0, TypeError, "k must have a dtype of whole bytes; got %s", a.k.dtype().str().c_str());
  if (n == 0 || heads == 0 || width == 0) return;

  // 2 shape
  ConcatMlaKParams p{};
  p.k = a.k.data<char>(), p.k_nope = a.k_nope.data<const char>(), p.k_rope = a.k_rope.data<const char>();
  p.k_token = a.k.stride(0) * bytes, p.k_head = a.k.stride(1) * bytes;
  p.nope_token = a.k_nope.stride(0) * bytes, p.nope_head = a.k_nope.stride(1) * bytes;
  p.rope_token = a.k_rope.stride(0) * bytes;

  // 3 launch
#if FI_CUDA
  int64_t vec = 16;
  for (const Tensor& t : {Tensor(a.k), Tensor(a.k_nope), Tensor(a.k_rope)}) vec = std::min(vec, t.row_alignment(vec));
  while (nope * bytes % vec || rope * bytes % vec) vec /= 2;
  const int64_t vectors = heads * (width * bytes / vec);
  FI_CHECK(vectors <= 0x3fffffff, ValueError, "k is too wide: got shape %s", a.k.shape_str().c_str());
  p.width = divisor(static_cast<uint32_t>(width * bytes / vec));
  p.nope = static_cast<int32_t>(nope * bytes / vec);
  p.vectors = static_cast<int32_t>(vectors);
  const Entry& entry = tile(kernel, vec);
  Launch launch{n};
  launch.pdl = kernel.pdl(a.enable_pdl);
  kernel.launch(entry, launch, a.k.device(), p);
#else
  (void)kernel, (void)a.enable_pdl;
  const auto nope_bytes = static_cast<size_t>(nope * bytes), rope_bytes = static_cast<size_t>(rope * bytes);
  cpu::parallel_for(n * heads, std::max<int64_t>(1, 65536 / (width * bytes)), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t token = i / heads, head = i % heads;
      char* to = p.k + token * p.k_token + head * p.k_head;
      std::memcpy(to, p.k_nope + token * p.nope_token + head * p.nope_head, nope_bytes);
      std::memcpy(to + nope_bytes, p.k_rope + token * p.rope_token, rope_bytes);
    }
  });
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::concat_mla_k)
