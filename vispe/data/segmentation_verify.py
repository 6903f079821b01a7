"""Semantic data looked at as a whole: what cannot be used, and how many pixels each class has."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from vispe.data.images import ImageError
from vispe.data.indices import Progress, histograms, threaded
from vispe.data.segmentation import VOID, SemanticImages
from vispe.data.verify import check_enough


class Survey(NamedTuple):
    """What :func:`survey` found: ``problems`` (number of the image -> a sentence), ``pixels`` of each class ``[c]``,
    the ``images`` each class is in ``[c]``, and ``void`` pixels."""

    problems: dict[int, str]
    pixels: Int[Tensor, " c"]
    images: Int[Tensor, " c"]
    void: int


def survey(images: SemanticImages, progress: Progress | None = None, *, decode: bool = True) -> Survey:
    """Look at every mask, and with ``decode`` at every image: what cannot be used, and how many pixels each class has.

    Masks seen before and unchanged since are remembered in the cache; images are decoded each time.
    """
    count = len(images.classes)
    table = images.meaning.table(count)
    pixels, seen = torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.int64)
    problems: dict[int, str] = _undecodable(images) if decode else {}
    void = 0
    for i, found in histograms(images.masks, progress):
        if isinstance(found, str):
            problems.setdefault(i, found)
            continue
        wrong = [index for index in found if index not in table]
        if wrong and images.meaning.ids is None:
            problems.setdefault(i, images.complaint(i, wrong))
        if i in problems:
            continue
        here = torch.zeros(count, dtype=torch.int64)
        for index, number in found.items():
            label = table.get(index, VOID)
            if label == VOID:
                void += number
            else:
                here[label] += number
        pixels += here
        seen += here > 0
    return Survey(dict(sorted(problems.items())), pixels, seen, void)


def sound_semantic(
    images: SemanticImages, corrupt: Literal["refuse", "skip"], progress: Progress | None = None
) -> tuple[SemanticImages, list[str]]:
    """The images without those that cannot be used, and a sentence for each of these; with ``"refuse"`` a
    ``ValueError`` names the first one instead and counts the others."""
    problems = survey(images, progress).problems
    sentences = list(problems.values())
    check_enough(sentences, len(images), corrupt, "used")
    return images.subset([i for i in range(len(images)) if i not in problems]), sentences


def _undecodable(images: SemanticImages) -> dict[int, str]:
    def attempt(i: int) -> tuple[int, str]:
        try:
            images.read(i)
        except ImageError as error:
            return i, str(error)
        return i, ""

    return {i: reason for i, reason in threaded(attempt, range(len(images))) if reason}
