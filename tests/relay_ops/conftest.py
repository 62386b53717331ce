# SPDX-License-Identifier: Apache-2.0
"""These tests need a TVM that has Relay: `make test-relay` makes one. Elsewhere they are not collected.

CONVGRAD_TORCH_PYTHON names a Python that has PyTorch, for test_resnet_training.py. Those in gpu/ want the packages of
cuDNN and nvcc besides, from the folder that CONVGRAD_GPU_PACKAGES names: `make test-relay-gpu` gives them those of
.venv. None of them needs a GPU.
"""

from __future__ import annotations

import logging
import os
import sys

import pytest

from tests.relay_ops import corpus
from tvm_convgrad import _tvm_has_relay

HAS_RELAY = _tvm_has_relay()
GPU_PACKAGES = os.environ.get("CONVGRAD_GPU_PACKAGES", "")
collect_ignore_glob = [] if HAS_RELAY else ["test_*.py", "gpu/*"]
if HAS_RELAY and GPU_PACKAGES:
    sys.path.append(GPU_PACKAGES)  # behind everything else: of it only cuDNN and nvcc are wanted
elif HAS_RELAY:
    collect_ignore_glob = ["gpu/*"]
os.environ.setdefault("TVM_NUM_THREADS", "1")  # as many workers as cores run already
if HAS_RELAY:
    logging.getLogger("te_compiler").setLevel(logging.ERROR)  # "no tuned configuration", for every operator
    logging.getLogger("autotvm").setLevel(logging.ERROR)

_skipped: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and corpus.ABSENT not in str(report.longrepr):
        _skipped.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A test that did not run is a failure here, unless it is the corpus that is absent."""
    if HAS_RELAY and _skipped:
        print(f"\nskipped, and must not be: {', '.join(_skipped)}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
