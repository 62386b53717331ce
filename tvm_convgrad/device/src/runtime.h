// SPDX-License-Identifier: Apache-2.0
// Calls of TVM through tvm-ffi's C interface. C++ exceptions never cross from TVM's libraries into this one, which may
// be compiled with another C++ library.
#ifndef CONVGRAD_SRC_RUNTIME_H_
#define CONVGRAD_SRC_RUNTIME_H_

#include <tvm/ffi/any.h>
#include <tvm/ffi/container/tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace convgrad {

namespace ffi = tvm::ffi;

// Calls a function; `what` is how a failure calls it.
ffi::Any Call(const ffi::Any& function, const std::vector<ffi::AnyView>& arguments, const std::string& what);

// A function that TVM has registered.
ffi::Any Global(const char* name);

// A function of a module, or of what it imports.
ffi::Any FunctionOf(const ffi::Any& module, const char* name, const std::string& what);

// A tensor in memory of its own that begins at a multiple of 64 bytes, as kernels expect.
ffi::Tensor NewTensor(const std::vector<std::int64_t>& shape, DLDataType dtype);

// A tensor with these bytes: in the caller's memory if that begins at a multiple of 64, else in a copy.
ffi::Tensor TensorOf(const void* data, std::size_t bytes, const std::vector<std::int64_t>& shape, DLDataType dtype);

std::vector<std::int64_t> ShapeOf(const ffi::Tensor& tensor);
std::size_t BytesOf(const ffi::Tensor& tensor);

// Makes TVM's pool of so many threads; 0: of all CPUs that this process may use.
void UseThreads(int count);

// Lets TVM take all CPUs that this process may use, where nothing else says how many. Its own default is half of them.
void DefaultThreads();

}  // namespace convgrad

#endif  // CONVGRAD_SRC_RUNTIME_H_
