"""TensorBoard: values read back from the event file."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from gradiometer.rules.fault import Fault
from gradiometer.sinks import Selection, TensorBoard
from gradiometer.sinks.protocol import Sink
from support.findings import finding
from support.synthetic_run import make_catalog, make_info, make_records

pytest.importorskip("tensorboard")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

CATALOG = make_catalog(6)
SEEN = finding(tensor="a__b_.w", advice="do this")


def opened(folder, catalog=CATALOG, **options):
    sink = TensorBoard(folder, **options)
    assert isinstance(sink, Sink)
    sink.start(make_info(catalog))
    return sink


def read(folder):
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def test_scalars_are_read_back_with_their_steps_and_times(tmp_path):
    steps = list(make_records(CATALOG, 20))
    sink = opened(tmp_path / "run", tensors=r"0\.w", every=5)
    sink.write(steps[:10], [])
    sink.write(steps[10:], [])
    # before it is closed
    found = read(tmp_path / "run")
    taken = [record for record in steps if record.step % 5 == 0]
    selection = Selection(tensors=r"0\.w")
    assert sorted(found.Tags()["scalars"]) == sorted(selection.values(steps[0]))
    for tag in found.Tags()["scalars"]:
        for event, record in zip(found.Scalars(tag), taken, strict=True):
            assert (event.step, event.wall_time) == (record.step, record.time)
            assert event.value == pytest.approx(selection.values(record)[tag], rel=2**-24)
    sink.close()
    assert len(list((tmp_path / "run").iterdir())) == 1


def test_what_is_not_finite_stays_so(tmp_path):
    steps = list(make_records(CATALOG, 2, nonfinite_at=0))
    steps[1].scalars["big"] = 1e300
    sink = opened(tmp_path, tensors="")
    sink.write(steps, [])
    sink.close()
    found = read(tmp_path)
    assert math.isnan(found.Scalars("grads/total_norm")[0].value)
    assert found.Scalars("grads/blocks.0.bias/norm")[0].value == math.inf
    # the event file stores float32, as the page says
    assert found.Scalars("train/big")[0].value == math.inf


def test_names_are_tags_as_they_are_and_half_of_a_surrogate_pair_is_its_number(tmp_path):
    names = ["a b<c>[0]", "ü/中", "x" * 300, "a:b//c#d"]
    catalog = make_catalog(names=[*names, "w\ud800"])
    sink = opened(tmp_path, catalog, tensors="")
    sink.write(list(make_records(catalog, 2)), [])
    sink.close()
    found = read(tmp_path).Tags()["scalars"]
    assert {f"grads/{name}/norm" for name in [*names, r"w\ud800"]} <= {*found}


def test_findings_and_a_fault_are_text(tmp_path):
    steps = list(make_records(CATALOG, 6))
    sink = opened(tmp_path)
    sink.write(steps[:4], [SEEN])
    sink.write(steps[4:], [SEEN])
    sink.fault(Fault("exception", "boom", 6, "step 5, a.w.grad", [SEEN], steps))
    # a fault is on disk before anything is closed
    found = read(tmp_path)
    (finding,) = found.Tensors("gradiometer/findings")
    (text,) = finding.tensor_proto.string_val
    # indented as code, so that Markdown does not interpret the underscores of a name
    assert (finding.step, text.decode()) == (3, f"    {SEEN}\n    do this")
    (fault,) = found.Tensors("gradiometer/fault")
    said = "    exception in step 6: boom; first non-finite: step 5, a.w.grad"
    assert fault.tensor_proto.string_val[0].decode() == said
    assert found.summary_metadata["gradiometer/fault"].plugin_data.plugin_name == "text"
    sink.close()


def test_an_error_of_the_writer_comes_out_of_write(tmp_path, monkeypatch):
    sink = opened(tmp_path)
    steps = list(make_records(CATALOG, 2))
    sink.write(steps[:1], [])

    def full():
        raise OSError(28, "No space left on device")

    # restored afterwards: a thread of the writer flushes periodically
    with monkeypatch.context() as patch:
        patch.setattr(sink._writer._async_writer._writer, "flush", full)
        with pytest.raises(OSError, match="No space left"):
            sink.write(steps[1:], [])


def test_a_folder_that_cannot_be_made_raises(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        opened(Path(tmp_path) / "file" / "run")


def test_closing_without_a_start_is_no_error(tmp_path):
    TensorBoard(tmp_path).close()
