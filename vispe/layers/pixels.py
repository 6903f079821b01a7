"""From the coarse map of a network for semantic segmentation to the pixels of each image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from vispe.position.grid import check_grid


def enlarged(
    output: Float[Tensor, "b classes y x"],
    sizes: Sequence[tuple[int, int]],
    stride: int,
    real: Sequence[tuple[int, int]] | None = None,
) -> Iterator[Float[Tensor, "classes h w"]]:
    """The logits of each image at its own of ``sizes`` (h, w), one after another: bilinear, corners not aligned.

    ``stride``: pixels a side of a cell of ``output``. ``real``: the (h, w) of each image in a padded batch, before the
    network; the logits beyond are not looked at.
    """
    if len(sizes) != len(output) or (real is not None and len(real) != len(output)):
        given = f"{len(sizes)} sizes" + ("" if real is None else f" and {len(real)} real ones")
        raise ValueError(f"a size for each of {len(output)} images is needed, got {given}")
    for i, size in enumerate(sizes):
        logits = output[i : i + 1]
        if real is not None:
            logits = logits[..., : -(-real[i][0] // stride), : -(-real[i][1] // stride)]
        whole = check_grid(tuple(size), "size")  # type: ignore[arg-type]
        yield F.interpolate(logits.float(), size=whole, mode="bilinear", align_corners=False)[0]
