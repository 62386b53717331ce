# SPDX-License-Identifier: Apache-2.0
"""TIR functions for NVIDIA GPUs whose schedules are made here, where those of TVM fail or are slow."""
