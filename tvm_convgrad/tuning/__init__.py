# SPDX-License-Identifier: Apache-2.0
"""Tuning: measured cuts of kernels for the problems of a model, kept in a file beside other caches."""
