# SPDX-License-Identifier: Apache-2.0
"""A model in the one form that the step builder reads, and what is derived from its graph."""
