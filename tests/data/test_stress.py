"""The stress benchmark: the homography is where things really are, and files are made once."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vispe.data.stress import KINDS, MOVED, PHOTOGRAPHS, Photograph, group_name, parse_group, stress
from vispe.geometry.homography import warp_points

SIGMA, DARK, BRIGHT = 4.0, 0.2, 0.7  # of the blobs: their width, what is around them, how much brighter they are
SIZE, SHAPE = 256, (300, 330)  # the photograph is higher and wider than image 0, by 22 and 37 on each side
CENTRES = np.stack(np.meshgrid(np.arange(5) * 38.3 + 90.4, np.arange(5) * 38.3 + 75.4), -1).reshape(-1, 2)
OFFSET = np.array([(SHAPE[1] - SIZE) // 2, (SHAPE[0] - SIZE) // 2])


def blobs(xy, centres=CENTRES, sigma=SIGMA):
    """Smooth blobs, seen at points ``[..., 2]``."""
    distance = ((xy[..., None, :] - centres) ** 2).sum(-1)
    return DARK + BRIGHT * np.exp(-distance / (2 * sigma**2)).sum(-1)


def grid(h, w):
    return np.stack(np.meshgrid(np.arange(w), np.arange(h)), -1).astype(float)


def save(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.rint(255 * array).astype(np.uint8)).save(path)


def read(path):
    return np.asarray(Image.open(path)).astype(float) / 255


def textured(seed, h=80, w=100):
    return np.random.default_rng(seed).random((h, w, 3))


@pytest.fixture(scope="module")
def of_blobs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("blobs")
    save(folder / "photos/blobs.png", blobs(grid(*SHAPE)))
    return stress(folder / "out", folder / "photos", size=SIZE)


def centroid(image, background, near, radius):
    """Where a blob is, from a weighted mean about where it was last thought to be."""
    place, (x, y) = near, np.rint(near).astype(int) - 12
    patch, points = image[y : y + 25, x : x + 25] - background, grid(25, 25) + np.array([x, y])
    for _ in range(12):
        weight = np.exp(-((points - place) ** 2).sum(-1) / (2 * radius**2)) * patch
        place = place + 2 * ((points - place) * weight[..., None]).sum((0, 1)) / weight.sum()
    return place


# --- geometry ---------------------------------------------------------------------------------------------------------


def test_blobs_are_where_the_homography_says(of_blobs):
    for pair in of_blobs.pairs:
        kind, level = parse_group(pair.group)
        image = read(of_blobs.root / pair.image1).mean(-1)
        expected = warp_points(pair.homography, CENTRES - OFFSET)
        inside = ((expected > 12) & (expected < SIZE - 13)).all(1)
        assert inside.sum() >= 9, pair.group
        expected = expected[inside]
        shrunk, light = (level if k == kind else 1.0 for k in ("scale", "light"))
        start = expected + np.random.default_rng(0).uniform(-1, 1, expected.shape) / shrunk
        background = (DARK**2.2 * light) ** (1 / 2.2)
        errors = np.array([centroid(image, background, point, SIGMA / shrunk) for point in start]) - expected
        noisy = (kind == "noise" and level > 0) or (kind == "light" and level < 1)
        if not noisy:
            assert np.linalg.norm(errors, axis=1).max() < 0.05, (pair.group, errors)
        elif level != max(KINDS["noise"].small) and level != min(KINDS["light"].small):  # of these noise alone tells
            assert np.linalg.norm(errors.mean(0)) < 0.05, (pair.group, errors.mean(0))


def photograph(function, shape=SHAPE, size=SIZE):
    import torch

    array = np.repeat(function(grid(*shape))[None], 3, 0).astype(np.float32)
    return Photograph("made up", "0", lambda: torch.from_numpy(array), size)


@settings(max_examples=15)
@given(st.floats(0, 360), st.floats(-30, 30), st.floats(-30, 30), st.floats(1, 4), st.floats(-5e-4, 5e-4))
def test_what_is_seen_is_the_photograph_through_the_homography(degrees, dx, dy, scale, tilt):
    c, s = np.cos(np.radians(degrees)) / scale, np.sin(np.radians(degrees)) / scale
    middle = (SIZE - 1) / 2
    shift = np.array([[1, 0, middle + dx], [0, 1, middle + dy], [0, 0, 1]])
    back = np.array([[1, 0, -middle], [0, 1, -middle], [0, 0, 1]])
    H = shift @ np.array([[c, -s, 0], [s, c, 0], [tilt, tilt, 1]]) @ back  # noqa: N806
    image = photograph(blobs).seen(H)[..., 0]
    xy = warp_points(np.linalg.inv(H), grid(SIZE, SIZE).reshape(-1, 2)) + OFFSET
    inside = ((xy >= 0) & (xy <= np.array(SHAPE)[::-1] - 1)).all(1)
    np.testing.assert_allclose(image.ravel()[inside], blobs(xy[inside]), atol=0.01)


@pytest.mark.parametrize("scale", [1.5, 2, 4])
def test_before_it_shrinks_it_is_blurred_as_a_camera_does(scale):
    centre = np.array([[SHAPE[1] / 2, SHAPE[0] / 2]])
    H = np.diag([1 / scale, 1 / scale, 1])  # noqa: N806
    image = photograph(lambda xy: blobs(xy, centre)).seen(H, scale)[..., 0]
    sigma = np.sqrt(SIGMA**2 + 0.25 * (scale**2 - 1))
    xy = grid(SIZE, SIZE)[:60, :60] * scale + OFFSET
    seen = DARK + (blobs(xy, centre, sigma) - DARK) * SIGMA**2 / sigma**2  # the same light, spread wider
    inside = (xy <= np.array(SHAPE)[::-1] - 1).all(-1)
    np.testing.assert_allclose(image[:60, :60][inside], seen[inside], atol=0.01)


def test_a_fine_pattern_turns_grey_and_not_coarse():
    image = photograph(lambda xy: 0.5 + 0.5 * np.cos(np.pi * 0.9 * xy[..., 0]))  # 0.45 periods a pixel
    shrunk = image.seen(np.diag([0.25, 0.25, 1]), 4)[: SIZE // 5, : SIZE // 5]
    assert np.ptp(image.seen(np.eye(3))) > 0.9
    assert np.ptp(shrunk) < 0.02


def test_no_turn_and_quarter_turns_are_exact(of_blobs):
    found = {pair.group: read(of_blobs.root / pair.image1) for pair in of_blobs.pairs}
    first = read(of_blobs.root / of_blobs.pairs[0].image0)
    for group, turns in {"rotation 000": 0, "rotation 090": 1, "rotation 180": 2, "scale 1.00": 0}.items():
        np.testing.assert_array_equal(found[group], np.rot90(first, turns))


def test_image_0_is_the_centre_of_the_photograph(of_blobs):
    x, y = OFFSET
    whole = np.rint(255 * blobs(grid(*SHAPE))) / 255
    first = read(of_blobs.root / of_blobs.pairs[0].image0)
    np.testing.assert_allclose(first, np.repeat(whole[y : y + SIZE, x : x + SIZE, None], 3, -1), atol=1e-12)


def test_photometric_kinds_share_one_mild_homography(of_blobs):
    mild = [pair.homography for pair in of_blobs.pairs if pair.group.split()[0] in ("blur", "noise", "light")]
    for other in mild[1:]:
        np.testing.assert_array_equal(mild[0], other)
    corners = np.array([[0, 0], [1, 0], [1, 1], [0, 1]]) * SIZE - 0.5
    moved = np.abs(warp_points(mild[0], corners) - corners)
    assert moved.max() <= MOVED * SIZE + 1e-9
    assert moved.max() > 1
    easy = [
        read(of_blobs.root / p.image1) for p in of_blobs.pairs if p.group in ("blur 0.0", "noise 0.00", "light 1.000")
    ]
    assert len(easy) == 3
    np.testing.assert_array_equal(easy[0], easy[1])
    np.testing.assert_array_equal(easy[0], easy[2])


def test_a_large_photograph_stays_inside_itself_when_it_turns(tmp_path):
    save(tmp_path / "photos/large.png", np.full((400, 500), 0.5) + 0.4 * np.sin(grid(400, 500)[..., 0] / 9))
    made = stress(tmp_path / "out", tmp_path / "photos", size=100, kinds=["rotation"])
    for pair in made.pairs:
        corners = warp_points(np.linalg.inv(pair.homography), [[0, 0], [99, 0], [99, 99], [0, 99]]) - 49.5
        assert np.abs(corners).max() <= 142 / 2
    assert Image.open(made.root / made.pairs[0].image0).size == (100, 100)
    assert photograph(blobs, (400, 500), 100).pixels.shape == (142, 177, 3)


# --- light and noise --------------------------------------------------------------------------------------------------


def test_noise_has_its_sigma_and_light_its_share(tmp_path):
    save(tmp_path / "photos/grey.png", np.full((100, 100), 0.5))
    made = stress(tmp_path / "out", tmp_path / "photos", size=100, kinds=["noise", "light"])
    for pair in made.pairs:
        (kind, level), image = parse_group(pair.group), read(made.root / pair.image1)
        grey = 128 / 255
        if kind == "noise" and level <= 0.1:  # not cut off at black and white
            assert abs(image.std() - level) < 0.005
            assert abs(image.mean() - grey) < 0.005
        if kind == "light" and level >= 0.01:
            assert abs((image**2.2).mean() / (level * grey**2.2) - 1) < 0.05
            electrons = grey**2.2 * level * 2000
            if level < 1:
                assert abs((image**2.2).std() / (level * grey**2.2) * electrons**0.5 - 1) < 0.1


def test_blur_widens(of_blobs):
    sharp, soft = (
        read(next(of_blobs.root / p.image1 for p in of_blobs.pairs if p.group == g)) for g in ("blur 0.0", "blur 4.0")
    )
    assert abs((soft.max() - DARK) / (sharp.max() - DARK) - SIGMA**2 / (SIGMA**2 + 16)) < 0.05


# --- groups -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_groups_sort_as_levels_do_and_are_read_back(kind):
    for levels in (KINDS[kind].small, KINDS[kind].full):
        names = [group_name(kind, level) for level in sorted(levels)]
        assert names == sorted(names)
        assert [parse_group(name) for name in names] == [(kind, level) for level in sorted(levels)]
    assert set(KINDS[kind].small) <= set(KINDS[kind].full) | {45, 135}


@pytest.mark.parametrize(
    "group", ["", "all", "viewpoint", "rotation", "rotation 30", "rotation nan", "turn 030", "blur 1.0 "]
)
def test_other_groups_are_refused(group):
    with pytest.raises(ValueError, match="is no kind and level"):
        parse_group(group)


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def photos(tmp_path):
    for i, name in enumerate(["b.png", "a.png", "sub folder/c.png"]):
        save(tmp_path / "photos" / name, textured(i))
    return tmp_path / "photos"


def state(folder):
    return {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_second_call_writes_nothing_and_what_is_missing_is_made(tmp_path, photos):
    out = tmp_path / "out"
    made = stress(out, photos, size=64, kinds=["noise"])
    made.check_files()
    assert [pair.image0 for pair in made.pairs[::4]] == ["a.png/0.png", "b.png/0.png", "sub folder/c.png/0.png"]
    before = state(out)
    assert len(before) == 3 * 5
    stress(out, photos, size=64, kinds=["noise"])
    assert state(out) == before
    gone, damaged = out / "a.png/noise_0.10.png", out / "b.png/0.png"
    bytes_of = gone.read_bytes(), damaged.read_bytes()
    gone.unlink()
    damaged.write_bytes(b"half of it")
    stress(out, photos, size=64, kinds=["noise"])
    assert (gone.read_bytes(), damaged.read_bytes()) == bytes_of
    after = state(out)
    assert {path for path in after if after[path] != before[path]} == {gone, damaged}


def test_another_recipe_makes_them_again(tmp_path, photos):
    out, kinds = tmp_path / "out", ["noise"]

    def pixels(**options):
        stress(out, photos, kinds=kinds, limit=1, **{"size": 64, **options})
        return {path.name: read(path) for path in (out / "a.png").iterdir()}

    first, again, seeded, large = pixels(), pixels(), pixels(seed=1), pixels(size=70)
    back = pixels()
    assert all(np.array_equal(first[n], again[n]) and np.array_equal(first[n], back[n]) for n in first)
    assert np.array_equal(first["0.png"], seeded["0.png"])
    assert not np.array_equal(first["noise_0.20.png"], seeded["noise_0.20.png"])
    assert large["0.png"].shape == (70, 70, 3)
    save(photos / "a.png", textured(7))
    assert not np.array_equal(pixels()["0.png"], first["0.png"])


def test_a_photograph_gives_the_same_whatever_others_there_are(tmp_path, photos):
    stress(tmp_path / "all", photos, size=64, kinds=["noise", "light"])
    (photos / "a.png").unlink()
    stress(tmp_path / "fewer", photos, size=64, kinds=["light", "noise"])
    for path in state(tmp_path / "fewer"):
        assert path.read_bytes() == (tmp_path / "all" / path.relative_to(tmp_path / "fewer")).read_bytes()


def test_a_call_that_was_stopped_leaves_whole_files_and_is_finished_by_the_next(tmp_path, photos, monkeypatch):
    import vispe.data.stress as module

    calls = iter(range(6))

    def stopped(*arguments):
        if next(calls) == 5:
            raise KeyboardInterrupt
        return altered(*arguments)

    altered = module._altered
    monkeypatch.setattr(module, "_altered", stopped)
    with pytest.raises(KeyboardInterrupt):
        stress(tmp_path / "out", photos, size=64)
    for path in state(tmp_path / "out"):
        Image.open(path).load()
    monkeypatch.undo()
    stress(tmp_path / "out", photos, size=64)
    stress(tmp_path / "whole", photos, size=64)
    whole = {p.relative_to(tmp_path / "whole"): p.read_bytes() for p in state(tmp_path / "whole")}
    assert {p.relative_to(tmp_path / "out"): p.read_bytes() for p in state(tmp_path / "out")} == whole


# --- what is chosen ---------------------------------------------------------------------------------------------------


def test_settings_and_limits(tmp_path, photos):
    made = stress(tmp_path / "out", photos, size=64, kinds=["blur"], setting="full", limit=2)
    assert made.name == "stress"
    assert made.task == "homography"
    assert made.note == "full, 2 photographs of 3, 64 pixels, seed 0"
    assert [pair.group for pair in made.pairs[:8]] == [group_name("blur", level) for level in KINDS["blur"].full]
    assert len(made.pairs) == 16


def test_the_photographs_of_scikit_image(tmp_path):
    pytest.importorskip("skimage", reason="scikit-image carries the photographs")
    made = stress(tmp_path, kinds=["blur"], size=64)
    assert len(made.pairs) == 5 * 4
    assert {pair.image0 for pair in made.pairs} == {f"{name}/0.png" for name in PHOTOGRAPHS[:5]}
    assert made.note == "small, 5 photographs of scikit-image, 64 pixels, seed 0"


@pytest.mark.slow
def test_every_photograph_of_scikit_image_is_inside_its_wheel_and_large_enough(tmp_path):
    data = pytest.importorskip("skimage.data", reason="scikit-image carries the photographs")
    inside = {path.stem for path in Path(data.__file__).parent.iterdir()}
    elsewhere = {"stereo_motorcycle": "motorcycle_left", "clock": "clock_motion", "immunohistochemistry": "ihc"}
    assert {elsewhere.get(name, name) for name in PHOTOGRAPHS} <= inside
    made = stress(tmp_path, kinds=["blur"], limit=len(PHOTOGRAPHS))
    assert len(made.pairs) == 15 * 4
    assert {Image.open(made.root / pair.image0).size[0] for pair in made.pairs} >= {300, 480}


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kinds": ["rotation", "fog"]}, "a kind must be one of rotation, .*, got 'fog'"),
        ({"kinds": []}, "kinds are some of"),
        ({"kinds": "blur"}, "kinds are some of"),
        ({"setting": "huge"}, "setting must be one of small, full, got 'huge'"),
        ({"size": 32}, "size is a whole number from 64 on, got 32"),
        ({"seed": -1}, "seed is a whole number from 0 on, got -1"),
        ({"limit": 0}, "limit is a whole number from 1 on, got 0"),
        ({"seed": 1.5}, "seed is a whole number"),
    ],
)
def test_mistakes_are_named(tmp_path, photos, options, message):
    with pytest.raises(ValueError, match=message):
        stress(tmp_path / "out", photos, **{"size": 64, **options})
    assert not (tmp_path / "out").exists()


def test_folders_and_images_that_cannot_be_used_are_named(tmp_path, photos):
    with pytest.raises(ValueError, match="there is no folder"):
        stress(tmp_path / "out", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"there are no images in .*empty"):
        stress(tmp_path / "out", tmp_path / "empty")
    with pytest.raises(ValueError, match="cannot be written into the folder of photographs"):
        stress(photos / "out", photos)
    with pytest.raises(ValueError, match=r"'a.png' is 100 x 80 pixels: .* needs at least 240"):
        stress(tmp_path / "out", photos)
    (photos / "a.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"cannot read image .*a\.png"):
        stress(tmp_path / "out", photos, size=64)
    assert not state(tmp_path / "out") if (tmp_path / "out").exists() else True


def test_without_scikit_image_a_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "skimage.data", None)
    with pytest.raises(ValueError, match=r"pip install 'vispe\[demo\]'"):
        stress(tmp_path)


def test_importing_it_imports_no_torch():
    code = "import sys, vispe.data.stress, vispe.evaluate.curves; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_levels_go_from_easy_to_hard():
    for name, kind in KINDS.items():
        for levels in (kind.small, kind.full):
            assert all((a > b) if name == "light" else (a < b) for a, b in pairwise(levels))
