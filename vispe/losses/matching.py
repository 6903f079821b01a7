"""The loss of a matcher: the likelihood of true matches and of points that have none, after every layer (LightGlue,
Lindenberger et al. 2023, section 3.4).

Truth is an index into the other image for every keypoint, ``UNMATCHABLE`` (-1) for one whose partner was not found, or
``IGNORED`` (-2) for one that counts in nothing: too near to call, or padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from vispe.geometry.depth import IGNORED, UNMATCHABLE

Balance = Literal["means", "points"]


class MatchLoss(NamedTuple):
    """``total`` is what to minimise. The others are told: the last layer's likelihoods of matches and of unmatchable
    points, and the cross-entropy of the confidences."""

    total: Tensor
    matched: Tensor
    unmatched: Tensor
    confidence: Tensor


def matching_loss(
    scores: Sequence[Float[Tensor, "b m+1 n+1"]],
    confidence: Sequence[tuple[Float[Tensor, "b m"], Float[Tensor, "b n"]]],
    matches0: Int[Tensor, "b m"],
    matches1: Int[Tensor, "b n"],
    balance: Balance = "means",
) -> MatchLoss:
    """Mean over layers and pairs of minus ``mean_M log P_ij + (mean_A log(1 - s_i) + mean_B log(1 - s_j)) / 2``, and
    the mean over layers of the confidences' binary cross-entropy.

    So says the paper (``balance="means"``): where few points have a partner, each match weighs more than a miss, and
    scores of hard pairs come out too sure beside those of easy ones. With ``"points"`` it is twice the mean over all
    points of both images, those of a match each with its ``log P_ij``: scores are probabilities, and pairs can be
    compared.

    ``scores``: each layer's log-assignment, dustbins last, as ``log_assignment`` makes it. ``confidence``: logits of
    every layer but the last, made of detached states; they learn whether a point's best partner there is that of the
    last layer. A mean over nothing is zero. All in float32 or better.
    """
    if len(scores) != len(confidence) + 1:
        raise ValueError(f"every layer but the last has confidences: got {len(scores)} layers and {len(confidence)}")
    which = matches0 >= 0, matches0 == UNMATCHABLE, matches1 == UNMATCHABLE
    share = scores[0].new_tensor([1.0, 0.5, 0.5])[:, None]
    if balance == "points":
        counts = torch.stack([each.sum(1) for each in which]) * share.new_tensor([2.0, 1.0, 1.0])[:, None]
        share = 2 * counts / counts.sum(0).clamp(min=1)
    parts = []
    for layer in scores:
        inside = layer[:, :-1].gather(2, matches0.clamp(min=0)[..., None])[..., 0]
        told = inside, layer[:, :-1, -1], layer[:, -1, :-1]
        parts.append(-torch.stack([_mean(*each) for each in zip(told, which, strict=True)]))
    total = (share * torch.stack(parts)).sum(1).mean()
    matched, missed0, missed1 = parts[-1].detach().mean(1)
    sure = _confidence_loss(scores, confidence, matches0 != IGNORED, matches1 != IGNORED)
    return MatchLoss(total + sure, matched, (missed0 + missed1) / 2, sure.detach())


def _confidence_loss(
    scores: Sequence[Tensor], confidence: Sequence[tuple[Tensor, Tensor]], real0: Tensor, real1: Tensor
) -> Tensor:
    if not confidence:
        return scores[0].new_zeros(())
    last0, last1 = _best(scores[-1])
    parts = []
    for layer, (logits0, logits1) in zip(scores[:-1], confidence, strict=True):
        now0, now1 = _best(layer)
        for logits, right, real in ((logits0, now0 == last0, real0), (logits1, now1 == last1, real1)):
            each = F.binary_cross_entropy_with_logits(logits, right.to(logits.dtype), reduction="none")
            parts.append(_mean(each, real).mean())
    return torch.stack(parts).mean()


@torch.no_grad()
def _best(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Each point's best partner, the dustbin one of them."""
    return scores[:, :-1].argmax(2), scores[:, :, :-1].argmax(1)


def _mean(values: Float[Tensor, "b n"], which: Tensor) -> Float[Tensor, " b"]:
    """The mean of each row over ``which``; values elsewhere may be infinite."""
    return torch.where(which, values, 0.0).sum(1) / which.sum(1).clamp(min=1)
