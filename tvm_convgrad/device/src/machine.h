// SPDX-License-Identifier: Apache-2.0
// This machine: its architecture and the instruction sets that artifacts may require.
#ifndef CONVGRAD_SRC_MACHINE_H_
#define CONVGRAD_SRC_MACHINE_H_

#include <set>
#include <string>

namespace convgrad {

constexpr const char* kArchitecture =
#if defined(__x86_64__)
    "x86_64";
#elif defined(__aarch64__)
    "aarch64";
#else
    "an architecture without artifacts";
#endif

// The number of the architecture in the header of an ELF file.
constexpr int kElfMachine =
#if defined(__x86_64__)
    62;
#elif defined(__aarch64__)
    183;
#else
    -1;
#endif

// By LLVM's names, the same as tvm_convgrad/core/cpu_features.py.
const std::set<std::string>& CpuFeatures();

}  // namespace convgrad

#endif  // CONVGRAD_SRC_MACHINE_H_
