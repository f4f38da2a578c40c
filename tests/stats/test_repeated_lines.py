import torch
from torch import nn

from gradiometer.stats.initial_weights import odd_vectors, unusual_spread
from gradiometer.stats.line_stats import measure_weights, values_of, weights_of
from gradiometer.stats.repeated_lines import pattern, repeated


def values(model):
    return values_of(*measure_weights(weights_of({"": model})))


def texts(model, judge=repeated, **rest):
    return {each.text: each.is_sure for each in judge(values(model), **rest)}


def layers(count, make):
    torch.manual_seed(0)
    return nn.ModuleList(nn.Sequential(nn.Sequential(make()), nn.Tanh()) for _ in range(count))


def test_the_pattern_of_a_name_keeps_the_number_of_its_module():
    assert pattern("weight") == "weight"
    assert pattern("layers.0.weight") == "layers.0.weight"
    assert pattern("s1.b2.conv3.bn.weight") == "s#.b#.conv3.bn.weight"
    assert pattern("layers.12.mlp.0.weight") == "layers.#.mlp.0.weight"


def test_experts_of_a_stack_are_compared():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight_up = nn.Parameter(torch.randn(4, 8, 6))

    model = Experts()
    assert texts(model) == {}
    model.weight_up.data[2] = model.weight_up.data[0]
    assert texts(model) == {"weight_up[2] equals weight_up[0]": True}


def test_a_target_network_may_be_a_copy():
    model = nn.ModuleDict({"online": nn.Linear(4, 3), "target": nn.Linear(4, 3)})
    model["target"].load_state_dict(model["online"].state_dict())
    assert texts(model) == {}


def test_an_untied_output_is_another_question():
    model = nn.ModuleDict({"embedding": nn.Embedding(5, 4), "head": nn.Linear(4, 5)})
    model["head"].weight.data.copy_(model["embedding"].weight)
    assert texts(model) == {}


def test_a_pretrained_embedding_may_have_equal_rows():
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight.data[3] = model[0].weight.data[2]
    assert set(texts(model).values()) == {True}
    assert set(texts(model, is_pretrained=True).values()) == {False}
    model[1].weight.data[3] = model[1].weight.data[2]
    assert set(texts(model, is_pretrained=True).values()) == {False, True}


def test_one_vector_for_nothing_may_be_zero():
    model = nn.Embedding(9, 4)
    model.weight.data[0] = 0
    assert texts(model) == {"weight: vector 0 is 0": False}
    model.weight.data[3] = 0
    assert texts(model) == {"weight: 2 of 9 vectors are 0": True}
    model.padding_idx = 3
    assert list(texts(model).values()) == [True]
    model.padding_idx, model.weight.data[0] = 3, 1.5
    model.weight.data[0, 0] = 1.0
    assert texts(model) == {}


def test_filters_of_a_subpixel_convolution_start_equal():
    model = nn.Conv2d(3, 16, 3)
    model.weight.data = model.weight.data[::4].repeat_interleave(4, 0)
    assert set(texts(model).values()) == {False}


def test_a_frozen_table_may_be_anything():
    model = nn.Embedding(6, 4)
    model.weight.data[:] = 1.0
    model.weight.requires_grad_(requires_grad=False)
    assert set(texts(model).values()) == {False}


def test_norms_and_biases_differ_from_those_of_other_layers():
    model = layers(4, lambda: nn.LayerNorm(8))
    assert texts(model, odd_vectors) == {}
    nn.init.ones_(model[2][0][0].bias)
    nn.init.constant_(model[1][0][0].weight, 0.1)
    assert set(texts(model, odd_vectors)) == {
        "1.0.0.weight starts with 0.1, and those of other layers with 1",
        "2.0.0.bias starts with 1, and those of other layers with 0",
    }
    model = layers(4, lambda: nn.Linear(8, 8))
    assert texts(model, odd_vectors) == {}
    nn.init.constant_(model[3][0][0].bias, 3.0)
    assert ["3.0.0.bias starts with 3" in text for text in texts(model, odd_vectors)] == [True]


def test_scales_by_depth_are_usual():
    model = layers(24, lambda: nn.Linear(32, 32))
    for i, layer in enumerate(model):
        layer[0][0].weight.data /= (2 * (i + 1)) ** 0.5
    assert texts(model, unusual_spread) == {}
    model[0][0][0].weight.data *= 5
    (text,) = texts(model, unusual_spread)
    assert text.startswith("0.0.0.weight: weights start with rms")
