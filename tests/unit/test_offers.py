"""Dicts for ``dcp.load`` whose optional keys are there if the checkpoint has them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardstep import checkpoint
from shardstep.state.offers import Offer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def offers(**entries):
    optional = {"maybe": lambda: torch.zeros(3), "count": lambda: 0}
    return {"app": {"list": [Offer({"always": torch.zeros(2), **entries}, optional)]}}


@pytest.fixture
def saved(tmp_path):
    """One checkpoint with the optional keys, one without."""
    for name, extra in (("with", {"maybe": torch.ones(3), "count": 7}), ("without", {})):
        dcp.save({"app": {"list": [{"always": torch.full((2,), 5.0), **extra}]}}, checkpoint_id=tmp_path / name)
    return tmp_path


class Own(dcp.DefaultLoadPlanner):
    """A planner that somebody derived, with other names for what it is given."""

    def set_up_planner(self, form, about=None, is_coordinator=False):  # type: ignore[override]
        super().set_up_planner(form, about, is_coordinator)


@pytest.mark.parametrize("planner", [lambda: None, checkpoint.SafeLoadPlanner, Own])
def test_optional_keys_are_there_if_the_checkpoint_has_them(saved, planner):
    form = offers()
    for name in ("with", "without", "with"):
        dcp.load(form, checkpoint_id=saved / name, planner=planner())
        (found,) = form["app"]["list"]
        assert torch.equal(found["always"], torch.full((2,), 5.0))
        if name == "with":
            assert torch.equal(found["maybe"], torch.ones(3))
            assert found["count"] == 7
        else:
            assert found.keys() == {"always"}


def test_what_is_there_before_is_loaded_into_and_goes_if_the_checkpoint_lacks_it(saved):
    mine = torch.full((3,), 2.0)
    form = offers(maybe=mine)
    dcp.load(form, checkpoint_id=saved / "with")
    assert form["app"]["list"][0]["maybe"] is mine
    assert torch.equal(mine, torch.ones(3))
    dcp.load(form, checkpoint_id=saved / "without")
    assert "maybe" not in form["app"]["list"][0]


def test_a_key_that_is_not_optional_is_missed_as_ever(saved):
    form = offers(further=torch.zeros(1))
    with pytest.raises(dcp.api.CheckpointException, match=r"Missing key in .*: app\.list\.0\.further"):
        dcp.load(form, checkpoint_id=saved / "with")


def test_what_is_saved_is_what_is_there(tmp_path):
    dcp.save(offers(count=3), checkpoint_id=tmp_path / "saved")
    found = dcp.FileSystemReader(tmp_path / "saved").read_metadata().state_dict_metadata
    assert sorted(found) == ["app.list.0.always", "app.list.0.count"]


def test_it_is_a_dict_and_copies_of_it_are_plain():
    (offer,) = offers(count=3)["app"]["list"]
    assert {**offer} == dict(offer) == dict(offer.items())
    assert isinstance(offer.copy(), Offer)
    for twin in (copy.deepcopy(offer), pickle.loads(pickle.dumps(offer))):
        assert type(twin) is dict
        assert twin.keys() == {"always", "count"}
