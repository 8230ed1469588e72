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

// kBytes: what the launch asks for, kAlignment bytes more than the struct has.
template <class Shared, int kAlignment, int kBytes>
FI_DEVICE Shared& dynamic_shared() {
  extern __shared__ uint4 bytes[];
  static_assert(sizeof(Shared) + kAlignment <= kBytes, "the launch asks for as much shared memory as the kernel has");
  return *reinterpret_cast<Shared*>(reinterpret_cast<char*>(bytes) + shared_offset<kAlignment>(bytes));
}

}  // namespace fi
