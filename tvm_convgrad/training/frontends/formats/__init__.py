# SPDX-License-Identifier: Apache-2.0
"""The model formats that `load_model` reads, a file each; a file put here is found by itself.

Each file has a `FORMAT` (see `registry.Format`). What reads the model stands in the same file or, where it is long, in
a module of its own. No file here imports TVM or its optional package before a model is read: the help of the commands
lists the formats.
"""
