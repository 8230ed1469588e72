// moe_gather: checks the arguments, launches the CUDA kernel or runs the CPU one.
#include "fi/fused_moe/moe_gather.h"

#include "fi/generated/moe_gather.h"

#if !FI_CUDA
#include <vector>

#include "fi/fused_moe/moe_cpu.h"
#endif

namespace fi {
namespace {

#if !FI_CUDA
void run_cpu(const MoeGatherParams& p, int64_t tokens, int64_t columns, DType from, DType to) {
  const cpu::LoadRow load = cpu::row_loader(from);
  const size_t bytes = static_cast<size_t>(columns * to.bytes()), blocks = static_cast<size_t>(p.blocks);
  cpu::for_rows(tokens, columns * (p.top_k + 1), columns, [&](int64_t token, float* x) {
    const char* source = static_cast<const char*>(p.x) + token * p.x_row_bytes;
    const int32_t *row = p.positions + token * p.top_k, *end = row + p.top_k;
    std::vector<char> narrow(bytes);
    std::vector<float> scales(blocks);
    if (from == to) {
      std::memcpy(narrow.data(), source, bytes);
      for (int64_t b = 0; p.x_scale && b < p.blocks; ++b)
        scales[static_cast<size_t>(b)] = p.x_scale[token * p.x_scale_row_stride + b * p.x_scale_block_stride];
    } else {
      load(source, x, columns);
      cpu::quantize_blocks(x, narrow.data(), scales.data(), columns);
    }
    for (; row < end; ++row) {
      if (*row < 0) continue;
      std::memcpy(static_cast<char*>(p.out) + *row * p.out_row_bytes, narrow.data(), bytes);
      if (p.out_scale && (p.x_scale || from != to))
        std::memcpy(p.out_scale + *row * p.blocks, scales.data(), blocks * sizeof(float));
    }
  });
}
#else
const Entry& tile(const Kernel& kernel, const MoeGatherArgs& a, bool quantizes) {
  const int64_t bytes = a.x.dtype().bytes();
  return kernel.first_entry([&](const Entry& e) {
    const auto config = MoeGatherConfig::of(e);
    if (config.load_bytes < bytes || a.x.size(1) * bytes % (config.load_bytes * config.loads)) return false;
    return a.x.row_alignment(config.load_bytes) == config.load_bytes &&
           (quantizes || a.out.row_alignment(config.load_bytes) == config.load_bytes);
  });
}
#endif

MoeGatherRequest request_of(const MoeGatherArgs& a) { return {a.x.dtype(), a.out.dtype() != a.x.dtype()}; }

void moe_gather(const Kernel& kernel, const MoeGatherArgs& a) {
  // 1 check
  Dim n{"rows"}, tokens{"tokens"}, columns{"columns"}, top_k{"top_k"};
  a.x.is({kF16, kBF16, kE4M3, kU8}).inner_contiguous().shape(tokens, columns);
  a.positions.is({kI32}).on(a.x).contiguous().shape(tokens, top_k);
  const bool quantizes = a.out.dtype() != a.x.dtype();
  if (quantizes) {
    a.out.is({kE4M3}).on(a.x);
    a.x.is({kF16, kBF16});
  } else {
    a.out.like(a.x);
  }
  a.out.inner_contiguous().shape(n, columns);
  Dim blocks{"columns / 128", columns / 128};
  if (quantizes || a.x_scale) {
    FI_CHECK(columns % 128 == 0, ValueError, "x must have a multiple of 128 columns for scales of 128; got %s",
             a.x.shape_str().c_str());
    FI_CHECK(a.out_scale, ValueError, "out_scale must be given with scales of 128 columns; got None");
    a.out_scale.is({kF32}).on(a.x).contiguous().shape(n, blocks);
  }
  if (a.x_scale) a.x_scale.is({kF32}).on(a.x).shape(tokens, blocks);
  FI_CHECK(n < 1 << 24 && columns < 1 << 24, ValueError, "out must have fewer than 2^24 rows and columns; got %s",
           a.out.shape_str().c_str());
  if (tokens == 0 || columns == 0) return;

  // 2 shape
  const int64_t bytes = a.x.dtype().bytes();
  MoeGatherParams p{};
  p.out = a.out.data();
  p.out_scale = a.out_scale ? a.out_scale.data<float>() : nullptr;
  p.x = a.x.data();
  p.x_scale = a.x_scale ? a.x_scale.data<float>() : nullptr;
  p.positions = a.positions.data<int32_t>();
  p.top_k = static_cast<int32_t>(top_k);
  p.out_row_bytes = a.out.stride(0) * a.out.dtype().bytes();
  p.x_row_bytes = a.x.stride(0) * bytes;
  if (a.x_scale) p.x_scale_row_stride = a.x_scale.stride(0), p.x_scale_block_stride = a.x_scale.stride(1);
  p.blocks = static_cast<int32_t>(blocks);

  // 3 launch
#if FI_CUDA
  const Entry& entry = tile(kernel, a, quantizes);
  FI_CHECK(!quantizes || a.out.row_alignment(16) == 16, ValueError,
           "out must have rows that are 16-byte aligned; got stride %lld", static_cast<long long>(a.out.stride(0)));
  const auto config = MoeGatherConfig::of(entry);
  const int64_t per_row = columns * bytes / (config.load_bytes * config.loads);
  FI_CHECK(per_row * tokens < int64_t{1} << 31, ValueError, "x is too large: got %s", a.x.shape_str().c_str());
  p.threads_per_row = divisor(static_cast<uint32_t>(per_row));
  p.threads = static_cast<uint32_t>(per_row * tokens);
  Launch launch{(per_row * tokens + entry.threads - 1) / entry.threads};
  launch.pdl = kernel.pdl(a.enable_pdl);
  kernel.launch(entry, launch, a.x.device(), p);
#else
  (void)kernel, (void)a.enable_pdl;
  cpu::check_positions(a.positions, n);
  run_cpu(p, tokens, columns, a.x.dtype(), a.out.dtype());
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::moe_gather, fi::request_of)
