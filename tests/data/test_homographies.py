"""Views through homographies: points are seen where they go, nothing leaves the photograph, chance is by seed."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vispe.data.homographies import ViewSpec, drawn, looks, overlap, seen_view, to_photograph, view
from vispe.geometry.homography import warp_points

SPEC = ViewSpec(size=(48, 64))


@settings(max_examples=60, deadline=None)
@given(st.integers(60, 400), st.integers(60, 400), st.integers(0, 10**6), st.floats(0, 180), st.floats(0, 0.45))
def test_a_view_lies_in_its_photograph(h, w, seed, angle, perspective):
    spec = ViewSpec(size=(48, 64), angle=angle, perspective=perspective)
    corners = warp_points(view((h, w), spec, seed), [[0, 0], [63, 0], [63, 47], [0, 47]])
    assert (corners > -1e-6).all()
    assert (corners < np.array([w, h]) - 1 + 1e-6).all()


def test_chance_is_by_numbers():
    one, same, other = (view((100, 120), SPEC, *chance) for chance in ((0, 1, 2), (0, 1, 2), (0, 1, 3)))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


def test_pixels_are_those_of_the_photograph():
    """A photograph whose colour is its position: every pixel of a view tells where it came from."""
    y, x = torch.meshgrid(torch.arange(200.0), torch.arange(300.0), indexing="ij")
    photo = torch.stack((x / 300, y / 200, torch.zeros_like(x)))
    for seed in range(5):
        H = view((200, 300), SPEC, seed)  # noqa: N806
        seen = drawn(photo, H, SPEC.size)
        rows, columns = np.mgrid[5:43:7, 5:59:9]
        points = np.stack((columns.ravel(), rows.ravel()), 1)
        told = seen[:, points[:, 1], points[:, 0]].T.numpy()[:, :2] * [300, 200]
        np.testing.assert_allclose(told, warp_points(H, points), atol=0.75)  # a halved photograph is coarser


def test_the_identity_is_the_photograph():
    photo = torch.rand(3, 48, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(drawn(photo, np.eye(3), (48, 64)), photo, atol=1e-5, rtol=0)


@pytest.mark.parametrize("way", range(8))
def test_a_way_is_numpys_turn_and_mirror(way):
    photo = np.arange(5 * 7).reshape(5, 7)
    seen = np.rot90(photo, way % 4)
    seen = seen[:, ::-1] if way >= 4 else seen
    rows, columns = np.mgrid[: seen.shape[0], : seen.shape[1]]
    there = warp_points(to_photograph((5, 7), way), np.stack((columns.ravel(), rows.ravel()), 1).astype(float))
    x, y = there.round().astype(int).T
    assert np.array_equal(photo[y, x], seen.ravel())


@pytest.mark.parametrize("way", range(8))
def test_a_view_in_any_way_lies_in_its_photograph_and_turns_as_it_says(way):
    spec = ViewSpec(size=(48, 64), angle=0.0, perspective=0.0)
    corners = warp_points(view((300, 100), spec, 3, way=way), [[0, 0], [63, 0], [63, 47], [0, 47]])
    assert (corners > -1e-6).all()
    assert (corners < np.array([100, 300]) - 1 + 1e-6).all()
    right = corners[1] - corners[0]  # a view's first row, in the photograph
    assert (right.round(6) == 0).tolist() == ([True, False] if way % 2 else [False, True])
    down = corners[3] - corners[0]
    assert (right[0] * down[1] - right[1] * down[0] < 0) == (way >= 4), "mirrored or not"


def test_overlap_by_hand():
    shift = np.array([[1.0, 0, 32], [0, 1, 0], [0, 0, 1]])
    assert overlap(np.eye(3), np.eye(3), SPEC) == 1
    assert overlap(np.eye(3), shift, SPEC) == pytest.approx(0.5)
    assert overlap(np.eye(3), np.diag([2.0, 2, 1]), SPEC) == pytest.approx(0.25, abs=0.07)


def test_looks_change_colours_and_not_places():
    pytest.importorskip("kornia", reason="looks are kornia's")
    image = torch.zeros(1, 3, 48, 64)
    image[..., 20:30, 30:40] = 1
    torch.manual_seed(0)
    made = [looks(SPEC)(image)[0] for _ in range(4)]
    assert not torch.equal(made[0], made[1])
    for one in made:
        bright = one.mean(0) > one.mean(0).median() + 0.3
        rows, columns = bright.nonzero().float().mean(0).tolist()
        assert (rows, columns) == pytest.approx((24.5, 34.5), abs=2.0)


def test_a_camera_gives_bytes_and_looks_by_its_chance_alone():
    pytest.importorskip("kornia", reason="looks are kornia's")
    image = torch.rand(3, 60, 80, generator=torch.Generator().manual_seed(0))
    H = view((60, 80), SPEC, 1)  # noqa: N806
    state = torch.get_rng_state()
    one, same, other = (seen_view(image, H, SPEC, chance) for chance in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    plain = seen_view(image, H, SPEC.but(look=0.0), 3)
    assert torch.allclose(plain, drawn(image, H, SPEC.size), atol=0.5 / 255 + 1e-6)
    assert torch.equal(plain, (plain * 255).round() / 255)


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"size": (8, 64)}, "sides of at least 32 pixels, got (8, 64)"),
        ({"ways": 9}, "ways are 1 to 8, got 9"),
        ({"ways": 8, "views": 12}, "views are at least two for each of the 8 ways, as many for each, got 12"),
        ({"ways": 8, "views": 8}, "views are at least two for each of the 8 ways, as many for each, got 8"),
        ({"views": 1}, "views are at least two of a photograph, for a pair, got 1"),
        ({"angle": 200.0}, "got 200.0 and 0.2"),
        ({"perspective": 0.5}, "got 45.0 and 0.5"),
        ({"scale": (0.0, 1.0)}, "scale goes from low to high within (0, 1], got (0.0, 1.0)"),
        ({"overlap": 1.0}, "got 1.0 and 1.0"),
    ],
)
def test_mistakes_are_named(knobs, said):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        ViewSpec(**knobs)
    assert said in str(caught.value)


def test_a_photograph_that_would_be_enlarged_to_nothing_is_refused():
    spec = ViewSpec(size=(240, 320), angle=0.0, perspective=0.0)
    view((64, 84), spec, 0)
    with pytest.raises(ValueError, match="a photograph of 76 x 60 pixels has no room for a view"):
        view((60, 76), spec, 0)


def test_a_photograph_of_a_line_is_refused():
    with pytest.raises(ValueError, match="a photograph of 300 x 1 pixels has no room for a view"):
        view((1, 300), SPEC, 0)
