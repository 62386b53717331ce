# SPDX-License-Identifier: Apache-2.0
"""Images of folders and tar shards as batches of a step, decoded in advance by other processes.

To be read in this order: `options` (what users set), `recipe` (what is made of an image), `pillow` and `augment` (how),
`index`, `folder` and `shards` (which images there are), `shared` (memory that processes share), `decoder` (rows of a
batch), `worker` and `pool` (the processes), `source` (the `Source` of it all).
"""
