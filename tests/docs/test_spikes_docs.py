"""The experiment of a raised learning rate runs, and its definition of a departure is what the page says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from support.pages import load

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def spikes() -> Any:
    return load("spikes.py")


def test_a_short_experiment(
    spikes: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name, value in (("STEPS", 30), ("RAISED", 24), ("WARMUP", 2), ("BASELINE", 8), ("BATCH", 2)):
        monkeypatch.setattr(spikes, name, value)
    text = spikes.corpus(2**18)
    runs = {clip: [spikes.train(0, clip, text)] for clip in spikes.CLIPS}
    for steps in runs.values():
        assert len(steps[0]) == 30
        raised = steps[0][24].update_norm / steps[0][23].update_norm
        # the learning rate becomes eight times as high; the direction changes little in one step
        assert 4.0 < raised < 16.0
    assert all(step.clipped == 0.0 for step in runs["none"][0])
    assert any(step.clipped > 0.0 for step in runs["WeightNormClip"][0])
    spikes.tell(runs)
    told = capsys.readouterr().out
    assert all(signal in told for signal in spikes.SIGNALS)
    assert all(clip in told for clip in spikes.CLIPS)
    pytest.importorskip("matplotlib")
    spikes.draw(runs, tmp_path / "picture.svg")
    assert "WeightNormClip" in (tmp_path / "picture.svg").read_text()


def test_a_departure_takes_two_values_in_a_row(spikes: Any) -> None:
    past = [1.0, 1.1] * (spikes.RAISED // 2)
    assert spikes.departure([*past, 1.0, 9.0, 1.0, 9.0, 9.0, 1.0]) == 3
    assert spikes.departure([*past, 1.0, 9.0, 1.0, 1.2, 1.2]) is None
