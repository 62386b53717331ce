# SPDX-License-Identifier: Apache-2.0
"""oneDNN on x86-64 CPUs.

entry.py     facts: packages, targets, types, epilogues
rules.py     which calls it takes, and in which formats
backend.py   its runtime, and a call as plain numbers
runtime/     the runtime's source, which is compiled against oneDNN
"""
