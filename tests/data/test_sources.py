"""Sources answer by number, in threads and after they were sent to another process."""

import pickle
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from PIL import Image

from vispe.data.images import ImageError
from vispe.data.sources import Pixels, Torchvision, ZipFiles, folder_files


@pytest.fixture
def archive(tmp_path):
    for k in range(8):
        Image.new("RGB", (9, 7), (k * 10, 0, 0)).save(tmp_path / f"{k}.png")
    path = tmp_path / "d.zip"
    with zipfile.ZipFile(path, "w") as made:
        for k in range(8):
            made.write(tmp_path / f"{k}.png", f"c/{k}.png")
        made.writestr("c/9.png", b"junk")
    return path


def test_a_zip_in_threads_and_elsewhere(archive):
    source = ZipFiles(archive)
    with ThreadPoolExecutor(4) as pool:
        read = list(pool.map(source.read, list(range(8)) * 4))
    assert [round(float(image[0, 0, 0]) * 255) for image in read] == [10 * k for k in range(8)] * 4
    sent = pickle.loads(pickle.dumps(source))
    assert torch.equal(sent.read(3), source.read(3))


def test_a_damaged_member_is_named(archive):
    source = ZipFiles(archive)
    with pytest.raises(ImageError, match=r"cannot read image '.*d\.zip:c/9\.png'"):
        source.read(8)


def test_stamps_change_with_the_bytes(tmp_path):
    Image.new("RGB", (9, 7)).save(tmp_path / "a.png")
    files = folder_files(tmp_path)
    before = files.stamp(0)
    Image.new("RGB", (9, 8)).save(tmp_path / "a.png")
    assert files.stamp(0) != before


def test_orientation_is_applied(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (9, 7)).save(tmp_path / "a.jpg", exif=exif)
    assert folder_files(tmp_path).read(0).shape == (3, 9, 7)


def test_grey_pixels_have_three_channels():
    pixels = Pixels(torch.tensor([[[[0, 255]]]], dtype=torch.uint8), "made")
    assert pixels.read(0).tolist() == [[[0.0, 1.0]]] * 3
    assert pixels.name(0) == "made[0]"


def test_a_torchvision_item_that_fails_is_named():
    class Bad:
        def __len__(self):
            return 1

        def __getitem__(self, k):
            raise RuntimeError("broken")

    with pytest.raises(ImageError, match=r"cannot read image 'set\[0\]': broken"):
        Torchvision(Bad(), "set").read(0)
