# SPDX-License-Identifier: Apache-2.0
"""Programs with the two operators that another process with a real Relay wrote, and what they gave there."""

from __future__ import annotations

import gzip

import numpy as np
import pytest
import tvm
from tvm import relay

from relay_ops.ir import problem_of
from tests.relay_ops import corpus
from tests.relay_ops.harness import calls, run

ABSENT = [pytest.param({}, marks=pytest.mark.skip(reason=corpus.ABSENT), id="absent")]
OPERATORS, NETWORKS = (corpus.entries(kind) or ABSENT for kind in ("op_plugin", "backward_plugin"))


def test_corpus_is_here():
    if not (corpus.FOLDER / "index.json").is_file():
        pytest.skip(corpus.ABSENT)
    assert ABSENT not in (OPERATORS, NETWORKS)


def loaded(entry):
    module = tvm.ir.load_json(corpus.text(entry["json"]))
    tvm.ir.assert_structural_equal(module, relay.parse(corpus.text(entry["text"])), map_free_vars=True)
    return relay.transform.InferType()(module)


@pytest.mark.parametrize("entry", OPERATORS, ids=lambda entry: entry["name"])
def test_operators_are_read_as_they_were_meant(entry):
    module, config = loaded(entry), entry["config"]
    (call,) = calls(module, "nn.conv2d_backward_data", "nn.conv2d_backward_weight")
    types = [arg.checked_type for arg in call.args]
    problem = problem_of(call.op, call.attrs, types)
    expected = {"batch": "n", "in_channels": "ci", "out_channels": "co", "groups": "g"}
    assert {name: getattr(problem, name) for name in expected} == {name: config[key] for name, key in expected.items()}
    assert problem.data_extents == (config["h"], config["w"])
    assert problem.kernel == (config["kh"], config["kw"])
    assert (list(problem.strides), list(problem.dilation)) == (config["s"], config["d"])
    assert list(module["main"].ret_type.concrete_shape) == entry["ret"]["shape"]


@pytest.mark.parametrize("entry", NETWORKS, ids=lambda entry: entry["name"])
def test_networks_give_what_they_gave(entry):
    module = loaded(entry)
    with np.load(corpus.FOLDER / entry["io"]) as io:
        arrays = {name.partition(":")[2]: io[name] for name in io.files if name.startswith("in:")}
        wanted = {int(name.partition(":")[2]): io[name] for name in io.files if name.startswith("out:")}
    if entry["params_file"]:
        data = (corpus.FOLDER / entry["params_file"]).read_bytes()
        if entry["params_file"].endswith(".gz"):
            data = gzip.decompress(data)
        arrays.update({name: array.numpy() for name, array in relay.load_param_dict(data).items()})
    found = run(module, arrays)
    assert len(wanted) == len(found)
    for i, want in wanted.items():
        scale = np.abs(want).max()
        np.testing.assert_allclose(found[i], want, rtol=1e-4, atol=1e-5 * scale)
