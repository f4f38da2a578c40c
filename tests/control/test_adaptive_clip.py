"""Adaptive clipping: each module against a plain transcription of its paper's algorithm, on recorded norms.

Gradients are made to have the recorded norms, so the factors are visible in them. Under the interpreter the
same tests run the kernel that scales each tensor by its own factor.
"""

from __future__ import annotations

import copy
import io
import math
import statistics
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gradiometer as gm
from conftest import KERNELS
from gradiometer.ops import packing
from support.compiling import needs_compiler
from support.fake_device import DEVICES, Model, device_of, watch
from support.gradients import bits, with_grads

INF, NAN = math.inf, math.nan
EPS = 1e-6
# of float64; a few roundings in each of some tens of operations
ROUNDINGS = 100 * 2**-53


# the papers' algorithms in plain Python


class ZClip:
    """ZClip: reciprocal clipping by z-score, statistics from clipped norms (arXiv 2504.02507, section 3)."""

    def __init__(self, z_threshold=2.5, decay=0.97, warmup_steps=25, max_norm=INF):
        self.z_threshold, self.decay, self.warmup_steps = z_threshold, decay, warmup_steps
        self.max_norm = max_norm
        self.seen = []
        self.mean = self.variance = None

    def __call__(self, norm):
        """Return the limit of this step."""
        if not math.isfinite(norm):
            # not in the paper: the norm is not counted
            return self.max_norm
        if self.mean is None:
            self.seen.append(norm)
            if len(self.seen) == self.warmup_steps:
                self.mean = statistics.fmean(self.seen)
                self.variance = statistics.fmean((x - self.mean) ** 2 for x in self.seen)
            return self.max_norm
        deviation = math.sqrt(self.variance)
        z = (norm - self.mean) / (deviation + EPS)
        limit = INF
        if z > self.z_threshold:
            limit = self.mean + self.z_threshold**2 / z * deviation
            norm = limit
        self.mean = self.decay * self.mean + (1 - self.decay) * norm
        self.variance = self.decay * self.variance + (1 - self.decay) * (norm - self.mean) ** 2
        return min(limit, self.max_norm)


class AdaGC:
    """AdaGC: per tensor, relative to the average of clipped norms (arXiv 2502.11034, algorithm 1)."""

    def __init__(self, ratio=1.04, decay=0.99, warmup_steps=100, max_norm=1.0):
        self.ratio, self.decay, self.warmup_steps, self.max_norm = ratio, decay, warmup_steps, max_norm
        self.step = 0
        self.average = {}

    def __call__(self, norms):
        """Return the factors of this step; ``norms``: by name, without missing gradients."""
        self.step += 1
        factors = {}
        if self.step <= self.warmup_steps:
            total = math.sqrt(math.fsum(x * x for x in norms.values()))
            common = min(1.0, self.max_norm / (total + EPS))
            for name, norm in norms.items():
                factors[name] = common
                self.average[name] = min(self.average.get(name, INF), common * norm)
            return factors
        for name, norm in norms.items():
            before = self.average.get(name, norm)
            limit = self.ratio * before
            factors[name] = limit / (norm + EPS) if norm > limit else 1.0
            self.average[name] = self.decay * before + (1 - self.decay) * min(norm, limit)
        return factors


def agc(weight, grad, ratio=0.01, eps=1e-3):
    """AGC: one unit (arXiv 2102.06171, equation 3)."""
    largest = ratio * max(math.hypot(*weight), eps)
    norm = math.hypot(*grad)
    return [x * largest / norm for x in grad] if norm > largest else list(grad)


# recorded norms


def recorded(seed, steps, scale=1.0, spikes=()):
    """Return norms that drift and vary as in a training run, with spikes."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(steps, generator=generator, dtype=torch.float64).tolist()
    norms = [scale * (1 + 2 / (1 + i / 20)) * math.exp(0.15 * x) for i, x in enumerate(noise)]
    for i, factor in spikes:
        norms[i] *= factor
    return norms


# one element has any norm exactly
def one(value, dtype=torch.float64):
    parameter = nn.Parameter(torch.ones(1, dtype=dtype))
    parameter.grad = torch.tensor([value], dtype=dtype)
    return parameter


SPIKES = ((40, 3.0), (60, 100.0), (61, 50.0), (90, 1e6), (120, 1.5))


@pytest.mark.parametrize("options", [{}, {"max_norm": 2.0}, {"warmup_steps": 3, "decay": 0.9, "z_threshold": 1.5}])
@pytest.mark.parametrize("how", ["collect_and_clip_", "clip_grad_norm_", "clip_coefficient", "forward"])
def test_z_score_clip_is_zclip(options, how):
    clip, oracle = gm.ZScoreClip(**options), ZClip(**options)
    clipped = 0
    for norm in recorded(0, 60 if KERNELS else 150, spikes=SPIKES[: 1 if KERNELS else None]):
        parameter = one(norm)
        factor = min(1.0, oracle(norm) / (norm + EPS))
        clipped += factor < 1.0
        if how == "collect_and_clip_":
            gm.collect_and_clip_([parameter], clip)
        elif how == "clip_grad_norm_":
            assert gm.clip_grad_norm_([parameter], clip) == norm
        elif how == "clip_coefficient":
            parameter.grad *= gm.clip_coefficient(gm.collect_grads([parameter]), clip)
        else:
            parameter.grad *= clip(gm.collect_grads([parameter]))
        assert parameter.grad.item() == pytest.approx(norm * factor, rel=ROUNDINGS)
        assert clip.factor.item() == pytest.approx(factor, rel=ROUNDINGS)
    assert clipped >= 1
    assert clip.n_clipped == clipped
    assert clip.clip_fraction == clipped / clip.n_steps
    assert clip.mean.item() == pytest.approx(oracle.mean, rel=ROUNDINGS)
    assert clip.std.item() == pytest.approx(math.sqrt(oracle.variance), rel=1e4 * ROUNDINGS)
