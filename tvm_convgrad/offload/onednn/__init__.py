# SPDX-License-Identifier: Apache-2.0
"""oneDNN on x86-64 CPUs: rules.py says what it takes, backend.py describes a call, runtime/ is compiled against it."""
