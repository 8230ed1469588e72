// A zeroed float array that starts at a cache line, so no vector load crosses two lines.
#pragma once
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

namespace fi::cpu {

class AlignedFloats {
 public:
  explicit AlignedFloats(int64_t n)
      : data_(static_cast<float*>(::operator new[](static_cast<size_t>(n) * sizeof(float), kLine))) {
    std::memset(data_.get(), 0, static_cast<size_t>(n) * sizeof(float));
  }
  float* data() const { return data_.get(); }
  float& operator[](int64_t i) const { return data_.get()[i]; }

 private:
  static constexpr std::align_val_t kLine{64};
  struct Delete {
    void operator()(float* p) const { ::operator delete[](p, kLine); }
  };
  std::unique_ptr<float, Delete> data_;
};

}  // namespace fi::cpu
