"""Sinks: where the steps of a run go. Each is one file, and imports its package when it is made.

A sink is any object with the methods of `gradiometer.protocols.Sink`; a plain callable will do too.
"""

from gradiometer.sinks.console import Console
from gradiometer.sinks.function import Function
from gradiometer.sinks.jsonl import JSONLines
from gradiometer.sinks.mlflow import MLflow
from gradiometer.sinks.run_record import RunRecord
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
    "TensorBoard",
    "WeightsAndBiases",
]
