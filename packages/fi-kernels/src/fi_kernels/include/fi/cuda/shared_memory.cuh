// The dynamic shared memory of a CTA as one struct, aligned as swizzled tiles need it.
#pragma once
#include "fi/cuda/ptx/pdl.cuh"

namespace fi {

// Bytes from the beginning of dynamic shared memory, which may lie anywhere, to the next multiple of kAlignment.
// NOTE: an offset. The compiler does not know that a pointer made of an integer points to shared memory.
template <unsigned kAlignment>
FI_DEVICE unsigned shared_offset(const void* begin) {
  return -static_cast<unsigned>(__cvta_generic_to_shared(begin)) % kAlignment;
}

// kBytes: of the launch, kAlignment bytes more than the struct has.
template <class Shared, int kAlignment, int kBytes>
FI_DEVICE Shared& dynamic_shared() {
  extern __shared__ uint4 bytes[];
  static_assert(sizeof(Shared) + kAlignment <= kBytes, "the launch requests this many bytes");
  return *reinterpret_cast<Shared*>(reinterpret_cast<char*>(bytes) + shared_offset<kAlignment>(bytes));
}

// Runs Kernel{params, shared, more...}, whose Shared is the dynamic shared memory.
// NOTE: offset and kernel in one function. By way of dynamic_shared, kernels that use all registers spill.
template <class Kernel, int kAlignment, int kBytes, class Params, class... More>
FI_DEVICE void run_in_shared(const Params& params, More... more) {
  using Shared = typename Kernel::Shared;
  extern __shared__ uint4 bytes[];
  static_assert(sizeof(Shared) + kAlignment <= kBytes, "the launch requests this many bytes");
  const unsigned offset = -static_cast<unsigned>(__cvta_generic_to_shared(bytes)) % kAlignment;
  Kernel{params, *reinterpret_cast<Shared*>(reinterpret_cast<char*>(bytes) + offset), more...}.run();
}

}  // namespace fi
