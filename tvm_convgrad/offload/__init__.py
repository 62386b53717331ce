# SPDX-License-Identifier: Apache-2.0
"""Convolutions computed by vendor libraries. docs/OFFLOAD.md has the whole path.

contract.py     what a backend is: an entry of facts, and the object that compiles and runs its calls
registry.py     the backends, found in the folders of this package; the meaning of --offload
refusals.py     reasons to refuse a call that backends share
calls.py        a call as plain numbers, as every runtime reads it
call_source.py  the C code by which compiled programs call a runtime
host.py         the TVM that runtimes are built for and loaded into; runtime/ has its C++ side
libraries.py    runtime libraries: built once into the user's cache, checked, loaded
partition.py    convolutions, with what follows them, replaced by calls of a backend
in_place.py     calls that write a sum in the place of a summand
measured.py     which of kernel and library was faster, for `auto`
cuda.py         CUDA's runtime from its package, the GPU of this machine
nvrtc.py        CUDA kernels that TVM wrote, compiled without approximate arithmetic
cudnn/          cuDNN on NVIDIA GPUs
cutlass/        CUTLASS on NVIDIA GPUs: kernels compiled for one problem
onednn/         oneDNN on CPUs
"""
