# SPDX-License-Identifier: Apache-2.0
"""The compiled step at work: artifact, session, data, checkpoints, the training loop."""
