# SPDX-License-Identifier: Apache-2.0
"""What pages say of the stability of what they describe."""

from __future__ import annotations

import posixpath

_GPUS = "The GPU path compiles and loads, but has never run on a GPU."
_BRIDGE = "The bridge replaces internals of {}, whose version is therefore pinned."

EXPERIMENTAL = {
    "OFFLOAD.md": _GPUS,
    "guides/offload-to-cudnn.md": _GPUS,
    "PYTORCH.md": _BRIDGE.format("PyTorch"),
    "JAX.md": _BRIDGE.format("JAX"),
    "reference/api/torch.md": _BRIDGE.format("PyTorch"),
    "reference/api/jax.md": _BRIDGE.format("JAX"),
    "DISTRIBUTED.md": "Training in several processes is new in 0.2.",
    "guides/two-machines.md": "Training in several processes is new in 0.2.",
    "C.md": "The C API is new in 0.2.",
    "KERNELS.md": "Kernels, tilings and estimates change with each version.",
    "reference/kernels.md": "Kernels, tilings and estimates change with each version.",
}
"""Pages about what may change in any version, and why."""

STABLE = (
    "BUILD.md",
    "ARTIFACT.md",
    "CLOSURE.md",
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
)
"""Pages about interfaces that change by the deprecation policy only; all others are about no interface of their own."""


def marked(text: str, page: str) -> str:
    """The text of a page, with a note below its heading on the stability of what it is about."""
    if page in EXPERIMENTAL:
        kind, reason = 'warning "Experimental"', f"{EXPERIMENTAL[page]} It may change in any version: "
    elif page in STABLE:
        kind, reason = 'success "Stable"', "Changes follow the deprecation policy: "
    else:
        return text
    policy = posixpath.relpath("SUPPORT.md", posixpath.dirname(page) or ".")
    heading, _, rest = text.partition("\n")
    return f"{heading}\n\n!!! {kind}\n\n    {reason}[what is stable]({policy}#what-is-stable).\n{rest}"
