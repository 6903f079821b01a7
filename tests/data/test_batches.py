"""The order of images: a function of (seed, epoch), equal on one process and on several, from any update on."""

import pytest
import torch
from PIL import Image

from vispe.data.augment import AugmentSpec
from vispe.data.batches import EvalSet, Parts, Plan, Shares, TrainSet, in_memory, loader
from vispe.data.classification import DataSpec, Images, open_data
from vispe.data.sources import Pixels


def plan(**knobs):
    return Plan(**{"images": 22, "batch_size": 8, "epochs": 3, "seed": 0, **knobs})


def updates(parts, each):
    """The images of each update, as sets, from lists of parts in the order they come."""
    parts = list(parts)
    return [{key for part in parts[i : i + each] for key in part} for i in range(0, len(parts), each)]


def test_an_epoch_sees_an_image_at_most_once():
    whole = updates(plan().parts(0), 1)
    assert len(whole) == plan().updates == 6
    for epoch in range(3):
        seen = whole[2 * epoch] | whole[2 * epoch + 1]
        assert len(seen) == 16
        assert {e for e, _ in seen} == {epoch}
    assert whole[0] != {(0, image) for _, image in whole[2]}


@pytest.mark.parametrize(("world", "accumulate"), [(2, 1), (1, 2), (2, 2), (4, 1)])
def test_processes_and_accumulation_see_what_one_sees(world, accumulate):
    one = updates(plan().parts(0), 1)
    several = [updates(plan(world=world, rank=r, accumulate=accumulate).parts(0), accumulate) for r in range(world)]
    assert [set().union(*parts) for parts in zip(*several, strict=True)] == one
    assert sum(len(parts[0]) for parts in several) == 8


@pytest.mark.parametrize("start", [0, 1, 2, 5, 6])
def test_from_any_update_on(start):
    assert list(plan(accumulate=2).parts(start)) == list(plan(accumulate=2).parts(0))[2 * start :]
    assert len(Parts(plan(accumulate=2), start)) == 12


def test_refusals():
    with pytest.raises(ValueError, match="22 training examples an epoch are fewer than a batch of 32"):
        plan(batch_size=32)
    with pytest.raises(ValueError, match="batch of 8 does not divide into 3 processes x 1"):
        plan(world=3)


@pytest.mark.parametrize(("images", "world"), [(10, 1), (10, 3), (4, 3), (12, 4)])
def test_shares_have_every_image_once_and_equally_many_batches(images, world):
    shares = [Shares(images, 2, world, rank) for rank in range(world)]
    assert len({len(share) for share in shares}) == 1
    seen = [i for share in shares for batch in share for i in batch if i >= 0]
    assert sorted(seen) == list(range(images))


# --- datasets ---------------------------------------------------------------------------------------------------------


def held(count=22, size=(12, 12)):
    pixels = torch.randint(0, 256, (count, 1, *size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return Images(Pixels(pixels, "made"), torch.arange(count), torch.arange(count) % 3, ("a", "b", "c"))


def by_key(batches):
    return {(int(i), n): image for n, b in enumerate(batches) for i, image in zip(b.indices, b.images, strict=True)}


@pytest.mark.parametrize("spec", [AugmentSpec(crop="padded", pad=2), AugmentSpec(randaugment=(1, 5))])
def test_an_image_looks_the_same_whoever_brings_it(spec):
    data = TrainSet(held(), spec, (12, 12), seed=1)
    one = by_key(loader(data, Parts(plan()), 0))
    two = {}
    for rank in range(2):
        fresh = TrainSet(held(), spec, (12, 12), seed=1)
        two |= by_key(loader(fresh, Parts(plan(world=2, rank=rank)), 2 if rank else 0))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_another_epoch_is_another_look():
    data = TrainSet(held(), AugmentSpec(crop="padded", pad=2), (12, 12), seed=1)
    first, second = data.__getitems__([(0, 5)]), data.__getitems__([(1, 5)])
    assert not torch.equal(first.images, second.images)


def test_padding_has_no_label():
    batch = EvalSet(held(), (12, 12), 1.0).__getitems__([3, -1])
    assert batch.labels.tolist() == [0, -1]
    assert batch.images.shape == (2, 3, 12, 12)


def folder(tmp_path, sizes):
    for part in ("train", "val"):
        for k, size in enumerate(sizes):
            path = tmp_path / part / "ab"[k % 2] / f"{k}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", size, (k, 2 * k, 3 * k)).save(path)
    return open_data(DataSpec(root=str(tmp_path)))[0]


def test_small_equal_images_are_held_in_memory(tmp_path):
    images = folder(tmp_path, [(20, 16)] * 4)
    made = in_memory(images)
    assert made.source.pixels.shape == (4, 3, 16, 20)
    assert all(torch.equal(made.read(i), images.read(i)) for i in range(4))
    assert in_memory(made) is made


@pytest.mark.parametrize("sizes", [[(20, 16)] * 3 + [(16, 20)], [(200, 16)] * 4])
def test_others_are_not(tmp_path, sizes):
    images = folder(tmp_path, sizes)
    assert in_memory(images) is images


def test_a_file_that_breaks_later_is_named(tmp_path):
    images = folder(tmp_path, [(20, 16)] * 4)
    (tmp_path / "train/a/0.png").write_text("junk")
    batch = TrainSet(images, AugmentSpec(), (16, 16), 0).__getitems__([(0, 0), (0, 1)])
    assert "train/a/0.png" in batch.problem
    assert "train/a/0.png" in EvalSet(images, (16, 16), 1.0).__getitems__([0]).problem
