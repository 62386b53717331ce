# SPDX-License-Identifier: Apache-2.0
"""Loss functions on predictions and targets: `of_classes`, `of_values`; `table` has them by name."""
