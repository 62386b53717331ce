# SPDX-License-Identifier: Apache-2.0
"""Convolution gradients for Apache TVM: what this package offers, loaded when first used.

ConvProblem          one convolution: shapes, strides, padding, dilation, groups, layouts, dtypes
op                   conv{1,2,3}d_backward_{weight,data} on Relax expressions
convolution_backward all three gradients of a convolution or transposed one, PyTorch's contract, on Relax expressions
reference            float64 numpy: forward, wgrad, dgrad
batching             vmap_rule: any of them under vmap, as one unbatched call
evaluate             compile one op, or convolution_backward, and run it on numpy arrays
partition            convolutions and gradients as calls of vendor libraries
allow_transforms     a context in which 3x3 kernels may compute by Winograd's transform
from_relay           Relay programs (TVM up to 0.19) as Relax modules
register             put the operators, gradients and rules into TVM (`import tvm` does it by itself; a TVM that has
                     Relay, up to 0.19, knows no plugins: there importing this package does it)
ConvGradError        the base of every error raised here
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

from tvm_convgrad.errors import ConvGradError
from tvm_convgrad.problem import ConvProblem

__version__ = "0.1.0"

_LAZY = {
    "op": "tvm_convgrad.op",
    "reference": "tvm_convgrad.reference",
    "batching": "tvm_convgrad.batching",
    "catalogue": "tvm_convgrad.catalogue",
    # Not a module of that name: importing it would put the module in the place of the function.
    "evaluate": "tvm_convgrad.evaluation:evaluate",
    "convolution_backward": "tvm_convgrad.op:convolution_backward",
    "from_relay": "tvm_convgrad.importer:from_relay",
    "convert_layout": "relax_ops.layout_cleanup:converted",
    "partition": "tvm_convgrad.offload.partition:partition",
    "allow_transforms": "tvm_convgrad.kernels.transforms:allow_transforms",
}

__all__ = [
    "ConvGradError",
    "ConvProblem",
    "__version__",
    "allow_transforms",
    "batching",
    "convert_layout",
    "convolution_backward",
    "evaluate",
    "from_relay",
    "op",
    "partition",
    "reference",
    "register",
]


def register() -> None:
    """Register operators, gradients, layout rules and legalizations with the TVM in use; repeating is harmless.

    A TVM that has Relay gets the Relay binding (relay_ops), any other one that of Relax (relax_ops).

    Raises:
        SetupError: TVM is missing, or is a version without Relax operators that this package knows.
    """
    binding = "relay_ops" if _tvm_has_relay() else "relax_ops"
    importlib.import_module(f"{binding}.register").register_all()


def _tvm_has_relay() -> bool:
    """Whether the TVM that would be imported has Relay; looks at its folder, so that nothing is imported."""
    found = importlib.util.find_spec("tvm")
    return found is not None and any((Path(p) / "relay").is_dir() for p in found.submodule_search_locations or ())


def _autoload() -> None:
    """Entry point of group `tvm.backends`: TVM calls it at the end of `import tvm`."""
    register()


def __getattr__(name: str) -> Any:
    where = _LAZY.get(name)
    if where is None:
        raise AttributeError(f"module 'tvm_convgrad' has no attribute {name!r}")
    module_name, _, attribute = where.partition(":")
    module = importlib.import_module(module_name)
    value = getattr(module, attribute) if attribute else module
    globals()[name] = value
    return value


# The variable is TVM's own switch for its entry points, heeded here as well.
if os.environ.get("TVM_DEVICE_BACKEND_AUTOLOAD", "1") != "0" and _tvm_has_relay():
    register()
