# SPDX-License-Identifier: Apache-2.0
"""vmap on Relax expressions.

convolution, convolution_backward   the family's operators under vmap, by the batching table (docs/BATCHING.md)
unfolded                            the same as batched matrix products of im2col data, for batches of symbolic extent
mapped_axis                         what is known of the mapped axis of a tensor
emitter, common                     what vmap rules of operators (relax_ops.rules) are written with
parameters                          vmap of a whole function over its parameters: many models as one
"""
