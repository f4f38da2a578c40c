"""Faults of the data and of the criterion, planted in small trainings, and healthy ones of many kinds."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 its usual name

import gradiometer as gm
from gradiometer.recorder import BatchLook, Catalog, ModelState, StepRecord
from gradiometer.rules import (
    Criterion,
    Finding,
    FirstLoss,
    LabelShift,
    OneClass,
    Padding,
    SameBatch,
    Severity,
    UnknownTokens,
    headlines,
)
from support.batches import CLASSES, Tokens, looks, mean_loss, next_tokens, text, train

pytestmark = pytest.mark.usefixtures("_one_thread")

CATALOG = Catalog.of(("w",), ((2,),), ("float32",))


def rules():
    return [Criterion(), FirstLoss(), LabelShift(), Padding(), SameBatch(), OneClass(), UnknownTokens()]


def found_in(draw, model=None, **options):
    """Return the findings of a short training, as rule, severity and message."""
    monitor = train(Tokens() if model is None else model, draw, rules=rules(), **options)
    assert monitor.failures == {}
    return [(one.rule, one.severity, one.message) for one in monitor.findings]


def classes(rows=24):
    """Return pictures and their classes, of which class 1 is frequent."""
    labels = (torch.rand(rows).square() * 10).long()
    return torch.randn(rows, 8) + labels[:, None], labels


def masked(rows=16, *, hide=True, counted="hidden"):
    """Return a batch of a masked language model, whose rows have 8 to 20 tokens."""
    tokens = text(rows, 20)
    allowed = torch.arange(20) < torch.randint(8, 21, (rows, 1))
    hidden = (torch.rand(tokens.shape) < 0.25) & allowed
    keep = {"hidden": hidden, "allowed": allowed, "all": torch.ones_like(allowed)}[counted]
    tokens = tokens.masked_fill(~allowed, 0)
    labels = tokens.masked_fill(~keep, -100)
    return {"tokens": tokens.masked_fill(hidden, 1) if hide else tokens, "allowed": allowed}, labels


def copied(_):
    chunk = text()
    return {"tokens": chunk}, chunk


def shifted(places):
    def draw(_):
        chunk = text()
        labels = chunk.roll(-places, 1)
        labels[:, -2 if places > 0 else 0 :][:, : abs(places)] = -100
        return {"tokens": chunk}, labels

    return draw


def cut(_):
    # a vocabulary of ten tokens, one of which stands for all others
    chunk = torch.randint(3, CLASSES, (16, 21))
    chunk = torch.where(chunk > 9, 1, chunk)
    return {"tokens": chunk[:, :-1]}, chunk[:, 1:]


def repeated(draw):
    torch.manual_seed(1)
    batch = draw()
    return lambda _: batch


def other_mask(_):
    inputs, labels = masked()
    return {**inputs, "allowed": inputs["tokens"] != 5}, labels


def one_row(_):
    chunk = text(1).expand(8, -1)
    return {"tokens": chunk[:, :-1]}, chunk[:, 1:]


WARN, INFO = Severity.WARNING, Severity.INFO


@pytest.mark.parametrize(
    ("draw", "rule", "severity", "words"),
    [
        (copied, "label_shift", WARN, "label is the input token of the same position"),
        (shifted(-1), "label_shift", WARN, "label is the input token one position before"),
        (shifted(2), "label_shift", WARN, "two positions ahead, not the next one"),
        (lambda _: masked(hide=False), "label_shift", WARN, "the model sees the labels"),
        (lambda _: masked(counted="all"), "padding", WARN, "the loss counts padding: in "),
        (other_mask, "padding", WARN, "the mask hides token 5 wherever it is"),
        (cut, "unknown_tokens", WARN, "of the 24 tokens of the vocabulary none after 9 occurs"),
        (repeated(next_tokens), "same_batch", WARN, "the same batch of 16 sequences in each of the 8 steps"),
        (repeated(masked), "same_batch", WARN, "the same batch of 16 sequences in each of the 8 steps"),
        (one_row, "same_batch", WARN, "all 8 rows of a batch are the same example"),
    ],
    ids=["copied", "before", "twice", "visible", "padding", "mask", "cut", "same", "same-masked", "one-row"],
)
def test_a_fault_of_the_tokens_is_named(draw, rule, severity, words):
    ((name, how_bad, message),) = found_in(draw, steps=8)
    assert (name, how_bad) == (rule, severity)
    assert words in message


def sorted_by_class(step):
    return torch.randn(24, 8), torch.full((24,), step // 4)


@pytest.mark.parametrize(
    ("draw", "severity", "words"),
    [
        (sorted_by_class, WARN, "the data are sorted by class"),
        (
            lambda _: (torch.randn(24, 8), torch.full((24,), 3)),
            WARN,
            "all 192 labels of 8 steps are class 3 of 10",
        ),
        (lambda _: (torch.randn(24, 8), torch.zeros(24, dtype=torch.long)), WARN, "are class 0 of 10"),
    ],
    ids=["sorted", "one", "class-0"],
)
def test_labels_of_one_class_are_named(draw, severity, words):
    ((name, how_bad, message),) = found_in(draw, nn.Linear(8, 10), steps=8)
    assert (name, how_bad) == ("one_class", severity)
    assert words in message


class Contrasting(nn.Module):
    """Compares with one similar example, and with others, as MoCo does."""

    def __init__(self):
        super().__init__()
        self.encoder, self.others = nn.Linear(8, 6), torch.randn(6, 30)

    def forward(self, x):
        z, like = self.encoder(x), self.encoder(x + 0.1)
        return torch.cat([(z * like).sum(1, keepdim=True), z @ self.others], 1)


def test_the_labels_of_a_contrastive_loss_are_only_worth_knowing():
    found = found_in(
        lambda _: (torch.randn(24, 8), torch.zeros(24, dtype=torch.long)), Contrasting(), steps=8
    )
    assert [(name, severity) for name, severity, _ in found] == [("one_class", Severity.INFO)]


def test_the_same_batch_of_pictures_is_only_worth_knowing():
    ((name, severity, message),) = found_in(repeated(classes), nn.Linear(8, 10), steps=8)
    assert (name, severity) == ("same_batch", Severity.INFO)
    assert message.startswith(
        "the same batch of 24 examples in each of the 8 steps that were looked at, from step"
    )


def softmax_twice(z, y):
    return mean_loss(z.softmax(-1), y)


@pytest.mark.parametrize("note", [True, False], ids=["graph", "values"])
def test_a_softmax_before_the_loss_is_named(note):
    model = nn.Sequential(nn.Linear(8, 10), nn.Softmax(-1))
    ((name, severity, message),) = found_in(lambda _: classes(), model, note=note)
    assert (name, severity) == ("criterion", Severity.WARNING)
    assert "the loss takes the output of a softmax for logits" in message
    if not note:
        # the looks are there by then
        assert message.endswith(": with values from 0 to 1 and 10 classes it cannot fall below 1.46")


@pytest.mark.parametrize(
    ("loss_of", "words"),
    [
        (softmax_twice, "takes the output of a softmax for logits"),
        (lambda z, y: F.cross_entropy(z.bfloat16().sigmoid().float(), y), "takes the output of a sigmoid"),
        (lambda z, y: F.nll_loss(z.softmax(-1), y), "the nll_loss gets probabilities"),
        (
            lambda z, y: F.binary_cross_entropy_with_logits(z.sigmoid(), F.one_hot(y, 10).float()),
            "applies a sigmoid again",
        ),
        (
            lambda z, y: F.cross_entropy(z.bfloat16().relu()[:, None].float().flatten(1), y),
            "the logits of the loss are the output of a ReLU: none can be below 0",
        ),
        (
            lambda z, y: F.cross_entropy(z.tanh(), y, label_smoothing=0.1),
            "the output of a tanh, between -1 and 1",
        ),
    ],
    ids=["softmax", "sigmoid", "nll", "bce", "relu", "tanh"],
)
def test_the_graph_of_the_loss_tells_what_its_logits_are(loss_of, words):
    ((name, severity, message),) = found_in(lambda _: classes(), nn.Linear(8, 10), loss_of=loss_of, steps=3)
    assert (name, severity) == ("criterion", Severity.WARNING)
    assert words in message


@pytest.mark.parametrize(
    ("bound", "words"),
    [(torch.relu, "are the output of a ReLU"), (torch.tanh, "1: it cannot fall below 0.313")],
    ids=["relu", "tanh"],
)
def test_bounds_before_a_binary_cross_entropy_are_only_worth_knowing(bound, words):
    def loss_of(z, y):
        return F.binary_cross_entropy_with_logits(bound(z), F.one_hot(y, 10).float())

    ((name, severity, message),) = found_in(lambda _: classes(), nn.Linear(8, 10), loss_of=loss_of, steps=3)
    assert (name, severity) == ("criterion", Severity.INFO)
    assert words in message


def test_the_loss_that_a_tanh_allows_is_that_of_its_bounds():
    rule = Criterion()
    state = ModelState((True,), batches=(LOOK,), bounded="log_softmax of tanh")
    (found,) = rule.check(StepRecord(0, 0.0, {}, CATALOG, model=state))
    least = F.cross_entropy(F.one_hot(torch.tensor([3]), 1000) * 2.0 - 1, torch.tensor([3])).item()
    assert found.message.endswith(f": with 1,000 classes it cannot fall below {least:.3g}")


def test_logits_that_are_reshaped_and_not_transposed_are_named():
    def loss_of(z, y):
        return F.cross_entropy(z.reshape(16, CLASSES, 20), y)

    ((name, severity, message),) = found_in(lambda _: next_tokens(), loss_of=loss_of)
    assert (name, severity) == ("criterion", Severity.WARNING)
    assert message.startswith(
        "the loss reshapes logits of the shape (16, 20, 24) to (16, 24, 20), but does not"
    )


def test_equal_pictures_in_a_batch_are_named():
    def draw(_):
        x, y = classes()
        return x[:1].expand(24, -1), y

    ((name, severity, message),) = found_in(draw, nn.Linear(8, 10))
    assert (name, severity) == ("same_batch", Severity.WARNING)
    assert message == "all 24 rows of a batch are the same example, in each of 3 steps"


@pytest.mark.parametrize(("scale", "severity"), [(60, Severity.WARNING), (28, Severity.INFO)])
def test_a_first_loss_far_above_that_of_guessing_is_named(scale, severity):
    torch.manual_seed(0)
    model = Tokens()
    model.head.weight.data *= scale
    ((name, how_bad, message),) = found_in(lambda _: next_tokens(), model)
    assert (name, how_bad) == ("first_loss", severity)
    assert f"nothing, ln({CLASSES}) = {math.log(CLASSES):.3g}: the logits are too large" in message


class Normed(nn.Module):
    """A language model with a norm before its head, as by the order of its parameters."""

    def __init__(self, scale, *, norm=None, wide=False):
        super().__init__()
        self.body = Tokens(32)
        self.norm = nn.LayerNorm(32) if norm is None else norm
        self.wide = nn.Linear(32, 32) if wide else nn.Identity()
        self.head = nn.Linear(32, CLASSES, bias=False)
        nn.init.normal_(self.head.weight, std=scale / 32**0.5)

    def forward(self, tokens):
        return self.head(self.wide(self.norm(self.body(tokens))))


def frozen(model):
    model.body.embed.weight.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("make", "severities"),
    [
        (lambda: Normed(6.0), [WARN]),
        (lambda: Normed(6.0, norm=nn.RMSNorm(32)), [WARN]),
        (lambda: frozen(Normed(6.0)), [INFO]),
        (lambda: Normed(9.0, wide=True), [INFO]),
        (lambda: Normed(1.0), []),
        (lambda: Normed(2.0), []),
    ],
    ids=["layer-norm", "rms-norm", "pretrained", "linear-between", "usual", "twice"],
)
def test_after_a_norm_a_first_loss_far_above_that_of_guessing_is_a_warning(make, severities):
    torch.manual_seed(0)
    found = found_in(lambda _: next_tokens(), make())
    assert [(name, severity) for name, severity, _ in found] == [("first_loss", x) for x in severities]


def with_margin(z, y):
    # as in ArcFace: the logit of the label is 30 lower
    return F.cross_entropy(z.flatten(0, 1) - 30 * F.one_hot(y.flatten(), CLASSES), y.flatten())


def unchanged(_):
    # of the tokens that are predicted, a tenth is not hidden, and a tenth is another one
    inputs, labels = masked()
    which = torch.rand(labels.shape)
    tokens = torch.where(which < 0.1, labels.clamp(min=0), inputs["tokens"])
    return {**inputs, "tokens": torch.where(labels >= 0, tokens, inputs["tokens"])}, labels


def all_counted(_):
    # a denoising objective: the loss counts all tokens, a seventh of which is replaced
    chunk = text()
    return {"tokens": torch.where(torch.rand(chunk.shape) < 0.15, text(), chunk)}, chunk


def absorbed(_):
    # discrete diffusion: most tokens are hidden, and these are counted
    chunk = text()
    hidden = torch.rand(chunk.shape) < torch.rand(16, 1).clamp(min=0.3)
    return {"tokens": chunk.masked_fill(hidden, 1)}, chunk.masked_fill(~hidden, -100)


def ended(_):
    # the token of the end is the padding, and one end of each text is counted
    chunk = text()
    length = torch.randint(6, 20, (16, 1))
    place = torch.arange(21)
    chunk = chunk.masked_fill(place >= length, 2)
    return {"tokens": chunk[:, :-1], "allowed": (place <= length)[:, :-1]}, chunk.masked_fill(
        place > length, -100
    )[:, 1:]


def tagged(_):
    # most tags are 0
    inputs, _ = next_tokens()
    return inputs, (torch.rand(16, 20) < 0.1).long() * torch.randint(1, 9, (16, 20))


def packed(_):
    chunk = text()
    return {"tokens": chunk.masked_fill(torch.rand(chunk.shape) < 0.1, 2)[:, :-1]}, chunk[:, 1:]


def slow(_):
    # tokens that hardly change, with positions first
    chunk = text(1, 30) + (torch.rand(22, 30) < 0.01).long().cumsum(0).clamp(max=1)
    chunk = chunk.clamp(max=CLASSES - 1)
    return {"tokens": chunk[:-1]}, chunk[1:]


@pytest.mark.parametrize(
    "draw",
    [
        slow,
        lambda _: next_tokens(),
        lambda _: next_tokens(rows=4, classes=9),
        lambda _: masked(),
        unchanged,
        all_counted,
        absorbed,
        ended,
        tagged,
        packed,
        lambda _: ({"tokens": text().mT}, text().mT),
    ],
    ids=[
        "slow",
        "next",
        "few",
        "masked",
        "unchanged",
        "denoised",
        "absorbed",
        "ended",
        "tagged",
        "packed",
        "shuffled",
    ],
)
def test_healthy_batches_of_tokens_are_quiet(draw):
    assert found_in(draw, steps=20) == []


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda z, y: F.cross_entropy(z, y, label_smoothing=0.2),
        lambda z, y: F.cross_entropy(z, y, reduction="sum"),
        lambda z, y: F.cross_entropy(z / 0.1, y),
        lambda z, y: F.mse_loss(z, F.one_hot(y, 10).float()),
        lambda z, y: F.binary_cross_entropy_with_logits(z, F.one_hot(y, 10).float()),
        lambda z, y: F.binary_cross_entropy(z.sigmoid(), F.one_hot(y, 10).float()),
        lambda z, y: F.nll_loss((z.softmax(-1) + 1e-6).log(), y),
        # a policy: gains of both signs
        lambda z, y: (z.log_softmax(-1).gather(1, y[:, None])[:, 0] * torch.randn(len(y))).mean(),
        # a soft cap, a temperature, an activation before the last layer's pooling
        lambda z, y: F.cross_entropy(30 * (z / 30).tanh(), y),
        lambda z, y: F.cross_entropy(z.relu() / 0.1, y),
        lambda z, y: F.cross_entropy(z[..., None].expand(-1, -1, 4).relu().mean(-1), y),
        # distillation of features, distillation, and an entropy
        lambda z, _: F.kl_div(z.relu().log_softmax(-1), torch.randn(z.shape).softmax(-1), reduction="sum"),
        lambda z, _: F.kl_div(z.log_softmax(-1), torch.randn(z.shape).softmax(-1), reduction="batchmean"),
        lambda z, _: (z.softmax(-1) * z.log_softmax(-1)).sum(-1).mean(),
    ],
    ids=[
        "smoothed",
        "summed",
        "tempered",
        "mse",
        "bce-with-logits",
        "bce",
        "nll",
        "policy",
        "capped",
        "relu-tempered",
        "relu-pooled",
        "features",
        "distilled",
        "entropy",
    ],
)
def test_healthy_losses_of_classes_are_quiet(loss_of):
    assert found_in(lambda _: classes(), nn.Linear(8, 10), loss_of=loss_of, steps=20) == []


def test_a_margin_at_the_label_alone_is_no_wrong_scale():
    assert found_in(lambda _: next_tokens(), loss_of=with_margin) == []


@pytest.mark.parametrize("is_counted", [True, False])
def test_padding_is_found_in_labels_from_which_a_model_makes_its_own_inputs(is_counted):
    class Translating(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.decoder = nn.Embedding(CLASSES, 16, padding_idx=0), Tokens()

        def forward(self, input_ids, labels):
            inputs = F.pad(labels[:, :-1].clamp(min=0), (1, 0))
            return self.decoder(inputs) + self.embed(input_ids).sum() * 0

    def draw(_):
        # each text has its end, which is the padding, too
        chunk = text().masked_fill(torch.arange(21) > torch.randint(6, 16, (16, 1)), 0)
        is_end = (chunk == 0).cumsum(1) == 1
        labels = chunk if is_counted else chunk.masked_fill((chunk == 0) & ~is_end, -100)
        return {"input_ids": text()[:, :12], "labels": labels}, labels

    names = [name for name, *_ in found_in(draw, Translating())]
    assert names == ["padding"] * is_counted


class Translating(Tokens):
    """Has the arguments ``name`` and ``other``, and shifts the latter itself, unless told otherwise."""

    def __init__(self, name, other, *, shifts=True):
        super().__init__()
        self.name, self.other, self.shifts = name, other, shifts

    def forward(self, a=None, b=None, **inputs):
        source, target = (a, b) if a is not None else (inputs[self.name], inputs[self.other])
        target = F.pad(target[:, :-1].clamp(min=0), (1, 0)) if self.shifts else target
        return super().forward(target) + self.embed(source).mean(1, keepdim=True).mean()


@pytest.mark.parametrize(
    ("names", "shifts", "is_fault"),
    [
        (("src", "trg"), True, False),
        (("source", "target"), True, False),
        (("source", "tokens"), False, True),
        (("idx", "targets"), False, True),
    ],
)
def test_targets_that_a_model_may_shift_itself_are_no_fault(names, shifts, is_fault):
    def draw(_):
        # an autoencoder
        chunk = text(first=3)
        return {names[0]: chunk, names[1]: chunk}, chunk

    found = found_in(draw, Translating(*names, shifts=shifts))
    assert [rule for rule, *_ in found] == ["label_shift"] * is_fault


@pytest.mark.parametrize("names", [("src", "target_in"), ("source", "decoder_tokens"), ("tokens", "targets")])
def test_inputs_that_a_loop_shifts_are_no_fault(names):
    def draw(_):
        chunk = text()
        encoded, decoded = chunk[:, 1:], chunk[:, :-1]
        if names[1] == "targets":
            encoded, decoded = decoded, encoded
        return {names[0]: encoded, names[1]: decoded}, chunk[:, 1:]

    assert found_in(draw, Translating(*names, shifts=False)) == []


def test_padding_of_an_embedding_counts_and_a_token_inside_of_rows_does_not():
    def draw(_):
        chunk = text().masked_fill(torch.arange(21) > torch.randint(6, 20, (16, 1)), 0)
        return {"tokens": chunk[:, :-1]}, chunk[:, 1:].clone()

    def sparse(_):
        chunk = text().masked_fill(torch.rand(16, 21) < 0.6, 0)
        return {"tokens": chunk[:, :-1]}, chunk[:, 1:].clone()

    for padding, drawn, names in ((0, draw, ["padding"]), (None, draw, []), (0, sparse, [])):
        model = Tokens()
        model.embed = nn.Embedding(CLASSES, 16, padding_idx=padding)
        assert [name for name, *_ in found_in(drawn, model)] == names


LOOK = BatchLook(0, 16, 20, 1000, True, *[0.0] * 28)._replace(counted=320.0, labelled=1.0)


def checked(rule, *looks):
    state = ModelState((True,), batches=tuple(look._replace(step=i) for i, look in enumerate(looks)))
    return list(rule.check(StepRecord(len(looks) - 1, 0.0, {}, CATALOG, model=state)))


def test_a_frequent_event_is_only_worth_knowing_unless_the_vocabulary_is_cut():
    look = LOOK._replace(
        token=7.0, token_share=0.6, token_as_label=0.6, padding=-1.0, largest=900.0, distinct=90.0
    )
    (found,) = checked(UnknownTokens(), look, look, look)
    assert found.severity is Severity.INFO
    (found,) = checked(UnknownTokens(), *[look._replace(largest=400.0)] * 3)
    assert found.severity is Severity.WARNING
    (found,) = checked(UnknownTokens(), *[look._replace(largest=400.0, distinct=5.0)] * 3)
    assert found.severity is Severity.INFO
    assert checked(UnknownTokens(), *[look._replace(padding=7.0)] * 3) == []


def test_one_look_at_a_batch_is_not_enough_and_each_is_reported_once():
    rule, look = LabelShift(), LOOK._replace(same=1.0)
    assert checked(rule, look) == []
    assert len(checked(rule, look, look)) == 1
    assert checked(rule, look, look) == []
    assert checked(rule, look, look, look._replace(same=0.5)) == []


def test_a_data_set_in_one_batch_is_only_worth_knowing():
    look = LOOK._replace(inputs_hash=5.0, labels_hash=6.0)
    assert [one.severity for one in checked(SameBatch(), *[look] * 8)] == [Severity.WARNING]
    for other in (look._replace(rows=65, counted=1300.0), look._replace(is_tokens=False)):
        assert [one.severity for one in checked(SameBatch(), *[other] * 8)] == [Severity.INFO]
    assert checked(SameBatch(), *[look] * 7) == checked(SameBatch(), *[look] * 8, LOOK) == []


def in_turn(make, times):
    """Return a function that draws each batch several times in a row, as by workers with one seed."""
    known = {}
    return lambda step: known.setdefault(step // times, make(step))


@pytest.mark.parametrize("times", [2, 3, 4, 7])
@pytest.mark.parametrize(
    ("make", "model"), [(lambda _: next_tokens(), Tokens), (lambda _: classes(), lambda: nn.Linear(8, 10))]
)
def test_batches_that_come_several_times_in_a_row_are_named(make, model, times):
    ((name, severity, message),) = found_in(in_turn(make, times), model(), steps=8)
    assert (name, severity) == ("same_batch", Severity.WARNING)
    assert message.startswith(f"each batch comes {times} times in a row: steps 0 to 7 had only ")
    assert message.endswith(f" {-(-8 // times)} different batches")


def test_batches_that_come_different_times_in_a_row_are_counted():
    a, b, c = (LOOK._replace(inputs_hash=x, labels_hash=x) for x in (1.0, 2.0, 3.0))
    (found,) = checked(SameBatch(), a, a, b, b, b, b, c, c)
    assert found.message == "batches come up to 4 times in a row: steps 0 to 7 had only 3 different batches"


@pytest.mark.parametrize(
    "change",
    [{"labelled": 0.5}, {"inputs_hash": 0.0}, {"label_share": 1.0, "rows": 1}, {"counted": 2.0}],
    ids=["unknown", "no-inputs", "of-zeros", "few"],
)
def test_repeated_batches_without_known_and_varied_labels_are_quiet(change):
    a, b = (LOOK._replace(**{"inputs_hash": x, "labels_hash": x, **change}) for x in (1.0, 2.0))
    assert checked(SameBatch(), a, a, a, a, b, b, b, b) == []


def test_a_batch_that_is_repeated_now_and_then_is_quiet():
    a, b, c, d, e = (LOOK._replace(inputs_hash=x, labels_hash=x) for x in range(1, 6))
    for batches in ((a, a, b, b, c, c, d, e), (a, b, a, b, a, b, a, b), (a, a, a, a, b, b, b)):
        assert checked(SameBatch(), *batches) == []


def test_a_policy_that_learns_from_each_batch_several_times_is_quiet():
    def loss_of(z, y):
        # advantages of both signs, as in PPO
        return (z.log_softmax(-1).gather(1, y[:, None])[:, 0] * (y % 2 - 0.5)).mean()

    draw = in_turn(lambda _: classes(), 4)
    assert found_in(draw, nn.Linear(8, 10), loss_of=loss_of, steps=20) == []


def test_several_forward_passes_of_one_step_are_one_batch():
    torch.manual_seed(0)
    model = nn.Linear(8, 10)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    monitor = gm.watch(model, optimizer, rules=rules())
    passes = 0
    for _ in range(9):
        x, y = classes()

        def closure(x=x, y=y):
            nonlocal passes
            passes += 1
            optimizer.zero_grad()
            loss = mean_loss(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    monitor.close()
    assert passes > 2 * 9
    assert [look.step for look in looks(monitor)] == list(range(9))
    assert (monitor.failures, list(monitor.findings)) == ({}, [])


def test_a_resumed_run_has_no_first_loss():
    look = LOOK._replace(loss=70.0, uniform_loss=70.0)
    assert len(checked(FirstLoss(), look)) == 1
    rule = FirstLoss()
    rule.load_state_dict({"last": 40})
    assert checked(rule, look) == []


def test_a_softmax_before_the_loss_explains_a_loss_that_stays():
    (cause,) = Criterion().check(
        StepRecord(0, 0.0, {}, CATALOG, model=ModelState((True,), bounded="log_softmax of softmax"))
    )
    stays = Finding("chance_level", Severity.WARNING, 99, 99, None, None, 3.0, 3.0, "stays", "")
    (head,) = headlines([cause, stays])
    assert (head.rule, head.explained) == ("criterion", (stays,))
