# SPDX-License-Identifier: Apache-2.0
"""cuDNN as a backend: plain facts."""

from __future__ import annotations

from tvm_convgrad.offload.contract import Entry, Marker

LIBRARY = ("nvidia-cudnn-cu13", "libcudnn.so.9")
GRAPH = ("nvidia-cudnn-cu13", "cudnn_graph.h")
RUNTIME = ("nvidia-cuda-runtime", "cuda_runtime_api.h")
CRT = ("nvidia-cuda-crt", "crt/host_defines.h")
CUBLAS = ("nvidia-cublas", "libcublas.so.13")
"""cuDNN has engines of cuBLAS, and cuDNN 9.19 aborts without it."""

ENTRY = Entry(
    name="cudnn",
    title="cuDNN",
    order=20,
    kinds=("cuda",),
    used_on="NVIDIA GPUs (--target cuda:sm_90)",
    dtypes={"float32": 0, "float64": 1, "float16": 2, "bfloat16": 9},  # cudnnDataType_t
    epilogues={  # the bias gradient stays TVM's sum
        "forward": ("bias", "relu", "accumulate"),
        "backward_weight": ("accumulate",),
        "backward_data": ("accumulate",),
    },
    extra="cuda",
    extras=("cutlass",),
    requirements=(
        "nvidia-cudnn-cu13>=9.20.0.48,<=9.24.0.43",
        "nvidia-cublas==13.1.1.3",
        "nvidia-cuda-nvrtc==13.0.88",
        "cuda-bindings>=13.0,<13.1",
    ),
    files=(LIBRARY, GRAPH, RUNTIME, CRT, CUBLAS),
    library_package="nvidia-cudnn-cu13",
    variable="CONVGRAD_CUDNN",
    marker=Marker("cuda", "calls cuDNN, without a GPU (make test-cuda)"),
)
