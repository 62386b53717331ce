# SPDX-License-Identifier: Apache-2.0
"""The kernel of Winograd's transform: the problems it takes, its tilings, and an estimate of the time of each."""

from __future__ import annotations

from collections.abc import Iterator

from tvm_convgrad.codegen import tir
from tvm_convgrad.codegen.hardware import Machine, beyond_near_pages
from tvm_convgrad.codegen.register_tile import balanced, tile_rows
from tvm_convgrad.core.catalogue import BACKWARD_WEIGHT
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels.contract import Kernel, Plan, not_one_tiling
from tvm_convgrad.kernels.costs import WINOGRAD
from tvm_convgrad.kernels.epilogue import Epilogue
from tvm_convgrad.kernels.frame import conv_frame, wgrad_frame
from tvm_convgrad.kernels.spec import ConvSpec, conv_spec, shapes_of
from tvm_convgrad.kernels.wgrad.spec import wgrad_spec
from tvm_convgrad.kernels.winograd.kernel import WinogradLoops
from tvm_convgrad.kernels.winograd.shape import ELEMENTS, WinogradTiling, panel_shape, slabs_of
from tvm_convgrad.kernels.winograd.wgrad import WinogradWgrad

ADD_CYCLES = 2.0
"""Cycles to add an accumulator to a stored sum."""

SOURCE_CYCLES, GRAD_CYCLES, RESULT_CYCLES, KERNEL_CYCLES = 55.0, 45.0, 45.0, 60.0
"""Cycles to transform a vector of tiles: 16 elements of the source to 16, 4 of dY to 16, 16 products to 4 results, and
16 sums to the 9 taps of dW."""

WEIGHT_CYCLES = 6.0
"""Cycles to pack and transform an element of W, and to store it to the cache that cores share."""

EXPOSED = 0.5
"""The share of the time of a stream beyond the core's own cache that arithmetic does not hide."""

FAR_STEP_CYCLES, FAR_PAGE_CYCLES = 2.0, 3.0
"""Additional cycles of a step whose vectors do not fit the first-level cache, and of one whose operands lie in more
pages than are near."""

BARRIER_CYCLES = 15000.0
"""Cycles until all cores have ended a parallel loop and begun the next one."""

MAX_SLAB_BYTES, MAX_WEIGHT_BYTES = 1 << 26, 1 << 28
"""The most bytes of the buffers of a slab, and of a transformed weight or of all sums of wgrad."""


class Winograd(Kernel):
    """3x3 kernels of stride 1 by Winograd's transform: 16 multiplications where a plain sum has 36."""

    name = "winograd"
    dtypes = ("float32", "float64")
    exact = False
    any_batch = False
    reason = "covers the problem, and transforms are allowed"

    def tiling_type(self, direction: str) -> type[WinogradTiling]:
        """`WinogradTiling`, for all directions."""
        return WinogradTiling

    def refusal(self, problem: ConvProblem, direction: str, machine: Machine) -> str:
        """Why the transform does not cover a direction of a problem, or nothing."""
        if problem.rank != 2 or problem.kernel != (3, 3):
            return f"a kernel of {'x'.join(map(str, problem.kernel))}; it is made for 3x3"
        for name, values in (("stride", problem.strides), ("dilation", problem.dilation)):
            if values != (1, 1):
                return f"a {name} of {'x'.join(map(str, values))}; it is made for 1"
        if problem.groups != 1:
            return f"{problem.groups} groups; it is made for one"
        dtypes = {dtype for _, dtype in problem.tensors.values()}
        if dtypes not in ({"float32"}, {"float64"}):
            return f"tensors of {', '.join(sorted(dtypes))}; it is made for float32 or float64"
        if not machine.has_masks:
            return f"{machine.name} has no masked stores, which its borders need"
        lanes = machine.lanes(problem.accumulator)
        fewest = min(problem.in_channels, problem.out_channels)
        if fewest < lanes:
            return f"{fewest} channels do not fill a vector of {lanes}"
        if problem.data_layout.index("N") or problem.grad_layout.index("N"):
            return "the batch is not the outermost axis"
        result = conv_spec(problem, direction).result
        if direction != BACKWARD_WEIGHT.name and 1 not in (result.channel, result.spatial[2]):
            return "neither channels nor columns of the result are contiguous"
        if direction == BACKWARD_WEIGHT.name and wgrad_spec(problem).kernel != (1, 3, 3):
            return "some of the taps read padding only"
        if _weight_bytes(problem, machine) > MAX_WEIGHT_BYTES:
            return f"the transformed weight would take more than {MAX_WEIGHT_BYTES >> 20} MiB"
        if next(tilings(problem, direction, machine), None) is None:
            return f"the tiles of one row would take more than {MAX_SLAB_BYTES >> 20} MiB"
        return ""

    def plan(self, problem: ConvProblem, direction: str, machine: Machine) -> Plan:
        """The tiling of least estimated time."""
        return Plan((ranked(problem, direction, machine)[0],))

    def estimate(self, problem: ConvProblem, direction: str, plan: Plan, machine: Machine) -> float:
        """The time until the last core is done, times the cores."""
        return cycles(problem, direction, plan.only(WinogradTiling), machine) * machine.parts / machine.clock

    def invalid(self, problem: ConvProblem, direction: str, plan: Plan, machine: Machine) -> str:
        """Why the tiling cannot be built, or nothing."""
        reason = not_one_tiling(plan)
        if reason or plan.only(WinogradTiling) in set(tilings(problem, direction, machine)):
            return reason
        return f"{plan} is not one of its tilings"

    def emit(
        self, problem: ConvProblem, direction: str, plan: Plan, machine: Machine, name: str, epilogue: Epilogue
    ) -> tir.PrimFunc:
        """The function (first operand, second operand, [bias,] result[, bias gradient])."""
        tiling, spec = plan.only(WinogradTiling), conv_spec(problem, direction)
        if direction == BACKWARD_WEIGHT.name:
            frame = wgrad_frame(problem, spec.batch, epilogue)
            WinogradWgrad(frame, spec, wgrad_spec(problem), tiling, machine).emit()
        else:
            frame = conv_frame(spec, shapes_of(problem, direction), epilogue)
            WinogradLoops(frame, spec, tiling, machine).emit()
        return frame.finish(name)

    def tilings(self, problem: ConvProblem, direction: str, own: Plan, machine: Machine) -> Iterator[Plan]:
        """All tilings, the best estimates first."""
        return (Plan((tiling,)) for tiling in ranked(problem, direction, machine) if tiling not in own.tilings)


def cycles(problem: ConvProblem, direction: str, tiling: WinogradTiling, machine: Machine) -> float:
    """Cycles until the last core is done."""
    cost = wgrad_cycles if direction == BACKWARD_WEIGHT.name else conv_cycles
    return cost(problem, direction, tiling, machine)


def ranked(problem: ConvProblem, direction: str, machine: Machine) -> list[WinogradTiling]:
    """All valid tilings, the best estimates first."""
    every = tilings(problem, direction, machine)
    return sorted(every, key=lambda tiling: cycles(problem, direction, tiling, machine))


def tilings(problem: ConvProblem, direction: str, machine: Machine) -> Iterator[WinogradTiling]:
    """All valid tilings that are worth an estimate."""
    spec, split_k = conv_spec(problem, direction), 1
    _, h, w = (axis.count for axis in spec.phases[0][0])
    down, across = -(-h // 2), -(-w // 2)
    slabs = [(1, n) for n in range(1, down + 1) if down % n == 0]
    slabs += [(n, down) for n in range(2, spec.batch + 1) if spec.batch % n == 0]
    is_wgrad = direction == BACKWARD_WEIGHT.name
    channels = problem.in_channels if is_wgrad else spec.result_channels
    for slab_images, slab_rows in slabs:
        for tile_n in (1, 2, 3):
            if tile_n > 1 and (tile_n - 1) * machine.lanes(spec.dtype) >= channels:
                continue
            rows = problem.out_channels if is_wgrad else slab_images * slab_rows * across
            tile_m = balanced(rows, tile_rows(machine, tile_n))
            for shared in (True, False):
                if is_wgrad:
                    split_k = 1 if shared else machine.parts
                if split_k * _weight_bytes(problem, machine) > MAX_WEIGHT_BYTES:
                    continue
                tiling = WinogradTiling(tile_m, tile_n, slab_images, slab_rows, shared)
                if _slab_bytes(spec, problem, tiling, machine) <= MAX_SLAB_BYTES:
                    yield tiling


def _weight_bytes(problem: ConvProblem, machine: Machine) -> int:
    """Bytes of a transformed weight."""
    element = machine.vector_bytes // machine.lanes(problem.accumulator)
    return ELEMENTS * problem.in_channels * problem.out_channels * element


def _slab_bytes(spec: ConvSpec, problem: ConvProblem, tiling: WinogradTiling, machine: Machine) -> float:
    """Bytes of the transformed tiles of a slab, of both its operand and its result."""
    element = machine.vector_bytes // machine.lanes(spec.dtype)
    tiles = slabs_of(spec, tiling).tiles
    return float(tiles * ELEMENTS * (problem.in_channels + problem.out_channels) * element)


def _step(tiling: WinogradTiling, machine: Machine) -> float:
    """Cycles of a step of the reduction."""
    products = tiling.tile_m * tiling.tile_n
    loads = (tiling.tile_m + tiling.tile_n) * WINOGRAD.load
    return max(products / machine.fmas, loads, machine.fma_latency) + WINOGRAD.step


def _elapsed(slab: float, number: int, barriers: int, tiling: WinogradTiling, machine: Machine) -> float:
    """Cycles until the last core is done with all slabs, of `slab` cycles each."""
    if tiling.cores_share_slab:
        return number * (slab / machine.parts + barriers * BARRIER_CYCLES)
    return -(-number // machine.parts) * slab


def _stream(tiling: WinogradTiling, bytes_: float, machine: Machine) -> float:
    """Cycles to write and read the buffers of a slab where they do not stay in a core's own cache."""
    beyond = bytes_ if tiling.cores_share_slab else max(0.0, bytes_ - machine.l2_bytes)
    return EXPOSED * 2 * beyond / (machine.mixed_rate if bytes_ > machine.shared_bytes else machine.shared_rate)


def _far_cycles(bytes_: float, machine: Machine) -> float:
    """Cycles to read what may lie beyond a core's own cache."""
    if bytes_ <= machine.l2_bytes / 2:
        return 0.0
    return bytes_ / (machine.mixed_rate if bytes_ > machine.shared_bytes else machine.shared_rate)


def conv_cycles(problem: ConvProblem, direction: str, tiling: WinogradTiling, machine: Machine) -> float:
    """Cycles of forward or dgrad."""
    spec = conv_spec(problem, direction)
    lanes, slabs, blocking = machine.lanes(spec.dtype), slabs_of(spec, tiling), panel_shape(spec, tiling, machine)
    element = machine.vector_bytes // lanes
    source, result = spec.source_channels, spec.result_channels
    per_element = WINOGRAD.transpose if spec.source.channel != 1 else WINOGRAD.copy
    packed = tiling.slab_images * blocking.panel_h * blocking.panel_w * source * per_element
    transformed = slabs.tiles * -(-source // lanes) * SOURCE_CYCLES
    blocks, registers = blocking.channel_blocks, tiling.tile_m * tiling.tile_n
    register_tiles = ELEMENTS * blocks * -(-slabs.tiles // tiling.tile_m)
    sums = register_tiles * source * _step(tiling, machine)
    stored = register_tiles * (WINOGRAD.tile + registers * WINOGRAD.store)
    results = slabs.tiles * -(-result // lanes) * RESULT_CYCLES
    results += 4 * slabs.tiles * result * (WINOGRAD.transpose if spec.result.channel != 1 else 0.0)
    bytes_ = _slab_bytes(spec, problem, tiling, machine)
    weight_bytes = ELEMENTS * source * blocks * blocking.channel_block * element
    stream = _stream(tiling, bytes_, machine) + EXPOSED * _far_cycles(weight_bytes, machine)
    slab = packed + transformed + sums + stored + results + stream
    weight = (WEIGHT_CYCLES * spec.weight.size + _far_cycles(weight_bytes, machine)) / machine.parts + BARRIER_CYCLES
    return weight + _elapsed(slab, slabs.number, 4, tiling, machine)


def wgrad_cycles(problem: ConvProblem, direction: str, tiling: WinogradTiling, machine: Machine) -> float:
    """Cycles of wgrad."""
    forward, spec = conv_spec(problem, direction), wgrad_spec(problem)
    lanes, slabs = machine.lanes(forward.dtype), slabs_of(forward, tiling)
    blocking = panel_shape(forward, tiling, machine)
    element = machine.vector_bytes // lanes
    transformed = 0.0
    for channels, view, rows, cycles in (
        (spec.in_channels, spec.x, blocking.panel_h, SOURCE_CYCLES),
        (spec.out_channels, spec.dy, 2 * tiling.slab_rows, GRAD_CYCLES),
    ):
        per_element = WINOGRAD.transpose if view.channel != 1 else WINOGRAD.copy
        transformed += tiling.slab_images * rows * blocking.panel_w * channels * per_element
        transformed += slabs.tiles * -(-channels // lanes) * cycles
    blocks = -(-spec.in_channels // (tiling.tile_n * lanes)) * -(-spec.out_channels // tiling.tile_m)
    registers = tiling.tile_m * tiling.tile_n
    vectors_fit = slabs.tiles * tiling.tile_n * machine.vector_bytes <= machine.l1_bytes
    step = _step(tiling, machine) + (0 if vectors_fit else FAR_STEP_CYCLES)
    for channels in (spec.in_channels, spec.out_channels):
        step += FAR_PAGE_CYCLES * beyond_near_pages(slabs.tiles, channels * element)
    sums = ELEMENTS * blocks * (slabs.tiles * step + WINOGRAD.tile + registers * ADD_CYCLES)
    split_k = 1 if tiling.cores_share_slab else machine.parts
    kept = _far_cycles(ELEMENTS * blocks * registers * lanes * element, machine)
    slab = transformed + sums + _stream(tiling, _slab_bytes(forward, problem, tiling, machine), machine) + 2 * kept
    weight = blocks * registers * (KERNEL_CYCLES + split_k * ELEMENTS * 2)
    last = (split_k * kept + weight) / machine.parts + 2 * BARRIER_CYCLES
    return last + _elapsed(slab, slabs.number, 4, tiling, machine)


KERNELS = (Winograd(),)

__all__ = ["KERNELS", "Winograd", "ranked", "tilings"]
