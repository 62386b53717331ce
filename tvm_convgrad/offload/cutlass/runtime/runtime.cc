// SPDX-License-Identifier: Apache-2.0
// CUTLASS's convolutions for compiled modules. Generated code calls the global function `convgrad.cutlass.1.run` with a
// pointer to a Call and the tensors; the 1 is the version of this interface. Each kernel is a library of its own, which
// is opened when it is first called. This file needs nothing of CUDA. Built for a TVM
// with Relay, it exports C functions instead.
#include <dlfcn.h>

#include <cinttypes>
#include <cstdio>
#include <mutex>
#include <string>
#include <unordered_map>

#include "call.h"
#include "host.h"

namespace convgrad {
namespace {

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
    CONVGRAD_THROW(RuntimeError) << "cutlass: this program calls the kernel " << name << ", which cannot be loaded ("
                                << why << "); build the program again on this machine, or put the file beside "
                                << own << "libconvgrad_cutlass.so.1, or on LD_LIBRARY_PATH";
  }
  const Functions found{reinterpret_cast<Check*>(dlsym(library, "convgrad_cutlass_check")),
                        reinterpret_cast<Launch*>(dlsym(library, "convgrad_cutlass_launch"))};
  if (found.check == nullptr || found.launch == nullptr) {
    CONVGRAD_THROW(RuntimeError) << "cutlass: " << name << " is not a kernel that this version can call";
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

void Run(const int64_t* stated, DLTensor* const* tensors, int count) {
  Call call = *reinterpret_cast<const Call*>(stated);
  if (count != call.tensors()) {
    CONVGRAD_THROW(ValueError) << "cutlass: " << count << " tensors where " << call.tensors() << " are expected";
  }
  void* data[kMostTensors];
  for (int i = 0; i < count; ++i) {
    const DLTensor* tensor = tensors[i];
    if (tensor->device.device_type != kDLCUDA) {
      CONVGRAD_THROW(ValueError) << "cutlass: tensor " << i << " is not in the memory of an NVIDIA GPU; build for the "
                                << "target cuda and pass tensors of tvm.cuda()";
    }
    data[i] = static_cast<char*>(tensor->data) + tensor->byte_offset;
    if (reinterpret_cast<uintptr_t>(data[i]) % kAlignment != 0) {
      CONVGRAD_THROW(ValueError) << "cutlass: tensor " << i << " does not begin at a multiple of " << kAlignment
                                << " bytes; copy it to memory of its own";
    }
    if (i == 0 && call.batch < 0) call.batch = tensor->shape[0];
  }
  if (call.batch == 0) CONVGRAD_THROW(ValueError) << "cutlass: a batch of 0";
  const DLDevice device = tensors[0]->device;
  const Functions kernel = KernelOf(call.key);
  const auto* numbers = reinterpret_cast<const int64_t*>(&call);
  int64_t bytes = 0;
  const char* error = kernel.check(numbers, &bytes);
  if (error == nullptr) {
    const Workspace workspace("cutlass", device, bytes);
    error = kernel.launch(numbers, data, workspace.data(), device.device_id, CurrentStream(device));
  }
  if (error != nullptr) CONVGRAD_THROW(RuntimeError) << "cutlass: the kernel cannot be started: " << error;
}

#ifdef CONVGRAD_RELAY
/*! \brief "check": that the kernel's library can be opened, and takes the call; bytes of workspace. */
std::string Ask(const std::string& question, const int64_t* numbers, const char*, int64_t) {
  if (question != "check") CONVGRAD_THROW(ValueError) << "cutlass: there is no question " << question;
  int64_t bytes = 0;
  const char* error = KernelOf(reinterpret_cast<const Call*>(numbers)->key).check(numbers, &bytes);
  if (error != nullptr) CONVGRAD_THROW(ValueError) << "cutlass: " << error;
  return std::to_string(bytes);
}
#else
void RunPacked(tvm::ffi::PackedArgs args, tvm::ffi::Any*) {
  const PackedTensors given(args, 1);
  Run(static_cast<const int64_t*>(args[0].cast<void*>()), given.tensors(), given.count());
}

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  refl::GlobalDef().def_packed("convgrad.cutlass.1.run", RunPacked);
}
#endif

}  // namespace
}  // namespace convgrad

#ifdef CONVGRAD_RELAY
CONVGRAD_EXPORT(cutlass)
#endif
