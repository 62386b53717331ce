// SPDX-License-Identifier: Apache-2.0
// oneDNN's convolutions for compiled modules. Generated code calls the global function `convgrad.onednn.2.run` with a
// pointer to a Spec and the tensors; the 2 is the version of this interface.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/string.h>
#include <tvm/runtime/c_backend_api.h>

#include <cstdlib>

#include "plan.h"

// Of the OpenMP library that oneDNN has been linked with.
extern "C" void omp_set_num_threads(int);
extern "C" int omp_get_max_threads(void);

namespace convgrad {
namespace {

namespace ffi = tvm::ffi;

constexpr size_t kMostPlans = 4096;  // a step of any batch makes plans for each batch that it meets
constexpr int kMostTensors = 6;

/*! \brief oneDNN uses as many threads as TVM while this lives; the calling thread's own setting comes back after. */
class Threads {
 public:
  explicit Threads(int wanted) : before_(omp_get_max_threads()), wanted_(wanted) {
    if (wanted_ != before_) omp_set_num_threads(wanted_);
  }
  ~Threads() {
    if (wanted_ != before_) omp_set_num_threads(before_);
  }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

 private:
  int before_, wanted_;
};

int TvmThreads() {
  static const ffi::Function count = ffi::Function::GetGlobalRequired("runtime.NumThreads");
  return count().cast<int>();
}

/*! \brief TVM's workspace, which it keeps from call to call. */
class Workspace {
 public:
  explicit Workspace(size_t bytes) : data_(bytes == 0 ? nullptr : Allocate(bytes)) {}
  ~Workspace() {
    if (data_ != nullptr) TVMBackendFreeWorkspace(kDLCPU, 0, data_);
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  char* data() const { return static_cast<char*>(data_); }

 private:
  static void* Allocate(size_t bytes) {
    void* data = TVMBackendAllocWorkspace(kDLCPU, 0, bytes, kDLUInt, 8);
    if (data == nullptr) TVM_FFI_THROW(RuntimeError) << "onednn: there are no " << bytes << " bytes for its workspace";
    return data;
  }
  void* data_;
};

struct Key {
  Spec spec;
  int threads;
  bool operator==(const Key& other) const { return threads == other.threads && spec == other.spec; }
};
struct KeyHash {
  size_t operator()(const Key& key) const { return SpecHash()(key.spec) * 31 + static_cast<size_t>(key.threads); }
};

std::shared_ptr<Plan> PlanOf(const Key& key) {
  static std::mutex mutex;
  static auto& plans = *new std::unordered_map<Key, std::shared_ptr<Plan>, KeyHash>;  // outlives other libraries
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = plans.find(key);
    if (found != plans.end()) return found->second;
  }
  std::shared_ptr<Plan> made;
  try {
    made = std::make_shared<Plan>(key.spec);
  } catch (const dnnl::error& error) {
    const dnnl_version_t& version = *dnnl_version();
    TVM_FFI_THROW(ValueError) << "onednn: oneDNN " << version.major << "." << version.minor << "." << version.patch
                              << " has no implementation of this convolution on this CPU (" << error.what()
                              << "); build with --offload none, or for the CPU that it is to run on";
  }
  std::lock_guard<std::mutex> lock(mutex);
  if (plans.size() >= kMostPlans) plans.clear();  // those at work are kept by their callers
  return plans.emplace(key, made).first->second;
}

void Run(ffi::PackedArgs args, ffi::Any*) {
  const auto* stated = static_cast<const Spec*>(args[0].cast<void*>());
  Key key{*stated, TvmThreads()};
  const int count = args.size() - 1;
  void* data[kMostTensors];
  if (count > kMostTensors) TVM_FFI_THROW(ValueError) << "onednn: " << count << " tensors";
  for (int i = 0; i < count; ++i) {
    const auto* tensor = args[i + 1].cast<DLTensor*>();
    data[i] = static_cast<char*>(tensor->data) + tensor->byte_offset;
    if (i == 0 && key.spec.batch < 0) {
      const int64_t* axes = key.spec.direction == kForward ? key.spec.data_axes : key.spec.grad_axes;
      for (int place = 0; place < tensor->ndim; ++place) {
        if (axes[place] == 0) key.spec.batch = tensor->shape[place];
      }
    }
  }
  Threads threads(key.threads);
  const std::shared_ptr<Plan> plan = PlanOf(key);
  if (count != plan->tensors()) {
    TVM_FFI_THROW(ValueError) << "onednn: " << count << " tensors where " << plan->tensors() << " are expected";
  }
  Workspace workspace(plan->workspace());
  plan->Run(data, workspace.data());
}

/*! \brief What oneDNN would use on this CPU: "implementation;primitives;bytes of workspace"; raises if it has nothing. */
ffi::String Describe(void* stated, int threads) {
  const Key key{*static_cast<const Spec*>(stated), threads};
  Threads used(threads);
  const std::shared_ptr<Plan> plan = PlanOf(key);
  std::ostringstream text;
  text << plan->implementation() << ";" << plan->primitives() << ";" << plan->workspace();
  return text.str();
}

ffi::String Version() {
  const dnnl_version_t& version = *dnnl_version();
  std::ostringstream text;
  text << version.major << "." << version.minor << "." << version.patch;
  return text.str();
}

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  refl::GlobalDef()
      .def_packed("convgrad.onednn.2.run", Run)
      .def("convgrad.onednn.2.describe", Describe)
      .def("convgrad.onednn.2.version", Version);
}

}  // namespace
}  // namespace convgrad
