// FI_OP(entry, request_of): exports a host entry to Python, which calls the module itself; the module knows the
// kernels.
//
//   <Op>Request request_of(const <Op>Args&)                    what chooses the kernel of a call: dtypes, sizes, flags
//   void entry(const Kernel&, const <Op>Args&)                 checks, shapes the launch, launches
//
// An entry whose calls may have values behind the declared ones has a third parameter, which is made of `Values`.
// request_of runs before any check. An op whose requests have no fields has none.
//
// A module exports call(values...) -> the number of the choice that ran, or the words of a request that no kernel is
// known for; request(values...) -> these words; bind(name, checks[, ...]) -> a kernel; learn(choice, kernel, words...),
// what it serves; run(kernel, values..., extras...), past all choices -> the launches, if it is a rehearsal;
// plan(choice, planned values...) -> a call of the rest, which learns and is called as the module; and forget().
#pragma once
#include "fi/host/arguments.h"
#include "fi/host/table.h"

namespace fi {

// The switch of batch invariance, a number of Python's: while it is on, the bits of a row depend on that row alone.
inline int64_t off = 0, *invariance = &off;
inline bool batch_invariant() { return __atomic_load_n(invariance, __ATOMIC_RELAXED) != 0; }
inline void follow(const Values& v, TVMFFIAny*) { invariance = reinterpret_cast<int64_t*>(v.get<int64_t>(0, "at")); }

inline int64_t word(DType d) { return d.code << 8 | d.bits; }
template <class T>
int64_t word(T value) {
  return static_cast<int64_t>(value);
}

[[gnu::noinline, gnu::cold]] inline void set_text(TVMFFIAny* result, const std::string& text) {
  const TVMFFIByteArray bytes{text.data(), text.size()};
  FI_CHECK(TVMFFIStringFromByteArray(&bytes, result) == 0, RuntimeError, "TVMFFIStringFromByteArray failed");
}

// A tensor of a plan: its caller keeps the memory, the plan its shape. It stays in its place.
struct KeptTensor {
  DLTensor tensor{};
  std::array<int64_t, 16> sizes;

  Tensor keep(const Tensor& t) {
    FI_CHECK(t.ndim() <= 8, ValueError, "%s has too many dimensions", t.name());
    tensor = *t.dlpack();
    tensor.shape = sizes.data(), tensor.strides = sizes.data() + t.ndim();
    for (int i = 0; i < t.ndim(); ++i) tensor.shape[i] = t.size(i), tensor.strides[i] = t.stride(i);
    return {&tensor, t.name()};
  }
};

template <class Args, auto kEntry, auto... kRequestOf>
class Module {
  using Plan = typename Args::Plan;
  static constexpr bool kTakesMore = std::is_invocable_v<decltype(kEntry), const Kernel&, const Args&, const Values&>;

  static auto words_of(const Args& a) {
    const DLDevice device = a.first().device();
    const int64_t place = int64_t{device.device_type} << 32 | device.device_id;
    if constexpr (sizeof...(kRequestOf) == 0)
      return std::array<int64_t, 3>{place, a.backend_number(), batch_invariant()};
    else
      return (kRequestOf(a), ...).words(place, a.backend_number(), batch_invariant());
  }
  using Words = decltype(words_of(std::declval<const Args&>()));
  using Known = Table<Words>;
  static inline Known& known = *new Known;  // calls may outlive the end of the program

  static void enter(const Kernel& kernel, const Args& a, const Values& more) {
    if constexpr (kTakesMore)
      kEntry(kernel, a, more);
    else
      (void)more, kEntry(kernel, a);
  }
  static void expect(const Values& v, int32_t count, bool more = false) {
    FI_CHECK(v.count == count || (more && v.count > count), TypeError, "expects %d arguments, got %d", count, v.count);
  }
  static Args arguments(const Values& v) {
    expect(v, kCount);
    return Args::from(Plan::from(v), v.from(Plan::kCount));
  }
  static void find_and_enter(const Args& a, const Known& table, TVMFFIAny* result) {
    a.check();
    const Words words = words_of(a);
    const auto* node = table.find(words);
    if (!node) return set_text(result, text_of(words));
    enter(*node->kernel, a, {nullptr, 0});
    set(result, kTVMFFIInt, node->choice);
  }
  [[gnu::noinline, gnu::cold]] static std::string text_of(const Words& words) {
    std::string text;
    for (int64_t word : words) text += std::to_string(word) + " ";
    return text;
  }
  // A choice, a kernel and the request that they serve.
  static void add(const Values& v, Known& table) {
    Words words;
    expect(v, 2 + static_cast<int32_t>(words.size()));
    for (size_t i = 0; i < words.size(); ++i) words[i] = v.get<int64_t>(2 + static_cast<int32_t>(i), "word");
    table.add(words, v.get<const Kernel*>(1, "kernel"), v.get<int64_t>(0, "choice"));
  }

 public:
  static constexpr const char* kOp = Args::kOp;
  static constexpr int32_t kCount = Plan::kCount + Args::kCount;

  static void call(const Values& v, TVMFFIAny* result) { find_and_enter(arguments(v), known, result); }
  static void request(const Values& v, TVMFFIAny* result) { set_text(result, text_of(words_of(arguments(v)))); }
  static void run(const Values& v, TVMFFIAny* result) {
    expect(v, 1 + kCount, kTakesMore);
    const Kernel& kernel = *v.get<const Kernel*>(0, "kernel");
    const Args a = arguments({v.any + 1, kCount});
    FI_CHECK(kernel.serves(a.first().device()), ValueError,
             "the kernel was planned for another device than that of %s, %s", a.first().name(),
             a.first().device_str().c_str());
    std::string& launches = Kernel::rehearsed();
    launches.clear();
    enter(kernel, a, v.from(1 + kCount));
    if (!launches.empty()) set_text(result, launches);
  }
  static void learn(const Values& v, TVMFFIAny*) { add(v, known); }
  static void forget(const Values&, TVMFFIAny*) { Known::forget(); }

  // A call whose planned values are fixed. It starts with the kernel of a choice, or knows none (-1); a request that it
  // does not know comes back to Python, which looks whether it fits the plan.
  class Planned {
   public:
    explicit Planned(const Values& v) : plan_(Plan::from(v.from(1))) {
      if (const auto* node = known.of_choice(v.get<int64_t>(0, "choice")))
        known_.add(node->words, node->kernel, node->choice);
      plan_.each_tensor([this](auto& t) {
        if (t) t = kept_.at(used_++).keep(t);
      });
    }
    static const char* label() { return kOp; }
    void operator()(const Values& v, TVMFFIAny* result) {
      if (v.count > 0 && v.any[0].type_index == kTVMFFIInt) return add(v, known_);  // no op begins with a number
      expect(v, Args::kCount);
      find_and_enter(Args::from(plan_, v), known_, result);
    }

   private:
    Plan plan_;
    std::array<KeptTensor, 12> kept_;
    size_t used_ = 0;
    Known known_;
  };
  static void plan(const Values& v, TVMFFIAny* result) {
    expect(v, 1 + Plan::kCount);
    if constexpr (Plan::kCount > 0) to_function(new Planned(v), result);
  }
};

template <class Args, class... More>
Args args_of(void (*)(const Kernel&, const Args&, const More&...));

}  // namespace fi

#define FI_OP(entry, ...)                                                                \
  using FiModule = ::fi::Module<decltype(::fi::args_of(&entry)), &entry, ##__VA_ARGS__>; \
  FI_EXPORT(call, FiModule::kOp, FiModule::call)                                         \
  FI_EXPORT(request, FiModule::kOp, FiModule::request)                                   \
  FI_EXPORT(run, FiModule::kOp, FiModule::run)                                           \
  FI_EXPORT(bind, "bind", ::fi::bind)                                                    \
  FI_EXPORT(follow, "follow", ::fi::follow)                                              \
  FI_EXPORT(learn, "learn", FiModule::learn)                                             \
  FI_EXPORT(forget, "forget", FiModule::forget)                                          \
  FI_EXPORT(plan, "plan", FiModule::plan)
