// Reads the values of a call on the plain C ABI of tvm-ffi (no template headers: 0.3 s to compile), and what `bind`
// gets.
#pragma once
#include <tvm/ffi/c_api.h>

#include <array>
#include <type_traits>
#include <utility>

#include "fi/host/kernel.h"

namespace fi {

// Turns one tvm-ffi argument into the type the host entry declares.
template <class T>
struct Argument;

inline const DLTensor* as_dltensor(const TVMFFIAny& any) {
  if (any.type_index == kTVMFFIDLTensorPtr) return static_cast<const DLTensor*>(any.v_ptr);
  if (any.type_index == kTVMFFITensor)
    return reinterpret_cast<const DLTensor*>(reinterpret_cast<const char*>(any.v_obj) + sizeof(TVMFFIObject));
  return nullptr;
}

// The address of a tensor with elements lies above all that Linux maps for programs; that of a fake tensor is its
// offset from 0. What DLPack does not tell besides (a negated or conjugate view) is found when Python chooses a kernel,
// and on every call with FI_CHECK=1. A tensor whose elements lie across words is refused.
inline Tensor as_tensor(const DLTensor* t, const char* name) {
  constexpr uintptr_t kLeastAddress = 1 << 16;
  const Tensor tensor(t, name);
  const auto address = reinterpret_cast<uintptr_t>(tensor.data());
  FI_CHECK(address >= kLeastAddress || tensor.numel() == 0, TypeError, "%s has no data: pass a tensor with memory",
           name);
  const uint64_t bits = t->dtype.bits;
  FI_CHECK((address * 8 & (bits - 1)) == 0 || bits < 8, ValueError,
           "%s must lie at a multiple of its element size, %llu bytes; got address %p: call .clone() on it", name,
           static_cast<unsigned long long>(bits / 8), tensor.data());
  return tensor;
}

struct OptionalTensor : Tensor {
  using Tensor::Tensor;
};

template <>
struct Argument<Tensor> {
  static Tensor from(const TVMFFIAny& any, const char* name) {
    const DLTensor* t = as_dltensor(any);
    FI_CHECK(t, TypeError, "%s must be a tensor", name);
    return as_tensor(t, name);
  }
};
template <>
struct Argument<OptionalTensor> {
  static OptionalTensor from(const TVMFFIAny& any, const char* name) {
    if (any.type_index == kTVMFFINone) return {nullptr, name};
    const DLTensor* t = as_dltensor(any);
    FI_CHECK(t, TypeError, "%s must be a tensor or None", name);
    as_tensor(t, name);
    return {t, name};
  }
};
template <>
struct Argument<bool> {
  static bool from(const TVMFFIAny& any, const char* name) {
    FI_CHECK(any.type_index == kTVMFFIBool || any.type_index == kTVMFFIInt, TypeError, "%s must be a bool", name);
    return any.v_int64 != 0;
  }
};
template <>
struct Argument<double> {
  static double from(const TVMFFIAny& any, const char* name) {
    if (any.type_index == kTVMFFIFloat) return any.v_float64;
    FI_CHECK(any.type_index == kTVMFFIInt || any.type_index == kTVMFFIBool, TypeError, "%s must be a number", name);
    return static_cast<double>(any.v_int64);
  }
};
// A number of an op: a NaN would pass every later comparison.
struct Number {};
template <>
struct Argument<Number> {
  static double from(const TVMFFIAny& any, const char* name) {
    const double x = Argument<double>::from(any, name);
    FI_CHECK(x == x, ValueError, "%s must be a number; got NaN", name);
    return x;
  }
};
// A tensor that the op writes: no two of its elements share an address.
struct Written {};
template <>
struct Argument<Written> {
  static Tensor from(const TVMFFIAny& any, const char* name) { return Argument<Tensor>::from(any, name).writable(); }
};
struct OptionalWritten {};
template <>
struct Argument<OptionalWritten> {
  static OptionalTensor from(const TVMFFIAny& any, const char* name) {
    const OptionalTensor t = Argument<OptionalTensor>::from(any, name);
    if (t) t.writable();
    return t;
  }
};
// An integer or bool; None becomes -1, the default.
template <>
struct Argument<int64_t> {
  static int64_t from(const TVMFFIAny& any, const char* name) {
    if (any.type_index == kTVMFFINone) return -1;
    FI_CHECK(any.type_index == kTVMFFIInt || any.type_index == kTVMFFIBool, TypeError, "%s must be an integer", name);
    return any.v_int64;
  }
};
template <>
struct Argument<std::string> {
  static std::string from(const TVMFFIAny& any, const char* name) {
    if (any.type_index == kTVMFFIRawStr) return any.v_c_str;
    if (any.type_index == kTVMFFISmallStr) return {any.v_bytes, any.small_str_len};
    FI_CHECK(any.type_index == kTVMFFIStr, TypeError, "%s must be a string", name);
    auto* bytes =
        reinterpret_cast<const TVMFFIByteArray*>(reinterpret_cast<const char*>(any.v_obj) + sizeof(TVMFFIObject));
    return {bytes->data, bytes->size};
  }
};

inline TVMFFIByteArray as_bytes(const TVMFFIAny& any, const char* name) {
  if (any.type_index == kTVMFFIByteArrayPtr) return *static_cast<const TVMFFIByteArray*>(any.v_ptr);
  FI_CHECK(any.type_index == kTVMFFIBytes, TypeError, "%s must be bytes", name);
  return *reinterpret_cast<const TVMFFIByteArray*>(reinterpret_cast<const char*>(any.v_obj) + sizeof(TVMFFIObject));
}

[[gnu::noinline, gnu::cold]] inline int set_raised(const char* label, const char* kind, const char* text) {
  TVMFFIErrorSetRaisedFromCStr(kind, (std::string(label) + ": " + text).c_str());
  return -1;
}

template <class F>
int guarded(const char* label, F&& body) noexcept {
  try {
    body();
    return 0;
  } catch (const Error& e) {
    return set_raised(label, e.kind, e.what());
  } catch (const std::exception& e) {
    return set_raised(label, "RuntimeError", e.what());
  }
}

// The arguments of a caller after the named ones, packed for device code of a user: 8 bytes each, of a tensor
// its address (None: 0). Whoever compiled that code has checked them.
class Extras {
 public:
  Extras(const TVMFFIAny* args, int32_t count) : count_(static_cast<size_t>(count)) {
    FI_CHECK(count <= static_cast<int32_t>(words_.size()), TypeError, "takes at most %zu additional arguments; got %d",
             words_.size(), count);
    for (int32_t i = 0; i < count; ++i) {
      if (args[i].type_index == kTVMFFINone) {
        words_[static_cast<size_t>(i)] = 0;
      } else if (const DLTensor* t = as_dltensor(args[i])) {
        words_[static_cast<size_t>(i)] = reinterpret_cast<uint64_t>(as_tensor(t, "an additional argument").data());
      } else {
        FI_CHECK(
            args[i].type_index == kTVMFFIFloat || args[i].type_index == kTVMFFIInt || args[i].type_index == kTVMFFIBool,
            TypeError, "additional argument %d must be a tensor, a number or None", i);
        words_[static_cast<size_t>(i)] = args[i].v_uint64;
      }
    }
  }
  size_t bytes() const { return count_ * sizeof(uint64_t); }
  const void* data() const { return words_.data(); }

 private:
  std::array<uint64_t, 64> words_;
  size_t count_;
};

// The values of a call.
struct Values {
  const TVMFFIAny* any;
  int32_t count;

  template <class Reader>
  auto get(int32_t i, const char* name) const {
    FI_CHECK(i < count, TypeError, "%s is missing", name);
    return Argument<Reader>::from(any[i], name);
  }
  Values from(int32_t begin) const { return {any + begin, count - begin}; }
};

#if FI_CUDA
// Kernel entries as bind and rehearse get them: for each its name, threads, shared bytes, n, and n integers of config.
inline void read_entries(Kernel& kernel, const TVMFFIAny* args, int32_t count) {
  int32_t i = 0, total = 0;
  for (int32_t j = 0; j < count; ++total) j += 4 + static_cast<int32_t>(Argument<int64_t>::from(args[j + 3], "config"));
  kernel.entries = std::vector<Entry>(static_cast<size_t>(total));
  for (Entry& entry : kernel.entries) {
    entry.name = Argument<std::string>::from(args[i], "entry");
    entry.threads = Argument<int64_t>::from(args[i + 1], "threads");
    entry.shared_bytes = Argument<int64_t>::from(args[i + 2], "shared_bytes");
    auto n = Argument<int64_t>::from(args[i + 3], "config");
    for (int64_t c = 0; c < n; ++c) entry.config.push_back(Argument<int64_t>::from(args[i + 4 + c], "config"));
    i += 4 + static_cast<int32_t>(n);
  }
}

// Arguments of bind after the spec: checks, image, capability, device, entries.
inline void load(Kernel& kernel, const TVMFFIAny* args, int32_t count) {
  FI_CHECK(count >= 4, TypeError, "bind needs checks, image, capability and device");
  kernel.checks = Argument<bool>::from(args[0], "checks");
  TVMFFIByteArray image = as_bytes(args[1], "image");
  kernel.capability = Argument<int64_t>::from(args[2], "capability");
  kernel.device = Argument<int64_t>::from(args[3], "device");
  cu::DeviceGuard guard(static_cast<int>(kernel.device));
  const cu::Driver& driver = cu::Driver::get();
  driver.check(driver.LibraryLoadData(&kernel.library, image.data, nullptr, nullptr, 0, nullptr, nullptr, 0),
               "cuLibraryLoadData");
  read_entries(kernel, args + 4, count - 4);
  for (Entry& entry : kernel.entries) {
    driver.check(driver.LibraryGetKernel(&entry.kernel, kernel.library, entry.name.c_str()), entry.name.c_str());
    cu::Function
        function;  // forces the load now: an image for another architecture is refused here, not at the first launch
    driver.check(driver.KernelGetFunction(&function, entry.kernel), "cuKernelGetFunction");
  }
}

// Arguments of rehearse after the spec: capability, multiprocessors, shared_limit, entries.
inline void load_rehearsal(Kernel& kernel, const TVMFFIAny* args, int32_t count) {
  FI_CHECK(count >= 3, TypeError, "rehearse needs capability, multiprocessors and shared_limit");
  kernel.capability = Argument<int64_t>::from(args[0], "capability");
  kernel.rehearsal.multiprocessors = Argument<int64_t>::from(args[1], "multiprocessors");
  kernel.rehearsal.shared_limit = Argument<int64_t>::from(args[2], "shared_limit");
  read_entries(kernel, args + 3, count - 3);
}
#else
// Arguments of bind after the spec: checks.
inline void load(Kernel& kernel, const TVMFFIAny* args, int32_t count) {
  FI_CHECK(count == 1, TypeError, "bind needs checks");
  kernel.checks = Argument<bool>::from(args[0], "checks");
}
#endif

// An object until a function of tvm-ffi owns it. <memory> would take 0.15 s of the 1.1 s that a launcher compiles.
template <class T>
class Owned {
 public:
  explicit Owned(T* object) : object_(object) {}
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() { delete object_; }

  T& operator*() const { return *object_; }
  T* operator->() const { return object_; }

  T* release() { return std::exchange(object_, nullptr); }
  // Hands the object to a function that calls it, which becomes the result.
  void to_function(TVMFFISafeCallType call, TVMFFIAny* result) {
    TVMFFIObjectHandle function = nullptr;
    const int failed = TVMFFIFunctionCreate(object_, call, [](void* self) { delete static_cast<T*>(self); }, &function);
    FI_CHECK(!failed, RuntimeError, "TVMFFIFunctionCreate failed");
    release();
    result->type_index = kTVMFFIFunction;
    result->zero_padding = 0;
    result->v_obj = static_cast<TVMFFIObject*>(function);
  }

 private:
  T* object_;
};

}  // namespace fi

// A function of the module for tvm-ffi; `label` begins its errors.
#define FI_EXPORT(name, label, function)                                                                             \
  extern "C" __attribute__((visibility("default"))) int __tvm_ffi_##name(void*, const TVMFFIAny* any, int32_t count, \
                                                                         TVMFFIAny* result) {                        \
    return ::fi::guarded(label, [&] { function(::fi::Values{any, count}, result); });                                \
  }
