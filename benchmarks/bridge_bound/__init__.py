# SPDX-License-Identifier: Apache-2.0
"""How much faster a training step can become at most by faster convolutions: by such that only write zeros.

    python -m benchmarks.bridge_bound --bridge torch --model resnet50,convnext_t --layout NCHW,NHWC --json bound.json
    python -m benchmarks.bridge_bound --bridge jax --model resnet18 --layout NCHW

The framework's own step has turns with the same step in which convolutions, or their gradients alone, write zeros and
compute nothing. All else stays as it is: what reads their results, the memory of these, caches. The ratio of the two is
Amdahl's bound, and 1 - 1 / ratio the part of the step that convolutions take. No kernel reaches the bound.
"""
