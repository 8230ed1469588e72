// A libcuda that shows two GPUs, takes any device binary and launches nothing; MOCK_STATUS is what cuInit returns.
#include <cstdlib>
#include <cstring>

extern "C" {

int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}
int cuInit(unsigned) {
  const char* status = getenv("MOCK_STATUS");
  return status ? atoi(status) : 0;
}
int cuDeviceGetCount(int* count) {
  *count = 2;
  return 0;
}
int cuDeviceGet(int* device, int index) {
  *device = index;
  return 0;
}
int cuDeviceGetName(char* name, int size, int device) {
  strncpy(name, device == 0 ? "Mock Hopper" : "Mock Ada", static_cast<size_t>(size));
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  const int major = 75;
  *value = attribute == major ? (device == 0 ? 9 : 8) : (device == 0 ? 0 : 9);
  return 0;
}
int cuGetErrorName(int, const char** text) {
  *text = "MOCK_ERROR";
  return 0;
}
int cuGetErrorString(int, const char** text) {
  *text = "the mock refuses";
  return 0;
}

// What a launcher asks for when it binds: the image must be an ELF file that has the entry.
struct Image {
  const char* start;
};
static Image image;
int cuLibraryLoadData(void** library, const void* data, void*, void*, unsigned, void*, void*, unsigned) {
  if (memcmp(data, "\177ELF", 4) != 0) return 1;
  image.start = static_cast<const char*>(data);
  *library = &image;
  return 0;
}
int cuLibraryGetKernel(void** kernel, void*, const char*) {
  *kernel = &image;
  return 0;
}
int cuKernelGetFunction(void** function, void*) {
  *function = &image;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int) {
  *context = &image;
  return 0;
}
int cuCtxGetDevice(int* device) {
  *device = 0;
  return 0;
}
int cuLibraryUnload(void*) { return 0; }
int cuKernelSetAttribute(int, int, void*, int) { return 0; }
int cuTensorMapEncodeTiled(void*, int, unsigned, void*, const void*, const void*, const void*, const void*, int, int,
                           int, int) {
  return 0;
}
int cuLaunchKernelEx(const void*, void*, void**, void**) { return 0; }
int cuCtxPushCurrent_v2(void*) { return 0; }
int cuCtxPopCurrent_v2(void**) { return 0; }
}
