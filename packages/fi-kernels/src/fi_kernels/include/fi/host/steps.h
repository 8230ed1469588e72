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

// What tvm-ffi counts references to.
using Object = std::unique_ptr<void, std::integral_constant<decltype(&TVMFFIObjectDecRef), &TVMFFIObjectDecRef>>;

inline uintptr_t address(const DLTensor& t) { return reinterpret_cast<uintptr_t>(t.data) + t.byte_offset; }

// The begin of so many bytes of torch's, for what is launched until `memory` ends: then they are for later calls.
inline uintptr_t allocate(DLDevice device, int64_t bytes, Object& memory) {
  DLTensor wanted{nullptr, device, 1, {kDLUInt, 8, 1}, &bytes, nullptr, 0};
  TVMFFIObjectHandle object = nullptr;
  if (TVMFFIEnvTensorAlloc(&wanted, &object) != 0) throw Raised();
  memory.reset(object);
  return address(*content<DLTensor>(static_cast<TVMFFIObject*>(object)));
}

class Steps {
 public:
  // The words: how many tensors of a call must have their form; the number of all forms, and each: scratch as bytes,
  // then the tensors of a call; then for each step its function, the number of its values, and each. All tensors lie in
  // one address space, where the forms ascend and leave room for their views.
  explicit Steps(const Values& words) {
    int32_t at = 0;
    const auto next = [&] { return words.get<TVMFFIAny>(at++, "a word"); };
    const auto size = [&] { return static_cast<size_t>(words.get<int64_t>(at++, "a word")); };
    checked_ = 1 + size();
    forms_ = std::vector<Form>(size());
    FI_CHECK(forms_.size() <= kMost, ValueError, "a plan has at most %zu tensors; got %zu", kMost, forms_.size());
    for (Form& form : forms_) form.read(next());
    while (at < words.count) {
      const TVMFFIAny function = next();
      FI_CHECK(function.type_index == kTVMFFIFunction, TypeError, "a step of a plan must be a function");
      TVMFFIObjectIncRef(function.v_obj);
      steps_.push_back({Object(function.v_obj), std::vector<Value>(size())});
      std::vector<Value>& values = steps_.back().values;
      FI_CHECK(values.size() <= kMost, ValueError, "a step has at most %zu values; got %zu", kMost, values.size());
      for (Value& value : values) value.read(next(), forms_);
    }
  }

  static const char* label() { return "plan"; }
  void operator()(const Values& given, TVMFFIAny* result) const {
    set(result, kTVMFFIInt, 0);
    if (static_cast<size_t>(given.count) != forms_.size()) return;
    std::array<const DLTensor*, kMost> tensors{};
    for (size_t i = 1; i < forms_.size(); ++i) tensors[i] = as_dltensor(given.any[i]);
    const DLTensor* const* first = std::find_if(tensors.begin(), tensors.end(), [](auto* t) { return t != nullptr; });
    if (first == tensors.end()) return;
    const DLDevice device = (*first)->device;
    for (size_t i = 1; i < checked_; ++i)
      if (!forms_[i].fits(tensors[i], device)) return;
    std::array<uintptr_t, kMost> begins{};
    Object memory;
    begins[0] = scratch(given.any[0], device, memory);
    if (!begins[0]) return;
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
      const auto count = static_cast<int32_t>(step.values.size());
      TVMFFIAny found{};
      if (TVMFFIFunctionCall(step.function.get(), values.data(), count, &found)) throw Raised();
      if (found.type_index != kTVMFFIInt) {  // the words of a request
        *result = found;
        return;
      }
    }
    *result = TVMFFIAny{};
  }

 private:
  static constexpr size_t kMost = 64;
  static constexpr uintptr_t kAlignment = 256, kLowBits = 16;  // of scratch; of tensors, at most
  // The low bits of an address that kernels ask for.
  static uintptr_t alignment(const DLTensor& t) { return (address(t) | kLowBits) & -(address(t) | kLowBits); }
  static bool is_same(DLDevice a, DLDevice b) { return a.device_type == b.device_type && a.device_id == b.device_id; }

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

    void read(const TVMFFIAny& any, const std::vector<Form>& forms) {
      constant = any;
      if (any.type_index <= kTVMFFIFloat) return;
      Form::read(any);
      const uintptr_t place = address(tensor);  // 0: no elements, and so no place
      for (size_t i = 0; i < forms.size(); ++i)
        if (const uintptr_t form = address(forms[i].tensor); form && form <= place) base = i, offset = place - form;
    }
  };
  struct Step {
    Object function;
    std::vector<Value> values;
  };

  // The begin of scratch, which is a part of the workspace, or in memory of torch for one call; 0: the workspace has
  // another form, or not enough bytes.
  uintptr_t scratch(const TVMFFIAny& any, DLDevice device, Object& memory) const {
    const int64_t bytes = forms_[0].tensor.shape[0];
    if (any.type_index == kTVMFFINone) return bytes ? allocate(device, bytes, memory) : kAlignment;
    const DLTensor* t = as_dltensor(any);
    if (!t || t->ndim != 1 || t->dtype.code != kDLUInt || t->dtype.bits != 8 || (t->strides && t->strides[0] != 1) ||
        !is_same(t->device, device))
      return 0;
    const uintptr_t padding = -address(*t) % kAlignment;
    return static_cast<int64_t>(padding) + bytes <= t->shape[0] ? address(*t) + padding : 0;
  }

  size_t checked_ = 0;
  std::vector<Form> forms_;
  std::vector<Step> steps_;
};

inline void make_steps(const Values& words, TVMFFIAny* result) { to_function(new Steps(words), result); }

}  // namespace fi

#define FI_STEPS FI_EXPORT(steps, "steps", ::fi::make_steps)
