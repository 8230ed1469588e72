// What a spec is bound to: on CUDA the loaded entry points of its device binary with the config they were built for.
#pragma once
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "fi/host/error.h"
#include "fi/host/tensor.h"

#if FI_CUDA
#include <tvm/ffi/extra/c_env_api.h>

#include "fi/host/driver.h"
#include "fi/tensor_map.h"
#endif

namespace fi {

#if FI_CUDA
// One entry point. threads and shared_bytes are what the unit was compiled for; config holds the op's own constants,
// in the order the family's Python declares them.
struct Entry {
  cu::Kernel kernel = nullptr;
  std::string name;
  int64_t threads = 0, shared_bytes = 0;
  std::vector<int64_t> config;
  // The attributes that are set on each device: bytes of opt-in shared memory, and clusters of more than 8 CTAs.
  mutable cu::OfDevices<int64_t> shared_allowed, large_clusters;
};

struct Launch {
  int64_t grid_x, grid_y = 1, grid_z = 1;
  int64_t threads = 0;  // 0: what the entry was compiled for
  int64_t shared_bytes = -1;
  unsigned cluster = 1;  // along x
  bool pdl = false;      // programmatic dependent launch: may start while its predecessor in the stream drains
  // All CTAs run at the same time. Where fewer fit, as in a green context, the grid becomes smaller: for kernels that
  // take any grid.
  bool cooperative = false;
};

#endif

struct Values;

struct Kernel {
  explicit Kernel(const Values& bound);  // what `bind` gets

  std::string spec;
  bool checks = false;  // of contents, where nothing is rehearsed or captured

  // What a rehearsed call of this thread would launch, a line for each.
  static std::string& rehearsed() {
    thread_local std::string launches;
    return launches;
  }
#if FI_CUDA
  int64_t capability = 0;         // of the image: 90 for sm_90a
  cu::Library library = nullptr;  // null: a rehearsal, nothing runs
  int64_t device = 0;             // the GPU that it is bound to
  std::vector<Entry> entries;
  int64_t rehearsed_multiprocessors = 0, rehearsed_shared_limit = 0;  // of the device that a rehearsal is for

  // Whether it runs on tensors of a device: on every GPU of the compute capability that it is bound to.
  bool serves(DLDevice other) const {
    if (!library) return true;
    if (other.device_type != kDLCUDA) return false;
    const int own = static_cast<int>(device), id = other.device_id;
    return id == own || (cu::attribute<cu::kMajor>(id) == cu::attribute<cu::kMajor>(own) &&
                         cu::attribute<cu::kMinor>(id) == cu::attribute<cu::kMinor>(own));
  }

  static cu::Stream stream(DLDevice device) {
    return static_cast<cu::Stream>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  }
  bool checks_contents(DLDevice device) const {
    if (!checks || !library) return false;
    int status = 0;  // a stream that another one's capture forbids to use fails, and is not checked either
    return cu::Driver::get().StreamIsCapturing(stream(device), &status) == cu::kSuccess && status == 0;
  }

  // None means the target's default: on wherever the hardware has it.
  bool pdl(int64_t asked) const { return asked < 0 ? capability >= 90 : asked != 0 && capability >= 90; }

  int64_t multiprocessors(DLDevice device) const {
    return library ? cu::attribute<cu::kMultiprocessorCount>(device.device_id) : rehearsed_multiprocessors;
  }
  // The most dynamic shared memory of a CTA.
  int64_t shared_limit(DLDevice device) const {
    return library ? cu::attribute<cu::kSharedBytesOfBlock>(device.device_id) : rehearsed_shared_limit;
  }
  // Describes a tensor of 8- or 16-bit elements for bulk tensor copies; strides in bytes, those of dimensions 1
  // and up. swizzle: 128, 64 or 32 bytes.
  void describe(TensorMap& map, int64_t element_bytes, uint32_t rank, void* data, const uint64_t* sizes,
                const uint64_t* strides, const uint32_t* box, int64_t swizzle = 128) const {
    if (!library) return;
    const uint32_t steps[] = {1, 1, 1, 1, 1};
    const cu::Driver& driver = cu::Driver::get();
    const int mode = swizzle == 128 ? cu::kSwizzle128B : swizzle == 64 ? cu::kSwizzle64B : cu::kSwizzle32B;
    driver.check(driver.TensorMapEncodeTiled(&map, element_bytes == 1 ? cu::kTensorU8 : cu::kTensorU16, rank, data,
                                             sizes, strides, box, steps, 0, mode, cu::kPromoteL2To128B, 0),
                 "cuTensorMapEncodeTiled");
  }

  // The first entry that `takes` accepts: entries are in order of preference.
  template <class Takes>
  const Entry& first_entry(Takes takes) const {
    for (const Entry& entry : entries)
      if (takes(entry)) return entry;
    raise("RuntimeError", "no kernel entry of %s supports this call", spec.c_str());
  }

  // extras: what the entry takes as a second parameter, if it does.
  template <class Params>
  void launch(const Entry& entry, const Launch& launch, DLDevice device, const Params& params,
              const void* extras = nullptr) const {
    start(entry, launch, device, const_cast<Params*>(&params), const_cast<void*>(extras));
  }

  // Sets an attribute of an entry on a device, unless that value, or a greater one, is set.
  template <cu::FunctionAttribute kAttribute>
  static void allow(const Entry& entry, cu::OfDevices<int64_t>& allowed, int64_t value, int device) {
    std::atomic<int64_t>& known = allowed[device];
    if (known.load(std::memory_order_acquire) >= value) return;
    const cu::Driver& driver = cu::Driver::get();
    driver.check(driver.KernelSetAttribute(kAttribute, static_cast<int>(value), entry.kernel, device),
                 "cuKernelSetAttribute");
    known.store(value, std::memory_order_release);
  }

 private:
  [[gnu::noinline]] void start(const Entry& entry, Launch launch, DLDevice device, void* params, void* extras) const {
    if (launch.grid_x == 0 || launch.grid_y == 0 || launch.grid_z == 0) return;
    if (launch.threads == 0) launch.threads = entry.threads;
    if (launch.shared_bytes < 0) launch.shared_bytes = entry.shared_bytes;
    FI_CHECK(launch.grid_x <= 0x7fffffff && launch.grid_y <= 65535 && launch.grid_z <= 65535, ValueError,
             "too large for one launch: %s", describe(entry, launch).c_str());
    if (!library) {
      rehearsed() += describe(entry, launch) + "\n";
      return;
    }
    cu::DeviceGuard guard(device.device_id);
    const cu::Driver& driver = cu::Driver::get();
    // Up to 48 KB need no attribute. Static shared memory of an entry counts too and is at most 16 KB.
    if (launch.shared_bytes > 32 * 1024)
      allow<cu::kMaxDynamicSharedBytes>(entry, entry.shared_allowed, std::max<int64_t>(launch.shared_bytes, 64 * 1024),
                                        device.device_id);
    if (launch.cluster > 8) allow<cu::kNonPortableClusterSize>(entry, entry.large_clusters, 1, device.device_id);
    cu::LaunchAttribute attributes[3];
    unsigned count = 0;
    const auto attribute = [&](cu::LaunchAttributeId id) -> auto& {
      return attributes[count].id = id, attributes[count++].value;
    };
    if (launch.pdl) attribute(cu::kProgrammaticStreamSerialization).programmatic = 1;
    if (launch.cluster > 1) attribute(cu::kClusterDimension).cluster = {launch.cluster, 1, 1};
    if (launch.cooperative) attribute(cu::kCooperative).cooperative = 1;
    const auto word = [](int64_t value) { return static_cast<unsigned>(value); };
    const unsigned x = word(launch.grid_x), y = word(launch.grid_y), z = word(launch.grid_z);
    const unsigned threads = word(launch.threads), shared = word(launch.shared_bytes);
    cu::LaunchConfig config{x, y, z, threads, 1, 1, shared, stream(device), attributes, count};
    void* arguments[] = {params, extras};  // the driver reads as many as the entry has
    // A library kernel is a valid CUfunction in every context (CUDA driver API, "Library Management").
    const auto function = reinterpret_cast<cu::Function>(entry.kernel);
    cu::Result result = driver.LaunchKernelEx(&config, function, arguments, nullptr);
    while (result == cu::kCooperativeLaunchTooLarge && config.grid_x > 1) {
      config.grid_x /= 2;
      result = driver.LaunchKernelEx(&config, function, arguments, nullptr);
    }
    FI_CHECK(result == cu::kSuccess, RuntimeError, "launch failed: %s; spec %s, kernel %s",
             driver.describe(result).c_str(), spec.c_str(), describe(entry, launch).c_str());
  }

  // For errors and reports, which Python reads.
  [[gnu::noinline, gnu::cold]] static std::string describe(const Entry& entry, const Launch& launch) {
    char text[512];
    snprintf(text, sizeof text, "%s: grid %lld x %lld x %lld, %lld threads, %lld B shared, clusters of %u%s%s",
             entry.name.c_str(), static_cast<long long>(launch.grid_x), static_cast<long long>(launch.grid_y),
             static_cast<long long>(launch.grid_z), static_cast<long long>(launch.threads),
             static_cast<long long>(launch.shared_bytes), launch.cluster, launch.pdl ? ", pdl" : "",
             launch.cooperative ? ", cooperative" : "");
    return text;
  }
#else
  bool serves(DLDevice other) const { return other.device_type == kDLCPU; }
  bool checks_contents(DLDevice) const { return checks; }
#endif
};

}  // namespace fi
