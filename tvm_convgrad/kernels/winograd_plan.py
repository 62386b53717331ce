# SPDX-License-Identifier: Apache-2.0
"""Winograd's transform: which problems it covers, how it is cut, and an estimate of its time."""

from __future__ import annotations

from collections.abc import Iterator

from tvm_convgrad.kernels.plan import Choice
from tvm_convgrad.kernels.spec import Gather, data_gather, forward_gather
from tvm_convgrad.kernels.target import CLOCK, Machine, beyond_near_pages
from tvm_convgrad.kernels.tile import balanced, tile_rows
from tvm_convgrad.kernels.weight_spec import weight_spec
from tvm_convgrad.kernels.winograd_shape import ELEMENTS, WinogradTiling, chunks_of, panel_shape
from tvm_convgrad.problem import ConvProblem

STEP_OVERHEAD = 0.6
"""Cycles of a step of a register tile besides its multiply-adds."""

LOAD_CYCLES = 0.6
"""Of a vector or broadcast that a step loads."""

TILE_OVERHEAD, STORE_CYCLES, ADD_CYCLES = 40.0, 1.0, 2.0
"""Cycles to clear a register tile and to enter its loop; to store an accumulator, and to add it to what is stored."""

SOURCE_CYCLES, GRAD_CYCLES, RESULT_CYCLES, KERNEL_CYCLES = 55.0, 45.0, 45.0, 60.0
"""Cycles of a vector of transformed tiles: 16 stored of 16 of the source, or of 4 of dY; 4 stored of 16 products; 9
gradients of 16 sums."""

WEIGHT_CYCLES = 6.0
"""Of an element of W, packed and transformed, to the cache that cores share."""

COPY_CYCLES, TURN_CYCLES = 0.3, 1.2
"""Of a packed or stored element: where channels are neighbours, and where they are turned in registers."""

SHARED_BYTES, MEMORY_BYTES = 6.0, 3.0
"""Bytes a cycle and core from and to the cache that cores share, and memory."""

SEEN = 0.5
"""The part of such a stream that arithmetic does not hide."""

SHARED_CACHE = 8 << 20
"""Bytes: more than these come from memory."""

NEAR_BYTES = 1 << 15
"""Of a core's first cache."""

FAR_STEP, FAR_PAGE_STEP = 2.0, 3.0
"""Cycles of a step whose vectors come from beyond the first cache; whose operands lie in pages of their own, many."""

MEETING = 15000.0
"""Cycles until all cores have ended and begun a part of the work."""

LARGEST, LARGEST_WEIGHT = 1 << 26, 1 << 28
"""The most bytes of a chunk's buffers, and of a transformed weight or of all sums of wgrad."""


def refusal(problem: ConvProblem, face: str, machine: Machine) -> str:
    """Why the transform does not cover a face of a static problem, or nothing."""
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
    result = gather_of(problem, face).result
    if face != "backward_weight" and 1 not in (result.channel, result.spatial[2]):
        return "neither channels nor columns of the result are neighbours"
    if face == "backward_weight" and weight_spec(problem).kernel != (1, 3, 3):
        return "some of the taps meet no pixel"
    if _weight_bytes(problem, machine) > LARGEST_WEIGHT:
        return f"the transformed weight would take more than {LARGEST_WEIGHT >> 20} MiB"
    return ""


def plan_winograd(problem: ConvProblem, face: str, machine: Machine) -> Choice | str:
    """The choice, or why there is none; the problem is static."""
    reason = refusal(problem, face, machine)
    if reason:
        return reason
    found = ranked(problem, face, machine)
    if not found:
        return f"the tiles of one line would take more than {LARGEST >> 20} MiB"
    best, seconds = found[0]
    return Choice(f"winograd {_NAMES[face]}", "covers the problem, and transforms are allowed", seconds, {}, best)


def ranked(problem: ConvProblem, face: str, machine: Machine) -> list[tuple[WinogradTiling, float]]:
    """All valid tilings and their estimates in seconds of one core, the best first."""
    cost = weight_cycles if face == "backward_weight" else gather_cycles
    costs = [(tiling, cost(problem, face, tiling, machine)) for tiling in cuts(problem, face, machine)]
    return [(tiling, cycles * machine.parts / CLOCK) for tiling, cycles in sorted(costs, key=lambda each: each[1])]


_NAMES = {"forward": "forward", "backward_data": "backward_data", "backward_weight": "wgrad"}


def gather_of(problem: ConvProblem, face: str) -> Gather:
    """Whose source has the tiles of a face."""
    return data_gather(problem) if face == "backward_data" else forward_gather(problem)


def cuts(problem: ConvProblem, face: str, machine: Machine) -> Iterator[WinogradTiling]:
    """All valid tilings that are worth an estimate."""
    gather, parts = gather_of(problem, face), 1
    _, h, w = (axis.count for axis in gather.phases[0][0])
    down, across = -(-h // 2), -(-w // 2)
    spans = [(1, n) for n in range(1, down + 1) if down % n == 0]
    spans += [(n, down) for n in range(2, gather.batch + 1) if gather.batch % n == 0]
    channels = problem.in_channels if face == "backward_weight" else gather.result_channels
    for images, lines in spans:
        tiles = images * lines * across
        for columns in (1, 2, 3):
            if columns > 1 and (columns - 1) * machine.lanes(gather.dtype) >= channels:
                continue
            total = problem.out_channels if face == "backward_weight" else tiles
            rows = balanced(total, tile_rows(machine, columns))
            for together in (True, False):
                if face == "backward_weight":
                    parts = 1 if together else machine.parts
                if parts * _weight_bytes(problem, machine) > LARGEST_WEIGHT:
                    continue
                tiling = WinogradTiling(rows, columns, images, lines, together)
                if _chunk_bytes(gather, problem, tiling, machine) <= LARGEST:
                    yield tiling


def _weight_bytes(problem: ConvProblem, machine: Machine) -> int:
    element = machine.vector_bytes // machine.lanes(problem.accumulator)
    return ELEMENTS * problem.in_channels * problem.out_channels * element


def _chunk_bytes(gather: Gather, problem: ConvProblem, tiling: WinogradTiling, machine: Machine) -> float:
    element = machine.vector_bytes // machine.lanes(gather.dtype)
    tiles = chunks_of(gather, tiling).tiles
    return float(tiles * ELEMENTS * (problem.in_channels + problem.out_channels) * element)


def _step(tiling: WinogradTiling) -> float:
    products = tiling.rows * tiling.columns
    return max(products / 2, (tiling.rows + tiling.columns) * LOAD_CYCLES, 4.0) + STEP_OVERHEAD


def _elapsed(chunk: float, number: int, meetings: int, tiling: WinogradTiling, machine: Machine) -> float:
    """Cycles until the last core is done with all chunks."""
    if tiling.together:
        return number * (chunk / machine.parts + meetings * MEETING)
    return -(-number // machine.parts) * chunk


def _stream(tiling: WinogradTiling, bytes_: float, machine: Machine) -> float:
    """Cycles to write and read a chunk's buffers where they do not stay in a core's own cache."""
    beyond = bytes_ if tiling.together else max(0.0, bytes_ - machine.l2_bytes)
    return SEEN * 2 * beyond / (MEMORY_BYTES if bytes_ > SHARED_CACHE else SHARED_BYTES)


def _from_far(bytes_: float, machine: Machine) -> float:
    """Cycles to read what may lie beyond a core's own cache."""
    if bytes_ <= machine.l2_bytes / 2:
        return 0.0
    return bytes_ / (MEMORY_BYTES if bytes_ > SHARED_CACHE else SHARED_BYTES)


def gather_cycles(problem: ConvProblem, face: str, tiling: WinogradTiling, machine: Machine) -> float:
    """Cycles of forward or dgrad."""
    gather = gather_of(problem, face)
    lanes, chunks, shape = machine.lanes(gather.dtype), chunks_of(gather, tiling), panel_shape(gather, tiling, machine)
    element = machine.vector_bytes // lanes
    source, result = gather.source_channels, gather.result_channels
    turned = TURN_CYCLES if gather.source.channel != 1 else COPY_CYCLES
    packed = tiling.images * shape.panel_lines * shape.panel_columns * source * turned
    ahead = chunks.tiles * -(-source // lanes) * SOURCE_CYCLES
    blocks, registers = shape.blocks, tiling.rows * tiling.columns
    pieces = ELEMENTS * blocks * -(-chunks.tiles // tiling.rows)
    sums = pieces * source * _step(tiling)
    stored = pieces * (TILE_OVERHEAD + registers * STORE_CYCLES)
    back = chunks.tiles * -(-result // lanes) * RESULT_CYCLES
    back += 4 * chunks.tiles * result * (TURN_CYCLES if gather.result.channel != 1 else 0.0)
    bytes_ = _chunk_bytes(gather, problem, tiling, machine)
    u_bytes = ELEMENTS * source * blocks * shape.block * element
    stream = _stream(tiling, bytes_, machine) + SEEN * _from_far(u_bytes, machine)
    chunk = packed + ahead + sums + stored + back + stream
    weight = (WEIGHT_CYCLES * gather.weight.size + _from_far(u_bytes, machine)) / machine.parts + MEETING
    return weight + _elapsed(chunk, chunks.number, 4, tiling, machine)


def weight_cycles(problem: ConvProblem, face: str, tiling: WinogradTiling, machine: Machine) -> float:
    """Cycles of wgrad."""
    gather, spec = gather_of(problem, face), weight_spec(problem)
    lanes, chunks, shape = machine.lanes(gather.dtype), chunks_of(gather, tiling), panel_shape(gather, tiling, machine)
    element = machine.vector_bytes // lanes
    ahead = 0.0
    for channels, view, lines, cycles in (
        (spec.in_channels, spec.x, shape.panel_lines, SOURCE_CYCLES),
        (spec.out_channels, spec.dy, 2 * tiling.lines, GRAD_CYCLES),
    ):
        turned = TURN_CYCLES if view.channel != 1 else COPY_CYCLES
        ahead += tiling.images * lines * shape.panel_columns * channels * turned
        ahead += chunks.tiles * -(-channels // lanes) * cycles
    blocks = -(-spec.in_channels // (tiling.columns * lanes)) * -(-spec.out_channels // tiling.rows)
    registers = tiling.rows * tiling.columns
    step = _step(tiling) + FAR_STEP * (chunks.tiles * tiling.columns * machine.vector_bytes > NEAR_BYTES)
    for channels in (spec.in_channels, spec.out_channels):
        step += FAR_PAGE_STEP * beyond_near_pages(chunks.tiles, channels * element)
    sums = ELEMENTS * blocks * (chunks.tiles * step + TILE_OVERHEAD + registers * ADD_CYCLES)
    parts = 1 if tiling.together else machine.parts
    kept = _from_far(ELEMENTS * blocks * registers * lanes * element, machine)
    chunk = ahead + sums + _stream(tiling, _chunk_bytes(gather, problem, tiling, machine), machine) + 2 * kept
    last = (parts * kept + blocks * registers * (KERNEL_CYCLES + parts * ELEMENTS * 2)) / machine.parts + 2 * MEETING
    return last + _elapsed(chunk, chunks.number, 4, tiling, machine)


__all__ = ["cuts", "gather_of", "plan_winograd", "ranked", "refusal"]
