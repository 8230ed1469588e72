// selective_state_update: checks the arguments, launches the CUDA kernel or runs the CPU one.
#include "fi/linear_attention/selective_state_update.h"

#include "fi/generated/selective_state_update.h"
#include "fi/linear_attention/contract.h"

#if !FI_CUDA
#include "fi/cpu/math.h"
#include "fi/linear_attention/recurrence_cpu.h"
#endif

namespace fi {
namespace {

#if !FI_CUDA
bool is_integer(DType dtype) { return dtype == kI8 || dtype == kI16; }

// Moves one row of a state to floats and back: floats, or integers with a scale. strides of the last two dimensions.
struct StateRow {
  const SelectiveStateUpdateParams& p;
  DType dtype;

  void load(const void* from, const float* scale, float* x) const {
    if (!is_integer(dtype)) return cpu::row_loader(dtype)(from, x, p.dstate);
    for (int64_t i = 0; i < p.dstate; ++i)
      x[i] = *scale * static_cast<float>(dtype == kI8 ? static_cast<const int8_t*>(from)[i]
                                                      : static_cast<const int16_t*>(from)[i]);
  }
  // place: of the row among all, and the token, for random numbers.
  void store(float* x, void* to, float* scale, int64_t place, int64_t t) const {
    if (is_integer(dtype)) return store_integers(x, to, scale);
    if (p.seed)
      for (int64_t i = 0; i < p.dstate; ++i)
        x[i] = round_to_half(x[i], state_random(p, place, static_cast<int>(t), static_cast<int>(i)).x[i / 32 % 4]);
    cpu::row_storer(dtype)(x, to, p.dstate);
  }

 private:
  void store_integers(const float* x, void* to, float* scale) const {
    const float limit = dtype == kI8 ? 127.f : 32767.f;
    float most = 0.f;
    for (int64_t i = 0; i < p.dstate; ++i) most = std::max(most, std::fabs(x[i]));
    *scale = most > 0.f ? most / limit : 1.f;
    for (int64_t i = 0; i < p.dstate; ++i) {
      const float q = std::clamp(std::rint(x[i] / *scale), -limit, limit);
      if (dtype == kI8) {
        static_cast<int8_t*>(to)[i] = static_cast<int8_t>(q);
      } else {
        static_cast<int16_t*>(to)[i] = static_cast<int16_t>(q);
      }
    }
  }
};

// One state of a row and a head, and where its rows lie.
struct CpuState {
  const SelectiveStateUpdateParams& p;
  DType dtype;
  int64_t n, h;

  void load(int64_t slot, float* state) const {
    for (int64_t r = 0; r < p.dim; ++r) row().load(state_at(slot, r), scale_at(slot, r), state + r * p.dstate);
  }
  void store(const float* state, int64_t slot, int64_t t, float* x) const {
    each(state, x, [&](int64_t r) { row().store(x, state_at(slot, r), scale_at(slot, r), place(r), t); });
  }
  void keep(const float* state, int64_t kept, int64_t t, float* x) const {
    const int64_t *to = p.intermediate_strides, *own = p.intermediate_scale_strides;
    each(state, x, [&](int64_t r) {
      float* scale = p.intermediate_scale;
      if (scale) scale += kept * own[0] + t * own[1] + h * own[2] + r * own[3];
      row().store(x, bytes_at(p.intermediate, kept * to[0] + t * to[1] + h * to[2] + r * to[3]), scale, place(r), t);
    });
  }

 private:
  StateRow row() const { return {p, dtype}; }
  int64_t place(int64_t r) const { return (n * p.heads.value + h) * p.dim + r; }
  char* bytes_at(void* base, int64_t i) const { return static_cast<char*>(base) + i * dtype.bytes(); }
  char* state_at(int64_t slot, int64_t r) const {
    return bytes_at(p.state, slot * p.state_strides[0] + h * p.state_strides[1] + r * p.state_strides[2]);
  }
  float* scale_at(int64_t slot, int64_t r) const {
    return p.scale ? p.scale + slot * p.scale_strides[0] + h * p.scale_strides[1] + r * p.scale_strides[2] : nullptr;
  }
  // f(row) with a copy of the row in x.
  template <class F>
  void each(const float* state, float* x, F&& f) const {
    for (int64_t r = 0; r < p.dim; ++r) {
      std::copy_n(state + r * p.dstate, p.dstate, x);
      f(r);
    }
  }
};

// The step of a token: dt, its bias, A and D have a number for each head, or for each element.
void step_cpu(const SelectiveStateUpdateParams& p, int64_t dt_at, int64_t h, float* state, const float* x,
              const float* b, const float* c, float* out) {
  const auto dt_of = [&](int64_t r) {
    float dt = cpu::number(p.dt, dt_at + r * p.dt_dim_stride);
    if (p.dt_bias.data) dt += cpu::number(p.dt_bias, h * p.dt_bias_stride + r * p.dt_bias_dim_stride);
    return p.softplus ? cpu::softplus(dt) : dt;
  };
  const float* rate = p.a + h * p.a_stride;
  if (p.a_dim_stride || p.a_column_stride || p.dt_dim_stride || p.dt_bias_dim_stride) {
    for (int64_t r = 0; r < p.dim; ++r) {
      float *s = state + r * p.dstate, sum = 0.f;
      const float dt = dt_of(r);
      for (int64_t i = 0; i < p.dstate; ++i) {
        s[i] = std::exp(dt * rate[r * p.a_dim_stride + i * p.a_column_stride]) * s[i] + dt * x[r] * b[i];
        sum += s[i] * c[i];
      }
      out[r] = sum;
    }
  } else {
    const float dt = dt_of(0);
    cpu::selective_step(state, std::exp(dt * *rate), dt, x, b, c, out, p.dim, p.dstate);
  }
  if (p.d.data)
    for (int64_t r = 0; r < p.dim; ++r) out[r] += cpu::number(p.d, h * p.d_stride + r * p.d_dim_stride) * x[r];
}

void run_cpu(const SelectiveStateUpdateParams& p, DType dtype, DType state_dtype) {
  const cpu::LoadRow load = cpu::row_loader(dtype);
  const cpu::StoreRow store = cpu::row_storer(dtype);
  const int64_t bytes = dtype.bytes(), dim = p.dim, dstate = p.dstate, heads = p.heads.value;
  cpu::for_rows(p.batch * heads, dim * dstate, dim * dstate + 3 * dstate + 3 * dim, [&](int64_t index, float* state) {
    const int64_t n = index / heads, h = index % heads, g = h / p.group.value;
    float *b = state + dim * dstate, *c = b + dstate, *row = c + dstate, *x = row + dstate, *z = x + dim,
          *out = z + dim;
    int64_t first = 0, tokens = p.tokens;
    if (p.cu_seqlens) {
      const IndexTable offsets{p.cu_seqlens, 1, 0, p.cu_is_wide};
      first = offsets.at(n);
      tokens = offsets.at(n + 1) - first;
    }
    const int64_t start = p.accepted ? IndexTable{p.accepted, 1, 0, p.accepted_is_wide}.at(n) - 1 : 0;
    const int64_t slot = p.slots.or_row(n, std::max<int64_t>(start, 0));
    if (tokens <= 0 || p.is_padding(slot)) return;
    const auto row_of = [&](const void* base, const int64_t* strides, int64_t t, int64_t head) {
      return static_cast<char*>(const_cast<void*>(base)) +
             (n * strides[0] + (first + t) * strides[1] + head * strides[2]) * bytes;
    };
    const CpuState stored{p, state_dtype, n, h};
    stored.load(slot, state);
    for (int64_t t = 0; t < tokens; ++t) {
      load(row_of(p.x, p.x_strides, t, h), x, dim);
      load(row_of(p.b, p.b_strides, t, g), b, dstate);
      load(row_of(p.c, p.c_strides, t, g), c, dstate);
      step_cpu(p, n * p.dt_strides[0] + (first + t) * p.dt_strides[1] + h * p.dt_strides[2], h, state, x, b, c, out);
      if (p.z) {
        load(row_of(p.z, p.z_strides, t, h), z, dim);
        for (int64_t i = 0; i < dim; ++i) out[i] *= cpu::silu(z[i]);
      }
      store(out, row_of(p.out, p.out_strides, t, h), dim);
      const int64_t kept = p.intermediate ? p.intermediate_rows.or_row(n) : -1;
      if (kept >= 0) stored.keep(state, kept, t, row);
      if (p.each_token && !p.is_padding(p.to_slots.at(n, t))) stored.store(state, p.to_slots.at(n, t), t, row);
    }
    const int64_t to = p.to_slots.data ? p.to_slots.at(n) : slot;
    if (p.updates_state && !p.each_token && to >= 0 && !(p.to_slots.data && to == p.pad_slot))
      stored.store(state, to, tokens - 1, row);
  });
}
#endif

// Raises unless the offsets are some, and each token has a column of the tables that it needs.
void check_lengths(const Kernel& kernel, const SelectiveStateUpdateArgs& a, bool each_token, int64_t total) {
  const Integers offsets(kernel, a.cu_seqlens);
  check_offsets(offsets, total);
  int64_t most = 0;
  for (int64_t i = 1; i < offsets.size(); ++i) most = std::max(most, offsets[i] - offsets[i - 1]);
  FI_CHECK(!each_token || a.dst_state_batch_indices.size(1) >= most, ValueError,
           "dst_state_batch_indices must have %lld columns, the tokens of a request; got %lld",
           static_cast<long long>(most), static_cast<long long>(a.dst_state_batch_indices.size(1)));
  FI_CHECK(!a.intermediate_states_buffer || a.intermediate_states_buffer.size(1) >= most, ValueError,
           "intermediate_states_buffer must have %lld tokens, those of a request; got %s", static_cast<long long>(most),
           a.intermediate_states_buffer.shape_str().c_str());
}

// The stride of dimension i, 0 where it has one number.
int64_t step_of(const Tensor& t, int i) { return t.size(i) > 1 ? t.stride(i) : 0; }

// Scales of rows of integers, and the seed that rounds fp16 states; raises unless they fit the state.
void take_rounding(const SelectiveStateUpdateArgs& a, Dim& slots, Dim& heads, Dim& dim, SelectiveStateUpdateParams& p) {
  const bool integers = a.state.dtype() == kI8 || a.state.dtype() == kI16;
  FI_CHECK(bool{a.state_scale} == integers, ValueError, "state_scale must be given with an int8 or int16 state, and %s",
           integers ? "is missing" : "with no other");
  if (integers) {
    a.state_scale.is({kF32}).on(a.state).shape(slots, heads, dim);
    p.scale = a.state_scale.data<float>();
    strides_of(a.state_scale, p.scale_strides);
  }
  const bool kept = integers && a.intermediate_states_buffer;
  FI_CHECK(bool{a.intermediate_state_scales} == kept, ValueError,
           "intermediate_state_scales must be given with an intermediate_states_buffer of int8 or int16, and %s",
           kept ? "are missing" : "with no other");
  if (kept) {
    Dim rows{"rows", a.intermediate_states_buffer.size(0)}, steps{"steps", a.intermediate_states_buffer.size(1)};
    a.intermediate_state_scales.is({kF32}).on(a.state).shape(rows, steps, heads, dim);
    p.intermediate_scale = a.intermediate_state_scales.data<float>();
    strides_of(a.intermediate_state_scales, p.intermediate_scale_strides);
  }
  if (!a.rand_seed) return;
  FI_CHECK(a.state.dtype() == kF16, ValueError, "rand_seed must come with a float16 state; got %s",
           a.state.dtype().str().c_str());
  FI_CHECK(a.rand_seed.numel() == 1, ValueError, "rand_seed must have 1 element; got %s",
           a.rand_seed.shape_str().c_str());
  FI_CHECK(a.philox_rounds > 0, ValueError, "philox_rounds must be above 0; got %lld",
           static_cast<long long>(a.philox_rounds));
  a.rand_seed.is({kI64}).on(a.state);
  p.seed = a.rand_seed.data<int64_t>();
  p.rounds = static_cast<int32_t>(a.philox_rounds);
}

SelectiveStateUpdateRequest request_of(const SelectiveStateUpdateArgs& a) {
  return {a.x.dtype(), a.state.dtype(), a.state.size_or_0(-1)};
}

void selective_state_update(const Kernel& kernel, const SelectiveStateUpdateArgs& a) {
  // 1 check
  Dim slots{"slots"}, heads{"heads"}, dim{"dim"}, dstate{"dstate"}, batch{"batch"}, tokens{"tokens", 1};
  Dim groups{"groups"}, total{"total_tokens"};
  a.state.is({kF32, kBF16, kF16, kI16, kI8}).inner_contiguous().shape(slots, heads, dim, dstate);
  a.x.is({kF32, kF16, kBF16}).on(a.state).inner_contiguous();
  a.dt.is({kF32, kF16, kBF16}).on(a.state);
  a.B.like(a.x).inner_contiguous();
  a.C.like(a.x).inner_contiguous();
  a.out.like(a.x).inner_contiguous();
  if (a.z) a.z.like(a.x).inner_contiguous();
  const bool packed{a.cu_seqlens}, several = !packed && a.x.ndim() == 4;
  FI_CHECK(several || a.x.ndim() == 3, ValueError, "x must have shape [batch, heads, dim]%s; got %s",
           packed ? "" : " or [batch, tokens, heads, dim]", a.x.shape_str().c_str());
  if (packed) {
    Dim ends{"batch + 1"};
    a.cu_seqlens.is({kI32, kI64}).on(a.state).contiguous().shape(ends);
    FI_CHECK(ends >= 1, ValueError, "cu_seqlens must have shape [batch + 1]; got %s", a.cu_seqlens.shape_str().c_str());
    batch.value = ends - 1;
  }
  Dim& rows = packed ? total : batch;
  const auto is_of = [&](const Tensor& t, Dim& width, Dim& last) {
    if (several) {
      t.shape(batch, tokens, width, last);
    } else {
      t.shape(rows, width, last);
    }
  };
  if (several) tokens.value = -1;
  is_of(a.x, heads, dim);
  is_of(a.dt, heads, dim);
  is_of(a.out, heads, dim);
  is_of(a.B, groups, dstate);
  is_of(a.C, groups, dstate);
  if (a.z) is_of(a.z, heads, dim);
  a.A.is({kF32}).on(a.state).shape(heads, dim, dstate);
  if (a.D) a.D.is({kF32, kF16, kBF16}).on(a.state).shape(heads, dim);
  if (a.dt_bias) a.dt_bias.is({kF32, kF16, kBF16}).on(a.state).shape(heads, dim);
  const bool each_token = a.dst_state_batch_indices && a.dst_state_batch_indices.ndim() == 2 && packed;
  SelectiveStateUpdateParams p{};
  const auto table_of = [&](const OptionalTensor& t) {
    return index_table(t, a.state, batch, t && t.ndim() == 2 ? t.size(1) : 0);
  };
  p.slots = table_of(a.state_batch_indices);
  p.to_slots = table_of(a.dst_state_batch_indices);
  FI_CHECK(p.slots.data || slots == batch, ValueError,
           "state must have %lld slots, one for each row, if state_batch_indices is None; got %s",
           static_cast<long long>(batch), a.state.shape_str().c_str());
  if (a.num_accepted_tokens) {
    FI_CHECK(
        a.state_batch_indices && a.state_batch_indices.ndim() == 2 && each_token, ValueError,
        "num_accepted_tokens must come with cu_seqlens and with state_batch_indices and dst_state_batch_indices of "
        "shape [batch, tokens]");
    a.num_accepted_tokens.is({kI32, kI64}).on(a.state).contiguous().shape(batch);
  }
  if (a.intermediate_states_buffer) {
    Dim kept{"rows"}, steps{"steps"};
    a.intermediate_states_buffer.like(a.state).inner_contiguous().shape(kept, steps, heads, dim, dstate);
    FI_CHECK(
        (packed || steps >= tokens) && (a.intermediate_state_indices || kept >= batch), ValueError,
        "intermediate_states_buffer must have a row for each of %lld rows, or intermediate_state_indices, and %lld "
        "tokens; got %s",
        static_cast<long long>(batch), static_cast<long long>(tokens),
        a.intermediate_states_buffer.shape_str().c_str());
    p.intermediate = a.intermediate_states_buffer.data();
    strides_of(a.intermediate_states_buffer, p.intermediate_strides);
    p.intermediate_rows = index_table(a.intermediate_state_indices, a.state, batch, 0);
  }
  take_rounding(a, slots, heads, dim, p);
  if (batch == 0 || tokens == 0 || heads == 0 || dim == 0 || (packed && total == 0)) return;
  p.group = head_group(a.B, groups, heads);
  if (kernel.checks_contents(a.state.device())) {
    check_slots(kernel, a.state_batch_indices, slots, a.pad_slot_id);
    check_slots(kernel, a.dst_state_batch_indices, slots, a.pad_slot_id);
    if (packed) check_lengths(kernel, a, each_token, total);
    if (p.intermediate) check_slots(kernel, a.intermediate_state_indices, a.intermediate_states_buffer.size(0));
    if (a.num_accepted_tokens) {
      const Integers accepted(kernel, a.num_accepted_tokens);
      for (int64_t i = 0; i < batch; ++i)
        FI_CHECK(accepted[i] >= 1 && accepted[i] <= a.state_batch_indices.size(1), ValueError,
                 "num_accepted_tokens must be in 1 to %lld, the columns of state_batch_indices; got %lld at %lld",
                 static_cast<long long>(a.state_batch_indices.size(1)), static_cast<long long>(accepted[i]),
                 static_cast<long long>(i));
    }
  }

  // 2 shape
  const int token_axis = several ? 1 : 0;
  const auto strides_to = [&](const Tensor& t, int64_t (&strides)[3]) {
    strides[0] = packed ? 0 : t.stride(0);
    strides[1] = packed || several ? t.stride(token_axis) : 0;
    strides[2] = t.stride(token_axis + 1);
  };
  strides_to(a.x, p.x_strides);
  strides_to(a.out, p.out_strides);
  strides_to(a.dt, p.dt_strides);
  strides_to(a.B, p.b_strides);
  strides_to(a.C, p.c_strides);
  if (a.z) strides_to(a.z, p.z_strides);
  p.a_stride = a.A.stride(0);
  p.out = a.out.data();
  p.state = a.state.data();
  p.x = a.x.data();
  p.z = a.z ? a.z.data() : nullptr;
  p.b = a.B.data();
  p.c = a.C.data();
  p.dt = numbers_of(a.dt);
  p.a = a.A.data<float>();
  if (a.D) p.d = numbers_of(a.D), p.d_stride = a.D.stride(0), p.d_dim_stride = step_of(a.D, 1);
  if (a.dt_bias)
    p.dt_bias = numbers_of(a.dt_bias), p.dt_bias_stride = a.dt_bias.stride(0),
    p.dt_bias_dim_stride = step_of(a.dt_bias, 1);
  p.dt_dim_stride = step_of(a.dt, token_axis + 2);
  p.a_dim_stride = step_of(a.A, 1), p.a_column_stride = step_of(a.A, 2);
  if (packed) p.cu_seqlens = a.cu_seqlens.data(), p.cu_is_wide = a.cu_seqlens.dtype().bits == 64;
  if (a.num_accepted_tokens)
    p.accepted = a.num_accepted_tokens.data(), p.accepted_is_wide = a.num_accepted_tokens.dtype().bits == 64;
  strides_of(a.state, p.state_strides);
  p.pad_slot = a.pad_slot_id;
  p.batch = static_cast<int32_t>(batch);
  p.tokens = static_cast<int32_t>(tokens);
  p.dim = static_cast<int32_t>(dim);
  p.dstate = static_cast<int32_t>(dstate);
  p.heads = divisor(static_cast<uint32_t>(heads));
  p.softplus = a.dt_softplus;
  p.updates_state = !a.disable_state_update;
  p.each_token = each_token && p.updates_state;

  // 3 launch
#if FI_CUDA
  for (const Tensor& t : {Tensor(a.state), p.intermediate ? Tensor(a.intermediate_states_buffer) : Tensor(a.state)})
    FI_CHECK(t.row_alignment(16) == 16, ValueError,
             "%s must have rows that are 16-byte aligned; got address %p, shape %s", t.name(), t.data(),
             t.shape_str().c_str());
  const bool elements = p.scale || p.seed || p.d_dim_stride || p.dt_bias_dim_stride || p.dt_dim_stride ||
                        p.a_dim_stride || p.a_column_stride;
  p.vectors = a.B.row_alignment(16) == 16 && a.C.row_alignment(16) == 16;
  const int64_t states = batch * heads, sms = kernel.multiprocessors(a.state.device());
  const bool once =
      tokens == 1 && !packed && !p.intermediate && !p.each_token && p.vectors && p.state_strides[2] == dstate;
  const StateForm form = elements ? kElements : once ? kOneToken : kAnyTokens;
  const StateTile cta = tile<SelectiveStateUpdateConfig>(kernel, form, states, dim, sms);
  p.rows_per_cta = static_cast<int32_t>(cta.rows);
  p.tiles = divisor(static_cast<uint32_t>((dim + p.rows_per_cta - 1) / p.rows_per_cta));
  Launch launch{states * p.tiles.value};
  launch.threads = cta.threads;
  launch.pdl = kernel.pdl(a.enable_pdl);
  kernel.launch(*cta.entry, launch, a.state.device(), p);
#else
  (void)a.enable_pdl;
  run_cpu(p, a.x.dtype(), a.state.dtype());
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::selective_state_update, fi::request_of)
