// Products of a query row with rows of a cache as they lie in memory: converted in registers, not copied first.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "fi/cpu/convert.h"
#include "fi/cpu/target.h"
#include "fi/host/tensor.h"

namespace fi::cpu {

constexpr int kLines = 16;     // rows of a cache at once
constexpr int kLineStep = 32;  // their widths are multiples of it
constexpr int kWidestLine = 512;

// count rows of `width` elements at these addresses; behind them addresses of any.
struct Lines {
  const void* at[kLines];
  int64_t count, width;
};

namespace detail {

template <int kWidth>
struct Vector {
  typedef float Floats __attribute__((vector_size(kWidth * 4)));
  typedef uint32_t Words __attribute__((vector_size(kWidth * 4)));
  typedef short Halves __attribute__((vector_size(kWidth * 2)));
};

// Vectors go by reference: as values they would have another ABI at each level.
#if FI_HAS_LEVELS
// GCC converts vectors of _Float16 one by one.
__attribute__((target("arch=x86-64-v4"))) void declares_builtins();  // those of the level; never called
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"  // they are no calls
template <int kWidth>
FI_INLINE void decode(typename Vector<kWidth>::Floats& to, const f16_t* from) {
  typename Vector<kWidth>::Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  if constexpr (kWidth == 16) to = __builtin_ia32_vcvtph2ps512_mask(halves, typename Vector<kWidth>::Floats{}, -1, 4);
  if constexpr (kWidth == 8) to = __builtin_ia32_vcvtph2ps256(halves);
  if constexpr (kWidth == 4)
    for (int l = 0; l < kWidth; ++l) to[l] = to_float(from[l]);
}
#pragma GCC diagnostic pop
#else
template <int kWidth>
FI_INLINE void decode(typename Vector<kWidth>::Floats& to, const f16_t* from) {
  for (int l = 0; l < kWidth; ++l) to[l] = to_float(from[l]);
}
#endif

// Two vectors from 2 * kWidth elements at any address: the first and the second half.
template <int kWidth>
FI_INLINE void load_two(typename Vector<kWidth>::Floats& a, typename Vector<kWidth>::Floats& b, const float* from) {
  std::memcpy(&a, from, sizeof a);
  std::memcpy(&b, from + kWidth, sizeof b);
}
template <int kWidth>
FI_INLINE void load_two(typename Vector<kWidth>::Floats& a, typename Vector<kWidth>::Floats& b, const f16_t* from) {
  decode<kWidth>(a, from), decode<kWidth>(b, from + kWidth);
}
// Or those of even and of odd place, which are the halves of words: half as much work as to widen them in order.
template <int kWidth>
FI_INLINE void load_two(typename Vector<kWidth>::Floats& a, typename Vector<kWidth>::Floats& b, const bf16_t* from) {
  typename Vector<kWidth>::Words words;
  std::memcpy(&words, from, sizeof words);
  a = (typename Vector<kWidth>::Floats)(words << 16), b = (typename Vector<kWidth>::Floats)(words & 0xffff0000u);
}

// Lane l of `to` is lane Pick::of(l, kWidth) of a with b behind it.
template <class Pick, class Floats, int... kLane>
FI_INLINE void pick(Floats& to, const Floats& a, const Floats& b, std::integer_sequence<int, kLane...>) {
  constexpr int kWidth = sizeof...(kLane);
#if defined(__clang__) || __GNUC__ >= 12
  to = __builtin_shufflevector(a, b, Pick::of(kLane, kWidth)...);
#else
  to = Floats{(Pick::of(kLane, kWidth) < kWidth ? a : b)[Pick::of(kLane, kWidth) % kWidth]...};
#endif
}
template <class Pick, int kWidth>
FI_INLINE void pick(typename Vector<kWidth>::Floats& to, const typename Vector<kWidth>::Floats& a,
                    const typename Vector<kWidth>::Floats& b) {
  pick<Pick>(to, a, b, std::make_integer_sequence<int, kWidth>());
}
template <int kFirst>
struct EverySecond {
  static constexpr int of(int lane, int) { return 2 * lane + kFirst; }
};
template <int kUpper>
struct Interleaved {
  static constexpr int of(int lane, int width) { return kUpper * width / 2 + lane / 2 + lane % 2 * width; }
};
// The lower or upper halves of parts of kPart lanes, those of a and of b in turns.
template <int kPart, int kUpper>
struct HalfParts {
  static constexpr int of(int lane, int width) {
    const int place = lane % kPart;
    return lane - place + place % (kPart / 2) + kUpper * kPart / 2 + (place < kPart / 2 ? 0 : width);
  }
};

// Floats of the order in memory into that in which load_two has T, and back.
template <int kWidth, class T>
FI_INLINE void arrange(typename Vector<kWidth>::Floats& a, typename Vector<kWidth>::Floats& b) {
  if constexpr (std::is_same_v<T, bf16_t>) {
    const auto first = a;
    pick<EverySecond<0>, kWidth>(a, first, b);
    pick<EverySecond<1>, kWidth>(b, first, b);
  }
}
template <int kWidth, class T>
FI_INLINE void restore(typename Vector<kWidth>::Floats& a, typename Vector<kWidth>::Floats& b) {
  if constexpr (std::is_same_v<T, bf16_t>) {
    const auto first = a;
    pick<Interleaved<0>, kWidth>(a, first, b);
    pick<Interleaved<1>, kWidth>(b, first, b);
  }
}

// x[0] becomes the sums of the lanes of x[0], x[1], ... x[kWidth - 1]; the others are overwritten.
template <int kWidth, int kPart = kWidth>
FI_INLINE void lane_sums(typename Vector<kWidth>::Floats* x) {
  if constexpr (kPart > 1) {
    for (int i = 0; i < kPart / 2; ++i) {
      typename Vector<kWidth>::Floats lower, upper;
      pick<HalfParts<kPart, 0>, kWidth>(lower, x[i], x[i + kPart / 2]);
      pick<HalfParts<kPart, 1>, kWidth>(upper, x[i], x[i + kPart / 2]);
      x[i] = lower + upper;
    }
    lane_sums<kWidth, kPart / 2>(x);
  }
}

// scores[j] = dot(q, line j), of kLines lines; those behind count are any.
template <int kWidth, class T>
FI_INLINE void line_dots(const float* q, const Lines& lines, float* scores) {
  typedef typename Vector<kWidth>::Floats Floats;
  Floats left[kWidestLine / kWidth], first, second;
  for (int64_t k = 0; k < lines.width / kWidth; k += 2) {
    load_two<kWidth>(left[k], left[k + 1], q + k * kWidth);
    arrange<kWidth, T>(left[k], left[k + 1]);
  }
  for (int j = 0; j < kLines; j += kWidth) {
    Floats sum[kWidth];
    for (int i = 0; i < kWidth; i += 4) {  // so many hide the latency of an FMA
      Floats part[4] = {};
      for (int64_t k = 0; k < lines.width / kWidth; k += 2)
        for (int n = 0; n < 4; ++n) {
          load_two<kWidth>(first, second, static_cast<const T*>(lines.at[j + i + n]) + k * kWidth);
          part[n] += left[k] * first;
          part[n] += left[k + 1] * second;
        }
      for (int n = 0; n < 4; ++n) sum[i + n] = part[n];
    }
    lane_sums<kWidth>(sum);
    std::memcpy(scores + j, sum, sizeof sum[0]);
  }
}

template <int kWidth, int kVecs, class T>
FI_INLINE void line_sums(const float* weights, const Lines& lines, float* sums, int64_t& column) {
  typedef typename Vector<kWidth>::Floats Floats;
  for (; column + kVecs * kWidth <= lines.width; column += kVecs * kWidth) {
    Floats sum[kVecs], first, second;
    std::memcpy(sum, sums + column, sizeof sum);
    for (int n = 0; n < kVecs; n += 2) arrange<kWidth, T>(sum[n], sum[n + 1]);
    for (int64_t j = 0; j < lines.count; ++j) {
      const T* line = static_cast<const T*>(lines.at[j]) + column;
      for (int n = 0; n < kVecs; n += 2) {
        load_two<kWidth>(first, second, line + n * kWidth);
        sum[n] += weights[j] * first;
        sum[n + 1] += weights[j] * second;
      }
    }
    for (int n = 0; n < kVecs; n += 2) restore<kWidth, T>(sum[n], sum[n + 1]);
    std::memcpy(sums + column, sum, sizeof sum);
  }
}
// sums += weights[j] * line j, of all lines.
template <int kWidth, class T>
FI_INLINE void line_sums(const float* weights, const Lines& lines, float* sums) {
  int64_t column = 0;
  line_sums<kWidth, 8, T>(weights, lines, sums, column);
  line_sums<kWidth, 2, T>(weights, lines, sums, column);
}

template <class T>
struct OfLines {
#if FI_HAS_LEVELS
  __attribute__((target("arch=x86-64-v4"))) static void dots(const float* q, const Lines& lines, float* scores) {
    line_dots<16, T>(q, lines, scores);
  }
  __attribute__((target("arch=x86-64-v3"))) static void dots(const float* q, const Lines& lines, float* scores) {
    line_dots<8, T>(q, lines, scores);
  }
  __attribute__((target("arch=x86-64-v4"))) static void sum(const float* weights, const Lines& lines, float* sums) {
    line_sums<16, T>(weights, lines, sums);
  }
  __attribute__((target("arch=x86-64-v3"))) static void sum(const float* weights, const Lines& lines, float* sums) {
    line_sums<8, T>(weights, lines, sums);
  }
#define FI_ANY_LEVEL __attribute__((target("default")))
#else
#define FI_ANY_LEVEL
#endif
  FI_ANY_LEVEL static void dots(const float* q, const Lines& lines, float* scores) {
    line_dots<4, T>(q, lines, scores);
  }
  FI_ANY_LEVEL static void sum(const float* weights, const Lines& lines, float* sums) {
    line_sums<4, T>(weights, lines, sums);
  }
#undef FI_ANY_LEVEL
};

}  // namespace detail

// dots: scores[j] = dot(q, line j) for kLines lines, those behind count any number. sum: sums += weights[j] * line j.
struct LineProducts {
  void (*dots)(const float* q, const Lines& lines, float* scores);
  void (*sum)(const float* weights, const Lines& lines, float* sums);

  // Null for the types that take longer to convert than to store as floats.
  static LineProducts of(DType d) {
    return d == kBF16 ? of<bf16_t>() : d == kF16 ? of<f16_t>() : d == kF32 ? of<float>() : LineProducts{};
  }
  static bool take(int64_t width) { return width % kLineStep == 0 && width <= kWidestLine; }

 private:
  template <class T>
  static LineProducts of() {
    return {detail::OfLines<T>::dots, detail::OfLines<T>::sum};
  }
};

}  // namespace fi::cpu
