# SPDX-License-Identifier: Apache-2.0
"""Tests of images as training data."""
