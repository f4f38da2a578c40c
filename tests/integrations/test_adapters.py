"""Fine-tuning of adapters by Hugging Face's trainers: frozen weights, and adapters that start at 0."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradiometer as gm

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

ARGUMENTS = {
    "max_steps": 20,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
    "bf16": False,
}
CONFIG = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 1}
# of the packages
pytestmark = pytest.mark.filterwarnings("ignore")


class Adapted(nn.Module):
    """A frozen layer and a low-rank one beside it, as peft makes it."""

    def __init__(self, layer, rank=2):
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        inputs, outputs = layer.weight.shape
        self.lora_A, self.lora_B = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def model_of(vocabulary):
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=vocabulary, **CONFIG))


def check(trainer, adapters):
    """Train, and compare what was recorded with the trainer's own log."""
    trainer.remove_callback(transformers.PrinterCallback)
    records = []
    callback = gm.watch(trainer, weights=True, updates=True, sinks=[records.append])
    trainer.train()
    logged = [log for log in trainer.state.log_history if "grad_norm" in log]
    assert [record.total() for record in records] == pytest.approx(
        [log["grad_norm"] for log in logged], rel=1e-5
    )
    assert [record.loss for record in records] == pytest.approx([log["loss"] for log in logged], abs=1e-4)
    assert len(records) == ARGUMENTS["max_steps"]
    measured = {name for name, there in zip(records[0].names(), records[0].measured(), strict=True) if there}
    assert len(measured) == adapters
    assert all("lora" in name for name in measured)
    assert callback.monitor.failures == {}
    findings = callback.monitor.findings
    assert [str(one) for one in findings if str(one.severity) != "info"] == []
    assert any("frozen, requires_grad is False" in one.message for one in findings)


def test_adapters_beside_frozen_weights(tmp_path):
    model = model_of(32)
    model.requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn = Adapted(block.attn.c_attn)
    generator = torch.Generator().manual_seed(0)
    data = [{"input_ids": x, "labels": x} for x in torch.randint(0, 32, (80, 8), generator=generator)]
    arguments = transformers.TrainingArguments(str(tmp_path), **ARGUMENTS)
    check(transformers.Trainer(model, arguments, train_dataset=data), adapters=4)


@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_the_trainers_of_trl_with_peft(tmp_path, kind):
    """Optional: trl and peft are not in the development environment."""
    trl, peft = pytest.importorskip("trl"), pytest.importorskip("peft")
    datasets, tokenizers = pytest.importorskip("datasets"), pytest.importorskip("tokenizers")
    words = {word: i for i, word in enumerate(["<s>", "</s>", "<unk>", "plus", "is", *map(str, range(40))])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))  # noqa: S106 a word
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "<unk>", "pad_token": "</s>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    sums = [(f"{a} plus {b} is", f" {a + b}") for a in range(10) for b in range(10)]
    if kind == "SFT":
        data = {"text": [question + answer for question, answer in sums]}
    else:
        data = {
            "prompt": [x for x, _ in sums],
            "chosen": [x for _, x in sums],
            "rejected": [" 39"] * len(sums),
        }
    trainer = getattr(trl, f"{kind}Trainer")(
        model_of(len(words)),
        args=getattr(trl, f"{kind}Config")(str(tmp_path), **ARGUMENTS),
        train_dataset=datasets.Dataset.from_dict(data),
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(
            r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"
        ),
    )
    check(trainer, adapters=4)
