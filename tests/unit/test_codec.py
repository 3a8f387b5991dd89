"""What travels between ranks is plain JSON: it comes back as it went, and nothing in it can run."""

from __future__ import annotations

import json
import math
import pickle
from collections import OrderedDict, defaultdict
from datetime import datetime
from enum import Enum

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardstep.comm.codec import decode, dtype_name, dtype_of, encode, option_text

DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)


def there_and_back(value):
    """Through text, as between ranks, with the tensors carried beside it."""
    tensors: list[Tensor] = []

    def lift(tensor: Tensor) -> int:
        tensors.append(tensor)
        return len(tensors) - 1

    text = json.dumps(encode(value, lift))
    return decode(json.loads(text), tensors)


def same(a, b) -> bool:
    """Equal in value and type, tensors by identity, NaN and the sign of zero included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a is b
    if isinstance(a, float):
        return math.isnan(a) if math.isnan(b) else a == b and math.copysign(1, a) == math.copysign(1, b)
    if isinstance(a, dict):
        return list(map(type, a)) == list(map(type, b)) and all(map(same, a, b)) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


keys = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text())
keys = keys | st.tuples(keys, keys)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.sampled_from(DTYPES),
    st.sampled_from([torch.device("cpu"), torch.device("cuda", 1), torch.device("meta")]),
    st.builds(torch.tensor, st.lists(st.integers(-5, 5), max_size=3)),
)
plain_data = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple), st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=15,
)
plain_data |= st.sets(keys, max_size=4)


@settings(deadline=None, max_examples=200)
@given(plain_data)
def test_plain_data_comes_back_as_it_went(value):
    assert same(there_and_back(value), value)


@pytest.mark.parametrize(
    "value",
    [
        {"tensor": 0},
        {"dict": []},
        {"list": [1]},
        {"dtype": "float32"},
        {"device": "cpu"},
        {1: "int", "1": "text", (1, "a"): {}},
        {"step": 3, "betas": (0.9, 0.999), "deep": [[({"x": None},)]]},
        [float("nan"), float("inf"), -float("inf"), -0.0, 5e-324, 2**200, "\ud800", "\x00"],
    ],
    ids=str,
)
def test_data_that_looks_like_the_encoding_comes_back_as_it_went(value):
    assert same(there_and_back(value), value)


def test_equal_sets_are_encoded_alike_whatever_their_order():
    one, other = {8, 0, 16}, {16, 0, 8}  # three that share a place in the table
    assert json.dumps(encode(one, lambda tensor: 0)) == json.dumps(encode(other, lambda tensor: 0))
    assert there_and_back({"seen": one}) == {"seen": one}


def test_every_tensor_is_lifted_once_in_order_and_none_is_copied():
    a, b, c = torch.ones(2), torch.zeros(()), torch.nn.Parameter(torch.ones(3))
    seen: list[Tensor] = []
    encoded = encode({"a": a, "list": [b, {"c": c}]}, lambda tensor: seen.append(tensor) or len(seen) - 1)
    assert [id(t) for t in seen] == [id(a), id(b), id(c)]
    assert json.loads(json.dumps(encoded)) == encoded
    back = decode(encoded, dict(enumerate(seen)))  # numbered tensors may come as a mapping
    assert back["a"] is a
    assert back["list"][1]["c"] is c


def test_kinds_of_dicts_and_tuples_come_back_plain():
    assert same(there_and_back(OrderedDict(a=1)), {"a": 1})
    assert same(there_and_back(defaultdict(list, a=[1])), {"a": [1]})


def test_a_size_comes_back_as_one():
    assert type(there_and_back(torch.Size([2, 3]))) is torch.Size
    assert there_and_back(torch.Size([2, 3])) == (2, 3)


class Evil:
    def __reduce__(self):
        return (pytest.fail, ("unpickled",))


class Kind(Enum):
    A = 1
    B = 2


@pytest.mark.parametrize(
    "value",
    [
        object(),
        Evil(),
        frozenset({1, 2}),
        b"bytes",
        print,
        Evil,
        1 + 2j,
        datetime(2020, 1, 1),
        Kind.A,
        torch.Generator(),
        range(3),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: [v], lambda v: {"x": (1, v)}, lambda v: {"deep": {"er": [v]}}])
def test_objects_are_refused_by_the_name_of_their_class(value, wrap):
    with pytest.raises(TypeError, match=rf"{type(value).__qualname__}.*unpickled"):
        encode(wrap(value), lambda tensor: 0)


@pytest.mark.parametrize(
    "data",
    [
        {"dtype": "load"},
        {"dtype": "__builtins__"},
        {"dtype": "Tensor"},
        {"dtype": "os.system"},
        {"device": "__import__('os')"},
        {"object": "builtins.print"},
        {"__reduce__": ["os.system", ["true"]]},
        {"py/object": "os.system"},
        {},
        {"list": [], "dict": []},
    ],
    ids=str,
)
def test_nothing_that_arrives_can_name_code(data):
    """Names are looked up among torch's dtypes and devices only; anything else is an error."""
    with pytest.raises((ValueError, RuntimeError, TypeError)):
        decode(data, [])


def test_pickled_bytes_are_only_text():
    payload = pickle.dumps(Evil()).decode("latin-1")
    assert there_and_back([payload]) == [payload]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_have_names_that_lead_back(dtype):
    assert dtype_of(dtype_name(dtype)) is dtype


# --- options as text, for the agreement of ranks ----------------------------------------------------------------------

# In every row all values differ from each other.
DIFFERENT = {
    "numbers": [0.1, 0.2, 1, 0, True, None, float("nan"), "0.1"],
    "lists": [[1, 2], (1, 2), [1, 3], [1, 2, 3], [[1], 2], []],
    "tensors": [
        torch.tensor(0.1),
        torch.tensor(0.2),
        torch.tensor(0.1, dtype=torch.float64),
        torch.tensor([0.1]),
        torch.tensor([0.1, 0.2]),
    ],
    "dtypes": [torch.float32, torch.bfloat16],
    "devices": [torch.device("cpu"), torch.device("meta")],
    "dicts": [{}, {"a": 1}, {"a": 2}, {"b": 1}, {"a": {"x": torch.tensor(1)}}, {"a": {"x": torch.tensor(2)}}],
    "numpy numbers": [numpy.float64(0.1), numpy.float64(0.2), numpy.int64(3), numpy.bool_(True)],
    "enums": [Kind.A, Kind.B],
    "nested": [[torch.bfloat16], [torch.float16], [{"k": 1}], [{"k": 2}]],
}


@pytest.mark.parametrize("values", DIFFERENT.values(), ids=DIFFERENT)
def test_option_text_differs_when_the_values_differ(values):
    assert len({option_text(value) for value in values}) == len(values), list(map(option_text, values))


@pytest.mark.parametrize("values", DIFFERENT.values(), ids=DIFFERENT)
def test_option_text_is_equal_when_the_values_are(values):
    for value in values:
        copied = pickle.loads(pickle.dumps(value))
        assert option_text(copied) == option_text(value)


def test_option_text_of_an_object_does_not_show_its_address():
    """It differs between processes, so it would make ranks that agree differ."""
    assert option_text(object()) == option_text(object())
    assert option_text([lambda: 0]) == option_text([lambda: 0])
    assert option_text({"f": lambda: 0}) == option_text({"f": lambda: 0})


def test_option_text_shows_the_value_for_messages():
    assert option_text(0.1) == "0.1"
    assert "0.25" in option_text(torch.tensor(0.25))
    assert "bfloat16" in option_text(torch.bfloat16)
