// FI_FUNCTION(entry, "out", "input"): exports `void entry(const Kernel&, Tensor out, Tensor input)` of a user's module.
//
// The module exports bind(name, checks[, image, capability, device, entries...]) -> a function that owns the kernel.
#pragma once
#include "fi/host/arguments.h"

namespace fi {

template <class... A, size_t... I>
void call(void (*entry)(const Kernel&, A...), const Kernel& kernel, const Values& v, const char* const* names,
          size_t name_count, std::index_sequence<I...>) {
  FI_CHECK(v.count == static_cast<int32_t>(sizeof...(A)) && name_count == sizeof...(A), TypeError,
           "expects %zu arguments (%zu named), got %d", sizeof...(A), name_count, v.count);
  entry(kernel, v.get<A>(I, names[I])...);
}
template <class... A>
auto indices(void (*)(const Kernel&, A...)) {
  return std::index_sequence_for<A...>{};
}

template <TVMFFISafeCallType kCall>
void bind_function(const Values& v, TVMFFIAny* result) {
  to_function(new Kernel(v), kCall, result);
}

}  // namespace fi

#define FI_FUNCTION(entry, ...)                                                                 \
  static int fi_call(void* self, const TVMFFIAny* any, int32_t count, TVMFFIAny*) {             \
    static const char* const names[] = {__VA_ARGS__};                                           \
    auto& kernel = *static_cast<const ::fi::Kernel*>(self);                                     \
    return ::fi::guarded(kernel.spec.c_str(), [&] {                                             \
      ::fi::call(&entry, kernel, {any, count}, names, std::size(names), ::fi::indices(&entry)); \
    });                                                                                         \
  }                                                                                             \
  FI_EXPORT(bind, "bind", ::fi::bind_function<fi_call>)
