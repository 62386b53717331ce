# SPDX-License-Identifier: Apache-2.0
"""Every implementation against float64, exactly."""
