// Programmatic dependent launch (PTX ISA, griddepcontrol): no-ops before sm_90.
#pragma once
#include "fi/cuda/ptx/delay.cuh"

#define FI_DEVICE __device__ __forceinline__

namespace fi {

// Waits until the kernels this one depends on have finished and their writes are visible. Every kernel must execute it
// before its first global access, else a later kernel in the chain could overtake an earlier one.
FI_DEVICE void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel in the stream be scheduled while this one drains; a hint, it makes nothing visible.
FI_DEVICE void pdl_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  delay<kDelayCounters>();
#endif
}

}  // namespace fi
