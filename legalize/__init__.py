# SPDX-License-Identifier: Apache-2.0
"""Convolution gradients as compositions of ordinary operators, written once against a small Builder protocol."""
