"""Augmentation: chance from (seed, epoch, image) alone; sizes; shifts by hand."""

import pytest
import torch

from vispe.data.augment import (
    AugmentSpec,
    dice,
    evaluation_transform,
    fitted,
    mixed,
    mixing,
    photo,
    photo_transform,
    small,
)


def test_seeds_are_unlike_each_other():
    seeds = {mixed(seed, epoch, image) for seed in range(5) for epoch in range(20) for image in range(100)}
    assert len(seeds) == 10000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert mixed(1, 23) != mixed(12, 3)


@pytest.mark.parametrize(
    "spec", [AugmentSpec(randaugment=(2, 9)), AugmentSpec(crop="padded"), AugmentSpec(crop="none")]
)
def test_a_photo_depends_on_its_seed_alone(spec):
    image = torch.rand(3, 50, 60, generator=torch.Generator().manual_seed(0))
    transform = photo_transform(spec, (32, 48))
    torch.manual_seed(1)
    one, state = photo(image, transform, 5), torch.get_rng_state()
    torch.manual_seed(2)
    torch.rand(7)
    two = photo(image, transform, 5)
    assert one.shape == (3, 32, 48)
    assert one.dtype == torch.uint8
    assert torch.equal(one, two)
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)
    assert any(not torch.equal(photo(image, transform, seed), one) for seed in range(8))


def test_white_stays_white():
    """Bicubic overshoot is cut off before bytes are made of it."""
    edge = torch.zeros(3, 40, 40)
    edge[:, :, 20:] = 1
    made = photo(edge, photo_transform(AugmentSpec(scale=(0.9, 1.0), flip=0), (64, 64)), 3)
    assert made[:, :, -8:].min() == 255
    assert made[:, :, :8].max() == 0


@pytest.mark.parametrize("size", [(32, 32), (32, 64), (64, 32), (7, 100)])
@pytest.mark.parametrize("shape", [(50, 60), (60, 50), (5, 200), (32, 64)])
def test_evaluation_fits_any_size(size, shape):
    assert evaluation_transform(size, 0.875)(torch.rand(3, *shape)).shape == (3, *size)


def test_evaluation_takes_the_middle():
    image = torch.zeros(3, 32, 96)
    image[:, :, 32:64] = 1
    assert evaluation_transform((32, 32), 1.0)(image).min() == 255


def test_shift_and_flip_by_hand():
    images = torch.arange(1, 10, dtype=torch.uint8).view(1, 1, 3, 3).repeat(3, 1, 1, 1)
    rolls = torch.tensor([[0.5, 0.5, 0.9], [0.0, 0.5, 0.9], [0.5, 0.99, 0.1]])
    made = small(images, rolls, AugmentSpec(crop="padded", pad=1, flip=0.5))
    assert made[0, 0].tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert made[1, 0].tolist() == [[0, 0, 0], [1, 2, 3], [4, 5, 6]]  # the window one up: black comes in
    assert made[2, 0].tolist() == [[0, 3, 2], [0, 6, 5], [0, 9, 8]]  # one to the right, then flipped


def test_dice_of_an_epoch():
    assert torch.equal(dice(3, 1, 10), dice(3, 1, 10))
    assert not torch.equal(dice(3, 1, 10), dice(3, 2, 10))
    assert not torch.equal(dice(4, 1, 10), dice(3, 1, 10))


def test_small_images_of_the_size_are_untouched():
    images = torch.randint(0, 256, (2, 1, 28, 28), dtype=torch.uint8)
    assert torch.equal(fitted(images, (28, 28), 1.0), images.expand(-1, 3, -1, -1))
    assert fitted(images, (20, 40), 1.0).shape == (2, 3, 20, 40)


@pytest.mark.parametrize("knobs", [{"mixup": 0.8}, {"cutmix": 1.0}, {"mixup": 0.8, "cutmix": 1.0}])
def test_mixed_targets_are_distributions(knobs):
    torch.manual_seed(0)
    mix = mixing(AugmentSpec(**knobs), 5)
    images, targets = mix(torch.rand(6, 3, 8, 8), torch.tensor([0, 1, 2, 3, 4, 0]))
    assert images.shape == (6, 3, 8, 8)
    assert torch.allclose(targets.sum(1), torch.ones(6))
    assert ((targets > 0).sum(1) <= 2).all()


def test_nothing_to_mix():
    assert mixing(AugmentSpec(), 5) is None


@pytest.mark.parametrize(
    "knobs",
    [
        {"scale": (0.5, 0.2)},
        {"scale": (0.0, 1.0)},
        {"ratio": (2.0, 1.0)},
        {"flip": 1.5},
        {"eval_crop": 0.0},
        {"pad": -1},
        {"mixup": -0.1},
        {"randaugment": (0, 9)},
        {"randaugment": (2, 40)},
    ],
)
def test_knobs(knobs):
    with pytest.raises(ValueError, match="got"):
        AugmentSpec(**knobs)
