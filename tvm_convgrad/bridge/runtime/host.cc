// SPDX-License-Identifier: Apache-2.0
// What a compiled kernel calls, in a process without TVM: parallel loops on the OpenMP pool of the process, and scratch
// memory. It is compiled without OpenMP: the functions of the pool that PyTorch uses are given to convgrad_use_pool, as
// linking OpenMP could bring a second pool into the process.

#include <cstdint>
#include <cstdlib>
#include <vector>

namespace {

// The layouts of TVM-FFI's and DLPack's structures, version 1; kernels read no others.
struct Tensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
struct Any {
  int32_t type;
  uint32_t padding;
  void* value;
};
constexpr int32_t kTensorPointer = 7;
constexpr int kMostTensors = 4;
constexpr size_t kAlignment = 64;
constexpr size_t kMostFreeBlocks = 4;

using Packed = int (*)(void*, const Any*, int32_t, Any*);

struct Group {
  void* sync;
  int32_t tasks;
};
using Task = int (*)(int, Group*, void*);

void (*fork_join)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
int (*thread_number)() = nullptr;
int (*thread_count)() = nullptr;
int (*in_parallel)() = nullptr;

thread_local int wanted_threads = 1;

struct Loop {
  Task task;
  void* data;
  Group group;
  int status;
};

void RunTasks(void* argument) {
  Loop* loop = static_cast<Loop*>(argument);
  // The pool may give fewer threads than were asked for.
  for (int n = thread_number(); n < loop->group.tasks; n += thread_count()) {
    if (int status = loop->task(n, &loop->group, loop->data)) __atomic_store_n(&loop->status, status, __ATOMIC_RELAXED);
  }
}

// Memory that kernels have given back, kept by their thread: fresh pages cost more than short kernels take.
struct FreeBlocks {
  struct Block {
    void* memory;
    size_t bytes;
  };
  std::vector<Block> free, used;

  void* Take(size_t bytes) {
    size_t best = free.size();
    for (size_t i = 0; i < free.size(); ++i) {
      if (free[i].bytes >= bytes && (best == free.size() || free[i].bytes < free[best].bytes)) best = i;
    }
    Block block{nullptr, (bytes + kAlignment - 1) / kAlignment * kAlignment};
    if (best < free.size()) {
      block = free[best];
      free.erase(free.begin() + best);
    } else {
      block.memory = std::aligned_alloc(kAlignment, block.bytes ? block.bytes : kAlignment);
      if (block.memory == nullptr) return nullptr;
    }
    used.push_back(block);
    return block.memory;
  }

  int Give(void* memory) {
    for (size_t i = used.size(); i-- > 0;) {
      if (used[i].memory != memory) continue;
      free.push_back(used[i]);
      used.erase(used.begin() + i);
      if (free.size() > kMostFreeBlocks) {
        size_t least = 0;
        for (size_t j = 1; j < free.size(); ++j) {
          if (free[j].bytes < free[least].bytes) least = j;
        }
        std::free(free[least].memory);
        free.erase(free.begin() + least);
      }
      return 0;
    }
    return -1;
  }

  ~FreeBlocks() {
    for (const Block& block : free) std::free(block.memory);
  }
};

thread_local FreeBlocks blocks;

}  // namespace

extern "C" {

void convgrad_use_pool(void* fork, void* number, void* count, void* inside) {
  fork_join = reinterpret_cast<decltype(fork_join)>(fork);
  thread_number = reinterpret_cast<decltype(thread_number)>(number);
  thread_count = reinterpret_cast<decltype(thread_count)>(count);
  in_parallel = reinterpret_cast<decltype(in_parallel)>(inside);
}

// TVMBackendParallelLaunch: each task takes its part of a parallel loop.
int convgrad_launch(Task task, void* data, int tasks) {
  Loop loop{task, data, {nullptr, tasks > 0 ? tasks : wanted_threads}, 0};
  if (loop.group.tasks == 1 || fork_join == nullptr || in_parallel()) {
    loop.group.tasks = 1;
    return task(0, &loop.group, data);
  }
  fork_join(RunTasks, &loop, static_cast<unsigned>(loop.group.tasks), 0);
  return loop.status;
}

// TVMBackendAllocWorkspace and TVMBackendFreeWorkspace.
void* convgrad_allocate(int, int, uint64_t bytes, int, int) { return blocks.Take(bytes); }
int convgrad_free(int, int, void* memory) { return blocks.Give(memory); }

// A call of a kernel with the memory of its tensors; `described` has all else of them.
int convgrad_call(Packed kernel, const Tensor* described, int count, int threads, void* a, void* b, void* c, void* d) {
  void* memory[kMostTensors] = {a, b, c, d};
  Tensor tensors[kMostTensors];
  Any arguments[kMostTensors], result{0, 0, nullptr};
  for (int i = 0; i < count; ++i) {
    tensors[i] = described[i];
    tensors[i].data = memory[i];
    arguments[i] = Any{kTensorPointer, 0, &tensors[i]};
  }
  wanted_threads = threads;
  return kernel(nullptr, arguments, count, &result);
}
}
