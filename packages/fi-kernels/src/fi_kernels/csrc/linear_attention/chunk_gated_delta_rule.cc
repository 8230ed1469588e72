// chunk_gated_delta_rule: checks the arguments; launches the kernel that prepares all chunks in parallel, those that
// map segments and carry states if there are segments, and the one that goes through the chunks; or runs the CPU
// kernel, token by token.
#include "fi/linear_attention/chunk_gated_delta_rule.h"

#include "fi/generated/chunk_gated_delta_rule.h"
#include "fi/linear_attention/chunk_contract.h"

namespace fi {
namespace {

#if !FI_CUDA
void run_cpu(const ChunkGatedDeltaRuleParams& p, DType dtype) {
  const cpu::LoadRow load = cpu::row_loader(dtype);
  const cpu::StoreRow store = cpu::row_storer(dtype);
  const int64_t bytes = dtype.bytes(), dim_v = p.dim_v, dim_k = p.dim_k;
  const int64_t floats = dim_v * dim_k + 3 * dim_k + 2 * dim_v;
  cpu::for_rows(p.sequences * int64_t{p.heads.value}, 16 * dim_v * dim_k, floats, [&](int64_t index, float* state) {
    const int64_t i = index / p.heads.value, h = index % p.heads.value;
    float *q = state + dim_v * dim_k, *k = q + dim_k, *alpha = k + dim_k, *v = alpha + dim_k, *out = v + dim_v;
    const int64_t first = p.offsets.at(i), end = p.offsets.at(i + 1), slot = p.slots.or_row(i);
    const auto row_of = [&](const void* base, const int64_t* strides, int64_t t, int64_t head) {
      return static_cast<char*>(const_cast<void*>(base)) + (t * strides[0] + head * strides[1]) * bytes;
    };
    const ChunkState own{state, h, dim_v, dim_k};
    own.begin(p.initial, slot);
    for (int64_t t = first; t < end; ++t) {
      load(row_of(p.q, p.q_strides, t, h / p.q_group.value), q, dim_k);
      load(row_of(p.k, p.k_strides, t, h / p.k_group.value), k, dim_k);
      load(row_of(p.v, p.v_strides, t, h / p.v_group.value), v, dim_v);
      cpu::scale_row_of_heads(q, dim_k, p.l2norm, p.scale);
      cpu::scale_row_of_heads(k, dim_k, p.l2norm, 1.f);
      const float* g = p.g ? p.g + t * p.g_strides[0] + h * p.g_strides[1] : nullptr;
      if (p.channel_gates) {
        std::copy_n(g, dim_k, alpha);
      } else {
        std::fill_n(alpha, dim_k, g ? *g : 1.f);
      }
      const float beta = p.beta ? p.beta[t * p.beta_strides[0] + h * p.beta_strides[1]] : 1.f;
      cpu::gated_delta_step(state, alpha, beta, k, q, v, out, dim_v, dim_k);
      store(out, row_of(p.out, p.out_strides, t, h), dim_v);
      const int64_t done = t + 1 - first;
      if (p.checkpoint_tokens.value && done % p.checkpoint_tokens.value == 0)
        own.store(p.checkpoints, p.checkpoint_starts.at(i) + done / p.checkpoint_tokens.value - 1);
    }
    if (const int64_t to = p.output_slot(i); p.output.data && to >= 0) own.store(p.output, to);
  });
}
#endif

const float* gates_of(const OptionalTensor& t, const Tensor& q, Dim& tokens, Dim& heads, int64_t (&strides)[2]) {
  if (!t) return nullptr;
  t.is({kF32}).on(q).shape(tokens, heads);
  strides[0] = t.stride(0), strides[1] = t.stride(1);
  return t.data<float>();
}

// Raises unless the checkpoints of each sequence have rows.
void check_checkpoints(const Integers& offsets, const Integers& starts, int64_t tokens, int64_t rows) {
  for (int64_t i = 0; i + 1 < offsets.size(); ++i) {
    const int64_t count = (offsets[i + 1] - offsets[i]) / tokens;
    FI_CHECK(count == 0 || (starts[i] >= 0 && starts[i] + count <= rows), ValueError,
             "checkpoint_cu_starts must leave %lld rows of state_checkpoints, of %lld, for sequence %lld; got %lld",
             static_cast<long long>(count), static_cast<long long>(rows), static_cast<long long>(i),
             static_cast<long long>(starts[i]));
  }
}

#if FI_CUDA
enum Step : int64_t { kPrepare, kMap, kCarry, kStates };  // of ChunkConfig

const Entry& entry_of(const Kernel& kernel, int64_t step) {
  return kernel.first_entry([=](const Entry& entry) { return ChunkGatedDeltaRuleConfig::of(entry).step == step; });
}
// The heads that a CTA prepares: four only where that leaves each SM five CTAs four times.
int32_t unit_heads(const ChunkGatedDeltaRuleParams& p, int64_t matrices, int64_t multiprocessors) {
  if (p.channel_gates) return 1;
  const auto share = [&](uint32_t count) { return p.q_group.value % count == 0 && p.k_group.value % count == 0; };
  return share(4) && matrices >= 4 * 20 * multiprocessors ? 4 : share(2) ? 2 : 1;
}

// The entry with the most columns of a state for each CTA that fits an SM and still gives each one a CTA.
const Entry& tile(const Kernel& kernel, DLDevice device, int64_t states, int64_t dim_v, int64_t multiprocessors) {
  const Entry* best = nullptr;
  const int64_t limit = kernel.shared_limit(device);
  for (const Entry& entry : kernel.entries) {
    const auto config = ChunkGatedDeltaRuleConfig::of(entry);
    if (config.step != kStates) continue;
    const bool fits = states * (dim_v / config.columns) >= multiprocessors && entry.shared_bytes <= limit;
    if (!best || fits) best = &entry;
  }
  return *best;
}
#endif

ChunkGatedDeltaRuleRequest request_of(const ChunkGatedDeltaRuleArgs& a) {
  using Gate = ChunkGatedDeltaRuleRequest::Gate;
  return {a.q.dtype(), a.q.size_or_0(-1), a.v.size_or_0(-1), a.g && a.g.ndim() == 3 ? Gate::kChannel : Gate::kHead};
}

void chunk_gated_delta_rule(const Kernel& kernel, const ChunkGatedDeltaRuleArgs& a) {
  // 1 check
  Dim tokens{"tokens"}, q_heads{"q_heads"}, k_heads{"k_heads"}, v_heads{"v_heads"}, dim_k{"K"}, dim_v{"V"};
  Dim ends{"sequences + 1"};
  a.q.is({kF16, kBF16}).inner_contiguous().shape(tokens, q_heads, dim_k);
  a.k.like(a.q).inner_contiguous().shape(tokens, k_heads, dim_k);
  a.v.like(a.q).inner_contiguous().shape(tokens, v_heads, dim_v);
  Dim heads{"heads", std::max<int64_t>(q_heads, v_heads)};
  a.out.like(a.q).inner_contiguous().shape(tokens, heads, dim_v);
  a.cu_seqlens.is({kI32, kI64}).on(a.q).contiguous().shape(ends);
  FI_CHECK(ends >= 1, ValueError, "cu_seqlens must have shape [sequences + 1]; got %s",
           a.cu_seqlens.shape_str().c_str());
  const int64_t sequences = ends - 1;
  ChunkGatedDeltaRuleParams p{};
  p.channel_gates = a.g && a.g.ndim() == 3;
  if (p.channel_gates) {
    a.g.is({kF32}).on(a.q).inner_contiguous().shape(tokens, heads, dim_k);
    p.g = a.g.data<float>();
    p.g_strides[0] = a.g.stride(0), p.g_strides[1] = a.g.stride(1);
  } else {
    p.g = gates_of(a.g, a.q, tokens, heads, p.g_strides);
  }
  p.beta = gates_of(a.beta, a.q, tokens, heads, p.beta_strides);
  p.slots = index_table(a.state_indices, a.q, sequences, 0);
  Dim rows{a.state_indices ? "slots" : "sequences", a.state_indices ? -1 : sequences}, kept{"checkpoints"};
  p.initial = states_of(a.initial_state, a.q, rows, heads, dim_v, dim_k);
  p.to_slots = index_table(a.output_state_indices, a.q, sequences, 0);
  Dim to_rows{"slots"};
  p.output = states_of(a.output_state, a.q, p.to_slots.data ? to_rows : rows, heads, dim_v, dim_k);
  FI_CHECK(!p.to_slots.data || p.output.data, ValueError, "output_state must be given with output_state_indices");
  FI_CHECK(a.checkpoint_every_n_tokens >= 0 && a.checkpoint_every_n_tokens % kChunkTokens == 0 &&
               a.checkpoint_every_n_tokens < (int64_t{1} << 31),
           ValueError, "checkpoint_every_n_tokens must be a multiple of %d; got %lld", kChunkTokens,
           static_cast<long long>(a.checkpoint_every_n_tokens));
  if (a.checkpoint_every_n_tokens) {
    FI_CHECK(a.state_checkpoints && a.checkpoint_cu_starts, ValueError,
             "state_checkpoints and checkpoint_cu_starts must be given with checkpoint_every_n_tokens");
    p.checkpoints = states_of(a.state_checkpoints, a.q, kept, heads, dim_v, dim_k);
    a.checkpoint_cu_starts.is({kI32, kI64}).on(a.q).contiguous();
    p.checkpoint_starts = index_table(a.checkpoint_cu_starts, a.q, ends, 0);
    p.checkpoint_tokens = divisor(static_cast<uint32_t>(a.checkpoint_every_n_tokens));
  }
  FI_CHECK(a.segment_tokens >= 0 && a.segment_tokens % kChunkTokens == 0 && a.segment_tokens < (int64_t{1} << 31),
           ValueError, "segment_tokens must be a multiple of %d; got %lld", kChunkTokens,
           static_cast<long long>(a.segment_tokens));
  if (a.segment_tokens) p.segment_tokens = divisor(static_cast<uint32_t>(a.segment_tokens));
  p.offsets = {a.cu_seqlens.data(), 1, 0, a.cu_seqlens.dtype().bits == 64};
  if (sequences == 0 || heads == 0 || dim_v == 0) return;
  if (tokens > 0) {
    p.q_group = head_group(a.q, q_heads, heads);
    p.k_group = head_group(a.k, k_heads, heads);
    p.v_group = head_group(a.v, v_heads, heads);
  } else {
    p.q_group = p.k_group = p.v_group = divisor(1);
  }
  if (kernel.checks_contents(a.q.device())) {
    check_offsets(Integers(kernel, a.cu_seqlens), tokens);
    if (p.initial.data || p.output.data) check_slots(kernel, a.state_indices, rows);
    check_slots(kernel, a.output_state_indices, to_rows);
    if (p.checkpoint_tokens.value)
      check_checkpoints(Integers(kernel, a.cu_seqlens), Integers(kernel, a.checkpoint_cu_starts),
                        p.checkpoint_tokens.value, kept);
  }

  // 2 shape
  p.out = a.out.data();
  p.q = a.q.data();
  p.k = a.k.data();
  p.v = a.v.data();
  for (int i = 0; i < 2; ++i) {
    p.q_strides[i] = a.q.stride(i);
    p.k_strides[i] = a.k.stride(i);
    p.v_strides[i] = a.v.stride(i);
    p.out_strides[i] = a.out.stride(i);
  }
  p.sequences = static_cast<int32_t>(sequences);
  p.heads = divisor(static_cast<uint32_t>(heads));
  p.dim_k = static_cast<int32_t>(dim_k);
  p.dim_v = static_cast<int32_t>(dim_v);
  p.scale = static_cast<float>(a.scale);
  p.l2norm = a.use_qk_l2norm;

  // 3 launch
#if FI_CUDA
  for (const Tensor& t : {a.q, a.k, a.v}) check_rows(t, 16);
  if (p.channel_gates) check_rows(a.g, 16);
  check_rows(a.out, 4);
  for (const Tensor& t : {Tensor(a.initial_state), Tensor(a.output_state), Tensor(a.state_checkpoints)})
    check_rows(t, 8);
  const int64_t chunks = tokens / kChunkTokens + sequences, matrices = chunks * heads, bytes = a.q.dtype().bytes();
  const int64_t segments = p.segment_tokens.value ? tokens / p.segment_tokens.value + sequences : sequences;
  const int64_t mapped = p.segment_tokens.value ? segments * heads * dim_k * dim_v : 0;
  const int64_t factors = p.channel_gates ? dim_k : 4 * kChunkTokens;  // of a chunk and head
  const int64_t decayed = p.channel_gates ? matrices * 3 * kChunkTokens * dim_k * bytes : 0;
  const int64_t needed = decayed + matrices * (2 * kChunkMatrix * bytes + factors * 4) + 3 * 4 * mapped;
  // What the parallel kernels leave for the sequential one: two matrices and four vectors of each chunk and head (with
  // a gate for each channel one vector, k twice and q), three states of each segment and head.
  const CallMemory memory(a.q, needed);
  char* at = memory.data();
  p.decayed = at;
  p.solved = at + decayed;
  p.scores = at + decayed + matrices * kChunkMatrix * bytes;
  p.factors = reinterpret_cast<float*>(at + decayed + 2 * matrices * kChunkMatrix * bytes);
  p.maps = p.factors + matrices * factors;
  p.carried = p.maps + 2 * mapped;
  const int64_t multiprocessors = kernel.multiprocessors(a.q.device());
  p.unit_heads = unit_heads(p, matrices, multiprocessors);
  p.units = divisor(p.heads.value / p.unit_heads);
  p.has_tiles = tokens > 0 && kernel.capability >= 90 && describe_chunks(kernel, p.v_tiles, a.v, tokens, p.v_strides) &&
                (p.channel_gates || (describe_chunks(kernel, p.k_tiles, a.k, tokens, p.k_strides) &&
                                     describe_chunks(kernel, p.q_tiles, a.q, tokens, p.q_strides)));
  const auto start = [&](const Entry& entry, int64_t ctas) {
    Launch launch{ctas};
    launch.cluster = static_cast<unsigned>(ChunkGatedDeltaRuleConfig::of(entry).cluster);
    launch.pdl = kernel.pdl(a.enable_pdl);
    kernel.launch(entry, launch, a.q.device(), p);
  };
  if (tokens > 0) start(entry_of(kernel, kPrepare), chunks * p.units.value);
  if (p.segment_tokens.value) {
    const Entry& map = entry_of(kernel, kMap);
    p.map_slices = divisor(static_cast<uint32_t>(2 * dim_v / ChunkGatedDeltaRuleConfig::of(map).columns));
    start(map, segments * heads * p.map_slices.value);
    start(entry_of(kernel, kCarry), sequences * heads * (dim_v / 8));
  }
  const Entry& states = tile(kernel, a.q.device(), segments * heads, dim_v, multiprocessors);
  p.slices = divisor(static_cast<uint32_t>(dim_v / ChunkGatedDeltaRuleConfig::of(states).columns));
  start(states, segments * heads * p.slices.value);
#else
  (void)a.enable_pdl;
  run_cpu(p, a.q.dtype());
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::chunk_gated_delta_rule, fi::request_of)
