# SPDX-License-Identifier: Apache-2.0
"""The version of the generated kernels: part of the key of everything that was measured of them."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

import tvm_convgrad
from tvm_convgrad import codegen, kernels


@lru_cache(maxsize=1)
def kernels_version() -> str:
    """Our version, and a digest of the sources that generate kernels."""
    digest = hashlib.sha256()
    for package in (kernels, codegen):
        for source in sorted(Path(package.__path__[0]).rglob("*.py")):
            digest.update(source.read_bytes())
    return f"{tvm_convgrad.__version__}+{digest.hexdigest()[:12]}"


__all__ = ["kernels_version"]
