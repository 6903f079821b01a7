"""Broken images are found once, and remembered."""

import pytest
from PIL import Image

from vispe.data import verify
from vispe.data.classification import DataSpec, open_data


@pytest.fixture
def images(tmp_path, monkeypatch):
    monkeypatch.setenv("VISPE_CACHE", str(tmp_path / "cache"))
    for part in ("train", "val"):
        for name in ("a", "b"):
            (tmp_path / "d" / part / name).mkdir(parents=True)
            for k in range(3):
                Image.new("RGB", (40, 40), (k, 0, 0)).save(tmp_path / "d" / part / name / f"{k}.jpg")
    whole = (tmp_path / "d/train/a/0.jpg").read_bytes()
    (tmp_path / "d/train/a/1.jpg").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "d/train/b/2.jpg").write_text("no image")
    return open_data(DataSpec(root=str(tmp_path / "d")))[0]


def test_refuse_names_the_first(images):
    with pytest.raises(ValueError, match=r"cannot read image '.*train/a/1\.jpg'.*\(and 1 more\); data.corrupt=skip"):
        verify.sound(images, "refuse")


def test_skip_goes_on_without(images):
    kept, skipped = verify.sound(images, "skip")
    assert [kept.name(i)[-7:] for i in range(len(kept))] == ["a/0.jpg", "a/2.jpg", "b/0.jpg", "b/1.jpg"]
    assert kept.labels.tolist() == [0, 0, 1, 1]
    assert len(skipped) == 2


def test_the_second_time_nothing_is_decoded(images, monkeypatch):
    seen = []
    first = verify.broken(images, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (6, 6)
    monkeypatch.setattr(type(images.source), "read", lambda self, k: pytest.fail("decoded again"))
    assert verify.broken(images) == first
    assert list(first) == [1, 5]


def test_a_file_that_changed_is_looked_at_again(images, tmp_path):
    assert 5 in verify.broken(images)
    Image.new("RGB", (40, 40)).save(tmp_path / "d/train/b/2.jpg")
    assert list(verify.broken(images)) == [1]


def test_a_damaged_cache_is_no_reason_to_stop(images, tmp_path):
    verify.broken(images)
    for path in (tmp_path / "cache" / "verified").iterdir():
        path.write_text("junk")
    assert list(verify.broken(images)) == [1, 5]


def test_nothing_left(images, tmp_path):
    for path in (tmp_path / "d/train").rglob("*.jpg"):
        path.write_text("junk")
    with pytest.raises(ValueError, match="none of 6 images can be read"):
        verify.sound(images, "skip")
