"""Rename tables are read strictly: every key of a file is accounted for, and so is every one of ours."""

import pytest
import torch
from torch import nn

from vispe.models import MODELS
from vispe.weights import WeightsError, build
from vispe.weights.convert import accounts_for, convert, fill, first_of_one, no_key_bias, qkv_last_to_first
from vispe.weights.files import facts

RULES = [
    {"from": r"old\.(\d)\.w", "to": r"new.\1.weight"},
    {"from": r"q", "to": "qk", "part": 0},
    {"from": r"k", "to": "qk", "part": 1},
    {"from": r"first", "to": "one"},
    {"from": r"second", "to": "one", "twin": True},
    {"from": r"junk.*", "drop": "not needed"},
    {"from": r"wqkv", "to": "qkv", "change": "qkv_last_to_first_4_heads"},
]
ONE = torch.ones(1)


def test_keys_are_renamed_joined_and_dropped():
    q, k = torch.zeros(1, 2), torch.ones(2, 2)
    found = convert({"k": k, "old.3.w": ONE, "q": q, "junk.x": ONE}, RULES, "theirs")
    assert found.keys() == {"new.3.weight", "qk"}
    assert torch.equal(found["qk"], torch.cat([q, k]))


def test_a_pattern_means_the_whole_key():
    with pytest.raises(WeightsError, match=r"nothing is known of 'x\.old\.3\.w', 'old\.3\.weight'"):
        convert({"x.old.3.w": ONE, "old.3.weight": ONE, "q": ONE, "k": ONE}, RULES, "theirs")
    assert accounts_for(RULES, ["q", "junk"])
    assert not accounts_for(RULES, ["q", "qq"])


def test_many_unknown_keys_are_counted():
    with pytest.raises(WeightsError, match=r"'u5' and 4 more"):
        convert({f"u{i}": ONE for i in range(10)}, RULES, "theirs")


def test_two_keys_for_one_place_must_hold_the_same():
    assert convert({"first": ONE, "second": ONE.clone()}, RULES, "theirs").keys() == {"one"}
    for other in (2 * ONE, torch.ones(2)):
        with pytest.raises(WeightsError, match=r"'second' and another key of theirs both become 'one'"):
            convert({"first": ONE, "second": other}, RULES, "theirs")
    with pytest.raises(WeightsError, match=r"'old\.3\.w' and another"):  # no twin
        convert({"alias": ONE, "old.3.w": ONE}, [{"from": "alias", "to": "new.3.weight"}, *RULES], "theirs")


GATES = [
    {"from": "q_bias", "to": "bias", "part": 0, "zeros": 1},
    {"from": "k_bias", "to": "bias", "part": 1},
    {"from": "v_bias", "to": "bias", "part": 2},
    {"from": "gate", "to": "fc", "part": 0},
    {"from": "up", "to": "fc", "part": 1, "alone": True},
]


def test_a_part_that_no_key_gives_may_be_zeros():
    found = convert({"v_bias": 3 * torch.ones(2), "q_bias": torch.ones(2)}, GATES, "theirs")
    assert found["bias"].tolist() == [1, 1, 0, 0, 3, 3]
    found = convert({"v_bias": 3 * torch.ones(2), "k_bias": 2 * torch.ones(2), "q_bias": torch.ones(2)}, GATES, "it")
    assert found["bias"].tolist() == [1, 1, 2, 2, 3, 3]
    with pytest.raises(WeightsError, match="the parts of 'bias' do not fit together"):
        convert({"v_bias": ONE}, GATES, "theirs")


def test_a_part_may_be_the_whole():
    assert convert({"up": 2 * ONE}, GATES, "theirs")["fc"].tolist() == [2]
    assert convert({"up": 2 * ONE, "gate": ONE}, GATES, "theirs")["fc"].tolist() == [1, 2]
    with pytest.raises(WeightsError, match="the parts of 'twice' do not fit"):
        convert({"up": ONE}, [{"from": "up", "to": "twice", "part": 1}], "theirs")


def test_a_table_may_ask_for_a_key_of_its_own():
    rules = [{"from": "sign", "to": "sign", "must": True}, {"from": "w", "to": "w"}]
    assert accounts_for(rules, ["w", "sign"])
    assert not accounts_for(rules, ["w"])
    assert convert({"w": ONE}, rules, "theirs").keys() == {"w"}  # asked for by name it may lack it


def test_changes_by_hand():
    assert first_of_one(torch.ones(1, 2, 3)).shape == (2, 3)
    assert no_key_bias(torch.arange(6.0) + 1).tolist() == [1, 2, 0, 0, 5, 6]
    for change, value in (("first_of_one", torch.ones(2, 3)), ("no_key_bias", torch.ones(4))):
        with pytest.raises(WeightsError, match="'t' has an unexpected shape"):
            convert({"t": value}, [{"from": "t", "to": "t", "change": change}], "theirs")


@pytest.mark.parametrize("state", [{"k": ONE}, {"q": torch.zeros(2, 3), "k": torch.zeros(2, 4)}])
def test_parts_that_are_missing_or_do_not_fit_are_named(state):
    with pytest.raises(WeightsError, match="the parts of 'qk' do not fit together"):
        convert(state, RULES, "theirs")


@pytest.mark.parametrize("shape", [(5, 4), (), (12,)])
def test_a_surgery_on_the_wrong_shape_is_named(shape):
    if shape == (12,):
        assert convert({"wqkv": torch.zeros(shape)}, RULES, "theirs")["qkv"].shape == (12,)
    else:
        with pytest.raises(WeightsError, match="'wqkv' has an unexpected shape"):
            convert({"wqkv": torch.zeros(shape)}, RULES, "theirs")


def test_qkv_rows_by_hand():
    """Two heads of two: rows (head, dim, which of q k v) 0 to 11 become all of q, all of k, all of v."""
    rows = qkv_last_to_first(torch.arange(12.0), heads=2)
    assert rows.tolist() == [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]
    matrix = torch.arange(24.0).view(12, 2)
    assert torch.equal(qkv_last_to_first(matrix, heads=2), matrix[rows.long()])


# --- filling ----------------------------------------------------------------------------------------------------------


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def test_fill_loads_what_fits():
    model, other = small(), small()
    with torch.no_grad():
        other[0].weight.add_(1)
    state = {key: value for key, value in other.state_dict().items() if not key.endswith("num_batches_tracked")}
    fill(model, state, "it")  # old files lack the counter
    assert torch.equal(model[0].weight, other[0].weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"0.weight": None}, r"missing '0\.weight'"),
        ({"0.extra": ONE, "x": ONE}, r"unknown '0\.extra', 'x'"),
        ({"0.weight": torch.zeros(3, 3)}, r"of another shape: '0\.weight \[3, 3\] for \[3, 2\]'"),
        ({"0.weight": None, "y": ONE}, r"missing '0\.weight'; unknown 'y'"),
        ({"0.bias": torch.tensor([0.0, float("nan"), 1.0])}, r"not finite: '0\.bias'"),
        ({"0.bias": torch.tensor([0.0, float("inf"), 1.0])}, r"not finite: '0\.bias'"),
    ],
)
def test_fill_refuses_by_name_and_changes_nothing(change, message):
    model = small()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = {key: value + 1 for key, value in before.items()} | change
    state = {key: value for key, value in state.items() if value is not None}
    with pytest.raises(WeightsError, match=message) as caught:
        fill(model, state, "it")
    assert "it" in str(caught.value)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


# --- the tables shipped -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_no_table_takes_vispes_own_names_for_another_model(name):
    """Rules may keep a name (ALIKED's are ours), but what they make of a key must be one of the model's."""
    if MODELS[name] == "disk":
        pytest.importorskip("kornia", reason="DISK's network is kornia's")
    with torch.device("meta" if MODELS[name] in ("vit", "mae") else "cpu"):  # a giant is 4 GB
        own = build(name).state_dict()
    for origin, rules in facts(name)["origin"].items():
        if accounts_for(rules, own):
            assert convert(own, rules, origin).keys() <= own.keys()
