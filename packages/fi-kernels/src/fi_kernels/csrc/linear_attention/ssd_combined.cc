// ssd_combined: checks the arguments; launches the kernel that prepares all chunks in parallel and the one that goes
// through them, or runs the CPU kernel, token by token.
#include "fi/linear_attention/ssd_combined.h"

#include "fi/generated/ssd_combined.h"
#include "fi/linear_attention/chunk_contract.h"

#if !FI_CUDA
#include "fi/cpu/math.h"
#endif

namespace fi {
namespace {

#if !FI_CUDA
void run_cpu(const SsdCombinedParams& p, DType dtype) {
  const cpu::LoadRow load = cpu::row_loader(dtype);
  const cpu::StoreRow store = cpu::row_storer(dtype);
  const int64_t bytes = dtype.bytes(), dim = p.dim, dstate = p.dstate, heads = p.heads.value;
  const int64_t floats = dim * dstate + 2 * dstate + 3 * dim;
  cpu::for_rows(p.sequences * heads, 16 * dim * dstate, floats, [&](int64_t index, float* state) {
    const int64_t n = index / heads, h = index % heads, g = h / p.group.value;
    float *b = state + dim * dstate, *c = b + dstate, *x = c + dstate, *z = x + dim, *out = z + dim;
    const int64_t first = p.begin_of(n), tokens = p.length_of(n);
    const auto row_of = [&](const void* base, const int64_t* strides, int64_t t, int64_t head) {
      return static_cast<char*>(const_cast<void*>(base)) + ((first + t) * strides[0] + head * strides[1]) * bytes;
    };
    const ChunkState own{state, h, dim, dstate};
    const auto store_checkpoints = [&](int64_t done) {
      for (int64_t i = p.checkpoint_begin(n); i < p.checkpoint_end(n); ++i)
        if (p.checkpoint_of(n, i) == done) own.store(p.checkpoints, p.checkpoint_slot(n, i));
    };
    const int64_t from = p.from_slots.or_row(n), to = p.to_slots.or_row(n);
    own.begin(p.initial, from);
    const float bias = p.dt_bias.data ? cpu::number(p.dt_bias, h * p.dt_bias_stride) : 0.f;
    store_checkpoints(0);
    for (int64_t t = 0; t < tokens; ++t) {
      float dt = cpu::number(p.dt, (first + t) * p.dt_strides[0] + h * p.dt_strides[1]) + bias;
      if (p.softplus) dt = cpu::softplus(dt);
      dt = std::min(std::max(dt, p.dt_low), p.dt_high);
      load(row_of(p.x, p.x_strides, t, h), x, dim);
      load(row_of(p.b, p.b_strides, t, g), b, dstate);
      load(row_of(p.c, p.c_strides, t, g), c, dstate);
      cpu::selective_step(state, std::exp(dt * p.a[h * p.a_stride]), dt, x, b, c, out, dim, dstate);
      for (int64_t r = 0; p.d.data && r < dim; ++r)
        out[r] += cpu::number(p.d, h * p.d_stride + r * p.d_dim_stride) * x[r];
      if (p.z) {
        load(row_of(p.z, p.z_strides, t, h), z, dim);
        for (int64_t r = 0; r < dim; ++r) out[r] *= cpu::silu(z[r]);
      }
      store(out, row_of(p.out, p.out_strides, t, h), dim);
      store_checkpoints(t + 1);
    }
    if (p.final.data && to >= 0) own.store(p.final, to);
  });
}
#endif

// The strides of token and head of [batch, tokens, heads, ..]; the tokens of all batches are one axis.
void flat_strides(const Tensor& t, int64_t (&strides)[2]) {
  strides[0] = t.stride(1), strides[1] = t.stride(2);
  if (t.size(1) == 1) strides[0] = t.stride(0);
  FI_CHECK(
      t.size(0) == 1 || t.size(1) == 1 || t.stride(0) == t.size(1) * t.stride(1), ValueError,
      "%s must have batches that follow on each other: stride %lld in dimension 0; got %lld: call .contiguous() on "
      "it",
      t.name(), static_cast<long long>(t.size(1) * t.stride(1)), static_cast<long long>(t.stride(0)));
}

void check_contents(const Kernel& kernel, const SsdCombinedArgs& a, int64_t total) {
  const auto rows = [](const OptionalTensor& t) { return t ? t.size(0) : 0; };
  if (a.cu_seqlens) check_offsets(Integers(kernel, a.cu_seqlens), total);
  check_slots(kernel, a.initial_state_indices, rows(a.initial_states));
  check_slots(kernel, a.final_state_indices, rows(a.final_states));
  check_slots(kernel, a.checkpoint_state_slots, rows(a.checkpoint_states));
  if (!a.checkpoint_last) return;
  const Integers last(kernel, a.checkpoint_last);
  const int64_t count = rows(a.checkpoint_token_indices);
  for (int64_t i = 0; i < a.checkpoint_last.numel(); ++i)
    FI_CHECK(last[i] >= -1 && last[i] < count, ValueError,
             "%s must be from -1 to below %lld, the chunks; got %lld at %lld", a.checkpoint_last.name(),
             static_cast<long long>(count), static_cast<long long>(last[i]), static_cast<long long>(i));
}

#if FI_CUDA
// The entry of a step. A pair of CTAs has two slices of a head, or two heads of a group. More stages are for so few
// CTAs that an SM has one.
const Entry& tile(const Kernel& kernel, const SsdCombinedParams& p, int64_t step, int64_t multiprocessors) {
  return kernel.first_entry([&](const Entry& entry) {
    const auto config = SsdCombinedConfig::of(entry);
    if (step == 0 || config.step < step) return config.step == step;
    const int64_t slices = p.dim / config.columns;
    return (config.cluster == 1 || slices == 2 || p.group.value % 2 == 0) &&
           (config.stages == 2 || int64_t{p.sequences} * p.heads.value * slices <= multiprocessors);
  });
}
#endif

SsdCombinedRequest request_of(const SsdCombinedArgs& a) {
  return {a.x.dtype(),
          a.B.size_or_0(-1) <= 64    ? int64_t{64}
          : a.B.size_or_0(-1) <= 128 ? int64_t{128}
                                     : a.B.size_or_0(-1),
          a.x.size_or_0(-1)};
}

void ssd_combined(const Kernel& kernel, const SsdCombinedArgs& a) {
  // 1 check
  Dim batch{"batch"}, tokens{"tokens"}, heads{"heads"}, dim{"dim"}, groups{"groups"}, dstate{"dstate"};
  a.x.is({kBF16, kF16}).inner_contiguous().shape(batch, tokens, heads, dim);
  a.out.like(a.x).inner_contiguous().shape(batch, tokens, heads, dim);
  a.dt.is({kF32, kF16, kBF16}).on(a.x).shape(batch, tokens, heads);
  a.A.is({kF32}).on(a.x).shape(heads);
  a.B.like(a.x).inner_contiguous().shape(batch, tokens, groups, dstate);
  a.C.like(a.x).inner_contiguous().shape(batch, tokens, groups, dstate);
  if (a.z) a.z.like(a.x).inner_contiguous().shape(batch, tokens, heads, dim);
  if (a.dt_bias) a.dt_bias.is({kF32, kF16, kBF16}).on(a.x).shape(heads);
  SsdCombinedParams p{};
  if (a.D) {
    a.D.is({kF32, kF16, kBF16}).on(a.x);
    if (a.D.ndim() == 1) {
      a.D.shape(heads);
    } else {
      a.D.shape(heads, dim);
    }
    p.d = numbers_of(a.D), p.d_stride = a.D.stride(0), p.d_dim_stride = a.D.ndim() == 2 ? a.D.stride(1) : 0;
  }
  Dim sequences{"sequences", batch.value};
  if (a.cu_seqlens) {
    Dim ends{"sequences + 1"};
    a.cu_seqlens.is({kI32, kI64}).on(a.x).contiguous().shape(ends);
    FI_CHECK(ends >= 1 && batch == 1, ValueError,
             "cu_seqlens must have shape [sequences + 1], and x a batch of 1 with it; got %s and %s",
             a.cu_seqlens.shape_str().c_str(), a.x.shape_str().c_str());
    sequences.value = ends - 1;
    p.offsets = {a.cu_seqlens.data(), 1, 0, a.cu_seqlens.dtype().bits == 64};
  }
  p.from_slots = index_table(a.initial_state_indices, a.x, sequences, 0);
  p.to_slots = index_table(a.final_state_indices, a.x, sequences, 0);
  const auto states = [&](const OptionalTensor& t, bool by_slot) {
    Dim rows = by_slot ? Dim{"slots"} : sequences;
    return states_of(t, a.x, rows, heads, dim, dstate);
  };
  p.initial = states(a.initial_states, bool{a.initial_state_indices});
  p.final = states(a.final_states, bool{a.final_state_indices});
  p.checkpoints = states(a.checkpoint_states, true);
  const bool slots_missing = !a.checkpoint_state_slots && !a.checkpoint_last;
  FI_CHECK(bool{a.checkpoint_states} == bool{a.checkpoint_token_indices} &&
               (a.checkpoint_states ? !slots_missing : !a.checkpoint_state_slots),
           ValueError, "checkpoint_token_indices, checkpoint_state_slots and checkpoint_states must be given together");
  if (a.checkpoint_last) {
    Dim count{"checkpoints"};
    a.checkpoint_token_indices.is({kI32, kI64}).on(a.x).shape(count);
    p.checkpoint_tokens = index_table(a.checkpoint_token_indices, a.x, count, 0);
    p.checkpoint_last = index_table(a.checkpoint_last, a.x, sequences, 0);
    p.checkpoints_each = 1;
  } else if (a.checkpoint_states) {
    const int64_t each = a.checkpoint_token_indices.ndim() == 2 ? a.checkpoint_token_indices.size(1) : 0;
    p.checkpoint_tokens = index_table(a.checkpoint_token_indices, a.x, sequences, each);
    p.checkpoint_slots = index_table(a.checkpoint_state_slots, a.x, sequences, each);
    p.checkpoints_each = static_cast<int32_t>(each ? each : 1);
  }
  FI_CHECK(dstate >= 16 && dstate <= 256 && dstate % 16 == 0, ValueError,
           "B must have shape [batch, tokens, groups, dstate], dstate a multiple of 16 up to 256; got %s",
           a.B.shape_str().c_str());
  FI_CHECK(a.dt_low <= a.dt_high, ValueError, "dt_limit must be a range; got %g and %g", a.dt_low, a.dt_high);
  if (sequences == 0 || heads == 0 || dim == 0) return;
  p.group = tokens > 0 ? head_group(a.B, groups, heads) : divisor(1);
  const int64_t total = batch * tokens;
  if (kernel.checks_contents(a.x.device())) check_contents(kernel, a, total);

  // 2 shape
  p.out = a.out.data();
  p.x = a.x.data();
  p.z = a.z ? a.z.data() : nullptr;
  p.b = a.B.data();
  p.c = a.C.data();
  p.dt = numbers_of(a.dt);
  p.a = a.A.data<float>(), p.a_stride = a.A.stride(0);
  if (a.dt_bias) p.dt_bias = numbers_of(a.dt_bias), p.dt_bias_stride = a.dt_bias.stride(0);
  flat_strides(a.out, p.out_strides);
  flat_strides(a.x, p.x_strides);
  flat_strides(a.dt, p.dt_strides);
  flat_strides(a.B, p.b_strides);
  flat_strides(a.C, p.c_strides);
  if (a.z) flat_strides(a.z, p.z_strides);
  p.dt_low = static_cast<float>(a.dt_low), p.dt_high = static_cast<float>(a.dt_high);
  p.sequences = static_cast<int32_t>(sequences);
  p.tokens = static_cast<int32_t>(tokens);
  p.dim = static_cast<int32_t>(dim);
  p.dstate = static_cast<int32_t>(dstate);
  p.heads = divisor(static_cast<uint32_t>(heads));
  p.softplus = a.dt_softplus;

  // 3 launch
#if FI_CUDA
  for (const Tensor& t : {a.x, a.B, a.C}) check_rows(t, 16);
  for (const Tensor& t : {a.out, Tensor(a.z)}) check_rows(t, 4);
  for (const Tensor& t : {Tensor(a.initial_states), Tensor(a.final_states), Tensor(a.checkpoint_states)})
    check_rows(t, 8);
  const int64_t chunks = total / kChunkTokens + sequences, matrices = chunks * heads;
  const int64_t needed = matrices * (2 * kChunkMatrix + 4 * kSsdFactors);
  const CallMemory memory(a.x, needed);  // the decayed scores and factors of each chunk and head
  char* at = memory.data();
  p.scores = at;
  p.factors = reinterpret_cast<float*>(at + matrices * 2 * kChunkMatrix);
  p.unit_heads = 8;
  while (p.group.value % static_cast<uint32_t>(p.unit_heads)) p.unit_heads /= 2;
  p.units = divisor(static_cast<uint32_t>(heads / p.unit_heads));
  p.has_tiles = total > 0 && kernel.capability >= 90 && describe_chunks(kernel, p.b_tiles, a.B, total, p.b_strides) &&
                describe_chunks(kernel, p.c_tiles, a.C, total, p.c_strides) &&
                describe_chunks(kernel, p.x_tiles, a.x, total, p.x_strides);
  const auto start = [&](const Entry& entry, int64_t ctas) {
    Launch launch{ctas};
    launch.cluster = static_cast<unsigned>(SsdCombinedConfig::of(entry).cluster);
    launch.pdl = kernel.pdl(a.enable_pdl);
    kernel.launch(entry, launch, a.x.device(), p);
  };
  const int64_t multiprocessors = kernel.multiprocessors(a.x.device());
  if (total > 0) start(tile(kernel, p, 0, multiprocessors), chunks * p.units.value);
  const Entry& through = tile(kernel, p, p.checkpoints_each ? 2 : 1, multiprocessors);
  p.slices = divisor(static_cast<uint32_t>(dim / SsdCombinedConfig::of(through).columns));
  start(through, sequences * heads * p.slices.value);
#else
  (void)a.enable_pdl;
  run_cpu(p, a.x.dtype());
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::ssd_combined, fi::request_of)
