"""Fingerprints of tensors: the same from every implementation, layout and call, and changed by any change.

These tests run on the eager path and on interpreted kernels; tests/kernels/test_compiled_kernels.py executes
compiled ones.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils import _pytree as pytree

import gradiometer as gm
from conftest import INTERPRETED, KERNELS
from gradiometer.columns import DEFAULT_THRESHOLDS
from gradiometer.columns.fingerprint import Fingerprint
from gradiometer.ops import eager_plan, openmp, streaming
from gradiometer.ops import fingerprint as bits
from gradiometer.recorder.recorder import Recorder
from support import strategies
from support.compiling import every_backend, graphs
from support.fingerprints import of_tensor, random_bits, rows_of
from support.gradients import bit_patterns, with_grads
from support.recording import new_gradients

LIMITS = (DEFAULT_THRESHOLDS.vanishing, DEFAULT_THRESHOLDS.exploding, DEFAULT_THRESHOLDS.dead)
DTYPES = strategies.ALL_DTYPES
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# the interpreter takes a hundredth of a second for each tensor, and a second for a large one
SOME = (torch.float32, torch.bfloat16, torch.float64, torch.float8_e5m2) if INTERPRETED else DTYPES
FEW = (0, 1, 2, 3, 7, 8, 9) if INTERPRETED else (0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 63, 65, 513)


def near(*borders: int) -> list[int]:
    return [border + step for border in borders for step in (-1, 0, 1)]


# sizes at which an implementation changes its method
BORDERS = (512, 2048) if INTERPRETED else (512, 1024, 2048, 4096, 2**15)
if not KERNELS:
    BORDERS = (*eager_plan.WIDTHS[:5], eager_plan.SMALL, eager_plan.BATCH, streaming.PIECE)
SIZES = [*near(*BORDERS), 2**15 + 3000]


def call(tensors, inv_scale=None):
    """Return columns, flags and fingerprints from the op."""
    return torch.ops.gradiometer.tensor_stats_fingerprints(tensors, *LIMITS, inv_scale)


def found(tensors):
    return call(tensors)[2].tolist()


# the same value from every implementation


@each_dtype
def test_few_and_many_elements_of_every_dtype_have_the_fingerprint_of_their_bits(dtype):
    tensors = [random_bits(dtype, n, seed=n) for n in (*FEW, 1500 if INTERPRETED else 2**14 + 7)]
    assert found(tensors) == rows_of(tensors)
    some = [*tensors[:4], tensors[-1]]
    assert [found([x])[0] for x in some] == rows_of(some)


@pytest.mark.parametrize("n", SIZES if KERNELS else [*SIZES, 3 * streaming.PIECE + 5])
def test_every_size_has_the_fingerprint_of_its_bits(n):
    # one of each width; the others only with large pieces and chunks
    dtypes = (torch.float32, torch.bfloat16) if INTERPRETED else strategies.FLOATS[:1] + strategies.FLOATS[2:]
    tensors = [random_bits(dtype, n, seed=n) for dtype in dtypes]
    assert found(tensors) == rows_of(tensors)


SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan)


@pytest.mark.parametrize("dtype", strategies.FLOATS, ids=str)
def test_special_values_count_by_their_bits(dtype):
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    payload = torch.tensor([math.nan], dtype=dtype).view(integers).add(1).view(dtype)
    tensors = [torch.tensor([value, 1.0, 2.0], dtype=dtype) for value in SPECIAL]
    tensors.append(torch.cat([payload, torch.tensor([1.0, 2.0], dtype=dtype)]))
    rows = found(tensors)
    assert rows == rows_of(tensors)
    assert len(set(map(tuple, rows))) == len(tensors)


def base(dtype, rows=6, width=11):
    return random_bits(dtype, rows, width, seed=3)


LAYOUTS = {
    "transposed": lambda x: x.t(),
    "rows backward": lambda x: x.flip(0),
    "stepped": lambda x: x[:, ::3],
    "stepped rows": lambda x: x[::2],
    "inner": lambda x: x[1:-1, 2:-1],
    "expanded": lambda x: x[:1].expand(7, -1),
    "one element expanded": lambda x: x[1, 3].expand(5, 9),
    "four dimensions": lambda x: x.reshape(2, 3, 11, 1).permute(3, 2, 0, 1),
    **{f"from element {i}": (lambda x, i=i: x.view(-1)[i:]) for i in (1, 2, 3, 5, 7, 9)},
    "to an odd end": lambda x: x.view(-1)[:-3],
    "one element": lambda x: x[2, 2],
    "nothing": lambda x: x[3:3],
}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=[] if name in {"transposed", "from element 1"} else pytest.mark.once)
        for name in LAYOUTS
    ],
)
def test_only_the_elements_in_row_major_order_count(layout):
    tensors = [LAYOUTS[layout](base(dtype)) for dtype in SOME]
    rows = rows_of(tensors)
    assert found(tensors) == rows
    assert found([x.clone(memory_format=torch.contiguous_format) for x in tensors]) == rows


@pytest.mark.parametrize("layout", ["transposed", "stepped", "from element 1", "from element 3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_views_of_large_tensors(dtype, layout):
    x = LAYOUTS[layout](base(dtype, *((40, 65) if INTERPRETED else (300, 401))))
    assert found([x]) == rows_of([x])


@pytest.mark.parametrize("dtype", strategies.COMPLEX, ids=str)
def test_lazy_conjugation_and_negation_are_carried_out(dtype):
    z = base(dtype)
    tensors = [z.conj(), z.t().conj(), z.conj().imag, z.conj().imag.t(), z.imag, z.real[:, ::2]]
    stats = gm.collect(tensors, fingerprint=True)
    assert stats.fingerprints.tolist() == found(tensors) == rows_of(tensors)
    assert stats.fingerprints[0].tolist() != found([z])[0]


def mixed_list():
    sizes = (0, 1, 3, 40, *([] if KERNELS else [8, 700, 9000, 9001, 40000]))
    pairs = itertools.product(sizes, (torch.float32, torch.bfloat16, torch.float64, torch.float8_e5m2))
    return [random_bits(dtype, n, seed=i) for i, (n, dtype) in enumerate(pairs)]


def test_neither_the_order_of_tensors_nor_repeated_ones_matter():
    tensors = mixed_list()
    rows = rows_of(tensors)
    assert found(tensors) == rows
    assert found(tensors[::-1]) == rows[::-1]
    order = torch.randperm(len(tensors)).tolist()
    assert found([tensors[i] for i in order]) == [rows[i] for i in order]
    again = [*tensors, *tensors[::3], tensors[5], tensors[5]]
    assert found(again) == [*rows, *rows[::3], rows[5], rows[5]]
    # a list that was measured before is recognized
    assert found(again) == found(again)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.skipif(KERNELS, reason="the kernels use no threads of the host")
def test_the_number_of_threads_does_not_matter(threads, number_of_threads):
    tensors = [random_bits(torch.float32, 2**20 + 3), random_bits(torch.bfloat16, 2**20)]
    expected = found(tensors)
    number_of_threads(threads)
    assert found(tensors) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e5m2], ids=str)
@pytest.mark.skipif(KERNELS, reason="the kernels use no threads of the host")
def test_blocks_end_with_whole_words_where_threads_cannot_be_limited(dtype, monkeypatch):
    monkeypatch.setattr(openmp, "can_run_alone", lambda: False)
    monkeypatch.setattr(streaming, "MOST_BLOCKS", 2)
    tensors = [random_bits(dtype, n) for n in (3 * eager_plan.BATCH, 9 * eager_plan.BATCH + 5)]
    assert found(tensors) == rows_of(tensors)


@pytest.mark.skipif(KERNELS, reason="the kernels need no products of matrices")
def test_devices_that_do_not_multiply_matrices_of_integers_find_the_same(monkeypatch):
    monkeypatch.setattr(bits, "_MULTIPLIES_INTEGERS", frozenset())
    with monkeypatch.context() as patch:
        for name in ("dot", "mv"):
            patch.delattr(torch, name)
        tensors = [random_bits(dtype, n, seed=n) for dtype in SOME for n in (*FEW, 2**15 + 3000)]
        rows = found(tensors)
    assert rows == rows_of(tensors)


@pytest.mark.parametrize("scale", [pytest.param(None, marks=pytest.mark.once), 0.5])
def test_columns_and_flags_are_those_without_fingerprints(scale):
    tensors = [random_bits(dtype, n, seed=n) for dtype in SOME for n in FEW]
    inv_scale = None if scale is None else torch.tensor(scale)
    columns, flags, fingerprints = call(tensors, inv_scale)
    plain = torch.ops.gradiometer.tensor_stats(tensors, *LIMITS, inv_scale)
    assert bit_patterns((columns, flags)) == bit_patterns(plain)
    # the fingerprints are those of the bits, not of scaled values
    assert fingerprints.tolist() == rows_of(tensors)


@given(strategies.lists(largest=2**11))
def test_columns_do_not_depend_on_fingerprints(some):
    tensors = [recipe.tensor() for recipe in some]
    columns, flags, fingerprints = call(tensors)
    plain = torch.ops.gradiometer.tensor_stats(tensors, *LIMITS, None)
    assert flags.tolist() == plain[1].tolist()
    for x, row, other in zip(tensors, columns, plain[0], strict=True):
        if x.is_contiguous():
            assert bit_patterns([row]) == bit_patterns([other])
    assert fingerprints.tolist() == rows_of(tensors)


# the op


@pytest.mark.usefixtures("_dynamo")
@every_backend
def test_a_compiled_function_returns_the_same(backend):
    tensors = {"w": base(torch.float32), "v": base(torch.bfloat16).t(), "z": base(torch.complex64)}

    @torch.compile(fullgraph=True, backend=backend)
    def step(tensors):
        stats = gm.collect(tensors, fingerprint=True)
        return {name: x.real * 2 for name, x in tensors.items()}, stats

    _, stats = step(tensors)
    assert stats.fingerprints.tolist() == rows_of(tensors.values())
    assert graphs() == 1
    # other bits at the same addresses
    tensors["w"].view(torch.int32)[3, 3] ^= 1
    assert step(tensors)[1].fingerprints.tolist() == rows_of(tensors.values())
    assert graphs() == 1


# collect, and what becomes of stats


def named():
    return {"a": base(torch.float32), "b": random_bits(torch.float16, 13), "c": random_bits(torch.float64, 0)}


def test_collect_returns_them_if_asked():
    tensors = named()
    stats = gm.collect(tensors, fingerprint=True)
    assert stats.fingerprints.tolist() == rows_of(tensors.values())
    assert (stats.fingerprints.shape, stats.fingerprints.dtype) == ((3, 3), torch.int64)
    report = stats.materialize()
    for name, x in tensors.items():
        assert report[name].fingerprint == of_tensor(x)
        assert isinstance(report[name].fingerprint, gm.Fingerprint)
    plain = gm.collect(tensors)
    assert plain.fingerprints is None
    assert plain.materialize()["a"].fingerprint is None
    assert bit_patterns([plain.columns, plain.flags]) == bit_patterns([stats.columns, stats.flags])
    assert gm.collect({}, fingerprint=True).fingerprints.shape == (0, 3)
    assert gm.collect({}, fingerprint=True).materialize().rows() == []


@pytest.mark.parametrize("count", [1, 3])
def test_a_report_can_be_saved(count, tmp_path):
    report = gm.collect([base(torch.float32)] * count, fingerprint=True).materialize()
    torch.save(report, tmp_path / "report.pt")
    loaded = torch.load(tmp_path / "report.pt", weights_only=False)
    assert [row.fingerprint for row in loaded.rows()] == [row.fingerprint for row in report.rows()]


def test_the_other_functions_return_them_too():
    model = nn.Linear(5, 3)
    assert gm.collect_grads(model, fingerprint=True).fingerprints.shape == (0, 3)
    model(torch.randn(2, 5)).sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    assert gm.collect_grads(model, fingerprint=True).fingerprints.tolist() == rows_of(grads)
    assert gm.collect_weights(model, fingerprint=True).fingerprints.tolist() == rows_of(model.parameters())
    # those of the gradients before they were clipped
    stats = gm.collect_and_clip_(model, 1e-3, fingerprint=True)
    assert stats.fingerprints.tolist() == rows_of(grads)
    assert rows_of(p.grad for p in model.parameters()) != rows_of(grads)


def test_a_scale_does_not_change_them():
    grads = with_grads(base(torch.float16), base(torch.float32))
    expected = rows_of(p.grad for p in grads)
    for inv_scale in (None, 0.25, torch.tensor(1 / 3)):
        stats = gm.collect_grads(grads, inv_scale=inv_scale, skip_nonfinite=True, fingerprint=True)
        assert stats.fingerprints.tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_sparse_tensor_has_that_of_its_dense_form(dtype):
    # two values at one place, two that cancel, and -0, whose sign counts
    indices = torch.tensor([[0, 0, 2, 3, 3], [1, 1, 0, 2, 2]])
    values = torch.tensor([1.5, 2.0, -0.0, 3.0, -3.0], dtype=dtype)
    x = torch.sparse_coo_tensor(indices, values, (5, 3))
    dense = torch.zeros(5, 3, dtype=dtype)
    dense[0, 1], dense[2, 0] = 3.5, -0.0
    tensors = {"sparse": x, "coalesced": x.coalesce(), "dense": dense, "other": base(dtype)}
    stats = gm.collect(tensors, fingerprint=True)
    assert stats.fingerprints.tolist() == rows_of([dense] * 3 + [tensors["other"]])
    plain = gm.collect(tensors)
    assert bit_patterns([stats.columns, stats.flags]) == bit_patterns([plain.columns, plain.flags])


def test_merged_stats_have_that_of_the_concatenation():
    first = {
        "even": random_bits(torch.float32, 4, 5),
        "odd": random_bits(torch.float32, 3),
        "zero": base(torch.float64)[:0],
    }
    second = {
        "even": random_bits(torch.float32, 7, 5),
        "odd": random_bits(torch.float32, 4),
        "zero": base(torch.float64),
    }
    parts = [gm.collect(part, fingerprint=True) for part in (first, second)]
    merged = parts[0].merge(parts[1])
    whole = rows_of(torch.cat([first[name], second[name]]) for name in first)
    # the first part of this one ends in the middle of a word
    whole[1] = [-1, 0, 0]
    assert merged.fingerprints.tolist() == whole
    report = merged.materialize()
    assert report["odd"].fingerprint is None
    assert report["even"].fingerprint == Fingerprint.of_row(whole[0])
    assert parts[0].merge(gm.collect(second)).fingerprints is None
    assert gm.collect(first).merge(parts[1]).fingerprints is None


def test_groups_have_none():
    stats = gm.collect({"x.a": torch.ones(3), "x.b": torch.ones(4)}, fingerprint=True)
    for grouped in (stats.group({"all": "."}), stats.by_module()):
        assert grouped.fingerprints is None
        assert [row.fingerprint for row in grouped.materialize().rows()] == [None]


def test_stats_with_fingerprints_are_a_pytree():
    stats = gm.collect(named(), fingerprint=True)
    leaves, spec = pytree.tree_flatten(stats)
    assert len(leaves) == 3
    back = pytree.tree_unflatten(leaves, spec)
    assert back.fingerprints.tolist() == stats.fingerprints.tolist()
    assert back.names == stats.names
    again = pytree.treespec_loads(pytree.treespec_dumps(spec))
    assert pytree.tree_unflatten(leaves, again).fingerprints is stats.fingerprints
    # stats with and without are of different structure
    assert spec != pytree.tree_flatten(gm.collect(named()))[1]


def test_reports_keep_them():
    tensors = named()
    stats = gm.collect(tensors, fingerprint=True)
    texts = {name: str(of_tensor(x)) for name, x in tensors.items()}
    report = stats.materialize_async().result()
    assert {row.name: str(row.fingerprint) for row in report.rows()} == texts
    assert {name: row["fingerprint"] for name, row in report.to_dict()["tensors"].items()} == texts
    assert all(
        "fingerprint" not in row for row in gm.collect(tensors).materialize().to_dict()["tensors"].values()
    )


def test_data_frames_have_a_column_of_them():
    pytest.importorskip("pandas")
    tensors = named()
    frame = gm.collect(tensors, fingerprint=True).materialize().to_frame()
    assert frame["fingerprint"].to_dict() == {name: str(of_tensor(x)) for name, x in tensors.items()}
    assert "fingerprint" not in gm.collect(tensors).materialize().to_frame().columns


# the recorder


def model_of():
    model = nn.Module()
    for i, dtype in enumerate((torch.float32, torch.bfloat16, torch.float64)):
        model.register_parameter(f"w{i}", nn.Parameter(torch.randn(3, i + 1).to(dtype)))
    return model


def test_a_ring_holds_what_collect_returns():
    model = model_of()
    recorder = Recorder(model, weights=True, updates=True, capacity=3, fingerprint=True)
    expected = []
    for step in range(5):
        new_gradients(model)
        if step == 3:
            model.w1.grad = None
        recorder.record()
        if step == 4:
            recorder.record_updates(gm.compare({"w0": model.w0.detach()}, {"w0": torch.zeros(3, 1)}))
        grads = [None if p.grad is None else of_tensor(p.grad) for p in model.parameters()]
        expected.append((grads, rows_of(model.parameters())))
        recorder.advance()
        with torch.no_grad():
            model.w0.add_(1)
    records = recorder.read()
    assert [record.step for record in records] == [2, 3, 4]
    for record, (grads, weights) in zip(records, expected[2:], strict=True):
        measured = record.fingerprints("grads").tolist()
        # what was not measured has no elements
        assert measured == [[0, 0, 0] if x is None else x.row for x in grads]
        assert record.fingerprints("weights").tolist() == weights
        report = record.report("grads")
        assert [row.fingerprint for row in report.rows()] == [x for x in grads if x is not None]
    # an update has none
    assert records[-1].has("updates")
    assert records[-1].fingerprints("updates") is None


def test_a_ring_takes_given_stats_if_they_have_fingerprints():
    model = model_of()
    recorder = Recorder(model, weights=True, capacity=2, fingerprint=True)
    new_gradients(model)
    recorder.record(gm.collect_grads(model, fingerprint=True))
    (record,) = recorder.read()
    assert record.fingerprints().tolist() == rows_of(p.grad for p in model.parameters())
    assert record.fingerprints("weights").tolist() == rows_of(model.parameters())
    with pytest.raises(ValueError, match=r"these stats have none; pass fingerprint=True to collect_grads"):
        recorder.record(gm.collect_grads(model))
    plain = Recorder(model, capacity=2)
    plain.record(gm.collect_grads(model, fingerprint=True))
    (record,) = plain.read()
    assert record.fingerprints() is None
    assert record.report()["w0"].fingerprint is None


def test_a_ring_with_fingerprints_has_the_same_columns():
    model = model_of()
    new_gradients(model)
    records = []
    for fingerprint in (False, True):
        recorder = Recorder(model, weights=True, fingerprint=fingerprint)
        recorder.record(inv_scale=0.5)
        records += recorder.read()
    plain, wide = records
    for kind in ("grads", "weights"):
        assert torch.equal(plain.columns(kind), wide.columns(kind))
        assert torch.equal(plain.flags(kind), wide.flags(kind))
    assert wide.fingerprints().tolist() == rows_of(p.grad for p in model.parameters())


@pytest.mark.usefixtures("_dynamo")
def test_a_compiled_step_records_the_same():
    model = model_of()
    new_gradients(model)
    recorder = Recorder(model, fingerprint=True)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step():
        recorder.record()
        recorder.advance()

    for _ in range(2):
        step()
        expected = rows_of(p.grad for p in model.parameters())
        assert recorder.read()[-1].fingerprints().tolist() == expected
        with torch.no_grad():
            model.w0.grad.neg_()
    assert graphs() == 1


# The guarantee: a search for a counterexample. The proof is on a page, and the tests of its steps in
# tests/columns/test_fingerprint_columns.py.

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)


@st.composite
def structured(draw, bits):
    """A list of elements, as unsigned integers: constant, repeated, sparse or random."""
    element = st.one_of(
        st.sampled_from((0, 1, 1 << bits - 1, (1 << bits) - 1)), st.integers(0, (1 << bits) - 1)
    )
    n = draw(st.integers(1, 80))
    pattern = draw(st.lists(element, min_size=1, max_size=draw(st.sampled_from((1, 2, 3, 4, 80)))))
    return list(itertools.islice(itertools.cycle(pattern), n))


@st.composite
def changes(draw):
    """A dtype, elements, and the same with one or two of them changed."""
    dtype = draw(st.sampled_from(PLAIN))
    bits = 8 * dtype.itemsize
    before = draw(structured(bits))
    i, j = [draw(st.integers(0, len(before) - 1)) for _ in range(2)]
    after, bit = list(before), draw(st.integers(0, bits - 1))
    kind = draw(st.sampled_from(("flip", "equal flips", "two flips", "swap", "values", "shift by one")))
    if kind == "flip":
        after[i] ^= 1 << bit
    elif kind == "equal flips":
        after[i] ^= 1 << bit
        after[j] ^= 1 << bit
    elif kind == "two flips":
        after[i] ^= 1 << bit
        after[j] ^= 1 << draw(st.integers(0, bits - 1))
    elif kind == "swap":
        after[i], after[j] = after[j], after[i]
    elif kind == "values":
        after[i], after[j] = [draw(st.integers(0, (1 << bits) - 1)) for _ in range(2)]
    else:
        # one element larger, the other smaller by as much
        after[i] = (after[i] + (1 << bit)) % (1 << bits)
        after[j] = (after[j] - (1 << bit)) % (1 << bits)
    return dtype, before, after


def tensor_of(dtype, elements):
    bits = 8 * dtype.itemsize
    fitting = elements if bits == 8 else [x - (1 << bits) if x >> (bits - 1) else x for x in elements]
    return torch.tensor(fitting, dtype=INTEGERS[dtype.itemsize]).view(dtype)


@given(changes())
def test_any_change_of_one_or_two_elements_changes_the_fingerprint(change):
    dtype, before, after = change
    tensors = [tensor_of(dtype, elements) for elements in (before, after, before)]
    stats = gm.collect(tensors, fingerprint=True).materialize()
    first, second, same = [row.fingerprint for row in stats.rows()]
    assert first == same == of_tensor(tensors[0])
    assert (first == second) == (before == after)


@pytest.mark.once
@pytest.mark.parametrize("dtype", PLAIN, ids=str)
def test_every_pair_of_bits_of_a_constant_tensor_is_detected(dtype):
    # as far as two words apart, at the ends and in the middle of a tensor
    bits, n = 8 * dtype.itemsize, 24 // dtype.itemsize
    elements = [1 << bits - 2] * n
    tensors = [tensor_of(dtype, elements)]
    # the values of both elements after the change
    patterns = [1 << k for k in range(bits)]
    for j in range(n):
        for p, q in itertools.product(patterns, repeat=2):
            changed = list(elements)
            changed[0] ^= p
            changed[j] ^= q if j else 0
            tensors.append(tensor_of(dtype, changed))
    rows = set(map(tuple, gm.collect(tensors, fingerprint=True).fingerprints.tolist()))
    distinct = {tuple(x.view(torch.uint8).tolist()) for x in tensors}
    assert len(rows) == len(distinct)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_stride_of_a_single_element_may_be_any(dtype):
    one = torch.ones(1, 3, dtype=dtype)
    tensors = [
        one[:, 0],
        torch.ones((), dtype=dtype).expand(1),
        torch.ones(9, dtype=dtype).as_strided((1, 1), (5, 7)),
    ]
    expected = gm.collect([torch.ones(1, dtype=dtype)], fingerprint=True).fingerprints
    found = gm.collect(tensors, fingerprint=True).fingerprints
    assert torch.equal(found, expected.expand(3, -1))


def test_a_sparse_tensor_without_values_and_sparse_dimensions_is_its_dense_form():
    none = torch.sparse_coo_tensor(torch.empty((0, 0), dtype=torch.int64), torch.empty((0, 3)), (3,))
    assert gm.collect([none], fingerprint=True).fingerprints.tolist() == rows_of([torch.zeros(3)])
