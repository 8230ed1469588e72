// The CUDA driver API as far as launchers use it, found by dlopen: no toolkit to build, no driver to load a module.
// Layouts and enum values are those of the driver's public ABI (cuda.h); tests/kernels checks them against that header.
#pragma once
#include <dlfcn.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "fi/host/error.h"

namespace fi::cu {

using Result = int;
using Device = int;
using Context = struct ContextHandle*;
using Library = struct LibraryHandle*;
using Kernel = struct KernelHandle*;
using Function = struct FunctionHandle*;
using Stream = struct StreamHandle*;

using DevicePointer = unsigned long long;

enum : Result { kSuccess = 0, kInvalidValue = 1, kCooperativeLaunchTooLarge = 720 };
enum LaunchAttributeId : int { kCooperative = 2, kClusterDimension = 4, kProgrammaticStreamSerialization = 6 };
enum FunctionAttribute : int { kMaxDynamicSharedBytes = 8, kNonPortableClusterSize = 14 };
enum DeviceAttribute : int { kMultiprocessorCount = 16, kMajor = 75, kMinor = 76, kSharedBytesOfBlock = 97 };
enum PointerAttribute : int { kMemoryType = 2 };
enum TensorMapValue : int {
  kTensorU8 = 0,
  kTensorU16 = 1,
  kSwizzle32B = 1,
  kSwizzle64B = 2,
  kSwizzle128B = 3,
  kPromoteL2To128B = 2
};

union alignas(8) LaunchAttributeValue {
  char pad[64];
  struct {
    unsigned x, y, z;
  } cluster;
  int programmatic;
  int cooperative;
};
struct LaunchAttribute {
  LaunchAttributeId id;
  char pad[4];
  LaunchAttributeValue value;
};
struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};

struct Driver {
  Result (*Init)(unsigned);
  Result (*LibraryLoadData)(Library*, const void*, void*, void*, unsigned, void*, void*, unsigned);
  Result (*LibraryGetKernel)(Kernel*, Library, const char*);
  Result (*KernelGetFunction)(Function*, Kernel);
  Result (*KernelSetAttribute)(int, int, Kernel, Device);
  Result (*LaunchKernelEx)(const LaunchConfig*, Function, void**, void**);
  Result (*OccupancyMaxActiveClusters)(int*, Function, const LaunchConfig*);
  // map, element type, rank, address, sizes, strides, box, element strides, interleave, swizzle, promotion, fill
  Result (*TensorMapEncodeTiled)(void*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*,
                                 const uint32_t*, int, int, int, int);
  Result (*CtxGetCurrent)(Context*);
  Result (*CtxGetDevice)(Device*);
  Result (*CtxPushCurrent)(Context);
  Result (*CtxPopCurrent)(Context*);
  Result (*DevicePrimaryCtxRetain)(Context*, Device);
  Result (*DeviceGetAttribute)(int*, int, Device);
  Result (*PointerGetAttribute)(void*, int, DevicePointer);
  Result (*MemcpyDtoHAsync)(void*, DevicePointer, size_t, Stream);
  Result (*StreamSynchronize)(Stream);
  Result (*StreamIsCapturing)(Stream, int*);
  Result (*GetErrorName)(Result, const char**);
  Result (*GetErrorString)(Result, const char**);

  static const Driver& get() {
    static const Driver driver = open();
    return driver;
  }
  [[gnu::noinline, gnu::cold]] std::string describe(Result result) const {
    const char *name = "unknown error", *text = "";
    GetErrorName(result, &name);
    GetErrorString(result, &text);
    return std::string(name) + " (" + text + ")";
  }
  void check(Result result, const char* call) const {
    FI_CHECK(result == kSuccess, RuntimeError, "%s: %s", call, describe(result).c_str());
  }

 private:
  static Driver open() {
    void* handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    FI_CHECK(handle, RuntimeError, "libcuda.so.1 not found: install the NVIDIA driver, or use CPU tensors");
    Driver d{};
    const struct {
      void* slot;
      const char* symbol;
    } table[] = {
        {&d.Init, "cuInit"},
        {&d.LibraryLoadData, "cuLibraryLoadData"},
        {&d.LibraryGetKernel, "cuLibraryGetKernel"},
        {&d.KernelGetFunction, "cuKernelGetFunction"},
        {&d.KernelSetAttribute, "cuKernelSetAttribute"},
        {&d.LaunchKernelEx, "cuLaunchKernelEx"},
        {&d.OccupancyMaxActiveClusters, "cuOccupancyMaxActiveClusters"},
        {&d.TensorMapEncodeTiled, "cuTensorMapEncodeTiled"},
        {&d.CtxGetCurrent, "cuCtxGetCurrent"},
        {&d.CtxGetDevice, "cuCtxGetDevice"},
        {&d.CtxPushCurrent, "cuCtxPushCurrent_v2"},
        {&d.CtxPopCurrent, "cuCtxPopCurrent_v2"},
        {&d.DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain"},
        {&d.DeviceGetAttribute, "cuDeviceGetAttribute"},
        {&d.PointerGetAttribute, "cuPointerGetAttribute"},
        {&d.MemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2"},
        {&d.StreamSynchronize, "cuStreamSynchronize"},
        {&d.StreamIsCapturing, "cuStreamIsCapturing"},
        {&d.GetErrorName, "cuGetErrorName"},
        {&d.GetErrorString, "cuGetErrorString"},
    };
    for (auto [slot, symbol] : table) {
      void* address = dlsym(handle, symbol);
      FI_CHECK(address, RuntimeError, "libcuda.so.1 has no %s: the driver must be for CUDA 12.0 or later", symbol);
      memcpy(slot, &address, sizeof address);
    }
    d.check(d.Init(0), "cuInit");
    return d;
  }
};

// A value for each device of the process; 0: not set yet.
template <class T>
class OfDevices {
 public:
  std::atomic<T>& operator[](Device device) {
    FI_CHECK(device >= 0 && device < 64, ValueError, "CUDA device index must be in 0..63; got %d", device);
    return values_[device];
  }

 private:
  std::atomic<T> values_[64]{};
};

// An attribute of a device, asked for once.
template <DeviceAttribute kAttribute>
int attribute(Device device) {
  static OfDevices<int> values;
  std::atomic<int>& known = values[device];
  int value = known.load(std::memory_order_relaxed);
  if (value == 0) {
    Driver::get().check(Driver::get().DeviceGetAttribute(&value, kAttribute, device), "cuDeviceGetAttribute");
    known.store(value, std::memory_order_relaxed);
  }
  return value;
}

// Makes a device's primary context current for a scope; free when it is current already.
class DeviceGuard {
 public:
  explicit DeviceGuard(Device device) : driver_(Driver::get()) {
    // NOTE: cuCtxGetDevice fails in a thread without a context, and compute-sanitizer reports failed calls.
    Context context = nullptr;
    driver_.check(driver_.CtxGetCurrent(&context), "cuCtxGetCurrent");
    Device current = -1;
    if (context && driver_.CtxGetDevice(&current) == kSuccess && current == device) return;
    driver_.check(driver_.CtxPushCurrent(primary(device)), "cuCtxPushCurrent");
    pushed_ = true;
  }
  ~DeviceGuard() {
    Context context;
    if (pushed_) driver_.CtxPopCurrent(&context);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  Context primary(Device device) const {  // retained once and kept, as torch does for the life of the process
    static OfDevices<Context> contexts;
    std::atomic<Context>& known = contexts[device];
    Context context = known.load(std::memory_order_acquire);
    if (!context) {
      driver_.check(driver_.DevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
      known.store(context, std::memory_order_release);
    }
    return context;
  }

  const Driver& driver_;
  bool pushed_ = false;
};

}  // namespace fi::cu
