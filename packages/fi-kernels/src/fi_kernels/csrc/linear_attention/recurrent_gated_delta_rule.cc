// recurrent_gated_delta_rule: checks the arguments, launches the CUDA kernel or runs the CPU one.
#include "fi/linear_attention/recurrent_gated_delta_rule.h"

#include "fi/generated/recurrent_gated_delta_rule.h"
#include "fi/linear_attention/contract.h"

#if !FI_CUDA
#include <vector>

#include "fi/linear_attention/recurrence_cpu.h"
#endif

namespace fi {
namespace {

#if !FI_CUDA
void run_cpu(const RecurrentGatedDeltaRuleParams& p, DType dtype, DType state_dtype, bool vector_gate) {
  const cpu::LoadRow load = cpu::row_loader(dtype);
  const cpu::StoreRow store = cpu::row_storer(dtype);
  const int64_t bytes = dtype.bytes(), dim_v = p.dim_v, dim_k = p.dim_k, heads = p.heads.value;
  const cpu::StateRows rows{state_dtype, dim_v, dim_k, p.state_strides[2], p.state_strides[3]};
  const cpu::StateRows kept{state_dtype, dim_v, dim_k, p.intermediate_strides[3], p.intermediate_strides[4]};
  cpu::for_rows(
      p.batch * heads, p.tokens * dim_v * dim_k, dim_v * dim_k + 3 * dim_k + 2 * dim_v,
      [&](int64_t index, float* state) {
        const int64_t b = index / heads, h = index % heads;
        float *q = state + dim_v * dim_k, *k = q + dim_k, *alpha = k + dim_k, *v = alpha + dim_k, *out = v + dim_v;
        const auto row_of = [&](const void* base, const int64_t* strides, int64_t t, int64_t head) {
          return static_cast<char*>(const_cast<void*>(base)) +
                 (b * strides[0] + t * strides[1] + head * strides[2]) * bytes;
        };
        const auto slot_at = [&](int64_t slot) {
          return static_cast<char*>(p.state) +
                 (slot * p.state_strides[0] + h * p.state_strides[1]) * state_dtype.bytes();
        };
        const int64_t slot = p.slots.or_row(b);
        if (slot < 0) {
          std::fill_n(out, dim_v, 0.f);
          for (int64_t t = 0; t < p.tokens; ++t) store(out, row_of(p.out, p.out_strides, t, h), dim_v);
          return;
        }
        rows.load(slot_at(slot), state);
        for (int64_t t = 0; t < p.tokens; ++t) {
          load(row_of(p.q, p.q_strides, t, h / p.q_group.value), q, dim_k);
          load(row_of(p.k, p.k_strides, t, h / p.k_group.value), k, dim_k);
          load(row_of(p.v, p.v_strides, t, h / p.v_group.value), v, dim_v);
          cpu::scale_row_of_heads(q, dim_k, p.l2norm, p.scale);
          cpu::scale_row_of_heads(k, dim_k, p.l2norm, 1.f);
          for (int64_t c = 0; c < dim_k; ++c) {
            if (c > 0 && !vector_gate) {
              alpha[c] = alpha[0];
              continue;
            }
            const float x =
                cpu::number(p.a, b * p.a_strides[0] + t * p.a_strides[1] + h * p.a_strides[2] + c * p.a_strides[3]) +
                cpu::number(p.dt_bias, h * p.dt_bias_strides[0] + c * p.dt_bias_strides[1]);
            alpha[c] = std::exp(-std::exp(p.a_log[h]) * cpu::softplus(x));
          }
          const float logit = cpu::number(p.b, b * p.b_strides[0] + t * p.b_strides[1] + h * p.b_strides[2]);
          cpu::gated_delta_step(state, alpha, 1.f / (1.f + std::exp(-logit)), k, q, v, out, dim_v, dim_k);
          store(out, row_of(p.out, p.out_strides, t, h), dim_v);
          if (p.intermediate)
            kept.store(state, static_cast<char*>(p.intermediate) +
                                  (b * p.intermediate_strides[0] + t * p.intermediate_strides[1] +
                                   h * p.intermediate_strides[2]) *
                                      state_dtype.bytes());
          if (p.token_slots.data && p.token_slots.at(b, t) >= 0) rows.store(state, slot_at(p.token_slots.at(b, t)));
        }
        const int64_t to = p.to_slots.data ? p.to_slots.at(b) : slot;
        if (p.updates_state && to >= 0) rows.store(state, slot_at(to));
      });
}
#endif

RecurrentGatedDeltaRuleRequest request_of(const RecurrentGatedDeltaRuleArgs& a) {
  using Request = RecurrentGatedDeltaRuleRequest;
  return {a.q.dtype(), a.state.dtype(), a.q.size_or_0(-1),
          a.a.ndim() == 4 ? Request::Gate::kChannel : Request::Gate::kHead,
          a.state.stride_or_0(-1) == 1 ? Request::Contiguous::kK : Request::Contiguous::kV};
}

void recurrent_gated_delta_rule(const Kernel& kernel, const RecurrentGatedDeltaRuleArgs& a) {
  // 1 check
  Dim batch{"batch"}, tokens{"tokens"}, q_heads{"q_heads"}, k_heads{"k_heads"}, own{"v_heads"}, dim_k{"K"}, dim_v{"V"};
  Dim slots{"slots"}, heads{"heads"};
  a.q.is({kF16, kBF16}).inner_contiguous().shape(batch, tokens, q_heads, dim_k);
  a.k.like(a.q).inner_contiguous().shape(batch, tokens, k_heads, dim_k);
  a.v.like(a.q).inner_contiguous().shape(batch, tokens, own, dim_v);
  a.state.is({kF32, kBF16}).on(a.q).shape(slots, heads, dim_v, dim_k);
  FI_CHECK(a.state.stride(-1) == 1 || a.state.stride(-2) == 1, ValueError,
           "state must be contiguous in one of its last two dimensions; got strides %lld and %lld",
           static_cast<long long>(a.state.stride(-2)), static_cast<long long>(a.state.stride(-1)));
  a.out.like(a.q).inner_contiguous().shape(batch, tokens, heads, dim_v);
  a.A_log.is({kF32}).on(a.q).contiguous().shape(heads);
  a.b.is({kF32, kF16, kBF16}).on(a.q).shape(batch, tokens, heads);
  a.a.is({kF32, kF16, kBF16}).on(a.q);
  a.dt_bias.is({kF32, kF16, kBF16}).on(a.q);
  const bool vector_gate = a.a.ndim() == 4;
  if (vector_gate) {
    a.a.shape(batch, tokens, heads, dim_k);
    a.dt_bias.shape(heads, dim_k);
  } else {
    a.a.shape(batch, tokens, heads);
    a.dt_bias.shape(heads);
  }
  FI_CHECK(a.state_indices || slots == batch, ValueError,
           "state must have %lld slots, one for each row, if state_indices is None; got %s",
           static_cast<long long>(batch), a.state.shape_str().c_str());
  FI_CHECK(!(a.intermediate_states && a.token_state_indices), ValueError,
           "at most one of intermediate_states and token_state_indices may be given");
  RecurrentGatedDeltaRuleParams p{};
  p.slots = index_table(a.state_indices, a.q, batch, 0);
  p.to_slots = index_table(a.output_state_indices, a.q, batch, 0);
  if (a.token_state_indices) p.token_slots = index_table(a.token_state_indices, a.q, batch, tokens);
  if (a.intermediate_states) {
    Dim rows{"rows"}, steps{"steps"};
    a.intermediate_states.like(a.state).shape(rows, steps, heads, dim_v, dim_k);
    FI_CHECK(rows >= batch && steps >= tokens, ValueError,
             "intermediate_states must have at least %lld rows of %lld tokens; got %s", static_cast<long long>(batch),
             static_cast<long long>(tokens), a.intermediate_states.shape_str().c_str());
    const int axis = a.state.stride(-1) == 1 ? -1 : -2;
    FI_CHECK(a.intermediate_states.stride(axis) == 1, ValueError,
             "intermediate_states must be contiguous in dimension %d, as state; got stride %lld", axis,
             static_cast<long long>(a.intermediate_states.stride(axis)));
    p.intermediate = a.intermediate_states.data();
    strides_of(a.intermediate_states, p.intermediate_strides);
  }
  if (batch == 0 || tokens == 0 || heads == 0 || dim_v == 0) return;
  p.q_group = head_group(a.q, q_heads, heads);
  p.k_group = head_group(a.k, k_heads, heads);
  p.v_group = head_group(a.v, own, heads);
  if (kernel.checks_contents(a.q.device())) {
    check_slots(kernel, a.state_indices, slots);
    check_slots(kernel, a.output_state_indices, slots);
    check_slots(kernel, a.token_state_indices, slots);
  }

  // 2 shape
  p.out = a.out.data();
  p.state = a.state.data();
  p.q = a.q.data();
  p.k = a.k.data();
  p.v = a.v.data();
  p.a = numbers_of(a.a);
  p.b = numbers_of(a.b);
  p.a_log = a.A_log.data<float>();
  p.dt_bias = numbers_of(a.dt_bias);
  for (int i = 0; i < 3; ++i) {
    p.q_strides[i] = a.q.stride(i);
    p.k_strides[i] = a.k.stride(i);
    p.v_strides[i] = a.v.stride(i);
    p.out_strides[i] = a.out.stride(i);
    p.b_strides[i] = a.b.stride(i);
  }
  for (int i = 0; i < a.a.ndim(); ++i) p.a_strides[i] = a.a.stride(i);
  for (int i = 0; i < a.dt_bias.ndim(); ++i) p.dt_bias_strides[i] = a.dt_bias.stride(i);
  strides_of(a.state, p.state_strides);
  p.batch = static_cast<int32_t>(batch);
  p.tokens = static_cast<int32_t>(tokens);
  p.dim_v = static_cast<int32_t>(dim_v);
  p.dim_k = static_cast<int32_t>(dim_k);
  p.heads = divisor(static_cast<uint32_t>(heads));
  p.scale = static_cast<float>(a.scale);
  p.l2norm = a.use_qk_l2norm;
  p.updates_state = a.update_state && !p.token_slots.data;

  // 3 launch
#if FI_CUDA
  const int axis = a.state.stride(-1) == 1 ? 2 : 3;  // whose stride is not 1
  for (const Tensor& t : {Tensor(a.state), p.intermediate ? Tensor(a.intermediate_states) : Tensor(a.state)}) {
    const int more = t.ndim() - 4;
    FI_CHECK(t.alignment(16, {t.stride(0), t.stride(1), t.stride(more + 1), t.stride(more + axis)}) == 16, ValueError,
             "%s must have rows that are 16-byte aligned; got address %p, shape %s", t.name(), t.data(),
             t.shape_str().c_str());
  }
  FI_CHECK(axis == 2 || dim_v % 4 == 0, ValueError, "v must have a multiple of 4 columns; got %s",
           a.v.shape_str().c_str());
  p.vectors = a.q.row_alignment(16) == 16 && a.k.row_alignment(16) == 16;
  const int64_t states = batch * heads, sms = kernel.multiprocessors(a.q.device());
  const bool once = tokens == 1 && !p.intermediate && !p.token_slots.data && !vector_gate && p.vectors && axis == 2 &&
                    p.state_strides[2] == dim_k;
  const StateTile cta = tile<RecurrentGatedDeltaRuleConfig>(kernel, once ? kOneToken : kAnyTokens, states, dim_v, sms);
  p.rows_per_cta = static_cast<int32_t>(cta.rows);
  p.tiles = divisor(static_cast<uint32_t>((dim_v + p.rows_per_cta - 1) / p.rows_per_cta));
  Launch launch{states * p.tiles.value};
  launch.threads = cta.threads;
  launch.pdl = kernel.pdl(a.enable_pdl);
  kernel.launch(*cta.entry, launch, a.q.device(), p);
#else
  (void)a.enable_pdl;
  run_cpu(p, a.q.dtype(), a.state.dtype(), vector_gate);
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::recurrent_gated_delta_rule, fi::request_of)
