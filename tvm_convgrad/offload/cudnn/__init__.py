# SPDX-License-Identifier: Apache-2.0
"""cuDNN on NVIDIA GPUs.

entry.py           facts: packages, targets, types, epilogues
rules.py           which calls it takes, and why not others
backend.py         its runtime, a call as plain numbers with a ranked list of engines
call.py            one call: a direction of a problem with its epilogue
engines.py         engines that cuDNN proposes for a call, also for a GPU that is not there
settings.py        what engines may do: determinism, tf32, transforms, workspace
tuner.py           engines in guarded memory (guarded.py), against one another (agreement.py), timed in turns
tuning_device.py   the device on which it times them; gpu.py is this machine's GPU
store.py           the winners in a file, and the context in which calls take them
devices.py         GPUs as data, for machines that have none
runtime/           the runtime's source, and what stands in for the driver where there is none
"""
