# SPDX-License-Identifier: Apache-2.0
"""Binding of the operator family to Relax (apache-tvm 0.26 and 0.27)."""

# Before any module of this package: importing TVM registers the family, which needs those modules whole.
import tvm  # noqa: F401
