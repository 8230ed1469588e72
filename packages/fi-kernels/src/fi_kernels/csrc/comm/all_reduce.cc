// all_reduce, also as reduce-scatter: checks the arguments, divides the message, launches the CUDA kernels or exchanges
// on the CPU.
#include "fi/comm/all_reduce.h"

#include "fi/comm/all_reduce_plan.h"
#include "fi/comm/contract.h"
#include "fi/generated/all_reduce.h"
#include "fi/quantization/scale_layout.h"

#if !FI_CUDA
#include "fi/comm/all_reduce_cpu.h"
#endif

namespace fi {
namespace {

// The dtypes of quant_out and scale_out are the form of quantization.
ReduceOutput form_of(const AllReduceArgs& a) {
  if (a.quant_out.dtype() != kE4M3) return kReduceE2m1;
  if (!a.scale_out) return kReduceE4m3;
  a.scale_out.is({kF32, kI32});
  return a.scale_out.dtype() == kF32 ? kReduceRowE4m3 : kReduceGroupE4m3;
}

void check_scales(const AllReduceArgs& a, ReduceOutput output, int64_t tokens, int64_t d, AllReduceParams& p) {
  if (output == kReduceE2m1) {
    FI_CHECK(d % 16 == 0, ValueError, "input must have a last dimension that is a multiple of 16; got %s",
             a.input.shape_str().c_str());
    FI_CHECK(a.layout >= 0 && a.layout <= 2, ValueError, "layout must be 0, 1 or 2; got %lld",
             static_cast<long long>(a.layout));
    FI_CHECK(a.scale_out, TypeError, "scale_out must be a tensor when quant_out is fp4; got None");
    p.layout = static_cast<int32_t>(a.layout);
    p.scale_columns = static_cast<int32_t>(a.layout == kScalesLinear ? d / 16 : (d / 16 + 3) / 4 * 4);
    const int64_t tile = scale_tile_rows(p.layout), needed = (tokens + tile - 1) / tile * tile * p.scale_columns;
    a.scale_out.is({kU8, kE4M3}).on(a.input).contiguous();
    FI_CHECK(a.scale_out.numel() >= needed, ValueError, "scale_out must have %lld elements or more; got %s",
             static_cast<long long>(needed), a.scale_out.shape_str().c_str());
  } else if (output == kReduceRowE4m3) {
    Dim n{"tokens", tokens}, one{"one", 1};
    a.scale_out.on(a.input).contiguous().shape(n, one);
  } else if (output == kReduceGroupE4m3) {
    FI_CHECK((a.group == 32 || a.group == 64 || a.group == 128) && d % a.group == 0, ValueError,
             "group must be 32, 64 or 128 and divide the last dimension of input, %lld; got %lld",
             static_cast<long long>(d), static_cast<long long>(a.group));
    const int64_t words = (d / a.group + 3) / 4;
    Dim n{"tokens", tokens}, w{"hidden / group / 4", words};
    a.scale_out.on(a.input).shape(n, w);
    const int64_t stride = a.scale_out.stride(1);
    FI_CHECK(
        (tokens == 1 || a.scale_out.stride(0) == 1) && (words == 1 || (stride >= tokens && stride < int64_t{1} << 31)),
        ValueError, "scale_out must be column-major, strides [1, tokens or more]; got strides [%lld, %lld]",
        static_cast<long long>(a.scale_out.stride(0)), static_cast<long long>(stride));
    p.group = static_cast<int32_t>(a.group);
    p.scale_columns = words == 1 ? 0 : static_cast<int32_t>(stride);
  }
}

// The dtypes of the values and of their scales tell how the norm is quantized.
AllReduceRequest request_of(const AllReduceArgs& a) {
  using Output = AllReduceRequest::Output;
  using Form = AllReduceRequest::Form;
  Output output = a.weight ? Output::kNorm : Output::kSum;
  if (a.weight && a.quant_out)
    output = a.quant_out.dtype() == kU8    ? Output::kE2m1
             : !a.scale_out                ? Output::kE4m3
             : a.scale_out.dtype() == kF32 ? Output::kRowE4m3
                                           : Output::kGroupE4m3;
  return {a.input.dtype(), output, a.scatter ? Form::kScatter : a.shots == 1 ? Form::kOneShot : Form::kTwoShot};
}

#if FI_CUDA
const Entry& tile(const Kernel& kernel, int64_t world, int64_t vectors) {
  return kernel.first_entry([&](const Entry& entry) {
    const auto config = AllReduceConfig::of(entry);
    return config.max_world >= world && config.vecs * entry.threads >= vectors;
  });
}
#endif

void all_reduce(const Kernel& kernel, const AllReduceArgs& a) {
  // 1 check
  a.input.is({kF16, kBF16, kF32}).contiguous();
  const int64_t vec = 16 / a.input.dtype().bytes(), numel = a.input.numel();
  FI_CHECK(numel % vec == 0 && a.input.alignment(16, {}) == 16, ValueError,
           "input must be 16-byte aligned and have a multiple of %lld elements; got address %p, shape %s",
           static_cast<long long>(vec), a.input.data(), a.input.shape_str().c_str());
  FI_CHECK(a.shots == 1 || a.shots == 2, ValueError, "shots must be 1 or 2; got %lld", static_cast<long long>(a.shots));
  const bool norm = static_cast<bool>(a.weight);
  const auto form = a.scatter ? kScatter : static_cast<ReduceForm>(a.shots);
  const int64_t slices = a.scatter ? std::max<int64_t>(1, a.peers.numel()) : 1;
  int64_t d = numel / slices, tokens = 1;
  FI_CHECK(numel % (slices * vec) == 0, ValueError,
           "input must have a slice of a multiple of %lld elements for each of %lld ranks; got shape %s",
           static_cast<long long>(vec), static_cast<long long>(slices), a.input.shape_str().c_str());
  if (norm) {
    Dim all{"rows"}, h{"hidden"};
    a.input.shape(all, h);
    FI_CHECK(all % slices == 0, ValueError, "input must have rows for each of %lld ranks; got shape %s",
             static_cast<long long>(slices), a.input.shape_str().c_str());
    Dim n{a.scatter ? "rows / ranks" : "tokens", all / slices};
    d = h, tokens = n;
    FI_CHECK(d % vec == 0, ValueError, "input must have a last dimension that is a multiple of %lld; got %s",
             static_cast<long long>(vec), a.input.shape_str().c_str());
    a.weight.like(a.input).contiguous().shape(h);
    FI_CHECK(a.residual_in, TypeError, "residual_in must be a tensor when a norm follows; got None");
    a.residual_in.like(a.input).contiguous().shape(n, h);
    if (a.norm_out) a.norm_out.like(a.input).contiguous().shape(n, h);
  }
  if (a.out) {
    FI_CHECK(a.out.numel() == numel / slices, ValueError, "out must have %lld elements; got %s",
             static_cast<long long>(numel / slices), a.out.shape_str().c_str());
    a.out.like(a.input).contiguous();
  }
  ReduceOutput output = norm ? kReduceNorm : kReduceSum;
  AllReduceParams p{};
  if (a.quant_out) {
    FI_CHECK(norm, TypeError, "weight must be a tensor when quant_out is given; got None");
    a.input.is({kF16, kBF16});
    a.quant_out.on(a.input).contiguous();
    output = form_of(a);
    Dim n{"tokens", tokens}, h{output == kReduceE2m1 ? "hidden / 2" : "hidden", output == kReduceE2m1 ? d / 2 : d};
    a.quant_out.is({kE4M3, kU8}).shape(n, h);
    check_scales(a, output, tokens, d, p);
    if (a.scale) {
      a.scale.is({kF32}).on(a.input);
      FI_CHECK(a.scale.numel() == 1, ValueError, "scale must have one element; got %s", a.scale.shape_str().c_str());
    }
  }
  for (const Tensor& t : {Tensor(a.out), Tensor(a.residual_in), Tensor(a.weight), Tensor(a.norm_out)})
    FI_CHECK(!t || t.alignment(16, {}) == 16, ValueError, "%s must be 16-byte aligned; got address %p", t.name(),
             t.data());
  FI_CHECK(!a.quant_out || a.quant_out.alignment(8, {}) == 8, ValueError,
           "quant_out must start at a multiple of 8 bytes; got address %p", a.quant_out.data());
  FI_CHECK(a.eps >= 0, ValueError, "eps must be 0 or more; got %g", a.eps);
  p.comm =
      comm_params(a, a.input, call_of({0, numel, d, a.input.dtype().code * 256 + a.input.dtype().bits, output, form}));
  if (numel == 0) return;

  // 2 shape
  p.input = a.input.data();
  p.out = a.out ? a.out.data() : nullptr;
  p.residual_in = norm ? a.residual_in.data() : nullptr;
  p.weight = norm ? a.weight.data() : nullptr;
  p.scale = a.quant_out && a.scale ? a.scale.data<float>() : nullptr;
  p.norm_out = norm && a.norm_out ? a.norm_out.data() : nullptr;
  p.quant_out = a.quant_out ? a.quant_out.data() : nullptr;
  p.scale_out = a.quant_out && a.scale_out ? a.scale_out.data() : nullptr;
  p.eps = static_cast<float>(a.eps);
  p.weight_bias = static_cast<float>(a.weight_bias);
  p.inv_d = 1.f / static_cast<float>(d);
  p.early_trigger = !a.trigger_at_end;
  const int64_t world = p.comm.world;

  // 3 launch
#if FI_CUDA
  const int64_t message = numel / slices / vec;  // vectors
  // A piece of a flat message is a CTA's: 256 threads for small ones, which 512 slow down, and 512 from 2 MB on, where
  // more bytes in flight count (docs/notes/comm-messages.md).
  const int64_t vectors = norm ? d / vec : std::min<int64_t>(message, message * 16 <= 2 << 20 ? 256 : 512);
  const Entry& entry = tile(kernel, world, vectors);
  const int64_t vecs = AllReduceConfig::of(entry).vecs, threads = (vectors + vecs * 32 - 1) / (vecs * 32) * 32;
  const int64_t rows = (message + vectors - 1) / vectors;
  const int64_t at_once = rows_at_once(form, rows, vectors, world, p.comm.rotation_bytes);
  FI_CHECK(at_once > 0, ValueError, "workspace is too small for a row of input, %lld bytes; got %s",
           static_cast<long long>(vectors * 16), a.workspace.shape_str().c_str());
  const int64_t resident = kernel.multiprocessors(a.input.device()) * std::max<int64_t>(1, entry.threads / threads);
  p.vectors = static_cast<int32_t>(vectors);
  p.slice = message;
  for (int64_t first = 0; first < rows; first += at_once) {
    AllReduceParams part = p;
    const int64_t now = std::min(at_once, rows - first), offset = first * vectors;
    part.rows = static_cast<int32_t>(now);
    part.total = std::min(message - offset, now * vectors);
    part.used = static_cast<int32_t>(workspace_vectors(form, now, vectors, world));
    part.input = static_cast<const char*>(p.input) + offset * 16;
    if (p.out) part.out = static_cast<char*>(p.out) + offset * 16;
    if (p.residual_in) part.residual_in = static_cast<const char*>(p.residual_in) + offset * 16;
    if (p.norm_out) part.norm_out = static_cast<char*>(p.norm_out) + offset * 16;
    if (p.quant_out) part.quant_out = static_cast<char*>(p.quant_out) + offset * (output == kReduceE2m1 ? 4 : 8);
    part.first_row = static_cast<int32_t>(first);
    const int64_t items = form == kTwoShot ? (now + world - 1) / world : now;
    Launch launch{std::min(items, a.ctas > 0 ? std::min(a.ctas, resident) : resident)};
    launch.threads = threads;
    launch.pdl = kernel.pdl(a.enable_pdl);
    kernel.launch(entry, launch, a.input.device(), part);
  }
#else
  (void)kernel, (void)form, (void)world;
  cpu::all_reduce(p, a.input.dtype(), output, numel / slices, slices, norm ? d : std::min<int64_t>(d, 4096));
  check_status(a.status);
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::all_reduce, fi::request_of)
