"""check_model on models of Hugging Face and Lightning."""

import collections
import dataclasses
import random

import pytest
import torch
from torch import nn

import gradiometer as gm
from support.small_models import text

transformers = pytest.importorskip("transformers")


def gpt2(**rest):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=40, n_positions=24, n_embd=16, n_layer=2, n_head=2, bos_token_id=2, eos_token_id=3, **rest
    )
    return transformers.GPT2LMHeadModel(config)


def batch(rows=3, length=10, *, labels=True):
    tokens = torch.randint(4, 40, (rows, length), generator=torch.Generator().manual_seed(0))
    found = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    return found | {"labels": tokens} if labels else found


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5", "vit", "whisper"])
def test_healthy_models_of_hugging_face(name):
    from kernels_bench.zoo.contracts import subjects

    subject = subjects.start(name)
    report = gm.check_model(subject.model, subject.batch, optimizer=subject.optimizer)
    assert report, report
    assert "could not be checked" not in str(report)


def test_a_mapping_of_any_kind():
    found = transformers.BatchEncoding(batch())
    report = gm.check_model(gpt2(), found, only=["causal", "padding", "examples"])
    assert [each.status for each in report] == ["holds"] * 3


def test_entries_that_the_model_does_not_take_are_left_out():
    found = batch() | {"length": torch.tensor([10, 10, 10])}
    assert gm.check_model(gpt2(), found, only=["causal"])["causal"].status == "holds"


def test_the_inputs_of_a_decoder_are_made_of_the_labels():
    from kernels_bench.zoo.contracts import subjects

    subject = subjects.start("t5")
    decoder = subject.model.get_decoder()
    usual = decoder.forward

    def forward(*args, **kwargs):
        kwargs["input_ids"] = kwargs["input_ids"].roll(-1, 1)
        return usual(*args, **kwargs)

    # token 0 of the decoder is that of position 1
    decoder.forward = forward
    report = gm.check_model(subject.model, subject.batch, only=["causal"])
    assert not report


def test_a_lightning_module():
    lightning = pytest.importorskip("pytorch_lightning")

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(13, 8), nn.Linear(8, 13)
            self.unused = nn.Linear(8, 8)

        def forward(self, tokens):
            return self.head(self.embedding(tokens).cumsum(1).tanh())

        def training_step(self, batch, _):
            logits = self(batch["tokens"])
            return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    report = gm.check_model(Model(), text(), causal=True)
    assert report["causal"].status == "holds"
    assert "unused" in report["parameter_gradients"].text


def test_a_tuple_of_inputs_and_labels():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    pair = torch.randn(6, 4), torch.randint(0, 3, (6,))

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    report = gm.check_model(model, pair, loss=loss)
    assert report, report
    assert report["examples"].status == "holds"


def test_a_model_that_takes_other_arguments():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, data):
            return {"scores": self.linear(data["x"])}

    def forward(model, batch):
        return model(batch)["scores"]

    report = gm.check_model(Odd(), {"x": torch.randn(3, 4)}, forward=forward, only=["examples"])
    assert report["examples"].status == "holds"


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, batch):
        return self.layer(batch["x"] if isinstance(batch, dict) else batch[0])


@pytest.mark.parametrize("is_dict", [True, False])
def test_a_forward_that_takes_the_whole_batch(is_dict):
    x, labels = torch.randn(4, 8), torch.tensor([0, 1, 2, 0])
    report = gm.check_model(Whole(), {"x": x, "labels": labels} if is_dict else (x, labels))
    assert report
    assert report["input_gradients"].status == "holds"
    assert report["examples"].status == "holds"


@dataclasses.dataclass
class Prediction:
    scores: torch.Tensor
    name: str = "scores"


@pytest.mark.parametrize(
    "wrap",
    [
        Prediction,
        lambda x: {"outputs": {"scores": [x]}},
        lambda x: torch.distributions.Categorical(logits=x),
        torch.complex,
    ],
    ids=["dataclass", "nested", "distribution", "complex"],
)
def test_outputs_of_any_kind(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.value = nn.Linear(8, 3), nn.Linear(8, 1)

        def forward(self, x):
            scores = self.layer(x)
            return wrap(scores) if wrap is not torch.complex else torch.complex(scores, scores), self.value(x)

    report = gm.check_model(Model(), torch.randn(4, 8))
    assert report
    assert report["parameter_gradients"].status == "holds"


def test_a_mapping_with_attributes_keeps_them():
    class Named(collections.UserDict):
        def __getattr__(self, name):
            if name == "data":
                raise AttributeError(name)
            return self.data[name]

    torch.manual_seed(0)
    batch = Named({"x": torch.randn(4, 8)})
    report = gm.check_model(nn.Linear(8, 3), batch, forward=lambda model, given: model(given.x))
    assert report["examples"].status == "holds"
    assert report["input_gradients"].status == "holds"


def test_a_loss_that_is_no_tensor_is_named():
    with pytest.raises(ValueError, match="loss= returned float; return a 0-d tensor with its graph"):
        gm.check_model(nn.Linear(8, 3), torch.randn(4, 8), loss=lambda *_: 3.0)


def test_random_numbers_that_are_not_those_of_torch_mix_no_examples():
    class Augmented(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 3)

        def forward(self, x):
            if self.training:
                x = x * random.random()  # noqa: S311
            return self.layer(x)

    assert gm.check_model(Augmented(), torch.randn(4, 8))["examples"].status == "holds"


def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
        )
    )


def test_packed_texts():
    data = batch(1)
    del data["attention_mask"]
    data["position_ids"] = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    report = gm.check_model(llama(), data)
    assert not report.broken
    assert "several texts in a row" in report["cache"].text


def test_a_mask_of_pairs():
    data = batch()
    blocks = torch.block_diag(torch.ones(4, 4), torch.ones(6, 6)).bool().tril()
    data["attention_mask"] = blocks.expand(3, 1, 10, 10)
    assert not gm.check_model(llama(), data).broken


def test_a_prompt_before_the_tokens():
    class Prompted(nn.Module):
        def __init__(self):
            super().__init__()
            self.model, self.prompt = (
                llama().requires_grad_(requires_grad=False),
                nn.Parameter(torch.randn(2, 16)),
            )

        def forward(self, input_ids, attention_mask):
            x = self.model.get_input_embeddings()(input_ids)
            x = torch.cat([self.prompt.expand(len(x), -1, -1), x], 1)
            mask = torch.cat([torch.ones_like(attention_mask[:, :2]), attention_mask], 1)
            return self.model(inputs_embeds=x, attention_mask=mask).logits

    assert gm.check_model(Prompted(), batch(labels=False), only=["padding"])


def test_an_error_of_the_model_says_what_to_do():
    bag = nn.EmbeddingBag(9, 4)
    with pytest.raises(
        ValueError, match=r"check_model: the model fails on this batch: .*offsets.*pass the batch"
    ):
        gm.check_model(bag, torch.tensor([1, 2, 3]))


@pytest.mark.parametrize("options", [{"loss": 3}, {"forward": "logits"}, {"only": None}, {"skip": 3}])
def test_options_of_the_wrong_kind(options):
    with pytest.raises(TypeError, match=f"check_model: {next(iter(options))}= is"):
        gm.check_model(nn.Linear(8, 3), torch.randn(2, 8), **options)


def test_vectors_in_place_of_tokens():
    data = {"inputs_embeds": torch.randn(3, 10, 16), "labels": batch()["labels"]}
    assert not gm.check_model(llama(), data, only=["parameter_gradients"]).broken


def test_a_copy_that_is_not_trained():
    class Saved(nn.Module):
        def __init__(self):
            super().__init__()
            self.original = nn.Linear(8, 8).requires_grad_(requires_grad=False)
            self.saved = nn.ModuleDict({"default": nn.Linear(8, 8)})
            self.saved["default"].load_state_dict(self.original.state_dict())

        def forward(self, x):
            return self.saved["default"](x)

    model, x = Saved(), torch.randn(4, 8)
    assert gm.check_model(model, x, only=["repeated_weights"])
    model.original.requires_grad_()
    assert not gm.check_model(model, x, only=["repeated_weights"])
