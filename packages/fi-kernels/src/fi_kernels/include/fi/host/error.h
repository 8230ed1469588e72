// Errors thrown inside host entries; they become Python exceptions at the C boundary and never cross it.
#pragma once
#include <cstdarg>
#include <cstdio>
#include <exception>
#include <string>

namespace fi {

// kind is the Python class raised: ValueError and TypeError for a caller's mistake, RuntimeError for ours or the
// driver's.
struct Error : std::exception {
  Error(const char* kind, const char* text) : kind(kind), message(text) {}
  const char* what() const noexcept override { return message.c_str(); }
  const char* kind;
  std::string message;
};

// Out of line, so that a check costs its call site one branch and little code (compile time is start-up time here).
[[noreturn, gnu::noinline, gnu::cold, gnu::format(printf, 2, 3)]] inline void raise(const char* kind,
                                                                                    const char* pattern, ...) {
  char buffer[1024];
  va_list list;
  va_start(list, pattern);
  vsnprintf(buffer, sizeof buffer, pattern, list);
  va_end(list);
  throw Error(kind, buffer);
}

}  // namespace fi

#define FI_CHECK(condition, Kind, ...)                                      \
  do {                                                                      \
    if (__builtin_expect(!(condition), 0)) ::fi::raise(#Kind, __VA_ARGS__); \
  } while (0)
