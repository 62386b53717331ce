// SPDX-License-Identifier: Apache-2.0
// oneDNN's convolutions for compiled modules. Generated code calls the global function `convgrad.onednn.2.run` with a
// pointer to a Spec and the tensors; the 2 is the version of this interface. Built for a TVM with Relay, it exports C
// functions instead.
#include <cstdlib>

#include "host.h"
#include "plan.h"

// Of the OpenMP library that oneDNN has been linked with.
extern "C" void omp_set_num_threads(int);
extern "C" int omp_get_max_threads(void);

namespace convgrad {
namespace {

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
    CONVGRAD_THROW(ValueError) << "onednn: oneDNN " << version.major << "." << version.minor << "." << version.patch
                              << " has no implementation of this convolution on this CPU (" << error.what()
                              << "); build with --offload none, or for the CPU that it is to run on";
  }
  std::lock_guard<std::mutex> lock(mutex);
  if (plans.size() >= kMostPlans) plans.clear();  // those at work are kept by their callers
  return plans.emplace(key, made).first->second;
}

void Run(const int64_t* numbers, DLTensor* const* tensors, int count) {
  Key key{*reinterpret_cast<const Spec*>(numbers), HostThreads()};
  void* data[kMostTensors];
  if (count > kMostTensors) CONVGRAD_THROW(ValueError) << "onednn: " << count << " tensors";
  for (int i = 0; i < count; ++i) {
    const DLTensor* tensor = tensors[i];
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
    CONVGRAD_THROW(ValueError) << "onednn: " << count << " tensors where " << plan->tensors() << " are expected";
  }
  const Workspace workspace("onednn", {kDLCPU, 0}, static_cast<int64_t>(plan->workspace()));
  plan->Run(data, static_cast<char*>(workspace.data()));
}

/*! \brief What oneDNN would use on this CPU: "implementation;primitives;bytes of workspace"; raises if it has nothing. */
std::string Describe(const int64_t* numbers, int threads) {
  const Key key{*reinterpret_cast<const Spec*>(numbers), threads};
  Threads used(threads);
  const std::shared_ptr<Plan> plan = PlanOf(key);
  std::ostringstream text;
  text << plan->implementation() << ";" << plan->primitives() << ";" << plan->workspace();
  return text.str();
}

std::string Version() {
  const dnnl_version_t& version = *dnnl_version();
  std::ostringstream text;
  text << version.major << "." << version.minor << "." << version.patch;
  return text.str();
}

#ifdef CONVGRAD_RELAY
std::string Ask(const std::string& question, const int64_t* numbers, const char*, int64_t number) {
  if (question == "describe") return Describe(numbers, static_cast<int>(number));
  if (question == "version") return Version();
  CONVGRAD_THROW(ValueError) << "onednn: there is no question " << question;
  return "";
}
#else
namespace ffi = tvm::ffi;

void RunPacked(ffi::PackedArgs args, ffi::Any*) {
  const PackedTensors given(args, 1);
  Run(static_cast<const int64_t*>(args[0].cast<void*>()), given.tensors(), given.count());
}

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  refl::GlobalDef()
      .def_packed("convgrad.onednn.2.run", RunPacked)
      .def("convgrad.onednn.2.describe",
           [](void* numbers, int threads) -> ffi::String { return Describe(static_cast<const int64_t*>(numbers), threads); })
      .def("convgrad.onednn.2.version", []() -> ffi::String { return Version(); });
}
#endif

}  // namespace
}  // namespace convgrad

#ifdef CONVGRAD_RELAY
CONVGRAD_EXPORT(onednn)
#endif
