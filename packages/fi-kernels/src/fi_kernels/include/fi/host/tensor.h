// A tensor argument and its contract: each host entry states shapes, dtypes and strides symbolically, first thing.
#pragma once
#include <dlpack/dlpack.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "fi/host/error.h"

namespace fi {

struct DType {
  uint8_t code, bits;
  friend bool operator==(DType a, DType b) { return a.code == b.code && a.bits == b.bits; }
  friend bool operator!=(DType a, DType b) { return !(a == b); }
  int64_t bytes() const { return bits / 8; }
  [[gnu::noinline, gnu::cold]] std::string str() const {
    switch (code) {
      case kDLFloat:
        return "float" + std::to_string(bits);
      case kDLBfloat:
        return "bfloat16";
      case kDLInt:
        return "int" + std::to_string(bits);
      case kDLUInt:
        return "uint" + std::to_string(bits);
      case kDLBool:
        return "bool";
      case kDLFloat8_e4m3fn:
        return "float8_e4m3fn";
      case kDLFloat8_e5m2:
        return "float8_e5m2";
      default:
        return "dtype code " + std::to_string(code) + " of " + std::to_string(bits) + " bits";
    }
  }
};
constexpr DType kF32{kDLFloat, 32}, kF16{kDLFloat, 16}, kBF16{kDLBfloat, 16}, kE4M3{kDLFloat8_e4m3fn, 8},
    kE5M2{kDLFloat8_e5m2, 8}, kI8{kDLInt, 8}, kI16{kDLInt, 16}, kI32{kDLInt, 32}, kI64{kDLInt, 64}, kU8{kDLUInt, 8},
    kU16{kDLUInt, 16}, kU32{kDLUInt, 32}, kBool{kDLBool, 8}, kE2M1{kDLFloat4_e2m1fn, 4};

// One symbol of a shape: the first tensor that names it binds it, later ones must agree.
struct Dim {
  const char* name;
  int64_t value = -1;
  operator int64_t() const { return value; }
};

// Addresses from `begin` to before `end`.
struct Span {
  uintptr_t begin, end;
  bool meets(Span other) const { return begin < other.end && other.begin < end; }
};

// What a tensor of two or three dimensions refers to that is another one with the last two dimensions swapped.
struct Transposed {
  DLTensor tensor;
  int64_t shape[3], strides[3];
};

class Tensor {
 public:
  Tensor(const DLTensor* tensor, const char* name) : tensor_(tensor), name_(name) {}

  explicit operator bool() const { return tensor_ != nullptr; }
  const char* name() const { return name_; }
  Tensor as(const char* name) const { return {tensor_, name}; }  // the argument's name in another form of the op
  // It with the last two dimensions swapped, as long as `view` lives; a tensor of other dimensions, or none, as it is.
  const DLTensor* transposed(Transposed& view) const {
    if (!tensor_ || ndim() < 2 || ndim() > 3) return tensor_;
    for (int i = 0; i < ndim(); ++i) {
      const int from = i < ndim() - 2 ? i : 2 * ndim() - 3 - i;
      view.shape[i] = size(from), view.strides[i] = stride(from);
    }
    view.tensor = *tensor_;
    view.tensor.shape = view.shape, view.tensor.strides = view.strides;
    return &view.tensor;
  }
  const DLTensor* dlpack() const { return tensor_; }
  int ndim() const { return tensor_->ndim; }
  int64_t size(int axis) const { return tensor_->shape[axis < 0 ? axis + ndim() : axis]; }
  // For requests, which are made before a tensor is checked: 0 where there is no such dimension.
  int64_t size_or_0(int axis) const { return axis >= -ndim() && axis < ndim() ? size(axis) : 0; }
  int64_t stride_or_0(int axis) const { return axis >= -ndim() && axis < ndim() ? stride(axis) : 0; }
  int64_t stride(int axis) const {
    if (axis < 0) axis += ndim();
    if (tensor_->strides) return tensor_->strides[axis];
    int64_t step = 1;
    for (int i = ndim() - 1; i > axis; --i) step *= tensor_->shape[i];
    return step;
  }
  int64_t numel() const {
    int64_t n = 1;
    for (int i = 0; i < ndim(); ++i) n *= tensor_->shape[i];
    return n;
  }
  DType dtype() const { return {tensor_->dtype.code, tensor_->dtype.bits}; }
  DLDevice device() const { return tensor_->device; }
  template <class T = void>
  T* data() const {
    return reinterpret_cast<T*>(static_cast<char*>(tensor_->data) + tensor_->byte_offset);
  }
  // The address of an element that lies `offset` elements behind the first.
  char* at(int64_t offset) const { return data<char>() + offset * dtype().bytes(); }
  // Largest power of two <= limit (bytes) that divides the address and every given stride: the legal vector width.
  int64_t alignment(int64_t limit, std::initializer_list<int64_t> element_strides) const {
    auto low = reinterpret_cast<uintptr_t>(data());
    for (int64_t s : element_strides) low |= static_cast<uintptr_t>(s * dtype().bytes());
    int64_t width = limit;
    while (width > 1 && low % width) width /= 2;
    return width;
  }
  // The same of the addresses of all rows.
  int64_t row_alignment(int64_t limit) const {
    int64_t width = alignment(limit, {});
    for (int i = 0; i + 1 < ndim(); ++i)
      while (width > 1 && stride(i) * dtype().bytes() % width) width /= 2;
    return width;
  }

  // Binds unbound symbols and checks bound ones.
  template <class... D>
  const Tensor& shape(D&... dims) const {
    Dim* want[] = {&dims...};
    return match(want, sizeof...(D));
  }
  // The shape of `other`, but for the last dimension.
  const Tensor& shape_of(const Tensor& other, const Dim& last) const {
    bool fits = ndim() == other.ndim() && size(-1) == last;
    for (int i = 0; fits && i + 1 < ndim(); ++i) fits = size(i) == other.size(i);
    if (!fits)
      raise("ValueError", "%s must have the shape of %s %s with last dimension %s = %lld; got %s", name_, other.name_,
            other.shape_str().c_str(), last.name, static_cast<long long>(last), shape_str().c_str());
    return *this;
  }
  const Tensor& is(std::initializer_list<DType> allowed) const {
    for (DType d : allowed)
      if (d == dtype()) return *this;
    wrong_dtype(allowed);
  }
  const Tensor& like(const Tensor& other) const {  // same dtype and device
    if (dtype() != other.dtype())
      raise("TypeError", "%s must have the dtype of %s, %s; got %s", name_, other.name_, other.dtype().str().c_str(),
            dtype().str().c_str());
    return on(other);
  }
  const Tensor& on(const Tensor& other) const {
    if (device().device_type != other.device().device_type || device().device_id != other.device().device_id)
      raise("ValueError", "%s must be on the device of %s (%s); got %s", name_, other.name_, other.device_str().c_str(),
            device_str().c_str());
    return *this;
  }
  const Tensor& inner_contiguous() const {
    if (ndim() == 0 || (size(-1) > 1 && stride(-1) != 1))
      raise("ValueError",
            "%s must be contiguous in its last dimension: its innermost stride must be 1; got %lld: call .contiguous() "
            "on it",
            name_, static_cast<long long>(ndim() ? stride(-1) : 0));
    return *this;
  }
  [[gnu::noinline]] const Tensor& contiguous() const {
    int64_t step = 1;
    const bool empty = numel() == 0;
    for (int i = ndim() - 1; i >= 0; --i) {
      if (size(i) != 1 && !empty && stride(i) != step)
        raise("ValueError",
              "%s must be contiguous; got shape %s with stride %lld in dimension %d: call .contiguous() on it", name_,
              shape_str().c_str(), static_cast<long long>(stride(i)), i);
      step *= size(i);
    }
    return *this;
  }
  // Raises unless no two elements share memory: each stride steps over all that dimensions of smaller strides reach.
  // Strides usually grow from the last dimension to the first.
  const Tensor& writable() const {
    int64_t extent = 1;
    for (int i = ndim() - 1; tensor_->strides && i >= 0; --i) {
      if (tensor_->shape[i] <= 1) continue;
      if (tensor_->strides[i] < extent) return steps_over_smaller();
      extent += (tensor_->shape[i] - 1) * tensor_->strides[i];
    }
    return *this;
  }
  // The addresses from the first element to behind the last one; strides are not negative.
  Span span() const {
    uint64_t elements = 1;
    for (int i = 0; i < ndim(); ++i) {
      if (tensor_->shape[i] == 0) return {0, 0};
      elements += static_cast<uint64_t>(tensor_->shape[i] - 1) * static_cast<uint64_t>(stride(i));
    }
    const auto first = reinterpret_cast<uintptr_t>(data());
    return {first, first + elements * static_cast<uint64_t>(dtype().bytes())};
  }
  // Views [..., size] as rows: returns their number and sets their stride in elements. A tensor of two dimensions may
  // have strided rows; any other must be contiguous.
  int64_t rows(int64_t* stride_of_rows) const {
    if (ndim() == 2) {
      inner_contiguous();
      *stride_of_rows = stride(0);
      return size(0);
    }
    contiguous();
    *stride_of_rows = size(-1);
    int64_t count = 1;
    for (int i = 0; i + 1 < ndim(); ++i) count *= size(i);
    return count;
  }
  [[gnu::noinline, gnu::cold]] std::string shape_str() const {
    std::string s = "[";
    for (int i = 0; i < ndim(); ++i) s += (i ? ", " : "") + std::to_string(size(i));
    return s + "]";
  }
  [[gnu::noinline, gnu::cold]] std::string device_str() const {
    if (device().device_type == kDLCPU) return "cpu";
    return (device().device_type == kDLCUDA ? "cuda:" : "device:") + std::to_string(device().device_id);
  }

 private:
  [[gnu::noinline]] const Tensor& match(Dim* const* want, int n) const {
    bool fits = ndim() == n;
    for (int i = 0; fits && i < n; ++i) fits = want[i]->value < 0 || want[i]->value == size(i);
    if (!fits) wrong_shape(want, n);
    int64_t bits = 0;
    for (int i = 0; i < n; ++i) bits |= want[i]->value = size(i);
    if (bits >> 47) too_large();
    return *this;
  }
  // Elements may share memory, so that there are more than addresses; entries compute with sizes in 64 bits.
  [[noreturn, gnu::noinline, gnu::cold]] void too_large() const {
    raise("ValueError", "%s must have dimensions below 2^47; got %s", name_, shape_str().c_str());
  }
  [[noreturn, gnu::noinline, gnu::cold]] void wrong_shape(Dim* const* want, int n) const {
    std::string symbols, bound;
    for (int i = 0; i < n; ++i) {
      symbols += (i ? ", " : "") + std::string(want[i]->name);
      if (want[i]->value >= 0 && !(want[i]->name[0] >= '0' && want[i]->name[0] <= '9'))
        bound +=
            (bound.empty() ? " with " : ", ") + std::string(want[i]->name) + " = " + std::to_string(want[i]->value);
    }
    raise("ValueError", "%s must have shape [%s]%s; got %s", name_, symbols.c_str(), bound.c_str(),
          shape_str().c_str());
  }
  [[gnu::noinline]] const Tensor& steps_over_smaller() const {
    for (int i = 0; i < ndim() && numel() > 0; ++i) {
      int64_t extent = 1;  // of the dimensions with smaller strides
      for (int j = 0; j < ndim(); ++j)
        if (stride(j) < stride(i) || (stride(j) == stride(i) && j > i)) extent += (size(j) - 1) * stride(j);
      FI_CHECK(size(i) == 1 || stride(i) >= extent, ValueError,
               "%s is written, so no two of its elements may share memory; got shape %s with stride %lld in dimension "
               "%d: pass a tensor of its own memory",
               name_, shape_str().c_str(), static_cast<long long>(stride(i)), i);
    }
    return *this;
  }
  [[noreturn, gnu::noinline, gnu::cold]] void wrong_dtype(std::initializer_list<DType> allowed) const {
    std::string names;
    for (DType d : allowed) names += (names.empty() ? "" : " or ") + d.str();
    raise("TypeError", "%s must be %s; got %s", name_, names.c_str(), dtype().str().c_str());
  }

  const DLTensor* tensor_;
  const char* name_;
};

// Of two numbers that are usually near each other: a division takes longer than the rest of a check.
inline uint64_t remainder(uint64_t a, uint64_t step) { return a < step ? a : a == step ? 0 : a % step; }

// The bytes from the first element of a tensor to behind the last, where those behind multiples of `step` count once.
inline uint64_t bytes_within(const Tensor& t, uint64_t step) {
  const auto element = static_cast<uint64_t>(t.dtype().bytes());
  uint64_t bytes = element;
  for (int i = 0; i < t.ndim(); ++i) {
    const uint64_t stride = static_cast<uint64_t>(t.stride(i)) * element;
    if (t.size(i) > 1 && remainder(stride, step) != 0) bytes += static_cast<uint64_t>(t.size(i) - 1) * stride;
  }
  return bytes;
}

// Whether no element of a lies in memory of b although their spans meet, as of different columns of one matrix: within
// the stride of some dimension of a, all of a lies in other bytes than all of b.
inline bool in_other_columns(const Tensor& a, const Tensor& b) {
  for (int i = 0; i < a.ndim(); ++i) {
    const uint64_t step = static_cast<uint64_t>(a.stride(i)) * static_cast<uint64_t>(a.dtype().bytes());
    if (a.size(i) == 1 || step == 0) continue;
    const auto x = reinterpret_cast<uintptr_t>(a.data()), y = reinterpret_cast<uintptr_t>(b.data());
    const uint64_t column = y >= x ? remainder(y - x, step) : step - remainder(x - y, step);  // of b, in that of a
    if (column >= bytes_within(a, step) && bytes_within(b, step) <= step - column) return true;
  }
  return false;
}

// Whether each element of `part` is the one of `whole` at the same place, or lies in it where that is plain memory.
inline bool is_part(const Tensor& part, const Tensor& whole) {
  bool same = part.data() == whole.data() && part.dtype() == whole.dtype() && part.ndim() == whole.ndim();
  for (int i = 0; same && i < part.ndim(); ++i)
    same = part.size(i) <= whole.size(i) && (part.size(i) == 1 || part.stride(i) == whole.stride(i));
  if (same || whole.dtype() != kU8 || whole.ndim() != 1) return same;
  const Span in = part.span(), all = whole.span();
  return in.begin >= all.begin && in.end <= all.end;
}

// Raises unless the tensors, whose spans meet, share no memory, or, if that is permitted, elements at the same places.
[[gnu::noinline, gnu::cold]] inline void check_shared(const Tensor& written, const Tensor& other, bool other_is_written,
                                                      bool permitted) {
  if (permitted && (is_part(written, other) || is_part(other, written))) return;
  if (in_other_columns(written, other) || in_other_columns(other, written)) return;
  FI_CHECK(!other_is_written, ValueError,
           "%s and %s are written, so they must not share memory: pass a tensor for each", written.name(),
           other.name());
  FI_CHECK(!permitted, ValueError,
           "%s is written while %s is read, so it must have the same elements or share no memory: pass %s, or a tensor "
           "of its own memory",
           written.name(), other.name(), other.name());
  raise("ValueError", "%s is written while %s is read, so they must not share memory: pass a tensor of its own memory",
        written.name(), other.name());
}

// Raises if an op writes to memory of another of its tensors, before or after that is read. The written ones come
// first; bit i of `permitted` of one tells that it may have the elements of tensor i, at the same places.
[[gnu::noinline]] inline void check_memory(const Tensor* const* tensors, size_t count, const uint32_t* permitted,
                                           size_t written) {
  Span spans[32];
  size_t at[32], given = 0;
  for (size_t i = 0; i < count; ++i)
    if (*tensors[i]) spans[given] = tensors[i]->span(), at[given++] = i;
  for (size_t w = 0; w < given && at[w] < written; ++w)
    for (size_t i = w + 1; i < given; ++i)
      if (spans[w].meets(spans[i]))
        check_shared(*tensors[at[w]], *tensors[at[i]], at[i] < written, permitted[at[w]] >> at[i] & 1);
}
template <size_t N, size_t W>
void check_memory(const Tensor* const (&tensors)[N], const uint32_t (&permitted)[W]) {
  static_assert(W <= N && N <= 32);
  check_memory(tensors, N, permitted, W);
}

// Elements of the widest vector, at most 16 bytes of each tensor, in which rows of `width` elements can be read.
inline int64_t vec_size(int64_t width, std::initializer_list<Tensor> tensors) {
  int64_t elements = 16;
  for (const Tensor& t : tensors) {
    const int64_t bytes = t.dtype().bytes();
    elements = std::min(elements, 16 / bytes);
    elements = t.row_alignment(elements * bytes) / bytes;
  }
  while (width % elements) elements /= 2;
  return elements;
}

}  // namespace fi
