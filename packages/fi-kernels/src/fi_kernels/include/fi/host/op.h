// FI_OP(entry): exports a host entry to Python on the plain tvm-ffi C ABI (no template headers: 0.3 s to compile).
//
// An op of the library has `void entry(const Kernel&, const <Op>Args&)` with the generated struct of its arguments; ops
// that take a user's variant have `const Extras&` as a third parameter. A user's module may spell its arguments out
// instead: FI_OP(entry, "out", "input") for `void entry(const Kernel&, Tensor out, Tensor input)`.
//
// An entry may return an int64_t instead of void: 0, or, if it declines the call and has done nothing, the value that
// it found for the field that the declaration of the op names as `found_by_entry`. A call with tensors of a device that
// its kernel does not serve is declined too, with kOtherDevice.
//
// A module exports learn_keys(...) -> bool; dispatch_cache(...) -> callable, see dispatch_cache.h; bind(op, spec,
// checks[, image, capability, device, entries...]) -> callable, which owns the kernel; and, with device code,
// rehearse(op, spec, capability, multiprocessors, shared_limit, entries...) -> callable, which shapes launches without
// making them, and last_launches() -> text.
#pragma once
#include <sys/mman.h>
#include <tvm/ffi/c_api.h>
#include <unistd.h>

#include <array>
#include <type_traits>
#include <utility>

#include "fi/host/dispatch_cache.h"
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

// The dispatch keys of a torch tensor are no part of DLPack. Its sizes and strides, of up to five dimensions, lie in
// the tensor itself, five words apart, and its keys at a fixed distance from them, which `learn_keys` finds when a
// kernel is bound.
struct TorchKeys {
  int64_t distance = 0;   // words of 8 bytes from the sizes; 0: unknown
  uint64_t altered = 0;   // keys of tensors whose values are not those in memory: negated and conjugate views
  uint64_t subclass = 0;  // that of subclasses such as fake tensors
};
inline TorchKeys torch_keys;

// The keys of a tensor of up to four dimensions; 0 for others: strides that follow on five sizes are not torch's alone.
inline uint64_t keys_of(const DLTensor* t, int64_t distance) {
  if (!distance || t->ndim >= 5 || t->strides != t->shape + 5) return 0;
  return static_cast<uint64_t>(t->shape[distance]);
}

// Arguments: a tensor, a negated view, the keys of both, those of altered tensors, those of subclasses. Returns whether
// calls see the keys of tensors from now on.
inline bool learn_keys(const TVMFFIAny* args, int32_t count) {
  constexpr int64_t kFirst = 10, kLast = 15;  // behind sizes and strides
  if (count != 6) return false;
  const DLTensor *plain = as_dltensor(args[0]), *negated = as_dltensor(args[1]);
  for (int64_t i = kFirst; plain && negated && i <= kLast; ++i) {
    if (keys_of(plain, i) != args[2].v_uint64 || keys_of(negated, i) != args[3].v_uint64) continue;
    torch_keys = {i, args[4].v_uint64, args[5].v_uint64};
    return true;
  }
  return false;
}

// Whether a tensor with elements has memory. The address of a fake tensor is its offset in bytes from 0, where programs
// and drivers place little: for subclasses, and for lower addresses than usual ones, the system or the driver is asked.
inline bool has_memory(const Tensor& tensor, uint64_t keys) {
  const auto address = reinterpret_cast<uintptr_t>(tensor.data());
  if (address >> 40 && !(keys & torch_keys.subclass)) return true;
  if (!address) return false;
#if FI_CUDA
  if (tensor.device().device_type == kDLCUDA) {
    unsigned kind;
    return cu::Driver::get().PointerGetAttribute(&kind, cu::kMemoryType, address) != cu::kInvalidValue;
  }
#endif
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  unsigned char resident = 0;
  return mincore(reinterpret_cast<void*>(address / page * page), 1, &resident) == 0;
}

// A null address is that of an empty tensor; a tensor with elements but no memory, such as a fake one, is refused, a
// view with other values than those in memory, and one whose elements lie across words.
inline Tensor as_tensor(const DLTensor* t, const char* name) {
  const Tensor tensor(t, name);
  const uint64_t keys = keys_of(t, torch_keys.distance);
  FI_CHECK(!(keys & torch_keys.altered), TypeError,
           "%s is a negated or conjugate view: call resolve_neg() or resolve_conj() on it", name);
  FI_CHECK(has_memory(tensor, keys) || tensor.numel() == 0, TypeError, "%s has no data: pass a tensor with memory",
           name);
  const uint64_t bits = t->dtype.bits;
  FI_CHECK((reinterpret_cast<uint64_t>(tensor.data()) * 8 & (bits - 1)) == 0 || bits < 8, ValueError,
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

// Argument I; Extras, only as the last, takes all from there on.
template <class T>
T argument(const TVMFFIAny* args, int32_t count, const char* const* names, size_t i) {
  if constexpr (std::is_same_v<T, Extras>)
    return {args + i, count - static_cast<int32_t>(i)};
  else
    return Argument<T>::from(args[i], names[i]);
}

template <class Result, class... A, size_t... I>
void apply(Result (*entry)(const Kernel&, A...), const Kernel& kernel, const TVMFFIAny* args, int32_t count,
           const char* const* names, std::index_sequence<I...>) {
  entry(kernel, argument<A>(args, count, names, I)...);
}

// Calls the entry; `result` receives what it returns, if that is not 0.
template <class Result, class... A>
void call(Result (*entry)(const Kernel&, A...), const Kernel& kernel, const TVMFFIAny* args, int32_t count,
          const char* const* names, size_t name_count, TVMFFIAny*) {
  constexpr bool open = (std::is_same_v<A, Extras> || ...);
  constexpr size_t named = sizeof...(A) - open;
  static_assert(named > 0);
  FI_CHECK((open ? count >= static_cast<int32_t>(named) : count == static_cast<int32_t>(named)) && name_count == named,
           TypeError, "expects %zu arguments (%zu named), got %d", named, name_count, count);
  apply(entry, kernel, args, count, names, std::index_sequence_for<A...>{});
}

// Python finds a kernel without reading the device, which costs 0.05 us, and binds another one if a call returns this.
constexpr int64_t kOtherDevice = -1;

inline void decline(TVMFFIAny* result, int64_t found) {
  result->type_index = kTVMFFIInt;
  result->zero_padding = 0;
  result->v_int64 = found;
}

// By its first argument, a tensor; the host entry checks that the others are on the same device.
inline bool is_elsewhere(const Kernel& kernel, const TVMFFIAny* args) {
  const DLTensor* first = as_dltensor(args[0]);
  return first && !kernel.serves(first->device);
}

template <class Args>
void call(void (*entry)(const Kernel&, const Args&), const Kernel& kernel, const TVMFFIAny* args, int32_t count,
          const char* const*, size_t, TVMFFIAny* result) {
  FI_CHECK(count == Args::kCount, TypeError, "expects %d arguments, got %d", Args::kCount, count);
  if (is_elsewhere(kernel, args)) return decline(result, kOtherDevice);
  entry(kernel, Args::from(args));
}

template <class Result, class Args>
void call(Result (*entry)(const Kernel&, const Args&, const Extras&), const Kernel& kernel, const TVMFFIAny* args,
          int32_t count, const char* const*, size_t, TVMFFIAny* result) {
  FI_CHECK(count >= Args::kCount, TypeError, "expects %d arguments or more, got %d", Args::kCount, count);
  if (is_elsewhere(kernel, args)) return decline(result, kOtherDevice);
  const Extras extras{args + Args::kCount, count - Args::kCount};
  if constexpr (std::is_void_v<Result>) {
    entry(kernel, Args::from(args), extras);
  } else if (const int64_t found = entry(kernel, Args::from(args), extras)) {
    decline(result, found);
  }
}

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

// Arguments of bind after op, spec and checks: image, capability, device, entries.
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

// Arguments of rehearse after op and spec: capability, multiprocessors, shared_limit, entries.
inline void load_rehearsal(Kernel& kernel, const TVMFFIAny* args, int32_t count) {
  FI_CHECK(count >= 3, TypeError, "rehearse needs capability, multiprocessors and shared_limit");
  kernel.capability = Argument<int64_t>::from(args[0], "capability");
  kernel.rehearsal.multiprocessors = Argument<int64_t>::from(args[1], "multiprocessors");
  kernel.rehearsal.shared_limit = Argument<int64_t>::from(args[2], "shared_limit");
  read_entries(kernel, args + 3, count - 3);
}
#else
// Arguments of bind after op and spec: checks.
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

  // Hands the object to a function that calls it, which becomes the result.
  void to_function(TVMFFISafeCallType call, TVMFFIAny* result) {
    TVMFFIObjectHandle function = nullptr;
    const int failed = TVMFFIFunctionCreate(object_, call, [](void* self) { delete static_cast<T*>(self); }, &function);
    FI_CHECK(!failed, RuntimeError, "TVMFFIFunctionCreate failed");
    object_ = nullptr;
    result->type_index = kTVMFFIFunction;
    result->zero_padding = 0;
    result->v_obj = static_cast<TVMFFIObject*>(function);
  }

 private:
  T* object_;
};

template <TVMFFISafeCallType Call, class Load>
int make(const TVMFFIAny* args, int32_t count, TVMFFIAny* result, Load load) {
  return guarded("bind", [&] {
    FI_CHECK(count >= 2, TypeError, "bind needs op and spec");
    Owned<Kernel> kernel(new Kernel());
    kernel->op = Argument<std::string>::from(args[0], "op");
    kernel->spec = Argument<std::string>::from(args[1], "spec");
    load(*kernel, args + 2, count - 2);
    kernel.to_function(Call, result);
  });
}

inline int make_dispatch_cache(const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
  return guarded("dispatch_cache", [&] {
    Owned<DispatchCache>(new DispatchCache(args, count)).to_function(DispatchCache::call, result);
  });
}

#if FI_CUDA
inline int last_launches(TVMFFIAny* result) {
  return guarded("last_launches", [&] {
    const std::string text = LaunchLog::of_thread().text();
    const TVMFFIByteArray bytes{text.data(), text.size()};
    FI_CHECK(TVMFFIStringFromByteArray(&bytes, result) == 0, RuntimeError, "TVMFFIStringFromByteArray failed");
  });
}
#endif

}  // namespace fi

#define FI_EXPORT extern "C" __attribute__((visibility("default")))
#define FI_EXPORT_DISPATCH                                                                                 \
  FI_EXPORT int __tvm_ffi_learn_keys(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {     \
    result->type_index = kTVMFFIBool;                                                                      \
    result->zero_padding = 0;                                                                              \
    result->v_int64 = ::fi::learn_keys(args, count);                                                       \
    return 0;                                                                                              \
  }                                                                                                        \
  FI_EXPORT int __tvm_ffi_dispatch_cache(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) { \
    return ::fi::make_dispatch_cache(args, count, result);                                                 \
  }
#if FI_CUDA
#define FI_BEGIN_CALL ::fi::LaunchLog::of_thread().clear()
#define FI_EXPORT_BIND                                                                               \
  FI_EXPORT int __tvm_ffi_bind(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {     \
    return ::fi::make<fi_call>(args, count, result, ::fi::load);                                     \
  }                                                                                                  \
  FI_EXPORT int __tvm_ffi_rehearse(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) { \
    return ::fi::make<fi_call>(args, count, result, ::fi::load_rehearsal);                           \
  }                                                                                                  \
  FI_EXPORT int __tvm_ffi_last_launches(void*, const TVMFFIAny*, int32_t, TVMFFIAny* result) {       \
    return ::fi::last_launches(result);                                                              \
  }
#else
#define FI_BEGIN_CALL (void)0
#define FI_EXPORT_BIND                                                                           \
  FI_EXPORT int __tvm_ffi_bind(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) { \
    return ::fi::make<fi_call>(args, count, result, ::fi::load);                                 \
  }
#endif
#define FI_OP(entry, ...)                                                                   \
  static int fi_call(void* self, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) { \
    static const char* const names[] = {"", ##__VA_ARGS__};                                 \
    auto& kernel = *static_cast<const ::fi::Kernel*>(self);                                 \
    return ::fi::guarded(kernel.op.c_str(), [&] {                                           \
      FI_BEGIN_CALL;                                                                        \
      ::fi::call(&entry, kernel, args, count, names + 1, std::size(names) - 1, result);     \
    });                                                                                     \
  }                                                                                         \
  FI_EXPORT_DISPATCH                                                                        \
  FI_EXPORT_BIND
