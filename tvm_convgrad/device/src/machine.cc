// SPDX-License-Identifier: Apache-2.0
#include "machine.h"

#if defined(__aarch64__)
#include <sys/auxv.h>
#else
#include <fstream>
#include <sstream>
#endif

namespace convgrad {
namespace {

#if defined(__aarch64__)

// The kernel's word: /proc/cpuinfo is the host's where another machine is emulated.
std::set<std::string> Found() {
  const unsigned long one = getauxval(AT_HWCAP), two = getauxval(AT_HWCAP2);
  std::set<std::string> features;
  if (one & (1UL << 10)) features.insert("fullfp16");
  if (one & (1UL << 20)) features.insert("dotprod");
  if (one & (1UL << 22)) features.insert("sve");
  if (two & (1UL << 13)) features.insert("i8mm");
  if (two & (1UL << 14)) features.insert("bf16");
  return features;
}

#else

// LLVM's names and Linux's.
constexpr const char* kFlags[][2] = {
    {"sse4.1", "sse4_1"},         {"sse4.2", "sse4_2"},         {"avx", "avx"},
    {"avx2", "avx2"},             {"f16c", "f16c"},             {"fma", "fma"},
    {"avx512f", "avx512f"},       {"avx512bw", "avx512bw"},     {"avx512dq", "avx512dq"},
    {"avx512vl", "avx512vl"},     {"avx512vnni", "avx512_vnni"}, {"avx512bf16", "avx512_bf16"},
    {"avx512fp16", "avx512_fp16"}, {"avxvnni", "avx_vnni"},      {"amx-tile", "amx_tile"},
    {"amx-bf16", "amx_bf16"},      {"amx-fp16", "amx_fp16"},
};

std::set<std::string> Found() {
  std::ifstream file("/proc/cpuinfo");
  std::string line, flag;
  std::set<std::string> flags, features;
  while (flags.empty() && std::getline(file, line)) {
    if (line.compare(0, 5, "flags") != 0) continue;
    std::istringstream words(line);
    while (words >> flag) flags.insert(flag);
  }
  for (const auto& names : kFlags) {
    if (flags.count(names[1])) features.insert(names[0]);
  }
  return features;
}

#endif

}  // namespace

const std::set<std::string>& CpuFeatures() {
  static const std::set<std::string> features = Found();
  return features;
}

}  // namespace convgrad
