"""Attention that only looks back, though it may look ahead: a causal mask in an encoder."""

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.rules import AttentionDirection, Severity

HEADS, SAMPLES, KEYS = 2, 3, 8


def ones(queries=KEYS, keys=KEYS):
    return torch.ones(queries, keys, dtype=torch.bool)


class Attends(nn.Linear):
    """Attention with a mask that is applied, and another of which the tap is told."""

    def __init__(self, applied, told, *, is_causal=False, dropout=0.0, sharpness=1.0, dtype=torch.float32):
        super().__init__(8, 8)
        self.applied, self.told, self.is_causal = applied, told, is_causal
        self.dropout, self.sharpness, self.dtype = dropout, sharpness, dtype

    def forward(self, queries, keys):
        q, k = [
            nn.Linear.forward(self, x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (queries, keys)
        ]
        logits = (q @ k.mT * self.sharpness).masked_fill(~self.applied, -torch.inf)
        weights = nn.functional.dropout(logits.to(self.dtype).softmax(-1), self.dropout)
        gm.tap_attention(q, k, "attn", weights=weights, mask=self.told, is_causal=self.is_causal)
        return weights.float() @ k


def findings_of(model, steps=5):
    """Watch some steps with inputs of the shape of the applied mask."""
    taps = gm.Taps(model, attention={"attn": HEADS})
    with gm.Monitor(model, taps=taps, rules=[AttentionDirection()]) as monitor:
        for _ in range(steps):
            model(*[torch.randn(SAMPLES, n, 8) for n in model.applied.shape[-2:]]).square().mean().backward()
            monitor.record()
            model.zero_grad()
            monitor.advance()
        monitor.flush()
    taps.remove()
    assert monitor.failures == {}
    return monitor.findings


PADDED = ones().repeat(SAMPLES, 1, 1, 1)
PADDED[1, ..., 5:] = False


@pytest.mark.parametrize(
    ("applied", "told"),
    [
        (ones().tril(), ones()),
        (ones().tril(), torch.zeros(KEYS, KEYS)),
        (PADDED & ones().tril(), PADDED),
        # cross attention: as torch.tril and is_causal of scaled_dot_product_attention align it, or at the end
        (ones(6, 10).tril(), ones(6, 10)),
        (ones(6, 10).tril(4), ones(6, 10)),
        (ones(10, 6).tril(), ones(10, 6)),
    ],
)
def test_a_causal_mask_that_is_not_meant_is_found(applied, told):
    torch.manual_seed(0)
    (found,) = findings_of(Attends(applied, told))
    assert (found.rule, found.severity, found.tensor) == (
        "attention_direction",
        Severity.WARNING,
        "attn.head0",
    )
    assert found.message == (
        "attn.head0: in all 2 heads of this layer, no query attends to a later position, since step 0: a "
        "causal mask, though is_causal is False and the mask that was passed allows it"
    )


@pytest.mark.parametrize("told", [None, ones(1, KEYS), PADDED[:, :, :1]])
def test_a_tap_that_may_not_have_been_told_is_info(told):
    torch.manual_seed(0)
    (found,) = findings_of(Attends(ones().tril(), told))
    assert found.severity == Severity.INFO
    assert "pass is_causal=True to gm.tap_attention" in found.advice


WINDOW = ones().tril(1).triu(-1)
HEALTHY = {
    "encoder": (ones(), ones()),
    "encoder with padding": (PADDED, PADDED),
    "no mask": (ones(), None),
    "cross": (ones(6, 10), ones(6, 10)),
    # without is_causal, but the mask says it
    "causal": (ones().tril(), ones().tril()),
    "causal with padding": (PADDED & ones().tril(), PADDED & ones().tril()),
    "window": (WINDOW, WINDOW),
    "causal window": (WINDOW.tril(), WINDOW.tril()),
    "blocks": (torch.block_diag(ones(4, 4), ones(4, 4)), torch.block_diag(ones(4, 4), ones(4, 4))),
    "block of two": (ones(2, 2).tril(), ones(2, 2).tril()),
    # what another rule looks at: only earlier keys are excluded
    "reverse": (ones().triu(), ones()),
    "diagonal": (torch.eye(KEYS, dtype=torch.bool), ones()),
    "first key": (ones(KEYS, 1) & (torch.arange(KEYS) == 0), ones()),
    "one key": (ones(KEYS, 1), ones(KEYS, 1)),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_what_is_meant_is_quiet(name):
    torch.manual_seed(0)
    assert findings_of(Attends(*HEALTHY[name])) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sharpness", [1.0, 1e4])
def test_other_encoders_are_quiet(dtype, sharpness):
    torch.manual_seed(0)
    options = {"dtype": dtype, "sharpness": sharpness, "dropout": 0.3}
    assert findings_of(Attends(ones(), ones(), **options)) == []
    assert findings_of(Attends(ones().tril(), ones().tril(), is_causal=True, **options)) == []
    assert findings_of(Attends(ones().tril(), None, is_causal=True, **options)) == []


def test_a_head_that_looks_ahead_is_enough():
    torch.manual_seed(0)
    applied = ones().tril().repeat(HEADS, 1, 1)
    assert len(findings_of(Attends(applied, ones()))) == 1
    applied[1] = True
    assert findings_of(Attends(applied, ones())) == []


def test_a_history_is_restored():
    one, other = AttentionDirection(), AttentionDirection()
    one.restart(3)
    other.load_state_dict(one.state_dict())
    assert other.state_dict().keys() == one.state_dict().keys()
