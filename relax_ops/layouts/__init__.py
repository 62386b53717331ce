# SPDX-License-Identifier: Apache-2.0
"""What layout rules of operators (relax_ops.rules) are written with.

algebra   layouts as strings, without any IR
site      what a rule reads and gives, and TVM's FRelaxInferLayout
common    rules that several operators share
"""
