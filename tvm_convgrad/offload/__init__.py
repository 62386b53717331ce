# SPDX-License-Identifier: Apache-2.0
"""Convolutions computed by vendor libraries. docs/OFFLOAD.md has the whole path.

common.py      what a backend is, which there are, the order of `auto`, the C code that calls a runtime
partition.py   the pass: convolutions, with what follows them, become calls of a backend
in_place.py    calls that put a sum to the place of a summand
measured.py    which of kernel and library was faster, for `auto`
libraries.py   runtime libraries: built once into the user's cache, checked, loaded
calls.py       a call as plain numbers, as every runtime reads it
cuda.py        CUDA's runtime from its package, the GPU of this machine
cudnn/         cuDNN on NVIDIA GPUs; its engines can be asked for without one
cutlass/       CUTLASS on NVIDIA GPUs: kernels compiled for the problem at hand
onednn/        oneDNN on CPUs: rules, the numbers that describe a call, the runtime's source
"""
