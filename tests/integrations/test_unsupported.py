"""What `watch` says of objects of frameworks that it cannot watch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.integrations import unsupported

NET = nn.Linear(2, 1)


def made(package, kind, base=object):
    """Return an object whose class is derived from a framework's."""
    parent = type(kind, (base,), {"__module__": f"{package}.somewhere"})
    return type("Mine", (parent,), {"__module__": "__main__"})()


@pytest.mark.parametrize("known", unsupported._FRAMEWORKS, ids=lambda known: f"{known.package}.{known.kind}")
@pytest.mark.parametrize("optimizer", [None, torch.optim.SGD(NET.parameters())], ids=["alone", "optimizer"])
def test_an_object_of_a_framework_is_named_with_the_line_to_write(known, optimizer):
    with pytest.raises(TypeError) as raised:
        gm.watch(made(known.package, known.kind), optimizer)
    assert str(raised.value) == f"watch: got {known.name}, which cannot be watched as a whole; {known.advice}"
    assert "gm." in known.advice


@pytest.mark.parametrize("known", unsupported._SHARDED, ids=lambda known: f"{known.package}.{known.kind}")
def test_a_model_of_shards_is_refused_on_several_ranks(monkeypatch, known):
    model = nn.Sequential(NET, made(known.package, known.kind, nn.Module))
    optimizer = torch.optim.SGD(model.parameters())
    # in one process the gradients are whole
    gm.watch(model, optimizer, rules=()).close()
    monkeypatch.setattr(unsupported, "_has_ranks", lambda: True)
    for part in (model, {"a": model}):
        with pytest.raises(TypeError, match=f"^watch: the model is wrapped by {known.name}: .*fully_shard"):
            gm.watch(part, optimizer)
    # the user knows
    gm.watch(model, optimizer, rules=(), ranks=False).close()


def test_gradients_elsewhere_are_refused():
    model = made("megatron", "DistributedDataParallel", nn.Module)
    model.module = NET
    with pytest.raises(TypeError, match=r"wrapped by Megatron-LM: its gradients are in main_grad"):
        gm.watch(model, torch.optim.SGD(NET.parameters()))
    # what the message says
    net, totals = model.module, []
    with gm.Monitor(net, rules=(), sinks=[lambda record: totals.append(record.total())]) as monitor:
        for p in net.parameters():
            p.main_grad = torch.ones_like(p)
        monitor.record(gm.collect({name: p.main_grad for name, p in net.named_parameters()}))
        monitor.advance()
    assert totals == [3**0.5]


def test_an_unknown_trainer_is_told_what_to_pass():
    class Runner:
        pass

    with pytest.raises(
        TypeError, match=r"^watch: got Runner of the package '\w+', which is not among .*model, opt"
    ):
        gm.watch(Runner())
    # classes of the same names in other packages
    with pytest.raises(TypeError, match="got Mine of the package '__main__'"):
        gm.watch(made("mine", "Trainer"))


def test_real_trainers_are_recognized():
    """The classes in the table are those of the packages, where these are installed."""
    names = {"stable_baselines3": "common.base_class", "ray": "train.data_parallel_trainer"}
    for known in unsupported._FRAMEWORKS:
        path = f"{known.package}.{names[known.package]}" if known.package in names else known.package
        try:
            package = __import__(path, fromlist=[known.kind])
        except ImportError:
            continue
        kind = getattr(package, known.kind)
        assert (kind.__module__.partition(".")[0], kind.__name__) == (known.package, known.kind)
