# SPDX-License-Identifier: Apache-2.0
"""Trained models in the forms that other programs take: ONNX files, state_dicts."""
