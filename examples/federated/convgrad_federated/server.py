# SPDX-License-Identifier: Apache-2.0
"""The server: it averages the weights of the clients, and says how good they are on test samples of its own."""

from __future__ import annotations

from pathlib import Path

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from convgrad_federated.weights import set_weights, weights_of
from tvm_convgrad.training.runtime.data import load_samples
from tvm_convgrad.training.runtime.session import Session
from tvm_convgrad.training.runtime.validation import validate

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Average for some rounds, and print the accuracy after each."""
    config = context.run_config
    session = Session(Path(str(config["step"])))
    test = load_samples(Path(str(config["data"])), session.inputs, session.target, "test")
    if test is None:
        raise ValueError(f"{config['data']}: there are no arrays x_test and y_test.")

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        set_weights(session, arrays.to_numpy_ndarrays())
        measures = validate(session, test)
        print(f"round {number}: test accuracy {measures['accuracy']:.4f}", flush=True)
        return MetricRecord(measures)

    clients = int(config["clients"])
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
    initial = ArrayRecord(weights_of(session))
    rounds = int(config["rounds"])
    result = strategy.start(grid=grid, initial_arrays=initial, num_rounds=rounds, evaluate_fn=evaluate)
    if len(result.train_metrics_clientapp) < rounds:
        raise RuntimeError("no client has trained in some rounds; their logs have the reason.")
