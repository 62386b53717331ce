# SPDX-License-Identifier: Apache-2.0
"""Max pools and their gradients. Reading order:

- planes.py: the pool's extents, and the kernels of NC... data.
- channels.py: the kernels of N...C data.
"""
