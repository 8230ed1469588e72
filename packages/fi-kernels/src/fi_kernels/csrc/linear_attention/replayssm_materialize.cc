// replayssm_materialize: checks the tables, launches the CUDA kernel or runs the CPU one. What the addresses in the
// tables lead to is the caller's: only shapes can be checked.
#include "fi/linear_attention/replayssm_materialize.h"

#include "fi/generated/replayssm_materialize.h"
#include "fi/linear_attention/contract.h"

#if !FI_CUDA
#include "fi/linear_attention/recurrence_cpu.h"
#endif

namespace fi {
namespace {

DType dtype_of(int64_t type) {
  switch (static_cast<NumberType>(type)) {
    case NumberType::kF16:
      return kF16;
    case NumberType::kBF16:
      return kBF16;
    default:
      return kF32;
  }
}

#if !FI_CUDA
void run_cpu(const ReplayssmMaterializeParams& p, DType dtype, DType state_dtype) {
  const cpu::LoadRow load = cpu::row_loader(dtype);
  const int64_t dim = p.dim, dstate = p.dstate, heads = p.heads.value, bytes = dtype.bytes();
  int64_t requests = 0;
  while (requests < p.batch && p.active[requests] >= 0) ++requests;
  const auto at = [](int64_t address, int64_t i, int64_t size) { return reinterpret_cast<char*>(address) + i * size; };
  cpu::for_rows(
      p.layers * requests * heads, dim * dstate, dim * dstate + dstate + 2 * dim, [&](int64_t index, float* state) {
        const int64_t layer = index / heads / requests, n = p.active[index / heads % requests], h = index % heads;
        const int64_t from = p.from[layer * p.from_stride + n], to = p.to[layer * p.to_stride + n];
        if (from == p.pad_slot || to == p.pad_slot || from < 0 || to < 0) return;
        float *b = state + dim * dstate, *x = b + dstate, *out = x + dim;
        const cpu::StateRows rows{state_dtype, dim, dstate, dstate, 1};
        const int64_t own = h * dim * dstate, g = h / p.group.value;
        rows.load(at(p.states[layer], from * p.state_strides[layer] + own, state_dtype.bytes()), state);
        const float rate = cpu::number({reinterpret_cast<const void*>(p.a[layer]), p.a_type}, h);
        for (int32_t i = 0; i < p.length[n]; ++i) {
          const int64_t row = p.ring_row(p.start[n], i);
          load(at(p.x_rings[layer], from * p.x_ring_strides[layer] + (h * p.ring + row) * dim, bytes), x, dim);
          load(at(p.b_rings[layer], from * p.b_ring_strides[layer] + (g * p.ring + row) * dstate, bytes), b, dstate);
          const char* kept = at(p.dt_rings[layer], from * p.dt_ring_strides[layer] + h * p.ring + row, 4);
          const float dt = *reinterpret_cast<const float*>(kept);
          cpu::selective_step(state, std::exp(dt * rate), dt, x, b, b, out, dim, dstate);
        }
        rows.store(state, at(p.states[layer], to * p.state_strides[layer] + own, state_dtype.bytes()));
      });
}
#endif

ReplayssmMaterializeRequest request_of(const ReplayssmMaterializeArgs& a) {
  return {dtype_of(a.input_dtype), dtype_of(a.state_dtype), a.dstate};
}

void replayssm_materialize(const Kernel& kernel, const ReplayssmMaterializeArgs& a) {
  // 1 check
  Dim layers{"layers"}, batch{"batch"};
  for (const Tensor& t : {a.state_ptrs, a.state_slot_strides, a.x_cache_ptrs, a.x_cache_slot_strides, a.B_cache_ptrs,
                          a.B_cache_slot_strides, a.dt_cache_ptrs, a.dt_cache_slot_strides, a.A_ptrs})
    t.is({kI64}).on(a.state_ptrs).contiguous().shape(layers);
  for (const Tensor& t : {a.src_slots, a.dst_slots})
    t.is({kI32}).on(a.state_ptrs).inner_contiguous().shape(layers, batch);
  for (const Tensor& t : {a.ring_start, a.replay_prefix_len, a.active_request_indices})
    t.is({kI32}).on(a.state_ptrs).contiguous().shape(batch);
  FI_CHECK(a.num_heads > 0 && a.heads_per_group > 0 && a.num_heads % a.heads_per_group == 0, ValueError,
           "heads_per_group must divide num_heads; got %lld and %lld", static_cast<long long>(a.heads_per_group),
           static_cast<long long>(a.num_heads));
  FI_CHECK(a.dim > 0 && a.dim % 8 == 0 && a.dstate > 0, ValueError, "dim must be a multiple of 8; got %lld",
           static_cast<long long>(a.dim));
  FI_CHECK(a.max_window >= 1 && a.max_window <= kRingTokens && a.ring_buffer_len >= a.max_window, ValueError,
           "max_window must be in 1 to %d, and ring_buffer_len no less; got %lld and %lld", kRingTokens,
           static_cast<long long>(a.max_window), static_cast<long long>(a.ring_buffer_len));
  if (layers == 0 || batch == 0) return;
  if (kernel.checks_contents(a.state_ptrs.device())) {
    const Integers active(kernel, a.active_request_indices), start(kernel, a.ring_start),
        length(kernel, a.replay_prefix_len);
    for (int64_t i = 0; i < batch && active[i] >= 0; ++i) {
      const int64_t n = active[i];
      FI_CHECK(n < batch, ValueError, "active_request_indices must be below %lld; got %lld at %lld",
               static_cast<long long>(batch), static_cast<long long>(n), static_cast<long long>(i));
      FI_CHECK(start[n] >= 0 && start[n] < a.ring_buffer_len, ValueError,
               "ring_start must be in 0 to %lld; got %lld at %lld", static_cast<long long>(a.ring_buffer_len - 1),
               static_cast<long long>(start[n]), static_cast<long long>(n));
      FI_CHECK(length[n] >= 0 && length[n] <= a.max_window, ValueError,
               "replay_prefix_len must be in 0 to %lld, max_window; got %lld at %lld",
               static_cast<long long>(a.max_window), static_cast<long long>(length[n]), static_cast<long long>(n));
    }
  }

  // 2 shape
  ReplayssmMaterializeParams p{};
  const auto table = [](const Tensor& t) { return static_cast<const int64_t*>(t.data<int64_t>()); };
  p.states = table(a.state_ptrs), p.state_strides = table(a.state_slot_strides);
  p.x_rings = table(a.x_cache_ptrs), p.x_ring_strides = table(a.x_cache_slot_strides);
  p.b_rings = table(a.B_cache_ptrs), p.b_ring_strides = table(a.B_cache_slot_strides);
  p.dt_rings = table(a.dt_cache_ptrs), p.dt_ring_strides = table(a.dt_cache_slot_strides);
  p.a = table(a.A_ptrs);
  p.from = a.src_slots.data<int32_t>(), p.from_stride = a.src_slots.stride(0);
  p.to = a.dst_slots.data<int32_t>(), p.to_stride = a.dst_slots.stride(0);
  p.start = a.ring_start.data<int32_t>();
  p.length = a.replay_prefix_len.data<int32_t>();
  p.active = a.active_request_indices.data<int32_t>();
  p.pad_slot = a.pad_slot_id;
  p.a_type = static_cast<NumberType>(a.matrix_dtype);
  p.layers = static_cast<int32_t>(layers);
  p.batch = static_cast<int32_t>(batch);
  p.dim = static_cast<int32_t>(a.dim);
  p.dstate = static_cast<int32_t>(a.dstate);
  p.ring = static_cast<int32_t>(a.ring_buffer_len);
  p.heads = divisor(static_cast<uint32_t>(a.num_heads));
  p.group = divisor(static_cast<uint32_t>(a.heads_per_group));
  p.requests = divisor(static_cast<uint32_t>(batch));

  // 3 launch
#if FI_CUDA
  const Entry& entry = kernel.entries[0];
  p.rows_per_cta = static_cast<int32_t>(ReplayssmMaterializeConfig::of(entry).rows);
  p.tiles = divisor(static_cast<uint32_t>((a.dim + p.rows_per_cta - 1) / p.rows_per_cta));
  Launch launch{layers * batch * a.num_heads * p.tiles.value};
  launch.pdl = kernel.pdl(a.enable_pdl);
  kernel.launch(entry, launch, a.state_ptrs.device(), p);
#else
  (void)a.enable_pdl;
  run_cpu(p, dtype_of(a.input_dtype), dtype_of(a.state_dtype));
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::replayssm_materialize, fi::request_of)
