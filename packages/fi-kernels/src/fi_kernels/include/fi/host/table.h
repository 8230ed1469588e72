// Kernels by the words of a request. Readers take no lock, so nodes live as long as their table: another thread may
// read them.
#pragma once
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace fi {

struct Kernel;

template <class Words>
class Table {
 public:
  struct Node {
    Words words;
    const Kernel* kernel;
    int64_t choice;      // the number by which Python knows what it has chosen for the request
    int64_t generation;  // nodes of earlier ones are not found
    const Node* next;
  };

  ~Table() {
    for (auto& head : heads_)
      for (const Node* node = head.load(std::memory_order_acquire); node;) delete std::exchange(node, node->next);
  }

  // All tables of these words forget what they know.
  static void forget() { generation.fetch_add(1); }

  const Node* find(const Words& words) const {
    const Node* node = heads_[bucket(words)].load(std::memory_order_acquire);
    while (node && !(node->words == words && is_known(*node))) node = node->next;
    return node;
  }
  const Node* of_choice(int64_t choice) const {
    for (const auto& head : heads_)
      for (const Node* node = head.load(std::memory_order_acquire); node; node = node->next)
        if (node->choice == choice && is_known(*node)) return node;
    return nullptr;
  }
  void add(const Words& words, const Kernel* kernel, int64_t choice) {
    std::atomic<const Node*>& head = heads_[bucket(words)];
    auto* node = new Node{words, kernel, choice, generation.load(), head.load(std::memory_order_relaxed)};
    while (!head.compare_exchange_weak(node->next, node, std::memory_order_release)) {
    }
  }

 private:
  static inline std::atomic<int64_t> generation{0};
  static bool is_known(const Node& node) { return node.generation == generation.load(std::memory_order_relaxed); }
  static size_t bucket(const Words& words) {
    uint64_t hash = 0;
    for (int64_t word : words) hash = (hash << 5 | hash >> 59) ^ static_cast<uint64_t>(word);
    return hash * 0x9e3779b97f4a7c15u >> 59;
  }
  std::array<std::atomic<const Node*>, 32> heads_{};
};

}  // namespace fi
