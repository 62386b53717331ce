// SPDX-License-Identifier: Apache-2.0
// Runs kernels of a library once each: kernels LIBRARY JOBS DATA RESULTS.
//
// JOBS is text: the name of a function, the number of its tensors, and for each tensor DLPack's type code, its bits, its
// rank, its extents and the offset of its bytes in DATA; -1 for the result, which holds NaN before.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "runtime.h"

namespace {

void Run(const char* library, const char* jobs, const char* data, const char* results) {
  const convgrad::ffi::Any module =
      convgrad::Call(convgrad::Global("ffi.ModuleLoadFromFile"), {convgrad::ffi::String(library)}, library);
  std::ifstream list(jobs), file(data, std::ios::binary);
  const std::vector<char> content{std::istreambuf_iterator<char>(file), {}};
  std::ofstream out(results, std::ios::binary);
  std::string name;
  int count = 0;
  while (list >> name >> count) {
    std::vector<convgrad::ffi::Any> tensors;
    for (int i = 0; i < count; ++i) {
      int code = 0, bits = 0, rank = 0;
      long long offset = 0;
      list >> code >> bits >> rank;
      std::vector<std::int64_t> shape(rank);
      for (std::int64_t& extent : shape) list >> extent;
      list >> offset;
      const DLDataType type{static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(bits), 1};
      const convgrad::ffi::Tensor tensor = convgrad::NewTensor(shape, type);
      const std::size_t bytes = convgrad::BytesOf(tensor);
      if (offset < 0) {
        std::memset(tensor.data_ptr(), 0xff, bytes);
      } else {
        std::memcpy(tensor.data_ptr(), content.data() + offset, bytes);
      }
      tensors.push_back(tensor);
    }
    convgrad::Call(convgrad::FunctionOf(module, name.c_str(), library), {tensors.begin(), tensors.end()}, name);
    const auto result = tensors.back().cast<convgrad::ffi::Tensor>();
    out.write(static_cast<const char*>(result.data_ptr()), static_cast<std::streamsize>(convgrad::BytesOf(result)));
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  try {
    Run(argv[1], argv[2], argv[3], argv[4]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "kernels: %s\n", error.what());
    return 1;
  }
  return 0;
}
