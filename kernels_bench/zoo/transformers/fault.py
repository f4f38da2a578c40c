"""What a planted fault is, and helpers that change a `Loop`.

Rules may be written with those of `faults_open` and `faults_seen`. The second is the first held-out half: its
results have been seen. The file of those that are held out now, `faults_held_out_2`, is older than the rules
that it examines and does not change: its SHA-256 is in the documentation.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kernels_bench.zoo.transformers.attention import Attention

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernels_bench.zoo.transformers.loop import Loop

CATEGORIES = ("architecture", "optimizer", "loop", "precision", "data")

# words that tell what is wrong, in several faults

# positions see later ones, or the answer
FUTURE = r"future|causal|leak|later (token|position)|ahead"
LEAK = (
    rf"{FUTURE}|(label|target|answer)s?\b.{{0,30}}(visible|in the input|seen|known)"
    r"|sees? (the |its )?(label|target|answer)"
    r"|loss\b.{0,60}(too (good|low|easy)|(near|close to|nearly|almost) (0|zero))"
)
# nothing in the inputs predicts the labels
STAYS = (
    r"chance level|guess|no better|loss\b.{0,60}(stay|plateau|hardly (falls|improves|changes))"
    r"|loss\b.{0,60}not (fall|fell|improve|decrease|learn)|(does|did|do|has|have) not learn"
)
PADDING = r"padding|\bpads?\b|\bmask(s|ed)?\b"
# the weights of a query do not sum to 1, or the softmax is over another dimension
SUMS = r"\bsums?\b|softmax|\bdim\b|dimension"
# weights change without the optimizer
OUTSIDE = r"outside|overwr|not by (the|an) optimizer|other than|besides|changed between|load|averag|copied"


@dataclass(frozen=True)
class Fault:
    """A mistake, and what names it.

    Attributes:
        category: one of `CATEGORIES`.
        plant: changes the loop.
        where: the kinds of run; a run of a seed takes one of them.
        phrase: a regular expression, of which the first headline must contain a match, in its messages,
            advice and tensors; case does not matter.
        onset: the step at which it begins.
        or_info: whether a headline of severity info is enough to name it, as what may be meant so.
    """

    category: str
    plant: Callable[[Loop], object]
    where: tuple[str, ...]
    phrase: str
    onset: int = 0
    or_info: bool = False

    def names(self, text):
        """Return whether the text of a headline names the fault."""
        return re.search(self.phrase, text, re.IGNORECASE) is not None


def adder(table):
    """Return a decorator that adds faults to a table, under the function's name."""

    def fault(category, phrase, *, where, onset=0, or_info=False):
        def add(plant):
            name = plant.__name__.replace("_", "-")
            table[name] = Fault(category, plant, tuple(where.split()), phrase, onset, or_info)
            return plant

        return add

    return fault


def attentions(t, *, cross=True):
    """Return the attentions of a loop's model."""
    found = {name: module for name, module in t.model.named_modules() if isinstance(module, Attention)}
    return [module for name, module in found.items() if cross or not name.endswith("cross")]


def blocks(t):
    """Return the blocks of a loop's model."""
    if hasattr(t.model, "encoder"):
        return [*t.model.encoder, *t.model.decoder]
    return list(t.model.blocks)


def norms(t):
    """Return all LayerNorms and RMSNorms of a loop's model."""
    kinds = (torch.nn.LayerNorm, torch.nn.RMSNorm)
    return [module for module in t.model.modules() if isinstance(module, kinds)]


def redraw(t, change):
    """Replace each batch by ``change(batch)``, with its entries."""
    draw = t.batch
    t.batch = lambda: change(draw())


def use(t, optimizer):
    """Train with another optimizer, by the same schedule."""
    t.optimizer = optimizer
    t.scheduler = t.scheduled(optimizer)


def trained(t):
    """Return the parameters that require a gradient."""
    return [p for p in t.model.parameters() if p.requires_grad]


def scaled_state(t, key, factor):
    """Multiply a part of the optimizer's state."""
    for state in t.optimizer.state.values():
        state[key].mul_(factor)


# a step's parts in an order that is not the usual one


def ordered(t, *parts):
    """Train by calling parts in another order, after all losses of the step are computed and noted.

    Each is a function of the list of losses.
    """

    def train_step():
        losses = [t.loss(t.batch()) for _ in range(t.accumulate)]
        t.note(losses[-1])
        for part in parts:
            part(losses)
        return losses[-1]

    t.train_step = train_step


def backward(t, losses):
    """Compute the gradients of all micro-batches."""
    for loss in losses:
        t.backward(loss / t.accumulate)


def part(t, name):
    """Return a method of a loop without arguments as a part of `ordered`."""
    return functools.partial(_call, t, name)


def _call(t, name, _):
    getattr(t, name)()
