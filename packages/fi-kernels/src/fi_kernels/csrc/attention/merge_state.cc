// merge_state and merge_state_in_place: two attention states become one.
#include "fi/attention/merge/merge_state.h"

#include "fi/generated/merge_state.h"

#if FI_CUDA
#include "fi/host/tile.h"
#else
#include "fi/cpu/merge_states.h"
#endif

namespace fi {
namespace {

#if FI_CUDA
constexpr int64_t kStreamedBytes = 200 << 20;  // of both states, up to which L2 gives them up first

// Whether rows of v lie one behind another, and s likewise.
bool is_dense(const MergeStateParams& p, const StateStrides& x) {
  const int64_t heads = p.heads.value;
  return x.v_head == p.d && x.v_row == heads * p.d && x.s_head == 1 && x.s_row == heads;
}

struct Tile {
  const Entry& entry;
  RowTile rows;
  bool whole;  // whether a warp holds whole rows, all of whose vectors 30 bits index
};

// Entries are in order of preference.
Tile tile(const Kernel& kernel, const MergeStateParams& p, int64_t vector) {
  const auto tile_of = [&](const Entry& entry) -> Tile {
    const int64_t vec = MergeStateConfig::of(entry).vector;
    const RowTile rows(p.d / vec, entry.threads);
    return {entry, rows,
            rows.lanes * vec == p.d && rows.lanes <= 32 && (rows.lanes & (rows.lanes - 1)) == 0 &&
                p.rows < (1 << 30) / rows.lanes};
  };
  const bool dense = is_dense(p, p.out_strides) && is_dense(p, p.a_strides) && is_dense(p, p.b_strides);
  return tile_of(kernel.first_entry([&](const Entry& entry) {
    const auto [vec, compact] = MergeStateConfig::of(entry);
    return vec <= vector && (!compact || (dense && !p.mask && tile_of(entry).whole));
  }));
}

void launch(const Kernel& kernel, MergeStateParams& p, int64_t vector, int64_t bytes, DLDevice device) {
  const auto [entry, rows, whole] = tile(kernel, p, vector);
  p.again = 2 * p.rows * p.d * bytes > kStreamedBytes;
  p.lanes = divisor(static_cast<uint32_t>(rows.lanes));
  p.rows_per_cta = static_cast<int32_t>(rows.rows);
  if (whole) p.vectors = static_cast<uint32_t>(p.rows * rows.lanes);
  Launch config{(p.rows + rows.rows - 1) / rows.rows};
  config.threads = rows.threads;
  config.pdl = kernel.pdl(-1);
  kernel.launch(entry, config, device, p);
}
#else
const char* values(const AttentionState& state, const StateStrides& of, int64_t n, int64_t head, int64_t bytes) {
  return static_cast<const char*>(state.v) + (n * of.v_row + head * of.v_head) * bytes;
}

float* lse(const AttentionState& state, const StateStrides& of, int64_t n, int64_t head) {
  return state.s + n * of.s_row + head * of.s_head;
}

void run_cpu(const MergeStateParams& p, DType dtype) {
  const cpu::LoadRow load = cpu::row_loader(dtype);
  const cpu::StoreRow store = cpu::row_storer(dtype);
  const AttentionState states[] = {p.a, p.b};
  const StateStrides strides[] = {p.a_strides, p.b_strides};
  const int64_t heads = p.heads.value;
  cpu::for_rows(p.rows, 2 * int64_t{p.d}, 2 * int64_t{p.d}, [&](int64_t index, float* sum) {
    const int64_t n = index / heads, head = index % heads;
    if (p.mask && !p.mask[n]) return;
    const float merged = cpu::merge_states(
        2, [&](int64_t i) { return *lse(states[i], strides[i], n, head); },
        [&](int64_t i) { return values(states[i], strides[i], n, head, dtype.bytes()); }, load, sum, sum + p.d, p.d);
    store(sum, const_cast<char*>(values(p.out, p.out_strides, n, head, dtype.bytes())), p.d);
    *lse(p.out, p.out_strides, n, head) = merged;
  });
}
#endif

StateStrides strides_of(Tensor v, Tensor s) { return {v.stride(0), v.stride(1), s.stride(0), s.stride(1)}; }

MergeStateRequest request_of(const MergeStateArgs& a) { return {a.v.dtype()}; }

void merge_state(const Kernel& kernel, const MergeStateArgs& a) {
  // 1 check
  const bool in_place = !a.v_a;
  FI_CHECK(in_place == !a.s_a, TypeError, "v_a and s_a must both be given, or neither");
  const Tensor first = in_place ? a.v : Tensor(a.v_a), first_lse = in_place ? a.s : Tensor(a.s_a);
  const Tensor second = in_place ? a.v_b.as("v_other") : a.v_b, second_lse = in_place ? a.s_b.as("s_other") : a.s_b;
  Dim n{"n"}, heads{"num_heads"}, d{"head_dim"};
  first.is({kF16, kBF16, kF32}).inner_contiguous().shape(n, heads, d);
  second.like(first).inner_contiguous().shape(n, heads, d);
  first_lse.is({kF32}).on(first).shape(n, heads);
  second_lse.is({kF32}).on(first).shape(n, heads);
  a.v.like(first).inner_contiguous().shape(n, heads, d);
  a.s.like(first_lse).shape(n, heads);
  if (a.mask) a.mask.is({kBool, kU8}).on(first).contiguous().shape(n);
  FI_CHECK(d > 0 && d <= 0x7fffffff && n * heads <= 0x7fffffff, ValueError,
           "%s must have 1 <= head_dim < 2^31 and n * num_heads < 2^31; got %s", first.name(),
           first.shape_str().c_str());

  // 2 shape
  MergeStateParams p{};
  p.a = {first.data(), first_lse.data<float>()};
  p.b = {second.data(), second_lse.data<float>()};
  p.out = {a.v.data(), a.s.data<float>()};
  p.a_strides = strides_of(first, first_lse);
  p.b_strides = strides_of(second, second_lse);
  p.out_strides = strides_of(a.v, a.s);
  p.mask = a.mask ? a.mask.data<const uint8_t>() : nullptr;
  p.rows = n * heads;
  p.d = static_cast<int32_t>(d);
  if (p.rows == 0) return;
  p.heads = divisor(static_cast<uint32_t>(heads));

  // 3 launch
#if FI_CUDA
  launch(kernel, p, vec_size(d, {a.v, first, second}), first.dtype().bytes(), first.device());
#else
  (void)kernel;
  run_cpu(p, first.dtype());
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::merge_state, fi::request_of)
