# SPDX-License-Identifier: Apache-2.0
"""Operators of ONNX as operators of Relax that have gradients, a family each."""
