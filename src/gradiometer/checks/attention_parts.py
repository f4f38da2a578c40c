"""The parts of attention in a trace: scores, softmax, weights, and where a token is in queries and keys."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from gradiometer.checks.operators import NORMS, SOFTMAXES
from gradiometer.checks.trace import Node, Ref, Trace, UnknownError

if TYPE_CHECKING:
    from torch import Tensor

    from gradiometer.checks.probe import Probe

# products after a softmax that may use it, and linear layers after attention that may be its output's
_NEXT_PRODUCTS, _NEXT_LAYERS = 6, 2
# the least share of a row of a head that changes with a token
_WHOLE: Final = 0.5
# modules whose weights are a softmax, and those that are attention of another kind
_NAME: Final = re.compile(r"Attention|Attn")
_OTHER: Final = re.compile(
    r"Linear|Yoso|Lightning|Fast|Performer|Retention|Delta|Mamba|Sigmoid|Relu|LSH|Sparse|Longformer|BigBird|Cross?Cov"
    r"|Favor|Efficient|Lite|Disentangled|Moving",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Landing:
    """Where the elements of a token are.

    Attributes:
        token: its index in the rows of the linear layer.
        lead: the shape of its tokens, such as ``(B, T)``.
        rows: the positions among queries or keys; several if local attention has blocks that overlap.
        is_split: whether one head of an example has it at several positions.
        groups: the indices of examples and heads.
        gain: by which factor the elements are scaled; None if by different ones.
    """

    token: int
    lead: tuple[int, ...]
    rows: frozenset[int]
    groups: frozenset[int]
    is_split: bool
    gain: float | None

    @property
    def projection_shape(self) -> tuple[int, ...]:
        """The shape of the tokens, which is the same for layers of one input."""
        return self.lead

    @property
    def label(self) -> str:
        """Return the token as text."""
        if len(self.lead) != 2:
            return str(self.token)
        return f"{self.token % self.lead[1]} of example {self.token // self.lead[1]}"


@dataclass(frozen=True)
class Operand:
    """An operand of a product: queries, keys, weights or values.

    Attributes:
        node: the product.
        position: which argument it is.
        ref: which operator returned it.
        axis: which of its dimensions is that of positions, or of keys for the weights.
    """

    node: Node
    position: int
    ref: Ref
    axis: int

    def keys_last(self, x: Tensor) -> Tensor:
        """Return a tensor of this shape with the axis last."""
        return x.movedim(self.axis, -1)

    def rows(self, x: Tensor) -> Tensor:
        """Return a tensor of this shape as ``(N, positions, D)``."""
        x = x.movedim(self.axis, -2)
        return x if x.dim() == 3 else x.unsqueeze(0)

    def projections(self, trace: Trace) -> list[int]:
        """Return the linear layers whose outputs these are."""
        ends = trace.behind(self.ref, lambda node: node.is_tokenwise and node.func is not None)[1]
        return [i for i in ends if trace.is_projection(trace.nodes[i]) and trace.value((i, 0)).dim() == 2][:3]

    def is_normed(self, trace: Trace) -> bool:
        """Return whether a norm is between the linear layer and this."""
        passed = trace.between(self.projections(trace) or [0], self.ref[0])
        return any(trace.nodes[i].name in NORMS for i in passed)

    def landings(self, trace: Trace) -> list[Landing]:
        """Return where some tokens are.

        Raises:
            UnknownError: if that is not known.
        """
        found = []
        for index in self.projections(trace):
            lead = _lead(trace, index)
            count = trace.value((index, 0)).shape[0]
            # two tokens of the first example and one of the last
            tokens = [min(1, lead[-1] - 1), lead[-1] - 1, count - lead[-1] + min(1, lead[-1] - 1)]
            if len(lead) != 2:
                tokens = [0, count // 2, count - 1]
            for token in dict.fromkeys(tokens):
                landing = self._landing(trace, index, token, lead)
                if landing is not None:
                    found.append(landing)
        if not found:
            raise UnknownError("projection")
        return found

    def _landing(self, trace: Trace, index: int, token: int, lead: tuple[int, ...]) -> Landing | None:
        before = trace.value((index, 0))
        size = float(before.double().square().mean().sqrt()) or 1.0
        generator = torch.Generator(device="cpu").manual_seed(token)
        signs = torch.randint(0, 2, before.shape[1:], generator=generator, device="cpu").mul(2).sub(1)
        after = before.clone()
        after[token] += size * signs.to(before)
        changed, given = (
            self.rows(trace.again({(index, 0): after}, self.ref)),
            self.rows(trace.value(self.ref)),
        )
        change, moved = changed - given, _differ(changed, given)
        places = moved.any(-1)
        if not bool(places.any()):
            return None
        share = moved[places].double().mean()
        groups, rows = (frozenset(x.tolist()) for x in places.nonzero().T)
        is_split = bool((places.sum(-1) > 1).any())
        if len(rows) > 1 and float(share) < _WHOLE:
            raise UnknownError("positions are columns")
        gains = change[places].double().norm(dim=-1) / moved[places].sum(-1).sqrt() / size
        gain = float(gains.mean())
        return Landing(
            token,
            lead,
            rows,
            groups,
            is_split,
            gain if float((gains - gain).abs().max()) < 1e-3 * gain else None,
        )


@dataclass(frozen=True)
class Attention:
    """An attention in a trace.

    Attributes:
        trace: the trace.
        softmax: the index of the softmax, or of a sigmoid in its place.
        dim: the dimension that it normalizes.
        scores: the indices of the products that the scores are made of; one in plain attention.
        weights: the weights as operand of the product with the values.
        use: the index of that product.
        softmaxes: how many are taken one after the other.
    """

    trace: Trace
    softmax: int
    dim: int
    scores: tuple[int, ...]
    weights: Operand
    use: int
    softmaxes: int

    @property
    def is_sigmoid(self) -> bool:
        """Whether a sigmoid is in the place of the softmax."""
        return self.trace.nodes[self.softmax].name == "sigmoid"

    def name(self, probe: Probe) -> str:
        """Return the name of its module."""
        module = self.trace.nodes[self.use].module
        return probe.names.get(module, "") or type(module).__name__ if module is not None else "the model"

    def after_softmax(self) -> list[int]:
        """Return the operators between softmax and weights."""
        stop = self.trace.nodes[self.softmax]
        return self.trace.behind(self.weights.ref, lambda node: node.is_plain and node is not stop)[0]

    def has_other_terms(self) -> bool:
        """Return whether something else is added to the scores that depends on queries or keys."""
        trace = self.trace
        ends = trace.behind(trace.nodes[self.softmax].inputs[0], lambda node: node.is_plain)[1]
        others = [i for i in ends if i not in self.scores]
        return any(
            trace.is_projection(trace.nodes[k])
            for i in others
            for k in trace.behind((i, 0), lambda node: not trace.is_projection(node))[1]
        )

    def operands(self) -> dict[str, Operand]:
        """Return the operands queries, keys and values that other operators returned."""
        found = {}
        use = self.weights.node
        other = sum(use.operands) - self.weights.position
        axis = -2 if other == use.operands[1] else -1
        if other in use.inputs:
            found["values"] = Operand(use, other, use.inputs[other], axis)
        if len(self.scores) != 1:
            return found
        score = self.trace.nodes[self.scores[0]]
        first, second = score.operands
        # which of the operands has the keys
        into = self.trace.nodes[self.softmax].inputs[0]
        places = self.trace.places((self.scores[0], 0), into).flatten()
        used = self.trace.places((self.softmax, 0), self.weights.ref)
        line = self.weights.keys_last(used).flatten(0, -2)[-1]
        line = places[line[line >= 0]]
        line = line[line >= 0]
        row = line // self.trace.value((self.scores[0], 0)).shape[-1]
        if len(line) < 2:
            raise UnknownError("scores")
        is_first = bool((row != row[0]).any())
        names = ("keys", "queries") if is_first else ("queries", "keys")
        for name, position, of_axis in ((names[0], first, -2), (names[1], second, -1)):
            if position in score.inputs:
                found[name] = Operand(score, position, score.inputs[position], of_axis)
        return found

    def merged(self, landing: Landing) -> set[int] | None:
        """Return the tokens of the next linear layer that the output for a token's query goes to.

        None if there is none with as many tokens, or it is not known.
        """
        trace, use = self.trace, self.weights.node
        axis = -2 if self.weights.position == use.operands[0] else -1
        before = trace.value((self.use, 0))
        after = before.clone()
        rows = after.movedim(axis, -2)
        rows = rows if rows.dim() == 3 else rows.unsqueeze(0)
        for row in landing.rows:
            for group in landing.groups:
                if group >= len(rows) or row >= rows.shape[1]:
                    return None
                rows[group, row] += float(before.double().square().mean().sqrt()) or 1.0
        tried = 0
        for i in range(self.use + 1, len(trace.nodes)):
            node = trace.nodes[i]
            if not trace.is_projection(node):
                continue
            position = next((k for k in node.operands if not trace.is_weight(node, k)), None)
            if position in node.inputs:
                ref = node.inputs[position]
                ends = trace.behind(ref, lambda x: x.is_tokenwise and x.func is not None)[1]
                if self.use in ends:
                    if trace.value(ref).dim() != 2 or len(trace.value(ref)) != _count(landing):
                        return None
                    try:
                        changed = _differ(trace.again({(self.use, 0): after}, ref), trace.value(ref))
                    except UnknownError:
                        return None
                    return set(changed.any(1).nonzero().flatten().tolist()) or None
            tried += 1
            if tried == _NEXT_LAYERS:
                break
        return None


def found_in(trace: Trace) -> list[Attention]:
    """Return the attentions of a trace: a softmax of a product of values, that goes into such a product."""
    products = [i for i, node in enumerate(trace.nodes) if trace.is_product(node)]
    found = []
    for index, node in enumerate(trace.nodes):
        if not products or not products[0] < index < products[-1]:
            continue
        is_softmax = node.name in SOFTMAXES
        if not (is_softmax or node.name == "sigmoid") or 0 not in node.inputs:
            continue
        # a softmax of a softmax counts, so that it passes here
        passed, ends = trace.behind(node.inputs[0], lambda x: x.is_plain or x.name in SOFTMAXES)
        scores = tuple([i for i in ends if trace.is_product(trace.nodes[i])])
        if not scores:
            continue
        softmaxes = is_softmax + sum(trace.nodes[i].name in SOFTMAXES for i in passed)
        dim = int(node.leaves[1]) % max(node.values[0].dim(), 1) if is_softmax else -1
        for use in [i for i in products if i > index][:_NEXT_PRODUCTS]:
            operand = _user(trace, use, index)
            if operand is not None:
                found.append(Attention(trace, index, dim, scores, operand, use, softmaxes))
                break
    return found


def _user(trace: Trace, use: int, softmax: int) -> Operand | None:
    """Return the operand of a product that is made of a softmax alone."""
    node, stop = trace.nodes[use], trace.nodes[softmax]
    for k, axis in zip(node.operands, (-1, -2), strict=True):
        if k in node.inputs:
            ends = trace.behind(node.inputs[k], lambda x: x.is_plain and x is not stop)[1]
            if softmax in ends:
                return Operand(node, k, node.inputs[k], axis)
    return None


def weighted_without_softmax(trace: Trace) -> list[Operand]:
    """Return weights that are made of a product of values without a softmax, in modules called attention."""
    found = []
    for node in trace.nodes:
        if not trace.is_product(node) or node.module is None:
            continue
        name, ref = type(node.module).__name__, node.inputs.get(node.operands[0])
        if ref is None or not _NAME.search(name) or _OTHER.search(name):
            continue
        passed, ends = trace.behind(ref, lambda x: x.is_tokenwise and x.func is not None)
        is_score = any(
            trace.is_product(trace.nodes[i]) and trace.nodes[i].module is node.module for i in ends
        )
        others = [trace.nodes[i].name for i in ends]
        if is_score and not SOFTMAXES & {*others} and "sigmoid" not in {trace.nodes[i].name for i in passed}:
            found.append(Operand(node, node.operands[0], ref, -1))
    return found


def _lead(trace: Trace, index: int) -> tuple[int, ...]:
    """Return the shape of the tokens that a linear layer was given, which it flattened."""
    count = trace.value((index, 0)).shape[0]
    for node in trace.nodes[index + 1 : index + 8]:
        if (index, 0) in node.inputs.values() and node.name in {"view", "_unsafe_view"}:
            shape = tuple(node.values[0].shape[:-1])
            if torch.Size(shape).numel() == count:
                return shape
    return (count,)


def _differ(a: Tensor, b: Tensor) -> Tensor:
    return (a != b) & ~(a.isnan() & b.isnan())


def _count(landing: Landing) -> int:
    return torch.Size(landing.lead).numel()
