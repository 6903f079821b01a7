"""The losses of a matcher without keypoints: cells that are the same place, and where in a cell's window a match is
(LoFTR, Sun et al. 2021, section 3.5).

Truth is an index into the other image's cells for every cell, ``UNMATCHABLE`` (-1) for one without a partner, or
``IGNORED`` (-2) for one that counts in nothing. Losses are told pair by pair, means over a pair's own matches, so that
a batch is worth the same however it is split; a pair without true matches is worth zero there.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vispe.geometry.depth import UNMATCHABLE
from vispe.layers.assignment import mutual

ALPHA, GAMMA = 0.25, 2.0  # of the focal loss, in the official code
SURE = 1e-10  # the least deviation of a heat map, in the official code
Picked = tuple[Tensor, Tensor, Tensor]  # rows [k] (which pair), cells i [k] of image 0, cells j [k] of image 1


def likelihood(log_p: Tensor) -> Tensor:
    """``-log p``, the paper's."""
    return -log_p


def focal(log_p: Tensor) -> Tensor:
    """``-alpha (1 - p)^gamma log p``, the official code's default: what is sure already teaches little."""
    return -ALPHA * (1 - log_p.exp()) ** GAMMA * log_p


COARSE = {"likelihood": likelihood, "focal": focal}


def coarse_loss(
    scores: Float[Tensor, "b mm nn"], matches0: Int[Tensor, "b m"], matches1: Int[Tensor, "b n"], form: str = "focal"
) -> Float[Tensor, " b"]:
    """The mean of ``form`` (one of ``COARSE``) over each pair's true matches.

    ``scores``: log-confidences ``[b, m, n]``; those of a transport, ``[b, m + 1, n + 1]`` with its dustbins last, add
    the mean over all cells without a partner, of both images together. Entries that are not asked for may be infinite.
    """
    m, n = matches0.shape[1], matches1.shape[1]
    if scores.shape[1:] not in ((m, n), (m + 1, n + 1)):
        raise ValueError(f"scores of {m} and {n} cells, with or without dustbins, got {list(scores.shape)}")
    matched = scores[:, :m].gather(2, matches0.clamp(min=0)[..., None])[..., 0]
    loss = _mean(matched, matches0 >= 0, form)
    if scores.shape[1] == m:
        return loss
    alone = torch.cat((scores[:, :m, n], scores[:, m, :n]), 1)
    return loss + _mean(alone, torch.cat((matches0, matches1), 1) == UNMATCHABLE, form)


def fine_loss(
    offsets: Float[Tensor, "k 2"],
    deviation: Float[Tensor, " k"],
    truth: Float[Tensor, "k 2"],
    rows: Int[Tensor, " k"],
    pairs: int,
) -> Float[Tensor, " b"]:
    """The mean of ``|offset - truth|^2`` over each pair's matches, weighted by one over the heat map's ``deviation``,
    which learns nothing from it.

    In half windows: only matches whose true offset lies in the window, within (-1, 1), count (NaN is none). The
    official code divides weights by their mean over the whole batch, matches that do not count among them.
    """
    inside = truth.abs().amax(1) < 1
    apart = (offsets - torch.where(inside[:, None], truth, 0.0)).square().sum(1)
    weight = torch.where(inside, 1 / deviation.detach().clamp(min=SURE), 0.0)
    sums = offsets.new_zeros(2, pairs).index_add(1, rows, torch.stack((apart * weight, weight)))
    return sums[0] / torch.where(sums[1] > 0, sums[1], 1.0)


def training_matches(
    scores: Float[Tensor, "b mm nn"],
    matches0: Int[Tensor, "b m"],
    cells1: int,
    order: Float[Tensor, "b m"],
    threshold: float,
    count: int,
    given: int,
) -> Picked:
    """Matches to refine: those that ``scores`` predict, topped up by true ones, ``count`` a pair at most (section 3.4).

    A prediction is a mutual best with a confidence above ``threshold``. Of each pair ``given`` true matches come first,
    then predictions, then other true ones, each in the ``order`` of image 0's cells (numbers in [0, 1)). The first
    pair's first cells stand in where there is nothing at all, so that the fine level always takes part.
    """
    m, n = matches0.shape[1], cells1
    inner = scores[:, :m, :n]
    if scores.shape[1] > m:  # what goes to a dustbin matches nothing
        to_bin = (scores.argmax(2) == n)[:, :m, None] | (scores.argmax(1) == m)[:, None, :n]
        inner = inner.masked_fill(to_bin, -torch.inf)
    best, cell = inner.max(2)
    found = mutual(cell, inner.argmax(1), best.exp(), threshold).matches0
    rank = torch.where(matches0 >= 0, order, 2.0).argsort(1).argsort(1)
    keys = torch.cat((torch.where(rank < given, 0.0, 2.0) + order, 1 + order), 1)
    both = torch.cat((matches0, found), 1)
    keys = torch.where(both >= 0, keys, torch.inf)
    chosen = keys.topk(min(count, 2 * m), 1, largest=False)
    rows, k = chosen.values.isfinite().nonzero(as_tuple=True)
    at = chosen.indices[rows, k]
    if not len(rows):
        nothing = torch.zeros(1, dtype=torch.long, device=scores.device)
        return nothing, nothing, nothing
    return rows, at % m, both[rows, at]


def _mean(log_p: Float[Tensor, "b k"], which: Tensor, form: str) -> Float[Tensor, " b"]:
    """The mean of each row over ``which``, zero over nothing."""
    each = COARSE[form](torch.where(which, log_p, 0.0))
    return torch.where(which, each, 0.0).sum(1) / which.sum(1).clamp(min=1)
