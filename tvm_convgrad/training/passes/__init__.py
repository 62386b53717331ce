# SPDX-License-Identifier: Apache-2.0
"""Passes over the finished step: memory, order, fusion."""
