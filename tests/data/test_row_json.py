"""Dataset rows in checkpoints: every value comes back equal and of its type, or is refused by name."""

import datetime
import decimal
import json
import math
import sys
import zoneinfo
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from trl_april.data.row_json import decode_row, encode_row
from trl_april.errors import ConfigError


def through_json(row: dict[str, Any]) -> dict[str, Any]:
    return decode_row(json.loads(json.dumps(encode_row(row))))


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.dates()
    | st.times()
    | st.timedeltas(min_value=datetime.timedelta(-10_000), max_value=datetime.timedelta(10_000))
    | st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**6), max_value=10**6)
    | st.datetimes(timezones=st.none() | st.just(zoneinfo.ZoneInfo("Europe/Berlin")), allow_imaginary=False),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text(), inner)
        | st.dictionaries(st.integers() | st.tuples(st.text()), inner)
        | st.lists(inner).map(tuple)
    ),
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


@given(st.dictionaries(st.text(), plain))
def test_rows_come_back_equal_and_of_the_same_types(row: dict[str, Any]):
    assert same(through_json(row), row)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3),
        np.arange(6).reshape(2, 3).T,
        np.array(1.5, dtype=np.float16),
        np.zeros((0, 3), dtype=np.int8),
        np.array(["a", "bcd"]),
        np.array(["2020-01-01", "NaT"], dtype="datetime64[D]"),
        np.array([1 + 2j]),
        np.arange(3, dtype=">i4"),
        np.array([1, 2], dtype="timedelta64[25s]"),
    ],
)
def test_numpy_arrays(array: np.ndarray):
    found = through_json({"x": array})["x"]
    assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())
    found[...] = 0  # as writable as the original


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "1", "I;16"])
def test_images(mode):
    image = Image.new(mode, (3, 2), 1)
    found = through_json({"x": image})["x"]
    assert (found.mode, found.size, found.tobytes()) == (mode, (3, 2), image.tobytes())
    with pytest.raises(ConfigError, match="an image that PNG does not hold"):
        encode_row({"x": Image.new("CMYK", (3, 2))})


def test_arrays_of_objects():
    array = np.empty((2,), dtype=object)
    array[0], array[1] = [1, 2], [{"a": (3,)}, None]
    found = through_json({"x": array})["x"]
    assert found.shape == (2,) and found.dtype == object and found.tolist() == array.tolist()


@pytest.mark.parametrize("scalar", [np.float32(2.5), np.int64(3), np.bool_(True), np.float64(0.1), np.str_("x")])
def test_numpy_scalars(scalar: Any):
    found = through_json({"x": scalar})["x"]
    assert type(found) is type(scalar) and found == scalar


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).reshape(2, 3),
        torch.zeros(0, 2),
        torch.arange(6).reshape(2, 3).T,
        torch.tensor([1 + 2j]).conj(),
    ],
)
def test_tensors(tensor: torch.Tensor):
    found = through_json({"x": tensor})["x"]
    assert found.dtype == tensor.dtype and found.shape == tensor.shape and found.tolist() == tensor.tolist()


def test_not_a_number_and_infinity():
    found = through_json({"x": [math.nan, math.inf, -math.inf]})["x"]
    assert math.isnan(found[0]) and found[1:] == [math.inf, -math.inf]


def test_rows_of_datasets_come_back_equal():
    dataset = Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": "1+1"}],
                "when": datetime.datetime(2020, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC")),
                "raw": b"\x00",
                "price": decimal.Decimal("1.10"),
                "nested": {"a": [1, None], "b": None},
            }
        ]
    )
    for view in (dataset, dataset.with_format("numpy"), dataset.with_format("torch", columns=["nested"])):
        row = view[0]
        assert str(through_json(row)) == str(row)


@pytest.mark.parametrize(
    "value",
    [
        pandas.Timestamp("2026-01-02 03:04:05.123456789"),
        pandas.Timestamp("2026-10-25 02:30", tz="UTC").tz_convert("Europe/Berlin"),
        pandas.Timestamp("2026-10-25 00:30", tz="UTC").tz_convert("Europe/Berlin"),  # the same time of day
        pandas.Timestamp("2026-01-01", tz=datetime.timezone(datetime.timedelta(hours=-3))),
        pandas.Timedelta("-1 days 00:00:00.000000005"),
    ],
)
def test_pandas_times(value: Any):
    """Columns of the types that pandas makes are `timestamp[ns]` and `duration[ns]`, for which Python has no types."""
    found = through_json({"x": value})["x"]
    assert type(found) is type(value) and found == value
    assert str(getattr(found, "tz", None)) == str(getattr(value, "tz", None))


@pytest.mark.parametrize(
    "value",
    [
        object(),
        pandas.NaT,
        {1, 2},
        np.array([object()], dtype=object),
        np.zeros(1, dtype=[("a", object)]),
        [lambda: 0],
        np.zeros(2, dtype=[("a", np.int32)]),  # would come back without its fields
        np.array(["a"], dtype=np.dtypes.StringDType()),  # its memory holds pointers
        torch.zeros(2).to_sparse(),
        torch.ones(2, dtype=torch.bfloat16),
        torch.zeros(2, device="meta"),
        [1 << 20_000],
    ],
)
def test_value_that_cannot_be_written_is_refused_by_column_and_type(value: Any):
    with pytest.raises(ConfigError, match="Column 'thing' of the training dataset holds an? .* save_strategy='no'"):
        encode_row({"prompt": "x", "thing": {"inside": [value]}})


def test_list_that_contains_itself_is_refused():
    rows: list = []
    rows.append(rows)
    with pytest.raises(ConfigError, match="Column .thing. of the .* holds lists or dicts that are nested"):
        encode_row({"thing": rows})


@pytest.mark.parametrize(
    "encoded",
    [
        {"$array": ["|O", [1], "AAAAAAAAAAA="]},
        {"$array": ["|T16", [1], "AAAAAAAAAAAAAAAAAAAAAA=="]},
        {"$array": ["i4,O", [0], ""]},
        {"$array": ["|V4", [1], "AAAAAA=="]},
        {"$array": [[["a", "|O"]], [0], ""]},
        {"$array": ["<i4", [1], "AAAAAAAAAAA="]},
        {"$array": ["object", [2], [1]]},
        {"$scalar": ["<i4", [1], "AAAAAA=="]},
        {"$tensor": ["<f4", [2], "AAAAAA=="]},
        {"$date": "AAAA"},
        {"$nonsense": 1},
        {"$bytes": "!"},
        {"$bytes": "AAAA", "x": 1},
        {"$dict": [1]},
    ],
)
def test_foreign_json_is_refused_and_imports_nothing(encoded: Any):
    imported = set(sys.modules)
    with pytest.raises((TypeError, ValueError, AttributeError, RuntimeError, KeyError)):
        decode_row({"x": encoded})
    assert set(sys.modules) == imported
