# SPDX-License-Identifier: Apache-2.0
"""Reading and writing the ONNX files of an export, with tensors in other files where the model's are."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tvm_convgrad.core.errors import ArtifactError, ModelError, first_line
from tvm_convgrad.core.files import require_absent, write_atomic
from tvm_convgrad.training.export.onnx_writer import Written, with_trained
from tvm_convgrad.training.runtime.origin import Origin
from tvm_convgrad.training.runtime.schema import Array

_LARGEST = 2**31 - 2**20
"""Bytes that a file of protobuf can have, less what the graph besides its tensors may take."""


def data_file(output: Path) -> Path:
    """Where the tensors of an exported model lie if they are not in its own file."""
    return output.with_name(f"{output.name}.data")


def export_onnx(
    model: Path, origin: Origin, trained: Mapping[str, Array], output: Path, *, replace: bool = True
) -> Written:
    """Write the model of the file `model` with trained values to `output`.

    Tensors lie in a file of their own (`data_file`) if some of the model do, or if they are too many for one.

    Args:
        model: the file of the build; `origin` has been checked against it.
        origin: says whether there are files besides.
        trained: values by the names that they have in the step.
        replace: whether a file of tensors that is there already is overwritten.

    Raises:
        ModelError: as `with_trained`.
        ArtifactError: `output` cannot be written, or a file of tensors is there already.
    """
    import onnx  # optional

    written = with_trained(onnx.load(model), trained, str(model))
    apart = origin.has_tensor_files or written.proto.ByteSize() > _LARGEST
    if not apart:
        try:
            onnx.checker.check_model(written.proto)
        except onnx.checker.ValidationError as error:
            raise ModelError(f"{model}: the model with trained values is not valid ({first_line(error)}).") from error
        write_atomic(output, written.proto.SerializeToString())
        return written
    try:
        with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as folder:
            made = Path(folder) / output.name
            onnx.save_model(written.proto, made, save_as_external_data=True, location=data_file(output).name)
            onnx.checker.check_model(made)
            if (tensors := data_file(made)).exists():  # not if all are small
                if not replace:
                    require_absent(data_file(output))
                shutil.copymode(made, tensors)  # onnx lets only the owner read this one
                tensors.replace(data_file(output))
            made.replace(output)
    except OSError as error:
        raise ArtifactError(f"{output}: cannot be written ({error.strerror}); is the folder writable?") from error
    return written


__all__ = ["data_file", "export_onnx"]
