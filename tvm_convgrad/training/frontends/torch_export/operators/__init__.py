# SPDX-License-Identifier: Apache-2.0
"""Operators of PyTorch as operators of Relax, or as other operators of PyTorch, a family each."""
