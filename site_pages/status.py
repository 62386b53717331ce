# SPDX-License-Identifier: Apache-2.0
"""What pages say of the stability of what they describe."""

from __future__ import annotations

import posixpath

EXPERIMENTAL = {
    "OFFLOAD.md": "Libraries and steps for GPUs are compile-proven only.",
    "guides/offload-to-cudnn.md": "Libraries and steps for GPUs are compile-proven only.",
    "PYTORCH.md": "The bridge replaces entries of PyTorch, whose version is pinned.",
    "JAX.md": "The bridge replaces entries of JAX, whose version is pinned.",
    "reference/api/torch.md": "The bridge replaces entries of PyTorch, whose version is pinned.",
    "reference/api/jax.md": "The bridge replaces entries of JAX, whose version is pinned.",
    "DISTRIBUTED.md": "Training in several processes is new.",
    "guides/two-machines.md": "Training in several processes is new.",
    "KERNELS.md": "Kernels, tilings and estimates change with each version.",
    "reference/kernels.md": "Kernels, tilings and estimates change with each version.",
}
"""Pages about what may change in any version, and why; all others are about what is stable."""


def marked(text: str, page: str) -> str:
    """The text of a page, with a note below its heading if it is about what is experimental."""
    if page not in EXPERIMENTAL:
        return text
    policy = posixpath.relpath("SUPPORT.md", posixpath.dirname(page) or ".")
    note = f'!!! warning "Experimental"\n\n    {EXPERIMENTAL[page]} It may change in any version: '
    heading, _, rest = text.partition("\n")
    return f"{heading}\n\n{note}[what is stable]({policy}#what-is-stable).\n{rest}"
