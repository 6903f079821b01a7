"""Plots: points are where the numbers are, pages get valid and quiet SVG, pictures fit, the host is left alone."""

import base64
import io
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import torch
from PIL import Image

from vispe.evaluate import figures
from vispe.viz import draw_matches


@pytest.fixture
def axes():
    return figures.sheet().add_subplot()


def words(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_the_area_below_a_recall_curve_is_the_auc(axes):
    from vispe.metrics.auc import error_auc

    errors = np.array([0.5, 2.0, 2.5, 7.0, np.inf])
    figures.draw_recall(axes, {"x": errors}, [1, 5], "px")
    x, y = axes.lines[0].get_data()
    assert np.trapezoid(y, x) / 5 / 100 == pytest.approx(error_auc(errors, [5])[0])
    assert axes.get_xticks().tolist() == [0, 1, 5]


@pytest.mark.parametrize("errors", [[], [np.inf], [9.0, np.nan]])
def test_nothing_below_is_a_curve_at_zero(axes, errors):
    figures.draw_recall(axes, {"x": errors}, [1, 5], "px")
    assert axes.lines[0].get_ydata().tolist() == [0, 0]


def test_ticks_do_not_stand_on_each_other(axes):
    figures.draw_recall(axes, {"x": [1.0]}, [0.1, 1, 19.5, 20], "°")
    assert axes.get_xticks().tolist() == [0, 20]


def test_lines_over_tiny_numbers_are_logarithmic(axes):
    figures.draw_lines(axes, {"x": ([1e-4, 5e-4, 1e-2], [0.1, 0.2, 0.3])}, "x", "y")
    assert axes.get_xscale() == "log"
    assert axes.lines[0].get_ydata() == pytest.approx([10, 20, 30])
    other = figures.sheet().add_subplot()
    figures.draw_lines(other, {"x": ([1, 10], [0.1, 0.2])}, "x", "y")
    assert other.get_xscale() == "linear"


def test_each_pair_is_counted_once_by_its_kind_of_error(axes):
    errors = [0.0, 0.99, 1.0, 4.9, 5.0, np.inf, np.nan]
    figures.draw_counts(axes, [10, 20, 30, 40, 50, 60, 70], errors, [1, 3, 5], "px")
    tops = [sum(patch.get_height() for patch in bars) for bars in axes.containers]
    assert tops == [2, 1, 1, 1, 2]
    assert words(axes) == ["below 1 px", "1 to 3", "3 to 5", "5 and more", "no model"]


def test_a_duel_counts_better_and_worse(axes):
    figures.draw_duel(axes, [1.0, 1.0, 1.0, np.inf], {"B": [0.5, 2.0, np.inf, np.inf]}, ("a", "b"), 5.0)
    assert words(axes) == ["B: better in 1, worse in 2"]
    assert axes.collections[0].get_offsets().max() == 50.0  # what failed lies on the border


def test_svg_stands_in_a_page(axes):
    figures.draw_recall(axes, {"<script>$x$&": [0.5, 2.0]}, [1, 5], "px")
    text = figures.inline_svg(axes.figure, "one", 'a "plot" <b>')
    root = ElementTree.fromstring(text)
    assert root.tag == "svg"
    assert root.attrib["aria-label"] == 'a "plot" <b>'
    assert "viewBox" in root.attrib
    assert not {"width", "height"} & root.attrib.keys()
    ids = [node.attrib["id"] for node in root.iter() if "id" in node.attrib]
    assert len(ids) == len(set(ids))
    assert all(name.startswith("one-") for name in ids)
    assert "<script>$x$&" in [node.text for node in root.iter("text")]
    assert not any(word in text for word in ("http", "<style", "<metadata", "DejaVu", figures.INK))
    assert "var(--ink)" in text


def test_the_same_svg_twice():
    def made():
        figure = figures.sheet()
        figures.draw_recall(figure.add_subplot(), {"x": [0.5, 2.0]}, [1, 5], "px")
        return figures.inline_svg(figure, "one", "plot")

    assert made() == made()


def test_settings_of_the_host_stay():
    import matplotlib

    before = dict(matplotlib.rcParams)
    test_the_same_svg_twice()
    assert dict(matplotlib.rcParams) == before


def _matches(correct):
    wrong = torch.zeros(20) if correct is None else 1 - torch.from_numpy(correct).float()
    points = torch.rand(20, 2, generator=torch.Generator().manual_seed(0)) * 50
    figure = draw_matches(torch.zeros(3, 60, 80), torch.zeros(3, 60, 80), points, points, wrong)
    figures.colour_by_truth(figure, correct)
    return figure


def _colours(correct):
    lines = _matches(correct).axes[0].collections[0]
    return lines.to_rgba(lines.get_array())


def test_right_and_wrong_matches_are_told_apart():
    right, wrong = _colours(np.ones(20, bool)), _colours(np.zeros(20, bool))
    assert (right[:, 2] > right[:, 0] + 0.5).all()  # blue
    assert (wrong[:, 0] > wrong[:, 2] + 0.5).all()  # red
    assert len(np.unique(_colours(np.arange(20) < 9), axis=0)) == 2
    assert len(np.unique(_colours(None), axis=0)) == 1


def test_a_picture_is_the_images_alone_and_as_small_as_asked():
    figure = _matches(np.arange(20) % 2 == 0)
    small, large = figures.data_uri(figure, 1), figures.data_uri(figure, 10**7)
    assert len(small) < len(large)
    head, _, body = large.partition(",")
    assert head == "data:image/jpeg;base64"
    with Image.open(io.BytesIO(base64.b64decode(body))) as picture:
        width, height = figure.axes[0].get_window_extent().size
        assert picture.size == pytest.approx((width, height), abs=2)
