"""Numbers in tables, and tables in HTML."""

from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradiometer as gm
from gradiometer.stats import TextTable, html, number, preformatted

PLAIN = re.compile(r"-?(0|0\.0?[1-9]\d{0,2}|[1-9]\d{0,2}(\.\d{1,2})?|[1-9],\d\d0)")
SCIENTIFIC = re.compile(r"-?[1-9](\.\d?[1-9])?e-?\d+")


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (0.0, "0"),
        (-0.0, "0"),
        (1.0, "1"),
        (-2.5, "-2.5"),
        (0.1234567, "0.123"),
        (0.01, "0.01"),
        (0.00999, "9.99e-3"),
        (9994.0, "9,990"),
        (9996.0, "1e4"),
        (1e-5, "1e-5"),
        (1.2e-4, "1.2e-4"),
        (1e300, "1e300"),
        (math.inf, "inf"),
        (math.nan, "nan"),
    ],
)
def test_a_number(x, text):
    assert number(x) == text


def test_more_digits():
    assert [number(x, 5) for x in (2.31041, 12345.6, 123456.0)] == ["2.3104", "12,346", "1.2346e5"]
    assert number(5.26, 2) == "5.3"


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_has_one_of_two_forms_and_is_near(x):
    text = number(x)
    assert PLAIN.fullmatch(text) or SCIENTIFIC.fullmatch(text)
    # half a unit of the third digit
    read = float(text.replace(",", ""))
    assert read == x or math.isinf(read) or abs(read - x) <= 0.00501 * abs(x) + 5e-324


def test_html_is_escaped_and_numbers_are_aligned_right():
    name = "<script>alert(1)</script>." + "x" * 60
    rows = [[name, "1.2e-4", "3 of 4", "NAN"], ["b", "-", "1 of 4", ""]]
    page = html(
        TextTable("a <b>", ("<i>", "norm", "dead", "flags"), rows, "… 2 & more", ("total", "1", "", ""))
    )
    assert "<script" not in page
    assert "<i>" not in page
    assert "<b>" not in page
    assert "… 2 &amp; more" in page
    # the name is shortened, and its title is whole
    assert re.search(
        r'title="&lt;script&gt;alert\(1\)&lt;/script&gt;\.x{60}">&lt;script&gt;[^<]*…x*</td>', page
    )
    sides = re.findall(r"<td [^>]*text-align:(\w+)", page)
    assert sides == ["left", "right", "left", "left"] * 2
    assert preformatted("<b>\n&") == "<pre>&lt;b&gt;\n&amp;</pre>"


def test_other_results_are_text_in_notebooks():
    model = torch.nn.Linear(2, 1)
    step = lambda: model(torch.ones(1, 2)).sum().backward()  # noqa: E731
    for found in (gm.check_finite(model), gm.check_deterministic(step, model)):
        assert found._repr_html_() == preformatted(str(found))
