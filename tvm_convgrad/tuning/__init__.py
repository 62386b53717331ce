# SPDX-License-Identifier: Apache-2.0
"""Tuning: measured tilings of kernels for the problems of a model, kept in a file in the user's cache folder."""
