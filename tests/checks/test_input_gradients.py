import pytest
import torch
from torch import nn
from torch.nn import functional

from gradiometer.checks import check_model

torch.set_num_threads(1)
TOKENS = torch.randint(0, 20, (3, 8), generator=torch.Generator().manual_seed(0))
KEPT = torch.arange(8) < torch.tensor([8, 6, 5])[:, None]
PIXELS = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def result(model, batch=TOKENS, **options):
    return check_model(model, batch, only=["input_gradients"], **options)["input_gradients"]


class Language(nn.Module):
    """Embeddings and one layer of attention."""

    causal = True

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, tokens, mask=None):
        x = self.embed(tokens)
        return self.head(x + self.attend(self.query(x), self.key(x), self.value(x), mask))

    def embed(self, tokens):
        return self.table(tokens)

    def attend(self, q, k, v, mask):
        allowed = self.allowed(q.shape[1])
        if mask is not None:
            allowed = allowed & mask[:, None, :]
        return functional.scaled_dot_product_attention(q, k, v, allowed)

    def allowed(self, length):
        square = torch.ones(length, length, dtype=torch.bool)
        return square.tril() if self.causal else square


class Window(Language):
    def allowed(self, length):
        return super().allowed(length).triu(-1)


class Encoder(Language):
    causal = False


class Table(Language):
    def embed(self, tokens):
        return self.table.weight[tokens]


class Functional(Language):
    def embed(self, tokens):
        x = functional.embedding(tokens.flatten(), self.table.weight).unflatten(0, tokens.shape)
        x += 1.0
        return x


class Frozen(Language):
    def __init__(self):
        super().__init__()
        self.table.requires_grad_(False)

    def embed(self, tokens):
        x = self.table(tokens)
        x *= 2.0
        return x


class Pooled(Encoder):
    def forward(self, tokens, mask=None):
        return super().forward(tokens, mask)[:, 0]


class Transposed(Encoder):
    def embed(self, tokens):
        return self.table(tokens.T.contiguous()).transpose(0, 1)


class ZeroHead(Pooled):
    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.head.weight)


class OnlyItself(Language):
    def allowed(self, length):
        return torch.eye(length, dtype=torch.bool)


class NoThird(Language):
    def allowed(self, length):
        allowed = super().allowed(length)
        allowed[:, 3] = False
        allowed[3, 3] = True
        return allowed


class FirstExample(Language):
    def attend(self, q, k, v, mask):
        y = super().attend(q, k, v, mask)
        return torch.cat([y[:1], torch.zeros_like(y[1:])])


class Half(Pooled):
    def forward(self, tokens, mask=None):
        return super().forward(tokens[:, : tokens.shape[1] // 2], mask)


class DetachedEmbedding(Language):
    def embed(self, tokens):
        return super().embed(tokens).detach()


class TiedDetached(DetachedEmbedding):
    def __init__(self):
        super().__init__()
        self.head.weight = self.table.weight


class Images(nn.Module):
    def __init__(self, *, channels=3, height=8, stride=2, size=3, frozen=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Conv2d(channels, 16, size, stride, padding=size // 2), nn.Linear(16, 3)
        self.channels, self.height = channels, height
        self.frozen = frozen
        self.first.requires_grad_(not frozen)

    def forward(self, x):
        with torch.set_grad_enabled(not self.frozen and torch.is_grad_enabled()):
            x = self.first(x[:, : self.channels, : self.height]).relu()
        return self.head(x.amax((2, 3)) + x.mean((2, 3)))


@pytest.mark.parametrize("kind", [Language, Window, Table, Functional, Frozen])
def test_it_holds_for_causal_models(kind):
    assert str(result(kind(), causal=True).status) == "holds"


@pytest.mark.parametrize("kind", [Encoder, Pooled, Transposed, ZeroHead])
def test_it_holds_for_encoders(kind):
    batch = {"tokens": TOKENS, "mask": KEPT}
    assert str(result(kind(), batch, causal=False).status) == "holds"


@pytest.mark.parametrize(
    ("kind", "causal", "text"),
    [
        (OnlyItself, True, "no token of tokens gets a gradient from outputs at later positions"),
        (NoThird, True, "3 of 21 tokens of tokens get no gradient, such as token 3 of example 0"),
        (FirstExample, True, "no token of example 1, 2 of tokens gets a gradient"),
        (DetachedEmbedding, True, "no token of tokens gets a gradient"),
        (TiedDetached, True, "no token of tokens gets a gradient"),
        (Half, False, "12 of 24 tokens of tokens get no gradient, such as token 4 of example 0"),
    ],
)
def test_it_names_tokens_without_a_gradient(kind, causal, text):
    found = result(kind(), causal=causal)
    assert found.is_failure
    assert found.text == text


def test_recurrent_layers_have_a_backward():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.body = nn.Embedding(20, 4), nn.LSTM(4, 4, batch_first=True)

        def forward(self, tokens):
            return self.body(self.table(tokens))[0]

    assert str(result(Recurrent(), causal=True).status) == "holds"


def test_pixels():
    assert str(result(Images(), PIXELS).status) == "holds"
    assert str(result(Images().to(torch.bfloat16), PIXELS.bfloat16()).status) == "holds"
    assert result(Images(channels=2), PIXELS).text == "channel 2 of x gets no gradient in any example"
    broken = result(Images(height=4), PIXELS)
    assert broken.is_failure
    assert broken.text.startswith(
        "96 of 192 values of an example of x get no gradient, such as that at (0, 4, 0)"
    )


def test_the_rest_of_an_image_beside_whole_patches_is_only_noted():
    found = result(Images(stride=4, size=3), torch.randn(4, 3, 11, 11))
    model = Images(stride=4, size=4)
    model.first.padding = (0, 0)
    margin = result(model, torch.randn(4, 3, 10, 10))
    assert not margin.is_failure
    assert margin.text.startswith("108 of 300 values")
    # gaps between patches are no margin
    assert found.is_failure


def test_a_frozen_part_without_a_graph_does_not_apply():
    found = result(Images(frozen=True), PIXELS)
    assert str(found.status) == "does not apply"


def test_one_token_has_no_other_positions():
    assert str(result(Language(), TOKENS[:, :1], causal=True).status) == "holds"


def test_one_example():
    assert str(result(Language(), TOKENS[:1], causal=True).status) == "holds"
