# SPDX-License-Identifier: Apache-2.0
"""A model format is one file in the folder of formats."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.command import Command
from tvm_convgrad.core.errors import ModelError, SetupError
from tvm_convgrad.training.frontends import all_formats, formats, load_model, shown_formats

TEXT = """
from pathlib import Path

from tests.training.small_models import relax_module, weights
from tvm_convgrad.training.frontends.registry import Format, Request
from tvm_convgrad.training.model.model import from_module

def load(request: Request):
    return from_module(relax_module(request.batch or "n"), parameters=weights(), source=str(request.path))

def is_of(path: Path) -> bool:
    return path.read_text().startswith("small")

FORMAT = Format(name="a new one", suffixes=(".new", ".json"), load=load, is_of=is_of, package=PACKAGE)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose files are formats, too."""
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(tmp_path)])
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith(f"{formats.__name__}.new_")]:
        del sys.modules[name]


def test_a_file_adds_a_format(folder: Path) -> None:
    (folder / "new_format.py").write_text(f"PACKAGE = ''\n{TEXT}")
    model = folder / "net.new"
    model.write_text("small")
    assert load_model(model, batch=3).inputs[0].shape == (3, 2, 7, 6)
    assert ".new" in shown_formats()
    with pytest.raises(ModelError, match=r"the suffix '\.txt' is not that of a model; give \.json, \.new, \.onnx"):
        load_model("net.txt")
    with pytest.raises(ModelError, match="of the format a new one, and only Relay takes a file of parameters"):
        load_model(model, params=model)
    model.write_text("large")
    with pytest.raises(ModelError, match="is not a file of a new one"):
        load_model(model)


def test_formats_share_a_suffix(folder: Path) -> None:
    (folder / "new_shared.py").write_text(f"PACKAGE = ''\n{TEXT}")
    model = folder / "net.json"
    model.write_text("small")
    assert load_model(model, batch=3).source == str(model)
    model.write_text("{}")
    with pytest.raises(ModelError, match="is not Relax JSON"):
        load_model(model)


def test_the_package_of_a_format_is_named(folder: Path) -> None:
    (folder / "new_package.py").write_text(f"PACKAGE = 'no_such_package'\n{TEXT}")
    (folder / "net.new").write_text("small")
    with pytest.raises(SetupError, match=r"needs the package no_such_package, .* pip install 'tvm-convgrad\["):
        load_model(folder / "net.new")


def test_help_lists_the_formats(convgrad: Command) -> None:
    shown = " ".join(convgrad("build", "--help").out.replace("│", " ").split())
    assert all(each.shown in shown for each in all_formats())


def test_listing_formats_loads_no_tvm() -> None:
    program = textwrap.dedent("""
        import json, sys
        from tvm_convgrad.training.frontends import shown_formats
        heavy = [name for name in ("tvm", "numpy", "onnx", "torch") if name in sys.modules]
        print(json.dumps([shown_formats(), heavy]))
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [".json, .onnx, .pt2, .relay or file.py:function", []]
