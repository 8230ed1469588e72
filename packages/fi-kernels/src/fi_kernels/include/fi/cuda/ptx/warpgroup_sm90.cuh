// setmaxnreg (PTX ISA 9.7.19.5): moves registers between the warpgroups of a CTA, in steps of 8.
#pragma once
#include "fi/cuda/ptx/pdl.cuh"

namespace fi {

template <int kRegisters>
FI_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
FI_DEVICE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace fi
