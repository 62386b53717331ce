// SPDX-License-Identifier: Apache-2.0
// A GPU that is the host: cuDNN's backend API, computed by plain loops, and TVM's device API for "cuda". Engines, best
// first by the heuristics: 0 is slow, 1 has a knob and workspace, 2 leaves an element, 3 writes one byte behind its
// result, 4 fails. float32 and float64 only.
#include <cudnn_graph.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/string.h>
#include <tvm/runtime/device_api.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <vector>

namespace {

struct Node {
  int type = 0;
  std::map<int, std::vector<char>> values;
  std::map<int, std::shared_ptr<std::vector<Node>>> parts;

  template <typename T>
  std::vector<T> All(int name) const {
    const auto found = values.find(name);
    if (found == values.end()) return {};
    std::vector<T> all(found->second.size() / sizeof(T));
    std::memcpy(all.data(), found->second.data(), all.size() * sizeof(T));
    return all;
  }
  template <typename T>
  T One(int name) const {
    return All<T>(name).at(0);
  }
  template <typename T>
  void Put(int name, T value) {
    values[name].assign(reinterpret_cast<char*>(&value), reinterpret_cast<char*>(&value) + sizeof(T));
  }
  const Node& Part(int name) const { return parts.at(name)->at(0); }
};

size_t SizeOf(int type) {
  switch (type) {
    case CUDNN_TYPE_BOOLEAN:
    case CUDNN_TYPE_CHAR: return 1;
    case CUDNN_TYPE_INT64:
    case CUDNN_TYPE_DOUBLE:
    case CUDNN_TYPE_VOID_PTR:
    case CUDNN_TYPE_HANDLE: return 8;
    default: return 4;
  }
}

int64_t EngineOf(const Node& plan) {
  return plan.Part(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG)
      .Part(CUDNN_ATTR_ENGINECFG_ENGINE)
      .One<int64_t>(CUDNN_ATTR_ENGINE_GLOBAL_INDEX);
}

std::vector<Node> Configs(const Node& heuristics) {
  std::vector<Node> configs;
  if (heuristics.One<int>(CUDNN_ATTR_ENGINEHEUR_MODE) != CUDNN_HEUR_MODE_A) return configs;
  for (int64_t index = 0; index < 5; ++index) {
    Node engine, config;
    engine.type = CUDNN_BACKEND_ENGINE_DESCRIPTOR;
    engine.Put(CUDNN_ATTR_ENGINE_GLOBAL_INDEX, index);
    engine.parts[CUDNN_ATTR_ENGINE_OPERATION_GRAPH] = heuristics.parts.at(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH);
    config.type = CUDNN_BACKEND_ENGINECFG_DESCRIPTOR;
    config.parts[CUDNN_ATTR_ENGINECFG_ENGINE] = std::make_shared<std::vector<Node>>(1, engine);
    if (index == 1) {
      Node knob;
      knob.Put(CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, int{CUDNN_KNOB_TYPE_TILE_SIZE});
      knob.Put(CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, int64_t{7});
      config.parts[CUDNN_ATTR_ENGINECFG_KNOB_CHOICES] = std::make_shared<std::vector<Node>>(1, knob);
    }
    configs.push_back(config);
  }
  return configs;
}

struct Tensor {
  std::vector<int64_t> dims, strides;
  bool is_double;
  int64_t id;
  char* data = nullptr;

  Tensor(const Node& node, const std::map<int64_t, char*>& given, std::map<int64_t, std::vector<char>>* made)
      : dims(node.All<int64_t>(CUDNN_ATTR_TENSOR_DIMENSIONS)),
        strides(node.All<int64_t>(CUDNN_ATTR_TENSOR_STRIDES)),
        is_double(node.One<int>(CUDNN_ATTR_TENSOR_DATA_TYPE) == CUDNN_DATA_DOUBLE),
        id(node.One<int64_t>(CUDNN_ATTR_TENSOR_UNIQUE_ID)) {
    const auto found = given.find(id);
    if (found != given.end()) {
      data = found->second;
    } else {
      std::vector<char>& own = (*made)[id];
      if (own.empty()) own.resize(static_cast<size_t>(Bytes()));
      data = own.data();
    }
  }
  int64_t Bytes() const {
    int64_t bytes = is_double ? 8 : 4;
    for (const int64_t each : dims) bytes *= each;
    return bytes;
  }
  int64_t At(const std::vector<int64_t>& index) const {
    int64_t at = 0;
    for (size_t i = 0; i < dims.size(); ++i) at += (dims[i] == 1 ? 0 : index[i]) * strides[i];
    return at;
  }
  double Get(int64_t at) const {
    return is_double ? reinterpret_cast<double*>(data)[at] : reinterpret_cast<float*>(data)[at];
  }
  void Set(int64_t at, double value) const {
    if (is_double) {
      reinterpret_cast<double*>(data)[at] = value;
    } else {
      reinterpret_cast<float*>(data)[at] = static_cast<float>(value);
    }
  }
};

/*! \brief Call `visit` with each index below the extents. */
void Each(const std::vector<int64_t>& extents, const std::function<void(const std::vector<int64_t>&)>& visit) {
  std::vector<int64_t> index(extents.size(), 0);
  for (;;) {
    visit(index);
    size_t axis = extents.size();
    while (axis > 0 && ++index[axis - 1] == extents[axis - 1]) index[--axis] = 0;
    if (axis == 0) return;
  }
}

double Factor(const Node& op, int name) {
  const auto& bytes = op.values.at(name);
  return bytes.size() == 8 ? op.One<double>(name) : op.One<float>(name);
}

/*! \brief A convolution or a gradient: `names` are the attributes of X, W, Y, the geometry, alpha and beta. */
void Convolve(const Node& op, const int (&names)[6], int result, const std::function<Tensor(const Node&)>& tensor) {
  const Tensor all[3] = {tensor(op.Part(names[0])), tensor(op.Part(names[1])), tensor(op.Part(names[2]))};
  const Tensor &x = all[0], &w = all[1], &y = all[2], &out = all[result];
  const Node& geometry = op.Part(names[3]);
  const auto strides = geometry.All<int64_t>(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES);
  const auto dilations = geometry.All<int64_t>(CUDNN_ATTR_CONVOLUTION_DILATIONS);
  const auto before = geometry.All<int64_t>(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS);
  const int64_t groups = x.dims[1] / w.dims[1], each = w.dims[0] / groups;
  std::map<int64_t, double> sums;
  Each(out.dims, [&](const std::vector<int64_t>& at) { sums[out.At(at)] = 0; });
  std::vector<int64_t> taps(w.dims.begin() + 1, w.dims.end());
  Each(y.dims, [&](const std::vector<int64_t>& at_y) {
    Each(taps, [&](const std::vector<int64_t>& tap) {
      std::vector<int64_t> at_x = at_y, at_w{at_y[1]};
      at_w.insert(at_w.end(), tap.begin(), tap.end());
      at_x[1] = at_y[1] / each * w.dims[1] + tap[0];
      for (size_t i = 0; i + 2 < x.dims.size(); ++i) {
        at_x[i + 2] = at_y[i + 2] * strides[i] - before[i] + tap[i + 1] * dilations[i];
        if (at_x[i + 2] < 0 || at_x[i + 2] >= x.dims[i + 2]) return;
      }
      const int64_t places[3] = {x.At(at_x), w.At(at_w), y.At(at_y)};
      double product = 1;
      for (int i = 0; i < 3; ++i) product *= i == result ? 1 : all[i].Get(places[i]);
      sums[places[result]] += product;
    });
  });
  const double alpha = Factor(op, names[4]), beta = Factor(op, names[5]);
  for (const auto& [at, sum] : sums) out.Set(at, alpha * sum + (beta == 0 ? 0 : beta * out.Get(at)));
}

void Pointwise(const Node& op, const std::function<Tensor(const Node&)>& tensor) {
  const bool is_add =
      op.Part(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR).One<int>(CUDNN_ATTR_POINTWISE_MODE) == CUDNN_POINTWISE_ADD;
  const Tensor x = tensor(op.Part(CUDNN_ATTR_OPERATION_POINTWISE_XDESC));
  const Tensor b = is_add ? tensor(op.Part(CUDNN_ATTR_OPERATION_POINTWISE_BDESC)) : x;
  const Tensor y = tensor(op.Part(CUDNN_ATTR_OPERATION_POINTWISE_YDESC));
  Each(y.dims, [&](const std::vector<int64_t>& at) {
    const double value = x.Get(x.At(at));
    y.Set(y.At(at), is_add ? value + b.Get(b.At(at)) : (value > 0 ? value : 0));
  });
}

/*! \brief Memory of the host under the name of a GPU's. */
class Host final : public tvm::runtime::DeviceAPI {
 public:
  void SetDevice(DLDevice) final {}
  void GetAttr(DLDevice device, tvm::runtime::DeviceAttrKind kind, tvm::ffi::Any* found) final {
    if (kind == tvm::runtime::kExist) *found = device.device_id == 0;
    if (kind == tvm::runtime::kComputeVersion) *found = tvm::ffi::String("9.0");
    if (kind == tvm::runtime::kDeviceName) *found = tvm::ffi::String("the host");
  }
  void* AllocDataSpace(DLDevice, size_t bytes, size_t, DLDataType) final {
    return std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  }
  void FreeDataSpace(DLDevice, void* data) final { std::free(data); }
  void StreamSync(DLDevice, TVMStreamHandle) final {}

 protected:
  void CopyDataFromTo(const void* from, size_t from_offset, void* to, size_t to_offset, size_t bytes, DLDevice, DLDevice,
                      DLDataType, TVMStreamHandle) final {
    std::memcpy(static_cast<char*>(to) + to_offset, static_cast<const char*>(from) + from_offset, bytes);
  }
};

TVM_FFI_STATIC_INIT_BLOCK() {
  tvm::ffi::reflection::GlobalDef().def("device_api.cuda", []() -> void* {
    static Host host;
    return static_cast<tvm::runtime::DeviceAPI*>(&host);
  });
}

}  // namespace

extern "C" {

size_t cudnnGetVersion() { return 92400; }
const char* cudnnGetErrorString(cudnnStatus_t) { return "the host refuses"; }
void cudnnGetLastErrorString(char* text, size_t) { text[0] = 0; }
cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
  *handle = reinterpret_cast<cudnnHandle_t>(new int);
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetStream(cudnnHandle_t, cudaStream_t) { return CUDNN_STATUS_SUCCESS; }

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t* made) {
  Node* node = new Node;
  node->type = type;
  *made = node;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t node) {
  delete static_cast<Node*>(node);
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t raw) {
  Node& node = *static_cast<Node*>(raw);
  if (node.type == CUDNN_BACKEND_ENGINE_DESCRIPTOR && node.One<int64_t>(CUDNN_ATTR_ENGINE_GLOBAL_INDEX) > 4) {
    return CUDNN_STATUS_NOT_SUPPORTED;
  }
  if (node.type == CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR) {
    node.Put(CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, int64_t{EngineOf(node) == 1 ? 100 : 0});
  }
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t raw, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t count, const void* from) {
  Node& node = *static_cast<Node*>(raw);
  if (type == CUDNN_TYPE_BACKEND_DESCRIPTOR) {
    auto parts = std::make_shared<std::vector<Node>>();
    for (int64_t i = 0; i < count; ++i) parts->push_back(*static_cast<Node* const*>(from)[i]);
    node.parts[name] = parts;
  } else {
    const char* bytes = static_cast<const char*>(from);
    node.values[name].assign(bytes, bytes + static_cast<size_t>(count) * SizeOf(type));
  }
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const raw, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t most, int64_t* count, void* to) {
  Node& node = *static_cast<Node*>(raw);
  if (type != CUDNN_TYPE_BACKEND_DESCRIPTOR) {
    const std::vector<char>& bytes = node.values[name];
    *count = static_cast<int64_t>(bytes.size() / SizeOf(type));
    std::memcpy(to, bytes.data(), std::min(bytes.size(), static_cast<size_t>(most) * SizeOf(type)));
    return CUDNN_STATUS_SUCCESS;
  }
  std::vector<Node> parts;
  if (node.type == CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR) {
    parts = Configs(node);
  } else if (node.parts.count(name) != 0) {
    parts = *node.parts[name];
  }
  *count = static_cast<int64_t>(parts.size());
  for (int64_t i = 0; i < std::min(most, *count); ++i) *static_cast<Node**>(to)[i] = parts[static_cast<size_t>(i)];
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendExecute(cudnnHandle_t, cudnnBackendDescriptor_t raw_plan, cudnnBackendDescriptor_t raw_pack) {
  const Node &plan = *static_cast<Node*>(raw_plan), &pack = *static_cast<Node*>(raw_pack);
  const int64_t engine = EngineOf(plan);
  if (engine == 4) return CUDNN_STATUS_EXECUTION_FAILED;
  if (engine == 0) usleep(3000);
  if (engine == 1) std::memset(pack.One<char*>(CUDNN_ATTR_VARIANT_PACK_WORKSPACE), 1, 100);
  std::map<int64_t, char*> given;
  const auto ids = pack.All<int64_t>(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
  const auto data = pack.All<char*>(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
  for (size_t i = 0; i < ids.size(); ++i) given[ids[i]] = data[i];
  std::map<int64_t, std::vector<char>> made;
  char kept[8] = {0};
  char* end = nullptr;
  size_t size = 0;
  const std::function<Tensor(const Node&)> tensor = [&](const Node& node) {
    Tensor found(node, given, &made);
    if (found.id == given.rbegin()->first && end == nullptr) {
      size = found.is_double ? 8 : 4;
      end = found.data + found.Bytes();
      std::memcpy(kept, end - size, size);
    }
    return found;
  };
  const Node& graph = plan.Part(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG)
                          .Part(CUDNN_ATTR_ENGINECFG_ENGINE)
                          .Part(CUDNN_ATTR_ENGINE_OPERATION_GRAPH);
  for (const Node& op : *graph.parts.at(CUDNN_ATTR_OPERATIONGRAPH_OPS)) {
    switch (op.type) {
      case CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR:
        Convolve(op, {CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
                      CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
                      CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA},
                 2, tensor);
        break;
      case CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR:
        Convolve(op, {CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
                      CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
                      CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA},
                 1, tensor);
        break;
      case CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR:
        Convolve(op, {CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
                      CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
                      CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA},
                 0, tensor);
        break;
      default: Pointwise(op, tensor);
    }
  }
  if (engine == 2) std::memcpy(end - size, kept, size);
  if (engine == 3) *end = static_cast<char>(~*end);
  return CUDNN_STATUS_SUCCESS;
}

}  // extern "C"
