"""The cost of a whole report: one transfer to the host for any number of tensors, and no copy of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gradiometer as gm
from gradiometer import check_finite, clip_grad_norm_, collect_and_clip_
from support import home_grown
from support.home_grown import GradientCollector, with_grads
from support.transfers import count_transfers

ROOT = Path(__file__).parent.parent


def model_of(parameters):
    return with_grads({f"{'host' if i % 2 else 'seed'}.{i}": torch.ones(3, 2) for i in range(parameters)})


# the counter detects all waits that a device would cause

READS = {
    "item": (1, lambda _, loss: loss.item()),
    "float": (1, lambda _, loss: float(loss)),
    "if": (1, lambda _, loss: 1 if loss > 0 else 2),
    "any": (1, lambda model, _: bool(torch.isnan(model.host.get_parameter("1").grad).any())),
    "max of Python": (1, lambda _, loss: max([loss, loss])),
    "tolist": (1, lambda model, _: model.host.get_parameter("1").tolist()),
    "cpu, then reads": (1, lambda model, _: [x.item() for x in model.host.get_parameter("1").grad.cpu()[0]]),
    "copy_": (1, lambda _, loss: torch.empty((), device="cpu").copy_(loss)),
    "tensor of tensors": (2, lambda _, loss: torch.tensor([loss, loss])),
    "items": (3, lambda _, loss: [loss.item() for _ in range(3)]),
    "arithmetic": (0, lambda model, loss: (model.host.get_parameter("1").grad.norm() + loss).sqrt() > 0),
}


@pytest.mark.parametrize("name", READS)
def test_the_counter_sees_every_way_to_the_host(name):
    expected, read = READS[name]
    assert count_transfers(read, model_of(4)) == expected


@pytest.mark.parametrize("name", ["nonzero", "unique"])
def test_the_counter_refuses_what_it_cannot_make_up(name):
    with pytest.raises(NotImplementedError):
        count_transfers(lambda _, loss: getattr(loss, name)(), model_of(4))


# transfers

GROUPS = {"host": r"^host", "seed": r"^seed"}


def everything(model, loss):
    grads = gm.collect_grads(model)
    grouped = grads.group(GROUPS)
    return gm.materialize(
        {
            "grads": grads,
            "weights": gm.collect_weights(model),
            "ratio": gm.group_ratio(grouped, "seed", "host"),
            "groups": grouped,
            "healthy": grads.is_healthy,
            "loss": loss,
        }
    )


OURS = {
    "report": lambda model, _: gm.collect_grads(model).materialize().to_dict(),
    "table": lambda model, _: str(gm.collect_grads(model).materialize()),
    "by module": lambda model, _: dict(gm.collect_grads(model).materialize().by_module()),
    "norm": lambda model, _: gm.grad_norm(model),
    "finite": check_finite,
    "clip, and report": lambda model, _: collect_and_clip_(model, 1.0).materialize(),
    "clip, and norm": lambda model, _: float(clip_grad_norm_(model.parameters(), 1.0)),
    "several collections": everything,
}

# for n parameters: the number of waits
HOME_GROWN = {
    "norm_by_item": (lambda n: n, lambda model, _: home_grown.norm_by_item(model)),
    "norm_of_squares": (lambda _: 1, lambda model, _: float(home_grown.norm_of_squares(model.parameters()))),
    "stability_issues": (lambda n: 3 * (2 * n + 1), home_grown.stability_issues),
    "is_stable": (lambda n: n, lambda model, _: home_grown.is_stable(model)),
    "collect": (lambda n: n + 4, lambda model, _: GradientCollector().collect(model)),
    "collect_async": (
        lambda _: 1 + 4,
        lambda model, _: (c := GradientCollector()).materialize(c.collect_async(model)),
    ),
    "host_seed_ratio": (lambda _: 2, lambda model, _: home_grown.host_seed_ratio(model)),
    "optimizer_monitor": (lambda n: n + 1, lambda model, _: home_grown.optimizer_monitor(model)),
}


@pytest.mark.parametrize("parameters", [30, 300])
@pytest.mark.parametrize("name", OURS)
def test_ours_takes_one_transfer_whatever_is_asked_for(name, parameters):
    assert count_transfers(OURS[name], model_of(parameters)) == 1


@pytest.mark.parametrize("parameters", [30, 300])
@pytest.mark.parametrize("name", HOME_GROWN)
def test_home_grown_telemetry_waits_once_per_tensor_or_per_key(name, parameters):
    expected, call = HOME_GROWN[name]
    assert count_transfers(call, model_of(parameters)) == expected(parameters)


def test_a_clip_alone_takes_none():
    model = model_of(100)
    assert count_transfers(lambda model, _: clip_grad_norm_(model.parameters(), 1.0), model) == 0
    assert count_transfers(lambda model, _: collect_and_clip_(model, 1.0), model) == 0


# memory

TENSORS, ELEMENTS = 150, 100_000_000

MEMORY = """
import json, resource, sys
from pathlib import Path
import torch
import gradiometer as gm
from support import home_grown

def peak():
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # not ru_maxrss, which a process on Linux inherits from the one that starts it
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024

def grown(call):
    before = peak()
    call()
    return peak() - before

def model_of(tensors, size):
    model = torch.nn.Module()
    for i in range(tensors):
        # weights without memory of their own: gradients are what is measured
        p = torch.nn.Parameter(torch.zeros(()).expand(size))
        p.grad = torch.full((size,), 0.1)
        model.register_parameter(f"w{i}", p)
    return model

calls = {
    "report": lambda model: gm.collect_grads(model).materialize(),
    "norm": gm.grad_norm,
    "clip": lambda model: gm.clip_grad_norm_(model.parameters(), 1.0),
    "flat": home_grown.GradientCollector().collect,
}
small = model_of(20, 100_000)
for call in calls.values():
    call(small)
model = model_of(int(sys.argv[1]), int(sys.argv[2]) // int(sys.argv[1]))
print(json.dumps({name: grown(lambda: call(model)) for name, call in calls.items()}))
"""


def test_a_hundred_million_gradients_are_measured_in_four_mebibytes():
    pytest.importorskip("resource")
    # a fresh process: an earlier, higher peak would hide the growth
    paths = [str(ROOT / "src"), str(ROOT / "tests")]
    command = [
        sys.executable,
        "-c",
        f"import sys; sys.path[:0] = {paths}\n{MEMORY}",
        str(TENSORS),
        str(ELEMENTS),
    ]
    grown = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert grown["report"] <= 4 * 2**20
    assert grown["norm"] <= 4 * 2**20
    # a flattened copy of all gradients shows in the same peak
    assert grown["flat"] >= 4 * ELEMENTS
