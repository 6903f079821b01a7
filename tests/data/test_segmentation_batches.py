"""Crops and masks: kept together, chance from (seed, epoch, image) alone, whole images in evaluation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from vispe.data.batches import Parts, Plan, Shares
from vispe.data.segmentation import VOID, Meaning, SemanticImages, SemanticSample
from vispe.data.segmentation_batches import (
    GREY,
    Crop,
    SemanticAugmentSpec,
    SemanticEvalSet,
    SemanticTrainSet,
    drawn,
    resize_both,
    semantic_loader,
    train_transform,
)


def sample(size=(40, 60), seed=0):
    """An image whose red channel says the class of each pixel: 40 times it, in blocks of 10."""
    g = torch.Generator().manual_seed(seed)
    classes = torch.randint(0, 5, (-(-size[0] // 10), -(-size[1] // 10)), generator=g)
    mask = classes.repeat_interleave(10, 0).repeat_interleave(10, 1)[: size[0], : size[1]]
    image = torch.stack((mask * 40, mask * 0, mask * 0)).to(torch.uint8)
    return SemanticSample(image, mask, "made")


@pytest.mark.parametrize("flip", [0.0, 1.0])
@pytest.mark.parametrize("short", [None, 33])
def test_image_and_mask_stay_together(flip, short):
    """Red and green say the place of each pixel, the mask's class too: within a pixel they go on to agree."""
    y, x = torch.meshgrid(torch.arange(40), torch.arange(60), indexing="ij")
    given = SemanticSample(torch.stack((4 * x, 4 * y, 0 * x)).to(torch.uint8), 60 * y + x, "made")
    transform = train_transform(SemanticAugmentSpec(crop=(32, 48), flip=flip, photometric=0.0, short=short))
    padded = 0
    for seed in range(20):
        image, mask = drawn(given, transform, seed)
        assert image.shape == (3, 32, 48)
        assert mask.shape == (32, 48)
        assert (image.dtype, mask.dtype) == (torch.uint8, torch.int64)
        assert type(image) is type(mask) is torch.Tensor
        known = mask != VOID
        assert (image[0][known] / 4 - mask[known] % 60).abs().max() <= 1
        assert (image[1][known] / 4 - mask[known] // 60).abs().max() <= 1
        assert (image[:, ~known] == torch.tensor(GREY)[:, None]).all()
        padded += bool((~known).any())
    assert 3 < padded < 20


def test_a_mask_is_read_at_the_pixels_centres():
    """Four columns to two: the new centres lie between columns 0 and 1, and 2 and 3; a third of six is exact."""
    mask = torch.tensor([[0, 0, 1, 1, 2, 2]])
    image = torch.zeros(3, 1, 6, dtype=torch.uint8)
    assert resize_both(image, mask, (1, 3))[1].tolist() == [[0, 1, 2]]
    mask = torch.tensor([[5, 6, 7, 5, 6, 7]])
    assert resize_both(image, mask, (1, 2))[1].tolist() == [[6, 6]]  # torchvision's own gives 5, 5
    assert resize_both(image, torch.tensor([[VOID, 300, 2, 2, 2, 2]]), (1, 12))[1][0, :4].tolist() == [-1, -1, 300, 300]


def test_chance_is_of_the_seed_alone():
    transform, given = train_transform(SemanticAugmentSpec(crop=(24, 24))), sample()
    torch.manual_seed(1)
    one, state = drawn(given, transform, 5), torch.get_rng_state()
    torch.rand(9)
    two = drawn(given, transform, 5)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)
    assert any(not torch.equal(drawn(given, transform, seed)[0], one[0]) for seed in range(6))


def test_colours_are_distorted_and_masks_are_not():
    given = sample()
    spec = SemanticAugmentSpec(crop=(40, 60), scale=(1.0, 1.0), flip=0.0, photometric=1.0, dominance=1.0)
    image, mask = drawn(given, train_transform(spec), 3)
    assert torch.equal(mask, given.mask)
    assert not torch.equal(image, given.image)


def test_a_crop_of_one_class_is_drawn_again():
    mask = torch.zeros(40, 400, dtype=torch.int64)
    mask[:, 360:380], mask[:, 380:] = 1, VOID
    image = torch.zeros(3, 40, 400, dtype=torch.uint8)
    torch.manual_seed(0)
    picky, easy = (Crop(SemanticAugmentSpec(crop=(40, 60), dominance=d)) for d in (0.75, 1.0))
    one = [sum(len(crop(image, mask)[1].unique()) > 1 for _ in range(40)) for crop in (picky, easy)]
    assert one[0] > one[1] + 10
    assert not picky._filled(torch.full((4, 4), VOID))
    assert picky._filled(torch.tensor([[0, VOID], [VOID, 0]]))


@pytest.mark.parametrize(
    ("knobs", "why"),
    [
        ({"crop": (0, 4)}, "crop"),
        ({"scale": (2.0, 0.5)}, "scale"),
        ({"scale": (0.0, 0.5)}, "scale"),
        ({"dominance": 1.5}, "dominance"),
        ({"flip": -0.1}, "flip"),
        ({"photometric": 2.0}, "photometric"),
        ({"short": 0}, "short"),
        ({"eval_short": 0}, "eval_short"),
    ],
)
def test_knobs(knobs, why):
    with pytest.raises(ValueError, match=rf"{why} .*got"):
        SemanticAugmentSpec(**knobs)
    assert SemanticAugmentSpec(crop=64).crop == (64, 64)


# --- sets -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def images(tmp_path):
    files = []
    for k, size in enumerate(((40, 60), (50, 30), (45, 45), (40, 60), (64, 40), (40, 60))):
        made = sample(size, k)
        Image.fromarray(made.image.permute(1, 2, 0).numpy()).save(tmp_path / f"{k}.png")
        Image.fromarray(made.mask.numpy().astype(np.uint8)).save(tmp_path / f"{k}_mask.png")
        files.append((str(tmp_path / f"{k}.png"), str(tmp_path / f"{k}_mask.png")))
    return SemanticImages(*zip(*files, strict=True), tuple("abcde"), Meaning())


def test_two_processes_and_workers_see_what_one_sees(images):
    spec = SemanticAugmentSpec(crop=(24, 32))
    plan = {"images": 6, "batch_size": 2, "epochs": 2, "seed": 1}

    def seen(workers, **knobs):
        data = SemanticTrainSet(images, spec, seed=1)
        batches = semantic_loader(data, Parts(Plan(**plan, **knobs)), workers)
        return {
            (n, int(i)): (image, mask)
            for n, batch in enumerate(batches)
            for i, image, mask in zip(batch.indices, batch.images, batch.masks, strict=True)
        }

    one, two = seen(0), {**seen(2, world=2, rank=0), **seen(0, world=2, rank=1)}
    assert one.keys() == two.keys()
    assert all(torch.equal(a, b) for key in one for a, b in zip(one[key], two[key], strict=True))
    assert len(one) == 12


def test_evaluation_sees_whole_images_and_untouched_masks(images):
    batches = list(semantic_loader(SemanticEvalSet(images), Shares(6, 4), 0))
    first = batches[0]
    assert first.images.shape == (4, 3, 50, 60)
    assert first.real.tolist() == first.sizes.tolist() == [[40, 60], [50, 30], [45, 45], [40, 60]]
    assert first.real_pixels().sum((1, 2)).tolist() == [2400, 1500, 2025, 2400]
    for k in range(4):
        h, w = first.sizes[k].tolist()
        assert torch.equal(first.masks[k, :h, :w], images.mask(k))
        assert (first.masks[k, h:] == VOID).all()
        assert (first.masks[k, :, w:] == VOID).all()
        assert first.images[k, :, first.real_pixels()[k]].float().std() > 0
    resized = next(iter(semantic_loader(SemanticEvalSet(images, short=20), Shares(6, 4), 0)))
    assert resized.real.tolist() == [[20, 30], [33, 20], [20, 20], [20, 30]]
    assert resized.sizes.tolist() == first.sizes.tolist()


def test_a_repeated_image_does_not_count(images):
    batch = SemanticEvalSet(images).__getitems__([5, -1])
    assert batch.indices.tolist() == [5, -1]
    assert (batch.masks[1] == VOID).all()


def test_a_broken_file_is_the_batchs_problem(images):
    with open(images.masks[1], "w") as file:
        file.write("junk")
    train = SemanticTrainSet(images, SemanticAugmentSpec(crop=24), seed=0).__getitems__([(0, 0), (0, 1)])
    val = SemanticEvalSet(images).__getitems__([1])
    assert "cannot read mask" in train.problem
    assert "cannot read mask" in val.problem
    assert not SemanticEvalSet(images).__getitems__([0]).problem
