// FI_CHAIN: exports chain(program...) -> callable, which calls bound kernels one after another, as recorded once. A
// call takes the memory for what lies between the kernels, then the arguments of the recorded call. It computes nothing
// and returns 0 if a tensor is not like the recorded one; else it returns None, or what a kernel that declines returns.
#pragma once
#include "fi/host/op.h"

namespace fi {

class Chain {
 public:
  // words: the number of arguments, a View or None for each; the number of views, each; then for each step its
  // function, the number of its arguments, and for each of those a Source and an index, or a constant.
  Chain(const TVMFFIAny* words, int32_t count) : word_(words), end_(words + count) {
    arguments_.resize(static_cast<size_t>(integer()));
    for (View& view : arguments_) view = read_view();
    views_.resize(static_cast<size_t>(integer()));
    for (View& view : views_) view = read_view();
    FI_CHECK(views_.size() <= kMostViews, ValueError, "a chain has at most %zu views; got %zu", kMostViews,
             views_.size());
    while (word_ < end_) read_step();
  }
  Chain(const Chain&) = delete;
  Chain& operator=(const Chain&) = delete;
  ~Chain() {
    for (const Step& step : steps_) TVMFFIObjectDecRef(step.function);
  }

  static int call(void* self, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
    int status = 0;
    const int failed = guarded("chain", [&] { status = static_cast<const Chain*>(self)->run(args, count, result); });
    return failed ? failed : status;
  }

 private:
  static constexpr size_t kMostViews = 32, kMostArguments = 32;
  enum class Source : int64_t { kConstant, kArgument, kView };
  // A tensor at a distance of bytes from argument `base`, which is aligned to `alignment` bytes.
  struct View {
    bool is_none = true;
    int64_t base = 0, offset = 0, alignment = 1;
    DLDataType dtype{};
    int32_t ndim = 0;
    std::vector<int64_t> sizes;  // shape, then strides

    bool is_like(const DLTensor* t) const {
      if (!t || keys_of(t, torch_keys.distance) & (torch_keys.altered | torch_keys.subclass)) return false;
      if (t->ndim != ndim || t->dtype.code != dtype.code || t->dtype.bits != dtype.bits) return false;
      if ((reinterpret_cast<uintptr_t>(t->data) + t->byte_offset) % static_cast<uintptr_t>(alignment)) return false;
      for (int32_t i = 0; i < ndim; ++i)
        if (t->shape[i] != sizes[static_cast<size_t>(i)] ||
            (t->strides && t->shape[i] != 1 && t->strides[i] != sizes[static_cast<size_t>(ndim + i)]))
          return false;
      return true;
    }
  };
  struct Step {
    TVMFFIObjectHandle function;
    std::vector<TVMFFIAny> words;  // constants, or the index in its source
    std::vector<Source> sources;
  };

  const TVMFFIAny& next() {
    FI_CHECK(word_ < end_, ValueError, "the program of a chain is cut off");
    return *word_++;
  }
  int64_t integer() { return Argument<int64_t>::from(next(), "program"); }
  View read_view() {
    View view;
    const int64_t base = integer();  // -1: None
    if (base < 0) return view;
    view.is_none = false;
    view.base = base, view.offset = integer(), view.alignment = integer();
    view.dtype.code = static_cast<uint8_t>(integer());
    view.dtype.bits = static_cast<uint8_t>(integer());
    view.dtype.lanes = 1;
    view.ndim = static_cast<int32_t>(integer());
    for (int32_t i = 0; i < 2 * view.ndim; ++i) view.sizes.push_back(integer());
    return view;
  }
  void read_step() {
    Step step;
    const TVMFFIAny& function = next();
    FI_CHECK(function.type_index == kTVMFFIFunction, TypeError, "a step of a chain must be a function");
    step.function = function.v_obj;
    const int64_t count = integer();
    FI_CHECK(count <= static_cast<int64_t>(kMostArguments), ValueError, "a step has at most %zu arguments; got %lld",
             kMostArguments, static_cast<long long>(count));
    for (int64_t i = 0; i < count; ++i) {
      step.sources.push_back(static_cast<Source>(integer()));
      step.words.push_back(next());
      FI_CHECK(step.words.back().type_index <= kTVMFFIFloat, TypeError, "a constant must be a number or None");
    }
    TVMFFIObjectIncRef(step.function);
    steps_.push_back(std::move(step));
  }

  int run(const TVMFFIAny* args, int32_t count, TVMFFIAny* result) const {
    if (count != static_cast<int32_t>(arguments_.size())) return decline(result, 0), 0;
    for (size_t i = 0; i < arguments_.size(); ++i)
      if (arguments_[i].is_none ? args[i].type_index != kTVMFFINone : !arguments_[i].is_like(as_dltensor(args[i])))
        return decline(result, 0), 0;
    std::array<DLTensor, kMostViews> views;
    for (size_t i = 0; i < views_.size(); ++i) {
      const View& view = views_[i];
      const DLTensor* base = as_dltensor(args[view.base]);
      auto* sizes = const_cast<int64_t*>(view.sizes.data());
      views[i] = {static_cast<char*>(base->data) + view.offset,
                  base->device,
                  view.ndim,
                  view.dtype,
                  sizes,
                  sizes + view.ndim,
                  base->byte_offset};
    }
    std::array<TVMFFIAny, kMostArguments> given;
    for (const Step& step : steps_) {
      for (size_t i = 0; i < step.words.size(); ++i) {
        const TVMFFIAny& word = step.words[i];
        if (step.sources[i] == Source::kConstant) {
          given[i] = word;
        } else if (step.sources[i] == Source::kArgument) {
          given[i] = args[word.v_int64];
        } else {
          given[i].type_index = kTVMFFIDLTensorPtr;
          given[i].zero_padding = 0;
          given[i].v_ptr = &views[static_cast<size_t>(word.v_int64)];
        }
      }
      TVMFFIAny returned{};
      if (const int failed =
              TVMFFIFunctionCall(step.function, given.data(), static_cast<int32_t>(step.words.size()), &returned))
        return failed;
      if (returned.type_index != kTVMFFINone) {
        *result = returned;
        return 0;
      }
    }
    return 0;
  }

  const TVMFFIAny *word_, *end_;
  std::vector<View> arguments_, views_;
  std::vector<Step> steps_;
};

inline int make_chain(const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
  return guarded("chain", [&] { Owned<Chain>(new Chain(args, count)).to_function(Chain::call, result); });
}

}  // namespace fi

#define FI_CHAIN                                                                                  \
  FI_EXPORT int __tvm_ffi_chain(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) { \
    return ::fi::make_chain(args, count, result);                                                 \
  }
