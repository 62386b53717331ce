# SPDX-License-Identifier: Apache-2.0
"""Layout rules (FRelaxInferLayout) for stock operators through which TVM 0.27 does not carry layouts, or wrongly.

One file for each family of operators; each exposes `RULES`, a table from operator name to rule.
"""
