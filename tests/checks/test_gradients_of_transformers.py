from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gradiometer.checks import check_model

torch.set_num_threads(1)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5", "vit", "whisper"])
def test_all_contracts_of_gradients_hold(name):
    pytest.importorskip("transformers")
    from kernels_bench.zoo.contracts import subjects

    subject = subjects.start(name)
    report = check_model(
        subject.model, subject.batch, optimizer=subject.optimizer, only=["gradients"], **subject.options
    )
    assert {str(each.status) for each in report} == {"holds"}, report


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_of_transformers(use_reentrant):
    pytest.importorskip("transformers")
    from kernels_bench.zoo.contracts import subjects

    subject = subjects.start("gpt2")
    for block in subject.model.transformer.h:
        block.gradient_checkpointing = True
        block._gradient_checkpointing_func = _recomputing(use_reentrant)
    report = check_model(subject.model, subject.batch, optimizer=subject.optimizer, only=["gradients"])
    assert {str(each.status) for each in report} == {"holds"}, report


def _recomputing(use_reentrant):
    from torch.utils import checkpoint

    def run(function, *args):
        return checkpoint.checkpoint(function, *args, use_reentrant=use_reentrant)

    return run


def test_a_config_gets_its_cache_back():
    class Caching(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = SimpleNamespace(model_type="test", use_cache=True)
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            seen.append(self.config.use_cache)
            return self.layer(x)

    seen = []
    model = Caching()
    assert check_model(model, torch.randn(3, 4), only=["gradients"])
    assert seen
    assert not any(seen)
    assert model.config.use_cache


def test_models_with_nothing_to_train():
    report = check_model(nn.Tanh(), torch.randn(3, 4), only=["gradients"])
    assert report
    statuses = {each.contract: str(each.status) for each in report}
    assert {statuses[name] for name in ("parameter_gradients", "tied_weights", "registered")} == {
        "does not apply"
    }
    # one example is enough
    report = check_model(nn.Linear(4, 2), torch.randn(1, 4), only=["gradients"])
    held = {each.contract for each in report if str(each.status) == "holds"}
    assert held == {"parameter_gradients", "input_gradients", "tied_weights", "registered"}
