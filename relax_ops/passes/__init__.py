# SPDX-License-Identifier: Apache-2.0
"""Passes over Relax modules.

As in relax.transform, a name in CamelCase is a pass, or a function that returns one; a function in snake_case takes a
module and returns one.

fusion           FuseEpilogues: convolutions with bias, relu, sums and bias gradients as one kernel
layout           ConvertLayout and SimplifyTransposes
dropout          seed_dropouts: nn.dropout as real dropout
chains           convolutions with what follows them, found in a function
chain_rewriter   puts one call in the place of each chain
"""
