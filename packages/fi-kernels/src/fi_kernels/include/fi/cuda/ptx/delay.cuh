// Random delays around synchronisation, in units compiled with -DFI_DELAYS=<mask of groups> alone (tools/delays.py).
#pragma once

#ifndef FI_DELAYS
#define FI_DELAYS 0
#endif

namespace fi {

// A build has one group: a site of each takes registers that wgmma kernels do not have.
enum DelayGroup : unsigned {
  kDelayArrivals = 1,   // before arrivals at mbarriers
  kDelayWaits = 2,      // before waits for mbarriers
  kDelayWaited = 4,     // behind them: a slow reader, whose stage a producer must not fill again
  kDelayCopies = 8,     // before bulk and tensor copies and stores to other CTAs
  kDelayBarriers = 16,  // on both sides of barriers of a CTA or cluster
  kDelayCounters = 32,  // before a counter or flag of the device is changed, and behind its loads
  kDelayPatience = 64,  // no delay: a wait for an mbarrier that does not end traps
};

// The warp, or those of its lanes that are there, sleep for 0 to 2 us, or not at all every other time. It orders
// nothing. Beside a wgmma in flight a branch would make ptxas serialise (C7512), so there is none.
template <DelayGroup kGroup>
__device__ __forceinline__ void delay() {
  if constexpr ((FI_DELAYS & kGroup) != 0) {
    unsigned drawn;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(drawn));
    drawn *= 2654435769u;  // 2^32 over the golden ratio: the upper bits depend on all lower ones
    asm volatile("nanosleep.u32 %0;" ::"r"((drawn >> 27 << 6) & -(drawn >> 26 & 1)));
  }
}

// The limit of one wait in the group `patience`: 4 to 9 s, as the upper word of the clock has one register.
class WaitLimit {
 public:
  __device__ __forceinline__ WaitLimit() {
    if constexpr (kOn) since_ = now();
  }
  // Within a wait's loop.
  __device__ __forceinline__ void check() const {
    if constexpr (kOn) {
      if (now() - since_ > 1) __trap();
    }
  }

 private:
  static constexpr bool kOn = (FI_DELAYS & kDelayPatience) != 0;
  __device__ __forceinline__ static unsigned now() {
    unsigned t;
    asm volatile("mov.u32 %0, %%globaltimer_hi;" : "=r"(t));
    return t;
  }
  unsigned since_;
};

}  // namespace fi
