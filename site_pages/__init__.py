# SPDX-License-Identifier: Apache-2.0
"""The pages of the site that are made from the code, and the hooks with which mkdocs makes them (`make docs`)."""
