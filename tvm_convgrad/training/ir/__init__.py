# SPDX-License-Identifier: Apache-2.0
"""Relax functions as lists of bindings: replay, views, counts."""
