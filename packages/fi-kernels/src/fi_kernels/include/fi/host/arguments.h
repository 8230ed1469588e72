// Reads the values of a call on the plain C ABI of tvm-ffi (no template headers: 0.3 s to compile), and what `bind`
// gets.
#pragma once
#include <tvm/ffi/c_api.h>

#include <array>
#include <string_view>
#include <type_traits>
#include <utility>

#include "fi/host/kernel.h"

namespace fi {

// What a value of a call is read as: a type, or one of the words below.
template <class T>
struct As {};
struct Number {};  // a double; a NaN would pass every later comparison
struct Written {};
struct OptionalWritten {};

// What lies behind the header of an object of tvm-ffi.
template <class T>
const T* content(const TVMFFIObject* object) {
  return reinterpret_cast<const T*>(reinterpret_cast<const char*>(object) + sizeof(TVMFFIObject));
}

inline const DLTensor* as_dltensor(const TVMFFIAny& any) {
  if (any.type_index == kTVMFFIDLTensorPtr) return static_cast<const DLTensor*>(any.v_ptr);
  return any.type_index == kTVMFFITensor ? content<DLTensor>(any.v_obj) : nullptr;
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
  OptionalTensor(const Tensor& t) : Tensor(t) {}
};

inline Tensor read(As<Tensor>, const TVMFFIAny& any, const char* name, const char* or_none = "") {
  const DLTensor* t = as_dltensor(any);
  FI_CHECK(t, TypeError, "%s must be a tensor%s", name, or_none);
  return as_tensor(t, name);
}
inline OptionalTensor read(As<OptionalTensor>, const TVMFFIAny& any, const char* name) {
  return any.type_index == kTVMFFINone ? Tensor(nullptr, name) : read(As<Tensor>(), any, name, " or None");
}
// No two elements of what an op writes share an address.
inline Tensor read(As<Written>, const TVMFFIAny& any, const char* name) {
  return read(As<Tensor>(), any, name).writable();
}
inline OptionalTensor read(As<OptionalWritten>, const TVMFFIAny& any, const char* name) {
  const OptionalTensor tensor = read(As<OptionalTensor>(), any, name);
  return tensor ? tensor.writable() : tensor;
}

inline bool is_integer(const TVMFFIAny& any) { return any.type_index == kTVMFFIInt || any.type_index == kTVMFFIBool; }
inline bool read(As<bool>, const TVMFFIAny& any, const char* name) {
  FI_CHECK(is_integer(any), TypeError, "%s must be a bool", name);
  return any.v_int64 != 0;
}
inline double read(As<double>, const TVMFFIAny& any, const char* name) {
  if (any.type_index == kTVMFFIFloat) return any.v_float64;
  FI_CHECK(is_integer(any), TypeError, "%s must be a number", name);
  return static_cast<double>(any.v_int64);
}
inline double read(As<Number>, const TVMFFIAny& any, const char* name) {
  const double x = read(As<double>(), any, name);
  FI_CHECK(x == x, ValueError, "%s must be a number; got NaN", name);
  return x;
}
// An integer or bool; None becomes -1, the default.
inline int64_t read(As<int64_t>, const TVMFFIAny& any, const char* name) {
  if (any.type_index == kTVMFFINone) return -1;
  FI_CHECK(is_integer(any), TypeError, "%s must be an integer", name);
  return any.v_int64;
}
inline const Kernel* read(As<const Kernel*>, const TVMFFIAny& any, const char* name) {
  FI_CHECK(any.type_index == kTVMFFIOpaquePtr, TypeError, "%s must be what bind returned", name);
  return static_cast<const Kernel*>(any.v_ptr);
}
inline TVMFFIAny read(As<TVMFFIAny>, const TVMFFIAny& any, const char*) { return any; }
// Text or bytes.
inline std::string_view read(As<std::string_view>, const TVMFFIAny& any, const char* name) {
  const int32_t type = any.type_index;
  if (type == kTVMFFIRawStr) return any.v_c_str;
  if (type == kTVMFFISmallStr || type == kTVMFFISmallBytes) return {any.v_bytes, any.small_str_len};
  const bool is_object = type == kTVMFFIStr || type == kTVMFFIBytes;
  FI_CHECK(is_object || type == kTVMFFIByteArrayPtr, TypeError, "%s must be a string or bytes", name);
  const auto* found = is_object ? content<TVMFFIByteArray>(any.v_obj) : static_cast<const TVMFFIByteArray*>(any.v_ptr);
  return {found->data, found->size};
}

// The values of a call.
struct Values {
  const TVMFFIAny* any;
  int32_t count;

  template <class Reader>
  auto get(int32_t i, const char* name) const {
    FI_CHECK(i < count, TypeError, "%s is missing", name);
    return read(As<Reader>(), any[i], name);
  }
  Values from(int32_t begin) const { return {any + begin, count - begin}; }
};

struct Raised {};  // thrown where tvm-ffi knows the error

// Calls `function(values, result)`: 0, or -1 where an error is raised. `label` begins the text of the error.
template <class F>
int guarded(const char* label, F&& function, const TVMFFIAny* any, int32_t count, TVMFFIAny* result) noexcept {
  try {
    function(Values{any, count}, result);
    return 0;
  } catch (const Raised&) {
  } catch (const std::exception& error) {
    const auto* own = dynamic_cast<const Error*>(&error);
    TVMFFIErrorSetRaisedFromCStr(own ? own->kind : "RuntimeError", (std::string(label) + ": " + error.what()).c_str());
  }
  return -1;
}

// A result: the type of a value, and the value or its address.
inline void set(TVMFFIAny* result, int32_t type, int64_t word) { *result = {type, {0}, {word}}; }

// Its kernel lives as long as the process: tables may lead to it.
inline void bind(const Values& v, TVMFFIAny* result) {
  set(result, kTVMFFIOpaquePtr, reinterpret_cast<int64_t>(new Kernel(v)));
}

// Hands an object to a function that calls and owns it, which becomes the result.
template <class T>
void to_function(T* object, TVMFFIAny* result) {
  const auto call = [](void* self, const TVMFFIAny* any, int32_t count, TVMFFIAny* returned) {
    T& callable = *static_cast<T*>(self);
    return guarded(callable.label(), callable, any, count, returned);
  };
  const auto release = [](void* self) { delete static_cast<T*>(self); };
  TVMFFIObjectHandle function = nullptr;
  FI_CHECK(TVMFFIFunctionCreate(object, call, release, &function) == 0, RuntimeError, "TVMFFIFunctionCreate failed");
  set(result, kTVMFFIFunction, reinterpret_cast<int64_t>(function));
}

// What bind gets: name and checks; with device code, image, capability, device, multiprocessors and shared_limit (of a
// rehearsal, which has no image); then the number of kernel entries, and for each its name, threads, shared bytes, n,
// and n integers of config.
inline Kernel::Kernel(const Values& v) : spec(v.get<std::string_view>(0, "name")), checks(v.get<bool>(1, "checks")) {
#if FI_CUDA
  int32_t at = 3;
  const auto next = [&] { return v.get<int64_t>(at++, "bind's integer"); };
  capability = next(), device = next();
  rehearsed_multiprocessors = next(), rehearsed_shared_limit = next();
  entries = std::vector<Entry>(static_cast<size_t>(next()));
  for (Entry& entry : entries) {
    entry.name = v.get<std::string_view>(at++, "entry");
    entry.threads = next(), entry.shared_bytes = next();
    entry.config.resize(static_cast<size_t>(next()));
    for (int64_t& value : entry.config) value = next();
  }
  if (v.any[2].type_index == kTVMFFINone) return;
  const std::string_view image = v.get<std::string_view>(2, "image");
  cu::DeviceGuard guard(static_cast<int>(device));
  const cu::Driver& driver = cu::Driver::get();
  driver.check(driver.LibraryLoadData(&library, image.data(), nullptr, nullptr, 0, nullptr, nullptr, 0),
               "cuLibraryLoadData");
  for (Entry& entry : entries) {
    driver.check(driver.LibraryGetKernel(&entry.kernel, library, entry.name.c_str()), entry.name.c_str());
    cu::Function function;  // loads it now: an image for another architecture is refused here, not at the first launch
    driver.check(driver.KernelGetFunction(&function, entry.kernel), "cuKernelGetFunction");
  }
#endif
}

}  // namespace fi

// A function of the module for tvm-ffi; `label` begins its errors.
#define FI_EXPORT(name, label, function)                                                                             \
  extern "C" __attribute__((visibility("default"))) int __tvm_ffi_##name(void*, const TVMFFIAny* any, int32_t count, \
                                                                         TVMFFIAny* result) {                        \
    return ::fi::guarded(label, function, any, count, result);                                                       \
  }
