# SPDX-License-Identifier: Apache-2.0
"""Our kernels under PyTorch on CPUs: training scripts go on unmodified, and are faster.

import tvm_convgrad.torch
tvm_convgrad.torch.enable()          # or: with tvm_convgrad.torch.enable(): ...

signature.py   a call without its data, and the kernels that compute it
plan.py        who computes calls of one signature: compiled, measured, kept
native.py      PyTorch's entries in C++, which need no Python where a choice is made
override.py    enable, disable, explain, stats: PyTorch's operators on CPUs
report.py      what is told of plans
operators.py   tvm_convgrad::conv{1,2,3}d_backward, custom operators for torch.export
"""

from tvm_convgrad.core.errors import SetupError as _SetupError

try:
    from tvm_convgrad.torch.operators import define as _define
except ModuleNotFoundError as _error:
    if _error.name != "torch":
        raise
    raise _SetupError("tvm_convgrad.torch needs PyTorch: pip install 'tvm-convgrad[torch]'.") from _error
from tvm_convgrad.torch.override import Enabled, Explanation, Stats, disable, enable, explain, stats

_define()

__all__ = ["Enabled", "Explanation", "Stats", "disable", "enable", "explain", "stats"]
