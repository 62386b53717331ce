// SPDX-License-Identifier: Apache-2.0
// PyTorch's entries of aten::convolution and aten::convolution_backward on CPUs. A call whose choice is made goes to
// kernels or to PyTorch's own function without Python; any other goes to tvm_convgrad::_convolution and
// _convolution_backward, which Python implements, and which make the choice known by convgrad_torch_settle.

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/TracerMode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/convolution_backward_native.h>
#include <ATen/ops/convolution_native.h>
#include <ATen/ops/sum.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>

#include "torch_pool.h"

namespace {

using at::IntArrayRef;
using at::Tensor;
using Clock = std::chrono::steady_clock;
using Gradients = std::tuple<Tensor, Tensor, Tensor>;
using Call = int (*)(void*, const void*, int, int, void*, void*, void*, void*);

constexpr int kMostAxes = 5;
constexpr int kMostMemory = 4;
constexpr size_t kSlots = 8192;  // of a table, a power of two
constexpr size_t kMostEntries = kSlots / 2;

// A kernel and what it takes and gives; the fields are those of tvm_convgrad.torch.native.
struct Step {
  void* kernel;
  const void* described;
  int64_t count;        // of tensors
  int64_t operands[3];  // places among a call's tensors; -1 is none
  int64_t place;        // of its result
  int64_t with_bias;    // whether it gives the bias's gradient, too
  int64_t axes;
  int64_t sizes[kMostAxes], strides[kMostAxes];
};
struct Choice {
  int64_t steps;
  Step step[2];
  int64_t rest[3];  // results that PyTorch computes
  Call call;
  int64_t threads;
};

using Words = c10::SmallVector<int64_t, 64>;

// Calls of one signature. It lives as long as the process: other threads may be reading it at any time.
struct Entry {
  Words key;
  std::atomic<const Choice*> choice{nullptr};
  std::atomic<int64_t> calls{0}, nanoseconds{0};
};

// Entries by hash, without locks: a process that forks while another thread has a lock would keep it for ever.
struct Table {
  std::atomic<Entry*> slots[kSlots]{};
  std::atomic<size_t> count{0};

  Entry* Find(const Words& key) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (int64_t word : key) hash = (hash ^ static_cast<uint64_t>(word)) * 0x9e3779b97f4a7c15u, hash ^= hash >> 29;
    for (size_t i = hash % kSlots;; i = (i + 1) % kSlots) {
      Entry* found = slots[i].load(std::memory_order_acquire);
      if (found == nullptr) {
        if (count.load(std::memory_order_relaxed) >= kMostEntries) return nullptr;
        auto made = std::make_unique<Entry>();
        made->key = key;
        if (slots[i].compare_exchange_strong(found, made.get())) {
          ++count;
          return made.release();
        }
      }
      if (found->key == key) return found;
    }
  }
};

std::atomic<Table*> table{nullptr};
std::unique_ptr<torch::Library> library;

void Add(Words& key, IntArrayRef values) {
  key.push_back(static_cast<int64_t>(values.size()));
  key.append(values.begin(), values.end());
}

void Add(Words& key, const Tensor& tensor) {
  key.push_back(static_cast<int64_t>(tensor.scalar_type()));
  Add(key, tensor.sizes());
  key.append(tensor.strides().begin(), tensor.strides().end());
}

void AddSettings(Words& key) {
  const at::Context& context = at::globalContext();
  key.push_back(at::get_num_threads());
  key.push_back(context.userEnabledMkldnn() * 2 + context.deterministicAlgorithms());
}

bool IsPlain(const Tensor& tensor) { return tensor.defined() && tensor.is_cpu() && tensor.layout() == at::kStrided; }

// Counts a call and its time.
struct Timed {
  Entry* entry;
  Clock::time_point begin = Clock::now();
  ~Timed() {
    entry->calls.fetch_add(1, std::memory_order_relaxed);
    auto passed = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin).count();
    entry->nanoseconds.fetch_add(passed, std::memory_order_relaxed);
  }
};

void RunKernels(const Choice& choice, const Tensor* const* tensors, Tensor* results) {
  for (int64_t i = 0; i < choice.steps; ++i) {
    const Step& step = choice.step[i];
    const at::ScalarType type = tensors[step.operands[0]]->scalar_type();
    const size_t axes = static_cast<size_t>(step.axes);
    void* memory[kMostMemory] = {};
    int count = 0;
    for (int64_t operand : step.operands) {
      if (operand >= 0) memory[count++] = const_cast<void*>(tensors[operand]->const_data_ptr());
    }
    Tensor& result = results[step.place];
    result = at::detail::empty_strided_generic(IntArrayRef(step.sizes, axes), IntArrayRef(step.strides, axes),
                                               &convgrad::Pool::Get(), c10::DispatchKeySet(c10::DispatchKey::CPU), type);
    memory[count++] = result.mutable_data_ptr();
    if (step.with_bias) {
      results[2] = at::detail::empty_cpu(IntArrayRef(step.sizes, 1), type);
      memory[count++] = results[2].mutable_data_ptr();
    }
    const int failed = choice.call(step.kernel, step.described, static_cast<int>(step.count),
                                   static_cast<int>(choice.threads), memory[0], memory[1], memory[2], memory[3]);
    TORCH_CHECK(failed == 0, "tvm_convgrad.torch: a kernel failed, for lack of memory");
  }
}

Tensor Forward(const Tensor& data, const Tensor& weight, const std::optional<Tensor>& bias, IntArrayRef stride,
               IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups) {
  const bool with_bias = bias.has_value() && bias->defined();
  Entry* entry = nullptr;
  // torch.jit.trace records the operator that PyTorch's function calls.
  const bool traced = at::tracer::impl::is_dispatch_enabled();
  if (!traced && IsPlain(data) && IsPlain(weight) && (!with_bias || IsPlain(*bias))) {
    Words key{transposed * 2 + with_bias, groups};
    Add(key, data);
    Add(key, weight);
    if (with_bias) Add(key, *bias);
    for (IntArrayRef each : {stride, padding, dilation, output_padding}) Add(key, each);
    AddSettings(key);
    entry = table.load(std::memory_order_acquire)->Find(key);
  }
  const Choice* choice = entry == nullptr ? nullptr : entry->choice.load(std::memory_order_acquire);
  if (entry != nullptr && choice == nullptr) {
    using Schema = Tensor(const Tensor&, const Tensor&, const std::optional<Tensor>&, IntArrayRef, IntArrayRef,
                          IntArrayRef, bool, IntArrayRef, int64_t, int64_t);
    static const auto chooser =
        c10::Dispatcher::singleton().findSchemaOrThrow("tvm_convgrad::_convolution", "").typed<Schema>();
    return chooser.redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU), data, weight, bias, stride, padding, dilation,
                              transposed, output_padding, groups, reinterpret_cast<int64_t>(entry));
  }
  if (entry == nullptr) {
    return at::native::convolution(data, weight, bias, stride, padding, dilation, transposed, output_padding, groups);
  }
  Timed timed{entry};
  if (choice->steps == 0) {
    return at::native::convolution(data, weight, bias, stride, padding, dilation, transposed, output_padding, groups);
  }
  const Tensor* tensors[3] = {&data, &weight, with_bias ? &*bias : nullptr};
  Tensor results[3];
  RunKernels(*choice, tensors, results);
  return results[0];
}

Gradients Backward(const Tensor& grad, const Tensor& data, const Tensor& weight, at::OptionalIntArrayRef bias_sizes,
                   IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, bool transposed,
                   IntArrayRef output_padding, int64_t groups, std::array<bool, 3> wanted) {
  auto own = [&](std::array<bool, 3> mask) {
    return at::native::convolution_backward(grad, data, weight, bias_sizes, stride, padding, dilation, transposed,
                                            output_padding, groups, mask);
  };
  Entry* entry = nullptr;
  if (IsPlain(grad) && IsPlain(data) && IsPlain(weight)) {
    Words key{4 + transposed, groups, wanted[0] + wanted[1] * 2 + wanted[2] * 4};
    for (const Tensor* each : {&grad, &data, &weight}) Add(key, *each);
    for (IntArrayRef each : {stride, padding, dilation, output_padding}) Add(key, each);
    AddSettings(key);
    entry = table.load(std::memory_order_acquire)->Find(key);
  }
  const Choice* choice = entry == nullptr ? nullptr : entry->choice.load(std::memory_order_acquire);
  if (entry != nullptr && choice == nullptr) {
    using Schema =
        Gradients(const Tensor&, const Tensor&, const Tensor&, at::OptionalIntArrayRef, IntArrayRef, IntArrayRef,
                  IntArrayRef, bool, IntArrayRef, int64_t, std::array<bool, 3>, int64_t);
    static const auto chooser =
        c10::Dispatcher::singleton().findSchemaOrThrow("tvm_convgrad::_convolution_backward", "").typed<Schema>();
    return chooser.redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU), grad, data, weight, bias_sizes, stride,
                              padding, dilation, transposed, output_padding, groups, wanted,
                              reinterpret_cast<int64_t>(entry));
  }
  if (entry == nullptr) return own(wanted);
  Timed timed{entry};
  if (choice->steps == 0) return own(wanted);
  const Tensor* tensors[3] = {&grad, &data, &weight};
  Tensor results[3];
  RunKernels(*choice, tensors, results);
  std::array<bool, 3> rest{choice->rest[0] != 0, choice->rest[1] != 0, choice->rest[2] != 0};
  if (rest[2] && !rest[1]) {  // the bias's gradient alone is a sum; PyTorch's function would compute the weight's
    c10::SmallVector<int64_t, kMostAxes> axes{0};
    for (int64_t axis = 2; axis < grad.dim(); ++axis) axes.push_back(axis);
    results[2] = at::sum(grad, IntArrayRef(axes));
    rest[2] = false;
  }
  if (rest[0] || rest[1] || rest[2]) {
    Gradients found = own(rest);
    if (rest[0]) results[0] = std::get<0>(found);
    if (rest[1]) results[1] = std::get<1>(found);
    if (rest[2]) results[2] = std::get<2>(found);
  }
  return {results[0], results[1], results[2]};
}

}  // namespace

extern "C" {

// A table without entries, which is never freed.
void* convgrad_torch_table() { return new Table; }

// Put these functions in the place of PyTorch's entries, and keep some bytes of freed results. Returns null, or what
// went wrong.
const char* convgrad_torch_install(void* entries, int forward, size_t kept_memory) {
  static std::string problem;
  try {
    convgrad::Pool::Get().Limit(kept_memory);
    table.store(static_cast<Table*>(entries), std::memory_order_release);
    library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__);
    library->impl("convolution_backward", TORCH_FN(Backward));
    if (forward) library->impl("convolution", TORCH_FN(Forward));
    return nullptr;
  } catch (const std::exception& error) {
    library.reset();
    problem = error.what();
    return problem.c_str();
  }
}

void convgrad_torch_remove() { library.reset(); }

// Free the memory that is kept for results; what is freed later is not kept.
void convgrad_torch_release() { convgrad::Pool::Get().Limit(0); }

// Bytes that are kept for results.
size_t convgrad_torch_kept() { return convgrad::Pool::Get().kept(); }

// Make the choice of an entry, as it is known to the functions that Python implements.
void convgrad_torch_settle(int64_t entry, const Choice* choice) {
  reinterpret_cast<Entry*>(entry)->choice.store(new Choice(*choice), std::memory_order_release);
}

// Calls of an entry and their nanoseconds since they were asked for last.
void convgrad_torch_drain(int64_t entry, int64_t* calls, int64_t* nanoseconds) {
  Entry* found = reinterpret_cast<Entry*>(entry);
  *calls = found->calls.exchange(0);
  *nanoseconds = found->nanoseconds.exchange(0);
}
}
