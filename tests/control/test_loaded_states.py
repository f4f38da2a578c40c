"""States of modules that no training leaves behind: refused by name, and nothing is loaded."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import nn

import gradiometer as gm

NAN, INF = math.nan, math.inf


def model():
    return nn.ParameterDict({"a": torch.zeros(2), "b": torch.zeros(3)})


def train(clip, params, norms=(1.0, 1.5, 0.9)):
    for norm in norms:
        for x in params.values():
            x.grad = torch.full_like(x, norm)
        gm.collect_and_clip_(params, clip)
    return clip


def noise(params):
    scale = gm.NoiseScale(batch_size=8)
    for _ in range(3):
        for _ in range(2):
            for x in params.values():
                x.grad = torch.randn_like(x)
            scale.add(gm.collect_grads(params))
        scale.step()
    scale.add(gm.collect_grads(params))
    return scale


def smoothed():
    ema = gm.EMA((2,))
    ema(torch.tensor([1.0, -2.0]))
    return ema


def states():
    params = model()
    return {
        "per tensor": train(gm.PerTensorClip(params), params),
        "z-score": train(gm.ZScoreClip(), params),
        "weight norm": train(gm.WeightNormClip(params), params),
        "noise scale": noise(params),
        "EMA": smoothed(),
    }


BAD = [
    ("per tensor", "average", (1,), NAN, "the average norm of 'b' is nan"),
    ("per tensor", "average", (0,), -1.0, "the average norm of 'a' is -1"),
    ("per tensor", "average", (0,), -INF, "the average norm of 'a' is -inf"),
    ("per tensor", "count", (0,), NAN, "the number of warm-up steps is nan"),
    ("per tensor", "count", (0,), INF, "the number of warm-up steps is inf"),
    ("per tensor", "record", (0, 1), 1.5, "the last factor of 'b' is 1.5"),
    ("per tensor", "record", (1, 1), -3.0, "the number of steps of 'b' is -3"),
    ("per tensor", "record", (2, 0), NAN, "the number of clipped steps of 'a' is nan"),
    ("z-score", "state", (0,), NAN, "the mean norm is nan"),
    ("z-score", "state", (0,), -1.0, "the mean norm is -1"),
    ("z-score", "state", (1,), -1.0, "the variance of the norms is -1"),
    ("z-score", "state", (1,), INF, "the variance of the norms is inf"),
    ("z-score", "state", (2,), NAN, "the number of norms is nan"),
    ("z-score", "record", (0, 0), NAN, "the last factor is nan"),
    ("weight norm", "record", (0, 1), NAN, "the last factor of 'b' is nan"),
    ("noise scale", "sums", (0,), -1.0, "the number of gradients is -1"),
    ("noise scale", "sums", (2,), -1.0, "a squared norm is -1"),
    ("noise scale", "sums", (4,), NAN, "a weight is nan"),
    ("noise scale", "average.state", (0, 1), NAN, "a mean is nan"),
    ("noise scale", "average.state", (1, 1), 1.5, "the weight of a mean is 1.5"),
    ("EMA", "state", (0, 0), INF, "a mean is inf"),
    ("EMA", "state", (1, 0), -0.1, "the weight of a mean is -0.1"),
    ("EMA", "state", (1, 0), NAN, "the weight of a mean is nan"),
    ("EMA", "state", (2, 1), -1.0, "a number of steps is -1"),
]


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in a model"])
@pytest.mark.parametrize(("which", "name", "place", "value", "said"), BAD)
def test_what_no_training_leaves_is_refused_and_nothing_is_loaded(
    which, name, place, value, said, inside, assign
):
    saved, module = states()[which], states()[which]
    owner, source = (nn.ModuleDict({"x": y}) if inside else y for y in (module, saved))
    state = {key: x.clone() for key, x in source.state_dict().items()}
    before = {key: x.clone() for key, x in owner.state_dict().items()}
    # another state, so that a part of it would be noticed
    for x in state.values():
        x[..., -1:] = x[..., -1:] * 0.5
    prefix = "x." if inside else ""
    name = prefix + name
    if which in {"per tensor", "weight norm"}:
        state[f"{prefix}key"] = before[f"{prefix}key"]
    state[name][place] = value
    message = f"load_state_dict: '{re.escape(name)}' cannot .* {re.escape(said)};"
    with pytest.raises(ValueError, match=message):
        owner.load_state_dict(state, assign=assign)
    for key, x in owner.state_dict().items():
        assert torch.equal(x, before[key]), key


@pytest.mark.parametrize("which", states())
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_training_leaves_is_loaded_also_after_a_cast(which, dtype):
    saved, module = states()[which], states()[which]
    cast = {name: x.to(dtype) for name, x in saved.state_dict().items()}
    module.load_state_dict(cast)
    for name, x in module.state_dict().items():
        assert torch.equal(x, cast[name].double()), name


def test_states_with_history_without_it_and_with_bad_gradients_are_loaded():
    params = model()
    fresh = gm.PerTensorClip(params)
    assert fresh.average.isinf().all()
    gm.PerTensorClip(params).load_state_dict(fresh.state_dict())
    for x in params.values():
        x.grad = torch.full_like(x, NAN)
    scale = gm.NoiseScale(batch_size=8)
    scale.add(gm.collect_grads(params))
    other = gm.NoiseScale(batch_size=8)
    other.load_state_dict(scale.state_dict())
    assert torch.equal(other.sums.isnan(), scale.sums.isnan())
    assert scale.sums.isnan().any()
