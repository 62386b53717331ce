# SPDX-License-Identifier: Apache-2.0
"""Binding of the operator family to Relay, of TVM up to 0.19. Nothing of it is imported where TVM has no Relay."""

# Before any module of this package: it registers the family where TVM has Relay, which needs those modules whole.
import tvm_convgrad  # noqa: F401
