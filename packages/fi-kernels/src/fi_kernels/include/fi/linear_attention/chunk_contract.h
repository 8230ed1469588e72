// What the host entries of the recurrences in chunks, gated delta rule and Mamba-2, check and do alike.
#pragma once
#include <tvm/ffi/extra/c_env_api.h>

#include "fi/linear_attention/chunk_gated_delta_rule.h"
#include "fi/linear_attention/contract.h"

#if !FI_CUDA
#include "fi/linear_attention/recurrence_cpu.h"
#endif

namespace fi {

// The states [rows, heads, state_rows, columns] of an argument; `rows` is bound by the first that is given.
inline ChunkStatesView states_of(const OptionalTensor& t, const Tensor& other, Dim& rows, Dim& heads, Dim& state_rows,
                                 Dim& columns) {
  if (!t) return {};
  t.is({kF32, kBF16, kF16}).on(other).inner_contiguous().shape(rows, heads, state_rows, columns);
  return {t.data(), numbers_of(t).type, {t.stride(0), t.stride(1), t.stride(2)}};
}

#if FI_CUDA
// Raises unless the rows of a tensor, if it is given, lie at multiples of so many bytes.
inline void check_rows(const Tensor& t, int64_t bytes) {
  FI_CHECK(!t || t.row_alignment(bytes) == bytes, ValueError,
           "%s must have rows that lie at multiples of %lld bytes; got address %p, shape %s: call .clone() on it, or "
           ".contiguous() if it is strided",
           t.name(), static_cast<long long>(bytes), t.data(), t.shape_str().c_str());
}

// Memory of torch's allocator for one call: after it, what follows on the stream may take the memory.
class CallMemory {
 public:
  CallMemory(const Tensor& other, int64_t bytes) {
    DLTensor prototype{nullptr, other.device(), 1, {kDLUInt, 8, 1}, &bytes, nullptr, 0};
    FI_CHECK(TVMFFIEnvTensorAlloc(&prototype, &object_) == 0, RuntimeError, "no %lld bytes of workspace",
             static_cast<long long>(bytes));
  }
  CallMemory(const CallMemory&) = delete;
  ~CallMemory() { TVMFFIObjectDecRef(object_); }
  char* data() const {
    const DLTensor& t = *content<DLTensor>(static_cast<TVMFFIObject*>(object_));
    return static_cast<char*>(t.data) + t.byte_offset;
  }

 private:
  TVMFFIObjectHandle object_ = nullptr;
};

// Describes rows [tokens, heads, size], with strides of token and head, as boxes of a chunk for TMA, which takes no
// strides of 0: whether it can.
inline bool describe_chunks(const Kernel& kernel, TensorMap& map, const Tensor& t, int64_t tokens,
                            const int64_t (&strides)[2]) {
  const int64_t bytes = t.dtype().bytes(), heads = t.size(-2), limit = int64_t{1} << 40;
  const int64_t token = tokens > 1 ? strides[0] * bytes : 128, head = heads > 1 ? strides[1] * bytes : 128;
  if (token <= 0 || head <= 0 || token >= limit || head >= limit) return false;
  const uint64_t sizes[] = {static_cast<uint64_t>(t.size(-1)), static_cast<uint64_t>(heads),
                            static_cast<uint64_t>(tokens)};
  const uint64_t steps[] = {static_cast<uint64_t>(head), static_cast<uint64_t>(token)};
  const uint32_t box[] = {64, 1, kChunkTokens};
  kernel.describe(map, t.dtype().bytes(), 3, t.data(), sizes, steps, box);
  return true;
}
#else
// The state of a head on the CPU, [rows, columns] contiguous floats.
struct ChunkState {
  float* state;
  int64_t head, rows, columns;

  void load(const ChunkStatesView& view, int64_t row) const { rows_of(view).load(at(view, row), state); }
  void store(const ChunkStatesView& view, int64_t row) const { rows_of(view).store(state, at(view, row)); }
  // Begins with a row of the view, or with zeros if that has none for it.
  void begin(const ChunkStatesView& view, int64_t row) const {
    if (view.data && row >= 0) return load(view, row);
    std::fill_n(state, rows * columns, 0.f);
  }

 private:
  static DType dtype_of(const ChunkStatesView& view) {
    return view.type == NumberType::kF32 ? kF32 : view.type == NumberType::kF16 ? kF16 : kBF16;
  }
  cpu::StateRows rows_of(const ChunkStatesView& view) const {
    return {dtype_of(view), rows, columns, view.strides[2], 1};
  }
  char* at(const ChunkStatesView& view, int64_t row) const {
    return static_cast<char*>(view.data) + (row * view.strides[0] + head * view.strides[1]) * dtype_of(view).bytes();
  }
};
#endif

}  // namespace fi
