# SPDX-License-Identifier: Apache-2.0
"""A client: it trains a compiled step on its own samples, and gives the weights back."""

from __future__ import annotations

from pathlib import Path

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from convgrad_federated.weights import set_weights, weights_of
from tvm_convgrad.training.runtime.data import Samples, load_samples
from tvm_convgrad.training.runtime.loop import batch_size_of
from tvm_convgrad.training.runtime.session import Session
from tvm_convgrad.training.runtime.source import batches_of_epoch

app = ClientApp()


def samples_of(session: Session, context: Context) -> Samples:
    """The training samples of this client: every so many-th of the file, which stands for a file of its own."""
    found = load_samples(Path(str(context.run_config["data"])), session.inputs, session.target, "train")
    assert found is not None  # of "train", else an error was raised
    number, clients = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    return Samples(tuple(array[number::clients] for array in found.inputs), found.target[number::clients])


@app.train()
def train(message: Message, context: Context) -> Message:
    """Some epochs from the weights of the server. Flower starts a process for it, so the optimizer begins again."""
    session = Session(Path(str(context.run_config["step"])))
    samples = samples_of(session, context)
    set_weights(session, message.content["arrays"].to_numpy_ndarrays())
    size = batch_size_of(session, None, len(samples))
    number = int(message.content["config"]["server-round"])
    loss = 0.0
    for epoch in range(int(context.run_config["epochs"])):
        for rows in batches_of_epoch(number, epoch, len(samples), size):
            inputs, target = samples.rows(rows)
            loss, _ = session.step(inputs[0], target, float(context.run_config["lr"]))
    metrics = MetricRecord({"num-examples": len(samples), "loss": loss})
    reply = RecordDict({"arrays": ArrayRecord(weights_of(session)), "metrics": metrics})
    return Message(content=reply, reply_to=message)
