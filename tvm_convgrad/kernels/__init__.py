# SPDX-License-Identifier: Apache-2.0
"""Generated CPU kernels: convolutions as plain TIR loops around a register tile, without any library."""

import tvm  # noqa: F401  # it registers us, which reads these files: it must not find one of them half read
