# SPDX-License-Identifier: Apache-2.0
"""Backends are found by their folders: their entries hold, and one in a folder of its own is a backend everywhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tvm

from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels.epilogue import NO_EPILOGUE, Epilogue
from tvm_convgrad.offload.registry import ENTRIES, NAMES, backend, names_of_kind, packages_of

ROOT = Path(__file__).parents[2]
MARKER = "; sys_platform == 'linux' and platform_machine == 'x86_64'"
TARGETS = {"llvm": tvm.target.Target("llvm"), "cuda": tvm.target.Target({"kind": "cuda", "arch": "sm_90"})}
DTYPES = ("float16", "bfloat16", "float32", "float64")


@pytest.mark.parametrize("name", NAMES)
def test_pyproject_repeats_the_entry(name: str) -> None:
    """pyproject.toml is static: its extras say what the entries say."""
    tomllib = pytest.importorskip("tomllib")  # since Python 3.11
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    entry = ENTRIES[name]
    wanted = [f"tvm-convgrad[{extra}]" for extra in entry.extras]
    wanted += [f"{requirement}{MARKER}" for requirement in entry.requirements]
    assert extras[entry.extra] == wanted
    assert {package for package, _ in entry.files} <= set(packages_of(name))


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_is_named_as_its_backend(name: str) -> None:
    chosen, entry = backend(name), ENTRIES[name]
    assert (chosen.name, chosen.entry) == (name, entry)
    assert type(chosen).__module__ == f"tvm_convgrad.offload.{name}.backend"
    assert chosen.run_function.startswith(f"convgrad.{name}.")
    assert set(entry.kinds) <= set(TARGETS)
    assert set(entry.directions) <= set(DIRECTIONS)
    assert {part for parts in entry.epilogues.values() for part in parts} <= set(vars(Epilogue()))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_the_entry_says_what_the_rules_take(name: str, dtype: str, direction: str) -> None:
    """A direction with a type that the entry states has some problem that is not refused; another one has none."""
    entry, target = ENTRIES[name], TARGETS[ENTRIES[name].kinds[0]]
    problem = ConvProblem.from_descriptor("mb2ic16ih9oc32kh3ph1_lay=NHWC:OHWI:NHWC").with_dtypes(dtype, dtype, dtype)
    taken = dtype in entry.dtypes and direction in entry.directions
    assert (backend(name).refusal(direction, problem, NO_EPILOGUE, target) == "") == taken


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("part", vars(Epilogue()))
@pytest.mark.parametrize("name", NAMES)
def test_what_the_entry_does_not_fuse_is_refused(name: str, part: str, direction: str) -> None:
    target = TARGETS[ENTRIES[name].kinds[0]]
    problem = ConvProblem.from_descriptor("mb2ic16ih9oc32kh3ph1_lay=NHWC:OHWI:NHWC")
    if part not in ENTRIES[name].epilogues.get(direction, ()):
        assert backend(name).refusal(direction, problem, Epilogue(**{part: True}), target)


def test_names_of_vendors_stand_in_their_own_folders() -> None:
    """Elsewhere nothing is chosen by a name: no comparison with one, and no list of some."""
    chosen = re.compile(rf"(==|!=|\bin)\s*\(?[\"']({'|'.join(NAMES)})[\"']")
    folders = [ROOT / "tvm_convgrad" / "offload" / name for name in NAMES]
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in (ROOT / "tvm_convgrad").rglob("*.py")
        if not any(folder in path.parents for folder in folders)
        for line in path.read_text().splitlines()
        if chosen.search(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("folder", "above"),
    [
        ("offload", ("tuning", "measure", "bench", "verify", "commands", "report", "training")),
        ("measure", ("tuning", "bench", "verify", "commands", "report")),
        ("tuning", ("bench", "verify", "commands", "report")),
    ],
)
def test_what_is_below_imports_nothing_above(folder: str, above: tuple[str, ...]) -> None:
    imported = re.compile(rf"^\s*(from|import) tvm_convgrad\.({'|'.join(above)})\b", re.MULTILINE)
    paths = (ROOT / "tvm_convgrad" / folder).rglob("*.py")
    assert [path.name for path in paths if imported.search(path.read_text())] == []


def test_entries_are_read_without_tvm() -> None:
    program = (
        "import sys; from tvm_convgrad.offload.registry import NAMES; import tvm_convgrad.cli\n"
        "import tvm_convgrad.commands.options, tvm_convgrad.commands.bench\n"
        "print(NAMES); assert 'tvm' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(NAMES)


# ------------------------------------------------------------------------------------------ a backend of the test's own

ENTRY = """
from tvm_convgrad.offload.contract import Entry, Marker
ENTRY = Entry(
    name="numlib", title="NumLib", order=5, kinds=("llvm",), used_on="CPUs", dtypes={"float32": 0},
    epilogues={"forward": (), "backward_weight": ()}, extra="numlib", requirements=("numpy>=1",),
    marker=Marker("numlib", "calls NumLib"),
)
"""

BACKEND = """
import ctypes
from pathlib import Path
import numpy as np
import tvm_ffi
from tvm_convgrad.core.reference import DIRECTIONS
from tvm_convgrad.offload.contract import Backend, Engine
from tvm_convgrad.offload.numlib.entry import ENTRY
from tvm_convgrad.offload.refusals import epilogue_refusal

calls = []

class NumLib(Backend):
    entry = ENTRY
    run_function = "convgrad.numlib.1.run"

    def refusal(self, direction, problem, epilogue, target):
        if direction not in ENTRY.directions:
            return f"NumLib has no {direction}"
        return epilogue_refusal(direction, epilogue, ENTRY.epilogues)

    def engine(self, direction, problem, epilogue, target):
        return Engine("loops", "float64 inside", 0)

    def numbers(self, direction, problem, epilogue, target):
        calls.append((direction, problem))
        return [len(calls) - 1]

    def digest(self):
        return "1"

    def version(self):
        return "NumLib 1"

    def library(self):
        return Path(__file__).parent / "libnumlib.so"

def run(call, first, second, result):
    number = ctypes.c_int64.from_address(int(ctypes.cast(call, ctypes.c_void_p).value)).value
    direction, problem = calls[number]
    arrays = [np.from_dlpack(each) for each in (first, second)]
    np.from_dlpack(result)[...] = DIRECTIONS[direction](problem, *arrays)
    ran.append(direction)

ran = []
tvm_ffi.register_global_func(NumLib.run_function, run)
BACKEND = NumLib()
"""

PROGRAM = """
import contextlib, io, json, sys
import tvm_convgrad.offload
tvm_convgrad.offload.__path__.append(sys.argv[1])
import numpy as np
from tvm_convgrad import cli

def command(*arguments):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        cli.app([*arguments], standalone_mode=False)
    return out.getvalue()

found = {}
found["help"] = [command(name, "--help") for name in ("build", "bench", "build-runtime", "tune")]
found["env"] = json.loads(command("env", "--json"))
import tvm
from tvm_convgrad import evaluate
from tvm_convgrad.core.exact import numbers_of
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.offload.partition import offload
from relax_ops.program import directions_module
from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.offload.numlib import backend
problem = ConvProblem.from_descriptor("mb2ic3ih5oc4kh3ph1")
operands, wanted = numbers_of(problem, "forward")
found["equal"] = bool(np.array_equal(evaluate("conv2d", *operands, padding=1, impl="numlib"), wanted))
found["ran"] = backend.ran
module = directions_module([(name, DIRECTIONS[name], problem) for name in DIRECTIONS])
done = offload(module, ["numlib"], tvm.target.Target("llvm"))
found["taken"] = sorted(entry.direction for entry in done.lowered)
found["refused"] = {direction: reasons for (direction, _), reasons in done.refused.items()}
explained = json.loads(command("explain", sys.argv[2], "--offload", "numlib", "--json"))
found["explained"] = {
    entry["op"]: [entry["kernel"], {each["kernel"]: each["reason"] for each in entry["refused"]}]
    for entry in [*explained["gradients"], *explained["forward"]]
}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def added(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> dict[str, Any]:
    """What a process reports that has a backend in a folder of its own on the path of `offload`."""
    folder = tmp_path_factory.mktemp("backends")
    package = folder / "numlib"
    package.mkdir()
    for name, text in (("__init__", ""), ("entry", ENTRY), ("backend", BACKEND)):
        (package / f"{name}.py").write_text(text)
    command = [sys.executable, "-c", PROGRAM, str(folder), tiny_model]
    environment = {**os.environ, "COLUMNS": "200"}  # names in help texts stay whole
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_an_added_backend_is_listed(added: dict[str, Any]) -> None:
    assert added["env"]["backends"]["numlib"] == "ready"
    assert added["env"]["extras"]["numlib"] is True
    assert list(added["env"]["backends"]) == ["numlib", *NAMES]
    for text in added["help"]:
        assert "numlib" in text


def test_an_added_backend_computes(added: dict[str, Any]) -> None:
    assert added["equal"]
    assert added["ran"] == ["forward"]


def test_an_added_backend_is_chosen_in_a_partition(added: dict[str, Any]) -> None:
    assert added["taken"] == ["backward_weight", "forward"]
    assert added["refused"] == {"backward_data": {"numlib": "NumLib has no backward_data"}}


def test_explain_tells_what_an_added_backend_takes(added: dict[str, Any]) -> None:
    explained = added["explained"]
    assert explained["conv2d_backward_weight"][0].startswith("numlib loops")


def test_backends_are_chosen_by_the_kind_of_target() -> None:
    assert names_of_kind("llvm") == tuple(name for name in NAMES if "llvm" in ENTRIES[name].kinds)
    assert names_of_kind("opencl") == ()
