# SPDX-License-Identifier: Apache-2.0
"""Models from ONNX files: `model.load_onnx`, what an exporter did to their graphs, and converters of operators."""
