// Kernels by the words of a request. Readers take no lock, so `clear`, which is for tests, keeps the nodes: another
// thread may read them.
#pragma once
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace fi {

struct Kernel;

template <class Words, size_t kChains>
class Table {
 public:
  struct Node {
    Words words;
    const Kernel* kernel;
    int64_t choice;  // the number by which Python knows what it has chosen for the request
    const Node* next;
  };

  Table() = default;
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;
  ~Table() {
    for (auto& head : heads_)
      for (const Node* node = head.load(std::memory_order_acquire); node;) delete std::exchange(node, node->next);
  }

  const Node* find(const Words& words) const {
    const Node* node = heads_[chain(words)].load(std::memory_order_acquire);
    while (node && node->words != words) node = node->next;
    return node;
  }
  const Node* of_choice(int64_t choice) const {
    for (const auto& head : heads_)
      for (const Node* node = head.load(std::memory_order_acquire); node; node = node->next)
        if (node->choice == choice) return node;
    return nullptr;
  }
  void add(const Words& words, const Kernel* kernel, int64_t choice) {
    std::atomic<const Node*>& head = heads_[chain(words)];
    auto* node = new Node{words, kernel, choice, head.load(std::memory_order_relaxed)};
    while (!head.compare_exchange_weak(node->next, node, std::memory_order_release)) {
    }
  }
  void clear() {
    for (auto& head : heads_) head.store(nullptr, std::memory_order_release);
  }

 private:
  static size_t chain(const Words& words) {
    uint64_t hash = 0;
    for (int64_t word : words) hash = (hash ^ static_cast<uint64_t>(word)) * 0x9e3779b97f4a7c15u, hash ^= hash >> 29;
    return hash % kChains;
  }
  std::array<std::atomic<const Node*>, kChains> heads_{};
};

}  // namespace fi
