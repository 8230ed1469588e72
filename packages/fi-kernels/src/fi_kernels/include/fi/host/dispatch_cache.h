// The dispatch cache of an op: finds the kernel of a call by the facts that the op reads of its arguments, and calls
// it.
//
// dispatch_cache(program...) -> callable. The program has three integers for each fact: the argument, a Fact, and its
// operand. The callable takes the arguments of a call and returns the number of the choice whose kernel has run; None:
// nothing is done, since no kernel is known for these facts or since the known one declines. With a kernel and the
// number of its choice before the arguments, it remembers both for calls with the same facts.
#pragma once
#include <tvm/ffi/c_api.h>

#include <array>
#include <atomic>
#include <vector>

#include "fi/host/error.h"

namespace fi {

class DispatchCache {
 public:
  // operand: of kValue, kGiven, kDType, kRank, kStrides and kShape none; of kSize and kStride an axis, which may be
  // negative; of kShapeFrom the first axis; of kAddress the bits.
  enum Fact : int64_t { kValue, kGiven, kDType, kRank, kSize, kShapeFrom, kStride, kStrides, kAddress };

  DispatchCache(const TVMFFIAny* words, int32_t count) : steps_(static_cast<size_t>(count) / 3) {
    FI_CHECK(count % 3 == 0, TypeError, "a program has three integers for each fact; got %d", count);
    for (Step& step : steps_) {
      step = {static_cast<int32_t>(words[0].v_int64), static_cast<Fact>(words[1].v_int64), words[2].v_int64};
      words += 3;
    }
  }
  DispatchCache(const DispatchCache&) = delete;
  DispatchCache& operator=(const DispatchCache&) = delete;
  ~DispatchCache() {
    for (Entry* entry : entries_) release(entry);
  }

  static int call(void* self, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
    auto& cache = *static_cast<DispatchCache*>(self);
    if (count > 2 && args[0].type_index == kTVMFFIFunction) return cache.remember(args, count), 0;
    Facts facts;
    if (!cache.read(facts, args, count)) return 0;
    int64_t choice = 0;
    TVMFFIObjectHandle kernel = cache.find(facts, choice);
    if (!kernel) return 0;
    const int failed = TVMFFIFunctionCall(kernel, const_cast<TVMFFIAny*>(args), count, result);
    TVMFFIObjectDecRef(kernel);
    if (failed) return failed;
    const bool done = result->type_index == kTVMFFINone;
    result->type_index = done ? kTVMFFIInt : kTVMFFINone;
    result->v_int64 = done ? choice : 0;
    return 0;
  }

 private:
  static constexpr size_t kMostWords = 64;
  static constexpr uint64_t kEntries = 1024;  // a new one takes the place of an older one with the same hash

  struct Step {
    int32_t argument;
    Fact fact;
    int64_t operand;
  };
  struct Facts {
    uint64_t hash = 0;
    size_t count = 0;
    std::array<int64_t, kMostWords> words;

    bool add(int64_t word) {
      if (count == kMostWords) return false;
      words[count++] = word;
      hash = (hash ^ static_cast<uint64_t>(word)) * 0x9e3779b97f4a7c15u;
      hash ^= hash >> 29;
      return true;
    }
  };
  struct Entry {
    uint64_t hash;
    std::vector<int64_t> words;
    TVMFFIObjectHandle kernel;
    int64_t choice;
  };

  // Guards the entries for the few instructions that look at one: other threads may call at the same time.
  class Lock {
   public:
    explicit Lock(std::atomic_flag& flag) : flag_(flag) {
      while (flag_.test_and_set(std::memory_order_acquire)) {
      }
    }
    ~Lock() { flag_.clear(std::memory_order_release); }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

   private:
    std::atomic_flag& flag_;
  };

  static void release(Entry* entry) {
    if (!entry) return;
    TVMFFIObjectDecRef(entry->kernel);
    delete entry;
  }

  static const DLTensor* tensor_of(const TVMFFIAny& any) {
    if (any.type_index == kTVMFFIDLTensorPtr) return static_cast<const DLTensor*>(any.v_ptr);
    if (any.type_index != kTVMFFITensor) return nullptr;
    return reinterpret_cast<const DLTensor*>(reinterpret_cast<const char*>(any.v_obj) + sizeof(TVMFFIObject));
  }

  static int64_t stride_of(const DLTensor* t, int64_t axis) {
    if (t->strides) return t->strides[axis];
    int64_t step = 1;
    for (int64_t i = t->ndim - 1; i > axis; --i) step *= t->shape[i];
    return step;
  }

  // Whether the facts of a call have room; the device is one of them.
  bool read(Facts& facts, const TVMFFIAny* args, int32_t count) const {
    const DLTensor* first = count > 0 ? tensor_of(args[0]) : nullptr;
    if (!first) return false;
    facts.add(int64_t{first->device.device_type} << 32 | first->device.device_id);
    for (const Step& step : steps_) {
      if (step.argument >= count) return false;
      const TVMFFIAny& any = args[step.argument];
      if (step.fact == kValue) {
        if (any.type_index > kTVMFFIFloat || !facts.add(any.type_index)) return false;
        if (!facts.add(any.type_index == kTVMFFINone ? 0 : any.v_int64)) return false;
        continue;
      }
      const DLTensor* t = tensor_of(any);
      if (!t && any.type_index != kTVMFFINone) return false;
      if (!t || step.fact == kGiven) {
        if (!facts.add(t ? 1 : -1)) return false;
      } else if (!add(facts, *t, step)) {
        return false;
      }
    }
    return true;
  }

  static bool add(Facts& facts, const DLTensor& t, const Step& step) {
    const int64_t rank = t.ndim, axis = step.operand < 0 ? step.operand + rank : step.operand;
    switch (step.fact) {
      case kDType:
        return facts.add(t.dtype.code << 24 | t.dtype.bits << 16 | t.dtype.lanes);
      case kRank:
        return facts.add(rank);
      case kAddress:
        return facts.add(static_cast<int64_t>(reinterpret_cast<uintptr_t>(t.data) + t.byte_offset) & step.operand);
      case kSize:
        return axis >= 0 && axis < rank && facts.add(t.shape[axis]);
      case kStride:
        return axis >= 0 && axis < rank && facts.add(stride_of(&t, axis));
      case kShapeFrom:
      case kStrides:
        if (!facts.add(rank)) return false;
        for (int64_t i = step.fact == kStrides || axis < 0 ? 0 : axis; i < rank; ++i)
          if (!facts.add(step.fact == kStrides ? stride_of(&t, i) : t.shape[i])) return false;
        return true;
      default:
        return false;
    }
  }

  // The kernel for these facts, which the caller releases, or null.
  TVMFFIObjectHandle find(const Facts& facts, int64_t& choice) {
    const Lock lock(busy_);
    const Entry* entry = entries_[facts.hash % kEntries];
    if (!entry || entry->hash != facts.hash || entry->words.size() != facts.count) return nullptr;
    for (size_t i = 0; i < facts.count; ++i)
      if (entry->words[i] != facts.words[i]) return nullptr;
    choice = entry->choice;
    TVMFFIObjectIncRef(entry->kernel);
    return entry->kernel;
  }

  void remember(const TVMFFIAny* args, int32_t count) {
    Facts facts;
    if (!read(facts, args + 2, count - 2)) return;
    TVMFFIObjectIncRef(args[0].v_obj);
    auto* entry =
        new Entry{facts.hash, {facts.words.data(), facts.words.data() + facts.count}, args[0].v_obj, args[1].v_int64};
    {
      const Lock lock(busy_);
      std::swap(entry, entries_[facts.hash % kEntries]);
    }
    release(entry);
  }

  std::vector<Step> steps_;
  std::array<Entry*, kEntries> entries_{};
  std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
};

}  // namespace fi
