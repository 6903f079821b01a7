"""Resizing is kornia's, points return to where they were, turns are exact."""

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vispe.data.images import ImageError
from vispe.data.resizing import resize, rotate90, to_original, to_resized, unrotate_points

H, W = 40, 60


def scene(h=H, w=W):
    """Uint8 ``[h, w, 3]``: smooth, with four corners of different colours, so that codecs keep it and turns show."""
    y, x = np.mgrid[0:h, 0:w]
    return np.stack([255 * x / (w - 1), 255 * y / (h - 1), 128 + 0 * x], -1).round().astype(np.uint8)


def near(image, expected, tolerance=1e-6):
    assert image.dtype == torch.float32
    assert image.is_contiguous()
    assert image.shape == expected.shape
    assert (image - expected).abs().max() <= tolerance


# --- resizing ---------------------------------------------------------------------------------------------------------

SIDES = st.integers(1, 90) | st.sampled_from([1, 2, 3, 257])


@pytest.fixture(scope="module")
def kornia_resize():
    transform = pytest.importorskip("kornia.geometry.transform")
    return lambda image, size, side: transform.resize(image, size, side=side, antialias=True, align_corners=None)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_resizing_is_kornias(kornia_resize, data):
    h, w = data.draw(SIDES), data.draw(SIDES)
    side = data.draw(st.sampled_from(["long", "short", "exact"]))
    size = data.draw(st.tuples(SIDES, SIDES) if side == "exact" else st.integers(1, 200))
    if side == "short" and size * max(h, w) / min(h, w) > 1000:
        size = 3
    image = torch.rand(3, h, w, generator=torch.Generator().manual_seed(h * w))
    expected = kornia_resize(image, size, "short" if side == "exact" else side)
    resized, scale = resize(image, size, side=side)
    if expected.numel():  # kornia rounds a short side below 1 to nothing
        near(resized, expected, 1e-6)
    assert scale == (resized.shape[1] / h, resized.shape[2] / w)
    assert min(resized.shape[1:]) >= 1


@pytest.mark.parametrize(("h", "w", "size"), [(1080, 1920, 1024), (1200, 1601, 640), (640, 480, 1024), (9, 2000, 1024)])
def test_resizing_photographs_is_kornias(kornia_resize, h, w, size):
    image = torch.rand(3, h, w, generator=torch.Generator().manual_seed(0))
    near(resize(image, size)[0], kornia_resize(image, size, "long"), 1e-6)


@pytest.mark.parametrize(("h", "w", "size"), [(4, 2000, 100), (2000, 4, 100), (1, 5000, 64), (1, 1, 1024), (1, 1, 1)])
def test_no_side_vanishes(h, w, size):
    resized, scale = resize(torch.ones(3, h, w), size)
    assert max(resized.shape[1:]) == size
    assert scale == (resized.shape[1] / h, resized.shape[2] / w)
    near(resized, torch.ones_like(resized))


def test_resizing_returns_new_memory_and_needs_good_arguments():
    image = torch.rand(3, 8, 9)
    before = image.clone()
    resize(image, (8, 9), side="exact")[0].zero_()
    assert torch.equal(image, before)
    for size, side in [
        (0, "long"),
        (-1, "long"),
        (1.5, "long"),
        (True, "long"),
        ((4, 4), "long"),
        (4, "exact"),
        (4, "wide"),
    ]:
        with pytest.raises(ValueError, match="got"):
            resize(image, size, side=side)
    with pytest.raises(ImageError, match="uint8"):
        resize(image.to(torch.uint8), 4)


def test_resizing_is_no_slower_than_kornia(kornia_resize):
    """Processor time of one thread, which a busy machine disturbs less than the clock on the wall."""
    image, threads = torch.rand(3, 1500, 2000), torch.get_num_threads()

    def seconds(call):
        start = time.thread_time()
        call()
        return time.thread_time() - start

    torch.set_num_threads(1)
    try:
        ours = min(seconds(lambda: resize(image, 512)) for _ in range(5))
        theirs = min(seconds(lambda: kornia_resize(image, 512, "long")) for _ in range(5))
    finally:
        torch.set_num_threads(threads)
    assert ours < 1.2 * theirs  # about 0.4 on a quiet machine


# --- points -----------------------------------------------------------------------------------------------------------


def blob(h, w, x, y, sigma=6.0):
    rows, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    return torch.exp(-((columns - x) ** 2 + (rows - y) ** 2) / (2 * sigma**2)).float().expand(3, h, w)


def centroid(image):
    weight = image[0].double()
    h, w = weight.shape
    total = weight.sum()
    x, y = (weight.sum(0) * torch.arange(w)).sum() / total, (weight.sum(1) * torch.arange(h)).sum() / total
    return torch.stack([x, y])[None]


@pytest.mark.parametrize("size", [(60, 80), (37, 91), (240, 320), (171, 500), (120, 160), (33, 320), (300, 50)])
@pytest.mark.parametrize("place", [(50.0, 60.0), (101.3, 44.7)])
def test_a_blob_found_after_resizing_is_where_it_was(size, place):
    resized, scale = resize(blob(120, 160, *place), size, side="exact")
    found, truth = centroid(resized), torch.tensor([place], dtype=torch.float64)
    assert (to_original(found, scale) - truth).abs().max() < 0.1
    assert (to_resized(truth, scale) - found).abs().max() < 0.1 * max(scale)
    naive = found / torch.tensor([scale[1], scale[0]])
    if min(abs(1 / s - 1) for s in scale) > 0.25:
        assert (naive - truth).abs().max() > 0.1  # k / s alone is off by |1/s - 1| / 2


@given(
    st.lists(st.tuples(st.floats(-10, 5000), st.floats(-10, 5000)), max_size=5),
    st.tuples(st.floats(0.01, 20), st.floats(0.01, 20)),
)
def test_to_original_and_to_resized_undo_each_other(points, scale):
    xy = torch.tensor(points, dtype=torch.float64).reshape(-1, 2)
    assert torch.allclose(to_resized(to_original(xy, scale), scale), xy, atol=1e-9)
    assert torch.allclose(to_original(to_resized(xy, scale), scale), xy, atol=1e-9)


def test_points_are_x_y_and_scales_are_h_w():
    corners = torch.tensor([[-0.5, -0.5], [19.5, 39.5], [0.0, 0.0]])  # the outer corners of a 40 x 20 image
    moved = to_original(corners, (0.5, 2.0))
    assert moved.tolist() == [[-0.5, -0.5], [9.5, 79.5], [-0.25, 0.5]]


def test_points_keep_their_precision():
    assert to_original(torch.tensor([[1025.5, 3.0]], dtype=torch.float16), (1.0, 1.0)).dtype == torch.float32
    assert to_original(torch.zeros(0, 2), (1.0, 1.0)).shape == (0, 2)
    with pytest.raises(ValueError, match=r"got \[2, 3\]"):
        to_original(torch.zeros(2, 3), (1.0, 1.0))


@given(st.integers(1, 9), st.integers(1, 9), st.integers(-5, 9))
def test_every_pixel_returns_from_a_turn(h, w, turns):
    image = torch.arange(h * w).view(1, h, w)
    turned = rotate90(image, turns)
    y, x = torch.meshgrid(torch.arange(turned.shape[1]), torch.arange(turned.shape[2]), indexing="ij")
    xy = torch.stack([x.flatten(), y.flatten()], -1)
    back = unrotate_points(xy, turns, (h, w))
    assert torch.equal(image[0, back[:, 1], back[:, 0]], turned[0].flatten())
    assert torch.equal(rotate90(turned, -turns), image)


def test_turns_are_counter_clockwise():
    image = torch.tensor(scene()).permute(2, 0, 1)
    turned = Image.fromarray(scene()).transpose(Image.Transpose.ROTATE_90)
    assert torch.equal(rotate90(image, 1), torch.tensor(np.array(turned)).permute(2, 0, 1))
    top_right = torch.tensor([[W - 1.0, 0.0]])
    assert torch.equal(unrotate_points(torch.tensor([[0.0, 0.0]]), 1, (H, W)), top_right)
    fraction = torch.tensor([[2.25, 3.5]], dtype=torch.float64)
    assert unrotate_points(fraction, 2, (H, W)).tolist() == [[W - 1 - 2.25, H - 1 - 3.5]]
