# SPDX-License-Identifier: Apache-2.0
"""ConvProblem."""


class ConvProblem:
    """Placeholder until the next commit of this hour."""
