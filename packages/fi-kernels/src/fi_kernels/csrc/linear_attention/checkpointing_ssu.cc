// checkpointing_ssu: checks the arguments, launches the CUDA kernel or runs the CPU one.
#include "fi/linear_attention/checkpointing_ssu.h"

#include "fi/generated/checkpointing_ssu.h"
#include "fi/linear_attention/contract.h"

#if !FI_CUDA
#include "fi/cpu/math.h"
#include "fi/linear_attention/recurrence_cpu.h"
#endif

namespace fi {
namespace {

#if !FI_CUDA
void run_cpu(const CheckpointingSsuParams& p, DType dtype, DType state_dtype) {
  const cpu::LoadRow load = cpu::row_loader(dtype);
  const cpu::StoreRow store = cpu::row_storer(dtype);
  const int64_t bytes = dtype.bytes(), dim = p.dim, dstate = p.dstate, heads = p.heads.value;
  const auto at = [=](const void* base, int64_t i) { return static_cast<char*>(const_cast<void*>(base)) + i * bytes; };
  const auto copy = [=](char* to, const char* from, int64_t n) { std::copy_n(from, n * bytes, to); };
  cpu::for_rows(p.batch * heads, dim * dstate, dim * dstate + 2 * dstate + 3 * dim, [&](int64_t index, float* state) {
    const int64_t n = index / heads, h = index % heads, g = h / p.group.value;
    float *b = state + dim * dstate, *c = b + dstate, *x = c + dstate, *z = x + dim, *out = z + dim;
    int64_t first = 0, tokens = p.tokens;
    if (p.cu_seqlens) {
      const IndexTable offsets{p.cu_seqlens, 1, 0, p.cu_is_wide};
      first = offsets.at(n);
      tokens = std::min<int64_t>(offsets.at(n + 1) - first, p.tokens);
    }
    const int64_t slot = p.slots.or_row(n);
    if (tokens <= 0 || p.is_padding(slot)) return;
    const auto token_of = [&](const void* base, const int64_t* strides, int64_t t, int64_t head) {
      return at(base, n * strides[0] + (first + t) * strides[1] + head * strides[2]);
    };
    const int32_t start = p.start[slot], held = p.held[slot];
    const auto ring_of = [&](void* ring, const int64_t* strides, int64_t head, int64_t i) {
      return at(ring, slot * strides[0] + head * strides[1] + p.ring_row(start, static_cast<int32_t>(i)) * strides[2]);
    };
    const cpu::StateRows rows{state_dtype, dim, dstate, p.state_strides[2], 1};
    char* own =
        static_cast<char*>(p.state) + (slot * p.state_strides[0] + h * p.state_strides[1]) * state_dtype.bytes();
    rows.load(own, state);
    for (int64_t i = 0; i < held + tokens; ++i) {
      const int64_t t = i - held;
      char *x_ring = ring_of(p.x_ring, p.x_ring_strides, h, i), *b_ring = ring_of(p.b_ring, p.b_ring_strides, g, i);
      float* dt = p.dt_ring + slot * p.dt_ring_strides[0] + h * p.dt_ring_strides[1] +
                  p.ring_row(start, static_cast<int32_t>(i)) * p.dt_ring_strides[2];
      if (t >= 0) {
        copy(x_ring, token_of(p.x, p.x_strides, t, h), dim);
        if (h == g * p.group.value) copy(b_ring, token_of(p.b, p.b_strides, t, g), dstate);
        *dt = cpu::number(p.dt, n * p.dt_strides[0] + (first + t) * p.dt_strides[1] + h * p.dt_strides[2]);
        if (p.dt_bias.data) *dt += cpu::number(p.dt_bias, h * p.dt_bias_stride);
        if (p.softplus) *dt = cpu::softplus(*dt);
        load(token_of(p.c, p.c_strides, t, g), c, dstate);
      } else {
        std::fill_n(c, dstate, 0.f);
      }
      load(x_ring, x, dim);
      load(t >= 0 ? token_of(p.b, p.b_strides, t, g) : b_ring, b, dstate);
      if (t == 0 && p.stores_state(held)) rows.store(state, own);
      cpu::selective_step(state, std::exp(*dt * p.a[h * p.a_stride]), *dt, x, b, c, out, dim, dstate);
      if (t < 0) continue;
      if (p.d.data) {
        const float skip = cpu::number(p.d, h * p.d_stride);
        for (int64_t r = 0; r < dim; ++r) out[r] += skip * x[r];
      }
      if (p.z) {
        load(token_of(p.z, p.z_strides, t, h), z, dim);
        for (int64_t r = 0; r < dim; ++r) out[r] *= cpu::silu(z[r]);
      }
      store(out, token_of(p.out, p.out_strides, t, h), dim);
    }
  });
}
#endif

// Raises unless the slots, the rows of the rings and the lengths of the requests are some.
void check_contents(const Kernel& kernel, const CheckpointingSsuArgs& a, const CheckpointingSsuParams& p, int64_t slots,
                    int64_t total) {
  check_slots(kernel, a.state_batch_indices, slots, a.pad_slot_id);
  if (a.cu_seqlens) {
    const Integers offsets(kernel, a.cu_seqlens);
    check_offsets(offsets, total);
    for (int64_t i = 1; i < offsets.size(); ++i)
      FI_CHECK(offsets[i] - offsets[i - 1] <= p.tokens, ValueError,
               "max_seqlen must be at least %lld, the tokens of request %lld; got %d",
               static_cast<long long>(offsets[i] - offsets[i - 1]), static_cast<long long>(i - 1), p.tokens);
  }
  const Integers start(kernel, a.ring_start), held(kernel, a.prev_num_accepted_tokens);
  const auto check_slot = [&](int64_t slot) {
    FI_CHECK(start[slot] >= 0 && start[slot] < p.ring, ValueError,
             "ring_start must be in 0 to %d, the rows of x_cache; got %lld in slot %lld", p.ring - 1,
             static_cast<long long>(start[slot]), static_cast<long long>(slot));
    FI_CHECK(held[slot] >= 0 && held[slot] <= p.ring - p.tokens, ValueError,
             "prev_num_accepted_tokens must be in 0 to %d, the rows of x_cache less those of the new tokens; got %lld "
             "in slot %lld",
             p.ring - p.tokens, static_cast<long long>(held[slot]), static_cast<long long>(slot));
  };
  if (!a.state_batch_indices) {
    for (int64_t i = 0; i < p.batch; ++i) check_slot(i);
    return;
  }
  const int64_t step = a.state_batch_indices.stride(0);
  const Integers table(kernel, a.state_batch_indices, (p.batch - 1) * step + 1);
  for (int64_t i = 0; i < p.batch; ++i)
    if (!p.is_padding(table[i * step])) check_slot(table[i * step]);
}

// One number for each head: the dimensions from `first` on have stride 0.
void check_tied(const Tensor& t, int first) {
  for (int i = first; i < t.ndim(); ++i)
    FI_CHECK(t.size(i) <= 1 || t.stride(i) == 0, ValueError,
             "%s must have one number for each head: stride 0 in dimension %d, as of expand(); got stride %lld",
             t.name(), i, static_cast<long long>(t.stride(i)));
}

CheckpointingSsuRequest request_of(const CheckpointingSsuArgs& a) {
  return {a.x.dtype(), a.state.dtype(), a.state.size_or_0(-1)};
}

void checkpointing_ssu(const Kernel& kernel, const CheckpointingSsuArgs& a) {
  // 1 check
  Dim slots{"slots"}, heads{"heads"}, dim{"dim"}, dstate{"dstate"}, batch{"batch"}, tokens{"tokens"}, ring{"rows"};
  Dim groups{"groups"}, total{"total_tokens"}, one{"1", 1};
  a.state.is({kF32, kBF16, kF16}).inner_contiguous().shape(slots, heads, dim, dstate);
  a.x.is({kBF16, kF16}).on(a.state).inner_contiguous();
  a.x_cache.like(a.x).inner_contiguous().shape(slots, heads, ring, dim);
  a.B_cache.like(a.x).inner_contiguous().shape(slots, groups, ring, dstate);
  a.dt_cache.is({kF32}).on(a.x).shape(slots, heads, ring);
  for (const Tensor& t : {a.ring_start, a.prev_num_accepted_tokens}) t.is({kI32}).on(a.x).contiguous().shape(slots);
  const bool packed{a.cu_seqlens};
  if (packed) {
    Dim ends{"batch + 1"};
    a.cu_seqlens.is({kI32, kI64}).on(a.x).contiguous().shape(ends);
    FI_CHECK(
        ends >= 1 && a.max_seqlen >= 1, ValueError,
        "cu_seqlens must have shape [batch + 1] and come with max_seqlen, the most tokens of a request; got %s and "
        "%lld",
        a.cu_seqlens.shape_str().c_str(), static_cast<long long>(a.max_seqlen));
    batch.value = ends - 1;
  }
  Dim& rows = packed ? one : batch;
  Dim& columns = packed ? total : tokens;
  a.x.shape(rows, columns, heads, dim);
  a.out.like(a.x).inner_contiguous().shape(rows, columns, heads, dim);
  a.dt.is({kF32, kF16, kBF16}).on(a.x).shape(rows, columns, heads, dim);
  a.B.like(a.x).inner_contiguous().shape(rows, columns, groups, dstate);
  a.C.like(a.x).inner_contiguous().shape(rows, columns, groups, dstate);
  if (a.z) a.z.like(a.x).inner_contiguous().shape(rows, columns, heads, dim);
  a.A.is({kF32}).on(a.x).shape(heads, dim, dstate);
  if (a.D) a.D.is({kF32, kF16, kBF16}).on(a.x).shape(heads, dim);
  if (a.dt_bias) a.dt_bias.is({kF32, kF16, kBF16}).on(a.x).shape(heads, dim);
  check_tied(a.dt, 3);
  check_tied(a.A, 1);
  if (a.D) check_tied(a.D, 1);
  if (a.dt_bias) check_tied(a.dt_bias, 1);
  if (packed) tokens.value = a.max_seqlen;
  FI_CHECK(
      tokens <= kRingTokens && ring - tokens >= 1 && ring - tokens <= kRingTokens, ValueError,
      "x_cache must have up to %d rows more than there are new tokens, which are %d at most; got %lld rows and %lld "
      "tokens",
      kRingTokens, kRingTokens, static_cast<long long>(ring), static_cast<long long>(tokens));
  CheckpointingSsuParams p{};
  p.slots = index_table(a.state_batch_indices, a.x, batch, 0);
  FI_CHECK(p.slots.data || slots >= batch, ValueError,
           "state must have %lld slots, one for each row, if state_batch_indices is None; got %s",
           static_cast<long long>(batch), a.state.shape_str().c_str());
  if (batch == 0 || tokens == 0 || heads == 0 || dim == 0 || (packed && total == 0)) return;
  p.group = head_group(a.B, groups, heads);
  p.batch = static_cast<int32_t>(batch), p.tokens = static_cast<int32_t>(tokens);
  p.ring = static_cast<int32_t>(ring);
  p.pad_slot = a.pad_slot_id;
  if (kernel.checks_contents(a.x.device())) check_contents(kernel, a, p, slots, packed ? total.value : 0);

  // 2 shape
  const auto strides_to = [&](const Tensor& t, int64_t (&strides)[3]) {
    strides[0] = packed ? 0 : t.stride(0), strides[1] = t.stride(1), strides[2] = t.stride(2);
  };
  strides_to(a.x, p.x_strides);
  strides_to(a.out, p.out_strides);
  strides_to(a.dt, p.dt_strides);
  strides_to(a.B, p.b_strides);
  strides_to(a.C, p.c_strides);
  if (a.z) strides_to(a.z, p.z_strides);
  strides_of(a.state, p.state_strides);
  strides_of(a.x_cache, p.x_ring_strides);
  strides_of(a.B_cache, p.b_ring_strides);
  strides_of(a.dt_cache, p.dt_ring_strides);
  p.out = a.out.data();
  p.state = a.state.data();
  p.x_ring = a.x_cache.data();
  p.b_ring = a.B_cache.data();
  p.dt_ring = a.dt_cache.data<float>();
  p.start = a.ring_start.data<int32_t>();
  p.held = a.prev_num_accepted_tokens.data<int32_t>();
  p.x = a.x.data();
  p.z = a.z ? a.z.data() : nullptr;
  p.b = a.B.data();
  p.c = a.C.data();
  p.dt = numbers_of(a.dt);
  p.a = a.A.data<float>(), p.a_stride = a.A.stride(0);
  if (a.D) p.d = numbers_of(a.D), p.d_stride = a.D.stride(0);
  if (a.dt_bias) p.dt_bias = numbers_of(a.dt_bias), p.dt_bias_stride = a.dt_bias.stride(0);
  if (packed) p.cu_seqlens = a.cu_seqlens.data(), p.cu_is_wide = a.cu_seqlens.dtype().bits == 64;
  p.dim = static_cast<int32_t>(dim);
  p.dstate = static_cast<int32_t>(dstate);
  p.heads = divisor(static_cast<uint32_t>(heads));
  p.softplus = a.dt_softplus;

  // 3 launch
#if FI_CUDA
  for (const Tensor& t : {a.state, a.x_cache, a.B_cache, a.x, a.B, a.C})
    FI_CHECK(t.row_alignment(16) == 16, ValueError,
             "%s must have rows that are 16-byte aligned; got address %p, shape %s", t.name(), t.data(),
             t.shape_str().c_str());
  const Entry& entry = kernel.entries[0];
  p.rows_per_cta = static_cast<int32_t>(CheckpointingSsuConfig::of(entry).rows);
  p.tiles = divisor(static_cast<uint32_t>((dim + p.rows_per_cta - 1) / p.rows_per_cta));
  Launch launch{batch * heads * p.tiles.value};
  launch.pdl = kernel.pdl(a.enable_pdl);
  kernel.launch(entry, launch, a.x.device(), p);
#else
  (void)a.enable_pdl;
  run_cpu(p, a.x.dtype(), a.state.dtype());
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::checkpointing_ssu, fi::request_of)
