# SPDX-License-Identifier: Apache-2.0
"""The three directions of a convolution as C loops: one function of text for each, from a ConvProblem.

All directions walk over the same products, result += first * second at

    X[n, g i, y * stride + k * dilation - low]    W[g o, i, k]    Y[n, g o, y]

and differ in which of the three is the result. The taps k are outer loops, so that the range of y that is in bounds is
known before the inner ones: these have no conditions. Around them is a loop over units of work, each an image, a group
and a block of the result's channels (no images for wgrad, which sums over them). TVM's threads divide the units: no two
write the same element, and the order of sums does not depend on their number.

Vectors lie along the axis (o, i, or the last one of y) that is contiguous in most of the three tensors, and c_tiles.py
keeps a tile of sums in registers. Where a stride leaves gaps there are plain loops, the innermost over that axis; where
that is a reduction it sums in lanes of fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from relay_ops.c_tiles import Inner, tiles
from tvm_convgrad.codegen.hardware import PARALLEL_FROM
from tvm_convgrad.core.catalogue import BACKWARD_DATA, BACKWARD_WEIGHT, Direction
from tvm_convgrad.core.geometry import DTYPE_BYTES, SPATIAL, strides_of
from tvm_convgrad.core.problem import ConvProblem

C_TYPES = {"float32": "float", "float64": "double"}
"""The element types that C has."""

LANES = 16

BLOCK, INNER_BLOCK = 8, 64
"""Channels of the result in a unit of work; more where the innermost loop is over them."""


def refuses(problem: ConvProblem) -> str | None:
    """Why there is no C function for a problem, or None if there is."""
    dtypes = sorted({dtype for _, dtype in problem.tensors.values()})
    if len(dtypes) != 1 or dtypes[0] not in C_TYPES:
        return f"C loops are made for float32 or float64 throughout, not for {', '.join(dtypes)}"
    if not problem.is_static:
        return "C loops need static extents"
    return None


def function(
    direction: Direction, problem: ConvProblem, name: str, *, accumulate: bool = False, vector_bytes: int = 16
) -> str:
    """C++: a static function `name(first, second, [summand,] result)` on compact tensors in the problem's layouts.

    It takes the tensors' starts as char*, and returns 0, or what TVM's threads give.

    Args:
        direction: which of forward, wgrad and dgrad it computes.
        problem: one that `refuses` accepts.
        name: a C identifier.
        accumulate: the result is the sum of a summand and the convolution.
        vector_bytes: of the target's vectors.
    """
    spatial, groups = SPATIAL[problem.rank], problem.groups
    ctype = C_TYPES[problem.data_dtype]
    layouts = {"data": problem.data_layout, "weight": problem.kernel_layout, "grad": problem.grad_layout}
    steps = {tensor: strides_of(layouts[tensor], shape) for tensor, (shape, _) in problem.tensors.items()}
    extents = {"o": problem.out_channels // groups, "i": problem.in_channels // groups}
    last = spatial[-1].lower()
    inner_axes = ("o", "i", last)
    # How far each tensor moves when an inner axis moves by one.
    move = {
        "data": {"o": 0, "i": steps["data"]["C"], last: steps["data"][spatial[-1]] * problem.strides[-1]},
        "weight": {"o": steps["weight"]["O"], "i": steps["weight"]["I"], last: 0},
        "grad": {"o": steps["grad"]["C"], "i": 0, last: steps["grad"][spatial[-1]]},
    }
    inner = max(inner_axes, key=lambda axis: (sum(move[tensor][axis] == 1 for tensor in move), axis == last))
    bounds = {axis: ("0", str(extents[axis])) for axis in ("o", "i")} | {last: (f"{last}_low", f"{last}_high")}

    parallel = "i" if direction is BACKWARD_DATA else "o"
    block = INNER_BLOCK if parallel == inner else BLOCK
    blocks = -(-extents[parallel] // block)
    images = 1 if direction is BACKWARD_WEIGHT else problem.batch
    units = images * groups * blocks
    first, second = direction.operands
    lines = [
        f"struct {name}_tensors {{ const {ctype} *{first}, *{second}; {ctype}* {direction.result}; }};",
        f"static int {name}_task(int task, Group* team, void* closure) {{",
        f"const {name}_tensors* of = (const {name}_tensors*)closure;",
        *(f"const {ctype}* __restrict {operand} = of->{operand};" for operand in direction.operands),
        f"{ctype}* __restrict {direction.result} = of->{direction.result};",
        f"const int64_t begin = INT64_C({units}) * task / team->tasks;",
        f"const int64_t end = INT64_C({units}) * (task + 1) / team->tasks;",
        _loop("unit", "begin", "end"),
        f"const int64_t g = unit / {blocks} % {groups};",
        f"const int64_t {parallel}_low = unit % {blocks} * {block};",
        f"const int64_t {parallel}_high = at_most({parallel}_low + {block}, {extents[parallel]});",
    ]
    bounds[parallel] = (f"{parallel}_low", f"{parallel}_high")
    if direction is BACKWARD_WEIGHT:
        lines.append(_loop("n", "0", str(problem.batch)))
    else:
        lines.append(f"const int64_t n = unit / {groups * blocks};")
    for j, axis in enumerate(spatial):
        low, _ = problem.padding[j]
        a, stride, x = axis.lower(), problem.strides[j], int(problem.data_extents[j])
        lines.append(_loop(f"k{a}", "0", str(problem.kernel[j])))
        lines.append(f"const int64_t {a}_from = k{a} * {problem.dilation[j]} - {low};")
        lines.append(f"const int64_t {a}_low = {a}_from < 0 ? (-{a}_from + {stride - 1}) / {stride} : 0;")
        lines.append(f"const int64_t {a}_room = {x - 1} - {a}_from;")
        lines.append(
            f"const int64_t {a}_high = {a}_room < 0 ? 0 : at_most({a}_room / {stride} + 1, {problem.grad_extents[j]});"
        )
    for axis in spatial[:-1]:
        a = axis.lower()
        lines.append(_loop(a, f"{a}_low", f"{a}_high"))
    loops = Inner(direction, ctype, inner_axes, inner, bounds, move)
    length = extents.get(inner, int(problem.grad_extents[-1]))
    tiled = tiles(loops, vector_bytes // DTYPE_BYTES[problem.data_dtype], length)
    if tiled is None:
        lines += [_loop(axis, *bounds[axis]) for axis in inner_axes if axis != inner]
    for tensor in ("data", "weight", "grad"):
        place = _place(tensor, problem, steps[tensor], skip=(inner,) if tiled is None else inner_axes)
        const = "" if tensor == direction.result else "const "
        end = "at" if tiled is None else "row"
        lines.append(f"{const}{ctype}* __restrict {tensor}_{end} = {tensor} + {place};")
    lines += tiled or _inner(direction, ctype, bounds[inner], {tensor: move[tensor][inner] for tensor in move})
    depth = sum(line.endswith("{") for line in lines) - sum(line == "}" for line in lines)
    lines += [*["}"] * (depth - 1), "return 0;", "}"]
    size = math.prod(int(e) for e in problem.tensors[direction.result][0])
    summand = ", char* summand" if accumulate else ""
    begun = "memcpy(result, summand" if accumulate else "memset(result, 0"
    lines += [
        f"static int {name}(char* first, char* second{summand}, char* result) {{",
        f"{name}_tensors of = {{(const {ctype}*)first, (const {ctype}*)second, ({ctype}*)result}};",
        f"{begun}, sizeof({ctype}) * {size}u);",
    ]
    products = math.prod(int(e) for e in problem.tensors["grad"][0]) * extents["i"] * math.prod(problem.kernel)
    if products < PARALLEL_FROM:
        lines += ["Group alone = {0, 1};", f"return {name}_task(0, &alone, &of);", "}"]
    else:
        lines += [f"return TVMBackendParallelLaunch({name}_task, &of, 0);", "}"]
    return _indented(lines)


def _inner(direction: Direction, ctype: str, bounds: tuple[str, str], move: dict[str, int]) -> list[str]:
    """The innermost loop over j, with the pointers <tensor>_at at j = 0."""
    first, second = (f"{tensor}_at[{{j}} * {move[tensor]}]" for tensor in direction.operands)
    product = f"{first} * {second}"
    if move[direction.result]:
        place = f"{direction.result}_at[j * {move[direction.result]}]"
        return [_loop("j", *bounds), f"{place} += {product.format(j='j')};", "}"]
    return [
        f"{ctype} lanes[{LANES}] = {{0}};",
        f"int64_t j = {bounds[0]};",
        f"for (; j + {LANES} <= {bounds[1]}; j += {LANES}) {{",
        f"for (int l = 0; l < {LANES}; ++l) lanes[l] += {product.format(j='(j + l)')};",
        "}",
        f"{ctype} total = 0;",
        f"for (; j < {bounds[1]}; ++j) total += {product.format(j='j')};",
        f"for (int l = 0; l < {LANES}; ++l) total += lanes[l];",
        f"{direction.result}_at[0] += total;",
    ]


def _place(tensor: str, problem: ConvProblem, steps: dict[str, int], skip: Sequence[str]) -> str:
    """The offset of the element that the loops are at, the axes `skip` left out."""
    spatial = SPATIAL[problem.rank]
    out_per_group = problem.out_channels // problem.groups
    in_per_group = problem.in_channels // problem.groups
    o, i = ("0" if axis in skip else axis for axis in ("o", "i"))
    terms = []
    if tensor == "weight":
        terms += [f"(g * {out_per_group} + {o}) * {steps['O']}", f"{i} * {steps['I']}"]
        terms += [f"k{a.lower()} * {steps[a]}" for a in spatial]
    else:
        channel = f"g * {in_per_group} + {i}" if tensor == "data" else f"g * {out_per_group} + {o}"
        terms += [f"n * {steps['N']}", f"({channel}) * {steps['C']}"]
        for a, stride in zip(spatial, problem.strides, strict=True):
            y = "0" if a.lower() in skip else a.lower()
            terms.append(
                f"({y} * {stride} + {a.lower()}_from) * {steps[a]}" if tensor == "data" else f"{y} * {steps[a]}"
            )
    return " + ".join(terms)


def _loop(index: str, low: str, high: str) -> str:
    return f"for (int64_t {index} = {low}; {index} < {high}; ++{index}) {{"


def _indented(lines: list[str]) -> str:
    depth, out = 0, []
    for line in lines:
        depth -= line == "}"
        out.append("  " * depth + line)
        depth += line.endswith("{")
    return "\n".join(out) + "\n"
