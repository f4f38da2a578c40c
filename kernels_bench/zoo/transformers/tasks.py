"""Tasks with structure. The task itself is always the same; a run's seed decides only what is drawn.

A task is two functions without arguments: one draws a batch, one returns the batch for evaluation.
A batch is a dict: the arguments of the model, and ``labels``, where -100 is ignored.
"""

from __future__ import annotations

import functools

import torch
from torch.nn import functional

PAD, MASK, BOUND = 0, 1, 2
FIRST = 3  # the first token with a meaning
IGNORED = -100


# how much a token depends on the last one, the one before it, the first one (the topic), and its place
TOPICS, PAIRS = (1.5, 1.0, 2.0, 1.0), (1.5, 2.5, 0.5, 0.0)


@functools.cache
def corpus(scales=TOPICS, dialect=0, *, vocabulary=24, length=21, count=2304):
    """Texts ``(count, length)`` of random tokens with these dependences; dialects have others."""
    g = torch.Generator().manual_seed(7 + dialect)
    last, before, topic, place = (s * torch.randn(vocabulary, vocabulary, generator=g) for s in scales)
    letters = [torch.randint(FIRST, vocabulary, (count,), generator=g)]
    for i in range(length - 1):
        logits = last[letters[-1]] + before[letters[-2 if i else -1]] + topic[letters[0]] + place[i % 4]
        logits[:, :FIRST] = -torch.inf
        letters.append(torch.multinomial(logits.softmax(1), 1, generator=g).squeeze(1))
    return torch.stack(letters, 1)


def drawn(make, size, count):
    """Return the two functions of a task whose ``make`` returns a batch of examples with given indices."""

    def draw():
        return make(torch.randint(count - 256, (size,)))

    def held():
        state = torch.get_rng_state()
        torch.manual_seed(0)
        batch = make(torch.arange(count - 256, count))
        torch.set_rng_state(state)
        return batch

    return draw, held


def causal(size=16, scales=TOPICS, *, dialect=0, padded=False):
    """Predict the next token; with ``padded``, texts are 6 to 20 tokens long."""
    texts = corpus(scales, dialect)

    def make(chosen):
        chunk = texts[chosen]
        batch = {"tokens": chunk[:, :-1], "labels": chunk[:, 1:]}
        if padded:
            allowed = torch.arange(20) < torch.randint(6, 21, (len(chunk), 1))
            batch["tokens"] = batch["tokens"].masked_fill(~allowed, PAD)
            batch["labels"] = batch["labels"].masked_fill(~allowed, IGNORED)
            batch["allowed"] = allowed
        return batch

    return drawn(make, size, len(texts))


def masked(size=24, *, least=8):
    """Predict a quarter of the tokens, which are hidden; texts are ``least`` to 20 tokens long."""
    texts = corpus()

    def make(chosen):
        text = texts[chosen][:, :20]
        allowed = torch.arange(20) < torch.randint(least, 21, (len(text), 1))
        hidden = (torch.rand(text.shape) < 0.25) & allowed
        return {
            "tokens": text.masked_fill(~allowed, PAD).masked_fill(hidden, MASK),
            "labels": text.masked_fill(~hidden, IGNORED),
            "allowed": allowed,
        }

    return drawn(make, size, len(texts))


@functools.cache
def cipher(vocabulary=16):
    """A permutation of the tokens with a meaning."""
    order = torch.randperm(vocabulary - FIRST, generator=torch.Generator().manual_seed(7)) + FIRST
    return torch.cat([torch.arange(FIRST), order])


def translated(size=24, *, length=8, vocabulary=16):
    """Translate 4 to ``length`` random tokens, one by one, backwards."""
    g = torch.Generator().manual_seed(11)
    sources = torch.randint(FIRST, vocabulary, (4352, length), generator=g)
    lengths = torch.randint(4, length + 1, (4352, 1), generator=g)

    def make(chosen):
        source, count = sources[chosen], lengths[chosen]
        places = torch.arange(length)
        allowed = places < count
        answer = cipher(vocabulary)[source].gather(1, (count - 1 - places).clamp(min=0))
        ends = functional.pad(count == places, (0, 1))
        ends[:, -1] = count.squeeze(1) == length
        labels = functional.pad(answer.masked_fill(~allowed, IGNORED), (0, 1), value=IGNORED)
        labels = labels.masked_fill(ends, BOUND)
        return {
            "source": source.masked_fill(~allowed, PAD),
            "allowed": allowed,
            "tokens": functional.pad(labels[:, :-1].clamp(min=PAD), (1, 0), value=BOUND),
            "labels": labels,
        }

    return drawn(make, size, len(sources))


@functools.cache
def pictures(classes=10, count=2304):
    """Noisy pictures; five classes are the other five with their patches rolled."""
    g = torch.Generator().manual_seed(13)
    patterns = functional.interpolate(torch.randn(classes // 2, 1, 4, 4, generator=g), 16, mode="bicubic")
    patterns = torch.cat([patterns, patterns.roll((4, 8), (2, 3))])
    y = torch.randint(classes, (count,), generator=g)
    return patterns[y] + 0.6 * torch.randn(count, 1, 16, 16, generator=g), y


def images(size=24):
    """Classify pictures."""
    x, y = pictures()
    return drawn(lambda chosen: {"images": x[chosen], "labels": y[chosen]}, size, len(x))
