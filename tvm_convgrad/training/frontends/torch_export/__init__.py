# SPDX-License-Identifier: Apache-2.0
"""Models from torch.export: `model.load_pt2`, the passes over its graphs, and translations of operators."""
