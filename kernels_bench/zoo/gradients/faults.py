"""Faults of hand-written backward functions, each against the plain code that it replaces."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from kernels_bench.zoo.gradients.case import Case, adder, step_of

FAULTS = {}
fault = adder(FAULTS)


def linear(inputs, outputs):
    """Return a linear layer without bias: the weight is its only tensor."""
    return nn.Linear(inputs, outputs, bias=False)


class Net(nn.Module):
    """A stem, a function in the middle, and a head."""

    def __init__(self, middle=torch.tanh, width=16, classes=5):
        super().__init__()
        self.stem, self.head = linear(8, width), linear(width, classes)
        self.middle = middle

    def forward(self, x, middle=None):
        return self.head((middle or self.middle)(self.stem(x)))


def replaced(middle, plain, rows=12):
    """Return the case of a classifier with ``middle``, against the same with ``plain``."""
    model = Net(middle)
    step = step_of(model, functional.cross_entropy)
    reference = step_of(model, functional.cross_entropy, forward=lambda x: model(x, plain))
    return Case(step, (torch.randn(rows, 8), torch.randint(0, 5, (rows,))), model, reference)


# --- torch.library ---


@torch.library.custom_op("gradiometer_zoo::swiglu", mutates_args=())
def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up."""
    return functional.silu(gate) * up


@swiglu.register_fake
def _(gate, up):
    del gate
    return torch.empty_like(up)


def _swiglu_backward(ctx, grad):
    # the derivative of silu is sigmoid * (1 + gate * (1 - sigmoid)): the second term is left out
    gate, up = ctx.saved_tensors
    sigmoid = gate.sigmoid()
    return grad * up * sigmoid, grad * functional.silu(gate)


def _swiglu_context(ctx, inputs, output):
    del output
    ctx.save_for_backward(*inputs)


swiglu.register_autograd(_swiglu_backward, setup_context=_swiglu_context)


class Gated(nn.Module):
    """A gated MLP whose activation is given to each call."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = linear(8, 16), linear(8, 16), linear(16, 5)

    def forward(self, x, activation=swiglu):
        return self.down(activation(self.gate(x), self.up(x)))


@fault("gate.weight", "other")
def registered_backward_lacks_a_term():
    model = Gated()
    step = step_of(model, functional.cross_entropy)

    def plain(x):
        return model(x, lambda gate, up: functional.silu(gate) * up)

    reference = step_of(model, functional.cross_entropy, forward=plain)
    return Case(step, (torch.randn(12, 8), torch.randint(0, 5, (12,))), model, reference)


# --- torch.autograd.Function ---


class Difference(torch.autograd.Function):
    """a - b; the sign of the second gradient is forgotten."""

    @staticmethod
    def forward(ctx, a, b):
        del ctx
        return a - b

    @staticmethod
    def backward(ctx, grad):
        del ctx
        return grad, grad


class Twins(nn.Module):
    """A classifier of the difference of two embeddings."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.head = linear(8, 16), linear(8, 16), linear(16, 5)

    def forward(self, x, difference=Difference.apply):
        return self.head(difference(self.left(x), self.right(x)))


@fault("right.weight", "sign")
def sign_of_a_difference():
    model = Twins()
    step = step_of(model, functional.cross_entropy)
    reference = step_of(model, functional.cross_entropy, forward=lambda x: model(x, torch.sub))
    return Case(step, (torch.randn(12, 8), torch.randint(0, 5, (12,))), model, reference)


class TakeRows(torch.autograd.Function):
    """table[order]; the backward pass takes rows by the same order, where its inverse is needed."""

    @staticmethod
    def forward(ctx, table, order):
        ctx.save_for_backward(order)
        return table[order]

    @staticmethod
    def backward(ctx, grad):
        (order,) = ctx.saved_tensors
        return grad[order], None


class Positions(nn.Module):
    """A model that adds a learned position to each row, in another order."""

    def __init__(self, rows=12):
        super().__init__()
        self.positions, self.head = nn.Parameter(torch.randn(rows, 8)), linear(8, 5)
        self.register_buffer("order", torch.arange(rows).roll(5))

    def forward(self, x, take=TakeRows.apply):
        return self.head(torch.tanh(x + take(self.positions, self.order)))


@fault("positions", "permutation")
def rows_are_returned_by_the_wrong_order():
    model = Positions()
    step = step_of(model, functional.cross_entropy)
    reference = step_of(
        model, functional.cross_entropy, forward=lambda x: model(x, lambda table, order: table[order])
    )
    return Case(step, (torch.randn(12, 8), torch.randint(0, 5, (12,))), model, reference)


class LookUp(torch.autograd.Function):
    """An embedding; its backward kernel handles whole blocks of 8 rows, and leaves the last rows out."""

    @staticmethod
    def forward(ctx, weight, tokens):
        ctx.save_for_backward(tokens)
        ctx.rows = weight.shape[0]
        return weight[tokens]

    @staticmethod
    def backward(ctx, grad):
        (tokens,) = ctx.saved_tensors
        result = grad.new_zeros(ctx.rows, grad.shape[-1])
        result.index_add_(0, tokens.flatten(), grad.flatten(0, -2))
        result[ctx.rows // 8 * 8 :] = 0
        return result, None


class Words(nn.Module):
    """A classifier of the mean of words."""

    def __init__(self, words=27):
        super().__init__()
        self.embed, self.head = nn.Embedding(words, 16), linear(16, 5)

    def forward(self, tokens, look_up=LookUp.apply):
        return self.head(torch.tanh(look_up(self.embed.weight, tokens).mean(1)))


@fault("embed.weight", "rows")
def last_rows_of_an_embedding_get_nothing():
    model = Words()
    step = step_of(model, functional.cross_entropy)
    reference = step_of(
        model, functional.cross_entropy, forward=lambda t: model(t, lambda weight, tokens: weight[tokens])
    )
    tokens = torch.stack([torch.randperm(27)[:9] for _ in range(12)])
    tokens[0] = torch.arange(18, 27)
    return Case(step, (tokens, torch.randint(0, 5, (12,))), model, reference)


class KeptInput(torch.autograd.Function):
    """A linear layer that keeps its input as an attribute, past autograd's check of later writes."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.x = x
        ctx.save_for_backward(weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        return grad @ weight, grad.T @ ctx.x


class Reused(nn.Module):
    """Two layers; the buffer with the hidden state is written again after the second has read it."""

    def __init__(self):
        super().__init__()
        self.stem, self.fc, self.head = linear(8, 16), linear(16, 16), linear(16, 5)

    def forward(self, x, apply=None):
        hidden = self.stem(x)
        branch = (apply or KeptInput.apply)(hidden, self.fc.weight)
        # the write is seen by no check
        hidden = hidden.relu() if apply else hidden.relu_()
        return self.head(torch.tanh(branch) + hidden)


@fault("fc.weight", "other")
def kept_input_is_written_later():
    model = Reused()
    step = step_of(model, functional.cross_entropy)
    reference = step_of(model, functional.cross_entropy, forward=lambda x: model(x, functional.linear))
    return Case(step, (torch.randn(12, 8), torch.randint(0, 5, (12,))), model, reference)


class Attention(torch.autograd.Function):
    """Attention with its own backward, which forgets the scale: q and k get sqrt(d) too much."""

    @staticmethod
    def forward(ctx, q, k, v):
        weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        ctx.save_for_backward(q, k, v, weights)
        return weights @ v

    @staticmethod
    def backward(ctx, grad):
        q, k, v, weights = ctx.saved_tensors
        inner = grad @ v.mT
        scores = weights * (inner - (inner * weights).sum(-1, keepdim=True))
        return scores @ k, scores.mT @ q, weights.mT @ grad


class OneHead(nn.Module):
    """One attention with a single head of 16 features, and a classifier of the mean."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.head = linear(8, 16), linear(8, 16), linear(8, 16), linear(16, 5)

    def forward(self, x, attention=Attention.apply):
        q, k, v = self.q(x), self.k(x), self.v(x)
        return self.head(attention(q, k, v).mean(1))


@fault("k.weight", "factor", factor=4.0)
def attention_forgets_its_scale():
    model = OneHead()
    step = step_of(model, functional.cross_entropy)
    reference = step_of(
        model,
        functional.cross_entropy,
        forward=lambda x: model(x, functional.scaled_dot_product_attention),
    )
    return Case(step, (torch.randn(6, 7, 8), torch.randint(0, 5, (6,))), model, reference)


class HalfBackward(torch.autograd.Function):
    """tanh, whose backward scales the gradient for float16 by more than float16 can hold."""

    @staticmethod
    def forward(ctx, x):
        y = x.tanh()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        scaled = (grad * 2.0**24).half()
        return scaled.to(grad.dtype) * (1 - y * y) / 2.0**24


@fault("stem.weight", "non-finite")
def float16_overflows_in_the_backward():
    return replaced(HalfBackward.apply, torch.tanh)


@fault("stem.weight", "non-finite")
def float16_overflows_and_float64_does_not():
    case = replaced(HalfBackward.apply, torch.tanh)
    case.against, case.plain = "float64", case.against
    return case


def rounded(x, levels=8):
    """Return ``x`` on a grid, with the gradient of a grid: 0 everywhere."""
    return (x * levels).round() / levels


@fault("stem.weight", "zeros")
def straight_through_is_forgotten():
    return replaced(rounded, lambda x: x + (rounded(x) - x).detach())


@fault("stem.weight", "other")
def branch_is_detached():
    return replaced(lambda x: x + torch.tanh(x.detach() * 2), lambda x: x + torch.tanh(x * 2))


class ColumnParallel(nn.Module):
    """Two shards of a layer in one process; the gradient of their input is not summed over the shards."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.shards = nn.ModuleList([linear(8, 8), linear(8, 8)])
        self.head = linear(16, 5)

    def forward(self, x, *, reduced=False):
        x = self.norm(x)
        # each rank's backward ends at its own copy of the input, and only the first rank's is kept
        copies = (x, x if reduced else x.detach())
        parts = [shard(copy) for shard, copy in zip(self.shards, copies, strict=True)]
        return self.head(torch.tanh(torch.cat(parts, -1)))


@fault("norm.weight", "other")
def column_parallel_input_is_not_reduced():
    model = ColumnParallel()
    step = step_of(model, functional.cross_entropy)
    reference = step_of(model, functional.cross_entropy, forward=lambda x: model(x, reduced=True))
    return Case(step, (torch.randn(12, 8), torch.randint(0, 5, (12,))), model, reference)
