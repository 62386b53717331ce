# SPDX-License-Identifier: Apache-2.0
"""The output of commands: tables, JSON and pages, the list of convolutions, cuDNN's engines, the loss curve."""
