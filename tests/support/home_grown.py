"""Gradient telemetry as found in many code bases, including its faults: the baseline of our comparisons.

It sums in the gradient's own dtype, waits for the device per tensor, makes a flattened copy of all gradients,
has comparisons that NaN passes, and returns None, 0.0 or a tensor if there is nothing to measure. Do not
repair these faults: the comparison is with real code. docs/how-to/migrating.md lists the replacements.
"""

from __future__ import annotations

import math

import torch
from torch import nn


def norm_by_item(model):
    """Return the total norm; one wait per parameter."""
    total = 0.0
    for p in model.parameters():
        if p.grad is not None:
            total += p.grad.norm(2).item() ** 2
    return total**0.5


def norm_of_squares(parameters):
    """Return the total norm: None without parameters, 0.0 without gradients, else a tensor."""
    parameters = list(parameters)
    if not parameters:
        return None
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return 0.0
    return sum(g.pow(2).sum() for g in grads).sqrt()


def norm_of_flat(model):
    """Return the total norm of one flattened copy, a tensor; fails without gradients."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()


def stability_issues(model, loss=None, limit=1e6):
    """Return a list of issues in words; three waits per tensor."""
    tensors = {"loss": loss}
    for name, p in model.named_parameters():
        tensors |= {f"weight {name}": p.data, f"gradient {name}": p.grad}
    issues = []
    for name, t in tensors.items():
        if t is None:
            continue
        if torch.isnan(t).any():
            issues.append(f"NaN in {name}")
        if torch.isinf(t).any():
            issues.append(f"Inf in {name}")
        if t.abs().max() > limit:
            issues.append(f"{name} is too large")
    return issues


def is_stable(model, limit=1e6):
    """Return whether no gradient exceeds a limit, which a NaN never does; a wait per tensor."""
    return not bool(max(p.grad.abs().max() for p in model.parameters() if p.grad is not None) > limit)


class GradientCollector:
    """Collects all statistics of a step from a flattened copy of all gradients."""

    def __init__(self, vanishing=1e-7, exploding=100.0):
        self.vanishing = vanishing
        self.exploding = exploding

    def collect(self, model):
        """Return the statistics as numbers; without gradients there are fewer keys."""
        return self.materialize(self.collect_async(model), one_by_one=True)

    def collect_async(self, model):
        """Return the statistics as tensors, without a wait."""
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        if not grads:
            return {}
        flat = torch.cat([g.flatten() for g in grads.values()])
        return {
            "total_norm": flat.norm(),
            "layer_norms": {name: g.norm() for name, g in grads.items()},
            "zero_fraction": (flat == 0).float().mean(),
            "nan_count": torch.isnan(flat).sum(),
            "inf_count": torch.isinf(flat).sum(),
        }

    def materialize(self, found, *, one_by_one=False):
        """Return the numbers: one wait per norm, or one for all norms; one for each other key."""
        if not found:
            return {"total_norm": 0.0, "health": 1.0}
        found = dict(found)
        norms = found.pop("layer_norms")
        if one_by_one:
            values = [norm.item() for norm in norms.values()]
        else:
            values = torch.stack(list(norms.values())).tolist()
        vanishing = sum(norm < self.vanishing for norm in values)
        exploding = sum(norm > self.exploding for norm in values)
        return {
            **{key: value.item() for key, value in found.items()},
            "layer_norms": dict(zip(norms, values, strict=True)),
            "vanishing": vanishing,
            "exploding": exploding,
            "health": max(0.0, 1.0 - (0.5 * vanishing + 0.8 * exploding) / len(values)),
            "min_norm": min(values),
            "max_norm": max(values),
            "norm_ratio": max(values) / max(min(values), 1e-10),
        }


def host_seed_ratio(model, *, prefix="seed.", floor=1e-8):
    """Return norms of host and seed gradients, and the ratio of their root mean squares; two waits."""
    norms, counts = {}, {}
    for group in ("host", "seed"):
        grads = [
            p.grad
            for name, p in model.named_parameters()
            if p.grad is not None and name.startswith(prefix) == (group == "seed")
        ]
        norms[group] = torch.cat([g.flatten() for g in grads]).norm().item() if grads else 0.0
        counts[group] = sum(g.numel() for g in grads)
    ratio = 0.0
    if norms["seed"] >= floor and norms["host"] >= floor:
        seed, host = (norms[group] / counts[group] ** 0.5 for group in ("seed", "host"))
        ratio = seed / host
    return {"host_norm": norms["host"], "seed_norm": norms["seed"], "ratio": ratio}


def optimizer_monitor(model):
    """Return the gradient metrics that Composer's OptimizerMonitor logs; a wait per key."""
    metrics = {
        f"l2_norm/grad/{name}": torch.linalg.vector_norm(p.grad)
        for name, p in model.named_parameters()
        if p.grad is not None and p.requires_grad
    }
    metrics["l2_norm/grad/global"] = sum(norm**2 for norm in metrics.values()) ** 0.5
    return {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in metrics.items()}


class MovingAverage:
    """A running mean of a number, initialized with the first value, and the last value's drift from it."""

    def __init__(self, decay=0.99, eps=1e-12):
        self.decay = decay
        self.eps = eps
        self.mean = None
        self.drift = 0.0

    def update(self, value):
        """Add a number, for which a tensor has to be waited for; a NaN persists."""
        if self.mean is None:
            self.mean = value
        self.drift = abs(value - self.mean) / (abs(self.mean) + self.eps)
        self.mean = self.decay * self.mean + (1.0 - self.decay) * value
        return self.mean


# the inputs of the comparison


def with_grads(grads, *, tied=(), frozen=()):
    """Return a module with these gradients, by dotted name; None for no gradient."""
    model = nn.Module()
    for name, grad in grads.items():
        *path, leaf = name.split(".")
        owner = model
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
        like = torch.zeros(2) if grad is None else grad
        parameter = nn.Parameter(torch.ones_like(like), requires_grad=name not in frozen)
        parameter.grad = grad
        owner.register_parameter(leaf, parameter)
    for i, name in enumerate(tied):
        model.add_module(f"tied{i}", nn.Module())
        model.get_submodule(f"tied{i}").register_parameter("w", model.get_parameter(name))
    return model


def cases():
    """Return models with gradients by their special feature; each has a host and a seed."""
    torch.manual_seed(0)
    weights = {f"{part}.{i}": (i + 2, 7) for part in ("host", "seed") for i in range(8)}

    def pair(host, seed):
        return with_grads({"host.w": host, "seed.w": seed})

    def spoilt(value):
        grad = torch.randn(50, 7)
        grad[3, 4] = value
        # first and last, so that Python's min() and max() meet it at either end
        return with_grads({"host.a": torch.randn(9), "host.w": grad, "seed.w": torch.randn(30)})

    return {
        "random": with_grads({name: torch.randn(shape) for name, shape in weights.items()}),
        "a million": with_grads({f"{('seed', 'host')[i % 2]}.{i}": torch.randn(100, 200) for i in range(50)}),
        "no gradient": with_grads(dict.fromkeys(weights)),
        "zero elements": with_grads(
            {"host.w": torch.randn(5), "host.none": torch.zeros(0, 3), "seed.w": torch.ones(2)}
        ),
        "1e20": pair(torch.full((100,), 1e20), torch.full((9,), 1e18)),
        "fp16, 300": pair(torch.full((40000,), 300.0).half(), torch.full((16,), 300.0).half()),
        "1e15, 1e-10": pair(torch.full((1000,), 1e15), torch.full((1000,), 1e-10)),
        "constant": pair(torch.full((2**20,), 0.1), torch.full((2**10,), 0.1)),
        "tiny": pair(torch.full((100,), 1e-25), torch.full((100,), 1e-40)),
        "dtypes": with_grads(
            {
                "host.w": torch.randn(100),
                "host.bf16": torch.randn(50).bfloat16(),
                "seed.fp16": torch.randn(50).half(),
                "seed.fp64": torch.randn(50).double(),
            }
        ),
        "NaN": spoilt(math.nan),
        "Inf": spoilt(-math.inf),
        "frozen, tied": with_grads(
            {"host.w": torch.randn(20), "host.off": None, "seed.w": torch.randn(6)},
            tied=["host.w"],
            frozen=["host.off"],
        ),
    }
