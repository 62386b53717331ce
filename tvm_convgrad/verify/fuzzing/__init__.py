# SPDX-License-Identifier: Apache-2.0
"""The fuzzer of generated kernels: random problems times random tilings, interpreted and compared with float64."""
