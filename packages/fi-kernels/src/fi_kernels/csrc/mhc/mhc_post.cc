// mhc_post: checks the arguments, launches the CUDA kernel or runs the CPU one.
#include "fi/mhc/mhc_post.h"

#include "fi/generated/mhc_post.h"
#include "fi/host/op.h"

#if !FI_CUDA
#include "fi/mhc/mhc_cpu.h"
#endif

namespace fi {
namespace {

#if !FI_CUDA
FI_CLONES void scaled(float* y, const float* x, float factor, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] = x[i] * factor;
}
void run_cpu(const MhcPostParams& p, int64_t tokens, DType dtype) {
  const cpu::LoadRow load = cpu::row_loader(dtype);
  const cpu::StoreRow store = cpu::row_storer(dtype);
  const int64_t bytes = dtype.bytes();
  constexpr int64_t kBuffers = kMhcStreams + 2;  // of x, of the old streams, and of one new stream
  cpu::for_pieces(tokens, p.h, kBuffers, [&](int64_t token, int64_t first, int64_t n, float* x) {
    load(static_cast<const char*>(p.x) + (token * p.x_token + first) * bytes, x, n);
    float *old = x + cpu::kPiece, *y = old + kMhcStreams * cpu::kPiece;
    for (int o = 0; o < kMhcStreams; ++o)
      load(static_cast<const char*>(p.residual) + (token * p.residual_token + o * p.residual_stream + first) * bytes,
           old + o * cpu::kPiece, n);
    for (int m = 0; m < kMhcStreams; ++m) {
      scaled(y, x, p.post[token * kMhcStreams + m], n);
      for (int o = 0; o < kMhcStreams; ++o)
        cpu::add_scaled(y, old + o * cpu::kPiece, p.comb[(token * kMhcStreams + o) * kMhcStreams + m], n);
      store(y, static_cast<char*>(p.out) + (token * p.out_token + m * p.out_stream + first) * bytes, n);
    }
  });
}
#endif

#if FI_CUDA
const Entry& tile(const Kernel& kernel, const MhcPostArgs& a, int64_t h) {
  const int64_t vec = vec_size(h, {a.out, a.x, a.residual});
  return kernel.first_entry([&](const Entry& entry) { return MhcPostConfig::of(entry).vec_size <= vec; });
}
#endif

MhcPostRequest request_of(const MhcPostArgs& a) { return {a.x.dtype()}; }

void mhc_post(const Kernel& kernel, const MhcPostArgs& a) {
  // 1 check
  Dim tokens{"tokens"}, h{"h"}, four{"4", kMhcStreams};
  a.residual.is({kF16, kBF16, kF32}).inner_contiguous().shape(tokens, four, h);
  a.x.like(a.residual).inner_contiguous().shape(tokens, h);
  a.out.like(a.residual).inner_contiguous().shape(tokens, four, h);
  a.post_layer_mix.is({kF32}).on(a.residual).contiguous().shape(tokens, four);
  a.comb_res_mix.is({kF32}).on(a.residual).contiguous().shape(tokens, four, four);
  FI_CHECK(h <= 1 << 23, ValueError, "residual must have at most 2^23 columns; got shape %s",
           a.residual.shape_str().c_str());
  if (tokens == 0 || h == 0) return;

  // 2 shape
  MhcPostParams p{};
  p.out = a.out.data(), p.x = a.x.data(), p.residual = a.residual.data();
  p.post = a.post_layer_mix.data<float>(), p.comb = a.comb_res_mix.data<float>();
  p.x_token = a.x.stride(0), p.residual_token = a.residual.stride(0), p.residual_stream = a.residual.stride(1);
  p.out_token = a.out.stride(0), p.out_stream = a.out.stride(1);
  p.h = static_cast<int32_t>(h);

  // 3 launch
#if FI_CUDA
  const Entry& entry = tile(kernel, a, h);
  const int64_t columns = MhcPostConfig::of(entry).vec_size * entry.threads;
  Launch launch{tokens, (h + columns - 1) / columns};
  launch.pdl = kernel.pdl(a.enable_pdl);
  kernel.launch(entry, launch, a.x.device(), p);
#else
  (void)kernel, (void)a.enable_pdl;
  run_cpu(p, tokens, a.x.dtype());
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::mhc_post, fi::request_of)
