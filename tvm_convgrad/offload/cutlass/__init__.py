# SPDX-License-Identifier: Apache-2.0
"""CUTLASS on NVIDIA GPUs: kernels compiled for one problem.

entry.py      facts: packages, targets, types, epilogues
rules.py      what the set computes, and why not
kernels.py    the set as tables, and which of them computes a problem
source.py     the source of one
toolchain.py  nvcc, its headers and CUTLASS's
backend.py    kernels built into the cache, checked (can_implement), and called
runtime/      the C++ around a kernel, and the runtime that finds kernels and calls them
"""
