# SPDX-License-Identifier: Apache-2.0
"""Convolutions with what follows them as one kernel: a pass to run before LegalizeOps, with a target in scope.

    conv(x, w) [+ acc] [+ bias] [-> relu]          forward and transposed convolutions
    acc + dgrad(dy, w),  acc + wgrad(dy, x)        in the place of acc
    wgrad(dy, x) and the sum of dy over pixels     the gradients of weight and bias, also each in the place of an acc

An intermediate that anything else reads is left alone. A sum goes to the place of `acc` only if nobody can read that
place afterwards: `acc` is made in this function by an operation that gives a new tensor, of values that depend on a
parameter (constants are folded and shared), and its other readers are convolutions before the kernel, kernels too.
Passes after this one move elementwise readers, and do not know that the kernel writes.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from relax_ops.chain_rewriter import ChainRewriter
from relax_ops.chains import Chain, Convolution, Finder
from relax_ops.lowering import Lowered, add_kernel, decide, record_lowered, result_type
from tvm_convgrad.kernels import plan
from tvm_convgrad.kernels.epilogue import NO_EPILOGUE, Epilogue
from tvm_convgrad.kernels.target import Machine
from tvm_convgrad.problem import ConvProblem


class _Kernels:
    """The taker of what the plan has a generated kernel for."""

    in_place, copies = True, False

    def take(self, op: str, face: str, problem: ConvProblem) -> tuple[plan.Choice, Machine] | None:
        """The kernel's choice and machine."""
        choice, machine = decide(op, face, problem)
        return (choice, machine) if choice.is_kernel and machine is not None else None

    def refusal(self, convolution: Convolution, epilogue: Epilogue) -> str:
        """As the plan says."""
        return plan.epilogue_refusal(convolution.how[0], epilogue)


@tvm.transform.module_pass(opt_level=0, name="ConvgradFuseEpilogues")
def fuse_epilogues(module: Any, _context: Any) -> Any:
    """Fuse bias, relu, sums and bias gradients into the convolutions that the plan has kernels for."""
    module = relax.transform.CanonicalizeBindings()(module)  # Gradient binds one tensor to several names
    rewriter = ChainRewriter(module, _kernel_call)
    for variable, function in module.functions_items():
        if isinstance(function, relax.Function) and isinstance(function.body, relax.SeqExpr):
            chains = [chain for chain in Finder(function, _Kernels()).chains() if chain.epilogue != NO_EPILOGUE]
            for chain in chains:
                _record(variable.name_hint, chain)
            if chains:
                module = rewriter.rewritten(variable, function, chains)
    return relax.transform.DeadCodeElimination()(module)


def _record(function: str, chain: Chain) -> None:
    c, (choice, machine) = chain.convolution, chain.convolution.how
    fused = tuple(name for name, value in vars(chain.epilogue).items() if value)
    record_lowered(Lowered(c.op, c.face, c.problem, choice, machine, choice.kind, fused, (function, c.number)))


def _kernel_call(builder: Any, chain: Chain) -> Any:
    """The call of a chain's kernel, which is added to the builder's module."""
    c, (choice, machine) = chain.convolution, chain.convolution.how
    kernel = add_kernel(builder, c.face, c.problem, choice, machine, chain.epilogue)
    arguments = [*c.operands, *([] if chain.bias is None else [chain.bias])]
    results, places = [result_type(c.face, c.problem, arguments)], [-1]
    if chain.second is not None:
        results.append(relax.TensorType([c.problem.out_channels], c.problem.kernel_dtype))
        places.append(-1)
    for number, acc in enumerate((chain.acc, chain.second_acc)):
        if acc is not None:
            places[number] = len(arguments)
            arguments.append(acc)
    if chain.acc is None:
        return relax.op.call_tir(kernel, arguments, results if len(results) > 1 else results[0])
    return relax.op.call_tir_inplace(kernel, arguments, places, results)


__all__ = ["fuse_epilogues"]
