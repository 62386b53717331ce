# SPDX-License-Identifier: Apache-2.0
"""CUTLASS as a backend: plain facts. Its headers come with TVM; the packages are nvcc and what that needs."""

from __future__ import annotations

from tvm_convgrad.offload.contract import Entry, Marker

ENTRY = Entry(
    name="cutlass",
    title="CUTLASS",
    order=30,
    kinds=("cuda",),
    used_on="NVIDIA GPUs (--target cuda:sm_90)",
    dtypes={"float16": 1, "bfloat16": 2, "float32": 0},  # Type in runtime/call.h
    epilogues={  # before the sums are stored: D = relu(sums + C), where C is a summand or the bias
        "forward": ("bias", "relu", "accumulate"),
        "backward_weight": ("accumulate",),
        "backward_data": ("accumulate",),
    },
    extra="cutlass",
    requirements=(
        "nvidia-cuda-nvcc==13.0.88",
        "nvidia-nvvm==13.0.88",
        "nvidia-cuda-cccl==13.0.85",
        "nvidia-cuda-runtime==13.0.96",
        "nvidia-cuda-crt==13.0.88",
    ),
    processors=(),
    layout="NHWC:OHWI",
    variable="CONVGRAD_CUTLASS",
    marker=Marker("cutlass", "compiles kernels of CUTLASS, without a GPU (make test-cutlass)", on_request=True),
)
