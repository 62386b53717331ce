// SPDX-License-Identifier: Apache-2.0
// A kernel of CUTLASS as two C functions: whether it computes a call, and the launch on a stream. No memory is
// allocated here and nothing waits.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "arguments.h"
#include "cutlass/conv/device/implicit_gemm_convolution.h"

namespace convgrad {

/*! \brief Each element of the result is the sum of its slices, in order, and of the summand if there is one. */
template <typename Result>
__global__ void SumSlices(const float* partial, int64_t slices, int64_t size, const Result* summand, Result* result) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < size; i += step) {
    float total = summand == nullptr ? 0.F : static_cast<float>(summand[i]);
    for (int64_t slice = 0; slice < slices; ++slice) total += partial[slice * size + i];
    result[i] = static_cast<Result>(total);
  }
}

template <typename Kernel, typename Result>
struct Convolution {
  using Device = cutlass::conv::device::ImplicitGemmConvolution<Kernel>;
  static constexpr bool kParallel = !std::is_same<Result, typename Kernel::ElementC>::value;

  static const char* Check(const Call& call, int64_t* workspace) {
    void* const none[6] = {};
    const auto arguments = ArgumentsOf<Kernel>(call, none, nullptr, kParallel);
    *workspace = static_cast<int64_t>(Device::get_workspace_size(arguments));
    const cutlass::Status status = Device::can_implement(arguments);
    return status == cutlass::Status::kSuccess ? nullptr : cutlassGetStatusString(status);
  }

  static const char* Launch(const Call& call, void* const* tensors, void* workspace, int device, cudaStream_t stream) {
    cudaError_t error = cudaSetDevice(device);
    if (error != cudaSuccess) return cudaGetErrorString(error);
    const auto arguments = ArgumentsOf<Kernel>(call, tensors, workspace, kParallel);
    Device convolution;
    cutlass::Status status = convolution.initialize(arguments, workspace, stream);
    if (status == cutlass::Status::kSuccess) status = convolution.run(stream);
    if (status != cutlass::Status::kSuccess) {
      error = cudaGetLastError();
      return error == cudaSuccess ? cutlassGetStatusString(status) : cudaGetErrorString(error);
    }
    if (kParallel) {
      constexpr int kThreads = 256, kMostBlocks = 4096;
      const int64_t size = cutlass::conv::implicit_gemm_tensor_c_size(Kernel::kConvolutionalOperator, ProblemOf(call));
      const int64_t blocks = (size + kThreads - 1) / kThreads;
      SumSlices<Result><<<static_cast<int>(blocks < kMostBlocks ? blocks : kMostBlocks), kThreads, 0, stream>>>(
          static_cast<const float*>(workspace), call.slices, size,
          call.accumulate ? static_cast<const Result*>(tensors[2]) : nullptr,
          static_cast<Result*>(tensors[call.tensors() - 1]));
      error = cudaGetLastError();
      if (error != cudaSuccess) return cudaGetErrorString(error);
    }
    return nullptr;
  }
};

}  // namespace convgrad

#define CONVGRAD_TYPE(...) __VA_ARGS__
#define CONVGRAD_CUTLASS_KERNEL(Type, Result)                                                                     \
  namespace {                                                                                                     \
  template <typename = void>                                                                                      \
  struct Instance {                                                                                               \
    using Kernel = CONVGRAD_TYPE Type;                                                                            \
  };                                                                                                              \
  using Own = convgrad::Convolution<Instance<>::Kernel, Result>;                                                  \
  }                                                                                                               \
  extern "C" const char* convgrad_cutlass_check(const int64_t* call, int64_t* workspace) {                        \
    return Own::Check(*reinterpret_cast<const convgrad::Call*>(call), workspace);                                 \
  }                                                                                                               \
  extern "C" const char* convgrad_cutlass_launch(const int64_t* call, void* const* tensors, void* workspace,      \
                                                 int device, void* stream) {                                      \
    return Own::Launch(*reinterpret_cast<const convgrad::Call*>(call), tensors, workspace, device,                \
                       static_cast<cudaStream_t>(stream));                                                        \
  }
