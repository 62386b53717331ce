// SPDX-License-Identifier: Apache-2.0
#include "runtime.h"

#include <sched.h>
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/string.h>

#include <cstdlib>
#include <cstring>
#include <new>

#include "failure.h"

namespace convgrad {
namespace {

constexpr DLDevice kCpu{kDLCPU, 0};
constexpr std::size_t kAlignment = 64;

// The first line of the error that tvm-ffi holds for this thread.
std::string RaisedError() {
  TVMFFIObjectHandle error = nullptr;
  TVMFFIErrorMoveFromRaised(&error);
  if (error == nullptr) return "unknown error";
  const TVMFFIErrorCell* cell = TVMFFIErrorGetCellPtr(error);
  std::string text(cell->message.data, cell->message.size);
  TVMFFIObjectDecRef(error);
  return text.substr(0, text.find('\n'));
}

struct AlignedMemory {
  void AllocData(DLTensor* tensor) {
    const std::size_t bytes = (ffi::GetDataSize(*tensor) + kAlignment - 1) / kAlignment * kAlignment;
    tensor->data = std::aligned_alloc(kAlignment, bytes == 0 ? kAlignment : bytes);
    if (tensor->data == nullptr) throw std::bad_alloc();
  }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

// Memory of the caller, which outlives the call.
struct BorrowedMemory {
  void* data;
  void AllocData(DLTensor* tensor) { tensor->data = data; }
  void FreeData(DLTensor*) {}
};

}  // namespace

ffi::Any Call(const ffi::Any& function, const std::vector<ffi::AnyView>& arguments, const std::string& what) {
  std::vector<TVMFFIAny> raw(arguments.size());
  for (std::size_t i = 0; i < raw.size(); ++i) raw[i] = arguments[i].CopyToTVMFFIAny();
  auto* callee = reinterpret_cast<TVMFFIObjectHandle>(ffi::AnyView(function).CopyToTVMFFIAny().v_obj);
  TVMFFIAny result{};
  if (TVMFFIFunctionCall(callee, raw.data(), static_cast<std::int32_t>(raw.size()), &result) != 0) {
    throw Failure(what + " failed: " + RaisedError());
  }
  return ffi::details::AnyUnsafe::MoveTVMFFIAnyToAny(&result);
}

ffi::Any Global(const char* name) {
  const TVMFFIByteArray text{name, std::strlen(name)};
  TVMFFIObjectHandle handle = nullptr;
  if (TVMFFIFunctionGetGlobal(&text, &handle) != 0) throw Failure(RaisedError());
  if (handle == nullptr) {
    throw Failure("TVM has no function " + std::string(name) + "; link libtvm_runtime and libtvm_ffi of one release.");
  }
  TVMFFIAny owned{};
  owned.type_index = kTVMFFIFunction;
  owned.v_obj = static_cast<TVMFFIObject*>(handle);
  return ffi::details::AnyUnsafe::MoveTVMFFIAnyToAny(&owned);
}

ffi::Any FunctionOf(const ffi::Any& module, const char* name, const std::string& what) {
  ffi::Any found = Call(Global("ffi.ModuleGetFunction"), {module, ffi::AnyView(name), true}, what);
  if (found.type_index() != kTVMFFIFunction) {
    throw Failure(what + ": the library has no function " + name + "; build it again.");
  }
  return found;
}

ffi::Tensor NewTensor(const std::vector<std::int64_t>& shape, DLDataType dtype) {
  return ffi::Tensor::FromNDAlloc(AlignedMemory(), ffi::ShapeView(shape.data(), shape.size()), dtype, kCpu);
}

ffi::Tensor TensorOf(const void* data, std::size_t bytes, const std::vector<std::int64_t>& shape, DLDataType dtype) {
  if (bytes > 0 && reinterpret_cast<std::uintptr_t>(data) % kAlignment == 0) {
    return ffi::Tensor::FromNDAlloc(BorrowedMemory{const_cast<void*>(data)}, ffi::ShapeView(shape.data(), shape.size()),
                                    dtype, kCpu);
  }
  ffi::Tensor copy = NewTensor(shape, dtype);
  if (bytes > 0) std::memcpy(copy.data_ptr(), data, bytes);
  return copy;
}

std::vector<std::int64_t> ShapeOf(const ffi::Tensor& tensor) {
  const DLTensor* raw = tensor.GetDLTensorPtr();
  return {raw->shape, raw->shape + raw->ndim};
}

std::size_t BytesOf(const ffi::Tensor& tensor) {
  if (!tensor.IsContiguous() || tensor.device().device_type != kDLCPU) {
    throw Failure("a result is not a contiguous tensor on the CPU; build the step for a CPU.");
  }
  return ffi::GetDataSize(*tensor.GetDLTensorPtr());
}

namespace {

constexpr char kThreads[] = "TVM_NUM_THREADS";

int UsableCpus() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

}  // namespace

void DefaultThreads() { setenv(kThreads, std::to_string(UsableCpus()).c_str(), /*overwrite=*/0); }

void UseThreads(int count) {
  if (count < 0) throw Failure("convgrad_use_threads: " + std::to_string(count) + " threads; give 0 or more.");
  static const int usable = UsableCpus();  // once: TVM binds this thread to a CPU when it makes its pool
  if (count > usable) {  // TVM would start them all, and its pool would not end with the process
    throw Failure("convgrad_use_threads: " + std::to_string(count) + " threads; this process may use " +
                  std::to_string(usable) + " CPUs, give no more.");
  }
  if (count == 0) count = usable;
  setenv(kThreads, std::to_string(count).c_str(), 1);
  const auto made = Call(Global("runtime.NumThreads"), {}, "convgrad_use_threads").cast<std::int64_t>();
  if (made != count) {
    throw Failure("convgrad_use_threads: TVM's pool has " + std::to_string(made) + " threads, not " +
                  std::to_string(count) + ". It keeps its number once it is made; call this first.");
  }
}

}  // namespace convgrad
