# SPDX-License-Identifier: Apache-2.0
"""The bench: layer tables against known totals, and one measurement by the command line."""

import json

import pytest

from tvm_convgrad import cli
from tvm_convgrad.bench.suites import SUITES, suite

# Multiply-accumulates of one image at 224 x 224, in 1e9, linear classifiers left out, as the papers (or fvcore) count.
MACS = {"resnet50": 4.09, "mobilenet_v2": 0.300, "vgg16": 15.35, "convnext_t": 4.45}


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("name", SUITES)
def test_layers_add_up_to_the_network(name, layout):
    layers = suite(name, 1, layout)
    assert sum(problem.macs * count for problem, count in layers.items()) / 1e9 == pytest.approx(MACS[name], rel=0.01)


def test_one_problem_against_stock(tmp_path, monkeypatch):
    out = tmp_path / "out.json"
    monkeypatch.setattr(
        "sys.argv",
        [
            "convgrad",
            "bench",
            "--problem",
            "mb1ic4ih6oc8oh6kh3ph1",
            "--against",
            "stock",
            "--seconds",
            "0",
            "--json",
            str(out),
        ],
    )
    with pytest.raises(SystemExit) as done:
        cli.main()
    assert not done.value.code
    entries = json.loads(out.read_text())
    assert [entry["face"] for entry in entries] == ["backward_weight", "backward_data"]
    assert all(entry["ratio"] == entry["theirs"] / entry["ours"] > 0 for entry in entries)
    assert all(entry["kernel"] != "composition" for entry in entries)
