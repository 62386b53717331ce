# SPDX-License-Identifier: Apache-2.0
"""Damaged programs: refused by a ConvGradError, or imported; never anything else. The list of operators is current."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.importer import corpus, mutations
from tvm_convgrad.core.errors import ConvGradError
from tvm_convgrad.importer.convert import convert
from tvm_convgrad.importer.listing import updated
from tvm_convgrad.importer.sources import parse
from tvm_convgrad.importer.tensors import read_params

ENTRIES = corpus.entries()
COUNT, PARTS = 500, 5


@pytest.mark.skipif(not ENTRIES, reason=corpus.ABSENT)
@pytest.mark.parametrize("part", range(PARTS))
def test_damaged_programs(part: int) -> None:
    files = mutations.files(corpus.FOLDER, ENTRIES)
    for number in range(part, COUNT, PARTS):
        path = files[number * 7 % len(files)]
        state = mutations.outcome(path, 20_261_121, number)
        assert not state.startswith("fault"), (path, number, state)


WORDS = st.sampled_from(
    [
        *"def @main ( ) { } [ ] , ; : = -> % %x %0 fn if else let meta relay.Constant 0 1f -3 nn.relu add".split(),  # noqa: SIM905
        *'Tensor float32 . True None ? "s" /* ty=float32 */ #[version #[metadata] * + - < := ^ match ref'.split(),  # noqa: SIM905
    ]
)


@settings(max_examples=100, deadline=None)
@given(st.lists(WORDS, max_size=40))
def test_any_sequence_of_words(words: list[str]) -> None:
    _harmless(" ".join(words).encode() + b"\n")


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300), st.sampled_from([b"", b"{", b"\x1f\x8b\x08", b'#[version = "0.0.5"]\n', b"v0.0.4\n"]))
def test_any_bytes(data: bytes, start: bytes) -> None:
    _harmless(start + data)
    with pytest.raises(ConvGradError):
        read_params(start + data, "bytes")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.sampled_from(["0", "1", "2", "-1", "", "main", "9" * 30]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type_key", "attrs", "data", "keys", "repr_str", "fields", "op"]), inner)
    ),
    max_leaves=8,
)
KINDS = [
    "IRModule",
    "relay.Function",
    "relay.Call",
    "relay.Var",
    "Array",
    "Map",
    "relay.attrs.Conv2DAttrs",
    "IntImm",
    "",
]
FIELDS = ["functions", "params", "body", "op", "args", "attrs", "vid", "value", "strides", "dtype", "__dict__"]
NODES = st.fixed_dictionaries(
    {"type_key": st.sampled_from(KINDS)},
    optional={"attrs": st.dictionaries(st.sampled_from(FIELDS), JSON), "data": JSON, "keys": JSON},
)


@settings(max_examples=100, deadline=None)
@given(st.lists(NODES | JSON, max_size=6), JSON)
def test_any_graph(nodes: list[object], root: object) -> None:
    import json

    _harmless(json.dumps({"root": root, "nodes": [{"type_key": ""}, *nodes], "b64ndarrays": []}).encode())


def _harmless(data: bytes) -> None:
    try:
        convert(parse(data, "input").program)
    except ConvGradError:
        return


def test_the_list_of_operators_is_current() -> None:
    document = Path(__file__).parents[2] / "docs" / "RELAY_IMPORT.md"
    text = document.read_text(encoding="utf-8")
    assert updated(text) == text, "run python -m tvm_convgrad.importer.listing docs/RELAY_IMPORT.md"
