# SPDX-License-Identifier: Apache-2.0
"""Small functions of convolutions and what follows them, on operands of one problem."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import relax

from tests.relax.programs import tensor
from tvm_convgrad.core.geometry import flat_padding
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.op import conv2d_backward_data, conv2d_backward_weight


class Net:
    """A function under construction, on operands of one problem."""

    def __init__(self, problem: ConvProblem) -> None:
        self.problem, self.builder = problem, relax.BlockBuilder()
        self.params = {name: tensor(name, shape) for name, (shape, _) in problem.tensors.items()}
        self.params["bias"] = tensor("bias", [problem.out_channels])
        self.params["more"] = tensor("more", problem.grad_shape)
        self.params["other"] = tensor("other", problem.data_shape)

    def __getattr__(self, name: str) -> Any:
        return self.params[name]

    def emit(self, value: Any) -> Any:
        return self.builder.emit(value)

    @property
    def attributes(self) -> dict[str, Any]:
        p = self.problem
        return {"strides": list(p.strides), "padding": list(flat_padding(p.padding)), "groups": p.groups}

    @property
    def layouts(self) -> dict[str, str]:
        p = self.problem
        return {"grad_layout": p.grad_layout, "data_layout": p.data_layout, "kernel_layout": p.kernel_layout}

    def forward(self, data: Any = None) -> Any:
        p = self.problem
        layouts = {"data_layout": p.data_layout, "kernel_layout": p.kernel_layout}
        return self.emit(
            relax.op.nn.conv2d(self.data if data is None else data, self.weight, **self.attributes, **layouts)
        )

    def biased(self, value: Any) -> Any:
        wide = [self.problem.out_channels if letter == "C" else 1 for letter in self.problem.grad_layout]
        return self.emit(relax.op.add(value, self.emit(relax.op.reshape(self.bias, wide))))

    def dgrad(self, grad: Any = None) -> Any:
        p = self.problem
        made = conv2d_backward_data(
            self.grad if grad is None else grad, self.weight, data_shape=p.data_shape, **self.attributes, **self.layouts
        )
        return self.emit(made)

    def wgrad(self, grad: Any = None, data: Any = None) -> Any:
        kernel = self.problem.kernel
        made = conv2d_backward_weight(
            self.grad if grad is None else grad,
            self.data if data is None else data,
            kernel_size=kernel,
            **self.attributes,
            **self.layouts,
        )
        return self.emit(made)

    def bias_gradient(self, grad: Any) -> Any:
        axes = [axis for axis, letter in enumerate(self.problem.grad_layout) if letter != "C"]
        total = self.emit(relax.op.sum(grad, axes, keepdims=True))
        return self.emit(relax.op.reshape(total, [self.problem.out_channels]))


def module_of(problem: ConvProblem, body: Callable[[Net], list[Any]]) -> tuple[Any, list[Any]]:
    net = Net(problem)
    params = list(net.params.values())
    with net.builder.function("main", params):
        with net.builder.dataflow():
            result = net.builder.emit_output(relax.Tuple(body(net)))
        net.builder.emit_func_output(result)
    return net.builder.get(), params
