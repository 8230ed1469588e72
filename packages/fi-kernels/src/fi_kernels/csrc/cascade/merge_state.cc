// merge_state and merge_state_in_place: two attention states become one.
#include "fi/cascade/merge_state.h"

#include "fi/host/op.h"

#if FI_CUDA
#include "fi/host/tile.h"
#else
#include <vector>

#include "fi/cpu/parallel.h"
#include "fi/cpu/states.h"
#endif

namespace fi {
namespace {

#if FI_CUDA
// Entries in order of preference; config = {vector elements, rows a thread}.
void launch(const Kernel& kernel, MergeStateParams& p, int64_t vector, DLDevice device) {
  for (const Entry& entry : kernel.entries) {
    const int64_t vec = entry.config[0], rows = entry.config[1];
    if (vec > vector || p.d % vec) continue;
    const RowTile tile(p.d / vec, entry.threads);
    p.lanes = static_cast<int32_t>(tile.lanes);
    Launch config{(p.rows + tile.rows * rows - 1) / (tile.rows * rows)};
    config.threads = tile.threads;
    config.pdl = kernel.pdl(-1);
    return kernel.launch(entry, config, device, p);
  }
  raise("RuntimeError", "no entry for d = %d", p.d);
}
#else
const char* values(const AttentionState& state, int64_t n, int64_t head, int64_t bytes) {
  return static_cast<const char*>(state.v) + (n * state.v_row + head * state.v_head) * bytes;
}

float* lse(const AttentionState& state, int64_t n, int64_t head) {
  return state.s + n * state.s_row + head * state.s_head;
}

void run_cpu(const MergeStateParams& p, DType dtype) {
  const cpu::LoadRow load = cpu::row_loader(dtype);
  const cpu::StoreRow store = cpu::row_storer(dtype);
  const AttentionState states[] = {p.a, p.b};
  const int64_t heads = p.heads.value;
  cpu::parallel_for(p.rows, std::max<int64_t>(1, 8192 / p.d), [&](int64_t begin, int64_t end) {
    std::vector<float> sum(static_cast<size_t>(p.d)), row(sum.size());
    for (int64_t index = begin; index < end; ++index) {
      const int64_t n = index / heads, head = index % heads;
      if (p.mask && !p.mask[n]) continue;
      const float merged = cpu::merge_states(
          2, [&](int64_t i) { return *lse(states[i], n, head); },
          [&](int64_t i) { return values(states[i], n, head, dtype.bytes()); }, load, sum.data(), row.data(), p.d);
      store(sum.data(), const_cast<char*>(values(p.out, n, head, dtype.bytes())), p.d);
      *lse(p.out, n, head) = merged;
    }
  });
}
#endif

AttentionState state(Tensor v, Tensor s) {
  return {v.data(), s.data<float>(), v.stride(0), v.stride(1), s.stride(0), s.stride(1)};
}

void merge(const Kernel& kernel, Tensor v, Tensor s, OptionalTensor v_a, OptionalTensor s_a, Tensor v_b, Tensor s_b,
           OptionalTensor mask) {
  // 1 check
  const bool in_place = !v_a;
  FI_CHECK(in_place == !s_a, TypeError, "v_a and s_a must both be given, or neither");
  const Tensor a = in_place ? v : static_cast<Tensor&>(v_a), lse_a = in_place ? s : static_cast<Tensor&>(s_a);
  const Tensor b = in_place ? v_b.as("v_other") : v_b, lse_b = in_place ? s_b.as("s_other") : s_b;
  Dim n{"n"}, heads{"num_heads"}, d{"head_dim"};
  a.is({kF16, kBF16, kF32}).inner_contiguous().shape(n, heads, d);
  b.like(a).inner_contiguous().shape(n, heads, d);
  lse_a.is({kF32}).on(a).shape(n, heads);
  lse_b.is({kF32}).on(a).shape(n, heads);
  v.like(a).inner_contiguous().shape(n, heads, d);
  s.like(lse_a).shape(n, heads);
  if (mask) mask.is({kBool, kU8}).on(a).contiguous().shape(n);
  FI_CHECK(d > 0 && d <= 0x7fffffff && n * heads <= 0x7fffffff, ValueError,
           "%s must have 1 <= head_dim < 2^31 and n * num_heads < 2^31; got %s", a.name(), a.shape_str().c_str());

  // 2 shape
  MergeStateParams p{};
  p.out = state(v, s);
  p.a = state(a, lse_a);
  p.b = state(b, lse_b);
  p.mask = mask ? mask.data<const uint8_t>() : nullptr;
  p.rows = n * heads;
  p.d = static_cast<int32_t>(d);
  if (p.rows == 0) return;
  p.heads = divisor(static_cast<uint32_t>(heads));

  // 3 launch
#if FI_CUDA
  int64_t vector = 16;
  for (const Tensor& t : {v, a, b}) vector = std::min(vector, t.alignment(16, {t.stride(0), t.stride(1)}));
  launch(kernel, p, vector / a.dtype().bytes(), a.device());
#else
  (void)kernel;
  run_cpu(p, a.dtype());
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::merge, "v", "s", "v_a", "s_a", "v_b", "s_b", "mask")
