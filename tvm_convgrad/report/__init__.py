# SPDX-License-Identifier: Apache-2.0
"""The output of commands: tables and JSON, the list of a step's convolutions, cuDNN's engines, the loss curve."""
