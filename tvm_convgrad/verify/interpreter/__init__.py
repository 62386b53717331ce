# SPDX-License-Identifier: Apache-2.0
"""An interpreter of kernels: it executes a PrimFunc on the host without compiling it, and checks each access.

It finds what a wrong result may hide: loads and stores out of bounds of a tensor or of a local buffer, data races
between the iterations of a parallel loop, and int32 indices that overflow. TVM and LLVM compile a kernel in 40 ms or
more; the interpreter needs about 1 ms and executes some ten million operations a second, so that small problems are
much cheaper to check here.
"""

from tvm_convgrad.verify.interpreter.run import execute

__all__ = ["execute"]
