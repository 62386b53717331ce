// SPDX-License-Identifier: Apache-2.0
// What the runtimes of backends need of TVM: errors, tensors, threads, workspace, and a GPU's stream. With
// CONVGRAD_RELAY defined it is TVM up to 0.19 by its C interface, whose functions the process has already: nothing of
// TVM is needed to compile or link a runtime then. Otherwise it is TVM from 0.26 on, by TVM-FFI.
#pragma once

#ifdef CONVGRAD_RELAY
#include "relay_host.h"
#else
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/string.h>
#include <tvm/runtime/c_backend_api.h>

#define CONVGRAD_THROW(kind) TVM_FFI_THROW(kind)

namespace convgrad {

/*! \brief The tensors among a packed function's arguments from `first` on. */
class PackedTensors {
 public:
  static constexpr int kMost = 8;
  PackedTensors(const tvm::ffi::PackedArgs& args, int first) : count_(args.size() - first) {
    if (count_ > kMost) CONVGRAD_THROW(ValueError) << "a call of " << count_ << " tensors; there may be " << kMost;
    for (int i = 0; i < count_; ++i) tensors_[i] = args[i + first].cast<DLTensor*>();
  }
  DLTensor* const* tensors() const { return tensors_; }
  int count() const { return count_; }

 private:
  DLTensor* tensors_[kMost];
  int count_;
};

inline int HostThreads() {
  static const tvm::ffi::Function count = tvm::ffi::Function::GetGlobalRequired("runtime.NumThreads");
  return count().cast<int>();
}

inline void* CurrentStream(DLDevice device) { return TVMFFIEnvGetStream(device.device_type, device.device_id); }

}  // namespace convgrad
#endif

namespace convgrad {

/*! \brief TVM's workspace, which it keeps from call to call. */
class Workspace {
 public:
  Workspace(const char* backend, DLDevice device, int64_t bytes)
      : device_(device), data_(bytes == 0 ? nullptr : Allocate(backend, device, bytes)) {}
  ~Workspace() {
    if (data_ != nullptr) TVMBackendFreeWorkspace(device_.device_type, device_.device_id, data_);
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  void* data() const { return data_; }

 private:
  static void* Allocate(const char* backend, DLDevice device, int64_t bytes) {
    void* data = TVMBackendAllocWorkspace(device.device_type, device.device_id, static_cast<uint64_t>(bytes), kDLUInt, 8);
    if (data == nullptr) {
      CONVGRAD_THROW(RuntimeError) << backend << ": there are no " << bytes << " bytes for its workspace";
    }
    return data;
  }
  DLDevice device_;
  void* data_;
};

}  // namespace convgrad
