import math

import pytest
import torch
from torch import nn

from gradiometer.stats.line_stats import measure_weights, values_of, weights_of


def values(model):
    return {x.weight.name: x for x in values_of(*measure_weights(weights_of({"": model})))}


def test_sums_are_those_of_the_elements():
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    found, x = values(model)["weight"], model.weight.detach().double()
    assert found.numel == 15
    assert found.mean == pytest.approx(float(x.mean()))
    assert found.rms == pytest.approx(float(x.square().mean().sqrt()))
    assert found.std == pytest.approx(float(x.std(correction=0)))
    assert found.abs_max == float(x.abs().max())
    assert (found.rows.zeros, found.rows.repeats, found.columns.zeros, found.columns.repeats) == (0, 0, 0, 0)


def test_repeated_and_zero_lines_are_counted_with_their_places():
    torch.manual_seed(0)
    weight = torch.randn(6, 4)
    weight[2] = 0
    weight[4] = weight[1]
    weight[5] = weight[1]
    weight[:, 3] = weight[:, 0]
    model = nn.Linear(4, 6, bias=False)
    model.weight.data = weight
    found = values(model)["weight"]
    assert found.rows[:5] == (1, 2, 2, 4, 1)
    assert found.columns[:2] == (0, found.columns.zero)
    assert found.columns[2:5] == (1, 3, 0)
    assert found.share_of_zeros == pytest.approx(1 / 6)


def test_a_permuted_row_is_not_equal():
    model = nn.Linear(3, 2, bias=False)
    model.weight.data = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])
    assert values(model)["weight"].rows.repeats == 0


def test_lines_of_one_value_have_no_deviation():
    model = nn.Linear(3, 2, bias=False)
    model.weight.data.fill_(0.1)
    found = values(model)["weight"]
    assert found.std == 0
    assert found.rows.constant == 2


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.pos_embed = nn.Parameter(torch.randn(1, 5, 4))
        self.experts = nn.Parameter(torch.randn(2, 3, 4))
        self.A_log = nn.Parameter(torch.arange(1.0, 9.0).repeat(3, 1).log())
        self.embedding = nn.Embedding(6, 4, padding_idx=-1)
        self.norm = nn.LayerNorm(4)
        self.depthwise = nn.Conv1d(4, 4, 3, groups=4)
        self.head = nn.Linear(4, 6)
        self.head.weight = self.embedding.weight


def test_what_a_parameter_is_for():
    found = {weight.name: weight for weight, _ in weights_of({"": Odd()})}
    assert "head.weight" not in found
    kinds = {name: weight.kind for name, weight in found.items()}
    assert kinds == {
        "pos_embed": "raw",
        "experts[0]": "raw",
        "experts[1]": "raw",
        "A_log": "vector",
        "embedding.weight": "embedding",
        "norm.weight": "norm",
        "norm.bias": "norm",
        "depthwise.weight": "depthwise",
        "depthwise.bias": "bias",
        "head.bias": "bias",
    }
    assert found["pos_embed"].shape == (5, 4)
    assert found["pos_embed"].is_position
    assert found["embedding.weight"].padding == 5
    assert found["experts[1]"].parameter == "experts"


def test_a_transposed_layer_has_its_inputs_in_rows():
    class Conv1D(nn.Module):
        def __init__(self):
            super().__init__()
            self.nf = 6
            self.weight = nn.Parameter(torch.randn(2, 6))

    (weight, _), *_ = weights_of({"": Conv1D()})
    assert (weight.fan_in, weight.fan_out, weight.is_transposed) == (2, 6, True)


def test_heads_are_those_of_the_module_around():
    attention = nn.MultiheadAttention(8, 2)
    found = {weight.name: weight.heads for weight, _ in weights_of({"": attention})}
    assert found["in_proj_weight"] == found["out_proj.weight"] == 2


def test_only_as_many_lines_as_allowed_are_read():
    weights = weights_of({"": nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))})
    read, table = measure_weights(weights, lines=8)
    assert [weight.name for weight in read] == ["0.weight"]
    assert table.shape == (1, 18)
    read, table = measure_weights([])
    assert read == []
    assert values_of(read, table) == []


def test_other_dtypes_and_nonfinite_elements():
    model = nn.Linear(4, 3).bfloat16()
    with torch.no_grad():
        model.weight[0, 0] = math.nan
        model.weight[1] = math.nan
        model.weight[2] = math.nan
    found = values(model)["weight"]
    assert found.n_nonfinite == 9
    assert found.rows.repeats == 0
    assert found.weight.digits == 8
    meta = nn.Linear(2, 2, device="meta")
    assert weights_of({"": meta}) == []
