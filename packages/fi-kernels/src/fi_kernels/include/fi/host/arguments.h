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

// kWritten: no two elements share an address, since the op writes them.
template <class T, bool kWritten>
struct TensorArgument {
  static T from(const TVMFFIAny& any, const char* name) {
    constexpr bool kOptional = std::is_same_v<T, OptionalTensor>;
    if (kOptional && any.type_index == kTVMFFINone) return {nullptr, name};
    const DLTensor* t = as_dltensor(any);
    FI_CHECK(t, TypeError, "%s must be a tensor%s", name, kOptional ? " or None" : "");
    const Tensor tensor = as_tensor(t, name);
    if (kWritten) tensor.writable();
    return {t, name};
  }
};
struct Written {};
struct OptionalWritten {};
template <>
struct Argument<Tensor> : TensorArgument<Tensor, false> {};
template <>
struct Argument<OptionalTensor> : TensorArgument<OptionalTensor, false> {};
template <>
struct Argument<Written> : TensorArgument<Tensor, true> {};
template <>
struct Argument<OptionalWritten> : TensorArgument<OptionalTensor, true> {};

inline bool is_integer(const TVMFFIAny& any) { return any.type_index == kTVMFFIInt || any.type_index == kTVMFFIBool; }
template <>
struct Argument<bool> {
  static bool from(const TVMFFIAny& any, const char* name) {
    FI_CHECK(is_integer(any), TypeError, "%s must be a bool", name);
    return any.v_int64 != 0;
  }
};
template <>
struct Argument<double> {
  static double from(const TVMFFIAny& any, const char* name) {
    if (any.type_index == kTVMFFIFloat) return any.v_float64;
    FI_CHECK(is_integer(any), TypeError, "%s must be a number", name);
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
// An integer or bool; None becomes -1, the default.
template <>
struct Argument<int64_t> {
  static int64_t from(const TVMFFIAny& any, const char* name) {
    if (any.type_index == kTVMFFINone) return -1;
    FI_CHECK(is_integer(any), TypeError, "%s must be an integer", name);
    return any.v_int64;
  }
};
template <>
struct Argument<const Kernel*> {
  static const Kernel* from(const TVMFFIAny& any, const char* name) {
    FI_CHECK(any.type_index == kTVMFFIOpaquePtr, TypeError, "%s must be what bind returned", name);
    return static_cast<const Kernel*>(any.v_ptr);
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
    FI_CHECK(count_ <= words_.size(), TypeError, "takes at most %zu additional arguments; got %zu", words_.size(),
             count_);
    for (size_t i = 0; i < count_; ++i) {
      if (const DLTensor* t = as_dltensor(args[i])) {
        words_[i] = reinterpret_cast<uint64_t>(as_tensor(t, "an additional argument").data());
        continue;
      }
      FI_CHECK(args[i].type_index <= kTVMFFIFloat, TypeError,
               "additional argument %zu must be a tensor, a number or None", i);
      words_[i] = args[i].type_index == kTVMFFINone ? 0 : args[i].v_uint64;
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

// What bind gets: name and checks; with device code, image, capability, device, multiprocessors and shared_limit (of a
// rehearsal, which has no image); then for each kernel entry its name, threads, shared bytes, n, and n integers of
// config.
inline Kernel::Kernel(const Values& v) : Kernel() {
  spec = v.get<std::string>(0, "name");
  checks = v.get<bool>(1, "checks");
#if FI_CUDA
  const auto integer = [&](int32_t i) { return v.get<int64_t>(i, "bind's integer"); };
  capability = integer(3), device = integer(4);
  rehearsal = {integer(5), integer(6)};
  size_t total = 0;
  for (int32_t i = 7; i < v.count; i += 4 + static_cast<int32_t>(integer(i + 3))) ++total;
  entries = std::vector<Entry>(total);
  int32_t i = 7;
  for (Entry& entry : entries) {
    entry.name = v.get<std::string>(i, "entry");
    entry.threads = integer(i + 1), entry.shared_bytes = integer(i + 2);
    entry.config.resize(static_cast<size_t>(integer(i + 3)));
    i += 4;
    for (int64_t& value : entry.config) value = integer(i++);
  }
  if (v.any[2].type_index == kTVMFFINone) return;
  const TVMFFIByteArray image = as_bytes(v.any[2], "image");
  cu::DeviceGuard guard(static_cast<int>(device));
  const cu::Driver& driver = cu::Driver::get();
  driver.check(driver.LibraryLoadData(&library, image.data, nullptr, nullptr, 0, nullptr, nullptr, 0),
               "cuLibraryLoadData");
  for (Entry& entry : entries) {
    driver.check(driver.LibraryGetKernel(&entry.kernel, library, entry.name.c_str()), entry.name.c_str());
    cu::Function
        function;  // forces the load now: an image for another architecture is refused here, not at the first launch
    driver.check(driver.KernelGetFunction(&function, entry.kernel), "cuKernelGetFunction");
  }
#endif
}

// Hands an object to a function that calls it, which becomes the result.
template <class T>
void to_function(T* object, TVMFFISafeCallType call, TVMFFIAny* result) {
  TVMFFIObjectHandle function = nullptr;
  if (TVMFFIFunctionCreate(object, call, [](void* self) { delete static_cast<T*>(self); }, &function)) {
    delete object;
    raise("RuntimeError", "TVMFFIFunctionCreate failed");
  }
  result->type_index = kTVMFFIFunction, result->zero_padding = 0;
  result->v_obj = static_cast<TVMFFIObject*>(function);
}

}  // namespace fi

// A function of the module for tvm-ffi; `label` begins its errors.
#define FI_EXPORT(name, label, function)                                                                             \
  extern "C" __attribute__((visibility("default"))) int __tvm_ffi_##name(void*, const TVMFFIAny* any, int32_t count, \
                                                                         TVMFFIAny* result) {                        \
    return ::fi::guarded(label, [&] { function(::fi::Values{any, count}, result); });                                \
  }
