# SPDX-License-Identifier: Apache-2.0
"""The commands of `convgrad`, a file each; each imports what is heavy (TVM, matplotlib) only when it runs."""
