# SPDX-License-Identifier: Apache-2.0
"""Notes on pages: whether the interfaces that a page describes are stable or experimental."""

from __future__ import annotations

import posixpath

_GPUS = (
    "cuDNN, CUTLASS and steps for GPUs have run on one GPU, an H100, and on no other; their options may change in any "
    "version."
)
_BRIDGE = "The bridge replaces internals of {}, whose version is therefore pinned, and may change in any version."
_PROCESSES = "Training in several processes is new in 0.2 and may change in any version."
_C = "The C API is new in 0.2 and may change in any version."
_KERNELS = "Kernels, tilings and estimates change with each version."

EXPERIMENTAL = {
    "OFFLOAD.md": f"{_GPUS} `--offload onednn`, for CPUs, is stable.",
    "guides/offload-to-cudnn.md": _GPUS,
    "PYTORCH.md": _BRIDGE.format("PyTorch"),
    "JAX.md": _BRIDGE.format("JAX"),
    "reference/api/torch.md": _BRIDGE.format("PyTorch"),
    "reference/api/jax.md": _BRIDGE.format("JAX"),
    "DISTRIBUTED.md": _PROCESSES,
    "guides/two-machines.md": _PROCESSES,
    "C.md": _C,
    "guides/raspberry-pi.md": _C,
    "KERNELS.md": _KERNELS,
    "reference/kernels.md": _KERNELS,
}
"""Pages about interfaces that may change in any version, and the reason."""

STABLE = (
    "BUILD.md",
    "ARTIFACT.md",
    "BATCHING.md",
    "CLOSURE.md",
    "VERIFY.md",
    "RELAY.md",
    "RELAY_IMPORT.md",
    "reference/commands.md",
    "reference/operators.md",
    "reference/formats.md",
    "reference/errors.md",
    "reference/api/op.md",
    "reference/api/functions.md",
    "reference/api/training.md",
    "reference/api/batching.md",
    "reference/api/reference.md",
    "reference/api/catalogue.md",
)
"""Pages about interfaces that change by the deprecation policy only. All other pages define no interface."""


def marked(text: str, page: str) -> str:
    """The text of a page, with a note below its heading on the stability of what it is about."""
    if page in EXPERIMENTAL:
        kind, reason = 'warning "Experimental"', f"{EXPERIMENTAL[page]} See "
    elif page in STABLE:
        kind, reason = 'success "Stable"', "Changes follow the deprecation policy: "
    else:
        return text
    policy = posixpath.relpath("SUPPORT.md", posixpath.dirname(page) or ".")
    heading, _, rest = text.partition("\n")
    return f"{heading}\n\n!!! {kind}\n\n    {reason}[what is stable]({policy}#what-is-stable).\n{rest}"
