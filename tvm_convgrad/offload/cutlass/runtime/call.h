// SPDX-License-Identifier: Apache-2.0
// One call: a convolution's problem, what is added, and the kernel, as the plain numbers that generated code holds. The
// order of fields is that of offload/calls.py, then that of CutlassBackend.numbers in cutlass/backend.py.
#pragma once

#include <cstdint>

namespace convgrad {

constexpr int64_t kForward = 0, kBackwardWeight = 1, kBackwardData = 2;

struct Call {
  int64_t direction, rank, batch, in_channels, out_channels, groups;  // batch -1: as the first tensor has it
  int64_t data_extents[3], grad_extents[3], kernel[3], strides[3], dilation[3], pad_low[3], pad_high[3];
  int64_t types[3], layouts[3][5];  // of the kernel's library; NHWC and OHWI
  int64_t bias, relu, accumulate, bias_grad;
  int64_t slices;                   // of the sum
  int64_t key;                      // of the kernel's library

  static constexpr int kCount = 6 + 7 * 3 + 3 + 3 * 5 + 4 + 2;

  int64_t tensors() const { return 3 + bias + accumulate; }
};

static_assert(sizeof(Call) == Call::kCount * sizeof(int64_t));

// What a kernel's library exports, all of it plain C.
using Check = const char*(const int64_t* call, int64_t* workspace);  // why not, or null; bytes; needs no GPU
using Launch = const char*(const int64_t* call, void* const* tensors, void* workspace, int device, void* stream);

}  // namespace convgrad
