# SPDX-License-Identifier: Apache-2.0
"""Training steps beside the libraries that train on devices: ONNX Runtime's training and ExecuTorch.

Measure on an idle machine: the processes of contenders take turns, but not with other programs.

Their packages need versions of others that are not those of this project, so they have an environment of their own:

    python3.11 -m venv out/others
    out/others/bin/pip install onnxruntime-training-cpu==1.19.2 onnx==1.16.2 torch==2.13.0 executorch==1.5.1
    pip install '.[onnx,torch,zoo]'
    python -m benchmarks.on_device --others out/others/bin/python --markdown out/on-device.md

The last onnxruntime-training-cpu has wheels for Python 3.8 to 3.12. `--only digits` measures one model, `--contenders`
some of the libraries.

All train the same network from the same weights on the same batch, by SGD without momentum, and give the same losses;
each runs in processes of its own, by turns. ExecuTorch 1.5.1 has no batch norm of the batch's statistics in a training
step ("Missing out variants: aten::_native_batch_norm_legit_functional"), so beside it batch norms keep their running
statistics in both; and one sample is trained, of which it takes seconds. A second table has the gradients of single
convolutions beside ExecuTorch's portable kernel, `aten::convolution_backward`.

Memory is what the process has resident at the most in steps after the first, less what it had before it loaded the
model: weights, library or session, and everything that a step computes. On disk are the libraries that a program
loads, as their wheels have them (ours: those of `convgrad bundle`), and what is made for the model, weights included.
"""
