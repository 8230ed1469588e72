// The arguments of a user's attention variant.
#pragma once
#include "fi/host/arguments.h"

namespace fi {

// The arguments of a caller after the named ones, packed for device code of a user: 8 bytes each, of a tensor
// its address (None: 0). Whoever compiled that code has checked them.
class Extras {
 public:
  Extras(const Values& values) : values_(values), count_(static_cast<size_t>(values.count)) {
    FI_CHECK(count_ <= words_.size(), TypeError, "takes at most %zu additional arguments; got %zu", words_.size(),
             count_);
    for (size_t i = 0; i < count_; ++i) {
      if (const DLTensor* t = as_dltensor(values.any[i])) {
        words_[i] = reinterpret_cast<uint64_t>(as_tensor(t, kName).data());
        continue;
      }
      FI_CHECK(values.any[i].type_index <= kTVMFFIFloat, TypeError,
               "additional argument %zu must be a tensor, a number or None", i);
      words_[i] = values.any[i].type_index == kTVMFFINone ? 0 : values.any[i].v_uint64;
    }
  }
  // Raises if the op writes to memory of one of them.
  void check_apart(std::initializer_list<const Tensor*> written) const {
    for (size_t i = 0; i < count_; ++i) {
      const DLTensor* t = as_dltensor(values_.any[i]);
      if (!t) continue;
      const Tensor read(t, kName);
      for (const Tensor* one : written) check_memory({one, &read}, {0u});
    }
  }
  size_t bytes() const { return count_ * sizeof(uint64_t); }
  const void* data() const { return words_.data(); }

 private:
  static constexpr const char* kName = "an additional argument";
  Values values_;
  std::array<uint64_t, 64> words_;
  size_t count_;
};

}  // namespace fi
