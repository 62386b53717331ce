# SPDX-License-Identifier: Apache-2.0
"""Time measurements that tuning and bench share: compiled programs of one convolution, and calls timed in turns."""
