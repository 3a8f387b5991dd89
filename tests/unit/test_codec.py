"""What travels between ranks is plain JSON: it comes back as it went, and nothing in it can run."""

from __future__ import annotations

import json
import math
import pickle
from datetime import datetime
from enum import Enum
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardstep.comm.codec import decode, encode, option_text

DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)


def there_and_back(value: Any) -> Any:
    """Through text, as between ranks, with the tensors carried beside it."""
    tensors: list[Tensor] = []
    text = json.dumps(encode(value, lambda tensor: tensors.append(tensor) or len(tensors) - 1))
    return decode(json.loads(text), tensors)


def same(a: Any, b: Any) -> bool:
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
    keys,
    st.floats(),
    st.sampled_from(DTYPES),
    st.sampled_from([torch.device("cpu"), torch.device("cuda", 1), torch.Size([2, 3])]),
    st.builds(torch.tensor, st.lists(st.integers(-5, 5), max_size=3)),
)
plain_data = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple), st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=15,
)


@settings(deadline=None, max_examples=200)
@given(plain_data | st.sets(keys, max_size=4))
@example([{"tensor": 0}, {"dict": []}, {"list": [1]}, {"dtype": "float32"}, {"device": "cpu"}])  # as if encoded
@example({1: "int", "1": "text", (1, "a"): {}})
@example([float("nan"), -0.0, 5e-324, 2**200, "\ud800", "\x00"])
def test_plain_data_comes_back_as_it_went(value):
    assert same(there_and_back(value), value)


class Evil:
    def __reduce__(self):
        return (pytest.fail, ("unpickled",))


class Kind(Enum):
    A = 1
    B = 2


REFUSED = [object(), Evil(), frozenset({1}), b"bytes", print, Evil, 1 + 2j, datetime(2020, 1, 1), Kind.A, range(3)]


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
def test_objects_are_refused_by_the_name_of_their_class(value):
    for wrapped in (value, {"deep": {"er": [(1, value)]}}):
        with pytest.raises(TypeError, match=rf"{type(value).__qualname__}.*unpickled"):
            encode(wrapped, lambda tensor: 0)


NAMING = [
    *({"dtype": name} for name in ("load", "__builtins__", "os.system")),
    *({"device": "__import__('os')"}, {"object": "builtins.print"}, {"__reduce__": ["os.system", ["true"]]}),
    *({}, {"list": [], "dict": []}),
]


@pytest.mark.parametrize("data", NAMING, ids=str)
def test_nothing_that_arrives_can_name_code(data):
    """Names are looked up among torch's dtypes and devices only; anything else is an error."""
    with pytest.raises((ValueError, RuntimeError, TypeError)):
        decode(data, [])


def test_option_text_tells_values_apart_and_shows_no_addresses():
    """Ranks compare their options by it. An address differs between processes that agree."""
    numbers = [0.1, 0.2, 1, 0, True, None, float("nan"), "0.1", [1, 2], (1, 2), [], {}, {"a": 1}, {"a": {"x": 1}}]
    tensors = [torch.tensor(0.1), torch.tensor(0.2), torch.tensor(0.1, dtype=torch.float64), torch.tensor([0.1])]
    values = [*numbers, *tensors, [{"k": torch.tensor(2)}], Kind.A, Kind.B, torch.float32, torch.bfloat16]
    texts = [option_text(value) for value in values]
    assert len(set(texts)) == len(values), texts
    assert [option_text(pickle.loads(pickle.dumps(value))) for value in values] == texts
    assert option_text({"f": [lambda: 0, object()]}) == option_text({"f": [lambda: 0, object()]})
