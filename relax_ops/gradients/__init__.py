# SPDX-License-Identifier: Apache-2.0
"""What gradient rules of operators (relax_ops.rules) are written with.

common      types, shapes and dtypes of expressions, sums back to an operand's shape, element counts
separable   adjoints of linear maps along one axis
"""
