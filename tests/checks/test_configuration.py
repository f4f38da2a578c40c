"""The contract of the configuration: against a config, against sibling layers, against the batch."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.checks.siblings import odd_one, siblings
from gradiometer.rules import Severity
from support.small_models import Transformer, text


def model(**rest):
    torch.manual_seed(0)
    return Transformer(**{"blocks": 4, "causal": True, "dropout": 0.1} | rest)


def result(module, batch=None, **options):
    batch = text() if batch is None else batch
    return gm.check_model(module, batch, only=["configuration"], **options)["configuration"]


# siblings


@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_equal_layers_agree(blocks):
    assert result(model(blocks=blocks)).status == "holds"


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("norm1", {"eps": 1e-3}),
        ("dropout", {"p": 0.5}),
        ("attention", {"causal": False}),
        ("attention", {"heads": 1}),
        ("mlp.1", {"approximate": "tanh"}),
    ],
)
def test_one_layer_that_differs_is_named(path, change):
    m = model()
    [(key, value)] = change.items()
    setattr(m.blocks[1].get_submodule(path), key, value)
    # heads is a name of this model's own
    found = result(m)
    if key == "heads":
        assert found.status == "holds"
        return
    assert found.is_failure
    assert found.evidence[0].name == f"blocks.1.{path}"
    assert f"{key} is" in found.text


def test_an_activation_of_another_class_is_named():
    m = model()
    m.blocks[2].mlp[1] = nn.ReLU()
    found = result(m)
    assert found.is_failure
    assert "blocks.2.mlp.1: class is ReLU, but GELU" in found.text


def test_of_two_layers_an_eps_that_differs_is_told():
    m = model(blocks=2)
    m.blocks[1].norm1.eps = 1e-3
    assert result(m).is_failure


def test_rates_of_the_last_layer_are_only_noted():
    m = model()
    m.blocks[3].dropout.p = 0.0
    found = result(m)
    assert found.status == "broken"
    assert not found.is_failure


def test_rates_that_grow_and_patterns_are_meant():
    m = model()
    for i, block in enumerate(m.blocks):
        block.dropout.p = 0.1 * i
        block.attention.window = None if i % 2 else 4
    assert result(m).status == "holds"


def test_dropouts_of_one_sequential_may_differ():
    m = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    assert result(m, (torch.randn(3, 4), torch.tensor([0, 1, 1]))).status == "holds"


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1, 1, 2], 2), ([2, 1, 1], 0), ([1, 2], 1), ([1, 1], None), ([1, 2, 3], None), ([1, 1, 2, 2], None)],
)
def test_odd_one(values, expected):
    assert odd_one(values) == expected


def test_siblings_are_of_one_class_and_have_modules_inside():
    m = nn.ModuleList([nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 3)), nn.Linear(2, 2)])
    [group] = siblings(m)
    assert group.places == (0, 1)
    assert group.name(1, "0.weight") == "1.0.weight"
    assert siblings(m, equal_shapes=True) == []


# frozen parameters


@pytest.mark.parametrize("name", ["blocks.0.norm1.weight", "blocks.3.attention.qkv.weight", "norm.bias"])
def test_one_frozen_parameter_is_named(name):
    m = model()
    m.get_parameter(name).requires_grad = False
    found = result(m)
    assert found.is_failure
    assert found.evidence[0].name == name


def freeze(m, *patterns):
    for name, p in m.named_parameters():
        if any(pattern in name for pattern in patterns):
            p.requires_grad = False


@pytest.mark.parametrize(
    "patterns",
    [
        ("embedding",),
        ("blocks.0.",),
        ("blocks.0.", "blocks.1.", "embedding", "positions"),
        ("attention",),
        ("weight",),
        ("bias",),
        ("blocks.0.attention", "blocks.0.mlp", "blocks.1.attention", "blocks.1.mlp"),
        ("blocks.0.attention.qkv.weight", "blocks.0.mlp"),
    ],
)
def test_what_is_frozen_on_purpose_is_not_told(patterns):
    m = model()
    freeze(m, *patterns)
    assert result(m).status == "holds"


# a config of any class


def config(**rest):
    values = {"layer_norm_eps": 1e-5, "dropout": 0.1, "n_layer": 4, "vocab_size": 13}
    return SimpleNamespace(**values | rest)


@pytest.mark.parametrize("kind", [lambda x: x, vars])
def test_a_config_that_agrees(kind):
    m = model()
    m.config = kind(config())
    assert result(m).status == "holds"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"layer_norm_eps": 1e-6}, "blocks.0.norm1: eps is 1e-05, but config.layer_norm_eps is 1e-06"),
        ({"dropout": 0.2}, "blocks.0.dropout: p is 0.1, but config.dropout is 0.2"),
        ({"n_layer": 6}, "blocks: length is 4, but config.n_layer is 6"),
        ({"vocab_size": 99}, "num_embeddings is 16, but config.vocab_size is 99"),
        ({"max_position_embeddings": 4}, "tokens has 8 tokens, but config.max_position_embeddings is 4"),
    ],
)
def test_a_config_that_does_not_agree(change, text):
    m = model()
    m.config = config(**change)
    found = result(m)
    assert found.is_failure
    assert any(text in each.text for each in found.evidence)


# values that no model has


def test_a_large_eps_and_dropout_of_everything_are_told():
    m = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4, eps=0.1), nn.Dropout(1.0))
    found = result(m, torch.randn(3, 4))
    assert [each.name for each in found.evidence] == ["1", "2"]


# the batch


def test_labels_beyond_the_classes_are_told():
    batch = (torch.randn(3, 4), torch.tensor([0, 1, 2]))
    assert result(nn.Linear(4, 3), batch).status == "holds"
    found = result(nn.Linear(4, 2), batch)
    assert found.is_failure
    assert "labels is 2, but the output has 2 classes" in found.text


def test_labels_that_are_all_ignored_are_told():
    batch = text()
    assert result(model(), batch).status == "holds"
    batch["labels"] = torch.full_like(batch["labels"], -100)
    assert "all labels are -100" in result(model(), batch).text


def test_labels_of_padded_tokens_are_noted():
    batch = text(padded=True)
    assert result(model(), batch).status == "holds"
    batch["labels"] = batch["tokens"]
    found = result(model(), batch)
    assert (found.text, found.severity) == ("4 padded tokens have labels", Severity.INFO)


@pytest.mark.parametrize(("blocks", "severity"), [(2, Severity.WARNING), (4, Severity.WARNING)])
def test_the_only_other_rate_of_a_model_is_told(blocks, severity):
    m = model(blocks=blocks)
    m.extra = nn.ModuleList(nn.Dropout(0.1) for _ in range(3))
    m.blocks[0].dropout.p = 0.5
    assert result(m).severity is severity


def test_norms_of_another_class_are_named():
    m = model()
    m.blocks[1].norm1 = nn.RMSNorm(8)
    assert "blocks.1.norm1: class is RMSNorm, but LayerNorm" in result(m).text


def test_a_frozen_module_outside_of_layers():
    m = model()
    m.norm.requires_grad_(False)
    found = result(m)
    assert found.is_failure
    assert found.text == "norm.weight is frozen, while most of the model is trained"
    m.embedding.requires_grad_(False)
    found = result(m)
    assert (found.status, found.severity) == ("broken", Severity.INFO)


def test_the_padding_token_of_the_config():
    for padding, status in ((0, "holds"), (None, "holds"), (1, "holds"), (5, "broken")):
        m = model()
        m.config = config(pad_token_id=padding)
        found = result(m, text(padded=True))
        assert (found.status, found.is_failure) == (status, False)


def test_fixed_positions_beside_a_trained_token():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.token = nn.Parameter(torch.zeros(4))
            self.positions = nn.Parameter(torch.ones(4), requires_grad=False)
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))

        def forward(self, x):
            x = x + self.positions + self.token
            for layer in self.layers:
                x = layer(x)
            return x

    assert result(nn.Sequential(Positions()), torch.randn(3, 4)).status == "holds"


def test_the_row_of_padding_is_that_of_the_padding():
    for padding, status in ((0, "holds"), (None, "holds"), (5, "broken")):
        m = model()
        m.embedding.padding_idx = padding
        assert result(m, text(padded=True)).status == status


def test_position_ids_count_up():
    m = model()
    m.register_buffer("position_ids", torch.arange(2, 10)[None])
    assert result(m).status == "holds"
    m.position_ids[0, 3] = 0
    assert "position_ids does not increase by 1" in result(m).text


def test_nothing_to_compare():
    found = result(nn.Linear(4, 2), torch.randn(3, 4))
    assert found.status == "does not apply"
    assert "neither a config" in found.text


# Hugging Face: a model made again from its config


@pytest.fixture
def llama():
    transformers = pytest.importorskip("transformers")
    settings = transformers.LlamaConfig(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=24,
        rms_norm_eps=1e-4,
        attention_dropout=0.2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(settings).train()


def tokens():
    x = torch.randint(1, 20, (2, 8), generator=torch.Generator().manual_seed(0))
    return {"input_ids": x, "labels": x}


def test_a_model_is_what_its_config_makes(llama):
    state = torch.get_rng_state()
    assert result(llama, tokens()).status == "holds"
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(p.is_meta for p in llama.parameters())


def test_a_model_inside_another_one_is_compared(llama):
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = llama

        def forward(self, input_ids):
            return self.inner(input_ids).logits

    llama.model.norm.variance_epsilon = 1e-2
    assert result(Wrapped(), tokens()["input_ids"]).evidence[0].name == "inner.model.norm"


@pytest.mark.parametrize(
    ("path", "key", "value"),
    [
        ("model.layers.1.input_layernorm", "variance_epsilon", 1e-6),
        ("model.layers.0.self_attn", "scaling", 1.0),
        ("model.layers.0.self_attn", "attention_dropout", 0.0),
        ("model.layers.1.mlp", "act_fn", nn.ReLU()),
        ("model.embed_tokens", "padding_idx", 3),
        ("model.rotary_emb", "attention_scaling", 0.5),
    ],
)
def test_an_attribute_that_the_config_makes_otherwise(llama, path, key, value):
    setattr(llama.get_submodule(path), key, value)
    found = result(llama, tokens())
    assert found.is_failure
    assert found.evidence[0].name == (f"{path}.{key}" if isinstance(value, nn.Module) else path)


def test_a_config_that_was_changed_later(llama):
    llama.config.rms_norm_eps = 1e-6
    found = result(llama, tokens())
    assert "variance_epsilon is 0.0001, but the config sets 1e-06 (and 4 more)" in found.text


def test_frequencies_are_those_of_the_config(llama):
    llama.model.rotary_emb.inv_freq.mul_(0.5)
    found = result(llama, tokens())
    assert found.is_failure
    assert found.text == "model.rotary_emb.inv_freq[0] is 0.5, but the config gives 1"


def test_a_layer_that_was_removed(llama):
    del llama.model.layers[1]
    assert "model.layers: length is 1, but the config sets 2" in result(llama, tokens()).text


def test_more_rows_of_words_are_told_with_their_shapes(llama):
    llama.model.embed_tokens.weight = nn.Parameter(torch.randn(24, 16))
    assert "the shape of weight is (24, 16), but the config sets (20, 16)" in result(llama, tokens()).text


def test_dropout_of_the_config_that_is_off_everywhere():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 20, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    m = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)).train()
    assert result(m, tokens()).status == "holds"
    for x in m.modules():
        if isinstance(x, nn.Dropout):
            x.p = 0.0
    assert "transformer.drop: p is 0, but the config sets 0.1" in result(m, tokens()).text


def test_what_the_class_freezes_stays_frozen():
    transformers = pytest.importorskip("transformers")

    class Fixed(transformers.GPT2LMHeadModel):
        def __init__(self, config):
            super().__init__(config)
            self.transformer.wpe.requires_grad_(False)

    sizes = {"vocab_size": 20, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    m = Fixed(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)).train()
    assert result(m, tokens()).status == "holds"
    m.requires_grad_(True)
    assert result(m, tokens()).evidence[0].name == "transformer.wpe.weight"
