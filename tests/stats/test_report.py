"""Report, on the host: values by name, findings, health, exports, and the printed table."""

from __future__ import annotations

import gc
import math
import re
import sys
import unicodedata
from dataclasses import fields, replace

import pytest
import torch

import gradiometer as gm

FIELDS = [field.name for field in fields(gm.TensorReport)][:-1]

MIXED = {
    "embed.weight": torch.full((1200, 100), 0.5),
    "block.0.weight": torch.tensor([3.0, 4.0, 0.0, 0.0]),
    "block.0.bias": torch.zeros(3),
    "head.weight": torch.full((16,), 1e3),
    "head.bias": torch.tensor([1.0, math.nan, math.inf, -math.inf]),
    "scale": torch.tensor([2.0**-30]),
}


def report_of(tensors: object, **thresholds: float) -> gm.Report:
    return gm.collect(tensors, thresholds=gm.Thresholds(**thresholds)).materialize()


# from the device to the host


@pytest.mark.gpu
def test_a_report_from_a_gpu_arrives_without_waiting_for_later_work() -> None:
    stats = gm.collect({name: tensor.cuda() for name, tensor in MIXED.items()})
    pending = stats.materialize_async()
    assert repr(pending.result().rows()) == repr(stats.materialize().rows())
    assert pending.ready() is True
    busy = torch.zeros(1, device="cuda")
    torch.cuda._sleep(2_000_000_000)
    later = gm.collect({"x": busy}).materialize_async()
    assert later.ready() is False
    assert pending.result()["block.0.weight"].norm == 5.0
    assert later.ready() is False
    assert later.result()["x"].norm == 0.0
    assert later.ready() is True


# findings


def test_findings_are_lists_of_names_in_the_order_of_the_model() -> None:
    report = report_of(
        {
            "inf.0": torch.tensor([math.inf]),
            "dead.0": torch.zeros(2),
            "fine": torch.ones(2),
            "nan": torch.tensor([math.nan, 0.0]),
            "large": torch.tensor([101.0]),
            "small": torch.tensor([1e-8]),
            "both": torch.tensor([math.nan, -math.inf]),
            "none": torch.empty(0),
        }
    )
    assert report.nan == ["nan", "both"]
    assert report.inf == ["inf.0", "both"]
    assert report.exploding == ["inf.0", "nan", "large", "both"]
    assert report.vanishing == ["dead.0", "small"]
    assert report.dead == ["dead.0"]
    assert report.flagged(gm.Flag.DEAD | gm.Flag.NAN) == ["dead.0", "nan", "both"]
    assert report.flagged(gm.Flag(0)) == []
    assert report.found_inf is True
    assert report_of({"x": torch.ones(1)}).found_inf is False


def test_findings_follow_the_thresholds() -> None:
    tensors = {"five": torch.tensor([3.0, 4.0, 0.0, 0.0])}
    report = report_of(tensors, exploding=4.0, dead=0.5, vanishing=0.0)
    assert (report.exploding, report.dead, report.vanishing) == (["five"], ["five"], [])
    report = report_of(tensors, exploding=5.0, dead=0.75, vanishing=6.0)
    assert (report.exploding, report.dead, report.vanishing) == ([], [], ["five"])


def test_the_total_is_a_row_of_all_tensors_together() -> None:
    report = report_of({"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([-4.0, 0.0, 0.0, 0.0])})
    total = report.total
    assert type(total) is gm.TensorReport
    assert total.name == "total"
    assert (total.numel, total.n_zero, total.sum, total.sumsq) == (6, 4, -1.0, 25.0)
    assert total.norm == report.total_norm == 5.0
    assert total.abs_max == 4.0
    assert total.zero_fraction == 4 / 6
    assert report_of(MIXED).total.n_nonfinite == 3
    assert math.isnan(report_of(MIXED).total_norm)
    assert report_of({"a": torch.ones(2), "b": torch.tensor([-math.inf])}).total_norm == math.inf


# health


def tensors_with(fine: int, vanishing: int, exploding: int) -> list[torch.Tensor]:
    return [
        *[torch.ones(2)] * fine,
        *[torch.full((2,), 1e-9)] * vanishing,
        *[torch.full((2,), 1e9)] * exploding,
    ]


@pytest.mark.parametrize(
    ("fine", "vanishing", "exploding", "health"),
    [
        (4, 0, 0, 1.0),
        (3, 1, 0, 0.875),
        (3, 0, 1, 0.8),
        (0, 4, 0, 0.5),
        (0, 0, 4, 0.2),
        (2, 1, 1, 0.675),
        (0, 1, 1, 0.35),
        (999, 1, 0, 0.9995),
    ],
)
def test_health_falls_with_the_share_of_vanishing_and_exploding_tensors(
    fine: int, vanishing: int, exploding: int, health: float
) -> None:
    report = report_of(tensors_with(fine, vanishing, exploding))
    # both sides have a few roundings of numbers up to 1
    assert abs(report.health - health) <= 4 * 2**-53
    assert type(report.health) is float


def test_health_at_its_edges() -> None:
    assert report_of({}).health == 1.0
    assert report_of({"none": torch.empty(0)}).health == 1.0
    # one NaN in any tensor is enough
    assert report_of([*tensors_with(99, 0, 0), torch.tensor([1.0, math.nan])]).health == 0.0
    assert report_of([*tensors_with(99, 0, 0), torch.tensor([-math.inf])]).health == 0.0
    # dead alone does not affect health
    assert report_of({"x": torch.zeros(2)}, vanishing=0.0).dead == ["x"]
    assert report_of({"x": torch.zeros(2)}, vanishing=0.0).health == 1.0
    # with thresholds that make a tensor both, 1 - 0.5 - 0.8 is clamped to 0
    both = report_of({"x": torch.tensor([5.0])}, vanishing=10.0, exploding=1.0)
    assert both.vanishing == both.exploding == ["x"]
    assert both.health == 0.0


# worst first


def test_the_worst_come_first() -> None:
    expected = {
        "three bad elements": torch.tensor([math.nan, math.inf, -math.inf]),
        "one bad, large": torch.tensor([math.nan, 500.0]),
        "one bad, small": torch.tensor([math.inf, 1.0]),
        "exploding most": torch.tensor([1e20]),
        "exploding": torch.tensor([1e3]),
        "dead": torch.zeros(4),
        "vanishing most": torch.tensor([1e-12]),
        "vanishing": torch.tensor([1e-8]),
        "large": torch.tensor([9.0]),
        "fine": torch.tensor([3.0]),
        "small": torch.tensor([1e-3]),
        "no elements": torch.empty(0),
    }
    shuffled = sorted(expected)
    assert shuffled != list(expected)
    report = report_of({name: expected[name] for name in shuffled})
    assert [row.name for row in report.worst_first()] == list(expected)
    # ties keep the order of the model, and the call does not change the report
    assert [row.name for row in report.rows()] == shuffled
    ones = report_of({name: torch.ones(1) for name in "cabd"})
    assert "".join(row.name for row in ones.worst_first()) == "cabd"


# to_dict and to_frame


def test_a_report_as_a_dict_has_the_rows_that_iteration_gives() -> None:
    # without NaN, which does not equal itself
    finite = report_of({name: x for name, x in MIXED.items() if bool(x.isfinite().all())})
    rows = finite.to_dict()["tensors"]
    flags = {row.name: {"flags": [flag.name for flag in row.flags]} for row in finite.rows()}
    assert rows == {
        row.name: {x: getattr(row, x) for x in FIELDS[1:]} | flags[row.name] for row in finite.rows()
    }
    assert [list(row) for row in rows.values()] == [FIELDS[1:]] * len(rows)


def test_a_report_as_a_dict_calls_no_function_for_each_tensor() -> None:
    def calls_of(count: int) -> int:
        report = report_of({str(i): torch.full((3,), float(i % 7)) for i in range(count)})
        calls = 0

        def profile(_: object, event: str, __: object) -> None:
            nonlocal calls
            calls += event == "call"

        before = sys.getprofile()
        # a garbage collection would run the callbacks of other libraries
        gc.disable()
        sys.setprofile(profile)
        try:
            report.to_dict()
        finally:
            sys.setprofile(before)
            gc.enable()
        return calls

    # the names of flags are looked up only once
    first = [calls_of(count) for count in (20, 2000)]
    again = [calls_of(count) for count in (20, 2000)]
    assert again[0] == again[1] <= min(first)


# the table

RULE = "─"
HEADER = ["name", "elements", "norm", "rms", "abs max", "zero %", "NaN", "±Inf", "flags"]


def width(text: str) -> int:
    """Return the columns of a text on a terminal: two for a wide character, none for a combining one."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text
    )


def table_of(text: str) -> tuple[str, str, list[str], str | None, str]:
    """Return the headline, header, rows, the line about omitted rows, and the total."""
    headline, rule, header, second, *body, third, total = text.split("\n")
    assert rule == second == third
    assert set(rule) == {RULE}
    more = body.pop() if body and body[-1].startswith("… ") else None
    return headline, header, body, more, total


def cells_of(line: str) -> list[str]:
    cells = re.split(r" {2,}", line)
    return cells if len(cells) == len(HEADER) else [*cells, ""]


def assert_aligned(text: str) -> None:
    """Check that names begin at the left, numbers end below their header's end, flags begin below theirs."""
    _, header, rows, _, total = table_of(text)
    assert re.split(r" {2,}", header) == HEADER
    ends = [header.index(f"  {title}") + 2 + len(title) for title in HEADER[1:-1]]
    flags_start = header.index("  flags") + 2
    assert flags_start == ends[-1] + 2
    for line in (*rows, total):
        assert line == line.rstrip()
        cells = cells_of(line)
        assert len(cells) == len(HEADER)
        end = width(line[: line.index(cells[0]) + len(cells[0])])
        assert end == width(cells[0])
        position = len(cells[0])
        for cell, right in zip(cells[1:-1], ends, strict=True):
            position = line.index(f"  {cell}", position) + 2 + len(cell)
            assert width(line[:position]) == right, line
        if cells[-1]:
            assert width(line[: line.rindex(cells[-1])]) == flags_start


def test_a_small_table_looks_like_this() -> None:
    expected = """\
6 tensors, 120.0k elements, total norm nan, health 0.00, 1 with NaN, 1 with Inf, 3 exploding, 1 dead, 2 vanishing
────────────────────────────────────────────────────────────────────────────────────────────
name            elements      norm       rms   abs max  zero %  NaN  ±Inf  flags
────────────────────────────────────────────────────────────────────────────────────────────
head.bias              4       nan         1         1       0    1     2  NAN INF EXPLODING
head.weight           16     4,000     1,000     1,000       0    -     -  EXPLODING
embed.weight      120.0k       173       0.5       0.5       0    -     -  EXPLODING
block.0.bias           3         0         0         0     100    -     -  VANISHING DEAD
scale                  1  9.31e-10  9.31e-10  9.31e-10       0    -     -  VANISHING
block.0.weight         4         5       2.5         4    50.0    -     -
────────────────────────────────────────────────────────────────────────────────────────────
total             120.0k       nan      11.6     1,000    <0.1    1     2  5 flagged"""  # noqa: E501
    assert str(report_of(MIXED)) == expected
    assert_aligned(expected)


def test_an_abridged_table_looks_like_this() -> None:
    expected = """\
5 tensors, 120.0k elements, total norm 4,000, health 0.48, 2 exploding, 1 dead, 2 vanishing
───────────────────────────────────────────────────────────────────────────
name          elements   norm    rms  abs max  zero %  NaN  ±Inf  flags
───────────────────────────────────────────────────────────────────────────
head.weight         16  4,000  1,000    1,000       0    -     -  EXPLODING
embed.weight    120.0k    173    0.5      0.5       0    -     -  EXPLODING
… 3 more, norm 0 to 5, 2 of them flagged
───────────────────────────────────────────────────────────────────────────
total           120.0k  4,000   11.6    1,000    <0.1    -     -  4 flagged"""
    report = report_of({name: MIXED[name] for name in MIXED if name != "head.bias"})
    assert report.to_string(2) == expected


def test_one_tensor_looks_like_this() -> None:
    expected = """\
1 tensor, 2 elements, total norm 5, health 1.00, no flags
──────────────────────────────────────────────────────────────
name   elements  norm   rms  abs max  zero %  NaN  ±Inf  flags
──────────────────────────────────────────────────────────────
w             2     5  3.54        4       0    -     -
──────────────────────────────────────────────────────────────
total         2     5  3.54        4       0    -     -"""
    assert str(report_of({"w": torch.tensor([3.0, 4.0])})) == expected


def test_an_empty_report_is_one_line() -> None:
    report = report_of({})
    assert str(report) == (
        "nothing measured: no tensors (gradients exist after backward() and before zero_grad())"
    )
    assert repr(report) == "<Report: nothing measured: no tensors>"


def test_a_thousand_tensors_are_abridged_to_twenty() -> None:
    tensors = {f"layers.{i}.weight": torch.full((2,), float(i)) for i in range(1000)}
    report = report_of(tensors)
    headline, _, rows, more, total = table_of(str(report))
    # norms are i * sqrt(2): above 100 from i = 71 on
    assert headline.startswith("1000 tensors, 2,000 elements, total norm ")
    assert headline.endswith(", 929 exploding, 1 dead, 1 vanishing")
    assert [cells_of(row)[0] for row in rows] == [f"layers.{i}.weight" for i in range(999, 979, -1)]
    assert more == "… 980 more, norm 0 to 1,380, 910 of them flagged"
    assert cells_of(total)[-1] == "930 flagged"
    assert_aligned(str(report))
    everything = report.to_string(None)
    assert len(everything.split("\n")) == 1000 + 6
    assert_aligned(everything)
    assert all(f"\n{name} " in everything for name in tensors)


def test_the_total_line_counts_flagged_tensors_and_not_the_flags_of_the_sum() -> None:
    # each is below the threshold of a tensor, but their total is above it
    report = report_of([torch.tensor([90.0])] * 4)
    assert report.total.norm == 180.0
    *_, total = table_of(str(report))
    assert cells_of(total)[0] == "total"
    assert cells_of(total)[-1] == ""
    assert "no flags" in str(report)


@pytest.mark.parametrize("seed", range(4))
def test_every_line_of_a_table_has_the_same_columns(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for i in range(30):
        exponents = torch.rand(2, generator=generator).mul(torch.tensor([5.5, 20.0])).tolist()
        x = torch.randn(int(10 ** exponents[0]), generator=generator) * 10 ** (exponents[1] - 12)
        is_odd = torch.rand(len(x), generator=generator) < torch.rand((), generator=generator)
        x[is_odd] = (0.0, math.nan, math.inf, 0.0)[i % 4]
        tensors["n" * (1 + 7 * i % 43) + str(i)] = x
    for max_rows in (None, 20, 5):
        assert_aligned(report_of(tensors).to_string(max_rows))


@pytest.mark.parametrize(
    "names",
    [
        ["größe.ß", "λ.weight", "naïve"],
        ["編碼器.權重", "デコーダ.バイアス", "w"],
        ["e\u0301te\u0301.weight", "w"],
        ["🙂.weight", "w"],
    ],
    ids=["one column each", "two columns", "combining", "emoji"],
)
def test_names_in_any_script_keep_the_columns(names: list[str]) -> None:
    report = report_of({name: torch.full((i + 2,), 3.0) for i, name in enumerate(names)})
    assert [row.name for row in report.rows()] == names
    assert_aligned(str(report))
    assert all(name in str(report) for name in names)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"),
        (-0.0, "0"),
        (5.0, "5"),
        (1e-200, "1e-200"),
        (1.5e150, "1.5e150"),
        (math.nan, "nan"),
        (-math.inf, "inf"),
    ],
)
def test_a_number_is_shown_with_three_digits_and_zero_as_zero(value: float, shown: str) -> None:
    text = str(report_of({"w": torch.tensor([value], dtype=torch.float64)}))
    _, _, (row,), _, total = table_of(text)
    # the square of 1e-200 is 0 in a double: the norm is 0, but the largest magnitude is not
    column = 2 if abs(value) > 1e-150 or value == 0 or math.isnan(value) else 4
    assert cells_of(row)[column] == shown
    assert cells_of(total)[column] == shown
    assert_aligned(text)


@pytest.mark.parametrize(
    ("zeros", "of", "shown"),
    [
        (0, 4, "0"),
        (4, 4, "100"),
        (1, 4, "25.0"),
        (1, 100_000, "<0.1"),
        (99_999, 100_000, "99.9"),
        (1, 1000, "0.1"),
    ],
)
def test_only_all_or_none_are_shown_as_0_or_100_percent(zeros: int, of: int, shown: str) -> None:
    x = torch.ones(of)
    x[:zeros] = 0.0
    _, _, (row,), _, _ = table_of(str(report_of({"w": x})))
    assert cells_of(row)[5] == shown


def test_long_names_are_shortened_and_keep_their_end() -> None:
    # the longest name that is shown whole, and one more character
    limit = next(n for n in range(10, 200) if "…" in str(report_of({"x" * (n - 2) + ".y": torch.ones(1)})))
    fits, long = "x" * (limit - 3) + ".y", "a" + "x" * (limit - 3) + ".y"
    assert f"\n{fits} " in str(report_of({fits: torch.ones(1)}))
    (row,) = table_of(str(report_of({long: torch.ones(1)})))[2]
    shown = cells_of(row)[0]
    assert shown.startswith("ax")
    assert shown.endswith("x.y")
    assert len(shown) < len(long)
    assert_aligned(str(report_of({long: torch.ones(1), "b": torch.ones(1), fits: torch.ones(1)})))
    # the report itself keeps the whole name
    assert report_of({long: torch.ones(1)})[long].numel == 1


@pytest.mark.parametrize(
    "pattern",
    [
        "base_model.model.model.layers.{}.self_attn.q_proj.lora_A.default.weight",
        "model.vision_tower.vision_model.encoder.layers.{}.self_attn.out_proj.weight",
        "transformer.decoder.blocks.0.very.deep.inside.of.the.network.there.is.a.linear.weight.{}",
        "{}.transformer.decoder.blocks.0.very.deep.inside.of.the.network.there.is.a.linear.weight",
    ],
    ids=["lora", "vision tower", "end", "start"],
)
def test_long_names_stay_distinguishable(pattern: str) -> None:
    names = [pattern.format(i) for i in range(18)]
    _, _, rows, _, _ = table_of(str(report_of({name: torch.ones(1) for name in names})))
    assert len({cells_of(row)[0] for row in rows}) == len(names)


@pytest.mark.parametrize(
    ("numel", "shown"),
    [
        (1, "1"),
        (999, "999"),
        (1000, "1,000"),
        (99_999, "99,999"),
        (100_000, "100.0k"),
        (123_456, "123.5k"),
        (999_949, "999.9k"),
        (999_960, "1.0M"),
        (5 * 10**12, "5000.0B"),
    ],
)
def test_counts_take_the_unit_in_which_they_are_short(numel: int, shown: str) -> None:
    from gradiometer.stats import text_table

    assert text_table.count(numel) == shown


def test_health_is_shown_as_1_only_when_nothing_is_flagged() -> None:
    tensors = {str(i): torch.ones(1) for i in range(999)}
    assert "health 1.00, no flags" in str(report_of(tensors))
    assert "health 0.99, 1 exploding" in str(report_of(tensors | {"x": torch.full((1,), 1e9)}))


def test_rows_that_are_left_out_are_summed_up_truly() -> None:
    tensors = {f"nan{i}": torch.tensor([math.nan]) for i in range(3)}
    tensors |= {
        "inf": torch.tensor([math.inf, 1.0]),
        "a": torch.ones(4),
        "b": torch.ones(9),
        "none": torch.empty(0),
    }
    report = report_of(tensors)
    assert "… 6 more, norm 2 to 3, 3 not finite, 3 of them flagged" in report.to_string(1)
    assert "… 4 more, norm 2 to 3, 1 not finite, 1 of them flagged" in report.to_string(3)
    only = report_of({name: x for name, x in tensors.items() if name.startswith("nan")})
    assert "… 2 more, 2 not finite, 2 of them flagged" in only.to_string(1)
    assert "… 1 more, no flags" in report_of({"a": torch.ones(2), "none": torch.empty(0)}).to_string(1)


def test_where_nothing_is_finite_no_value_is_shown() -> None:
    line = next(
        x for x in str(report_of({"w": torch.tensor([math.nan, math.inf])})).splitlines() if x[0] == "w"
    )
    assert line.split() == ["w", "2", "nan", "-", "-", "0", "1", "1", "NAN", "INF", "EXPLODING"]


# reports of all ranks


def of_ranks(tensors: dict[str, torch.Tensor], ranks: dict[str, int]) -> gm.Report:
    """Return the report of statistics merged over several ranks."""
    stats = gm.collect(tensors)
    origin = torch.tensor([float(ranks.get(name, -1)) for name in stats.names], dtype=torch.float64)
    return replace(stats, origin=origin).materialize()


def test_the_rank_of_what_is_not_finite_is_shown() -> None:
    bad = torch.tensor([3.0, math.nan])
    tensors = {"a.w": bad, "a.b": bad, "b.w": torch.ones(1), "c.w": bad, "c.b": bad}
    report = of_ranks(tensors, {"a.w": 12, "a.b": 0, "c.w": 3, "c.b": 12})
    expected = """\
5 tensors of all ranks, 9 elements, total norm nan, health 0.00, 4 with NaN, 4 exploding
────────────────────────────────────────────────────────────────────────────────
name   elements  norm   rms  abs max  zero %  NaN  ±Inf      rank  flags
────────────────────────────────────────────────────────────────────────────────
a.w           2   nan     3        3       0    1     -        12  NAN EXPLODING
a.b           2   nan     3        3       0    1     -         0  NAN EXPLODING
c.w           2   nan     3        3       0    1     -         3  NAN EXPLODING
c.b           2   nan     3        3       0    1     -        12  NAN EXPLODING
b.w           1     1     1        1       0    -     -         -
────────────────────────────────────────────────────────────────────────────────
total         9   nan  2.72        3       0    4     -  0, 3, 12  4 flagged"""
    assert str(report) == expected
    assert report.is_reduced
    modules = report.by_module(1)
    assert {name: module.ranks for name, module in modules.items()} == {
        "a": {"a.w": 12, "a.b": 0},
        "b": {},
        "c": {"c.w": 3, "c.b": 12},
    }
    assert all(module.is_reduced for module in modules.values())
    header, _, *lines = str(modules).splitlines()
    assert re.split(r" {2,}", header)[-2:] == ["rank", "flags"]
    assert [re.split(r" {2,}", line)[10] for line in lines] == ["0, 12", "-", "3, 12"]
    # only the first few of many
    many = of_ranks({str(i): bad for i in range(5)}, {str(i): 7 - i for i in range(5)})
    assert re.split(r" {2,}", str(many).splitlines()[-1])[-2] == "3, 4, 5…"


def test_without_a_rank_to_show_there_is_no_column_for_it() -> None:
    report = of_ranks({"w": torch.ones(4)}, {})
    assert str(report).startswith("1 tensor of all ranks, 4 elements, ")
    assert re.split(r" {2,}", str(report).splitlines()[2]) == HEADER
    assert "rank" not in str(report.by_module(1))
