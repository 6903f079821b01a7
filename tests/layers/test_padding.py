"""The real pixels of a padded batch are rectangles at the upper left."""

import pytest
import torch

from vispe.layers.padding import rectangles, together, unpadded

IMAGES = torch.zeros(2, 3, 4, 5)


def mask(*sizes: tuple[int, int]) -> torch.Tensor:
    found = torch.zeros(len(sizes), 4, 5, dtype=torch.bool)
    for own, (h, w) in zip(found, sizes, strict=True):
        own[:h, :w] = True
    return found


def test_sizes_are_read_and_grouped():
    sizes = rectangles(mask((4, 5), (2, 3)), IMAGES)
    assert sizes == [(4, 5), (2, 3)]
    assert together([*sizes, (4, 5)]) == {(4, 5): [0, 2], (2, 3): [1]}


def test_each_image_is_computed_alone():
    """A network that knows the size of what it sees, and writes it into every cell of a map of half the sides."""
    seen = []

    def sizes(images: torch.Tensor) -> torch.Tensor:
        b, _, h, w = images.shape
        seen.append((b, h, w))
        return torch.full((b, 1, -(-h // 2), -(-w // 2)), float(10 * h + w))

    made = unpadded(sizes, torch.zeros(3, 3, 4, 5), mask((2, 3), (4, 5), (2, 3)), 2, False)
    assert seen == [(2, 2, 3), (1, 4, 5)]
    assert made[1].tolist() == [[[45.0] * 3] * 2]
    assert made[0].tolist() == made[2].tolist() == [[[23.0, 23.0, 0.0], [0.0] * 3]]
    assert unpadded(sizes, IMAGES, None, 2, True).shape == (2, 1, 2, 3)
    assert unpadded(sizes, IMAGES, mask((4, 5), (4, 5)), 2, True).shape == (2, 1, 2, 3)
    with pytest.raises(ValueError, match="images of one size, without padding; got"):
        unpadded(sizes, IMAGES, mask((4, 5), (2, 3)), 2, True)


def test_mistakes_are_named():
    hole = mask((4, 5), (2, 3))
    hole[1, 0, 0] = False
    apart = mask((4, 5), (2, 3))
    apart[1, 0, 2], apart[1, 3, 2] = False, True  # six pixels, not a rectangle
    for wrong in (hole, apart, mask((4, 5), (0, 0))):
        with pytest.raises(ValueError, match="image 1's do not"):
            rectangles(wrong, IMAGES)
    with pytest.raises(ValueError, match=r"mask is \[b, h, w\] of bool"):
        rectangles(mask((4, 5)), IMAGES)
    with pytest.raises(ValueError, match=r"got torch\.float32"):
        rectangles(mask((4, 5), (2, 3)).float(), IMAGES)
