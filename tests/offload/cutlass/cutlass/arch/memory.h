// SPDX-License-Identifier: Apache-2.0
// In place of CUTLASS's header of this name: its accesses to global memory, on the host, each checked against the
// tensors that there are. What it declares of shared memory is not used.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "cutlass/arch/cache_operation.h"
#include "cutlass/cutlass.h"

namespace convgrad {

/*! \brief A tensor's memory; for a result, how often each of its bytes was written. */
struct Range {
  const char* begin;
  size_t size;
  std::vector<int>* writes;
};

inline std::vector<Range>& Memory() {
  static std::vector<Range> ranges;
  return ranges;
}

/*! \brief The range that an access lies in, at a multiple of its size. */
inline const Range& Within(const void* place, size_t bytes) {
  const char* begin = static_cast<const char*>(place);
  for (const Range& range : Memory()) {
    if (begin < range.begin || begin + bytes > range.begin + range.size) continue;
    if (static_cast<size_t>(begin - range.begin) % bytes != 0) throw std::runtime_error("an access is not aligned");
    return range;
  }
  throw std::runtime_error("an access is outside of every tensor");
}

}  // namespace convgrad

namespace cutlass {
namespace arch {

template <typename AccessType, int LoadBytes, CacheOperation::Kind = CacheOperation::Always>
struct global_load {
  global_load(AccessType& to, const void* from, bool guard) {
    if (!guard) return;
    convgrad::Within(from, LoadBytes);
    std::memcpy(&to, from, LoadBytes);
  }
};

template <typename AccessType, int StoreBytes>
struct global_store {
  global_store(const AccessType& from, void* to, bool guard) {
    if (!guard) return;
    const convgrad::Range& range = convgrad::Within(to, StoreBytes);
    if (range.writes == nullptr) throw std::runtime_error("an operand is written to");
    const size_t first = static_cast<char*>(to) - range.begin;
    for (size_t byte = first; byte < first + StoreBytes; ++byte) ++(*range.writes)[byte];
    std::memcpy(to, &from, StoreBytes);
  }
};

template <int Bytes>
void shared_load(void*, uint32_t) {
  throw std::runtime_error("shared memory is not emulated");
}
template <int Bytes>
void shared_store(uint32_t, const void*) {
  throw std::runtime_error("shared memory is not emulated");
}

}  // namespace arch
}  // namespace cutlass

#include "cutlass/arch/memory_sm75.h"
#include "cutlass/arch/memory_sm80.h"
