# SPDX-License-Identifier: Apache-2.0
"""Our kernels under JAX on CPUs: `jax.lax.conv_general_dilated` and its gradients, inside `jax.jit` as outside.

import tvm_convgrad.jax
tvm_convgrad.jax.patch()          # or: with tvm_convgrad.jax.patch(): ...

signature.py   parameters of JAX's convolution as a direction of a problem, or why there is none
primitive.py   the primitive: three directions, each the gradient of the others; vmap by the batching table
choice.py      who computes a direction of a problem: compiled, measured, kept
lowering.py    the primitive in a compiled program: a kernel's custom call, or XLA's own convolution
tools.py       JAX's tools that have a rule for each primitive: checkify, sparsify, roofline
patching.py    conv_general_dilated, patch, unpatch, explain, stats
"""

from tvm_convgrad.core.errors import SetupError as _SetupError

try:
    import jax as _jax  # noqa: F401
except ModuleNotFoundError as _error:
    if _error.name not in ("jax", "jaxlib"):
        raise
    raise _SetupError("tvm_convgrad.jax needs JAX: pip install 'tvm-convgrad[jax]'.") from _error
from tvm_convgrad.jax import tools as _tools  # noqa: F401
from tvm_convgrad.jax.patching import Explanation, Patched, Stats, conv_general_dilated, explain, patch, stats, unpatch

__all__ = ["Explanation", "Patched", "Stats", "conv_general_dilated", "explain", "patch", "stats", "unpatch"]
