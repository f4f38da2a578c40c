"""What ranks tell each other through the store: JSON, which runs nothing when it is read."""

from __future__ import annotations

import json
import pickle
import threading
import zlib
from pathlib import Path

import pytest
from torch.distributed import HashStore

import gradiometer as gm
from gradiometer.distributed.rendezvous import exchange


def test_ranks_get_the_texts_of_all_and_the_store_is_left_empty():
    store, found = HashStore(), {}

    def run(rank):
        found[rank] = exchange(store, "key", rank, [3, 5], json.dumps([rank, "a\\udc80"]), 10.0)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[3] == found[5] == ([], [json.dumps([rank, "a\\udc80"]) for rank in (3, 5)])
    assert store.num_keys() == 0


def test_a_rank_that_does_not_come_is_missing():
    assert exchange(HashStore(), "key", 0, [0, 1], "null", 0.01) == ([1], [])


class Runs:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_nothing_that_another_process_wrote_is_run(tmp_path):
    path = tmp_path / "ran"
    evil = pickle.dumps(Runs(path))
    for outcome in (evil, zlib.compress(evil), zlib.compress(b"[1]"), zlib.compress(b"\xff")):
        store = HashStore()
        store.set("key/outcome", outcome)
        with pytest.raises(gm.RankError, match="use the same version of gradiometer on all ranks"):
            exchange(store, "key", 0, [0, 1], "null", 1.0)
        assert not path.exists()
    pickle.loads(evil)  # noqa: S301 which this shows to be dangerous
    assert path.exists()


def test_a_rank_that_exited_while_it_gathered_the_values_is_named(monkeypatch):
    monkeypatch.setitem(exchange.__globals__, "SLACK", 0.1)
    store = HashStore()
    store.set("meeting/1", "mine")
    store.add("meeting/count", 1)
    store.set("meeting/decided", "1")
    with pytest.raises(gm.RankError, match=r"^rank 1 exited while it gathered the values of all ranks"):
        exchange(store, "meeting", 0, [0, 1], "mine", 0.1)
