# SPDX-License-Identifier: Apache-2.0
"""Parts of the package that CONVGRAD_DISABLE turns off in TVM."""

from __future__ import annotations

import os

from tvm_convgrad.core.errors import SetupError

VARIABLE = "CONVGRAD_DISABLE"
"""The environment variable that turns parts of the package off in TVM; it is read when TVM is imported."""

GRADIENTS, KERNELS = "gradients", "kernels"

PARTS = {
    GRADIENTS: "gradients of TVM's own operators, convolutions included, outside of tvm_convgrad.rules()",
    KERNELS: "generated CPU kernels: convolutions become stock operators and TVM's own schedules",
}
"""The parts that can be turned off, and what each is."""


def disabled(part: str) -> bool:
    """Whether CONVGRAD_DISABLE names this part.

    Raises:
        SetupError: the variable names something that does not exist.
    """
    return part in disabled_parts()


def disabled_parts() -> list[str]:
    """What CONVGRAD_DISABLE names.

    Raises:
        SetupError: the variable names something that does not exist.
    """
    named = [word.strip() for word in os.environ.get(VARIABLE, "").split(",") if word.strip()]
    unknown = [word for word in named if word not in PARTS]
    if unknown:
        raise SetupError(
            f"{VARIABLE}={os.environ[VARIABLE]}: there is no part {unknown[0]!r}; name some of {', '.join(PARTS)}, "
            "separated by commas. TVM_DEVICE_BACKEND_AUTOLOAD=0 turns everything off."
        )
    return named
