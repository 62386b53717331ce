# SPDX-License-Identifier: Apache-2.0
"""Convolutions and their gradients without any IR, never importing TVM: problems, geometry, catalogue, errors."""
