# SPDX-License-Identifier: Apache-2.0
"""cuDNN on NVIDIA GPUs: rules.py says what it takes, engines.py asks it for engines, also where there is no GPU.

backend.py     where its packages lie, its runtime, a call as plain numbers with a ranked list of engines
settings.py    what engines may do: determinism, tf32, transforms, workspace
tuner.py       engines in guarded memory (guarded.py), against one another (agreement.py), timed in turns
bench.py       the device that it needs; gpu.py is this machine's GPU
store.py       the winners, and where calls ask for them
devices.py     GPUs as data, for machines that have none
runtime/       the runtime's source, and what stands in for the driver where there is none
"""
