// merge_states: any number of attention states become one.
#include "fi/attention/merge/merge_states.h"

#include "fi/generated/merge_states.h"

#if FI_CUDA
#include "fi/host/tile.h"
#else
#include "fi/cpu/merge_states.h"
#endif

namespace fi {
namespace {

#if FI_CUDA
constexpr int64_t kStreamedBytes = 200 << 20;  // of all states, up to which L2 gives them up first

// `lanes` threads work on a part of the states of a row; `groups` of them share a row.
struct Tile {
  const Entry& entry;
  RowTile rows;
  int64_t lanes, groups;
};

// Entries are in order of preference. Threads of a CTA depend on the number of states and d alone, as results do: 128
// for many rows, 256 for many states (docs/notes/elementwise-merge.md).
Tile tile(const Kernel& kernel, const MergeStatesParams& p, int64_t vector) {
  constexpr int64_t kManyStates = 128, kThreads = 128;
  const auto threads_of = [&](const Entry& entry) { return p.states < kManyStates ? kThreads : entry.threads; };
  const Entry& entry = kernel.first_entry([&](const Entry& candidate) {
    const auto [vec, at_once, few] = MergeStatesConfig::of(candidate);
    if (vec > vector || (few && at_once < p.states)) return false;
    const int64_t lanes = RowTile(p.d / vec, threads_of(candidate)).lanes;
    return !few || (lanes * vec == p.d && (lanes & (lanes - 1)) == 0 && p.rows < (1 << 30) / lanes);
  });
  const auto [vec, at_once, few] = MergeStatesConfig::of(entry);
  const int64_t threads = threads_of(entry), lanes = RowTile(p.d / vec, threads).lanes;
  int64_t groups = 1;
  while (!few && groups * 2 * lanes <= threads && groups * 2 * at_once <= p.states) groups *= 2;
  return {entry, RowTile(lanes * groups, threads), lanes, groups};
}

void launch(const Kernel& kernel, MergeStatesParams& p, int64_t vector, int64_t bytes, DLDevice device) {
  const auto [entry, rows, lanes, groups] = tile(kernel, p, vector);
  p.again = p.rows * p.states * p.d * bytes > kStreamedBytes;
  p.lanes = divisor(static_cast<uint32_t>(lanes));
  p.per_row = divisor(static_cast<uint32_t>(lanes * groups));
  p.groups = static_cast<int32_t>(groups);
  p.rows_per_cta = static_cast<int32_t>(rows.rows);
  Launch config{(p.rows + rows.rows - 1) / rows.rows};
  config.threads = rows.threads;
  config.pdl = kernel.pdl(-1);
  kernel.launch(entry, config, device, p);
}
#else
void run_cpu(const MergeStatesParams& p, DType dtype) {
  const cpu::LoadRow load = cpu::row_loader(dtype);
  const cpu::StoreRow store = cpu::row_storer(dtype);
  const int64_t heads = p.heads.value, bytes = dtype.bytes();
  cpu::for_rows(p.rows, int64_t{p.d} * (p.states + 1), 2 * int64_t{p.d}, [&](int64_t index, float* sum) {
    const int64_t n = index / heads, head = index % heads;
    const float* s = p.s + n * p.s_row + head * p.s_head;
    const char* v = static_cast<const char*>(p.v) + (n * p.v_row + head * p.v_head) * bytes;
    p.out_s[index] = cpu::merge_states(
        p.states, [&](int64_t i) { return s[i * p.s_state]; }, [&](int64_t i) { return v + i * p.v_state * bytes; },
        load, sum, sum + p.d, p.d);
    store(sum, static_cast<char*>(p.out) + index * p.d * bytes, p.d);
  });
}
#endif

MergeStatesRequest request_of(const MergeStatesArgs& a) { return {a.out.dtype()}; }

void merge_states(const Kernel& kernel, const MergeStatesArgs& a) {
  // 1 check
  Dim n{"n"}, states{"num_states"}, heads{"num_heads"}, d{"head_dim"};
  a.v.is({kF16, kBF16, kF32}).inner_contiguous().shape(n, states, heads, d);
  a.s.is({kF32}).on(a.v).shape(n, states, heads);
  a.out.like(a.v).contiguous().shape(n, heads, d);
  a.out_s.like(a.s).contiguous().shape(n, heads);
  FI_CHECK(d > 0 && d <= 0x7fffffff && states <= 0x7fffffff && n * heads <= 0x7fffffff, ValueError,
           "v must have 1 <= head_dim < 2^31, num_states < 2^31 and n * num_heads < 2^31; got %s",
           a.v.shape_str().c_str());

  // 2 shape
  MergeStatesParams p{};
  p.out = a.out.data();
  p.out_s = a.out_s.data<float>();
  p.v = a.v.data();
  p.s = a.s.data<const float>();
  p.v_row = a.v.stride(0);
  p.v_state = a.v.stride(1);
  p.v_head = a.v.stride(2);
  p.s_row = a.s.stride(0);
  p.s_state = a.s.stride(1);
  p.s_head = a.s.stride(2);
  p.rows = n * heads;
  p.states = static_cast<int32_t>(states);
  p.d = static_cast<int32_t>(d);
  if (p.rows == 0) return;
  p.heads = divisor(static_cast<uint32_t>(heads));

  // 3 launch
#if FI_CUDA
  launch(kernel, p, vec_size(d, {a.v, a.out}), a.v.dtype().bytes(), a.v.device());
#else
  (void)kernel;
  run_cpu(p, a.v.dtype());
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::merge_states, fi::request_of)
