// FI_STEPS: exports steps(words...) -> call(workspace, tensors...), which makes the calls of a plan: one after another,
// on views of scratch and of the tensors of the call.
//
// A call returns None; 0 if a tensor does not have the form that the plan is for, and nothing is computed; or the words
// of a request for which a module knows no kernel, where the steps before it have run. Scratch is a part of the
// workspace, or allocated by torch.
#pragma once
#include <tvm/ffi/extra/c_env_api.h>

#include <memory>

#include "fi/host/op.h"

namespace fi {

class Steps {
 public:
  // The words: how many tensors of a call must have their form; the number of all forms, and each: scratch as bytes,
  // then the tensors of a call; then for each step its function, the number of its values, and each. All tensors lie in
  // one address space, where the forms ascend and leave room for their views.
  explicit Steps(const Values& words) : words_(words), checked_(1 + size()), forms_(size()) {
    FI_CHECK(forms_.size() <= kMost, ValueError, "a plan has at most %zu tensors; got %zu", kMost, forms_.size());
    for (Form& form : forms_) form.read(next());
    while (at_ < words_.count) read_step();
  }

  static int call(void* self, const TVMFFIAny* any, int32_t count, TVMFFIAny* result) {
    int failed = 0;
    const int raised = guarded("plan", [&] { failed = static_cast<const Steps*>(self)->run({any, count}, result); });
    return raised ? raised : failed;
  }

 private:
  static constexpr size_t kMost = 64;
  static constexpr uintptr_t kAlignment = 256, kLowBits = 16;  // of scratch; of tensors, at most
  static uintptr_t address(const DLTensor& t) { return reinterpret_cast<uintptr_t>(t.data) + t.byte_offset; }
  // The low bits of an address that kernels ask for.
  static uintptr_t alignment(const DLTensor& t) { return (address(t) | kLowBits) & -(address(t) | kLowBits); }
  static bool is_same(DLDevice a, DLDevice b) { return a.device_type == b.device_type && a.device_id == b.device_id; }

  // What tvm-ffi counts references to.
  struct Release {
    void operator()(void* object) const { TVMFFIObjectDecRef(object); }
  };
  using Object = std::unique_ptr<void, Release>;

  struct Form : KeptTensor {
    bool is_given() const { return tensor.shape != nullptr; }
    void read(const TVMFFIAny& any) {
      if (any.type_index != kTVMFFINone) keep(fi::read(As<Tensor>(), any, "form"));
    }
    bool fits(const DLTensor* t, DLDevice device) const {
      if (!t || !is_given()) return !t && !is_given();
      if (t->ndim != tensor.ndim || t->dtype.code != tensor.dtype.code || t->dtype.bits != tensor.dtype.bits ||
          !is_same(t->device, device) || alignment(*t) != alignment(tensor))
        return false;
      for (int32_t i = 0; i < t->ndim; ++i)
        if (t->shape[i] != tensor.shape[i] || (t->strides && t->shape[i] != 1 && t->strides[i] != tensor.strides[i]))
          return false;
      return true;
    }
  };
  // A number or None, or a view at an offset in a tensor of the call.
  struct Value : Form {
    TVMFFIAny constant{};
    size_t base = 0;
    uintptr_t offset = 0;
  };
  struct Step {
    Object function;
    std::vector<Value> values;
  };

  const TVMFFIAny& next() {
    FI_CHECK(at_ < words_.count, ValueError, "the words of a plan are cut off");
    return words_.any[at_++];
  }
  size_t size() { return static_cast<size_t>(fi::read(As<int64_t>(), next(), "word")); }
  void read_step() {
    const TVMFFIAny& function = next();
    FI_CHECK(function.type_index == kTVMFFIFunction, TypeError, "a step of a plan must be a function");
    TVMFFIObjectIncRef(function.v_obj);
    Step step{Object(function.v_obj), std::vector<Value>(size())};
    FI_CHECK(step.values.size() <= kMost, ValueError, "a step has at most %zu values; got %zu", kMost,
             step.values.size());
    for (Value& value : step.values) {
      const TVMFFIAny& any = next();
      value.constant = any;
      if (any.type_index <= kTVMFFIFloat) continue;
      value.read(any);
      const uintptr_t place = address(value.tensor);  // 0: no elements, and so no place
      for (size_t i = 0; i < forms_.size(); ++i)
        if (const uintptr_t form = address(forms_[i].tensor); form && form <= place)
          value.base = i, value.offset = place - form;
    }
    steps_.push_back(std::move(step));
  }

  // The begin of scratch, which is a part of the workspace, or in memory of torch for one call; 0: the workspace has
  // another form, or not enough bytes.
  uintptr_t scratch(const TVMFFIAny& any, DLDevice device, Object& memory) const {
    int64_t bytes = forms_[0].tensor.shape[0];
    if (any.type_index == kTVMFFINone && bytes == 0) return kAlignment;
    if (any.type_index == kTVMFFINone) {
      DLTensor prototype{nullptr, device, 1, {kDLUInt, 8, 1}, &bytes, nullptr, 0};
      TVMFFIObjectHandle object = nullptr;
      FI_CHECK(TVMFFIEnvTensorAlloc(&prototype, &object) == 0, RuntimeError, "no %lld bytes of scratch",
               static_cast<long long>(bytes));
      memory.reset(object);
      return address(*content<DLTensor>(static_cast<TVMFFIObject*>(object)));
    }
    const DLTensor* t = as_dltensor(any);
    if (!t || t->ndim != 1 || t->dtype.code != kDLUInt || t->dtype.bits != 8 || (t->strides && t->strides[0] != 1) ||
        !is_same(t->device, device))
      return 0;
    const uintptr_t padding = -address(*t) % kAlignment;
    return static_cast<int64_t>(padding) + bytes <= t->shape[0] ? address(*t) + padding : 0;
  }

  int run(const Values& given, TVMFFIAny* result) const {
    set_number(result, 0);
    if (static_cast<size_t>(given.count) != forms_.size()) return 0;
    std::array<const DLTensor*, kMost> tensors{};
    for (size_t i = 1; i < forms_.size(); ++i) tensors[i] = as_dltensor(given.any[i]);
    const DLTensor* const* first = std::find_if(tensors.begin(), tensors.end(), [](auto* t) { return t != nullptr; });
    if (first == tensors.end()) return 0;
    const DLDevice device = (*first)->device;
    for (size_t i = 1; i < checked_; ++i)
      if (!forms_[i].fits(tensors[i], device)) return 0;
    std::array<uintptr_t, kMost> begins{};
    Object memory;
    begins[0] = scratch(given.any[0], device, memory);
    if (!begins[0]) return 0;
    for (size_t i = 1; i < forms_.size(); ++i) begins[i] = tensors[i] ? address(*tensors[i]) : 0;
    std::array<DLTensor, kMost> views;
    std::array<TVMFFIAny, kMost> values;
    for (const Step& step : steps_) {
      for (size_t i = 0; i < step.values.size(); ++i) {
        const Value& value = step.values[i];
        values[i] = value.constant;
        if (!value.is_given()) continue;
        views[i] = value.tensor;
        views[i].data = reinterpret_cast<void*>(begins[value.base] + value.offset);
        views[i].device = device, views[i].byte_offset = 0;
        values[i].type_index = kTVMFFIDLTensorPtr, values[i].v_ptr = &views[i];
      }
      TVMFFIAny found{};
      if (const int failed =
              TVMFFIFunctionCall(step.function.get(), values.data(), static_cast<int32_t>(step.values.size()), &found))
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
  size_t checked_;
  std::vector<Form> forms_;
  std::vector<Step> steps_;
};

inline void make_steps(const Values& words, TVMFFIAny* result) { to_function(new Steps(words), Steps::call, result); }

}  // namespace fi

#define FI_STEPS FI_EXPORT(steps, "steps", ::fi::make_steps)
