// SPDX-License-Identifier: Apache-2.0
// cuDNN's convolutions for compiled modules. Generated code calls the global function `convgrad.cudnn.2.run` with a
// pointer to a Spec and the tensors; the 2 is the version of this interface. `engines` answers without a GPU.
// Built for a TVM with Relay, it exports C functions instead.
#ifndef CONVGRAD_RELAY
#include <tvm/ffi/container/array.h>
#include <tvm/runtime/device_api.h>
#endif

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "engines.h"
#include "events.h"
#include "host.h"

namespace convgrad {
namespace {

#ifndef CONVGRAD_RELAY
namespace ffi = tvm::ffi;

void SetDevice(DLDevice device) { tvm::runtime::DeviceAPI::Get(device)->SetDevice(device); }

/*! \brief The compute capability of a GPU, such as "9.0". */
std::string ComputeVersion(DLDevice device) {
  ffi::Any version;
  tvm::runtime::DeviceAPI::Get(device)->GetAttr(device, tvm::runtime::kComputeVersion, &version);
  return version.cast<std::string>();
}

void CopyTensor(DLTensor* from, DLTensor* to, void* stream) {
  tvm::runtime::DeviceAPI::Get(from->device)->CopyDataFromTo(from, to, stream);
}
#endif

constexpr size_t kMostPlans = 4096;  // a step of any batch makes plans for each batch that it meets
constexpr int kMostTensors = 6;
constexpr int64_t kAligned = 16;

/*! \brief A GPU of this machine, for one thread: cuDNN's handles are not for two at a time. */
cudnnHandle_t HandleOf(int device) {
  static thread_local std::unordered_map<int, cudnnHandle_t> handles;  // kept: CUDA may be gone when threads end
  auto found = handles.find(device);
  if (found == handles.end()) {
    cudnnHandle_t made = nullptr;
    Check(Library::Get().cudnnCreate(&made), "a handle cannot be made");
    found = handles.emplace(device, made).first;
  }
  return found->second;
}

struct Key {
  Spec spec;
  int64_t alignment;
  int device;
  bool operator==(const Key& other) const {
    return alignment == other.alignment && device == other.device && spec == other.spec;
  }
};
struct KeyHash {
  size_t operator()(const Key& key) const {
    return (SpecHash()(key.spec) * 31 + static_cast<size_t>(key.alignment)) * 31 + static_cast<size_t>(key.device);
  }
};

/*! \brief A call that is ready to run. */
struct Ready {
  Graph graph;
  Plan plan;
};

/*! \brief The engines that were listed when the program was compiled; none if that was with another cuDNN or GPU. */
std::vector<Choice> Listed(const int64_t* numbers, int64_t sm) {
  std::vector<Choice> choices;
  if (numbers[0] != static_cast<int64_t>(Library::Get().cudnnGetVersion()) || numbers[1] != sm) return choices;
  const int64_t* next = numbers + 3;
  for (int64_t i = 0; i < numbers[2]; ++i) {
    Choice choice;
    choice.index = *next++;
    const int64_t knobs = *next++;
    for (int64_t k = 0; k < knobs; ++k, next += 2) choice.knobs.emplace_back(next[0], next[1]);
    choices.push_back(std::move(choice));
  }
  return choices;
}

int64_t SmOf(DLDevice device) {
  const std::string text = ComputeVersion(device);
  const size_t dot = text.find('.');
  return std::stoll(text.substr(0, dot)) * 10 + std::stoll(text.substr(dot + 1));
}

std::shared_ptr<Ready> Made(const Key& key, const int64_t* ranked, int64_t sm) {
  Device device;
  device.handle = HandleOf(key.device);
  auto made = std::make_shared<Ready>(Ready{Graph(key.spec, key.alignment, device.handle), Plan()});
  std::string why;
  if (made->graph.status() != CUDNN_STATUS_SUCCESS) {
    why = Library::Get().Reason(made->graph.status());
  } else {
    const Engines engines(key.spec, made->graph, device);
    for (const Choice& choice : Listed(ranked, sm)) {
      Plan plan;
      if (engines.Make(choice, &plan).empty()) {
        made->plan = std::move(plan);
        return made;
      }
    }
    bool found = false;
    engines.Each([&](Plan plan, const std::string& reason) {
      found = reason.empty();
      if (found) made->plan = std::move(plan);
      if (why.empty()) why = reason;
      return !found;
    });
    if (found) return made;
  }
  CONVGRAD_THROW(ValueError) << "cudnn: cuDNN " << Library::Get().cudnnGetVersion() << " has no engine for this "
                            << "convolution on this GPU (" << (why.empty() ? "its heuristics know none" : why)
                            << "); build with --offload none, or for the GPU that it is to run on";
}

std::shared_ptr<Ready> ReadyFor(const Key& key, const int64_t* ranked, DLDevice device) {
  static std::mutex mutex;
  static auto& known = *new std::unordered_map<Key, std::shared_ptr<Ready>, KeyHash>;  // outlives other libraries
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = known.find(key);
    if (found != known.end()) return found->second;
  }
  std::shared_ptr<Ready> made = Made(key, ranked, SmOf(device));
  std::lock_guard<std::mutex> lock(mutex);
  if (known.size() >= kMostPlans) known.clear();  // those at work are kept by their callers
  return known.emplace(key, made).first->second;
}

/*! \brief The tensors of a call, and where they lie. */
struct Tensors {
  DLTensor* tensors[kMostTensors];
  void* data[kMostTensors];
  int count;
  bool is_aligned = true;

  Tensors(DLTensor* const* given, int number) : count(number) {
    if (count > kMostTensors || count < 3) CONVGRAD_THROW(ValueError) << "cudnn: " << count << " tensors";
    for (int i = 0; i < count; ++i) {
      tensors[i] = given[i];
      if (tensors[i]->device.device_type != kDLCUDA) {
        CONVGRAD_THROW(ValueError) << "cudnn: tensor " << i << " is not on an NVIDIA GPU; run the program on one";
      }
      data[i] = static_cast<char*>(tensors[i]->data) + tensors[i]->byte_offset;
      is_aligned = is_aligned && reinterpret_cast<uintptr_t>(data[i]) % kAligned == 0;
    }
  }
  DLDevice device() const { return tensors[0]->device; }
};

/*! \brief Put the work of a call on TVM's current stream. */
void Launch(const Ready& ready, const Tensors& given, void* workspace) {
  if (given.count != ready.graph.tensors()) {
    CONVGRAD_THROW(ValueError) << "cudnn: " << given.count << " tensors where " << ready.graph.tensors()
                              << " are expected";
  }
  const Library& library = Library::Get();
  const DLDevice device = given.device();
  const cudnnHandle_t handle = HandleOf(device.device_id);
  void* stream = CurrentStream(device);
  Check(library.cudnnSetStream(handle, static_cast<cudaStream_t>(stream)), "the stream cannot be set");
  const int64_t copied = ready.graph.copied(), last = given.count - 1;
  if (copied >= 0 && given.data[copied] != given.data[last]) {
    CopyTensor(given.tensors[copied], given.tensors[last], stream);
  }
  std::vector<void*> used;
  for (const int64_t id : ready.graph.ids()) used.push_back(given.data[id - 1]);
  Descriptor pack(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  pack.Set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, ready.graph.ids())
      .SetArray(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, used.data(), used.size())
      .Set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, workspace);
  Check(pack.Finalize(), "the tensors of a call are refused");
  Check(library.cudnnBackendExecute(handle, ready.plan.plan.raw(), pack.raw()), "a convolution could not be run");
}

void Run(const int64_t* numbers, DLTensor* const* tensors, int count) {
  const auto* stated = reinterpret_cast<const Spec*>(numbers);
  const Tensors given(tensors, count);
  const DLDevice device = given.device();
  Key key{*stated, given.is_aligned ? kAligned : given.tensors[0]->dtype.bits / 8, device.device_id};
  if (key.spec.batch < 0) {
    const int64_t* axes = key.spec.direction == kForward ? key.spec.data_axes : key.spec.grad_axes;
    for (int place = 0; place < given.tensors[0]->ndim; ++place) {
      if (axes[place] == 0) key.spec.batch = given.tensors[0]->shape[place];
    }
  }
  SetDevice(device);
  const std::shared_ptr<Ready> ready = ReadyFor(key, stated->Ranked(), device);
  const Workspace workspace("cudnn", device, ready->plan.workspace);
  Launch(*ready, given, workspace.data());
}

/*! \brief A GPU that need not be here; without properties the first of this machine. */
Device Described(const std::string& properties) {
  Device device;
  if (properties.empty()) {
    device.handle = HandleOf(0);
    return device;
  }
  device.properties = std::make_unique<Descriptor>(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR);
  device.properties->SetArray(CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, properties.data(), properties.size());
  Check(device.properties->Finalize(), "the properties of the GPU are refused");
  return device;
}

/*!
 * \brief What cuDNN has for a call on a GPU that `properties` describes (empty: the first of this machine), one
 * engine a line, best first:
 * "index|workspace|numerical notes|behavior notes|knob=value,...|reason against it"; "|reason" alone if the graph itself
 * is refused. It ends with the first `most` engines that may be used.
 */
std::string DescribeEngines(const int64_t* numbers, const std::string& properties, int64_t most) {
  const Spec& spec = *reinterpret_cast<const Spec*>(numbers);
  const Device device = Described(properties);
  const Graph graph(spec, kAligned, device.handle);
  if (graph.status() != CUDNN_STATUS_SUCCESS) return "|" + Library::Get().Reason(graph.status());
  std::ostringstream lines;
  Engines(spec, graph, device).Each([&](Plan plan, const std::string& reason) {
    lines << plan.choice.index << "|" << plan.workspace << "|";
    for (size_t i = 0; i < plan.notes.size(); ++i) lines << (i ? "," : "") << static_cast<int>(plan.notes[i]);
    lines << "|";
    for (size_t i = 0; i < plan.behavior.size(); ++i) lines << (i ? "," : "") << static_cast<int>(plan.behavior[i]);
    lines << "|";
    for (size_t i = 0; i < plan.choice.knobs.size(); ++i) {
      lines << (i ? "," : "") << plan.choice.knobs[i].first << "=" << plan.choice.knobs[i].second;
    }
    lines << "|" << reason << "\n";
    if (reason.empty()) --most;
    return most > 0;
  });
  return lines.str();
}

/*!
 * \brief Plans of the engines that a program carries for a call, made as Run makes them, for a GPU that `properties`
 * describes: one a line, "bytes of workspace|why there is none".
 */
std::string RemadePlans(const int64_t* numbers, const std::string& properties) {
  const Spec& spec = *reinterpret_cast<const Spec*>(numbers);
  const Device device = Described(properties);
  const Graph graph(spec, kAligned, device.handle);
  std::ostringstream lines;
  for (const Choice& choice : Listed(spec.Ranked(), spec.Ranked()[1])) {
    Plan plan;
    const std::string reason = Engines(spec, graph, device).Make(choice, &plan);
    lines << plan.workspace << "|" << reason << "\n";
  }
  return lines.str();
}

int64_t Version() { return static_cast<int64_t>(Library::Get().cudnnGetVersion()); }

/*! \brief The properties of a GPU of this machine, as JSON that `engines` takes. */
std::string Properties(int device) {
  Descriptor properties(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR);
  const int32_t id = device;
  Check(Library::Get().cudnnBackendSetAttribute(properties.raw(), CUDNN_ATTR_DEVICEPROP_DEVICE_ID, CUDNN_TYPE_INT32, 1, &id),
        "a GPU cannot be named");
  Check(properties.Finalize(), "the properties of a GPU cannot be read");
  const std::vector<char> text = properties.Values<char>(CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, 1 << 16);
  return std::string(text.begin(), text.end());
}

#ifdef CONVGRAD_RELAY
std::string Ask(const std::string& question, const int64_t* numbers, const char* text, int64_t number) {
  if (question == "engines") return DescribeEngines(numbers, text, number);
  if (question == "remade") return RemadePlans(numbers, text);
  if (question == "properties") return Properties(static_cast<int>(number));
  if (question == "version") return std::to_string(Version());
  CONVGRAD_THROW(ValueError) << "cudnn: there is no question " << question;
  return "";
}
#else
/*!
 * \brief The first engine that a call lists, and no other, ready to run on the first GPU, for memory aligned to 16 bytes:
 * its bytes of workspace, and a function of how often it is to be called, the workspace (None where it needs none) and
 * the tensors. That gives nanoseconds of all these calls by the GPU's own clock. Throws where there is no such plan.
 */
ffi::Array<ffi::Any> Prepare(void* stated) {
  const Spec& spec = *static_cast<const Spec*>(stated);
  const std::vector<Choice> choices = Listed(spec.Ranked(), spec.Ranked()[1]);
  if (choices.empty()) CONVGRAD_THROW(ValueError) << "cudnn: a call without engines for this version of cuDNN";
  Device device;
  device.handle = HandleOf(0);
  auto made = std::make_shared<Ready>(Ready{Graph(spec, kAligned, device.handle), Plan()});
  Check(made->graph.status(), "a call is refused");
  const std::string why = Engines(spec, made->graph, device).Make(choices[0], &made->plan);
  if (!why.empty()) CONVGRAD_THROW(ValueError) << "cudnn: " << why;
  auto run = [made](ffi::PackedArgs args, ffi::Any* result) {
    const int64_t calls = args[0].cast<int64_t>();
    const auto scratch = args[1].cast<ffi::Optional<ffi::Tensor>>();
    const PackedTensors packed(args, 2);
    const Tensors given(packed.tensors(), packed.count());
    const int64_t room = scratch.has_value() ? scratch.value().numel() * scratch.value().dtype().bits / 8 : 0;
    if (!given.is_aligned || room < made->plan.workspace) {
      CONVGRAD_THROW(ValueError) << "cudnn: " << room << " bytes of workspace for an engine that needs "
                                << made->plan.workspace << ", or tensors that are not aligned to " << kAligned;
    }
    void* workspace = nullptr;
    if (scratch.has_value()) {
      const DLTensor* tensor = scratch.value().GetDLTensorPtr();
      workspace = static_cast<char*>(tensor->data) + tensor->byte_offset;
    }
    SetDevice(given.device());
    Stopwatch stopwatch(static_cast<cudaStream_t>(CurrentStream(given.device())));
    for (int64_t i = 0; i < calls; ++i) Launch(*made, given, workspace);
    *result = stopwatch.Stop();
  };
  return {made->plan.workspace, ffi::Function::FromPacked(run)};
}

void RunPacked(ffi::PackedArgs args, ffi::Any*) {
  const PackedTensors given(args, 1);
  Run(static_cast<const int64_t*>(args[0].cast<void*>()), given.tensors(), given.count());
}

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  const auto numbers = [](void* stated) { return static_cast<const int64_t*>(stated); };
  refl::GlobalDef()
      .def_packed("convgrad.cudnn.2.run", RunPacked)
      .def("convgrad.cudnn.2.engines",
           [numbers](void* stated, ffi::String properties, int64_t most) -> ffi::String {
             return DescribeEngines(numbers(stated), properties, most);
           })
      .def("convgrad.cudnn.2.prepare", Prepare)
      .def("convgrad.cudnn.2.properties", [](int device) -> ffi::String { return Properties(device); })
      .def("convgrad.cudnn.2.remade",
           [numbers](void* stated, ffi::String properties) -> ffi::String {
             return RemadePlans(numbers(stated), properties);
           })
      .def("convgrad.cudnn.2.version", Version);
}
#endif

}  // namespace
}  // namespace convgrad

#ifdef CONVGRAD_RELAY
CONVGRAD_EXPORT(cudnn)
#endif
