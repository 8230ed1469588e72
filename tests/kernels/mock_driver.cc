// A libcuda.so.1 for tests: it keeps the rules of the driver that launchers rely on, and writes down what they ask for.
// One JSON object a line goes to the file FI_MOCK_LOG. FI_MOCK_DEVICES (2) and FI_MOCK_CAPABILITY (90: of all, 90,89:
// of the first and of the others) describe the machine; FI_MOCK_STATUS is what cuInit returns, FI_MOCK_REFUSE names
// calls that fail, such as "cuLaunchKernelEx". Each 32-bit word of device memory reads as FI_MOCK_WORD (0),
// FI_MOCK_CAPTURE=1 says that the stream is being captured, and at most FI_MOCK_RESIDENT (132) CTAs of a cooperative
// launch run at the same time.
#include <dlpack/dlpack.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "fi/host/driver.h"

#define MOCK extern "C" __attribute__((visibility("default"))) int

namespace {

using fi::cu::Context;
using fi::cu::Device;
using fi::cu::Function;
using fi::cu::Kernel;
using fi::cu::LaunchConfig;
using fi::cu::Library;

enum : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidImage = 200,
  kInvalidContext = 201,
  kNoBinaryForGpu = 209,
  kNotFound = 500,
  kLaunchFailed = 719,
  kMismatch = 803,
};
const std::map<int, std::pair<const char*, const char*>> kErrors = {
    {kInvalidValue, {"CUDA_ERROR_INVALID_VALUE", "invalid argument"}},
    {kNoDevice, {"CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"}},
    {kInvalidDevice, {"CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"}},
    {kInvalidImage, {"CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"}},
    {kInvalidContext, {"CUDA_ERROR_INVALID_CONTEXT", "invalid device context"}},
    {kNoBinaryForGpu, {"CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"}},
    {kNotFound, {"CUDA_ERROR_NOT_FOUND", "named symbol not found"}},
    {kLaunchFailed, {"CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"}},
    {kMismatch,
     {"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "system has unsupported display driver / cuda driver combination"}},
};
constexpr int kMultiprocessors = 132;

struct Entry {
  std::string name;
  unsigned parameter_bytes = 0, max_threads = 1024, static_shared = 0, dynamic_shared = 48 * 1024;
  bool large_clusters = false;
};
struct Image {
  int capability;
  std::map<std::string, Entry> entries;
};

thread_local std::vector<Device> contexts;  // current last

long setting(const char* name, long otherwise) {
  const char* text = getenv(name);
  return text ? atol(text) : otherwise;
}
bool exists(Device device) { return device >= 0 && device < setting("FI_MOCK_DEVICES", 2); }
bool refuses(const char* call) {
  const char* calls = getenv("FI_MOCK_REFUSE");
  return calls && strstr(calls, call);
}
int device() { return contexts.empty() ? -1 : contexts.back(); }
int capability(Device of = device()) {
  const char* text = getenv("FI_MOCK_CAPABILITY");
  const char* others = text && of > 0 ? strchr(text, ',') : nullptr;
  return text ? atoi(others ? others + 1 : text) : 90;
}

// Opt-in shared memory of one block, in bytes.
unsigned shared_limit(Device of = device()) {
  switch (capability(of)) {
    case 80:
      return 163 * 1024;
    case 90:
    case 100:
      return 227 * 1024;
    default:
      return 99 * 1024;
  }
}

[[gnu::format(printf, 1, 2)]] void record(const char* pattern, ...) {
  static FILE* log = getenv("FI_MOCK_LOG") ? fopen(getenv("FI_MOCK_LOG"), "w") : nullptr;
  if (!log) return;
  va_list list;
  va_start(list, pattern);
  vfprintf(log, pattern, list);
  va_end(list);
  fputc('\n', log);
  fflush(log);
}

template <class T>
T read(const char* at) {
  T value;
  memcpy(&value, at, sizeof value);
  return value;
}

// Section headers of a 64-bit ELF file.
struct Section {
  std::string name;
  uint32_t type, link, info;
  uint64_t offset, size;
};
std::vector<Section> sections(const char* elf) {
  const auto table = read<uint64_t>(elf + 40);
  const auto count = read<uint16_t>(elf + 60), names = read<uint16_t>(elf + 62);
  std::vector<Section> found(count);
  const auto strings = read<uint64_t>(elf + table + names * 64 + 24);
  for (unsigned i = 0; i < count; ++i) {
    const char* at = elf + table + i * 64;
    found[i] = {elf + strings + read<uint32_t>(at),
                read<uint32_t>(at + 4),
                read<uint32_t>(at + 40),
                read<uint32_t>(at + 44),
                read<uint64_t>(at + 24),
                read<uint64_t>(at + 32)};
  }
  return found;
}

// What .nv.info.<kernel> says: attributes {format, id, value}; format 4 has a size of its own.
void read_attributes(const char* at, uint64_t size, Entry& entry) {
  enum : uint8_t { kMaxThreads = 0x05, kParameter = 0x17 };
  for (const char* end = at + size; at < end;) {
    const auto format = read<uint8_t>(at), id = read<uint8_t>(at + 1);
    if (id == kParameter) entry.parameter_bytes = read<uint32_t>(at + 12) >> 18;  // each kernel has one
    if (id == kMaxThreads) entry.max_threads = read<uint32_t>(at + 4);
    at += format == 4 ? 4 + read<uint16_t>(at + 2) : 4;
  }
}

// The kernels of a device binary: global functions of its symbol table.
Image* open_image(const char* elf) {
  if (memcmp(elf, "\177ELF\2", 5) != 0 || read<uint16_t>(elf + 18) != 190) return nullptr;  // 190: EM_CUDA
  auto image = new Image{read<uint8_t>(elf + 49), {}};  // second byte of e_flags, as ELF files of CUDA 13 have it
  const auto all = sections(elf);
  for (const Section& symbols : all) {
    if (symbols.name != ".symtab") continue;
    for (uint64_t at = symbols.offset; at < symbols.offset + symbols.size; at += 24) {
      const auto info = read<uint8_t>(elf + at + 4);
      if (info != (1 << 4 | 2) || read<uint16_t>(elf + at + 6) == 0) continue;  // STB_GLOBAL, STT_FUNC, defined
      const char* name = elf + all[symbols.link].offset + read<uint32_t>(elf + at);
      Entry& entry = image->entries[name];
      entry.name = name;
      for (const Section& s : all) {
        if (s.name == ".nv.info." + entry.name) read_attributes(elf + s.offset, s.size, entry);
        // From sm_90 on the section begins with the 1 KB that the system keeps and no limit counts.
        const uint64_t kept = image->capability >= 90 ? 1024 : 0;
        if (s.name == ".nv.shared." + entry.name && s.size > kept)
          entry.static_shared = static_cast<unsigned>(s.size - kept);
      }
    }
  }
  return image;
}

// The rules a launch must keep, as the driver's documentation of cuLaunchKernelEx states them.
bool legal(const LaunchConfig& c, const Entry& entry, const unsigned (&cluster)[3], bool pdl) {
  const uint64_t threads = uint64_t{c.block_x} * c.block_y * c.block_z;
  const unsigned blocks = cluster[0] * cluster[1] * cluster[2];
  return c.grid_x && c.grid_x <= 0x7fffffff && c.grid_y && c.grid_y <= 65535 && c.grid_z && c.grid_z <= 65535 &&
         threads && threads <= entry.max_threads && c.block_z <= 64 &&
         c.shared_bytes + entry.static_shared <= (entry.dynamic_shared > 48 * 1024 ? shared_limit() : 48 * 1024u) &&
         c.shared_bytes <= entry.dynamic_shared && c.grid_x % cluster[0] == 0 && c.grid_y % cluster[1] == 0 &&
         c.grid_z % cluster[2] == 0 && blocks <= (entry.large_clusters ? 16u : 8u) &&
         (capability() >= 90 || (blocks == 1 && !pdl));
}

std::string hex(const void* bytes, unsigned count) {
  std::string text;
  char digits[3];
  for (unsigned i = 0; i < count; ++i) {
    snprintf(digits, sizeof digits, "%02x", static_cast<const unsigned char*>(bytes)[i]);
    text += digits;
  }
  return text;
}

}  // namespace

MOCK cuInit(unsigned) { return exists(0) ? static_cast<int>(setting("FI_MOCK_STATUS", kSuccess)) : kNoDevice; }
MOCK cuDriverGetVersion(int* version) { return *version = 13000, kSuccess; }
MOCK cuGetExportTable(const void**, const void*) { return kNotFound; }  // NVRTC asks, and crashes where it is absent
MOCK cuDeviceGetCount(int* count) { return *count = static_cast<int>(setting("FI_MOCK_DEVICES", 2)), kSuccess; }
MOCK cuDeviceGet(Device* found, int index) { return *found = index, exists(index) ? kSuccess : kInvalidDevice; }
MOCK cuDeviceGetName(char* name, int size, Device) { return snprintf(name, size, "Mock GPU"), kSuccess; }

MOCK cuDeviceGetAttribute(int* value, int attribute, Device of) {
  if (!exists(of)) return kInvalidDevice;
  switch (attribute) {
    case fi::cu::kMultiprocessorCount:
      return *value = kMultiprocessors, kSuccess;
    case fi::cu::kMajor:
      return *value = capability(of) / 10, kSuccess;
    case fi::cu::kMinor:
      return *value = capability(of) % 10, kSuccess;
    case fi::cu::kSharedBytesOfBlock:
      return *value = static_cast<int>(shared_limit(of)), kSuccess;
    case 13:  // kHz of the SMs
      return *value = 1980000, kSuccess;
    case 36:  // kHz of the memory
      return *value = static_cast<int>(setting("FI_MOCK_MEMORY_KHZ", 3201000)), kSuccess;
    case 37:  // bits of its bus
      return *value = 6144, kSuccess;
    case 38:  // bytes of L2
      return *value = static_cast<int>(setting("FI_MOCK_L2_MB", 60)) << 20, kSuccess;
    default:
      return kInvalidValue;
  }
}

// Nothing lies below 64 GiB.
MOCK cuPointerGetAttribute(void* value, int attribute, fi::cu::DevicePointer at) {
  if (attribute != fi::cu::kMemoryType || at >> 36 == 0) return kInvalidValue;
  return *static_cast<unsigned*>(value) = 2, kSuccess;  // of a device
}

MOCK cuDevicePrimaryCtxRetain(Context* context, Device of) {
  if (!exists(of)) return kInvalidDevice;
  return *context = reinterpret_cast<Context>(static_cast<uintptr_t>(0x1000 + of)), kSuccess;
}
MOCK cuCtxPushCurrent_v2(Context context) {
  return contexts.push_back(static_cast<Device>(reinterpret_cast<uintptr_t>(context) - 0x1000)), kSuccess;
}
MOCK cuCtxPopCurrent_v2(Context*) {
  if (contexts.empty()) return kInvalidContext;
  return contexts.pop_back(), kSuccess;
}
MOCK cuCtxGetCurrent(Context* context) {
  const auto address = static_cast<uintptr_t>(0x1000 + device());
  return *context = contexts.empty() ? nullptr : reinterpret_cast<Context>(address), kSuccess;
}
MOCK cuCtxGetDevice(Device* current) {
  if (contexts.empty()) {
    record(R"({"call": "failed", "name": "cuCtxGetDevice"})");
    return kInvalidContext;
  }
  return *current = device(), kSuccess;
}

MOCK cuLibraryLoadData(Library* library, const void* code, void*, void*, unsigned, void*, void*, unsigned) {
  Image* image = refuses("cuLibraryLoadData") ? nullptr : open_image(static_cast<const char*>(code));
  if (!image) return kInvalidImage;
  record(R"({"call": "load", "capability": %d, "entries": %zu, "device": %d})", image->capability,
         image->entries.size(), device());
  return *library = reinterpret_cast<Library>(image), kSuccess;
}
MOCK cuLibraryUnload(Library library) {
  record(R"({"call": "unload"})");
  return delete reinterpret_cast<Image*>(library), kSuccess;
}
MOCK cuLibraryGetKernel(Kernel* kernel, Library library, const char* name) {
  auto image = reinterpret_cast<Image*>(library);
  auto found = image->entries.find(name);
  if (found == image->entries.end() || refuses("cuLibraryGetKernel")) return kNotFound;
  record(R"({"call": "kernel", "name": "%s", "parameter_bytes": %u, "max_threads": %u})", name,
         found->second.parameter_bytes, found->second.max_threads);
  // The driver keeps code for an architecture unread until it is needed, so this is where it is refused.
  const int has = image->capability, runs_on = capability();
  if (has / 10 != runs_on / 10 || has > runs_on) return *kernel = nullptr, kSuccess;
  return *kernel = reinterpret_cast<Kernel>(&found->second), kSuccess;
}
MOCK cuKernelGetFunction(Function* function, Kernel kernel) {
  if (!kernel || refuses("cuKernelGetFunction")) return kNoBinaryForGpu;
  if (contexts.empty()) return kInvalidContext;
  return *function = reinterpret_cast<Function>(kernel), kSuccess;
}
MOCK cuKernelSetAttribute(int attribute, int value, Kernel kernel, Device of) {
  auto entry = reinterpret_cast<Entry*>(kernel);
  if (!exists(of)) return kInvalidDevice;
  record(R"({"call": "attribute", "name": "%s", "id": %d, "value": %d, "device": %d})", entry->name.c_str(), attribute,
         value, of);
  if (attribute == fi::cu::kNonPortableClusterSize) return entry->large_clusters = value != 0, kSuccess;
  const unsigned bytes = static_cast<unsigned>(value);
  if (attribute != fi::cu::kMaxDynamicSharedBytes || bytes + entry->static_shared > shared_limit(of))
    return kInvalidValue;
  return entry->dynamic_shared = bytes, kSuccess;
}

// Of CTAs that take an SM each, in groups of 16 SMs.
MOCK cuOccupancyMaxActiveClusters(int* clusters, Function, const LaunchConfig* c) {
  const int ctas = static_cast<int>(c->attributes[0].value.cluster.x);
  return *clusters = kMultiprocessors / 16 * (16 / ctas), kSuccess;
}

MOCK cuLaunchKernelEx(const LaunchConfig* c, Function function, void** parameters, void** extra) {
  const auto& entry = *reinterpret_cast<Entry*>(function);
  unsigned cluster[3] = {1, 1, 1};
  bool pdl = false, cooperative = false;
  for (unsigned i = 0; i < c->attribute_count; ++i) {
    const fi::cu::LaunchAttribute& attribute = c->attributes[i];
    if (attribute.id == fi::cu::kClusterDimension) {
      cluster[0] = attribute.value.cluster.x, cluster[1] = attribute.value.cluster.y,
      cluster[2] = attribute.value.cluster.z;
    } else if (attribute.id == fi::cu::kProgrammaticStreamSerialization) {
      pdl = attribute.value.programmatic != 0;
    } else if (attribute.id == fi::cu::kCooperative) {
      cooperative = attribute.value.cooperative != 0;
    } else {
      return kInvalidValue;
    }
  }
  record(R"({"call": "launch", "name": "%s", "grid": [%u, %u, %u], "block": [%u, %u, %u], "shared_bytes": %u, )"
         R"("cluster": [%u, %u, %u], "pdl": %s, "cooperative": %s, "stream": %llu, "device": %d, "parameters": "%s"})",
         entry.name.c_str(), c->grid_x, c->grid_y, c->grid_z, c->block_x, c->block_y, c->block_z, c->shared_bytes,
         cluster[0], cluster[1], cluster[2], pdl ? "true" : "false", cooperative ? "true" : "false",
         static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(c->stream)), device(),
         hex(parameters[0], entry.parameter_bytes).c_str());
  if (contexts.empty()) return kInvalidContext;
  if (cooperative && c->grid_x > setting("FI_MOCK_RESIDENT", kMultiprocessors))
    return fi::cu::kCooperativeLaunchTooLarge;
  if (extra || !cluster[0] || !cluster[1] || !cluster[2] || !legal(*c, entry, cluster, pdl)) return kInvalidValue;
  return refuses("cuLaunchKernelEx") ? kLaunchFailed : kSuccess;
}

// The rules of tiled maps, as the driver's documentation of cuTensorMapEncodeTiled states them. The map itself holds
// the address and what was asked for, so that a launch shows it.
MOCK cuTensorMapEncodeTiled(void* map, int type, uint32_t rank, void* address, const uint64_t* sizes,
                            const uint64_t* strides, const uint32_t* box, const uint32_t* steps, int interleave,
                            int swizzle, int promotion, int fill) {
  const uint64_t bytes = type == fi::cu::kTensorU8 ? 1 : 2;
  std::string text;
  bool legal = rank >= 1 && rank <= 5 && reinterpret_cast<uintptr_t>(address) % 16 == 0 && type <= 1 && !interleave &&
               !fill && reinterpret_cast<uintptr_t>(map) % 64 == 0 && box[0] * bytes % 16 == 0 &&
               (swizzle != fi::cu::kSwizzle128B || box[0] * bytes <= 128) && promotion <= 3;
  for (uint32_t i = 0; i < rank; ++i) {
    legal = legal && sizes[i] >= 1 && sizes[i] <= uint64_t{1} << 32 && box[i] >= 1 && box[i] <= 256 && steps[i] == 1;
    if (i) legal = legal && strides[i - 1] % 16 == 0 && strides[i - 1] < uint64_t{1} << 40;
    text += (i ? ", " : "") + std::string("[") + std::to_string(sizes[i]) + ", " +
            std::to_string(i ? strides[i - 1] : bytes) + ", " + std::to_string(box[i]) + "]";
  }
  record(R"({"call": "tensor_map", "address": %llu, "dimensions": [%s]})",
         static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(address)), text.c_str());
  if (!legal || refuses("cuTensorMapEncodeTiled")) return kInvalidValue;
  return memcpy(map, &address, sizeof address), kSuccess;
}

MOCK cuMemcpyDtoHAsync_v2(void* to, fi::cu::DevicePointer from, size_t bytes, fi::cu::Stream) {
  record(R"({"call": "copy_to_host", "address": %llu, "bytes": %zu, "device": %d})", from, bytes, device());
  if (contexts.empty()) return kInvalidContext;
  const auto word = static_cast<int32_t>(setting("FI_MOCK_WORD", 0));
  for (size_t i = 0; i + sizeof word <= bytes; i += sizeof word) memcpy(static_cast<char*>(to) + i, &word, sizeof word);
  return kSuccess;
}
MOCK cuStreamSynchronize(fi::cu::Stream) {
  record(R"({"call": "synchronize"})");
  return kSuccess;
}
MOCK cuStreamIsCapturing(fi::cu::Stream, int* status) {
  return *status = static_cast<int>(setting("FI_MOCK_CAPTURE", 0)), kSuccess;
}

MOCK cuGetErrorName(int result, const char** name) {
  const auto found = kErrors.find(result);
  if (found == kErrors.end()) return kInvalidValue;
  return *name = found->second.first, kSuccess;
}
MOCK cuGetErrorString(int result, const char** text) {
  const auto found = kErrors.find(result);
  if (found == kErrors.end()) return kInvalidValue;
  return *text = found->second.second, kSuccess;
}

// In the place of torch's allocator, which launchers ask for memory: none of it exists.
MOCK mockAllocate(DLTensor* wanted, DLManagedTensorVersioned** out, void*, void (*)(void*, const char*, const char*)) {
  struct Memory {
    DLManagedTensorVersioned managed;
    int64_t size, stride;
  };
  auto* memory =
      new Memory{{{DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION}, nullptr, nullptr, 0, *wanted}, wanted->shape[0], 1};
  memory->managed.manager_ctx = memory;
  memory->managed.deleter = [](DLManagedTensorVersioned* self) {
    record(R"({"call": "release"})");
    delete static_cast<Memory*>(self->manager_ctx);
  };
  DLTensor& made = memory->managed.dl_tensor;
  made.data = reinterpret_cast<void*>(uintptr_t{0x7F00FF00000}), made.byte_offset = 0;
  made.shape = &memory->size, made.strides = &memory->stride;
  record(R"({"call": "allocate", "address": %llu, "bytes": %lld, "device": %d})",
         static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(made.data)), static_cast<long long>(memory->size),
         made.device.device_id);
  *out = &memory->managed;
  return kSuccess;
}
