# SPDX-License-Identifier: Apache-2.0
"""Generated CPU kernels: convolutions as plain TIR loops around a register tile, without any library."""
