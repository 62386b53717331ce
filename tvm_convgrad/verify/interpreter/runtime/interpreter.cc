// SPDX-License-Identifier: Apache-2.0
// The global function `convgrad.interpreter.2.run`: executes a kernel's PrimFunc on the host, statement by statement.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/string.h>

#include <cstdint>
#include <vector>

#include "execute.h"
#include "lower.h"

namespace convgrad {
namespace {

/*!
 * \brief Execute a function once.
 * \param function The PrimFunc.
 * \param addresses Of the arguments' first elements.
 * \param elements How many each argument has.
 * \param symbol What each variable of the parameters' shapes stands for; there is one at the most.
 * \param fill Each byte of a local buffer before it is written.
 * \return What went wrong, or nothing.
 */
ffi::String Run(ffi::ObjectRef function, ffi::Array<int64_t> addresses, ffi::Array<int64_t> elements, int64_t symbol,
                int64_t fill) {
  Program program;
  Lowering(&program).Function(function.get());
  std::vector<uint8_t*> tensors;
  for (int64_t address : addresses) tensors.push_back(reinterpret_cast<uint8_t*>(static_cast<uintptr_t>(address)));
  std::vector<int64_t> sizes(elements.begin(), elements.end());
  if (tensors.size() != program.parameters.size() || sizes.size() != tensors.size() || program.symbols.size() > 1) {
    TVM_FFI_THROW(ValueError) << "the function has " << program.parameters.size() << " parameters and "
                              << program.symbols.size() << " symbols, but " << tensors.size() << " arguments came";
  }
  try {
    Execution(program, tensors, sizes, std::vector<int64_t>(program.symbols.size(), symbol),
              static_cast<uint8_t>(fill))
        .Run();
  } catch (const Fault& fault) {
    return fault.text;
  }
  return "";
}

TVM_FFI_STATIC_INIT_BLOCK() {
  tvm::ffi::reflection::GlobalDef().def("convgrad.interpreter.2.run", Run);
}

}  // namespace
}  // namespace convgrad
