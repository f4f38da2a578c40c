"""A process that has read a run ends normally: no thread of Arrow holds a Python object."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

from gradiometer.runs.journal import JournalWriter
from gradiometer.runs.reader import read_run
from gradiometer.runs.verify import verify
from gradiometer.web.page import contents
from support.processes import python
from support.synthetic_run import make_catalog, make_records, write_run

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

PROCESSES = 60 if os.environ.get("HYPOTHESIS_PROFILE") == "deep" else 20
READ = "import sys, gradiometer as gm; run = gm.read_run(sys.argv[1]); "
# the last statement, because a thread may still release what it has read when the interpreter exits
LAST = ("run.steps", "run.tensors(first=3)")
FILTERED = """
import os, torch
torch.set_num_threads(1)  # only Arrow's threads are counted
run.steps
before = len(os.listdir("/proc/self/task"))
rows = run.tensors(kind="grads", first=3)
print(len(rows), len(os.listdir("/proc/self/task")) - before)
"""


def read(code, path):
    return python("-W", "ignore", "-c", READ + code, path)


def test_processes_that_end_after_a_read_exit_with_0(tmp_path):
    path = write_run(tmp_path / "run", 20, 200)
    with ThreadPoolExecutor(3) as pool:
        codes = [LAST[i % len(LAST)] for i in range(PROCESSES)]
        found = list(pool.map(lambda code: read(code, path), codes))
    assert [(x.returncode, x.stderr) for x in found if x.returncode] == []


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="Linux lists the threads of a process")
def test_rows_of_a_journal_are_filtered_without_threads(tmp_path):
    # they are in the memory of tensors, which Arrow's threads would release
    path = write_run(tmp_path / "run", 4, 8, close=False)
    for file in path.glob("*/*.parquet"):
        file.unlink()
    journal = JournalWriter(path, 1, 0, make_catalog(4))
    journal.append(list(make_records(make_catalog(4), 8)))
    journal.close(remove=False)
    found = read(FILTERED, path)
    assert (found.returncode, found.stdout.split()) == (0, ["20", "0"]), found.stderr


def test_arrow_reads_and_writes_only_memory_that_it_has_allocated(tmp_path, monkeypatch):
    allocated, sources = set(), []

    def allocate(size, made=pa.allocate_buffer):
        buffer = made(size)
        allocated.add(buffer.address)
        return buffer

    def reader(buffer, made=pa.BufferReader):
        assert type(buffer) is pa.Buffer
        assert buffer.address in allocated
        return made(buffer)

    def watched(call, place):
        def spy(*args, **kwargs):
            sources.append(type(args[place]))
            return call(*args, **kwargs)

        return spy

    monkeypatch.setattr(pa, "allocate_buffer", allocate)
    kind, writer = pa.BufferReader, pa.BufferOutputStream
    monkeypatch.setattr(pa, "BufferReader", reader)
    for name in ("ParquetFile", "ParquetDataset", "read_table", "read_metadata", "read_schema"):
        monkeypatch.setattr(pq, name, watched(getattr(pq, name), 0))
    monkeypatch.setattr(pq, "write_table", watched(pq.write_table, 1))
    path = write_run(tmp_path / "run", 4, 8, fingerprint=True)
    assert {*sources} == {writer}
    sources.clear()
    run = read_run(path)
    assert len(run.steps) == 8
    assert len(run.tensors(kind="grads", first=3)) == 20
    assert len(run.matrix("norm", last=4)[0]) == 5
    assert len(list(run.records())) == 8
    assert verify(path).whole
    contents([run])
    assert {*sources} == {kind}
