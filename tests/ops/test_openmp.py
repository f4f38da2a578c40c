"""Operators limited to one thread, and work distributed over several threads."""

from __future__ import annotations

import subprocess
import sys
import threading
from itertools import count

import pytest
import torch

from gradiometer.columns import DEFAULT_THRESHOLDS
from gradiometer.ops import openmp, reference, streaming

needs_openmp = pytest.mark.skipif(not openmp.can_run_alone(), reason="no controllable OpenMP")


@needs_openmp
def test_one_thread_holds_for_the_calling_thread_and_until_its_end(number_of_threads):
    number_of_threads(2)
    seen = {}

    def look():
        seen["another"] = torch.get_num_threads()

    with openmp.one_thread():
        seen["inside"] = torch.get_num_threads()
        other = threading.Thread(target=look)
        other.start()
        other.join()
    with pytest.raises(ZeroDivisionError), openmp.one_thread():
        raise ZeroDivisionError
    assert seen == {"inside": 1, "another": 2}
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_come_in_the_order_of_the_items_whoever_made_them(threads):
    made_by = set()

    def start():
        def square(item):
            made_by.add(threading.get_ident())
            assert not torch.is_grad_enabled()
            return item * item

        return square

    assert openmp.map_on_threads(start, range(300), threads) == [i * i for i in range(300)]
    assert openmp.map_on_threads(start, [], threads) == []
    assert 1 <= len(made_by) <= 2 * threads


@pytest.mark.parametrize("threads", [1, 3])
def test_what_fails_is_raised_where_it_was_called_and_ends_the_others(threads):
    taken = count()

    def fail(item):
        next(taken)
        if item == 3:
            raise ZeroDivisionError
        return item

    before = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        openmp.map_on_threads(lambda: fail, count(), threads)
    assert threading.active_count() == before
    assert next(taken) >= 4


def test_threads_that_cannot_start_are_done_without(monkeypatch):
    def refuse(_):
        message = "can't start new thread"
        raise RuntimeError(message)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert openmp.map_on_threads(lambda: abs, [-1, -2], 4) == [1, 2]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_number_of_threads_changes_no_bit(dtype, number_of_threads):
    x = torch.randn(3 * streaming.WORTH_A_THREAD + 5).to(dtype)
    x[::1001] = 0
    x[streaming.PIECE + 1] = torch.nan
    rows = []
    for threads in (1, 2, 4):
        number_of_threads(threads)
        rows.append(reference.tensor_stats([x, x[:70_000]], DEFAULT_THRESHOLDS)[0].tolist())
        assert torch.get_num_threads() == threads
    assert rows[0] == rows[1] == rows[2]


WITHOUT_OPENMP = """
import ctypes
import torch
from gradiometer.ops import openmp, reference, streaming
from gradiometer.columns import DEFAULT_THRESHOLDS

class Nothing:
    def __init__(self, name):
        pass

ctypes.CDLL = Nothing
assert not openmp.can_run_alone()
x = torch.ones(3 * streaming.WORTH_A_THREAD)
rows = []
for threads in (1, 2, 4):
    torch.set_num_threads(threads)
    rows.append(reference.tensor_stats([x], DEFAULT_THRESHOLDS)[0].tolist())
assert rows[0] == rows[1] == rows[2]
assert rows[0][0][:4] == [len(x), len(x), len(x), 0]
"""


def test_a_torch_whose_threads_cannot_be_set_gives_the_same_bits_with_any_number():
    subprocess.run([sys.executable, "-c", WITHOUT_OPENMP], check=True)


def test_inference_mode_reads_tensors_of_either_kind():
    outside = torch.randn(2 * streaming.WORTH_A_THREAD)
    with torch.inference_mode():
        inside = outside.clone()
        rows = reference.tensor_stats([outside, inside], DEFAULT_THRESHOLDS)[0].tolist()
    assert rows == reference.tensor_stats([inside, outside], DEFAULT_THRESHOLDS)[0].tolist()
