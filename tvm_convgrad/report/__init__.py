# SPDX-License-Identifier: Apache-2.0
"""What the commands show: tables, the list of gradient operators, the loss curve."""
