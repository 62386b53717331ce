# SPDX-License-Identifier: Apache-2.0
"""`python -m tvm_convgrad`: the command `convgrad`."""

from tvm_convgrad.cli import main

if __name__ == "__main__":
    main()
