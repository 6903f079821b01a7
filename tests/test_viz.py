"""Pictures of matches: points land where they belong, counts are right, the host program is left alone."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from vispe.viz import WIDTH, draw_matches

BLACK = torch.zeros(3, 60, 80)


def matches(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    size = torch.tensor([79.0, 59.0])
    return torch.rand(n, 2, generator=g) * size, torch.rand(n, 2, generator=g) * size, torch.rand(n, generator=g)


def words(figure):
    return [text.get_text() for text in [*figure.texts, *figure.axes[0].texts]]


def segments(figure):
    return figure.axes[0].collections[0].get_segments()


@pytest.mark.parametrize("suffix", ["png", "jpg", "JPEG", "webp", "pdf", "svg"])
def test_the_file_is_written_whole_and_alone(tmp_path, suffix):
    path = tmp_path / f"ma tches é.{suffix}"
    draw_matches(BLACK, BLACK, *matches(5), path=path)
    assert os.listdir(tmp_path) == [path.name]
    if suffix not in ("pdf", "svg"):
        with Image.open(path) as image:
            assert image.width == WIDTH


def test_an_unknown_suffix_leaves_nothing_behind(tmp_path):
    with pytest.raises(ValueError, match="xyz"):
        draw_matches(BLACK, BLACK, *matches(5), path=tmp_path / "a.xyz")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "sizes", [((60, 80), (60, 80)), ((60, 80), (200, 50)), ((400, 20), (300, 10)), ((20, 500), (9, 9))]
)
def test_lines_end_on_the_pixels_they_name(sizes):
    """A white pixel in each black image: the line must end at the centre of the white seen in the rendered figure."""
    images, points = [], []
    for h, w in sizes:
        y, x = h // 3, w - 1 - w // 4
        image = torch.zeros(3, h, w)
        image[:, y, x] = 1
        images.append(image)
        points.append(torch.tensor([[float(x), float(y)]]))
    figure = draw_matches(*images, *points, torch.ones(1))
    ends = figure.axes[0].transData.transform(segments(figure)[0])
    for collection in list(figure.axes[0].collections):
        collection.remove()
    figure.canvas.draw()
    seen = np.asarray(figure.canvas.buffer_rgba())[..., :3].astype(float)
    left, bottom, right, top = figure.axes[0].get_window_extent().extents
    gap = figure.axes[0].images[0].get_extent()[1] + left
    height = seen.shape[0]
    for i, (low, high) in enumerate([(left, gap), (gap + 8, right)]):
        rows = slice(round(height - top) + 1, round(height - bottom) - 1)
        columns = slice(round(low) + 1, round(high) - 1)
        part = seen[rows, columns].mean(-1)
        y, x = (part > 128).nonzero()
        centre = x.mean() + columns.start + 0.5, height - (y.mean() + rows.start + 0.5)
        assert np.abs(np.subtract(centre, ends[i])).max() < 1.5  # pixels of the figure


def test_inliers_are_drawn_and_counted():
    inliers = torch.arange(30) % 3 == 0
    figure = draw_matches(BLACK, BLACK, *matches(30), inliers=inliers, title="homography $_{")
    assert len(segments(figure)) == 10
    assert words(figure) == ["homography $_{", "10 of 30 matches agree"]


def test_the_best_are_drawn_when_there_are_too_many():
    points0, points1, scores = matches(50)
    figure = draw_matches(BLACK, BLACK, points0, points1, scores, max_lines=7)
    assert sorted(figure.axes[0].collections[0].get_array()) == pytest.approx(sorted(scores.tolist())[-7:])
    assert words(figure) == ["50 matches, the best 7 drawn"]


@pytest.mark.parametrize(
    ("n", "inliers"), [(0, None), (0, torch.zeros(0, dtype=torch.bool)), (4, torch.zeros(4, dtype=torch.bool))]
)
def test_nothing_to_draw_is_said(tmp_path, n, inliers):
    figure = draw_matches(BLACK, BLACK, *matches(n), inliers=inliers, path=tmp_path / "x.png")
    assert "no matches to draw" in words(figure)
    assert (tmp_path / "x.png").exists()


def test_wrong_shapes_are_named():
    points0, points1, scores = matches(4)
    with pytest.raises(ValueError, match=r"\[4, 2\], \[3, 2\], \[4\]"):
        draw_matches(BLACK, BLACK, points0, points1[:3], scores)
    with pytest.raises(ValueError, match=r"got \[60, 80, 3\]"):
        draw_matches(BLACK.permute(1, 2, 0), BLACK, points0, points1, scores)


def test_inputs_are_untouched_and_may_need_gradients():
    image = torch.rand(3, 40, 30).requires_grad_()
    points0, points1, scores = matches(4)
    before = [value.clone() for value in (points0, points1, scores)]
    draw_matches(image, image, points0.requires_grad_(), points1, scores)
    assert all(torch.equal(a, b) for a, b in zip(before, (points0, points1, scores), strict=True))


def test_the_host_program_is_left_alone():
    code = """
import sys, torch
import vispe.viz
assert 'matplotlib' not in sys.modules
import matplotlib
settings = lambda: {key: dict.__getitem__(matplotlib.rcParams, key) for key in dict.keys(matplotlib.rcParams)}
before = settings()
vispe.viz.draw_matches(torch.zeros(3, 9, 9), torch.zeros(3, 9, 9), torch.ones(1, 2), torch.ones(1, 2), torch.ones(1))
assert 'matplotlib.pyplot' not in sys.modules
assert before == settings()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
