# SPDX-License-Identifier: Apache-2.0
"""References and functions as values are evaluated away: what programs with them compute, and which are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm

from relax_ops.single_run import quick_executable
from tests.importer import corpus
from tests.linked import linked
from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.importer import from_relay

Array = Any
PARAMS = "%x: Tensor[(3), float32], %y: Tensor[(3), float32], %c: bool"

PROGRAMS: dict[str, tuple[str, Callable[[Array, Array, Array], list[Array]]]] = {
    "read_what_was_written_last": (
        "let %r = ref(%x); let %a = ref_read(%r); let %u = ref_write(%r, %y); let %b = ref_read(%r); subtract(%a, %b)",
        lambda x, y, c: [x - y],
    ),
    "signs": (  # the form of text that Relay 0.6 wrote
        "let %r = ref(%x); let %u = %r := %y; let %b = %r^; %b",
        lambda x, y, c: [y],
    ),
    "a_graph_binding_is_evaluated_once": (
        "%0 = ref(%x);\nlet %u = ref_write(%0, %y);\n(ref_read(%0), %u)",
        lambda x, y, c: [y],
    ),
    "a_let_inside_of_a_let": (
        "let %a = let %r = ref(%x);\nlet %u = ref_write(%r, %y);\n%0 = ref_read(%r);\n%0;\nlet %b = %a;\nadd(%b, %x)",
        lambda x, y, c: [x + y],
    ),
    "a_function_is_called_twice": (
        "let %r = ref(%x); let %f = fn () { let %a = ref_read(%r); ref_write(%r, multiply(%a, %y)) };"
        "let %u = %f(); let %v = %f(); ref_read(%r)",
        lambda x, y, c: [x * y * y],
    ),
    "each_call_makes_a_reference_of_its_own": (
        "let %f = fn (%z: Tensor[(3), float32]) { let %r = ref(%z); %r }; let %a = %f(%x); let %b = %f(%x);"
        "let %u = ref_write(%a, %y); (ref_read(%a), ref_read(%b))",
        lambda x, y, c: [y, x],
    ),
    "a_function_is_an_argument_and_a_result": (
        "let %g = fn (%f: fn (Tensor[(3), float32]) -> Tensor[(3), float32]) {"
        "  fn (%z: Tensor[(3), float32]) { %f(%f(%z)) } };"
        "let %h = %g(fn (%z: Tensor[(3), float32]) { multiply(%z, %y) }); %h(%x)",
        lambda x, y, c: [x * y * y],
    ),
    "a_tape_of_functions": (  # what Relay's gradient of higher order does
        "let %tape = ref(fn () { () }); let %dx = ref(zeros_like(%x)); let %dz = ref(zeros_like(%x));"
        "let %z = multiply(%x, %x); let %before = ref_read(%tape);"
        "let %u = ref_write(%tape, fn () { let %g = ref_read(%dz); let %h = multiply(%g, %x);"
        "  let %a = ref_write(%dx, add(ref_read(%dx), add(%h, %h))); %before() });"
        "let %v = ref_write(%dz, ones_like(%z)); let %run = ref_read(%tape); let %w = %run(); (%z, ref_read(%dx))",
        lambda x, y, c: [x * x, 2 * x],
    ),
    "references_in_references_and_tuples": (
        "let %r = ref(%x); let %s = ref((%r, %y)); let %t = ref_read(%s); let %u = ref_write(%t.0, %t.1);"
        "let %v = ref_write(%s, (%r, %x)); add(ref_read(%r), ref_read(%s).1)",
        lambda x, y, c: [x + y],
    ),
    "one_branch_writes": (
        "let %r = ref(%x); let %u = if (%c) { ref_write(%r, %y) } else { () }; ref_read(%r)",
        lambda x, y, c: [y if c else x],
    ),
    "both_branches_write_and_give_a_value": (
        "let %r = ref(%x); let %s = ref((%x, %y));"
        "let %v = if (%c) { let %u = ref_write(%r, add(%x, %y)); let %t = ref_write(%r, negative(ref_read(%r))); %x }"
        "  else { let %q = ref(%y); let %u = ref_write(%q, %x); let %w = ref_write(%s, (%y, ref_read(%q))); %y };"
        "(ref_read(%r), ref_read(%s), %v)",
        lambda x, y, c: [-(x + y), x, y, x] if c else [x, y, x, y],
    ),
    "branches_in_branches": (
        "let %r = ref(%x); let %u = if (%c) { let %a = if (less(sum(%x), 100f)) { ref_write(%r, %y) } else { () };"
        "  ref_write(%r, add(ref_read(%r), %x)) } else { () }; ref_read(%r)",
        lambda x, y, c: [x + y if c else x],
    ),
    "a_branch_writes_the_same_function": (
        "let %f = fn (%z: Tensor[(3), float32]) { negative(%z) }; let %r = ref(fn (%z: Tensor[(3), float32]) { %z });"
        "let %u = if (%c) { ref_write(%r, %f) } else { ref_write(%r, %f) }; let %g = ref_read(%r); %g(%x)",
        lambda x, y, c: [-x],
    ),
}


def program(body: str) -> str:
    return f"def @main({PARAMS}) {{\n{body}\n}}\n"


def test_programs_with_references_compute() -> None:
    functions = {
        name: from_relay(program(body))["main"].with_attr("global_symbol", name) for name, (body, _) in PROGRAMS.items()
    }
    machine = linked(quick_executable(tvm.IRModule(functions)))
    x, y = np.array([1, 2, 3], "float32"), np.array([5, -7, 11], "float32")
    for name, (_, expected) in PROGRAMS.items():
        for c in (True, False):
            found = corpus.flat(machine[name](*map(tvm.runtime.tensor, (x, y, np.array(c)))))
            wanted = expected(x, y, c)
            assert len(found) == len(wanted), name
            for have, want in zip(found, wanted, strict=True):
                np.testing.assert_array_equal(have, want, err_msg=f"{name}, {c}")


CLOSURES = (
    "let %r = ref(fn () { %x }); let %u = if (%c) { ref_write(%r, fn () { %y }) } else { () }; let %f = ref_read(%r);"
)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("ref(%x)", "a reference is a value here"),
        ("nn.relu(ref(%x))", r"nn\.relu.*a reference"),
        ("ref_read(%x)", "read that is not a reference"),
        ("let %u = ref_write(%x, %y); %x", "written to that is not a reference"),
        ("ref_write(%x)", "takes 2 operands"),
        (CLOSURES + "%f()", "different functions.*depends on the condition"),
        ("let %u = if (%c) { ref(%x) } else { ref(%y) }; ref_read(%u)", "a reference is a value"),
        ("let %r = ref(%x); let %u = if (%c) { ref_write(%r, sum(%x)) } else { () }; ref_read(%r)", "different types"),
        ("%0 = ref(%x);\nlet %f = fn () { ref_write(%0, %y) };\nlet %u = %f();\nref_read(%0)", "ToANormalForm"),
        ("let %f = fn () { let %g = fn () { %f() }; %g() }; %f()", "recursive|deeper|too large"),
    ],
)
def test_what_depends_on_more_than_the_program_is_refused(body: str, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        from_relay(program(body))
