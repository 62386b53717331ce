// SPDX-License-Identifier: Apache-2.0
// Memory for results of kernels, kept when their tensors are freed, for the next ones of like size. glibc gives large
// blocks back to the operating system, whose new pages take longer to be written first than many a convolution.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <list>
#include <mutex>

namespace convgrad {

constexpr size_t kPooledBytes = size_t{1} << 18;  // from which on blocks are kept
constexpr size_t kPoolAlignment = 64;

class Pool final : public c10::Allocator {
 public:
  // It is never destroyed: tensors may outlive any static object. A fork waits for its lock, so that the child has no
  // lock that another thread held, and no list that was being changed.
  static Pool& Get() {
    static Pool* pool = [] {
      pthread_atfork([] { Get().mutex_.lock(); }, [] { Get().mutex_.unlock(); }, [] { Get().mutex_.unlock(); });
      return new Pool;
    }();
    return *pool;
  }

  // Bytes of free blocks that are kept; those that are more are freed.
  void Limit(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    limit_ = bytes;
    Trim(0);
  }

  size_t kept() {
    std::lock_guard<std::mutex> lock(mutex_);
    return kept_;
  }

  c10::DataPtr allocate(size_t bytes) override {
    if (bytes < kPooledBytes || limit_ == 0) return c10::GetCPUAllocator()->allocate(bytes);
    Block* block = Take(bytes);
    if (block == nullptr) {
      block = new Block{nullptr, (bytes + kPoolAlignment - 1) / kPoolAlignment * kPoolAlignment};
      block->memory = std::aligned_alloc(kPoolAlignment, block->bytes);
      if (block->memory == nullptr) {
        delete block;
        return c10::GetCPUAllocator()->allocate(bytes);  // which raises
      }
    }
    return {block->memory, block, &Give, c10::Device(c10::DeviceType::CPU)};
  }

  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  struct Block {
    void* memory;
    size_t bytes;
  };

  // The smallest free block that is not much too large, or null. A call waits for no other thread: who has the lock
  // may be giving much memory back to the operating system.
  Block* Take(size_t bytes) {
    std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (!lock) return nullptr;
    auto best = free_.end();
    for (auto each = free_.begin(); each != free_.end(); ++each) {
      const size_t found = (*each)->bytes;
      if (found >= bytes && found <= bytes + bytes / 8 && (best == free_.end() || found < (*best)->bytes)) best = each;
    }
    if (best == free_.end()) return nullptr;
    Block* block = *best;
    kept_ -= block->bytes;
    free_.erase(best);
    return block;
  }

  static void Give(void* context) {
    Block* block = static_cast<Block*>(context);
    Pool& pool = Get();
    std::unique_lock<std::mutex> lock(pool.mutex_, std::try_to_lock);
    if (!lock || block->bytes > pool.limit_) {
      Free(block);
      return;
    }
    pool.Trim(block->bytes);
    pool.free_.push_front(block);
    pool.kept_ += block->bytes;
  }

  // Free the blocks that were given back first until there is room.
  void Trim(size_t room) {
    while (!free_.empty() && kept_ + room > limit_) {
      kept_ -= free_.back()->bytes;
      Free(free_.back());
      free_.pop_back();
    }
  }

  static void Free(Block* block) {
    std::free(block->memory);
    delete block;
  }

  std::mutex mutex_;
  std::list<Block*> free_;  // the one given back last is the first
  size_t kept_ = 0;
  std::atomic<size_t> limit_{0};
};

}  // namespace convgrad
