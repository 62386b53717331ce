# SPDX-License-Identifier: Apache-2.0
"""`convgrad env`: what this installation consists of, for reports of faults."""

from __future__ import annotations

import os
import platform
from typing import Annotated, Any

import typer

from tvm_convgrad.commands import options
from tvm_convgrad.offload.registry import ENTRIES, NAMES, backend, packages_of

_PACKAGES = ("tvm-convgrad", "apache-tvm", "apache-tvm-ffi", "numpy", "ml_dtypes", "typer", "rich", "matplotlib")
_EXTRAS = {
    "onnx": ("onnx",),
    "torch": ("torch",),
    "jax": ("jax",),
    "report": ("vl-convert-python", "jinja2"),
    "cross": ("ziglang",),
    **{entry.extra: packages_of(name) for name, entry in ENTRIES.items()},
    "demo": ("onnx", "scikit-learn"),
    "test": ("pytest", "hypothesis"),
}


def env(
    json: options.Json = False,
    forget_failures: Annotated[
        bool,
        typer.Option(
            "--forget-failures",
            help="Let kernels of the bridges to PyTorch and JAX whose compilation failed within the last day be "
            "compiled again.",
        ),
    ] = False,
) -> None:
    """Show versions, CPU, compilation target, cache folder, extras, backends, and what this TVM lacks."""
    import platformdirs

    from tvm_convgrad.core.kept_objects import KeptObjects
    from tvm_convgrad.report.tables import byte_count, installed_version, print_json, print_pairs

    report: dict[str, Any] = {name: installed_version(name) for name in _PACKAGES}
    report |= {"python": f"{platform.python_implementation()} {platform.python_version()}"}
    report["platform"] = platform.platform()
    report["cores"] = len(os.sched_getaffinity(0))
    report |= _compiler()
    report["cache"] = platformdirs.user_cache_dir("tvm-convgrad")
    kept = KeptObjects()
    forgotten = _forget_failures() if forget_failures else 0
    count, size = kept.size()
    report["compiled objects"] = {"folder": str(kept.folder), "count": count, "bytes": size, "limit": kept.limit}
    if forget_failures:
        report["failures forgotten"] = forgotten
    report["extras"] = {extra: all(map(installed_version, packages)) for extra, packages in _EXTRAS.items()}
    report["backends"] = {name: backend(name).unavailable(None) or "ready" for name in NAMES}
    report["gradient rules left out"] = _left_out()
    report["over TVM's own rules"] = _overridden()
    if json:
        print_json(report)
        return
    report["compiled objects"] = f"{kept.folder} ({count}, {byte_count(size)} of {byte_count(kept.limit)})"
    if forget_failures:
        report["failures forgotten"] = str(forgotten)
    report["gradient rules left out"] = report["gradient rules left out"] or "none"
    for in_force, names in report.pop("over TVM's own rules").items():
        report[f"over TVM's own, {in_force}"] = names
    extras = ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in report.pop("extras").items())
    backends = [(f"backend {name}", state) for name, state in report.pop("backends").items()]
    rows = [
        (name, ", ".join(value) if isinstance(value, list) else value or "missing") for name, value in report.items()
    ]
    print_pairs("tvm-convgrad environment", [*rows, ("extras", extras), *backends])


def _forget_failures() -> int:
    """Remove the records of failed compilations."""
    from tvm_convgrad.bridge.failures import forget_failures

    return forget_failures()


def _left_out() -> list[str]:
    """The operators with a gradient rule of ours that this TVM lacks."""
    import tvm_convgrad

    tvm_convgrad.register()
    from relax_ops.rules import missing_operators

    return missing_operators()


def _overridden() -> dict[str, list[str]]:
    """Where this package has registered a rule over one of TVM: when it is in force, and operators with attributes."""
    from relax_ops.dispatch import overridden

    found: dict[str, list[str]] = {}
    for each in overridden():
        if each.over_stock:
            found.setdefault(each.in_force, []).append(f"{each.operator.removeprefix('relax.')} {each.attribute}")
    return found


def _compiler() -> dict[str, Any]:
    """This machine, as TVM describes it."""
    from tvm.support import cc
    from tvm.target import codegen

    from tvm_convgrad.core.cpu_features import local_features, tile_refusal

    return {
        "cpu": str(codegen.llvm_get_system_cpu()),
        "cpu features": sorted(local_features()),
        "amx tiles": tile_refusal() or "granted",
        "amx tiles of float16": tile_refusal("amx-fp16") or "granted",
        "triple": str(codegen.llvm_get_system_triple()),
        "llvm": int(codegen.llvm_version_major()),
        "c++ compiler": cc.get_cc(),
    }
