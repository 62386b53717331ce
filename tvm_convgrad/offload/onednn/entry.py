# SPDX-License-Identifier: Apache-2.0
"""oneDNN as a backend: plain facts."""

from __future__ import annotations

from tvm_convgrad.offload.contract import Entry, Marker

LIBRARY = ("onednn-cpu-gomp", "libdnnl.so.3")
HEADERS = ("onednn-devel-cpu-gomp", "oneapi/dnnl/dnnl.hpp")

ENTRY = Entry(
    name="onednn",
    title="oneDNN",
    order=10,
    kinds=("llvm",),
    used_on="CPUs",
    dtypes={"bfloat16": 2, "float32": 3},  # dnnl_data_type_t
    epilogues={  # post-ops of the forward convolution, and sums as a gradient is brought to its place
        "forward": ("bias", "accumulate"),
        "backward_weight": ("accumulate", "bias_grad", "bias_accumulate"),
        "backward_data": ("accumulate",),
    },
    extra="onednn",
    requirements=("onednn-cpu-gomp==2023.2.0", "onednn-devel-cpu-gomp==2023.2.0"),
    files=(LIBRARY, HEADERS),
    library_package="onednn-cpu-gomp",
    # GNU OpenMP's threads spin after each primitive otherwise, on the cores that TVM's threads want.
    setting=("OMP_WAIT_POLICY", "passive"),
    marker=Marker("onednn", "calls oneDNN (make test-onednn)"),
)
