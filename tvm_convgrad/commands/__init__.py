# SPDX-License-Identifier: Apache-2.0
"""The commands of `convgrad`, a file each.

A file of a command imports typer, the options and the errors at its top, and everything else inside its functions:
importing TVM takes seconds, which `convgrad --help` and a wrong option must not wait for. Types that only annotations
need are imported under TYPE_CHECKING. This is the rule of this folder only; elsewhere imports are at the top.
"""
