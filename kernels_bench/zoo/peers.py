"""Other tools that watch the same runs, used as their documentation shows, with their own defaults.

Their reports become headlines: the detector's name, and for what is only logged, "coverage" (PulseGrad's
warning of parameters that are not the model's) and "nan_inf" (TrainScope's warning of a non-finite loss).
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import tempfile
import time
from pathlib import Path

from kernels_bench.zoo.observers import Headline


class PulseGrad:
    """`pulsegrad.watch` of each model and its optimizer."""

    name = "pulsegrad"

    def __init__(self, t):
        self.folder = tempfile.TemporaryDirectory(prefix="zoo-", ignore_cleanup_errors=True)
        folder = Path(self.folder.name)
        # nothing is written to the user's home
        os.environ["PULSEGRAD_CONFIG_PATH"] = str(folder / "config.toml")
        os.environ["PULSEGRAD_CONSOLE"] = "off"
        import pulsegrad
        from pulsegrad._artifact import catalog
        from pulsegrad._log import get_logger

        catalog.set_catalog_path(folder / "catalog.db")
        self.logged = Logged(get_logger())
        watched = t.model if t.watched is None else t.watched
        self.sessions = [
            pulsegrad.watch(owner(watched, optimizer, len(t.optimizers)), optimizer, run_dir=folder)
            for optimizer in t.optimizers
        ]

    def record(self, loss):
        """Do nothing: hooks of the optimizer record."""

    def advance(self, _, __):
        # its writer drops steps of a loop as fast as this one
        for session in self.sessions:
            while session.store._writer._queue.qsize() > 16:
                time.sleep(0.001)

    def finish(self):
        from pulsegrad_schemas import SEVERITY_LEVELS, Severity

        severe = SEVERITY_LEVELS[SEVERITY_LEVELS.index(Severity.WARNING) :]
        headlines = [
            Headline("coverage", True, 0, 0, text)
            for text in self.logged.close()
            if "not part of the discovered model" in text
        ]
        for session in self.sessions:
            session.close()
            with sqlite3.connect(session.run_path / "db.sqlite") as base:
                found = base.execute(
                    "select detector, severity, first_step, message from findings"
                ).fetchall()
            base.close()
            # its first step is 1
            headlines += [
                Headline(detector, severity in severe, step - 1, step - 1, message)
                for detector, severity, step, message in found
            ]
        self.folder.cleanup()
        return headlines


def owner(model, optimizer, count):
    """Return the part of a model that an optimizer trains: all of it, if there is only one optimizer."""
    if count == 1:
        return model
    first = optimizer.param_groups[0]["params"][0]
    return next(part for part in model.children() if any(p is first for p in part.parameters()))


class TrainScope:
    """`TrainScope.step` between the backward and the optimizer's step."""

    name = "trainscope"

    def __init__(self, t):
        import trainscope
        from trainscope.core.config import TrainScopeConfig

        self.folder = tempfile.TemporaryDirectory(prefix="zoo-", ignore_cleanup_errors=True)
        self.logged = Logged(logging.getLogger("trainscope"))
        config = TrainScopeConfig(run_dir=self.folder.name, run_name="run")
        watched = t.model if t.watched is None else t.watched
        self.scope = trainscope.TrainScope(watched, t.optimizers[0], config=config).attach()
        self.headlines, self.step, self.is_recorded = [], 0, False

    def record(self, loss):
        # of several losses in a step, the first one
        if self.is_recorded:
            return
        self.is_recorded = True
        if (spike := self.scope.step(float(loss.detach()), batch_index=self.step)) is not None:
            text = json.dumps(spike, default=str)
            self.headlines.append(Headline("spike", True, self.step, self.step, text))

    def advance(self, _, __):
        for text in self.logged.take():
            if "Non-finite loss" in text:
                self.headlines.append(Headline("nan_inf", True, self.step, self.step, text))
        self.step, self.is_recorded = self.step + 1, False

    def finish(self):
        self.scope.detach()
        self.logged.close()
        self.folder.cleanup()
        return episodes(self.headlines)


def episodes(headlines, gap=20):
    """Return the first of each series of spikes, or of non-finite losses, less than ``gap`` steps apart."""
    kept, last = [], {}
    for headline in headlines:
        if headline.seen - last.get(headline.rule, -gap) >= gap:
            kept.append(headline)
        last[headline.rule] = headline.seen
    return kept


class Logged(logging.Handler):
    """Keeps what a logger warns of, and prints none of it."""

    def __init__(self, logger):
        super().__init__(logging.WARNING)
        self.logger, self.texts = logger, []
        for handler in logger.handlers[:]:
            logger.removeHandler(handler)
        logger.propagate = False
        logger.addHandler(self)

    def emit(self, record):
        self.texts.append(record.getMessage())

    def take(self):
        """Return the texts since the last call."""
        texts, self.texts = self.texts, []
        return texts

    def close(self):
        """Stop, and return the texts since the last call."""
        self.logger.removeHandler(self)
        super().close()
        return self.take()


PEERS = {tool.name: tool for tool in (PulseGrad, TrainScope)}
