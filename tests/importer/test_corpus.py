# SPDX-License-Identifier: Apache-2.0
"""The corpus of Relay programs: everything imports; single operators in one compilation and a few networks compute.

All of it, compiled one by one and in every form, is `python benchmarks/relay_corpus.py`.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import tvm

from relax_ops.single_run import quick_executable
from tests.importer import corpus
from tests.linked import linked
from tvm_convgrad.importer import from_relay, import_relay

ENTRIES = corpus.entries()
pytestmark = pytest.mark.skipif(not ENTRIES, reason=corpus.ABSENT)
SINGLE = [entry for entry in ENTRIES if entry.single]
PARTS = 8
NETS = (
    "variant/convnet_anf",
    "variant/convnet_bound_constants",
    "variant/convnet_bwd_decomposed",
    "variant/convnet_bwd_higher_order",
    "variant/convnet_bwd_text_only",
    "variant/convnet_partitioned",
    "variant/convnet_tvmc_tar",
    "variant/dynamic_batch",
    "variant/if_else",
    "variant/int8_conv",
    "lstm_fwd",
)


@pytest.mark.parametrize("part", range(PARTS))
def test_single_operators_compute(part: int) -> None:
    """The operators of one part in one module, as functions of their own: compiling once is cheap."""
    chosen = SINGLE[part::PARTS]
    functions: dict[str, Any] = {}
    arguments = {}
    for entry in chosen:
        path = entry.path("json")
        assert path is not None
        imported = import_relay(path)
        name = re.sub(r"\W", "_", entry.name)
        functions[name] = imported.module["main"].with_attr("global_symbol", name)
        arguments[name] = corpus.arguments(entry, imported.module, imported.params)
    machine = linked(quick_executable(tvm.IRModule(functions)))
    for entry, name in zip(chosen, functions, strict=True):
        values = [tvm.runtime.tensor(np.ascontiguousarray(value)) for value in arguments[name]]
        error = corpus.error_of(entry, corpus.flat(machine[name](*values)))
        assert error <= corpus.SINGLE, (entry.name, error)


@pytest.mark.parametrize("name", NETS)
def test_networks_compute(name: str) -> None:
    (entry,) = [entry for entry in ENTRIES if entry.name == name]
    report = corpus.check(entry, entry.forms[0])
    assert report["state"] == "right", report


@pytest.mark.parametrize("part", range(4))
def test_everything_imports_in_every_form_and_all_forms_agree(part: int) -> None:
    for entry in ENTRIES[part::4]:
        modules = []
        for form in entry.forms:
            path = entry.path(form)
            assert path is not None
            modules.append(from_relay(path))
        for module in modules[1:]:
            assert _types(module) == _types(modules[0]), entry.name


def _types(module: Any) -> list[str]:
    function = module["main"]
    return [str(param.ty) for param in function.params] + [str(function.ret_ty)]


def test_gradients_are_lifted() -> None:
    decomposed = [entry for entry in SINGLE if "wgrad_decomposed" in entry.name]
    transposed = [entry for entry in SINGLE if "dgrad_transpose" in entry.name]
    assert decomposed
    assert transposed
    for entries, operator in ((decomposed, "weight"), (transposed, "data")):
        for entry in entries:
            path = entry.path("json")
            assert path is not None
            imported = import_relay(path)
            text = imported.module.script()
            assert f"R.nn.conv2d_backward_{operator}(" in text, entry.name
            assert text.count("R.nn.") == 1, entry.name
            assert sum(imported.lifted.values()) == 1, entry.name
