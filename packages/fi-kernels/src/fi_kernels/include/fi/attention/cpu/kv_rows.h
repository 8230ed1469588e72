// Products of a query row with rows of a KV cache, which are converted in registers and not copied first.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "fi/cpu/convert.h"
#include "fi/cpu/target.h"
#include "fi/host/tensor.h"

namespace fi::cpu {

constexpr int kMaxKvRows = 16;  // KV rows at a time
constexpr int kWidthStep = 32;  // widths are multiples of it
constexpr int kMaxWidth = 512;

// count rows of `width` elements at these addresses. The addresses after them repeat a valid one.
struct KvRows {
  const void* at[kMaxKvRows];
  int64_t count, width;
};

namespace detail {

template <int kWidth>
struct Vector {
  typedef float Floats __attribute__((vector_size(kWidth * 4)));
  typedef uint32_t Words __attribute__((vector_size(kWidth * 4)));
  typedef short Halves __attribute__((vector_size(kWidth * 2)));
};

// Vectors are passed by reference: by value, the ABI would differ between levels.
#if FI_HAS_LEVELS
// GCC converts vectors of _Float16 one by one.
__attribute__((target("arch=x86-64-v4"))) void declares_builtins();  // declares those of the level; never called
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
// bf16: the elements of even and of odd index, which are the halves of words: half the work of converting in order.
template <int kWidth>
FI_INLINE void load_two(typename Vector<kWidth>::Floats& a, typename Vector<kWidth>::Floats& b, const bf16_t* from) {
  typename Vector<kWidth>::Words words;
  std::memcpy(&words, from, sizeof words);
  a = (typename Vector<kWidth>::Floats)(words << 16), b = (typename Vector<kWidth>::Floats)(words & 0xffff0000u);
}

// Lane l of `to` is lane Index::of(l, kWidth) of a followed by b.
template <class Index, class Floats, int... kLane>
FI_INLINE void shuffle(Floats& to, const Floats& a, const Floats& b, std::integer_sequence<int, kLane...>) {
  constexpr int kWidth = sizeof...(kLane);
#if defined(__clang__) || __GNUC__ >= 12
  to = __builtin_shufflevector(a, b, Index::of(kLane, kWidth)...);
#else
  to = Floats{(Index::of(kLane, kWidth) < kWidth ? a : b)[Index::of(kLane, kWidth) % kWidth]...};
#endif
}
template <class Index, int kWidth>
FI_INLINE void shuffle(typename Vector<kWidth>::Floats& to, const typename Vector<kWidth>::Floats& a,
                       const typename Vector<kWidth>::Floats& b) {
  shuffle<Index>(to, a, b, std::make_integer_sequence<int, kWidth>());
}
template <int kFirst>
struct EverySecond {
  static constexpr int of(int lane, int) { return 2 * lane + kFirst; }
};
template <int kUpper>
struct Interleaved {
  static constexpr int of(int lane, int width) { return kUpper * width / 2 + lane / 2 + lane % 2 * width; }
};
// The lower or upper halves of parts of kPart lanes, those of a and of b alternately.
template <int kPart, int kUpper>
struct HalfParts {
  static constexpr int of(int lane, int width) {
    const int place = lane % kPart;
    return lane - place + place % (kPart / 2) + kUpper * kPart / 2 + (place < kPart / 2 ? 0 : width);
  }
};

// Permutes floats from the order in memory to that of load_two for T, and back.
template <int kWidth, class T>
FI_INLINE void deinterleave(typename Vector<kWidth>::Floats& a, typename Vector<kWidth>::Floats& b) {
  if constexpr (std::is_same_v<T, bf16_t>) {
    const auto first = a;
    shuffle<EverySecond<0>, kWidth>(a, first, b);
    shuffle<EverySecond<1>, kWidth>(b, first, b);
  }
}
template <int kWidth, class T>
FI_INLINE void interleave(typename Vector<kWidth>::Floats& a, typename Vector<kWidth>::Floats& b) {
  if constexpr (std::is_same_v<T, bf16_t>) {
    const auto first = a;
    shuffle<Interleaved<0>, kWidth>(a, first, b);
    shuffle<Interleaved<1>, kWidth>(b, first, b);
  }
}

// x[0] becomes the sums of the lanes of x[0], x[1], ... x[kWidth - 1]; the others are overwritten.
template <int kWidth, int kPart = kWidth>
FI_INLINE void lane_sums(typename Vector<kWidth>::Floats* x) {
  if constexpr (kPart > 1) {
    for (int i = 0; i < kPart / 2; ++i) {
      typename Vector<kWidth>::Floats lower, upper;
      shuffle<HalfParts<kPart, 0>, kWidth>(lower, x[i], x[i + kPart / 2]);
      shuffle<HalfParts<kPart, 1>, kWidth>(upper, x[i], x[i + kPart / 2]);
      x[i] = lower + upper;
    }
    lane_sums<kWidth, kPart / 2>(x);
  }
}

// scores[j] = dot(q, row j) of kMaxKvRows rows; those from count on are unspecified.
template <int kWidth, class T>
FI_INLINE void row_dots(const float* q, const KvRows& rows, float* scores) {
  typedef typename Vector<kWidth>::Floats Floats;
  Floats left[kMaxWidth / kWidth], first, second;
  for (int64_t k = 0; k < rows.width / kWidth; k += 2) {
    load_two<kWidth>(left[k], left[k + 1], q + k * kWidth);
    deinterleave<kWidth, T>(left[k], left[k + 1]);
  }
  for (int j = 0; j < kMaxKvRows; j += kWidth) {
    Floats sum[kWidth];
    for (int i = 0; i < kWidth; i += 4) {  // four hide the latency of an FMA
      Floats part[4] = {};
      for (int64_t k = 0; k < rows.width / kWidth; k += 2)
        for (int n = 0; n < 4; ++n) {
          load_two<kWidth>(first, second, static_cast<const T*>(rows.at[j + i + n]) + k * kWidth);
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
FI_INLINE void row_sums(const float* probabilities, const KvRows& rows, float* sums, int64_t& column) {
  typedef typename Vector<kWidth>::Floats Floats;
  for (; column + kVecs * kWidth <= rows.width; column += kVecs * kWidth) {
    Floats sum[kVecs], first, second;
    std::memcpy(sum, sums + column, sizeof sum);
    for (int n = 0; n < kVecs; n += 2) deinterleave<kWidth, T>(sum[n], sum[n + 1]);
    for (int64_t j = 0; j < rows.count; ++j) {
      const T* row = static_cast<const T*>(rows.at[j]) + column;
      for (int n = 0; n < kVecs; n += 2) {
        load_two<kWidth>(first, second, row + n * kWidth);
        sum[n] += probabilities[j] * first;
        sum[n + 1] += probabilities[j] * second;
      }
    }
    for (int n = 0; n < kVecs; n += 2) interleave<kWidth, T>(sum[n], sum[n + 1]);
    std::memcpy(sums + column, sum, sizeof sum);
  }
}
// sums += probabilities[j] * row j, over all rows.
template <int kWidth, class T>
FI_INLINE void row_sums(const float* probabilities, const KvRows& rows, float* sums) {
  int64_t column = 0;
  row_sums<kWidth, 8, T>(probabilities, rows, sums, column);
  row_sums<kWidth, 2, T>(probabilities, rows, sums, column);
}

template <class T>
struct RowProductsOf {
#if FI_HAS_LEVELS
  __attribute__((target("arch=x86-64-v4"))) static void dots(const float* q, const KvRows& rows, float* scores) {
    row_dots<16, T>(q, rows, scores);
  }
  __attribute__((target("arch=x86-64-v3"))) static void dots(const float* q, const KvRows& rows, float* scores) {
    row_dots<8, T>(q, rows, scores);
  }
  __attribute__((target("arch=x86-64-v4"))) static void sum(const float* probabilities, const KvRows& rows,
                                                            float* sums) {
    row_sums<16, T>(probabilities, rows, sums);
  }
  __attribute__((target("arch=x86-64-v3"))) static void sum(const float* probabilities, const KvRows& rows,
                                                            float* sums) {
    row_sums<8, T>(probabilities, rows, sums);
  }
#define FI_ANY_LEVEL __attribute__((target("default")))
#else
#define FI_ANY_LEVEL
#endif
  FI_ANY_LEVEL static void dots(const float* q, const KvRows& rows, float* scores) { row_dots<4, T>(q, rows, scores); }
  FI_ANY_LEVEL static void sum(const float* probabilities, const KvRows& rows, float* sums) {
    row_sums<4, T>(probabilities, rows, sums);
  }
#undef FI_ANY_LEVEL
};

}  // namespace detail

// dots: scores[j] = dot(q, row j) of kMaxKvRows rows; those from count on are unspecified. sum: sums +=
// probabilities[j] * row j.
struct KvRowProducts {
  void (*dots)(const float* q, const KvRows& rows, float* scores);
  void (*sum)(const float* probabilities, const KvRows& rows, float* sums);

  // Null for types that are slower to convert for each query row than to store once as floats.
  static KvRowProducts of(DType d) {
    return d == kBF16 ? of<bf16_t>() : d == kF16 ? of<f16_t>() : d == kF32 ? of<float>() : KvRowProducts{};
  }
  static bool supports(int64_t width) { return width % kWidthStep == 0 && width <= kMaxWidth; }

 private:
  template <class T>
  static KvRowProducts of() {
    using Of = detail::RowProductsOf<T>;  // called, since GCC 12 at -O0 does not emit what only has its address taken
    return {[](const float* q, const KvRows& rows, float* scores) { Of::dots(q, rows, scores); },
            [](const float* probabilities, const KvRows& rows, float* sums) { Of::sum(probabilities, rows, sums); }};
  }
};

}  // namespace fi::cpu
