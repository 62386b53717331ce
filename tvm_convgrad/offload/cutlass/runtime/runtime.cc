// SPDX-License-Identifier: Apache-2.0
// CUTLASS's convolutions for compiled modules. Generated code calls the global function `convgrad.cutlass.1.run` with a
// pointer to a Call and the tensors; the 1 is the version of this interface. Each kernel is a library of its own, which
// is opened when it is first called. This file needs nothing of CUDA.
#include <dlfcn.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/string.h>
#include <tvm/runtime/c_backend_api.h>

#include <cinttypes>
#include <cstdio>
#include <mutex>
#include <string>
#include <unordered_map>

#include "call.h"

namespace convgrad {
namespace {

namespace ffi = tvm::ffi;

constexpr int kMostTensors = 5;
constexpr uintptr_t kAlignment = 16;  // bytes of the widest access

struct Functions {
  Check* check;
  Launch* launch;
};

/*! \brief The folder that this library lies in, with the slash. */
std::string OwnFolder() {
  Dl_info info;
  if (dladdr(reinterpret_cast<void*>(&OwnFolder), &info) == 0 || info.dli_fname == nullptr) return "./";
  const std::string path = info.dli_fname;
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "./" : path.substr(0, slash + 1);
}

/*! \brief A kernel by its key: from beside this library, from its place in the cache, or from where the loader looks. */
Functions Opened(int64_t key) {
  char name[64], folder[64];
  std::snprintf(name, sizeof(name), "libconvgrad_cutlass_%015" PRIx64 ".so", key);
  std::snprintf(folder, sizeof(folder), "../cutlass-kernel-%015" PRIx64 "/", key);
  const std::string own = OwnFolder();
  void* library = nullptr;
  std::string why;
  for (const std::string& path : {own + name, own + folder + name, std::string(name)}) {
    library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library != nullptr) break;
    why = dlerror();
  }
  if (library == nullptr) {
    TVM_FFI_THROW(RuntimeError) << "cutlass: this program calls the kernel " << name << ", which cannot be loaded ("
                                << why << "); build the program anew on this machine, or put the file beside "
                                << own << "libconvgrad_cutlass.so.1 or on LD_LIBRARY_PATH";
  }
  const Functions found{reinterpret_cast<Check*>(dlsym(library, "convgrad_cutlass_check")),
                        reinterpret_cast<Launch*>(dlsym(library, "convgrad_cutlass_launch"))};
  if (found.check == nullptr || found.launch == nullptr) {
    TVM_FFI_THROW(RuntimeError) << "cutlass: " << name << " is no kernel that this version can call";
  }
  return found;
}

Functions KernelOf(int64_t key) {
  static std::mutex mutex;
  static auto& kernels = *new std::unordered_map<int64_t, Functions>;  // outlives other libraries
  std::lock_guard<std::mutex> lock(mutex);
  auto found = kernels.find(key);
  return found != kernels.end() ? found->second : kernels.emplace(key, Opened(key)).first->second;
}

/*! \brief TVM's workspace on a GPU, which it keeps from call to call. */
class Workspace {
 public:
  Workspace(int device, int64_t bytes) : device_(device), data_(bytes == 0 ? nullptr : Allocate(device, bytes)) {}
  ~Workspace() {
    if (data_ != nullptr) TVMBackendFreeWorkspace(kDLCUDA, device_, data_);
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  void* data() const { return data_; }

 private:
  static void* Allocate(int device, int64_t bytes) {
    void* data = TVMBackendAllocWorkspace(kDLCUDA, device, static_cast<uint64_t>(bytes), kDLUInt, 8);
    if (data == nullptr) TVM_FFI_THROW(RuntimeError) << "cutlass: there are no " << bytes << " bytes for its workspace";
    return data;
  }
  int device_;
  void* data_;
};

void Run(ffi::PackedArgs args, ffi::Any*) {
  Call call = *static_cast<const Call*>(args[0].cast<void*>());
  const int count = args.size() - 1;
  if (count != call.tensors()) {
    TVM_FFI_THROW(ValueError) << "cutlass: " << count << " tensors where " << call.tensors() << " are expected";
  }
  void* data[kMostTensors];
  int device = 0;
  for (int i = 0; i < count; ++i) {
    const auto* tensor = args[i + 1].cast<DLTensor*>();
    if (tensor->device.device_type != kDLCUDA) {
      TVM_FFI_THROW(ValueError) << "cutlass: tensor " << i << " is not in the memory of an NVIDIA GPU; build for the "
                                << "target cuda and pass tensors of tvm.cuda()";
    }
    data[i] = static_cast<char*>(tensor->data) + tensor->byte_offset;
    if (reinterpret_cast<uintptr_t>(data[i]) % kAlignment != 0) {
      TVM_FFI_THROW(ValueError) << "cutlass: tensor " << i << " does not begin at a multiple of " << kAlignment
                                << " bytes; copy it to memory of its own";
    }
    if (i == 0) device = tensor->device.device_id;
    if (i == 0 && call.batch < 0) call.batch = tensor->shape[0];
  }
  if (call.batch == 0) TVM_FFI_THROW(ValueError) << "cutlass: a batch of 0";
  const Functions kernel = KernelOf(call.key);
  const auto* numbers = reinterpret_cast<const int64_t*>(&call);
  int64_t bytes = 0;
  const char* error = kernel.check(numbers, &bytes);
  if (error == nullptr) {
    Workspace workspace(device, bytes);
    error = kernel.launch(numbers, data, workspace.data(), device, TVMFFIEnvGetStream(kDLCUDA, device));
  }
  if (error != nullptr) TVM_FFI_THROW(RuntimeError) << "cutlass: the kernel cannot be started: " << error;
}

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  refl::GlobalDef().def_packed("convgrad.cutlass.1.run", Run);
}

}  // namespace
}  // namespace convgrad
