# SPDX-License-Identifier: Apache-2.0
"""Federated training of a compiled step with Flower."""
