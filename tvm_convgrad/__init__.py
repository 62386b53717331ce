# SPDX-License-Identifier: Apache-2.0
"""Convolution gradients for Apache TVM. What this package offers is loaded when it is first used.

ConvProblem          one convolution: shapes, strides, padding, dilation, groups, layouts, dtypes
op                   conv{1,2,3}d_backward_{weight,data} on Relax expressions
convolution_backward all three gradients of a convolution or transposed one, PyTorch's contract, on Relax expressions
reference            float64 numpy: forward, wgrad, dgrad
catalogue            the directions, their gradients, and the operators by name
batching             vmap_rule: any of them under vmap, as one unbatched call
compile              one op as a function of numpy arrays or tensors, kept on disk, without TVM in the process
evaluate             compile one op, or convolution_backward, and run it on numpy arrays
ConvertLayout        a pass: relax.transform.ConvertLayout, and fewer transposes (convert_layout is its old name)
partition            convolutions and gradients as calls of vendor libraries
allow_transforms     a context in which 3x3 kernels may compute by Winograd's transform
rules                a context in which TVM's passes use this package's rules for all operators
from_relay           Relay programs (TVM up to 0.19) as Relax modules
register             put the operators, gradients and rules into TVM (`import tvm` does it by itself; a TVM that has
                     Relay, up to 0.19, loads no plugins: there importing this package does it)
ConvGradError        the base of every error raised here, which are

    ProblemError      a convolution that cannot exist              DTypeError     an element type that is not accepted
    DescriptorError   a problem descriptor that does not parse     SetupError     TVM, a package or compiler is missing
    UnsupportedError  a valid request that is not served           ModelError     a model that cannot be read or trained
    ArtifactError     a file of ours that is damaged or foreign    TrainingError  a training run that cannot go on
    DataError         a training run that cannot go on because of its data
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

from tvm_convgrad.core.errors import (
    ArtifactError,
    ConvGradError,
    DataError,
    DescriptorError,
    DTypeError,
    ModelError,
    ProblemError,
    SetupError,
    TrainingError,
    UnsupportedError,
)
from tvm_convgrad.core.problem import ConvProblem

__version__ = "0.2.0"  # pyproject.toml reads it here

_LAZY = {
    "op": "tvm_convgrad.op",
    "reference": "tvm_convgrad.core.reference",
    "batching": "tvm_convgrad.batching",
    "catalogue": "tvm_convgrad.core.catalogue",
    # Not a module of that name: importing it would put the module in the place of the function.
    "evaluate": "tvm_convgrad.evaluation:evaluate",
    "compile": "tvm_convgrad.bridge.compiled:compile_operator",
    "convolution_backward": "tvm_convgrad.op:convolution_backward",
    "from_relay": "tvm_convgrad.importer:from_relay",
    "ConvertLayout": "relax_ops.passes.layout:ConvertLayout",
    "convert_layout": "relax_ops.passes.layout:ConvertLayout",  # the name of ConvertLayout in version 0.1
    "partition": "tvm_convgrad.offload.partition:partition",
    "rules": "relax_ops.active:rules",
    "allow_transforms": "tvm_convgrad.kernels.transforms:allow_transforms",
}

_IN_RELAY = {"ConvertLayout": "relay_ops.layout:ConvertLayout", "convert_layout": "relay_ops.layout:ConvertLayout"}
"""What a TVM that has Relay gets in the place of an entry above."""

__all__ = [
    "ArtifactError",
    "ConvGradError",
    "ConvProblem",
    "ConvertLayout",
    "DTypeError",
    "DataError",
    "DescriptorError",
    "ModelError",
    "ProblemError",
    "SetupError",
    "TrainingError",
    "UnsupportedError",
    "__version__",
    "allow_transforms",
    "batching",
    "catalogue",
    "compile",
    "convert_layout",
    "convolution_backward",
    "evaluate",
    "from_relay",
    "op",
    "partition",
    "reference",
    "register",
    "rules",
]


def register() -> None:
    """Register operators, gradients, layout rules and legalizations with the installed TVM; further calls do nothing.

    In a TVM with Relay (up to 0.19) this is the Relay binding (relay_ops), otherwise the Relax binding (relax_ops).
    `import tvm` calls this function, unless TVM_DEVICE_BACKEND_AUTOLOAD=0 is set.

    Raises:
        SetupError: TVM is not installed, its version is not supported, or CONVGRAD_DISABLE names an unknown part.
    """
    # Read before anything is registered, so that a further call raises the same error.
    importlib.import_module("tvm_convgrad.core.switches").disabled_parts()
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
    if name in _IN_RELAY and _tvm_has_relay():
        where = _IN_RELAY[name]
    module_name, _, attribute = where.partition(":")
    module = importlib.import_module(module_name)
    value = getattr(module, attribute) if attribute else module
    globals()[name] = value
    return value


# The variable is TVM's own switch for its entry points; it holds here as well.
if os.environ.get("TVM_DEVICE_BACKEND_AUTOLOAD", "1") != "0" and _tvm_has_relay():
    register()
