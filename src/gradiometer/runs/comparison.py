"""The result of comparing two runs, and what it means in words."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from gradiometer.recorder import KINDS, OPTION
from gradiometer.runs.verdict import verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gradiometer.runs.distances import Distances


@dataclass(frozen=True)
class Difference:
    """One tensor, or one scalar, that differs between two runs.

    Attributes:
        step: the first step where it differs.
        name: such as ``blocks.3.w.grad`` or ``loss``; ``skipped`` is 1 where the update was skipped.
        kind: the tensor's kind; None for a scalar.
        values: the raw columns that differ, in A and in B; ``"value"`` for a scalar. None where missing.
    """

    step: int
    name: str
    kind: str | None
    values: Mapping[str, tuple[float | None, float | None]]


@dataclass(frozen=True)
class BitDifference:
    """The first step in which the bits of a tensor differ between two runs.

    Attributes:
        step: the step.
        name: the first tensor that differs, such as ``blocks.3.w.grad``: gradients from the model's last to
            its first, then weights.
        kind: its kind.
        tensors: the number of tensors whose bits differ in this step.
    """

    step: int
    name: str
    kind: str
    tensors: int


@dataclass(frozen=True)
class Side:
    """One run: its folder, first and last step, its numbers of steps and of steps with tensors.

    ``fingerprints`` tells whether it has recorded fingerprints, ``projections`` how many; 0 for none.
    """

    path: str
    first: int | None
    last: int | None
    steps: int
    recorded: int
    fingerprints: bool
    projections: int = 0


@dataclass(frozen=True)
class Comparison:
    """The result of comparing two runs, A and B, step by step.

    Attributes:
        a, b: the runs.
        rtol: the relative tolerance, see `compared`.
        common: the number of steps that both have.
        recorded: the number of common steps with tensors in both.
        compared: of those, the number up to the first whose statistics or scalars differ.
        fingerprinted: of those, the number with fingerprints of all tensors in both, up to the first whose
            bits differ; 0 if fingerprints were not compared.
        bits: the first tensor whose bits differ; None if there is none, or if fingerprints were not compared.
        unknown: names of tensors without fingerprints, such as those of which the parts on several ranks do
            not merge, of kinds that have fingerprints; those of the others are compared.
        tensors: the number of tensors that both have.
        kinds: the kinds that only A, and only B, has recorded.
        only_a, only_b: names of tensors that the other run lacks, of kinds that both have recorded.
        shapes: the shape and dtype in A and in B where they differ; the statistics of such tensors are still
            compared, their bits are not.
        missing: steps that only A, and only B, has, between the first and the last common step.
        first: the differences in the first step that differs, in the order of computation: weights,
            scalars, gradients from the model's last to its first, ``skipped``, and updates.
        scalars: the first difference of each scalar.
        total_norm: the last step with tensors in both, and its total gradient norm in A and in B.
        distances: how far the runs are apart, and where they leave what rounding explains; None if all bits
            are equal, or unless both have projections, see `apart`.
    """

    a: Side
    b: Side
    rtol: float
    common: int
    recorded: int
    compared: int
    fingerprinted: int
    bits: BitDifference | None
    unknown: tuple[str, ...]
    tensors: int
    kinds: tuple[tuple[str, ...], tuple[str, ...]]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    shapes: Mapping[str, tuple[str, str]]
    missing: tuple[tuple[int, ...], tuple[int, ...]]
    first: tuple[Difference, ...]
    scalars: tuple[Difference, ...]
    total_norm: tuple[int, float, float] | None
    distances: Distances | None = None

    @property
    def identical(self) -> bool:
        """Whether the bits of all tensors are equal in all common steps with tensors.

        The tensors of the kinds in both must be the same, and have fingerprints. Of kinds that have none,
        such as updates, counts of elements and largest magnitudes must be equal. Scalars do not count.
        """
        differ = self.bits or self._differ_in_tensors or self.unknown or self._without_bits
        return not differ and 0 < self.recorded == self.fingerprinted

    @property
    def same(self) -> bool:
        """Whether the runs are `identical`; if that is not known, whether nothing that was compared differs.

        In the latter case the tensors of the kinds in both must be the same, and the statistics and scalars
        of at least one step equal.
        """
        differ = self.bits or self.first or self._differ_in_tensors
        return self.identical or (not differ and self.compared > 0)

    @property
    def _without_bits(self) -> list[str]:
        """The kinds without fingerprints that differ, in words."""
        kinds = dict.fromkeys([difference.kind for difference in self.first if difference.kind is not None])
        return [_plural(name) for name in kinds if name not in KINDS or not KINDS[name].has_fingerprints]

    @property
    def _differ_in_tensors(self) -> bool:
        """Whether the runs do not have the same tensors."""
        return bool(self.only_a or self.only_b or self.shapes)

    @property
    def step(self) -> int | None:
        """The first step whose statistics or scalars differ; None if none does."""
        return self.first[0].step if self.first else None

    @property
    def not_compared(self) -> str:
        """Why no fingerprints were compared; empty if they were."""
        if self.fingerprinted or self.bits:
            return ""
        without = [name for name, side in (("A", self.a), ("B", self.b)) if not side.fingerprints]
        if without:
            return f"{' and '.join(without)} ha{'ve' if len(without) > 1 else 's'} no fingerprints"
        if self.rtol:
            return "a relative tolerance leaves fingerprints out"
        if not self.recorded:
            return "no step has tensors in both runs"
        if self.tensors == len(self.shapes):
            return "no tensor has the same name, shape and dtype in both runs"
        return "these tensors have no fingerprints, as parts on several ranks that do not merge"

    @property
    def verdict(self) -> str:
        """What the fingerprints tell, in one line."""
        bits = self.bits
        if bits is not None:
            noun = "tensor" if bits.tensors == 1 else "tensors"
            kind = KINDS[bits.kind].noun if bits.kind in KINDS else bits.kind
            return f"bits differ first at step {bits.step}: {bits.name} ({kind}), {bits.tensors} {noun}"
        if not self.fingerprinted:
            return f"bits: not compared, because {self.not_compared}"
        noun = "step" if self.fingerprinted == 1 else "steps"
        text = f"bits: identical for {self.fingerprinted:,} {noun}"
        if self.shapes:
            text += " in the tensors of the same shape and dtype"
        elif self._differ_in_tensors:
            text += " in the tensors that both runs have"
        if self.unknown:
            noun = "tensor has" if len(self.unknown) == 1 else "tensors have"
            text += f"; {len(self.unknown):,} {noun} no fingerprint"
        if self._without_bits:
            text += f"; {' and '.join(self._without_bits)} differ first at step {self.step}"
        if left := self.recorded - self.fingerprinted:
            text += f"; {left:,} have no fingerprints in both runs, so only their statistics are compared"
        if left := self.common - self.recorded:
            text += f"; {left:,} {'was' if left == 1 else 'were'} not recorded"
        return text

    @property
    def apart(self) -> str:
        """How far the runs are apart, in one line; empty if all bits are equal."""
        if self.identical:
            return ""
        if self.distances is None:
            without = [name for name, side in (("A", self.a), ("B", self.b)) if not side.projections]
            if not without:
                return "distances: not compared, because no tensor of one shape is projected in the same step"
            verb = "have" if len(without) > 1 else "has"
            return f"distances: not compared, because {' and '.join(without)} {verb} no projections"
        one, text = self.distances.departure, verdict(self.distances)
        for change in sorted(self.scalars, key=lambda change: change.step):
            is_set = change.name in {"lr", "skipped"} or change.name.startswith(OPTION)
            if is_set and one is not None and change.step <= one.step:
                return f"{text}; `{change.name}` differs from step {change.step:,} on"
        return text

    def plot(self, ax: Axes | None = None) -> Figure:
        """Draw the distances of gradients over steps with matplotlib, and return the figure.

        The gradients that are furthest beyond what rounding explains are drawn, the one of the departure in
        bold, with its limit, and the distance of all weights.

        Args:
            ax: the axes to draw on; by default those of a new figure.

        Raises:
            ImportError: without matplotlib; ``pip install 'gradiometer[plot]'`` installs it.
            ValueError: if there are no distances; `apart` tells why.
        """
        if self.distances is None:
            msg = f"Comparison.plot: {self.apart or 'all bits are equal'}; there is nothing to draw"
            raise ValueError(msg)
        return self.distances.plot(ax)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; of the distances, those of the departure and each step's median."""
        found = {"same": self.same, "identical": self.identical, "verdict": self.verdict, "step": self.step}
        found["apart"] = self.apart
        distances = None if self.distances is None else self.distances.to_dict()
        return found | asdict(replace(self, distances=None)) | {"distances": distances}


def _plural(name: str) -> str:
    """Return a kind in words: ``updates``, ``exponents of gradients``."""
    if name not in KINDS:
        return name
    kind = KINDS[name]
    return f"{kind.schema.name} of {kind.noun}s" if kind.schema.storage == "sparse" else f"{kind.noun}s"
