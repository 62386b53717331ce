# SPDX-License-Identifier: Apache-2.0
"""Reverse-mode differentiation of Relax functions: whole batches, and each sample apart."""
