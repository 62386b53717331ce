# SPDX-License-Identifier: Apache-2.0
"""Tests of tuning: candidates, the search, and the file of winners."""
