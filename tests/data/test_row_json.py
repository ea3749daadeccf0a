"""Dataset rows in checkpoints: every value comes back equal and of its type, or is refused by name."""

import datetime
import json
import math
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from trl_april.data.row_json import decode_row, encode_row
from trl_april.errors import ConfigError


def through_json(row: dict[str, Any]) -> dict[str, Any]:
    return decode_row(json.loads(json.dumps(encode_row(row))))


keys = st.text() | st.sampled_from(["$", "$$ref", "$bytes", "$tuple"])
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(keys, inner) | st.lists(inner).map(tuple),
    max_leaves=12,
)


def same(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return left == right


@settings(max_examples=30)  # generating them takes most of the time
@given(st.dictionaries(st.text(), plain))
def test_rows_come_back_equal_and_of_the_same_types(row: dict[str, Any]):
    assert same(through_json(row), row)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3).T,
        np.array(1.5, dtype=np.float16),
        np.zeros((0, 3), dtype=np.int8),
        np.array(["a", "bcd"]),
        np.array(["2020-01-01", "NaT"], dtype="datetime64[D]"),
        np.arange(3, dtype=">i4"),
    ],
)
def test_numpy_arrays(array: np.ndarray):
    found = through_json({"x": array})["x"]
    assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())
    found[...] = 0  # as writable as the original


def test_scalars_and_images():
    for value in (np.float32(2.5), np.int64(3), np.bool_(True), np.float64(0.1), np.str_("x"), math.inf, -math.inf):
        found = through_json({"x": value})["x"]
        assert type(found) is type(value) and found == value
    assert math.isnan(through_json({"x": math.nan})["x"])
    for mode in ("RGB", "RGBA", "L", "1", "I;16"):
        image = Image.new(mode, (3, 2), 1)
        found = through_json({"x": image})["x"]
        assert (found.mode, found.size, found.tobytes()) == (mode, (3, 2), image.tobytes())


nested: list = []
nested.append(nested)


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        {1: 2},
        datetime.date(2026, 1, 2),
        torch.zeros(2),
        np.array([object()], dtype=object),
        np.zeros(2, dtype=[("a", np.int32)]),  # would come back without its fields
        np.array(["a"], dtype=np.dtypes.StringDType()),  # its memory holds pointers
        Image.new("CMYK", (3, 2)),
        Image.new("RGB", (0, 2)),
        [1 << 20_000],
        nested,
    ],
)
def test_value_that_cannot_be_written_is_refused_by_column(value: Any):
    with pytest.raises(ConfigError, match="Column 'thing' .* holds .* Remove the column"):
        encode_row({"prompt": "x", "thing": {"inside": [value]}})


@pytest.mark.parametrize(
    "encoded",
    [
        {"$array": ["|O", [1], "AAAAAAAAAAA="]},
        {"$array": ["|T16", [1], "AAAAAAAAAAAAAAAAAAAAAA=="]},
        {"$array": ["i4,O", [0], ""]},
        {"$array": ["|V4", [1], "AAAAAA=="]},
        {"$array": [[["a", "|O"]], [0], ""]},
        {"$array": ["<i4", [1], "AAAAAAAAAAA="]},
        {"$nonsense": 1},
        {"$bytes": "!"},
        {"$bytes": "AAAA", "x": 1},
        {"$image": "AAAA"},
    ],
)
def test_foreign_json_is_refused_and_imports_nothing(encoded: Any):
    imported = set(sys.modules)
    with pytest.raises((TypeError, ValueError, KeyError, OSError)):
        decode_row({"x": encoded})
    assert {name for name in set(sys.modules) - imported if not name.startswith("PIL.")} == set()
