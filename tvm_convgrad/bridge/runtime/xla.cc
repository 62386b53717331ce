// SPDX-License-Identifier: Apache-2.0
// XLA's custom call that runs a compiled kernel, with the kernel's parallel loops on XLA's own thread pool.
//
// The calling thread takes tasks of a loop like any other, until none is left. So a loop ends whether the pool has idle
// threads or not: two convolutions that XLA runs at the same time share the pool, and never have more threads than it.

#include "host.cc"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <unordered_map>

#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

constexpr int kSpins = 2000;  // some microseconds: tasks of a loop are equally long, and end at nearly the same time

thread_local ffi::ThreadPool* current_pool = nullptr;

struct SharedLoop {
  Task task;
  void* data;
  Group group;
  std::atomic<int> next{0}, unfinished, status{0};
  std::mutex mutex;
  std::condition_variable finished;

  SharedLoop(Task task, void* data, int tasks) : task(task), data(data), group{nullptr, tasks}, unfinished(tasks) {}

  void TakeTasks() {
    for (int n; (n = next.fetch_add(1)) < group.tasks;) {
      if (int failed = task(n, &group, data)) status = failed;
      if (unfinished.fetch_sub(1) == 1) {
        std::lock_guard<std::mutex> lock(mutex);
        finished.notify_all();
      }
    }
  }

  void Wait() {
    for (int i = 0; i < kSpins; ++i) {
      if (unfinished.load() == 0) return;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    std::unique_lock<std::mutex> lock(mutex);
    finished.wait(lock, [this] { return unfinished.load() == 0; });
  }
};

struct Entry {
  Packed kernel;
  const Tensor* described;
  int count;
  std::atomic<int64_t> calls{0}, nanoseconds{0};
};

std::shared_mutex entries_mutex;
std::unordered_map<std::string, std::unique_ptr<Entry>> entries;

Entry* Find(std::string_view key) {
  std::shared_lock<std::shared_mutex> lock(entries_mutex);
  auto found = entries.find(std::string(key));
  return found == entries.end() ? nullptr : found->second.get();
}

ffi::Error RunKernel(ffi::ThreadPool pool, std::string_view key, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  Entry* entry = Find(key);
  if (entry == nullptr) {
    return ffi::Error(ffi::ErrorCode::kNotFound,
                      "tvm_convgrad: the kernel of this program is not loaded into this process; trace and compile the "
                      "function in the process that runs it");
  }
  if (static_cast<int>(args.size() + rets.size()) != entry->count || entry->count > kMostTensors) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, "tvm_convgrad: another number of tensors than the kernel takes");
  }
  void* memory[kMostTensors] = {};
  int n = 0;
  for (size_t i = 0; i < args.size(); ++i) memory[n++] = args.get<ffi::AnyBuffer>(i)->untyped_data();
  for (size_t i = 0; i < rets.size(); ++i) memory[n++] = (*rets.get<ffi::AnyBuffer>(i))->untyped_data();
  auto begin = std::chrono::steady_clock::now();
  int64_t threads = pool.num_threads();
  current_pool = &pool;
  int status = convgrad_call(entry->kernel, entry->described, entry->count, threads > 0 ? static_cast<int>(threads) : 1,
                             memory[0], memory[1], memory[2], memory[3]);
  current_pool = nullptr;
  entry->nanoseconds += (std::chrono::steady_clock::now() - begin).count();
  entry->calls += 1;
  if (status != 0) return ffi::Error(ffi::ErrorCode::kResourceExhausted, "tvm_convgrad: no memory for a kernel");
  return ffi::Error::Success();
}

}  // namespace

extern "C" {

// TVMBackendParallelLaunch on the pool of the custom call that this thread is in.
int convgrad_xla_launch(Task task, void* data, int tasks) {
  int count = tasks > 0 ? tasks : wanted_threads;
  if (count == 1 || current_pool == nullptr) {
    Group alone{nullptr, 1};
    return task(0, &alone, data);
  }
  auto loop = std::make_shared<SharedLoop>(task, data, count);
  for (int i = 1; i < count; ++i) current_pool->Schedule([loop] { loop->TakeTasks(); });
  loop->TakeTasks();
  loop->Wait();
  return loop->status;
}

// Make a kernel known to the custom call; it stays so for as long as the process lives, and the first one of a key stays.
void convgrad_xla_register(const char* key, Packed kernel, const Tensor* described, int count) {
  std::unique_lock<std::shared_mutex> lock(entries_mutex);
  auto& entry = entries[key];
  if (entry != nullptr) return;  // a program may be calling it
  entry = std::make_unique<Entry>();
  entry->kernel = kernel;
  entry->described = described;
  entry->count = count;
}

// Calls of a kernel, and their nanoseconds.
int64_t convgrad_xla_calls(const char* key, int64_t* nanoseconds) {
  Entry* entry = Find(key);
  if (nanoseconds != nullptr) *nanoseconds = entry == nullptr ? 0 : entry->nanoseconds.load();
  return entry == nullptr ? 0 : entry->calls.load();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(convgrad_xla_run, RunKernel,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<std::string_view>("kernel")
                                  .RemainingArgs()
                                  .RemainingRets());
}
