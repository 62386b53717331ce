# SPDX-License-Identifier: Apache-2.0
"""Gradient rules for Relax operators: convolutions first, then what else a CNN's training step needs."""
