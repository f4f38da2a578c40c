"""Names of a wrapped model are those of the model, however it is passed."""

from __future__ import annotations

import math
from contextlib import suppress

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.inputs import modules_by_name, named_buffers, unwrapped
from gradiometer.integrations.session import Session
from support.watching import Sink

NAMES = ("body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias", "module.weight", "_module.weight")
BUFFERS = ("body.1.running_mean", "body.1.running_var", "body.1.num_batches_tracked")


def wrapper(name, package, attribute):
    """Return a class of a framework that wraps a module."""

    def forward(self, *args):
        return self._modules[attribute](*args)

    base = type(name, (nn.Module,), {"forward": forward, "__module__": f"{package}.wrappers"})
    # frameworks derive from it
    kind = type(f"{name}Kind", (base,), {"__module__": "somewhere"})

    def wrap(module):
        wrapped = kind()
        wrapped.add_module(attribute, module)
        return wrapped

    return wrap


grad_sample = wrapper("AbstractGradSampleModule", "opacus", "_module")
megatron = wrapper("DistributedDataParallel", "megatron", "module")
WRAPPERS = {
    "compile": lambda module: torch.compile(module, backend="eager"),
    "DataParallel": nn.DataParallel,
    "opacus": grad_sample,
    "megatron": megatron,
    "Fabric": wrapper("_FabricModule", "lightning", "_forward_module"),
    "both": lambda module: nn.DataParallel(grad_sample(torch.compile(module, backend="eager"))),
}
parametrized = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)


class Model(nn.Module):
    """A part may be wrapped; two others have names that wrappers use, too."""

    def __init__(self, wrap=lambda module: module):
        super().__init__()
        self.body = wrap(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
        self.module = nn.Linear(3, 1, bias=False)
        self._module = nn.Linear(3, 1, bias=False)

    def forward(self, x):
        x = self.body(x)
        return self.module(x) + self._module(x)


@pytest.mark.parametrize("inside", [False, True], ids=["whole", "a part"])
@parametrized
def test_names_are_those_of_the_model_however_it_is_measured(wrap, inside):
    model = Model(wrap) if inside else wrap(Model())
    model(torch.randn(4, 3)).sum().backward()
    assert gm.collect_grads(model).names == NAMES
    assert gm.collect_weights(model).names == NAMES
    assert gm.Recorder(model).catalog.names == NAMES
    assert gm.Recorder({"a": model}).catalog.names == tuple(f"a.{name}" for name in NAMES)
    assert gm.Snapshot(model).names == NAMES
    assert set(gm.fingerprint(model)) == {*NAMES, *BUFFERS}
    assert [name for name, _ in named_buffers(unwrapped(model))] == list(BUFFERS)
    assert gm.Taps(model, {"linear": nn.Linear}).names == ("body.0.out", "module.out", "_module.out")
    # a wrapper and what is in it are one module of the model
    assert gm.Taps(model, {"body": "^body"}).names == ("body.out", "body.0.out", "body.1.out")


@parametrized
def test_the_weights_of_a_wrapped_model_compare_with_those_of_the_model(wrap):
    torch.manual_seed(0)
    model = Model()
    other = Model(wrap)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        b.data.copy_(a)
    assert gm.compare(model, other).n_unchanged.tolist() == [p.numel() for p in model.parameters()]


@parametrized
def test_a_callback_has_the_same_names(wrap):
    sink = Sink()
    model = Model(wrap)
    session = Session("it", {"rules": (), "sinks": [sink], "updates": True})
    optimizers = [torch.optim.SGD(p, lr=0.1) for p in (model.body.parameters(), [model.module.weight])]
    session.begin(model, scaler=None, step=0, state=None, optimizers=optimizers)
    model(torch.randn(4, 3)).sum().backward()
    for optimizer in optimizers:
        session.record(only=optimizer.param_groups[0]["params"])
        session.begin_updates(optimizer)
        optimizer.step()
    session.advance()
    session.end()
    assert session.monitor.failures == {}
    (record,) = sink.records
    assert sink.info.catalog.names == NAMES
    # the weight that no optimizer has is measured by none
    assert record.measured().tolist() == [True] * 5 + [False]
    assert record.measured("updates").tolist() == [True] * 6


def test_modules_of_a_models_own_keep_names_that_wrappers_use_too():
    model = nn.Sequential()
    for name in ("module", "_module", "_forward_module"):
        part = nn.Module()
        part.add_module(name, nn.Linear(1, 1, bias=False))
        model.append(part)
    assert gm.collect_weights(model).names == (
        "0.module.weight",
        "1._module.weight",
        "2._forward_module.weight",
    )
    # a class of that name, but of another package
    model = wrapper("DistributedDataParallel", "mine", "module")(nn.Linear(1, 1, bias=False))
    assert gm.collect_weights(model).names == ("module.weight",)
    assert unwrapped(model) is model


def test_a_checkpointed_part_is_one_module_with_its_wrapper():
    checkpoint = pytest.importorskip("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    model = nn.Sequential(checkpoint.checkpoint_wrapper(nn.Sequential(nn.Linear(2, 2))))
    assert {name: [type(x).__name__ for x in same] for name, same in modules_by_name(model).items()} == {
        "": ["Sequential"],
        "0": ["CheckpointWrapper", "Sequential"],
        "0.0": ["Linear"],
    }
    # its forward is not that of the module
    assert unwrapped(model[0]) is model[0]


def test_a_kept_step_is_restored_into_a_model_with_a_compiled_part(tmp_path):
    pytest.importorskip("pyarrow")
    model = Model(WRAPPERS["compile"])
    first = {name: x.clone() for name, x in model.state_dict().items()}
    with suppress(FloatingPointError), gm.Monitor(model, run_dir=tmp_path, keep_weights=True) as monitor:
        (model(torch.randn(4, 3)).sum() * math.nan).backward()
        monitor.record()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)
        monitor.advance()
        raise FloatingPointError
    gm.load_kept_step(tmp_path).restore(model)
    # the buffers, too: the copy was made before the forward pass
    assert all(torch.equal(x, first[name]) for name, x in model.state_dict().items())
