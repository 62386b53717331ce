# SPDX-License-Identifier: Apache-2.0
"""Where the samples are in a program: which tensors have an axis of samples, and which are sums over the samples.

A function that treats samples independently of each other can be read as its own vmap over them. Following their
axis through forward and backward pass, a parameter's gradient is found to be a sum over samples, whose terms can be
emitted instead. Where samples meet in any other way (batch norm with batch statistics), that is said.
"""
