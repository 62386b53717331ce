# SPDX-License-Identifier: Apache-2.0
"""Per-sample analysis: which tensors of a program have an axis of samples, and which are sums over the samples.

A function that treats samples independently of each other can be read as its own vmap over them. Following their
axis through forward and backward pass, a parameter's gradient is found to be a sum over samples, whose terms can be
emitted instead. Where samples are mixed in any other way (batch norm with batch statistics), the reason is given.

states     what is known of a tensor
analysis   the states of all variables of a function, by the rules of relax_ops.rules
sums       sums over the samples that go through linear operators term by term
gram       squared norms of terms from Gram matrices
"""
