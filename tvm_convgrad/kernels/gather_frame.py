# SPDX-License-Identifier: Apache-2.0
"""The parameters of a gather's kernel, (source, weight, [bias,] result); the batch may be a name."""

from __future__ import annotations

from typing import Any

from tvm_convgrad.kernels.epilogue import Epilogue
from tvm_convgrad.kernels.loops import Loops, Shapes, make_parameter, with_variable
from tvm_convgrad.kernels.spec import Gather


class GatherFrame:
    """Parameters of a kernel and flat views of them.

    Attributes:
        parameters: of the PrimFunc.
        source, weight, result: flat views; bias: that of the bias, or None.
        batch: a number, or an expression of the variable in the parameters' shapes.
        epilogue: what is fused.
    """

    def __init__(self, loops: Loops, gather: Gather, shapes: Shapes, epilogue: Epilogue, panel: int = 0) -> None:
        """Declare the parameters.

        Args:
            gather: its batch is what the kernel is planned for.
            shapes: of "source", "weight" and "result"; a batch known only at run time is a name.
            panel: elements that the largest panel has for each image, where one panel holds all images.
        """
        self.epilogue = epilogue
        shapes, variable = with_variable(shapes)
        keys = ["source", "weight", *(["bias"] if epilogue.bias else []), "result"]
        channels = gather.groups * gather.result_channels
        shapes = {**shapes, "bias": ((channels,), gather.result.dtype)}
        self.parameters = [make_parameter(key, *shapes[key]) for key in keys]
        source, result = (view.size // gather.batch for view in (gather.source, gather.result))
        self.batch: Any = gather.batch if variable is None else loops.batch(variable, max(source, result, panel))
        sizes = {"weight": gather.weight.size, "bias": channels}
        sizes |= {"source": source * self.batch, "result": result * self.batch}
        flat = {key: loops.flat(p, sizes[key]) for key, p in zip(keys, self.parameters, strict=True)}
        self.source, self.weight, self.result = flat["source"], flat["weight"], flat["result"]
        self.bias = flat.get("bias")


__all__ = ["GatherFrame"]
