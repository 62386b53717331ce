# SPDX-License-Identifier: Apache-2.0
"""Single kernels for programs without TVM: compiled in another process, kept on disk, called on plain memory.

    job.py        Job: a direction of a problem; the key of its library, for which TVM is not loaded
    compiler.py   the C++ compiler, and what tells it from another one
    make.py       the library of a job; loads TVM
    worker.py     the process that makes libraries
    runtime/      host.cc: what kernels call, threads and scratch memory, on the OpenMP pool that the process has
                  xla.cc: the same on XLA's threads, and its custom call
    library.py    a library in this process: Host, XlaHost, Kernel
    store.py      Kernels: those that are loaded, kept, or being compiled in the background
    failures.py   compilations that failed, kept for a day
    given.py      checks of what users give: flags, bytes, folders
    choice.py     who is faster, a kernel or the framework
    compiled.py   `tvm_convgrad.compile`: a kernel on numpy arrays and tensors

This process loads no TVM: importing it takes seconds, and its threads would spin beside those of the framework.
"""
