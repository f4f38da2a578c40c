"""Losses of runs that learn, with noise of many kinds, and of runs that do not go on as they should."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

STEPS = 1000
# where a spike begins, in each of `SPIKES`
ONSET = 600


def _falling(step: int) -> float:
    """Return the usual loss of a language model that learns: from 4 to about 1."""
    return 0.5 + 3.5 * (1.0 + step / 20.0) ** -0.5


def _student(rng: random.Random, freedom: int) -> float:
    return rng.gauss(0, 1) / math.sqrt(rng.gammavariate(freedom / 2, 2) / freedom)


def lognormal(sigma: float) -> Callable[[random.Random], Iterator[float]]:
    """Return losses whose noise is lognormal."""

    def losses(rng: random.Random) -> Iterator[float]:
        for step in range(STEPS):
            yield _falling(step) * math.exp(rng.gauss(0, sigma))

    return losses


def student(scale: float, freedom: int) -> Callable[[random.Random], Iterator[float]]:
    """Return losses whose noise has the heavy tail of Student's t."""

    def losses(rng: random.Random) -> Iterator[float]:
        for step in range(STEPS):
            yield _falling(step) * max(0.05, 1.0 + scale * _student(rng, freedom))

    return losses


def batches(size: int) -> Callable[[random.Random], Iterator[float]]:
    """Return means of a few examples, whose losses are lognormal themselves."""

    def losses(rng: random.Random) -> Iterator[float]:
        for step in range(STEPS):
            yield _falling(step) * sum(rng.lognormvariate(-0.5, 1.0) for _ in range(size)) / size

    return losses


def label_noise(rng: random.Random) -> Iterator[float]:
    """Return losses of batches of 32 that fall towards 0, except for the 3 % with a wrong label."""
    for step in range(STEPS):
        clean, wrong = 2.3 * math.exp(-step / 80) + 0.02, min(7.0, 2.3 + step / 100)
        bad = sum(rng.random() < 0.03 for _ in range(32))
        yield (
            (32 - bad) * clean * rng.gammavariate(20, 1 / 20) + bad * wrong * rng.gammavariate(10, 0.1)
        ) / 32


def returns(rng: random.Random) -> Iterator[float]:
    """Return squared errors of values in reinforcement learning, whose scale drifts up and down."""
    level = 0.0
    for step in range(STEPS):
        level += rng.gauss(0.004 if step < 300 else -0.002, 0.03)
        yield math.exp(level) * rng.gammavariate(1.5, 1.0)


def negative(rng: random.Random) -> Iterator[float]:
    """Return a log-likelihood that falls through 0."""
    for step in range(STEPS):
        yield 3.0 - 6.0 * (1 - math.exp(-step / 200)) + 0.15 * _student(rng, 4)


def curriculum(rng: random.Random) -> Iterator[float]:
    """Return losses of examples that become harder: by a quarter at once, by a half in 100 steps."""
    for step in range(STEPS):
        harder = (1.25 if step >= 400 else 1.0) * (1.0 + 0.5 * min(1.0, max(0.0, (step - 700) / 100)))
        yield _falling(step) * harder * math.exp(rng.gauss(0, 0.06))


def mixture(rng: random.Random) -> Iterator[float]:
    """Return losses of batches of one task each; one task of four is rare and hard."""
    for step in range(STEPS):
        hard = rng.choices((0.6, 1.0, 1.5, 2.5), (30, 40, 26, 4))[0]
        yield _falling(step) * hard * math.exp(rng.gauss(0, 0.06))


def rare_hard_batches(rng: random.Random) -> Iterator[float]:
    """Return losses of which one in 200 is 1.5 to 4 times as high, but not above that of no training."""
    for step in range(STEPS):
        hard = rng.uniform(1.5, 4.0) if rng.random() < 0.005 else 1.0
        yield min(_falling(0), _falling(step) * hard) * math.exp(rng.gauss(0, 0.05) - 0.15 * (step > 0))


def periodic(rng: random.Random) -> Iterator[float]:
    """Return losses of which every 97th is 2.5 times as high, but not above that of no training."""
    for step in range(STEPS):
        hard = 2.5 if step % 97 == 96 else 1.0
        yield min(_falling(0), _falling(step) * hard) * math.exp(rng.gauss(0, 0.05) - 0.15 * (step > 0))


def epochs(rng: random.Random) -> Iterator[float]:
    """Return losses of epochs of 79 batches, of which the last has 2 examples instead of 64."""
    for step in range(STEPS):
        size = 2 if step % 79 == 78 else 64
        yield _falling(step) * sum(rng.lognormvariate(-0.5, 1.0) for _ in range(size)) / size


def averaged(rng: random.Random) -> Iterator[float]:
    """Return a running average of noisy losses, as progress bars show it."""
    shown = 4.0
    for loss in lognormal(0.3)(rng):
        shown += 0.1 * (loss - shown)
        yield shown


def wandering(rng: random.Random) -> Iterator[float]:
    """Return losses of shards of a data set, 30 steps each, of different difficulty."""
    shard = 1.0
    for step in range(STEPS):
        if step % 30 == 0:
            shard = math.exp(rng.gauss(0, 0.12))
        yield _falling(step) * shard * math.exp(rng.gauss(0, 0.04))


def memorizing(rng: random.Random) -> Iterator[float]:
    """Return losses that fall to 1e-4, with noise of about its own size and short rises tenfold."""
    for step in range(STEPS):
        loss = 2.3 * math.exp(-step / 60) + 1e-4
        yield loss * math.exp(rng.gauss(0, 0.3)) * (10.0 if step > 200 and rng.random() < 0.004 else 1.0)


HEALTHY: dict[str, Callable[[random.Random], Iterator[float]]] = {
    "lognormal 0.05": lognormal(0.05),
    "lognormal 0.2": lognormal(0.2),
    "lognormal 0.6": lognormal(0.6),
    "Student's t of 3": student(0.05, 3),
    "Student's t of 2": student(0.03, 2),
    "batches of 1": batches(1),
    "batches of 4": batches(4),
    "batches of 32": batches(32),
    "label noise": label_noise,
    "returns": returns,
    "negative": negative,
    "curriculum": curriculum,
    "mixture": mixture,
    "rare hard batches": rare_hard_batches,
    "periodic": periodic,
    "epochs": epochs,
    "averaged": averaged,
    "wandering": wandering,
    "memorizing": memorizing,
}


def _spiked(shape: Callable[[int], float], sigma: float = 0.08) -> Callable[[random.Random], Iterator[float]]:
    def losses(rng: random.Random) -> Iterator[float]:
        for step, loss in enumerate(lognormal(sigma)(rng)):
            yield loss * (shape(step - ONSET) if step >= ONSET else 1.0)

    return losses


SPIKES: dict[str, Callable[[random.Random], Iterator[float]]] = {
    "3 times, back within 20 steps": _spiked(lambda past: 1.0 + 2.0 * math.exp(-past / 7)),
    "2.5 times, and it stays": _spiked(lambda past: 2.5),  # noqa: ARG005
    "10 times, and it stays": _spiked(lambda past: 10.0),  # noqa: ARG005
    "3 times amid noise, and it stays": _spiked(lambda past: 3.0, 0.15),  # noqa: ARG005
    "100 times, once": _spiked(lambda past: 100.0 if past == 0 else 1.0),
    "divergence by a tenth a step": _spiked(lambda past: 1.1 ** min(past, 200)),
    "up in 3 steps to 5 times": _spiked(lambda past: min(5.0, 1.0 + 1.4 * (past + 1))),
}
