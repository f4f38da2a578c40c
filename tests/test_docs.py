"""The code in README.md and docs/ runs as it stands there."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import torch

import gradiometer as gm

ROOT = Path(__file__).parent.parent


def blocks(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def _eager_backend(monkeypatch):
    # what is shown does not depend on the backend, and this one compiles in a second
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        yield
    torch._dynamo.reset()


def test_the_readme_runs_and_says_what_it_prints(capsys):
    step, loop, more, instead = blocks("README.md")
    scope: dict[str, object] = {}
    exec(step, scope)  # noqa: S102 the page's own code
    assert "0.weight" in capsys.readouterr().out
    assert scope["report"].names == ("0.weight", "0.bias", "2.weight", "2.bias")
    exec(loop, scope)  # noqa: S102
    assert scope["report"].measured
    # the loop ends with zero_grad
    scope["model"](torch.randn(32, 64)).square().mean().backward()
    capsys.readouterr()
    exec(instead, scope)  # noqa: S102
    assert "all finite: loss" in capsys.readouterr().out
    assert scope["drift"].item() == 0.0
    assert gm.grad_norm(scope["model"]) <= 1.0
    pytest.importorskip("pandas")
    for line in more.splitlines():
        code, _, comment = line.partition("#")
        value = eval(code, scope)  # noqa: S307
        if comment.strip().startswith("tensor("):
            assert str(value) == comment.strip()


def test_every_way_to_compile_a_step_runs():
    blocks_of_page = blocks("docs/compile.md")
    assert len(blocks_of_page) == 4
    model = torch.nn.Linear(4, 2)
    x, y = torch.randn(8, 4), torch.randn(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope = {"model": model, "loss_fn": torch.nn.functional.mse_loss, "lr": 0.1, "torch": torch, "gm": gm}
    scope |= {"x": x, "y": y, "optimizer": optimizer}

    exec(blocks_of_page[0], scope)  # noqa: S102
    losses = [scope["step"](x, y)[0].item() for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    assert scope["step"](x, y)[1].names == ("weight", "bias")

    before = model.weight.detach().clone()
    exec(blocks_of_page[1], scope)  # noqa: S102
    assert scope["stats"].names == ("weight", "bias")
    assert not torch.equal(model.weight, before)

    exec(blocks_of_page[2], scope)  # noqa: S102
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    _, stats = scope["step"](params, x, y)
    torch.nn.functional.mse_loss(model(x), y).backward()
    assert torch.equal(stats.columns, gm.collect_grads(model).columns)

    exec(blocks_of_page[3], scope)  # noqa: S102
    assert torch.equal(scope["update"]().columns, stats.columns)
