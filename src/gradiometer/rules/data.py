"""The data: labels that the inputs show, counted padding, unknown tokens, and batches that are all alike."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Final

from gradiometer.rules.base import BaseRule
from gradiometer.rules.finding import Finding, Severity

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gradiometer.recorder import BatchLook, StepRecord


SHIFT: Final = (
    "shift the labels by one, so that position t predicts token t + 1, or the inputs of a decoder, but once: "
    "models of Transformers shift `labels` themselves; an autoencoder may have its inputs as labels"
)
HIDE: Final = "replace the tokens that the model is to predict, by a mask token for example, in its inputs"
IGNORE: Final = (
    "set the labels of padding to -100, the ignore_index of the cross entropy, or multiply the losses of "
    "positions by the mask, and divide by its sum"
)
REMASK: Final = "make the mask with the padding token of the tokenizer that has padded the batch"
ADVANCE: Final = (
    "look at how batches are drawn: an iterator that is created anew, or not advanced, in each step, or a "
    "dataset that ignores its index; to learn one batch, or all data at once, on purpose is a test"
)
SHARD: Final = (
    "look at the workers of the data loader: with one seed, or with an IterableDataset that is not split by "
    "torch.utils.data.get_worker_info(), all of them return the same batches; and at an iterator that is not "
    "advanced in each step"
)
MIX: Final = "shuffle the data (shuffle=True), and look at how labels are read"
VOCABULARY: Final = (
    "if it stands for unknown tokens, the tokenizer does not fit the text or its vocabulary was cut: look at "
    "a decoded batch"
)

# looks that have to agree, and those that show that batches do not change
_AGREE: Final = 2
_SEVERAL: Final = 8
# pairs of equal neighbours among these, if not all are equal
_REPEATED: Final = 4
# labels that are found, and positions that are counted, in all of these looks
_LABELLED: Final = 0.95
_COUNTED: Final = 32
# shares that are as good as all; those of other offsets, of which one label alone would not be told apart
_ALL: Final = 0.98
_OTHER: Final = 0.9
# a share of padding that matters
_PADDED: Final = 0.05
# nearly always more labels than a rare class needs to occur
_MANY: Final = 100
# different tokens of a small alphabet, such as that of DNA and one for gaps
_ALPHABET: Final = 5
# sequences of a usual micro-batch; a data set that is learned at once has more
_BATCH: Final = 64


@dataclass(eq=False, repr=False)
class LookRule(BaseRule):
    """A rule about the batches of the steps that were looked at, see `gradiometer.recorder.BatchLook`."""

    kept = ("last",)
    last: int = field(default=-1, init=False)

    def check(self, record: StepRecord) -> list[Finding]:
        """Return the findings when another batch was looked at."""
        looks = () if record.model is None else record.model.batches
        if not looks or looks[-1].step == self.last:
            return []
        self.last = looks[-1].step
        return self.examine(record, looks)

    def examine(self, record: StepRecord, looks: Sequence[BatchLook]) -> list[Finding]:
        """Return the findings about all looks so far."""
        raise NotImplementedError

    def about(
        self,
        record: StepRecord,
        looks: Sequence[BatchLook],
        value: float,
        limit: float,
        text: str,
        advice: str,
        severity: Severity | None = None,
    ) -> Finding:
        """Return a finding about these looks."""
        severity = self.severity if severity is None else min(self.severity, severity)
        begun = min(looks[0].step, record.step)
        return self.finding(record, begun, None, value, limit, text, advice, severity, None)


def agreeing(
    looks: Sequence[BatchLook], holds: Callable[[BatchLook], bool], least: int = _AGREE
) -> Sequence[BatchLook]:
    """Return the last looks in a row at which a condition holds; none if they are too few, or too small."""
    count = next((i for i, look in enumerate(reversed(looks)) if not holds(look)), len(looks))
    found = looks[len(looks) - count :]
    is_enough = count >= least and sum(look.counted for look in found) >= _COUNTED
    return found if is_enough else ()


def _counted(looks: Sequence[BatchLook]) -> str:
    return f"{sum(look.counted for look in looks):,.0f} positions that the loss counts"


@dataclass(eq=False, repr=False)
class LabelShift(LookRule):
    """Labels that are the model's own input tokens, or tokens further ahead than the next one.

    The labels of a language model are the next input tokens. If they are the tokens of the same position, or
    of the one before, the model copies them. If they are the tokens two positions ahead, they were shifted
    twice. The gradient of the logits tells the labels.
    """

    name = "label_shift"

    def examine(self, record: StepRecord, looks: Sequence[BatchLook]) -> list[Finding]:
        """Compare the labels with the tokens around them."""
        for attribute in ("same", "before", "second"):

            def holds(look: BatchLook, attribute: str = attribute) -> bool:
                is_clear = look.labelled >= _LABELLED and look.label_share < _OTHER > look.after
                return bool(is_clear and getattr(look, attribute) >= _ALL)

            found = agreeing(looks, holds)
            if not found:
                continue
            share = min(getattr(look, attribute) for look in found)
            text = f"in {share:.0%} of the {_counted(found)}, the label is the input token "
            if attribute == "second":
                text += "two positions ahead, not the next one: the labels are shifted twice"
                return [self.about(record, found, share, _ALL, text, SHIFT)]
            text = "the model sees the labels and can copy them: " + text
            text += "of the same position" if attribute == "same" else "one position before"
            is_part = sum(look.counted for look in found) < sum(look.positions for look in found) / 2
            advice = HIDE if is_part and attribute == "same" else SHIFT
            return [self.about(record, found, share, _ALL, text, advice)]
        return []


@dataclass(eq=False, repr=False)
class Padding(LookRule):
    """Padding that the loss counts, or a mask that hides another token than the padding.

    Padding is the ``padding_idx`` of an embedding, or a token that a mask of the inputs hides wherever it is,
    and that ends or begins rows.
    """

    name = "padding"

    def examine(self, record: StepRecord, looks: Sequence[BatchLook]) -> list[Finding]:
        """Look for padding among the counted positions, and for masks inside of rows."""
        found = agreeing(looks, lambda look: look.pad_known > 0 and look.pad >= _PADDED)
        if found:
            share = min(look.pad for look in found)
            text = f"the loss counts padding: in {share:.0%} of the {_counted(found)}, the label is token "
            text += f"{found[-1].padding:.0f}, the padding at the ends of rows"
            return [self.about(record, found, share, _PADDED, text, IGNORE)]
        found = agreeing(looks, lambda look: look.mask_inside >= 0.5 and look.unmasked_ends >= 0.1)
        if found:
            token, ends = found[-1].mask_token, min(look.unmasked_ends for look in found)
            text = f"the mask hides token {token:.0f} wherever it is, inside of rows as well, but not the "
            text += f"runs of another token, probably padding, at the ends of {ends:.0%} of the rows"
            return [self.about(record, found, ends, 0.1, text, REMASK)]
        return []


@dataclass(eq=False, repr=False)
class SameBatch(LookRule):
    """The same inputs and labels in each step, or several times in a row, or in each row of a batch.

    Each worker of a data loader may return the same batches. Of the first 8 steps, at least 4 then have the
    batch of the step before, and at least 1 has another one. The same batch in each step has severity info
    unless it is a batch of sequences of tokens with a label at each position, of up to 64 of them: full-batch
    training, and to learn a few examples by heart, may be meant.
    """

    name = "same_batch"

    def examine(self, record: StepRecord, looks: Sequence[BatchLook]) -> list[Finding]:
        """Compare the batches, and the rows of each."""
        found = agreeing(looks, _is_one_example, _AGREE + 1)
        if found:
            text = f"all {found[-1].rows} rows of a batch are the same example, in each of {len(found)} steps"
            return [self.about(record, found, 1.0, 1.0, text, ADVANCE)]
        newest = looks[-1]

        def holds(look: BatchLook) -> bool:
            return look.inputs_hash == newest.inputs_hash != 0 and look.labels_hash == newest.labels_hash

        found = agreeing(looks, holds, _SEVERAL)
        if not found:
            return self._runs(record, looks[:_SEVERAL])
        is_text = newest.is_tokens and newest.counted > newest.rows and newest.rows <= _BATCH
        size = f"{newest.rows} sequences" if newest.is_tokens else f"{newest.rows} examples"
        text = f"the same batch of {size} in each of the {len(found)} steps that were looked at, from step "
        text += f"{found[0].step} to {newest.step}: the model learns it by heart"
        severity = None if is_text else Severity.INFO
        return [self.about(record, found, len(found), _SEVERAL, text, ADVANCE, severity)]

    def _runs(self, record: StepRecord, looks: Sequence[BatchLook]) -> list[Finding]:
        """Look for batches that come several times in a row, among those of the first steps."""
        is_full = len(agreeing(looks, _is_varied, _SEVERAL)) == looks[-1].step - looks[0].step + 1
        runs = [
            len(list(run)) for _, run in groupby(looks, lambda look: (look.inputs_hash, look.labels_hash))
        ]
        if not is_full or len(runs) < 2 or len(looks) - len(runs) < _REPEATED:
            return []
        most = max(runs)
        is_each = {*runs[:-1], most} == {most}
        text = (
            f"each batch comes {most} times in a row"
            if is_each
            else f"batches come up to {most} times in a row"
        )
        text += f": steps {looks[0].step} to {looks[-1].step} had only {len(runs)} different batches"
        return [self.about(record, looks, most, 1.0, text, SHARD)]


def _is_varied(look: BatchLook) -> bool:
    # of few different examples, such as rows of 0, two batches may be equal by chance
    is_known = look.labelled >= _LABELLED and look.inputs_hash != 0
    return is_known and (look.label_share < 1.0 or (look.rows > 1 and look.equal_rows < 1.0))


def _is_one_example(look: BatchLook) -> bool:
    return look.labelled >= _LABELLED and look.rows >= 4 and look.equal_rows == 1.0


@dataclass(eq=False, repr=False)
class OneClass(LookRule):
    """Batches in which all labels are of one class.

    If it is another class in another step, the data are sorted. If it is always the same class, of at least
    three, in 100 labels or more, it is a warning. For two classes, one of which may be rare, it is info, and
    for class 0 of a loss without a classifier, a matrix with a row for each class: contrastive losses have it
    as the label of all examples.
    """

    name = "one_class"

    def examine(self, record: StepRecord, looks: Sequence[BatchLook]) -> list[Finding]:
        """Compare the labels within the batches, and between them."""
        found = agreeing(
            looks,
            lambda look: look.labelled >= _LABELLED and look.label_share == 1.0 and look.counted >= 8,
            _SEVERAL,
        )
        total = sum(look.counted for look in found)
        if total < _MANY:
            return []
        several, newest = {look.label for look in found}, found[-1]
        if len(several) > 1 and newest.classes > 2:
            text = f"all labels of a batch are of one class, in each of {len(found)} steps, but not of the "
            text += "same class in all of them: the data are sorted by class"
            return [self.about(record, found, len(several), 1.0, text, MIX)]
        if len(several) > 1:
            return []
        text = f"all {total:,.0f} labels of {len(found)} steps are class {newest.label:.0f} of "
        text += f"{newest.classes:,}"
        shapes = [shape for shape in record.catalog.parameters.shapes if len(shape) == 2]
        is_classifier = newest.label != 0 or newest.classes in {shape[0] for shape in shapes}
        severity = None if newest.classes > 2 and is_classifier else Severity.INFO
        return [self.about(record, found, 1.0, 1.0, text, MIX, severity)]


@dataclass(eq=False, repr=False)
class UnknownTokens(LookRule):
    """One token that is most of the inputs and most of the labels, without runs at the ends of rows.

    In text no token is: the most frequent ones are some 5 %. It has severity info, since events, notes or
    pixels may be so, unless the upper half of the vocabulary does not occur either, as if it was cut; so that
    this is no small alphabet, more than 5 different tokens have to occur.
    """

    name = "unknown_tokens"

    def examine(self, record: StepRecord, looks: Sequence[BatchLook]) -> list[Finding]:
        """Look at the most frequent token."""
        newest = looks[-1]

        def holds(look: BatchLook) -> bool:
            is_most = look.token_share >= 0.5 and look.token_as_label >= 0.5 and look.classes > 4
            return is_most and look.token == newest.token != look.padding

        found = agreeing(looks, holds, _AGREE + 1)
        if not found or sum(look.counted for look in found) < _MANY:
            return []
        share, largest = min(look.token_share for look in found), max(look.largest for look in found)
        text = f"{share:.0%} of the input tokens, and most labels, are token {newest.token:.0f}"
        is_cut = largest < newest.classes / 2 and newest.distinct > _ALPHABET
        if is_cut:
            text += (
                f", and of the {newest.classes:,} tokens of the vocabulary none after {largest:.0f} occurs"
            )
        severity = None if is_cut else Severity.INFO
        return [self.about(record, found, share, 0.5, text, VOCABULARY, severity)]
