// FI_FUNCTION(entry, "out", "input"): exports `void entry(const Kernel&, Tensor out, Tensor input)` of a user's module.
//
// The module exports bind(name, checks[, image, capability, device, entries...]) -> a kernel; and run(kernel,
// values...).
#pragma once
#include <tuple>

#include "fi/host/arguments.h"

namespace fi {

template <class... A, size_t kNames>
void run_function(void (*entry)(const Kernel&, A...), const char* const (&names)[kNames], const Values& v) {
  static_assert(kNames == sizeof...(A), "each argument has a name");
  FI_CHECK(v.count == 1 + static_cast<int32_t>(kNames), TypeError, "expects %zu arguments, got %d", kNames,
           v.count - 1);
  int32_t at = 0;
  const auto next = [&](auto as) { return ++at, read(as, v.any[at], names[at - 1]); };
  std::apply(entry, std::tuple<const Kernel&, A...>{*v.get<const Kernel*>(0, "kernel"), next(As<A>())...});
}

}  // namespace fi

#define FI_FUNCTION(entry, ...)                                                                           \
  static void fi_run(const ::fi::Values& v, TVMFFIAny*) { ::fi::run_function(&entry, {__VA_ARGS__}, v); } \
  FI_EXPORT(run, #entry, fi_run)                                                                          \
  FI_EXPORT(bind, "bind", ::fi::bind)
