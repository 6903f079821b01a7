"""Photographs are parted by their names alone."""

import pytest

from vispe.train.photos import PhotoSpec, photographs


def test_photographs_are_parted_by_their_names(snapshots):
    spec = PhotoSpec(roots=(str(snapshots),), val_part=0.3)
    train, val = photographs(spec)
    assert (len(train), len(val)) == (5, 2)
    assert not {p.name for p in train} & {p.name for p in val}
    assert photographs(spec) == (train, val)
    assert len(photographs(PhotoSpec(roots=("skimage",)))[0]) == 13


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"roots": ()}, "roots are folders of photographs, got none"),
        ({"val_part": 0.0}, "val_part lies between 0 and 1, got 0.0"),
        ({"val_pairs": 0}, "val_pairs is at least 1, first at least 2, got 0 and None"),
        ({"first": 1}, "got 200 and 1"),
        ({"corrupt": "maybe"}, "corrupt is skip or refuse, got 'maybe'"),
    ],
)
def test_mistakes_are_named(knobs, said):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        PhotoSpec(**knobs)
    assert said in str(caught.value)


def test_folders_without_photographs_are_named(tmp_path):
    with pytest.raises(ValueError, match="there are no images in"):
        photographs(PhotoSpec(roots=(str(tmp_path),)))
    with pytest.raises(ValueError, match="there is no folder"):
        photographs(PhotoSpec(roots=(str(tmp_path / "nowhere"),)))
