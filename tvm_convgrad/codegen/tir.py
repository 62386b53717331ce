# SPDX-License-Identifier: Apache-2.0
"""The TIR that kernels are written in, of the TVM in use.

Kernels import TIR from here and never from TVM itself. `tir_flat` has the names for TVM from 0.26 on, `tir_nested` the
same ones for versions that have Relay.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING or find_spec("tvm.tirx"):
    from tvm_convgrad.codegen.tir_flat import *  # noqa: F403
else:
    from tvm_convgrad.codegen.tir_nested import *  # noqa: F403
