# SPDX-License-Identifier: Apache-2.0
"""Convolutions with what follows them as one kernel: a pass to run before LegalizeOps, with a target in scope.

    conv(x, w) [+ acc] [+ bias] [-> relu, relu6]   forward and transposed convolutions
    acc + dgrad(dy, w),  acc + wgrad(dy, x)        in the place of acc
    wgrad(dy, x) and the sum of dy over pixels     the gradients of weight and bias, also each in the place of an acc

An intermediate that anything else reads is left alone. A sum goes to the place of `acc` only if nothing reads that
place afterwards: `acc` is made in this function by an operation that gives a new tensor, of values that depend on a
parameter (constants are folded and shared), and its other readers are convolutions before the kernel, kernels too.
Passes after this one move elementwise readers, and do not see that the kernel writes. FuseOps may move kernels, too:
behind it, `tvm_convgrad.training.passes.order.ReadersFirst` moves the readers of a place before what is written to it.
"""

from __future__ import annotations

import tvm
from tvm import relax

from relax_ops.lowering import Lowered, add_kernel, decide, record_lowered, result_type
from relax_ops.passes.chain_rewriter import ChainRewriter
from relax_ops.passes.chains import Chain, Convolution, Finder
from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels import chooser
from tvm_convgrad.kernels.choice import Choice
from tvm_convgrad.kernels.epilogue import NO_EPILOGUE, Epilogue


class _Kernels:
    """The taker of all convolutions for which the plan has a generated kernel."""

    in_place, copies = True, False

    def take(self, op: str, direction: str, problem: ConvProblem) -> tuple[Choice, Machine] | None:
        """The kernel's choice and machine."""
        choice, machine = decide(op, direction, problem)
        return (choice, machine) if choice.is_kernel and machine is not None else None

    def refusal(self, convolution: Convolution, epilogue: Epilogue) -> str:
        """The reason of the kernel."""
        return chooser.epilogue_refusal(convolution.how[0], convolution.direction, epilogue)


def FuseEpilogues() -> tvm.transform.Pass:
    """The pass that fuses bias, relu, sums and bias gradients into the convolutions that the plan has kernels for."""
    return tvm.transform.module_pass(lambda module, _context: fuse_epilogues(module), 0, "ConvgradFuseEpilogues")


def fuse_epilogues(module: tvm.IRModule) -> tvm.IRModule:
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
    record_lowered(Lowered(c.op, c.direction, c.problem, choice, machine, choice.name, fused, (function, c.number)))


def _kernel_call(builder: relax.BlockBuilder, chain: Chain) -> relax.Expr:
    """The call of a chain's kernel, which is added to the builder's module."""
    c, (choice, machine) = chain.convolution, chain.convolution.how
    results, places = [result_type(c.direction, c.problem, c.operands)], [-1]
    kernel, operands = add_kernel(builder, c.direction, c.problem, choice, machine, c.operands, chain.epilogue)
    arguments = [*operands, *([] if chain.bias is None else [chain.bias])]
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


__all__ = ["FuseEpilogues", "fuse_epilogues"]
