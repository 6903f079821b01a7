"""Pairs made on the fly: the same ones by the same numbers, and cells that lie where the images say they do."""

import h5py
import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.test_megadepth import write_posed
from vispe.data.homographies import ViewSpec
from vispe.data.images import ImageError
from vispe.data.megadepth import DepthSpec, open_posed, read_depth
from vispe.train import image_pairs as module
from vispe.train.image_pairs import EvalImagePairs, PhotoPairs, PosedPairs, TrainImagePairs, image_pair_batch
from vispe.train.photos import Photo

VIEWS = ViewSpec(size=(64, 96), views=4, angle=20.0, look=0.0, scale=(0.7, 1.0), perspective=0.1, overlap=0.4)


def write_photos(root, count=4, size=(200, 150)):
    draw = np.random.default_rng(0)
    root.mkdir(exist_ok=True)
    for k in range(count):
        coarse = draw.integers(0, 255, (size[1] // 8, size[0] // 8, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(root / f"{k}.png")
    return root


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root = write_photos(tmp_path_factory.mktemp("photos"))
    return [Photo(f"{k}", str(root / f"{k}.png"), str(root)) for k in range(4)]


@pytest.fixture(scope="module")
def posed(tmp_path_factory):
    root = write_posed(tmp_path_factory.mktemp("posed") / "megadepth")
    spec = DepthSpec(root=str(root), resize=96)
    return PosedPairs(open_posed(spec)[0], spec, 8, 6), spec


def colours(image, xy):
    """Bilinear samples of ``[1, h, w]`` at ``[k, 2]``."""
    h, w = image.shape[-2:]
    grid = torch.from_numpy((xy + 0.5) / np.array([w, h]) * 2 - 1).float()[None, None]
    return torch.nn.functional.grid_sample(image[None], grid, align_corners=False)[0, 0, 0].numpy()


def agreement(pair, stride=8):
    """The median difference of grey where a cell of image 0 is, and where it is said to be in image 1."""
    h, w = pair.image1.shape[-2:]
    cells = module.cell_pixels(module.cells_of((pair.image0.shape[-2], pair.image0.shape[-1]), stride), stride)
    there = pair.there0
    with np.errstate(invalid="ignore"):
        inside = ((there >= 1) & (there < np.array([w, h]) - 2)).all(1)
    assert inside.sum() > 20
    return np.median(np.abs(colours(pair.image0, cells[inside]) - colours(pair.image1, there[inside])))


def test_views_are_where_their_homography_says(photos):
    source = PhotoPairs(photos, VIEWS, 8, 0)
    for number in range(4):
        pair = source.make(0, 1, number)
        assert pair.image0.shape == pair.image1.shape == (1, 64, 96)
        assert agreement(pair) < 0.02
        off = pair._replace(there0=pair.there0 + 8)
        assert agreement(off) > 0.04


def test_posed_images_are_where_depth_takes_them(posed):
    """Resized and padded to a square; what lies in the padding is not to be told."""
    source, _ = posed
    for number in range(4):
        pair = source.make(0, 1, number)
        assert pair.image0.shape == (1, 96, 96)
        assert pair.size0 == (72, 96)
        assert not pair.image0[:, 72:].any()
        assert agreement(pair) < 0.03
        assert np.isnan(pair.there0.reshape(12, 12, 2)[9:]).all()
        assert not np.isnan(pair.there0.reshape(12, 12, 2)[:9]).any()


def test_what_is_hidden_and_what_is_unknown(posed, monkeypatch):
    """Where the other map says another depth a cell is known not to be seen; where it says none, nothing is known."""
    source, _ = posed
    plain = source.make(0, 1, 0)
    finite = np.isfinite(plain.there0).all(1)
    depth = type(source.posed).depth
    numbers = []
    monkeypatch.setattr(type(source.posed), "depth", lambda self, i: (numbers.append(i), depth(self, i))[1])
    source.make(0, 1, 0)
    first, second = numbers[0], next(i for i in numbers if i != numbers[0])
    for factor, wanted in ((0.5, np.isinf), (0.0, np.isnan)):
        monkeypatch.setattr(
            type(source.posed), "depth", lambda self, i, f=factor: depth(self, i) * (f if i == second else 1.0)
        )
        there = source.make(0, 1, 0).there0
        assert wanted(there[finite]).all()
    assert first != second


@pytest.mark.parametrize("kind", ["photos", "posed"])
def test_the_truth_has_no_error(kind, photos, posed):
    """Matches that are exact give an exact homography or pose; matches moved by 40 pixels, and too few, do not."""
    pytest.importorskip("poselib", reason="estimates are PoseLib's")
    source = PhotoPairs(photos, VIEWS, 8, 0) if kind == "photos" else posed[0]
    pair = source.make(0, 1, 1)
    finite = np.isfinite(pair.there0).all(1)
    cells = module.cell_pixels(module.cells_of((pair.image0.shape[-2], pair.image0.shape[-1]), 8), 8)
    first, second = cells[finite], pair.there0[finite]
    assert source.error(pair.truth, first, second) < 0.5
    assert source.error(pair.truth, first, np.roll(second, 1, 0)) > 3
    assert source.error(pair.truth, first[:2], second[:2]) == np.inf


def test_the_same_numbers_make_the_same_pair(photos, posed):
    """Whichever others it is with; other epochs and seeds make other ones, and chance of torch's own none."""
    for source in (PhotoPairs(photos, ViewSpec(size=(64, 96), views=4), 8, 0), posed[0]):
        train = TrainImagePairs(source, 5)
        torch.manual_seed(0)
        one = train.__getitems__([(2, 0), (2, 1), (2, 3)])
        torch.manual_seed(1)
        other = train.__getitems__([(2, 1)])
        for a, b in zip(one, other, strict=True):
            if isinstance(a, torch.Tensor | np.ndarray):
                same = torch.as_tensor(a[1]), torch.as_tensor(b[0])
                torch.testing.assert_close(*same, equal_nan=True, rtol=0, atol=0)
        for changed in (train.__getitems__([(3, 1)]), TrainImagePairs(source, 6).__getitems__([(2, 1)])):
            assert not torch.equal(changed.order, other.order)
            assert not torch.equal(changed.there0.nan_to_num(), other.there0.nan_to_num()) or source is posed[0]


def test_held_out_pairs_stay(photos):
    pairs = EvalImagePairs(PhotoPairs(photos, VIEWS, 8, 0), 6)
    assert len(pairs) == 6
    one, two = pairs.__getitems__([4, -1]), pairs.__getitems__([4, 0])
    assert torch.equal(one.image0, two.image0)
    assert one.indices.tolist() == [4, -1]


def test_photographs_that_are_not_held_in_memory_are_the_same(photos, monkeypatch):
    held = PhotoPairs(photos, VIEWS, 8, 0).make(0, 0, 1)
    monkeypatch.setattr(module, "HELD", 0)
    read = PhotoPairs(photos, VIEWS, 8, 0)
    assert not read._held
    assert torch.equal(read.make(0, 0, 1).image0, held.image0)


def test_masks_are_true_where_there_is_image(posed):
    batch = image_pair_batch(posed[0], [(0, 0, 0), (0, 0, 1)], [0, 1])
    assert batch.mask0.shape == (2, 96, 96)
    assert bool(batch.mask0[:, :72].all())
    assert not batch.mask0[:, 72:].any()
    assert (batch.matches0[0].reshape(12, 12)[9:] == -2).all()
    assert (batch.matches0 >= 0).sum() > 20


def test_mistakes_are_named(photos, tmp_path):
    (tmp_path / "broken.png").write_text("junk")
    broken = Photo("broken", str(tmp_path / "broken.png"), str(tmp_path))
    Image.new("RGB", (100, 1)).save(tmp_path / "thin.png")
    thin = Photo("thin", str(tmp_path / "thin.png"), str(tmp_path))
    source = PhotoPairs([photos[0], broken, thin], VIEWS, 8, 0)
    assert source.names == ("0",)
    assert len(source.skipped) == 2
    assert "no room for a view" in source.skipped[1]
    assert "broken.png" in source.skipped[0]
    with pytest.raises(ImageError, match="broken"):
        PhotoPairs([photos[0], broken], VIEWS, 8, 0, refuse=True)


def test_a_pair_that_cannot_be_made_is_the_batchs_problem_and_mistakes_are_named(tmp_path):
    root = write_posed(tmp_path / "megadepth", images=2)
    spec = DepthSpec(root=str(root), resize=96)
    source = PosedPairs(open_posed(spec)[0], spec, 8, 2)
    with h5py.File(root / "depths" / "0001" / "1.h5", "w") as file:
        file["depth"] = np.zeros(3)
    read_depth.cache_clear()
    assert "is no depth map" in image_pair_batch(source, [(0, 0, 0)], [0]).problem
