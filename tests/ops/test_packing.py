"""Chunk maps, pointer tables and their lifetimes."""

from __future__ import annotations

import itertools
import math
import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradiometer as gm
from gradiometer.columns import DEFAULT_THRESHOLDS
from gradiometer.ops import launch_plans, packing, uploads
from gradiometer.ops.launch_plans import chunk_map_of

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.fixture(autouse=True)
def nothing_kept():
    launch_plans.clear()
    captured = list(uploads._captured)
    yield
    uploads._captured[:] = captured
    launch_plans.clear()


# the chunk map

sized = st.lists(st.tuples(st.integers(0, 70), st.sampled_from(DTYPES)), min_size=1, max_size=12)
chunk_sizes = st.sampled_from([1, 2, 7, 16, 64])


# the limit per tensor; with the largest limit, no tensor here needs longer chunks
most_chunks = st.sampled_from([1, 2, 3, 8, 10**6])


def layout_of(items, chunk, most=10**6):
    return chunk_map_of(tuple(n for n, _ in items), tuple(dtype for _, dtype in items), chunk, most)


def parts(layout):
    """Return numel, chunk length, first chunk and chunks of each tensor; row and start of each chunk."""
    t, n = layout.num_tensors, layout.num_chunks
    numel, lengths, first, counts = (part.tolist() for part in layout.table[: 4 * t].split(t))
    rows = layout.table[4 * t :].view(torch.int32)[:n].tolist()
    # as the kernel computes it
    starts = [(i - first[row]) * lengths[row] for i, row in enumerate(rows)]
    return numel, lengths, first, counts, rows, starts


@given(sized, chunk_sizes, most_chunks)
def test_every_element_is_in_exactly_one_chunk(items, chunk, most):
    numel, lengths, _, _, rows, starts = parts(layout_of(items, chunk, most))
    assert numel == [n for n, _ in items]
    covered = [[0] * n for n in numel]
    for row, start in zip(rows, starts, strict=True):
        for i in range(start, min(start + lengths[row], numel[row])):
            covered[row][i] += 1
    assert all(count == 1 for row in covered for count in row)


@given(sized, chunk_sizes, most_chunks)
def test_a_tensors_chunks_stand_together_in_order_and_none_is_empty(items, chunk, most):
    numel, lengths, first, counts, rows, starts = parts(layout_of(items, chunk, most))
    for i, n in enumerate(numel):
        here = slice(first[i], first[i] + counts[i])
        assert counts[i] == -(-n // lengths[i])
        assert rows[here] == [i] * counts[i]
        assert starts[here] == list(range(0, n, lengths[i]))


@given(sized, chunk_sizes, most_chunks)
def test_a_tensors_chunks_do_not_depend_on_its_neighbours(items, chunk, most):
    _, lengths, first, counts, _, starts = parts(layout_of(items, chunk, most))
    for i, item in enumerate(items):
        _, [length], _, _, _, alone = parts(layout_of([item], chunk, most))
        assert (length, alone) == (lengths[i], starts[first[i] : first[i] + counts[i]])


@given(sized, chunk_sizes, most_chunks)
def test_chunks_are_longer_only_where_there_would_be_too_many(items, chunk, most):
    numel, lengths, _, counts, _, _ = parts(layout_of(items, chunk, most))
    for n, length, count in zip(numel, lengths, counts, strict=True):
        assert count <= most
        assert length == max(chunk, next(2**k for k in itertools.count() if n <= 2**k * most))


@given(sized, chunk_sizes)
def test_each_dtype_with_elements_is_one_contiguous_group(items, chunk):
    layout = layout_of(items, chunk)
    rows = parts(layout)[4]
    assert len({group.dtype for group in layout.groups}) == len(layout.groups)
    assert {group.dtype for group in layout.groups} == {dtype for n, dtype in items if n}
    done = 0
    for group in layout.groups:
        assert group.first_chunk == done
        assert group.num_chunks > 0
        done += group.num_chunks
        assert {items[row][1] for row in rows[group.first_chunk : done]} == {group.dtype}
    assert done == layout.num_chunks


def test_offsets_are_those_of_tensors_beyond_2_to_the_31_elements():
    layout = chunk_map_of((3, 2**33 + 1), (torch.bfloat16,) * 2, 2**30, 2**13)
    numel, lengths, first, counts, rows, starts = parts(layout)
    assert (numel, lengths) == ([3, 2**33 + 1], [2**30, 2**30])
    assert (first, counts) == ([0, 1], [1, 9])
    assert rows == [0] + [1] * 9
    assert starts == [0, *range(0, 2**33 + 1, 2**30)]


def test_the_largest_tensors_have_no_more_chunks_than_allowed():
    sizes = (2**28, 2**28 + 1, 2**34, 2**40 + 1)
    _, lengths, _, counts, _, _ = parts(chunk_map_of(sizes, (torch.float32,) * 4, 2**15, 2**13))
    assert lengths == [2**15, 2**16, 2**21, 2**28]
    assert counts == [2**13, 2**12 + 1, 2**13, 2**12 + 1]


def test_a_layout_is_built_once_for_a_list_of_sizes_and_dtypes():
    one = layout_of([(5, torch.float32), (6, torch.float32)], 4)
    assert layout_of([(5, torch.float32), (6, torch.float32)], 4) is one
    for other in ([(6, torch.float32), (5, torch.float32)], [(5, torch.float32), (6, torch.float16)]):
        assert layout_of(other, 4) is not one
    assert layout_of([(5, torch.float32), (6, torch.float32)], 8) is not one
    assert layout_of([(5, torch.float32), (6, torch.float32)], 4, 1) is not one


# the pointer table

CHUNK, MAX_CHUNKS = 1024, 64


def pack_of(*tensors, keep=False):
    with torch.no_grad():
        return packing.pack(tensors, CHUNK, MAX_CHUNKS, keep=keep)


def test_pointers_are_the_addresses_of_the_flat_tensors():
    x, y = torch.ones(3, 4), torch.ones(40, dtype=torch.float16)[3:]
    packed = pack_of(x.t(), y)
    assert packed.pointers.dtype == torch.int64
    assert packed.pointers.tolist() == [x.data_ptr(), y.data_ptr()]
    assert packed.table.tolist() == packed.chunk_map.table.tolist()


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(12.0).view(3, 4)[:, ::2],
        torch.arange(4.0).expand(3, 4),
        torch.complex(torch.arange(6.0), torch.arange(6.0)).conj().imag,
        torch.arange(12.0).to(torch.float8_e5m2),
    ],
    ids=["strided", "expanded", "negated", "fp8"],
)
def test_a_copy_is_pointed_to_and_kept_where_the_memory_is_not_what_is_measured(x):
    packed = pack_of(x)
    (flat,) = packed.tensors
    assert packed.pointers.tolist() == [flat.data_ptr()]
    assert flat.is_contiguous()
    assert flat.double().tolist() == x.resolve_neg().double().flatten().tolist()


def known():
    """Return the known lists, the most recently used last."""
    return list(launch_plans._plans)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_one_changed_address_makes_new_pointers_and_leaves_the_old_ones_alone(which):
    tensors = [torch.ones(5), torch.ones(5), torch.ones(5)]
    first = pack_of(*tensors, keep=True)
    moved = list(tensors)
    moved[which] = torch.ones(5)
    second = pack_of(*moved, keep=True)
    assert second.pointers.data_ptr() != first.pointers.data_ptr()
    assert second.pointers.tolist() == [x.data_ptr() for x in moved]
    assert first.pointers.tolist() == [x.data_ptr() for x in tensors]
    # the static part is not rebuilt
    assert second.chunk_map is first.chunk_map
    assert second.table is first.table


def test_exchanged_addresses_are_a_change():
    x, y = torch.ones(5), torch.ones(5)
    pack_of(x, y)
    assert pack_of(y, x).pointers.tolist() == [y.data_ptr(), x.data_ptr()]


def test_tables_of_different_dtypes_or_sizes_do_not_mix():
    x = torch.ones(8)
    packs = [
        pack_of(view)
        for view in (x, x[:4], x.view(torch.float64), x.view(torch.int32).view(torch.float32)[:4])
    ]
    assert packs[0].chunk_map is not packs[1].chunk_map
    assert packs[1].chunk_map is packs[3].chunk_map
    assert packs[2].chunk_map.groups[0].dtype == torch.float64
    assert [p.pointers.tolist() for p in packs] == [[x.data_ptr()]] * 4


def norms(*tensors):
    return gm.collect(tensors).norm.tolist()


def test_a_tensor_at_the_address_of_a_freed_one_is_measured_itself():
    seen: dict[int, int] = {}
    again = 0
    for step in range(1, 2000):
        # freed at each step; the allocator soon reuses the same place for the same number of bytes
        x = torch.full((16 * (1 + step % 2),), float(step), dtype=(torch.float64, torch.float32)[step % 2])
        assert gm.collect([x]).sumsq.tolist() == [step**2 * len(x)]
        again += seen.get(x.data_ptr(), len(x)) != len(x)
        seen[x.data_ptr()] = len(x)
        del x
        if again == 3:
            break
    assert len(seen) < step


def test_the_same_address_with_another_size_dtype_or_content_is_measured_anew():
    memory = torch.zeros(64)
    assert norms(memory) == [0.0]
    memory.fill_(1.0)
    assert norms(memory) == [8.0]
    assert norms(memory[:4]) == [2.0]
    assert norms(memory[:16].view(2, 8).t()) == [4.0]
    memory.view(torch.float64).fill_(3.0)
    assert norms(memory[:8].view(torch.float64)) == [6.0]


def test_a_list_whose_tensors_change_places_is_measured_in_its_order():
    x, y = torch.full((4,), 1.0), torch.full((4,), 10.0)
    assert norms(x, y) == [2.0, 20.0]
    assert norms(y, x) == [20.0, 2.0]
    assert norms(x, x) == [2.0, 2.0]


@torch.no_grad()
def test_a_list_in_which_a_tensor_occurs_again_is_recognized_by_its_places():
    def again(x, y, places):
        return [(x, y)[place] for place in places]

    launch_plans.clear()
    x, y = torch.randn(3), torch.randn(3)
    plan = launch_plans.remember(again(x, y, [0, 1, 0, 0]))
    others = torch.randn(3), torch.randn(3)
    assert launch_plans.recognize(again(*others, [0, 1, 0, 0])) is plan
    assert launch_plans.recognize(again(*others, [0, 1, 1, 0])) is None
    assert launch_plans.recognize([torch.randn(3) for _ in range(4)]) is None
    assert launch_plans.recognize(again(torch.randn(3), torch.randn(4), [0, 1, 0, 0])) is None
    # the list that was met without repeats does not stand for one with repeats either
    distinct = launch_plans.remember([torch.randn(3) for _ in range(4)])
    assert launch_plans.recognize([torch.randn(3) for _ in range(4)]) is distinct
    assert launch_plans.recognize(again(*others, [0, 1, 0, 0])) is plan


def test_parameters_without_a_gradient_are_recognized_in_the_next_step():
    model = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(4)])
    for layer in model[:2]:
        layer.requires_grad_(requires_grad=False)
    recorder = gm.Recorder(model, updates=True)
    launch_plans.clear()
    for _ in range(5):
        for parameter in model[2:].parameters():
            parameter.grad = torch.randn_like(parameter)
        recorder.record()
        recorder.advance()
    assert len(launch_plans._plans) == 1


def test_known_lists_and_layouts_are_bounded_and_the_oldest_goes_first():
    first, used = torch.ones(1), torch.ones(2)
    pack_of(first)
    pack_of(used)
    (_, known_used) = known()
    for n in range(3, launch_plans.LISTS_KEPT + 30):
        pack_of(torch.ones(n))
        # used at each step, so it is kept
        pack_of(used)
        assert known()[-1] is known_used
        assert len(known()) <= launch_plans.LISTS_KEPT
    assert chunk_map_of.cache_info().currsize <= launch_plans.LISTS_KEPT
    sizes = {one.chunk_map.table[0].item() for one in known()}
    assert 1 not in sizes
    assert 2 in sizes
    # forgotten entries are built again
    assert norms(first, used) == [1.0, math.sqrt(2)]
    assert pack_of(first).pointers.tolist() == [first.data_ptr()]


def test_no_tensor_is_kept_alive():
    x = torch.ones(5)
    there = weakref.ref(x)
    pack_of(x)
    pack_of(x, keep=True)
    del x
    assert there() is None
    assert len(known()) == 1


def test_clear_forgets_tables_and_layouts_but_not_those_of_captured_graphs():
    uploads._captured.append(torch.ones(1))
    layout = pack_of(torch.ones(3)).chunk_map
    launch_plans.clear()
    assert not launch_plans._plans
    assert uploads._captured
    assert pack_of(torch.ones(3)).chunk_map is not layout


# while a graph is captured


@pytest.fixture
def capturing(monkeypatch):
    def switch(on):
        monkeypatch.setattr(uploads, "is_capturing", lambda _: on)

    return switch


@pytest.mark.parametrize("of_pairs", [False, True])
def test_what_a_captured_call_reads_is_never_written_again(capturing, of_pairs):
    def sides():
        return [[torch.ones(5), torch.ones(4, 3000)[:, : 2048 if of_pairs else None]] for _ in range(3)]

    pack = pairs_of if of_pairs else lambda first, *_: pack_of(*first)
    first = sides()
    eager = pack(*first)
    capturing(True)
    captured = pack(*first)
    capturing(False)
    content = (captured.pointers.tolist(), captured.table.tolist())
    assert content == (eager.pointers.tolist(), eager.table.tolist())

    moved = pack(*sides())
    assert (captured.pointers.tolist(), captured.table.tolist()) == content
    assert moved.pointers.data_ptr() != captured.pointers.data_ptr()


@pytest.fixture
def pinned(monkeypatch):
    found = []

    def pin_memory(source):
        found.append(source.clone())
        return found[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(uploads, "_captured", [])
    return found


def test_what_captured_graphs_are_filled_from_is_kept_as_long_as_the_process(capturing, pinned):
    # the meta device stands for one that data is uploaded to
    tensors, others = [torch.ones(5)], [torch.ones(5)]
    pack_of(*tensors)
    # as if the list had been seen on that device
    one = replace(known()[0], device=torch.device("meta"))

    def pack_there(tensors):
        with torch.no_grad():
            return packing.pack(tensors, CHUNK, MAX_CHUNKS, one)

    pack_there(tensors)
    assert uploads._captured == []
    pinned.clear()
    capturing(True)
    packed = pack_there(tensors)
    for again in (others, tensors, others):
        pack_there(again)
    capturing(False)
    launch_plans.clear()
    assert {packed.pointers.device, packed.table.device} == {one.device}
    assert (packed.pointers.shape, packed.table.shape) == ((1,), one.chunk_map.table.shape)
    # captures with the same addresses share them; the table begins at a multiple of 16 bytes
    assert [id(host) for host in uploads._captured] == [id(host) for host in pinned]
    table = one.chunk_map.table.tolist()
    assert [host.tolist() for host in pinned] == [[x.data_ptr(), 0, *table] for x in (*tensors, *others)]


def test_a_captured_call_measures_right(capturing):
    x, y = torch.full((4,), 3.0), torch.full((1500,), 2.0, dtype=torch.float64)
    expected = gm.ops.tensor_stats([x, y], DEFAULT_THRESHOLDS)
    capturing(True)
    measured = gm.ops.tensor_stats([x, y], DEFAULT_THRESHOLDS)
    capturing(False)
    assert torch.equal(measured[0], expected[0])
    assert torch.equal(measured[1], expected[1])


# pairs


def pairs_of(*sides, keep=False):
    with torch.no_grad():
        return packing.pack_pairs(sides, CHUNK, MAX_CHUNKS, keep=keep)


def pair_parts(packed, lists):
    """Return numel, chunk length and chunks of each pair, and the pitches of each list."""
    t, n = packed.chunk_map.num_tensors, packed.chunk_map.num_chunks
    sizes = [t, t, t, t, n // 2 + 1, *[t] * lists]
    numel, lengths, _, counts, _, *pitches = (x.tolist() for x in packed.table.split(sizes))
    return numel, lengths, counts, pitches


def places(packed, lists):
    """Return the addresses of the elements that the kernels read, in their order, by list and pair."""
    t = packed.chunk_map.num_tensors
    numel, lengths, counts, pitches = pair_parts(packed, lists)
    pointers = packed.pointers.view(lists, t).tolist()
    found = []
    for side in range(lists):
        found.append([])
        for i in range(t):
            # as the kernel computes it
            size = packed.tensors[side * t + i].element_size()
            starts = [pointers[side][i] + chunk * pitches[side][i] * size for chunk in range(counts[i])]
            ends = [min(numel[i] - chunk * lengths[i], lengths[i]) for chunk in range(counts[i])]
            found[-1].append(
                [start + j * size for start, end in zip(starts, ends, strict=True) for j in range(end)]
            )
    return found


def addresses_of(x):
    """Return the addresses of a tensor's elements in row-major order."""
    offsets = torch.arange(x.untyped_storage().nbytes() // x.element_size()).as_strided(
        x.shape, x.stride(), x.storage_offset()
    )
    base = x.untyped_storage().data_ptr()
    return [base + i * x.element_size() for i in offsets.flatten().tolist()]


def test_pairs_with_gaps_are_read_in_place():
    wide = torch.ones(5, 3000)
    a = [wide[:, 100:2148], torch.ones(2500), wide[:1, :2000].expand(3, -1)]
    b = [torch.ones(5, 2048, dtype=torch.bfloat16), torch.ones(2501)[1:], torch.ones(3, 2000)]
    packed = pairs_of(a, b)
    assert pair_parts(packed, 2) == (
        [5 * 2048, 2500, 6000],
        [2048, 1024, 2000],
        [5, 3, 3],
        [[3000, 1024, 0], [2048, 1024, 2000]],
    )
    assert places(packed, 2) == [[addresses_of(x) for x in side] for side in (a, b)]
    # neither a copy nor a cast
    assert [x.data_ptr() for x in packed.tensors] == [x.data_ptr() for x in (*a, *b)]


def test_pairs_of_the_same_strides_are_read_in_the_order_of_their_memory():
    a, b = torch.ones(50, 60).t(), torch.ones(50, 60, dtype=torch.float16).t()
    packed = pairs_of([a], [b], [torch.empty(0)])
    found = places(packed, 3)
    for x, (seen,) in zip((a, b), found, strict=False):
        assert seen == addresses_of(x.t())
    assert [group.dtype for group in packed.chunk_map.groups] == [(torch.float32, torch.float16, None)]


@pytest.mark.parametrize("other", ["order", "short rows", "steps"])
def test_pairs_that_cannot_be_read_together_are_copied(other):
    x = torch.arange(6000.0).view(60, 100)
    b = {"order": torch.ones(100, 60).t(), "short rows": torch.ones(60, 120)[:, :100]}.get(
        other, torch.ones(60, 200)[:, ::2]
    )
    packed = pairs_of([x], [b])
    assert packed.tensors[0].data_ptr() == x.data_ptr()
    assert packed.tensors[1].data_ptr() != b.data_ptr()
    assert all(y.is_contiguous() for y in packed.tensors)


def test_pairs_are_recognized_and_their_tables_reused():
    def sides():
        wide = torch.ones(4, 3000)
        return [torch.ones(5), wide[:, :2048]], [torch.ones(5), torch.ones(4, 2048)]

    first, second = sides(), sides()
    one, two = (pairs_of(*each, keep=True) for each in (first, second))
    assert len(known()) == 1
    assert two.chunk_map is one.chunk_map
    assert two.table is one.table
    assert one.pointers.tolist() == [x.data_ptr() for side in first for x in side]
    assert two.pointers.tolist() == [x.data_ptr() for side in second for x in side]
    # with other strides, it is another list
    other = pairs_of(first[0], [torch.ones(5), torch.ones(2048, 4).t()], keep=True)
    assert len(known()) == 2
    assert other.chunk_map is not one.chunk_map


def test_one_list_cut_in_two_or_three_or_not_at_all_has_its_own_chunks():
    tensors = [torch.ones(5) for _ in range(6)]
    two, three = [tensors[:3], tensors[3:]], [tensors[:2], tensors[2:4], tensors[4:]]
    for _ in range(2):
        assert pairs_of(*two).chunk_map.num_tensors == 3
        assert pairs_of(*three).chunk_map.num_tensors == 2
        assert pack_of(*tensors).chunk_map.num_tensors == 6
    assert len(known()) == 1


def test_pairs_are_grouped_by_the_dtypes_of_both_and_of_the_gradient():
    x, y, nothing = torch.ones(3), torch.ones(3, dtype=torch.float16), torch.empty(0)
    packed = pairs_of([x, y, x, nothing], [x, x, x, nothing], [nothing, y, y, nothing])
    kinds = {group.dtype: group.num_chunks for group in packed.chunk_map.groups}
    half = torch.float16
    assert kinds == {
        (torch.float32, torch.float32, None): 1,
        (half, torch.float32, half): 1,
        (torch.float32, torch.float32, half): 1,
    }
