# SPDX-License-Identifier: Apache-2.0
"""The zoo: architectures of other people's libraries, each brought in as `.pt2` and as ONNX, built and compared.

    python -m benchmarks.zoo --out out/zoo                      all of them
    python -m benchmarks.zoo --only 'timm:convnext*' --forms train

`architectures` finds the models in torchvision, timm and segmentation-models-pytorch, which must be installed; `case`
tries one of them in one form, in a process of its own. The outcomes are lines of JSON in the folder `--out`, and a run
goes on where the last one ended.
"""
