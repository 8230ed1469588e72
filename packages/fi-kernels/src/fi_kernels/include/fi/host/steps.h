// FI_STEPS: exports steps(words...) -> call(workspace, tensors...), which makes the calls of a plan: one after another,
// on the tensors of the call, on constants and on views of them and of scratch.
//
// A call returns None; 0 if a tensor does not have the form that the plan is for, and nothing is computed; or the words
// of a request for which a module knows no kernel, where the steps before it have run. Scratch is a part of the
// workspace, or allocated by torch.
#pragma once
#include <tvm/ffi/extra/c_env_api.h>

#include "fi/host/op.h"

namespace fi {

class Steps {
 public:
  // The words: bytes of scratch; the number of tensors that have a form, each as in the first call; the number of
  // results, which follow them in a call; the number of constants, each; the number of views, for each its base (0:
  // scratch; n: a tensor of the call; then constants), its offset in bytes and a tensor like it; then for each step its
  // function, the number of its values, and for each of those a Source and an index or a constant.
  explicit Steps(const Values& words) : words_(words), scratch_bytes_(integer()), forms_(size()) {
    for (Form& form : forms_) form.read(next());
    count_ = 1 + forms_.size() + size();
    constants_ = std::vector<Form>(size());
    for (Form& constant : constants_) constant.read(next());
    views_ = std::vector<Place>(size());
    FI_CHECK(count_ <= kMost && views_.size() <= kMost, ValueError, "a plan has at most %zu tensors and views; got %zu",
             kMost, std::max(count_, views_.size()));
    for (Place& place : views_) place.base = size(), place.offset = integer(), place.read(next());
    while (at_ < words_.count) read_step();
  }
  Steps(const Steps&) = delete;
  Steps& operator=(const Steps&) = delete;
  ~Steps() {
    for (const Step& step : steps_) TVMFFIObjectDecRef(step.function);
  }

  static int call(void* self, const TVMFFIAny* any, int32_t count, TVMFFIAny* result) {
    int failed = 0;
    const int raised = guarded("plan", [&] { failed = static_cast<const Steps*>(self)->run({any, count}, result); });
    return raised ? raised : failed;
  }

 private:
  static constexpr size_t kMost = 64;
  static constexpr uintptr_t kAlignment = 256, kLowBits = 16;  // of scratch; of tensors, at most
  enum class Source : int64_t { kConstant, kTensor, kView };
  struct Form : KeptTensor {
    bool is_given = false;

    void read(const TVMFFIAny& any) {
      is_given = any.type_index != kTVMFFINone;
      if (is_given) keep(Argument<Tensor>::from(any, "form"));
    }
    // The low bits of an address that kernels ask for.
    static uintptr_t alignment(const DLTensor& t) {
      const uintptr_t address = (reinterpret_cast<uintptr_t>(t.data) + t.byte_offset) | kLowBits;
      return address & -address;
    }
    bool fits(const DLTensor* t) const {
      if (!t || t->ndim != tensor.ndim || t->dtype.code != tensor.dtype.code || t->dtype.bits != tensor.dtype.bits ||
          !is_same(t->device, tensor.device) || alignment(*t) != alignment(tensor))
        return false;
      for (int32_t i = 0; i < t->ndim; ++i)
        if (t->shape[i] != tensor.shape[i] || (t->strides && t->shape[i] != 1 && t->strides[i] != tensor.strides[i]))
          return false;
      return true;
    }
  };
  struct Place : Form {
    size_t base = 0;
    int64_t offset = 0;
  };
  struct Step {
    TVMFFIObjectHandle function;
    std::vector<Source> sources;
    std::vector<TVMFFIAny> words;  // constants, or the index in the source
  };
  // Scratch of one call, in torch's memory.
  struct Memory {
    TVMFFIObjectHandle object = nullptr;
    ~Memory() {
      if (object) TVMFFIObjectDecRef(object);
    }
    void* allocate(int64_t bytes, DLDevice device) {
      DLTensor prototype{nullptr, device, 1, {kDLUInt, 8, 1}, &bytes, nullptr, 0};
      FI_CHECK(TVMFFIEnvTensorAlloc(&prototype, &object) == 0, RuntimeError, "no %lld bytes of scratch",
               static_cast<long long>(bytes));
      TVMFFIAny any{};
      any.type_index = kTVMFFITensor, any.v_obj = static_cast<TVMFFIObject*>(object);
      return as_dltensor(any)->data;
    }
  };

  static bool is_same(DLDevice a, DLDevice b) { return a.device_type == b.device_type && a.device_id == b.device_id; }
  const TVMFFIAny& next() {
    FI_CHECK(at_ < words_.count, ValueError, "the words of a plan are cut off");
    return words_.any[at_++];
  }
  int64_t integer() { return Argument<int64_t>::from(next(), "word"); }
  size_t size() { return static_cast<size_t>(integer()); }
  void read_step() {
    const TVMFFIAny& function = next();
    FI_CHECK(function.type_index == kTVMFFIFunction, TypeError, "a step of a plan must be a function");
    Step step{function.v_obj, {}, {}};
    const size_t count = size();
    FI_CHECK(count <= kMost, ValueError, "a step has at most %zu values; got %zu", kMost, count);
    for (size_t i = 0; i < count; ++i) {
      step.sources.push_back(static_cast<Source>(integer()));
      step.words.push_back(next());
      FI_CHECK(step.words.back().type_index <= kTVMFFIFloat, TypeError, "a constant must be a number or None");
    }
    TVMFFIObjectIncRef(step.function);
    steps_.push_back(std::move(step));
  }

  // The begin of scratch in the workspace; null: it has another form, or not enough bytes.
  void* within(const TVMFFIAny& any, DLDevice device) const {
    const DLTensor* t = as_dltensor(any);
    if (!t || t->ndim != 1 || t->dtype.code != kDLUInt || t->dtype.bits != 8 || (t->strides && t->strides[0] != 1) ||
        !is_same(t->device, device))
      return nullptr;
    char* begin = static_cast<char*>(t->data) + t->byte_offset;
    const auto padding = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(begin) % kAlignment);
    return padding + scratch_bytes_ <= t->shape[0] ? begin + padding : nullptr;
  }

  int run(const Values& given, TVMFFIAny* result) const {
    set_number(result, 0);
    if (static_cast<size_t>(given.count) != count_) return 0;
    std::array<const DLTensor*, kMost> tensors{};
    for (size_t i = 1; i < count_; ++i) tensors[i] = as_dltensor(given.any[i]);
    const DLTensor* const* first = std::find_if(tensors.begin(), tensors.end(), [](auto* t) { return t != nullptr; });
    if (first == tensors.end()) return 0;
    const DLDevice device = (*first)->device;
    for (size_t i = 0; i < forms_.size(); ++i)
      if (forms_[i].is_given ? !forms_[i].fits(tensors[i + 1]) : given.any[i + 1].type_index != kTVMFFINone) return 0;
    Memory memory;
    const bool has_workspace = given.any[0].type_index != kTVMFFINone;
    void* scratch = has_workspace    ? within(given.any[0], device)
                    : scratch_bytes_ ? memory.allocate(scratch_bytes_, device)
                                     : nullptr;
    if (has_workspace && !scratch) return 0;
    std::array<DLTensor, kMost> views;
    for (size_t i = 0; i < views_.size(); ++i) {
      const size_t base = views_[i].base;
      const DLTensor* of = base == 0 ? nullptr : base < count_ ? tensors[base] : &constants_[base - count_].tensor;
      char* begin = of ? static_cast<char*>(of->data) + of->byte_offset : static_cast<char*>(scratch);
      views[i] = views_[i].tensor;
      views[i].data = begin + views_[i].offset, views[i].byte_offset = 0;
    }
    std::array<TVMFFIAny, kMost> values;
    for (const Step& step : steps_) {
      for (size_t i = 0; i < step.words.size(); ++i) {
        values[i] = step.words[i];
        if (step.sources[i] == Source::kTensor) {
          values[i] = given.any[step.words[i].v_int64];
        } else if (step.sources[i] == Source::kView) {
          values[i].type_index = kTVMFFIDLTensorPtr;
          values[i].v_ptr = &views[static_cast<size_t>(step.words[i].v_int64)];
        }
      }
      TVMFFIAny found{};
      if (const int failed =
              TVMFFIFunctionCall(step.function, values.data(), static_cast<int32_t>(step.words.size()), &found))
        return failed;
      if (found.type_index != kTVMFFIInt) {  // the words of a request
        *result = found;
        return 0;
      }
    }
    *result = TVMFFIAny{};
    return 0;
  }

  Values words_;
  int32_t at_ = 0;
  int64_t scratch_bytes_;
  size_t count_ = 0;  // values of a call
  std::vector<Form> forms_;
  std::vector<Form> constants_;
  std::vector<Place> views_;
  std::vector<Step> steps_;
};

inline void make_steps(const Values& words, TVMFFIAny* result) {
  Owned<Steps>(new Steps(words)).to_function(Steps::call, result);
}

}  // namespace fi

#define FI_STEPS FI_EXPORT(steps, "steps", ::fi::make_steps)
