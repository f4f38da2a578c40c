"""The code in README.md and docs/ runs unchanged."""

from __future__ import annotations

import copy
import re
import tomllib

import pytest
import torch

import gradiometer as gm
from support.pages import ROOT, blocks, close, execute, text

pytestmark = pytest.mark.usefixtures("_eager_backend")


def undecorated(code):
    return code.replace("@torch.compile(fullgraph=True)\n", "")


def test_the_readme_runs_and_says_what_it_prints(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("pyarrow")
    watched, asked, checked, collected, step, updated, inside, bits, ranks = blocks("README.md")
    scope = execute(watched)
    assert "no findings" in capsys.readouterr().out
    losses = gm.read_run("runs/first").steps["loss"].to_pylist()
    assert len(losses) == 100
    assert losses[-1] < losses[0]
    assert scope["monitor"].failures == {}
    exec(asked, scope)  # noqa: S102
    assert capsys.readouterr().out.startswith("23 contracts: ")
    assert scope["report"], str(scope["report"])
    exec(checked, scope)  # noqa: S102
    assert capsys.readouterr().out.startswith("agrees with eager mode: ")
    exec(collected, scope)  # noqa: S102
    assert "4 tensors, 16,897 elements" in capsys.readouterr().out
    # eager mode gives the same result
    eager = copy.deepcopy({name: scope[name] for name in ("model", "batches")}) | {"torch": torch, "gm": gm}
    exec(undecorated(step), eager)  # noqa: S102
    exec(step, scope)  # noqa: S102
    assert all(p.grad is None for p in scope["model"].parameters())
    assert close(str(scope["report"]), str(eager["report"]))
    exec(updated, scope)  # noqa: S102
    assert "cos(u,-g)" in capsys.readouterr().out
    assert (scope["updates"].descent_cosine > 0).all()
    exec(inside, scope)  # noqa: S102
    assert "dead channels" in capsys.readouterr().out
    assert (scope["found"].operation, scope["found"].direction) == ("aten.log", "forward")
    scope["taps"].remove()
    exec(bits, scope)  # noqa: S102
    digits = capsys.readouterr().out.strip()
    assert re.fullmatch("[0-9a-f]{32}", digits)
    assert scope["saved"]["0.weight"] == f"float32 (256, 64) {digits}"
    # the loop ends with zero_grad
    scope["model"](torch.randn(32, 64)).square().mean().backward()
    exec(ranks, scope)  # noqa: S102
    assert scope["stats"].is_reduced
    assert scope["ranks"].size == 1


def test_readme_home_page_and_tutorial_begin_alike():
    begins = []
    for page in ("README.md", "docs/index.md", "docs/tutorial.md"):
        introduction, fence, rest = text(page).partition("```python\n")
        assert introduction.startswith("# ")
        assert len(introduction.splitlines()) <= 5
        lines, *_ = rest.split("\n## ")
        begins.append((fence + lines).replace("](docs/", "]("))
    assert begins[0] == begins[1] == begins[2]
    *code, command, picture = begins[0].strip().split("\n\n")
    assert "with gm.watch(" in "".join(code)
    assert command.startswith("```sh\ngradiometer report runs/first ")
    assert re.fullmatch(r"!\[The page of a run.*\]\(reference/report-page\.png\)", picture)


def test_the_page_on_statistics_runs_and_says_what_it_prints(capsys):
    setup, *lists = blocks("docs/how-to/statistics.md")
    scope = execute(setup)
    assert "0.weight" in capsys.readouterr().out
    pytest.importorskip("pandas")
    lines = [line for line in "".join(lists).splitlines() if not line.startswith("#")]
    for line in lines:
        code, _, comment = line.partition("#")
        value = eval(code, scope)  # noqa: S307
        if comment.strip().startswith("tensor("):
            assert str(value) == comment.strip()


def test_the_page_on_activations_runs_and_says_what_it_prints(capsys):
    page = "docs/how-to/activations.md"
    for block, said in zip(blocks(page), blocks(page, "text"), strict=True):
        execute(block)["taps"].remove()
        assert capsys.readouterr().out == said


def test_of_two_norms_the_page_says_which_is_right(capsys):
    scope = execute(*blocks("docs/explanation/numerics.md"))
    assert "a model" in capsys.readouterr().out
    for name, (ours, theirs) in scope["errors"].items():
        assert ours <= 1e-13, name
        # theirs errs at least by the rounding of the result to fp32, unless that is exact by chance
        assert theirs >= ours, name


def test_every_way_to_compile_a_step_runs(tmp_path, monkeypatch):
    # two are for several ranks: see test_ranks_compile.py
    setup, first, outside, whole, functional, after, _, _, saved, loaded = blocks("docs/how-to/compile.md")
    scope = execute(setup)
    model, x, y = (scope[name] for name in ("model", "x", "y"))

    exec(first, scope)  # noqa: S102
    losses = [scope["loss"].item(), *(scope["step"](x, y)[0].item() for _ in range(3))]
    assert losses == sorted(losses, reverse=True)
    names = tuple(name for name, _ in model.named_parameters())
    assert scope["stats"].names == names

    before = model[0].weight.detach().clone()
    exec(outside, scope)  # noqa: S102
    assert scope["stats"].names == names
    assert not torch.equal(model[0].weight, before)

    check_the_whole_step(whole, scope)

    exec(functional, scope)  # noqa: S102
    expected = scope["stats"].columns
    torch.nn.functional.mse_loss(model(x), y).backward()
    assert torch.equal(expected, gm.collect_grads(model).columns)
    model.zero_grad()

    exec(after, scope)  # noqa: S102
    assert torch.equal(scope["stats"].columns, expected)

    # in a new process: see test_saved_programs.py
    monkeypatch.chdir(tmp_path)
    found = execute(saved, loaded)
    assert found["stats"].names == ("x", "y")
    assert found["taps"].n_calls.tolist() == [1, 0]


def check_the_whole_step(code, scope):
    """Run it in eager mode and compiled: one trace, the same numbers, and a step with a NaN is skipped."""
    scopes = [scope | {"model": copy.deepcopy(scope["model"])} for _ in range(2)]
    for own, written in zip(scopes, (undecorated(code), code), strict=True):
        own["model"].zero_grad()
        exec(written, own)  # noqa: S102
        assert own["found"]["updated"].item()
    batches = [(torch.randn(32, 16), torch.randn(32, 1)) for _ in range(4)]
    batches[2][0][0, 0] = float("nan")
    for i, (x, y) in enumerate(batches):
        bound = torch.tensor(0.1 * (i + 1))
        with torch._dynamo.config.patch(error_on_recompile=True):
            (a, eager), (b, compiled) = (own["step"](x, y, bound) for own in scopes)
        torch.testing.assert_close(a, b, equal_nan=True)
        torch.testing.assert_close(eager["grads"].norm, compiled["grads"].norm, equal_nan=True)
        torch.testing.assert_close(eager["norm"], compiled["norm"])
        assert eager["updated"].item() == compiled["updated"].item() == (i != 2)
    for p, q in zip(*(own["model"].parameters() for own in scopes), strict=True):
        torch.testing.assert_close(p, q)
        assert p.isfinite().all()
        assert p.grad is q.grad is None


def test_install_lines_name_what_there_is():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    pages = {path: path.read_text("utf-8") for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]}
    lines = {path: re.findall(r"pip install '?([^'`\s]+)", page) for path, page in pages.items()}
    for path, targets in lines.items():
        for target in targets:
            name, _, extras = target.rstrip("]").partition("[")
            if name in {".", project["name"]}:
                unknown = set(filter(None, extras.split(","))) - set(project["optional-dependencies"])
                assert not unknown, (path, target)
    # until there is a release: from a clone, and what it will be
    for page in ("README.md", "docs/index.md", "docs/tutorial.md"):
        assert (
            f"git clone {project['urls']['Source']}\ncd {project['name']}\npip install '.[monitor]'"
            in pages[ROOT / page]
        )
    for page in ("README.md", "docs/index.md"):
        assert "pip install 'gradiometer[monitor]'" in pages[ROOT / page]
