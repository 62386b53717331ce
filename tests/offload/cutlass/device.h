// SPDX-License-Identifier: Apache-2.0
// What nvcc knows of a device, for a C++ compiler to read CUTLASS's headers; nothing of it is computed with.
#pragma once

struct DeviceIndex {
  unsigned x, y, z;
};
static const DeviceIndex threadIdx{}, blockIdx{}, blockDim{}, gridDim{};

inline void __syncthreads() {}
inline int __syncthreads_and(int value) { return value; }
template <typename T>
T __shfl_sync(unsigned, T value, int) {
  return value;
}

namespace cutlass {
namespace arch {
inline int LaneId() { return 0; }
}  // namespace arch
}  // namespace cutlass
