"""What was seen of the inputs, the labels and the logits of one step."""

from __future__ import annotations

from typing import NamedTuple


class BatchLook(NamedTuple):
    """What was seen of the first batch of a step, from the model's inputs, its logits and their gradient.

    The gradient of a cross entropy is negative at the label and nowhere else, and 0 where a position is not
    counted, so it tells the labels, whoever computes the loss. A value that is not known is NaN.

    Attributes:
        step: the step.
        rows: the number of examples.
        length: the number of positions of each example; 1 without positions.
        classes: the number of classes C.
        is_tokens: whether an input has the token of each position.
        positions: how many positions were looked at.
        counted: how many of them have a gradient, so that the loss counts them.
        labelled: the share of these whose gradient has one dominating negative element, at the label.
        inputs_hash: a hash of the inputs.
        labels_hash: a hash of the labels.
        equal_rows: the share of examples that are equal to the first one.
        untransposed: the same as ``labelled`` of logits that the loss has reshaped to ``(rows, C, length)``.
        before: the share of labels that are the input token one position before.
        same: the share of labels that are the input token of the same position.
        after: the share of labels that are the input token one position ahead, as of a language model.
        second: the share of labels that are the input token two positions ahead.
        pad_known: whether an embedding or a mask tells which token is padding.
        pad: the share of counted positions at which the input and the label are padding.
        padding: the token that is padding; -1 if that is not known.
        token: the most frequent input token, without runs of one token at the ends of rows.
        token_share: its share of these tokens.
        token_as_label: the share of labels that are this token.
        distinct: the number of different tokens among these.
        largest: the largest of these tokens except for the most frequent one.
        label: the most frequent label.
        label_share: its share of the labels.
        mask_inside: the share of masked tokens that are not at the ends of rows, if all are the same token.
        mask_token: that token.
        unmasked_ends: the share of rows that end with a run of one token, the same in all of these rows, that
            is not masked.
        loss: the mean cross entropy of some positions, from their logits and labels.
        uniform_loss: the same for labels that are drawn at random.
        residual: how far the gradient is from that of a cross entropy: 0 for one, about 1 for another loss.
        probabilities: the share of positions whose logits are positive and sum to 1.
    """

    step: int
    rows: int
    length: int
    classes: int
    is_tokens: bool
    positions: float
    counted: float
    labelled: float
    inputs_hash: float
    labels_hash: float
    equal_rows: float
    untransposed: float
    before: float
    same: float
    after: float
    second: float
    pad_known: float
    pad: float
    padding: float
    token: float
    token_share: float
    token_as_label: float
    distinct: float
    largest: float
    label: float
    label_share: float
    mask_inside: float
    mask_token: float
    unmasked_ends: float
    loss: float
    uniform_loss: float
    residual: float
    probabilities: float
