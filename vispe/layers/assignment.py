"""From two sets of matching descriptors to mutual matches: LightGlue's double softmax, in row blocks of bounded size.

``S = log_softmax(sim, 1) + log_softmax(sim, 2) + log sigma(z0) + log sigma(z1)`` (LightGlue section 3.2). Matching
needs only the best entry of every row and column of S, so S itself is never stored: it is ``2 sim + r + c`` with one
number a row and one a column, and both come from log-sum-exps that can be gathered block by block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vispe.position.grid import at_least_float32

INF = float("inf")


class Assignment(NamedTuple):
    """``matches0[i] = j`` or -1, ``scores0[i]`` the probability of i's mutual best match (0 without one); the same from
    1."""

    matches0: Tensor
    matches1: Tensor
    scores0: Tensor
    scores1: Tensor

    def pairs(self, row: int = 0) -> tuple[Tensor, Tensor]:
        """The matches of one pair as indices ``[k, 2]`` and scores ``[k]``."""
        i = (self.matches0[row] >= 0).nonzero()[:, 0]
        return torch.stack((i, self.matches0[row, i]), dim=-1), self.scores0[row, i]


def log_assignment(
    m0: Float[Tensor, "b m d"],
    m1: Float[Tensor, "b n d"],
    z0: Float[Tensor, "b m"],
    z1: Float[Tensor, "b n"],
    mask0: Bool[Tensor, "b m"] | None,
    mask1: Bool[Tensor, "b n"] | None,
) -> Float[Tensor, "b m+1 n+1"]:
    """The whole log-assignment ``[b, m + 1, n + 1]`` with its dustbins last, differentiable; memory grows with m x n.

    ``m0 [b, m, d]``, ``m1 [b, n, d]`` scaled so that their product is the similarity; ``z0 [b, m]``, ``z1 [b, n]``
    matchability logits; ``mask0 [b, m]``, ``mask1 [b, n]`` true where a keypoint exists. Entries of padding are -inf.
    """
    m0, m1, z0, z1 = _wide(m0, m1, z0, z1)
    with _exact(m0):
        sim = m0 @ m1.transpose(1, 2)
    exists = _pairs(mask0, mask1)
    inside = sim if exists is None else sim.masked_fill(~exists, torch.finfo(sim.dtype).min)
    scores = F.log_softmax(inside, 2) + F.log_softmax(inside, 1)
    scores = scores + F.logsigmoid(z0)[..., None] + F.logsigmoid(z1)[:, None]
    if exists is not None:
        scores = scores.masked_fill(~exists, -INF)
    scores = F.pad(scores, (0, 1, 0, 1))
    scores[:, :-1, -1] = F.logsigmoid(-z0)
    scores[:, -1, :-1] = F.logsigmoid(-z1)
    return scores


def assign(
    m0: Float[Tensor, "b m d"],
    m1: Float[Tensor, "b n d"],
    z0: Float[Tensor, "b m"],
    z1: Float[Tensor, "b n"],
    mask0: Bool[Tensor, "b m"] | None,
    mask1: Bool[Tensor, "b n"] | None,
    threshold: float,
    budget: int,
) -> Assignment:
    """Mutual best matches whose probability exceeds ``threshold``; arguments as in :func:`log_assignment`.

    At most ``budget`` bytes are spent on similarities at a time (one row of each pair at least). Runs in float32.
    """
    m0, m1, z0, z1 = _wide(m0, m1, z0, z1)
    b, m, n = m0.shape[0], m0.shape[1], m1.shape[1]
    if m == 0 or n == 0:
        return _nothing(m0, b, m, n)
    blocks = _blocks(b, m, n, budget)
    row_lse = m0.new_empty(b, m)
    column_lse = m0.new_full((b, n), -INF)
    whole = None
    for block in blocks:
        sim = _similarity(m0, m1, mask0, mask1, block)
        row_lse[:, block] = sim.logsumexp(2)
        column_lse = torch.logaddexp(column_lse, sim.logsumexp(1))
        whole = sim if len(blocks) == 1 else None

    r = _certainty(z0, row_lse)
    c = _certainty(z1, column_lse)

    def score(block: slice) -> Tensor:
        sim = _similarity(m0, m1, mask0, mask1, block) if whole is None else whole
        return sim.mul_(2).add_(r[:, block, None]).add_(c[:, None])

    best0, value0, best1 = _best(score, blocks, row_lse, column_lse)
    return mutual(best0, best1, value0.exp(), threshold)


def dual_softmax(
    m0: Float[Tensor, "b m d"],
    m1: Float[Tensor, "b n d"],
    mask0: Bool[Tensor, "b m"] | None,
    mask1: Bool[Tensor, "b n"] | None,
    threshold: float,
    budget: int,
) -> Assignment:
    """:func:`assign` where every point may have a match: ``softmax(sim, 1) softmax(sim, 2)`` (LoFTR section 3.3)."""
    return assign(
        m0, m1, m0.new_full(m0.shape[:2], INF), m1.new_full(m1.shape[:2], INF), mask0, mask1, threshold, budget
    )


def optimal_transport(
    sim: Float[Tensor, "b m n"],
    dustbin: Float[Tensor, ""],
    iterations: int,
    mask0: Bool[Tensor, "b m"] | None = None,
    mask1: Bool[Tensor, "b n"] | None = None,
) -> Float[Tensor, "b m+1 n+1"]:
    """Log of the transport between points and dustbins, times ``m + n``, after Sinkhorn's ``iterations`` (SuperGlue
    section 3.2).

    A point has mass 1, a dustbin the mass of all points of the other image; every similarity to a dustbin is
    ``dustbin``. Padding has no mass: a padded pair gets what it gets alone, and entries of padding are -inf.
    """
    b, m, n = sim.shape
    mask0 = sim.new_ones(b, m, dtype=torch.bool) if mask0 is None else mask0
    mask1 = sim.new_ones(b, n, dtype=torch.bool) if mask1 is None else mask1
    with _exact(sim):
        scores = F.pad(at_least_float32(sim), (0, 1, 0, 1))
        scores[:, :, -1], scores[:, -1] = dustbin, dustbin
        real0, real1 = F.pad(mask0, (0, 1), value=True), F.pad(mask1, (0, 1), value=True)
        gone = ~(real0[:, :, None] & real1[:, None])
        scores = scores.masked_fill(gone, torch.finfo(scores.dtype).min / 2)  # of -inf alone, a sum's gradient is NaN
        mass0, mass1 = scores.new_zeros(b, m + 1), scores.new_zeros(b, n + 1)
        mass0[:, -1], mass1[:, -1] = mask1.sum(1).log(), mask0.sum(1).log()
        u, v = torch.zeros_like(mass0), torch.zeros_like(mass1)
        for _ in range(iterations):
            u = torch.where(real0, mass0 - (scores + v[:, None]).logsumexp(2), 0.0)
            v = torch.where(real1, mass1 - (scores + u[:, :, None]).logsumexp(1), 0.0)
        return (scores + u[:, :, None] + v[:, None]).masked_fill(gone, -INF)


def nearest(
    d0: Float[Tensor, "b m d"],
    d1: Float[Tensor, "b n d"],
    threshold: float = -1.0,
    budget: int = 256 << 20,
    ratio: float | None = None,
) -> Assignment:
    """Mutual nearest neighbours of unit descriptors ``[b, m, d]``, ``[b, n, d]``; scores are cosines, above
    ``threshold``.

    ``ratio``: the distance to a neighbour must be below this share of that to the next one, seen from either image
    (Lowe 2004, section 7.1); where there is no next one nothing is asked.
    """
    d0, d1 = _wide(d0, d1)
    b, m, n = d0.shape[0], d0.shape[1], d1.shape[1]
    if m == 0 or n == 0:
        return _nothing(d0, b, m, n)
    blocks = _blocks(b, m, n, budget)
    best0, value0, best1 = _best(lambda block: _similarity(d0, d1, None, None, block), blocks, d0[..., 0], d1[..., 0])
    found = mutual(best0, best1, value0, threshold)
    if ratio is None:
        return found
    alone0, alone1 = (_distinct(*sides, ratio, budget) for sides in ((d0, d1), (d1, d0)))
    kept0 = alone0 & (found.matches0 >= 0) & alone1.gather(1, best0)
    kept1 = alone1 & (found.matches1 >= 0) & alone0.gather(1, best1)
    matches, scores = found[:2], found[2:]
    return Assignment(
        *(torch.where(kept, t, -1) for kept, t in zip((kept0, kept1), matches, strict=True)),
        *(torch.where(kept, t, 0) for kept, t in zip((kept0, kept1), scores, strict=True)),
    )


def _distinct(d0: Tensor, d1: Tensor, ratio: float, budget: int) -> Tensor:
    """Which points' nearest neighbours in the other image are nearer than ``ratio`` times the next, ``[b, m]``."""
    b, m, n = d0.shape[0], d0.shape[1], d1.shape[1]
    if n < 2:
        return torch.ones((b, m), dtype=torch.bool, device=d0.device)
    blocks = _blocks(b, m, n, budget)
    cosines = torch.cat([_similarity(d0, d1, None, None, block).topk(2).values for block in blocks], 1)
    first, second = (2 - 2 * cosines).clamp(min=0).sqrt().unbind(-1)
    return first < ratio * second


def mutual(
    best0: Int[Tensor, "b m"], best1: Int[Tensor, "b n"], score0: Float[Tensor, "b m"], threshold: float
) -> Assignment:
    """Keep ``i -> best0[i]`` where ``best1`` points back; a match needs a score above ``threshold`` (strictly)."""
    back0 = best1.gather(1, best0) == torch.arange(best0.shape[1], device=best0.device)
    back1 = best0.gather(1, best1) == torch.arange(best1.shape[1], device=best1.device)
    scores0 = torch.where(back0, score0, 0.0)
    scores1 = torch.where(back1, scores0.gather(1, best1), 0.0)
    matches0 = torch.where(back0 & (scores0 > threshold), best0, -1)
    matches1 = torch.where(back1 & (scores1 > threshold), best1, -1)
    return Assignment(matches0, matches1, scores0, scores1)


def _nothing(like: Tensor, b: int, m: int, n: int) -> Assignment:
    def none(k: int) -> Tensor:
        return torch.full((b, k), -1, dtype=torch.long, device=like.device)

    return Assignment(none(m), none(n), like.new_zeros(b, m), like.new_zeros(b, n))


def _wide(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Half precision as float32: a log-sum-exp over thousands of points needs it."""
    return tuple(at_least_float32(t) for t in tensors)


def _exact(like: Tensor) -> torch.autocast:
    """No autocast inside."""
    return torch.autocast(like.device.type, enabled=False)


def _blocks(b: int, m: int, n: int, budget: int) -> list[slice]:
    """Rows of ``[b, m, n]`` float32 in blocks of at most ``budget`` bytes, one row at least."""
    rows = max(1, min(m, budget // (4 * b * n)))
    return [slice(start, min(start + rows, m)) for start in range(0, m, rows)]


def _best(
    score: Callable[[slice], Tensor], blocks: list[slice], like0: Tensor, like1: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The best column and its value for every row, and the best row (the first, in a tie) for every column."""
    best0, value0 = torch.empty_like(like0, dtype=torch.long), torch.empty_like(like0)
    best1, value1 = torch.zeros_like(like1, dtype=torch.long), torch.full_like(like1, -INF)
    for block in blocks:
        values = score(block)
        value0[:, block], best0[:, block] = values.max(2)
        value, index = values.max(1)
        best1 = torch.where(value > value1, index + block.start, best1)
        value1 = torch.maximum(value1, value)
    return best0, value0, best1


def _similarity(m0: Tensor, m1: Tensor, mask0: Tensor | None, mask1: Tensor | None, block: slice) -> Tensor:
    with _exact(m0):
        sim = m0[:, block] @ m1.transpose(1, 2)
    exists = _pairs(None if mask0 is None else mask0[:, block], mask1)
    return sim if exists is None else sim.masked_fill_(~exists, -INF)


def _pairs(mask0: Tensor | None, mask1: Tensor | None) -> Tensor | None:
    if mask0 is None:
        return None if mask1 is None else mask1[:, None]
    return mask0[..., None] if mask1 is None else mask0[..., None] & mask1[:, None]


def _certainty(z: Tensor, lse: Tensor) -> Tensor:
    """Log-matchability less the log-sum-exp; zero where there was nothing to sum, instead of -inf - (-inf) = NaN."""
    return torch.where(lse == -INF, 0.0, F.logsigmoid(z) - lse)
