// Products of bf16 tiles by AMX (Intel SDM, volume 1, chapter 18): 16 x 32 times 32 x 16, added in fp32.
#pragma once

#include <cstdint>

#include "fi/cpu/convert.h"
#include "fi/cpu/prefetch.h"

#if !defined(FI_ONE_LEVEL) && defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && __GNUC__ >= 12
#define FI_HAS_AMX 1
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#define FI_HAS_AMX 0
#endif

namespace fi::cpu {

#if FI_HAS_AMX
#define FI_AMX __attribute__((target("amx-tile,amx-bf16,avx512f")))

// Whether the CPU has AMX for bf16 and the kernel lets this process use it; determined once.
inline bool has_amx() {
  static const bool found = [] {
    constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;  // of EDX
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (kBf16 | kTile)) != (kBf16 | kTile)) return false;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return found;
}

// Tile registers of this thread, all 16 rows of 64 bytes, for the lifetime of the object.
class AmxTiles {
 public:
  FI_AMX AmxTiles() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int i = 0; i < 8; ++i) config.row_bytes[i] = 64, config.rows[i] = 16;
    asm volatile("" ::"r"(&config) : "memory");  // the intrinsic names the first 8 bytes only
    _tile_loadconfig(&config);
  }
  FI_AMX ~AmxTiles() { _tile_release(); }
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;
};

// c[32][16 panels] += w[32][k] panel^T. w_stride: bytes between rows, w_step: between 32 k. A panel is [k / 2][16][2];
// k is a multiple of 32.
FI_AMX inline void amx_multiply(const bf16_t* w, int64_t w_stride, int64_t w_step, const bf16_t* panels,
                                int64_t panel_stride, int64_t count, int64_t k, float* c, int64_t c_stride,
                                Prefetch next) {
  const int64_t lines = next.each((count + 1) / 2 * (k / 32));
  const auto* w0 = reinterpret_cast<const char*>(w);
  const char* w1 = w0 + 16 * w_stride;
  const int64_t c_bytes = c_stride * 4;
  asm volatile("" ::: "memory");  // _tile_loadd does not tell the compiler that it reads
  for (int64_t i = 0; i < count; i += 2) {
    const auto* x0 = reinterpret_cast<const char*>(panels + i * panel_stride);
    const bool two = i + 1 < count;
    const char* x1 = two ? x0 + panel_stride * 2 : x0;
    float* c0 = c + i * 16;
    float* c1 = c0 + 16 * c_stride;
    _tile_loadd(0, c0, c_bytes);
    _tile_loadd(1, c1, c_bytes);
    if (two) {
      _tile_loadd(2, c0 + 16, c_bytes);
      _tile_loadd(3, c1 + 16, c_bytes);
      for (int64_t at = 0; at < k / 32; ++at) {
        _tile_loadd(4, w0 + at * w_step, w_stride);
        _tile_loadd(6, x0 + at * 1024, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, w1 + at * w_step, w_stride);
        _tile_dpbf16ps(1, 5, 6);
        _tile_loadd(7, x1 + at * 1024, 64);
        _tile_dpbf16ps(2, 4, 7);
        next.lines(lines);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(2, c0 + 16, c_bytes);
      _tile_stored(3, c1 + 16, c_bytes);
    } else {
      for (int64_t at = 0; at < k / 32; ++at) {
        _tile_loadd(4, w0 + at * w_step, w_stride);
        _tile_loadd(5, w1 + at * w_step, w_stride);
        _tile_loadd(6, x0 + at * 1024, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
      }
    }
    _tile_stored(0, c0, c_bytes);
    _tile_stored(1, c1, c_bytes);
  }
}
#else
inline bool has_amx() { return false; }
struct AmxTiles {
  AmxTiles() {}  // an object of it is no unused variable
};
inline void amx_multiply(const bf16_t*, int64_t, int64_t, const bf16_t*, int64_t, int64_t, int64_t, float*, int64_t,
                         Prefetch) {}
#endif

}  // namespace fi::cpu
