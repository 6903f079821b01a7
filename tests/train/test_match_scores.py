"""What a matcher of keypoints is worth, by hand."""

from types import SimpleNamespace

import numpy as np
import torch

from vispe.models.lightglue import Points
from vispe.train import match_scores
from vispe.train.keypoint_pairs import Views
from vispe.train.match_scores import beats, mutual


def test_mutual_neighbours_and_their_ratio_by_hand():
    """Two clear pairs; of two equal descriptors neither passes the ratio."""
    d0 = torch.eye(4)[None, :3]
    d1 = torch.stack((torch.eye(4)[0], torch.eye(4)[1], torch.eye(4)[2], torch.eye(4)[2]))[None]
    sides = [Points(torch.zeros(1, d.shape[1], 2), d, (9.0, 9.0)) for d in (d0, d1)]
    assert mutual()(*sides)[0].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert mutual(0.8)(*sides)[0].tolist() == [[0, 0], [1, 1]]


def test_precision_at_a_recall_by_hand(monkeypatch):
    """Of the surest matches right, wrong, right, right there are 4 true: half of them are found with the third."""
    row = match_scores.Judged(np.array([0.9, 0.8, 0.7, 0.6]), np.array([True, False, True, True]), 4, 4, 1.0)
    monkeypatch.setattr(match_scores, "judged", lambda *_: [row])
    assert match_scores.precision_at([row], 0.25) == 1.0
    assert match_scores.precision_at([row], 0.5) == 2 / 3
    assert match_scores.precision_at([row], 0.75) == 3 / 4
    assert match_scores.precision_at([row], 1.0) is None
    told = match_scores.scored(SimpleNamespace(source=Views), None)
    assert (told["precision"], told["recall"], told["matches"]) == (3 / 4, 3 / 4, 4)


def test_better_means_at_equal_recall():
    assert beats({"precision": 0.8, "lightglue": 0.9})
    assert not beats({"precision": 0.9, "lightglue": 0.9})
    assert not beats({"precision": 0.9, "lightglue": None})
