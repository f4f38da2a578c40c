"""Sinks: where the steps of a run go. Each sink is one file and imports its package when it is created.

A sink is any object with the methods of `gradiometer.sinks.Sink`, or a plain callable. It receives steps,
findings and faults in order, on its own thread; a callable receives no faults. Training does not wait for
sinks.
"""

from gradiometer.runs import RunRecord
from gradiometer.sinks.console import Console
from gradiometer.sinks.function import Function
from gradiometer.sinks.jsonl import JSONLines
from gradiometer.sinks.mlflow import MLflow
from gradiometer.sinks.protocol import Sink
from gradiometer.sinks.selection import Selection
from gradiometer.sinks.tensorboard import TensorBoard
from gradiometer.sinks.wandb import WeightsAndBiases

__all__ = [
    "Console",
    "Function",
    "JSONLines",
    "MLflow",
    "RunRecord",
    "Selection",
    "Sink",
    "TensorBoard",
    "WeightsAndBiases",
]
