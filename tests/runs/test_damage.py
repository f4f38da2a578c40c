"""Files of a run that are damaged, exchanged or put back: no value is read differently, and all are named."""

from __future__ import annotations

import collections
import json
import math
import random
import shutil
import signal
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("typer")

from conftest import PROFILE
from gradiometer.cli import main
from gradiometer.rules.finding import Finding, Severity
from gradiometer.runs import RankBlackbox, RunError, open_segment, read_run, verify
from support.synthetic_run import (
    edit_info,
    flip_bit,
    make_catalog,
    make_records,
    open_run,
    seal,
    unsealed,
    write_run,
)

pq = pytest.importorskip("pyarrow.parquet")

MUTATIONS = 2000 if PROFILE == "deep" else 27
SEGMENT = 8
KINDS = ("grads", "weights", "updates", "grad_exponents", "weight_exponents")
LAST_OF_KILLED = "0000012.parquet"
FOUND = [Finding("dead", Severity.WARNING, 3, 9, "grads", "blocks.0.bias", 1.0, 0.5, "dead", "look", count=4)]


def content(path):
    return {file.relative_to(path): file.read_bytes() for file in path.glob("**/*.*") if file.suffix}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A closed run of two attempts with findings and faults, and the versions that its files had before."""
    return write(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The same, whose second process was killed and has left a journal."""
    return write(tmp_path_factory.mktemp("run"), seconds=math.inf)


def write(path, seconds=0):
    catalog = make_catalog(3, KINDS)
    versions = collections.defaultdict(list)
    for first, steps in ((0, 15), (12, 14)):
        sink = open_run(path, catalog, first, segment_steps=SEGMENT, segment_seconds=seconds)
        for record in make_records(catalog, steps, first=first, nonfinite_at=5, seed=first, precision=2):
            step = record.step
            sink.write([record], FOUND if step == 10 else [])
            # a fault writes the segment
            if step in {2, 12, 18}:
                report = {"reason": "exception", "step": step, "x": math.nan}
                sink.fault(SimpleNamespace(to_dict=report.copy))
            for name, data in content(path).items():
                if data not in versions[name]:
                    versions[name].append(data)
        (sink.close if first == 0 or seconds == 0 else sink._free)()
    RankBlackbox(path, 3).fault(SimpleNamespace(to_dict=lambda: {"reason": "SIGTERM", "step": 3}))
    last = content(path)
    older = {name: [data for data in found if data != last.get(name)] for name, found in versions.items()}
    # an older run.json is that of a run that was killed; and after a kill so may be what nothing vouches for
    of_killed = {"findings.json", "blackbox.json", LAST_OF_KILLED}
    unnoticed = {"run.json"} if seconds == 0 else {"run.json"} | of_killed
    return path, {n: found for n, found in older.items() if found and not {n.name, n.name[-15:]} & unnoticed}


def flip(choose, data):
    damaged = bytearray(data)
    for _ in range(choose.randint(1, 8)):
        damaged[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
    return bytes(damaged)


def zero(choose, data):
    begin = choose.randrange(len(data))
    end = choose.choice([begin + 1, begin + choose.randrange(1, len(data) + 1), len(data)])
    return data[:begin] + bytes(len(data[begin:end])) + data[end:]


def truncate(choose, data):
    return data[: choose.randrange(len(data))]


def damage(choose, files, older):
    """Return how some files are damaged, and their new content by name."""
    how = choose.choice(["flip", "truncate", "zero", "swap", "duplicate", "new name", "older"])
    # half of the time a JSON file or the journal, of which there are fewer
    some = choose.choice([sorted(files), sorted([name for name in files if name.suffix != ".parquet"])])
    one, other = choose.choice(some), choose.choice(sorted(files))
    if how in {"flip", "truncate", "zero"}:
        return how, {one: {"flip": flip, "truncate": truncate, "zero": zero}[how](choose, files[one])}
    if how == "swap":
        return how, {one: files[other], other: files[one]}
    if how == "duplicate":
        return how, {one: files[other]}
    if how == "new name":
        one = choose.choice(sorted([name for name in files if name.suffix == ".parquet"]))
        attempt, first = choose.randint(1, 2), choose.randint(0, 30)
        made = {one.with_name(f"{one.parent}-{attempt:04d}-{first:010d}.parquet"): files[one]}
        if choose.random() < 0.5:  # another file of the segment, too
            twin = "steps" if one.parent.name != "steps" else "tensors"
            at = one.parents[1] / twin
            of = at / one.name.replace(one.parent.name, twin)
            made[at / f"{twin}-{attempt:04d}-{first:010d}.parquet"] = files[of]
        return how, made
    one = choose.choice(sorted(older))
    made = {one: choose.choice(older[one])}
    if one.suffix == ".parquet" and choose.random() < 0.5:  # of another file of the segment, too
        twin = "steps" if one.parent.name != "steps" else choose.choice(["tensors", "pairs"])
        of = one.parents[1] / twin / one.name.replace(one.parent.name, twin)
        made[of] = choose.choice(older[of])
    return how, made


PARTS = {
    "info": lambda run: run.info,
    "catalog": lambda run: run.catalog,
    "steps": lambda run: run.steps.to_pylist(),
    "tensors": lambda run: run.tensors().to_pylist(),
    "some": lambda run: run.tensors(first=5, last=9, kind="grads", names="blocks.0.bias").to_pylist(),
    "pairs": lambda run: run.table("pairs").to_pylist(),
    "exponents": lambda run: [
        (step, stats.names, stats.columns.tolist()) for step, stats in run.precisions("weights", first=3)
    ],
    "matrix": lambda run: [x.tolist() if hasattr(x, "tolist") else x for x in run.matrix("rms", "weights")],
    "records": lambda run: [
        (r.step, r.scalars, {name: table.values.tolist() for name, table in r.tables.items()})
        for r in run.records()
    ],
    "findings": lambda run: run.findings,
    "blackbox": lambda run: run.blackbox,
}


def page(path):
    from gradiometer.web import write_page

    return write_page(path, path.with_suffix(".html")).read_text()


@contextmanager
def no_hang():
    if not hasattr(signal, "SIGALRM"):
        yield
        return

    def stop(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(120)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def answers(own, commands, show):
    """Return what all parts of a run are, what the commands show, and the page."""
    parts = {name: repr(part(read_run(own))) for name, part in PARTS.items()}
    return parts, [show(words) for words in commands], page(own)


@pytest.mark.parametrize("state", ["written", "killed"])
def test_no_damage_is_read_as_other_values(state, request, tmp_path, capsys):
    path, older = request.getfixturevalue(state)
    files = content(path)
    own = tmp_path / "own"
    shutil.copytree(path, own)
    choose = random.Random(None if PROFILE == "deep" else 0)  # noqa: S311
    commands = [["show", "--json"], ["show", "--step", "3", "--json"], ["watch", "--once", "--json"]]
    assert main(["verify", str(own)]) == 0
    capsys.readouterr()

    def show(words):
        code = main([words[0], str(own), *words[1:]])
        out = capsys.readouterr().out
        # an age depends on the time
        return code, [{k: v for k, v in json.loads(x).items() if k != "age"} for x in [out] if out]

    rows = {row["step"]: repr(row) for row in read_run(own).steps.to_pylist()}
    (journal,) = [name for name in files if name.suffix == ".bin"] or [None]
    # a journal may end after each batch, as if the process had been killed earlier
    versions = [files[journal], *older[journal], b""] if journal else [b""]
    expected = []
    for data in versions:
        if journal:
            (own / journal).write_bytes(data)
        expected.append(answers(own, commands, show))
    if journal:
        assert len(expected) > 3
        (own / journal).write_bytes(files[journal])
    counts = collections.Counter()
    for i in range(MUTATIONS):
        how, changed = damage(choose, files, older)
        changed = {name: data for name, data in changed.items() if files.get(name) != data}
        where = f"{how} {', '.join(map(str, changed))}"
        for name, data in changed.items():
            (own / name).write_bytes(data)
        found = {}
        with no_hang():
            try:
                found["whole"] = verify(own).whole
            except RunError:
                found["whole"] = False
            run = None
            for name, part in PARTS.items():
                try:
                    run = run or read_run(own)
                    value = repr(part(run))
                except RunError as error:
                    found[name] = str(error)
                else:
                    may_end = journal in changed
                    fits = [value == parts[name] for parts, _, _ in (expected if may_end else expected[:1])]
                    assert any(fits), f"{where}: {name}"
            try:
                kept = read_run(own, skip_damaged=True)
                some = {row["step"]: repr(row) for row in kept.steps.to_pylist()}
                assert some.items() <= rows.items(), where
                assert repr(kept.findings) in {expected[0][0]["findings"], "[]"}, where
            except RunError:
                assert "info" in found, where
            if i % 3 == 0:
                counts["through the CLI"] += 1
                assert main(["verify", str(own)]) == (0 if found["whole"] else 1), where
                capsys.readouterr()
                command = i // 3 % 3
                said = show(commands[command])
                fits = [shown[command] for _, shown, _ in (expected if journal in changed else expected[:1])]
                assert said in [*fits, (3, [])], where
            if i % 9 == 0:
                counts["through the page"] += 1
                try:
                    pages = [text for _, _, text in (expected if journal in changed else expected[:1])]
                    assert page(own) in pages, where
                except RunError as error:
                    found["page"] = str(error)
        counts[how] += 1
        counts["noticed"] += not found["whole"]
        # damage that no value depends on is noticed too, except for white space in JSON
        assert not found["whole"] or len(found) == 1, where
        assert not any("\n" in str(error) for error in found.values()), where
        ends = how in {"truncate", "zero", "older"} and all([name.suffix == ".bin" for name in changed])
        assert not found["whole"] or not changed or how == "flip" or ends, where
        assert not found["whole"] or not [x for x in changed if x.suffix == ".parquet"], where
        assert not found["whole"] or how != "flip" or journal not in changed, where
        for name in changed:
            if name in files:
                (own / name).write_bytes(files[name])
            else:
                (own / name).unlink()
    with capsys.disabled():
        said = f"damaged runs ({state}), none read as other values: {dict(sorted(counts.items()))}"
        print(f"\n{MUTATIONS} {said}")  # noqa: T201
    assert content(own) == files


def test_a_file_that_is_damaged_is_named_and_the_rest_is_read(written, tmp_path, capsys, caplog, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    own = tmp_path / "own"
    shutil.copytree(written[0], own)
    steps = own / "steps" / "steps-0001-0000000008.parquet"
    steps.write_bytes(flip(random.Random(0), steps.read_bytes()))  # noqa: S311
    (own / "findings.json").unlink()
    run = read_run(own)
    assert len(list(run.records(0, 7))) == 8
    said = r"08.parquet cannot be read \(.*digest\): .*skip_damaged=True"
    with pytest.raises(RunError, match=said) as caught:
        run.steps  # noqa: B018
    rest = read_run(own, skip_damaged=True)
    assert rest.damaged == {"steps/steps-0001-0000000008.parquet": str(caught.value)}
    assert rest.steps["step"].to_pylist() == [*range(8), *range(12, 26)]
    assert rest.matrix("norm")[0] == rest.steps["step"].to_pylist()
    assert not rest.refresh()
    assert caplog.text.count("left out: ") == 1
    assert main(["verify", str(own)]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "own: 19 files whole, 1 damaged, 1 missing" in out
    assert "damaged steps/steps-0001-0000000008.parquet its content does not match its digest" in out
    assert "missing findings.json" in out
    assert main(["verify", str(own), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["whole"] is False


def test_a_writer_that_was_killed_between_two_files_leaves_a_whole_run(tmp_path, monkeypatch):
    catalog = make_catalog(2)
    records = list(make_records(catalog, 20))
    sink = open_run(tmp_path, catalog, segment_steps=8, segment_seconds=0)
    real = open_segment.prepare

    def killed(run, path, data, *, sync):
        put = real(run, path, data, sync=sync)

        def dying():
            raise KeyboardInterrupt

        return dying if path.parent.name == "steps" else put

    sink.write(records[:3], [])
    monkeypatch.setattr(open_segment, "prepare", killed)
    with pytest.raises(KeyboardInterrupt):
        sink.write(records[3:5], [])
    monkeypatch.undo()
    assert verify(tmp_path).whole
    assert read_run(tmp_path).tensors().num_rows == 3 * 2
    # the process goes on, as after a failure of the disk, and another one continues the run
    sink.write(records[5:20], [])
    assert verify(tmp_path).whole
    sink._free()
    run = read_run(write_run(tmp_path, 2, 4, first=20))
    assert run.steps.num_rows == 24
    assert verify(tmp_path).whole
    (tmp_path / "steps" / "steps-0001-0000000008.parquet").unlink()
    missing = verify(tmp_path).of("missing")
    assert [file.name for file in missing] == ["steps/steps-0001-0000000008.parquet"]


def test_a_file_without_a_digest_is_damaged_and_pages_are_checked(tmp_path):
    path = write_run(tmp_path, 3, 20, segment_steps=8)
    edit_info(path)
    found = verify(path)
    assert found.whole
    assert [file.name for file in found.of("no digest")] == ["run.json"]
    file = path / "steps" / "steps-0001-0000000008.parquet"
    sealed = file.read_bytes()
    file.write_bytes(unsealed(file))
    with pytest.raises(RunError, match="its digest is missing"):
        read_run(path).steps  # noqa: B018
    assert [x.name for x in verify(path).of("damaged")] == [f"steps/{file.name}"]
    file.write_bytes(sealed)
    (column,) = [c for c in columns(file) if c.path_in_schema == "loss"]
    flip_bit(file, column.data_page_offset + column.total_compressed_size - 1)
    seal(path)
    with pytest.raises(RunError, match="CRC"):
        read_run(path).steps  # noqa: B018


def columns(file):
    group = pq.ParquetFile(file).metadata.row_group(0)
    return [group.column(i) for i in range(group.num_columns)]


def test_a_run_with_damaged_findings_goes_on_and_keeps_the_file(written, tmp_path, caplog):
    own = tmp_path / "own"
    shutil.copytree(written[0], own)
    damaged = flip(random.Random(0), (own / "findings.json").read_bytes())  # noqa: S311
    (own / "findings.json").write_bytes(damaged)
    write_run(own, 3, 4, first=26)
    (kept,) = own.glob("findings-damaged-*.json")
    assert kept.read_bytes() == damaged
    assert "goes on without earlier findings" in caplog.text
    assert read_run(own).findings == []
    assert verify(own).whole
