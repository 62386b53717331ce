// SPDX-License-Identifier: Apache-2.0
// A stopwatch of the GPU's own clock: two CUDA events on a stream. CUDA's runtime is the one that the process has.
#pragma once

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdint>

#include "host.h"

namespace convgrad {

class Stopwatch {
 public:
  explicit Stopwatch(cudaStream_t stream) : stream_(stream) {
    Check(F().create(&begin_));
    Check(F().create(&end_));
    Check(F().record(begin_, stream_));
  }
  ~Stopwatch() {
    if (begin_ != nullptr) F().destroy(begin_);
    if (end_ != nullptr) F().destroy(end_);
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

  /*! \brief Nanoseconds from the beginning to now, once the stream is done with what it was given. */
  double Stop() {
    float milliseconds = 0;
    Check(F().record(end_, stream_));
    Check(F().synchronize(end_));
    Check(F().elapsed(&milliseconds, begin_, end_));
    return 1e6 * milliseconds;
  }

 private:
  struct Functions {
    cudaError_t (*create)(cudaEvent_t*);
    cudaError_t (*destroy)(cudaEvent_t);
    cudaError_t (*record)(cudaEvent_t, cudaStream_t);
    cudaError_t (*synchronize)(cudaEvent_t);
    cudaError_t (*elapsed)(float*, cudaEvent_t, cudaEvent_t);
    const char* (*reason)(cudaError_t);
  };

  static const Functions& F() {
    static const Functions functions = [] {
      void* opened = dlopen("libcudart.so.13", RTLD_NOW | RTLD_LOCAL);  // by its soname: the copy that TVM calls
      Functions found;
      Find(opened, "cudaEventCreate", &found.create);
      Find(opened, "cudaEventDestroy", &found.destroy);
      Find(opened, "cudaEventRecord", &found.record);
      Find(opened, "cudaEventSynchronize", &found.synchronize);
      Find(opened, "cudaEventElapsedTime", &found.elapsed);
      Find(opened, "cudaGetErrorString", &found.reason);
      return found;
    }();
    return functions;
  }

  template <typename T>
  static void Find(void* opened, const char* name, T* found) {
    void* address = opened == nullptr ? nullptr : dlsym(opened, name);
    if (address == nullptr) {
      CONVGRAD_THROW(RuntimeError) << "cudnn: " << name << " of libcudart.so.13 cannot be had; pip install "
                                  << "'tvm-convgrad[cuda]' brings it";
    }
    *found = reinterpret_cast<T>(address);
  }

  static void Check(cudaError_t status) {
    if (status != cudaSuccess) CONVGRAD_THROW(ValueError) << "cudnn: the GPU says: " << F().reason(status);
  }

  cudaStream_t stream_;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

}  // namespace convgrad
