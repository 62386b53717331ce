# SPDX-License-Identifier: Apache-2.0
"""The run time of a compiled step: artifact, session, data, checkpoints, the training loop."""
