# SPDX-License-Identifier: Apache-2.0
"""The C library for programs without Python: `include/convgrad.h`, its sources, and how they are compiled."""
