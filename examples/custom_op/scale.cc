// The host entry of scale, compiled for the CPU (FI_CUDA = 0) or as the launcher of scale.cu (FI_CUDA = 1).
#include "scale.h"

#include "fi/host/function.h"

#if !FI_CUDA
#include "fi/cpu/parallel.h"
#endif

namespace {

void scale(const fi::Kernel& kernel, fi::Tensor out, fi::Tensor x, double a) {
  // 1 check
  fi::Dim n{"n"};
  x.is({fi::kF32}).shape(n).inner_contiguous();
  out.like(x).shape(n).inner_contiguous();

  // 2 shape
  const ScaleParams p{out.data<float>(), x.data<float>(), n, static_cast<float>(a)};

  // 3 launch
#if FI_CUDA
  const fi::Entry& entry = kernel.entries[0];
  kernel.launch(entry, fi::Launch{(p.n + entry.threads - 1) / entry.threads}, x.device(), p);
#else
  (void)kernel;
  fi::cpu::parallel_for(p.n, 16384, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) p.out[i] = p.a * p.x[i];
  });
#endif
}

}  // namespace

FI_FUNCTION(scale, "out", "x", "a")
