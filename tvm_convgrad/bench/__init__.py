# SPDX-License-Identifier: Apache-2.0
"""Speed of the generated kernels on the convolutions of known networks, against PyTorch or stock TVM."""
