// SPDX-License-Identifier: Apache-2.0
// Trains with a step that `convgrad build` wrote, without Python and without a compiler: libtvm_runtime and libtvm_ffi.
//
//     train STEP.so STEPS [X.raw Y.raw]
//
// One batch is used for all steps. X.raw and Y.raw hold it as plain numbers in the types that the step takes; without
// them it is made up. Prints the loss of each step with enough digits to tell any two floats apart.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/json.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace ffi = tvm::ffi;

namespace {

constexpr DLDevice kCpu{kDLCPU, 0};
constexpr int kPooledAllocator = 2;  // as in tvm/runtime/memory/memory_manager.h

struct AlignedMemory {
  void AllocData(DLTensor* tensor) {
    const std::size_t bytes = (ffi::GetDataSize(*tensor) + 63) / 64 * 64;
    tensor->data = std::aligned_alloc(64, bytes == 0 ? 64 : bytes);
    if (tensor->data == nullptr) throw std::bad_alloc();
  }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

/*! \brief A tensor with the extents and the element type that the manifest gives. */
ffi::Tensor NewTensor(const ffi::json::Object& entry) {
  std::vector<int64_t> shape;
  for (const ffi::Any& extent : entry["shape"].cast<ffi::json::Array>()) {
    const auto number = extent.as<int64_t>();
    if (!number) throw std::runtime_error("this example needs a fixed batch: build with --batch N");
    shape.push_back(*number);
  }
  const DLDataType dtype = ffi::StringToDLDataType(entry["dtype"].cast<ffi::String>());
  return ffi::Tensor::FromNDAlloc(AlignedMemory(), ffi::ShapeView(shape.data(), shape.size()), dtype, kCpu);
}

void ReadRaw(const std::string& path, const ffi::Tensor& tensor) {
  std::ifstream file(path, std::ios::binary);
  const auto bytes = static_cast<std::streamsize>(ffi::GetDataSize(tensor));
  if (!file.read(static_cast<char*>(tensor.data_ptr()), bytes) || file.peek() != EOF) {
    throw std::runtime_error(path + ": must hold exactly " + std::to_string(bytes) + " bytes");
  }
}

/*! \brief Floats spread over -1 to 1, or class numbers 0 to classes - 1. */
void MakeUp(const ffi::Tensor& tensor, int64_t classes) {
  for (int64_t i = 0; i < tensor.numel(); ++i) {
    if (tensor.dtype().code == kDLFloat && tensor.dtype().bits == 32) {
      static_cast<float*>(tensor.data_ptr())[i] = static_cast<float>(i * 7919 % 1001 - 500) / 500.0F;
    } else if (tensor.dtype().code == kDLInt && tensor.dtype().bits == 64) {
      static_cast<int64_t*>(tensor.data_ptr())[i] = i % classes;
    } else {
      throw std::runtime_error("made-up data is float32 or int64; give X.raw and Y.raw");
    }
  }
}

int Train(const std::string& path, int64_t steps, const std::string& x_path, const std::string& y_path) {
  ffi::Module library = ffi::Module::LoadFromFile(path);
  auto manifest_of = library->GetFunction("convgrad_manifest", /*query_imports=*/true);
  if (!manifest_of) throw std::runtime_error(path + ": not a training step of convgrad");
  const auto manifest = ffi::json::Parse((*manifest_of)().cast<ffi::String>()).cast<ffi::json::Object>();
  const auto schema = manifest["schema"].cast<ffi::json::Object>();
  const auto inputs = schema["inputs"].cast<ffi::json::Array>();
  if (inputs.size() != 1) throw std::runtime_error("this example takes models of one input");

  ffi::Tensor x = NewTensor(inputs[0].cast<ffi::json::Object>());
  ffi::Tensor y = NewTensor(schema["target"].cast<ffi::json::Object>());
  if (x_path.empty()) {
    const auto shape = schema["prediction"].cast<ffi::json::Object>()["shape"].cast<ffi::json::Array>();
    MakeUp(x, 1);
    MakeUp(y, shape[shape.size() - 1].cast<int64_t>());
  } else {
    ReadRaw(x_path, x);
    ReadRaw(y_path, y);
  }
  ffi::Tensor rate = ffi::Tensor::FromNDAlloc(AlignedMemory(), ffi::ShapeView(nullptr, 0), DLDataType{kDLFloat, 32, 1},
                                              kCpu);
  *static_cast<float*>(rate.data_ptr()) =
      static_cast<float>(manifest["options"].cast<ffi::json::Object>()["lr"].cast<double>());

  ffi::Module machine = library->GetFunction("vm_load_executable").value()().cast<ffi::Module>();
  machine->GetFunction("vm_initialization").value()(static_cast<int>(kCpu.device_type), 0, kPooledAllocator);
  const ffi::Function step = machine->GetFunction("step").value();
  ffi::Any state = machine->GetFunction("init").value()();
  for (int64_t number = 1; number <= steps; ++number) {
    const auto result = step(x, y, rate, state).cast<ffi::Array<ffi::Any>>();
    state = result[2];
    const float loss = *static_cast<const float*>(result[0].cast<ffi::Tensor>().data_ptr());
    std::printf("step %lld loss %.9g\n", static_cast<long long>(number), static_cast<double>(loss));
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const long long steps = argc >= 3 ? std::atoll(argv[2]) : 0;
  if ((argc != 3 && argc != 5) || steps < 1) {
    std::fprintf(stderr, "usage: %s STEP.so STEPS [X.raw Y.raw]\n", argv[0]);
    return 2;
  }
  // Without this, TVM uses half of the CPUs.
  setenv("TVM_NUM_THREADS", std::to_string(std::thread::hardware_concurrency()).c_str(), /*overwrite=*/0);
  try {
    return Train(argv[1], steps, argc == 5 ? argv[3] : "", argc == 5 ? argv[4] : "");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", argv[0], error.what());
    return 1;
  }
}
