"""The choice of tests for ``make test`` names tests that are there."""

from __future__ import annotations

import pytest

from tests.accelerator.core import CORE, is_core, unknown


def test_every_test_of_the_core_is_there(request: pytest.FixtureRequest) -> None:
    """Of the files collected with this one. (A test that got another name would be left out without a word.)"""
    if request.config.option.keyword or any("::" in arg for arg in request.config.args):
        pytest.skip("somebody chose tests: those of the core need not be among them")
    assert unknown((item.path.name, item.name) for item in request.session.items) == []


def test_a_name_that_is_gone_is_noticed_and_a_variant_may_be_chosen() -> None:
    file, (name, *_) = next(iter(CORE.items()))
    assert unknown([(file, "test_of_another_name")])
    assert is_core(file, name, None)
    assert is_core(file, name, 3)
    assert not is_core(file, name, 1)
    assert not is_core(file, "test_of_another_name", 3)
