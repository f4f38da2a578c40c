"""The TensorBoard sink."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from gradiometer.extras import require
from gradiometer.sinks.selection import News, Options, Selection

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Unpack

    from gradiometer.recorder import RunInfo, StepRecord
    from gradiometer.rules import Fault, Finding

_PROTO = "tensorboard.compat.proto"


class TensorBoard:
    """Writes scalars to a new TensorBoard event file; findings and faults appear in the Text tab.

    Each step is one event with the step's number and time. It uses TensorBoard's own writer and needs
    neither TensorFlow nor ``torch.utils.tensorboard``. Scalars are float32: values above 3.4e38 become Inf.

    Args:
        log_dir: the folder, one per run; another writer may use it too.
        **options: which steps and values to write, as for `gradiometer.sinks.Selection`.

    Raises:
        ImportError: without tensorboard; ``pip install 'gradiometer[tensorboard]'`` installs it.
    """

    def __init__(self, log_dir: str | os.PathLike[str], **options: Unpack[Options]) -> None:
        self.log_dir = os.fspath(log_dir)
        self.selection = Selection(**options)
        self._news = News()
        self._writer: Any = None
        self._event = require(f"{_PROTO}.event_pb2", "tensorboard", "sinks.TensorBoard").Event
        self._summary = require(f"{_PROTO}.summary_pb2", "tensorboard", "sinks.TensorBoard")
        self._tensor = require(f"{_PROTO}.tensor_pb2", "tensorboard", "sinks.TensorBoard").TensorProto

    def __repr__(self) -> str:
        return f"TensorBoard({self.log_dir!r})"

    def start(self, info: RunInfo) -> None:
        """Open a new event file."""
        del info
        module = require("tensorboard.summary.writer.event_file_writer", "tensorboard", "sinks.TensorBoard")
        self._writer = module.EventFileWriter(self.log_dir)

    def write(self, records: Sequence[StepRecord], findings: Sequence[Finding]) -> None:
        """Add the steps and flush."""
        for record in records:
            if self.selection.takes(record):
                values = self.selection.values(record)
                scalars = [self._summary.Summary.Value(tag=tag, simple_value=x) for tag, x in values.items()]
                self._add(record.step, record.time, scalars)
        for finding in self._news.take(findings):
            self._add_text("gradiometer/findings", f"{finding}\n{finding.advice}", finding.first_step)
        self._writer.flush()

    def fault(self, fault: Fault) -> None:
        """Add the fault as text and flush."""
        self._add_text("gradiometer/fault", str(fault), fault.step)
        self._writer.flush()

    def close(self) -> None:
        """Flush and close."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _add_text(self, tag: str, text: str, step: int) -> None:
        # TensorBoard renders Markdown; indented text is code, so underscores in names are not emphasis
        text = "\n".join("    " + line for line in text.splitlines())
        tensor = self._tensor(dtype="DT_STRING", string_val=[text.encode("utf-8", "backslashreplace")])
        plugin = self._summary.SummaryMetadata.PluginData(plugin_name="text")
        metadata = self._summary.SummaryMetadata(plugin_data=plugin)
        self._add(step, time.time(), [self._summary.Summary.Value(tag=tag, tensor=tensor, metadata=metadata)])

    def _add(self, step: int, seconds: float, values: list[Any]) -> None:
        summary = self._summary.Summary(value=values)
        self._writer.add_event(self._event(wall_time=seconds, step=step, summary=summary))
