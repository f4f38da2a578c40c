"""``gm.watch(..., check=batch)``: broken contracts are findings of the first step."""

import logging

import pytest
import torch
from torch import nn

import gradiometer as gm


class Leaky(nn.Module):
    """A language model whose attention has no causal mask."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(x + x.mean(1, keepdim=True))


def batch():
    text = torch.randint(0, 11, (3, 7), generator=torch.Generator().manual_seed(1))
    return {"tokens": text[:, :-1], "labels": text[:, 1:]}


def train(model, optimizer, monitor, steps=3):
    for _ in range(steps):
        data = batch()
        loss = nn.functional.cross_entropy(model(data["tokens"]).flatten(0, 1), data["labels"].flatten())
        loss.backward()
        monitor.note(loss=loss)
        optimizer.step()
        optimizer.zero_grad()


def contracts(monitor):
    return [each for each in monitor.findings if each.rule.startswith("contract_")]


def test_broken_contracts_are_findings_of_the_first_step(caplog):
    model = Leaky()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    caplog.set_level(logging.WARNING, "gradiometer")
    with gm.watch(model, optimizer, check=batch()) as monitor:
        train(model, optimizer, monitor)
    (found,) = [each for each in contracts(monitor) if each.rule == "contract_causal"]
    assert (found.first_step, found.last_step, found.count) == (0, 0, 1)
    assert "token 1 changes the output of token 0" in found.message
    assert found.advice
    assert "check_model" in caplog.text


def test_other_rules_still_run():
    model = Leaky()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gm.watch(model, optimizer, check=batch()) as monitor:
        train(model, optimizer, monitor, 1)
        model.head.weight.data.fill_(torch.nan)
        train(model, optimizer, monitor, 2)
    assert "nonfinite" in {each.rule for each in monitor.findings}


def test_given_rules_are_kept():
    model = Leaky()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gm.watch(model, optimizer, check=batch(), rules=()) as monitor:
        train(model, optimizer, monitor)
    assert {each.rule.partition("_")[0] for each in monitor.findings} == {"contract"}


def test_a_report_is_taken_as_it_is():
    model = Leaky()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    report = gm.check_model(model, batch(), skip=["causal"])
    with gm.watch(model, optimizer, check=report) as monitor:
        train(model, optimizer, monitor)
    assert "contract_causal" not in {each.rule for each in monitor.findings}


def test_nothing_is_examined_without_a_batch():
    model = Leaky()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gm.watch(model, optimizer, check=None) as monitor:
        train(model, optimizer, monitor)
    assert not contracts(monitor)


def test_parameters_without_a_module_are_refused():
    model = Leaky()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="needs a module"):
        gm.watch(list(model.named_parameters()), optimizer, check=batch())


def test_a_batch_that_does_not_fit_is_refused():
    model = Leaky()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="check_model: the model fails on this batch"):
        gm.watch(model, optimizer, check=torch.zeros(3, 7))


def test_the_history_of_a_resumed_run_has_them_once():
    model = Leaky()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gm.watch(model, optimizer, check=batch()) as monitor:
        train(model, optimizer, monitor)
        state = monitor.state_dict()
    with gm.watch(model, optimizer, check=batch()) as monitor:
        monitor.load_state_dict(state)
        train(model, optimizer, monitor)
    assert len([each for each in contracts(monitor) if each.rule == "contract_causal"]) == 1


def test_a_trainer_takes_it_too(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=20, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    model.transformer.h[0].attn.is_causal = False
    usual = model.transformer.h[0].attn.forward

    def forward(*args, **kwargs):
        kwargs["attention_mask"] = None
        return usual(*args, **kwargs)

    model.transformer.h[0].attn.forward = forward
    rows = [{"input_ids": torch.arange(i, i + 8), "labels": torch.arange(i, i + 8)} for i in range(4)]
    options = transformers.TrainingArguments(
        tmp_path, max_steps=2, report_to=[], use_cpu=True, per_device_train_batch_size=2, save_strategy="no"
    )
    trainer = transformers.Trainer(model, options, train_dataset=rows)
    inputs = {key: torch.stack([row[key] for row in rows[:2]]) for key in rows[0]}
    callback = gm.watch(trainer, check=inputs)
    trainer.train()
    assert "contract_causal" in {each.rule for each in callback.monitor.findings}
