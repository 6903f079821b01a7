"""What a matcher without keypoints is worth, by hand, and SIFT beside it."""

import numpy as np
import pytest
import torch

from tests.train.test_classify import quiet
from tests.train.test_dense import DENSE
from tests.train.test_image_pairs import write_photos
from vispe import recipe
from vispe.layers.cells import CellMatches
from vispe.train.dense import DenseRecipe, opened_pairs
from vispe.train.dense_scores import Judged, beats, judged, neighbours, summed
from vispe.train.image_pairs import ImagePairs


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    photos = write_photos(tmp_path_factory.mktemp("photos") / "six", 6, (96, 72))
    return opened_pairs(recipe.of(DENSE, DenseRecipe, (f"data.roots=[{photos}]",)), quiet).val


def test_matches_are_judged_by_hand(pairs):
    """Of four matches two lie within 3 pixels, one 4 pixels off, and of one nothing is known."""
    source = pairs
    batch = source.__getitems__([0])
    there = batch.there0[0]
    there[20:24] = torch.tensor([[10.0, 10.0], [20.0, 20.0], [30.0, 30.0], [torch.nan, torch.nan]])
    batch.matches0[0] = -1
    batch.matches0[0, 20], batch.matches0[0, 22], batch.matches0[0, 30] = 1, 2, 3
    cells = torch.tensor([20, 21, 22, 23])
    points0 = torch.stack((cells % 10, cells // 10), 1).float() * 8
    points1 = torch.tensor([[10.0, 13.0], [20.0, 20.0], [30.0, 34.0], [1.0, 1.0]])
    out = CellMatches(points0, points1, torch.ones(4), torch.zeros(4, dtype=torch.long))
    row = judged(lambda *_: out, source.source, batch)[0]
    assert row[:5] == (4, 3, 2, 3, 1)
    told = summed([row, Judged(0, 0, 0, 1, 0, np.inf)], source.source)
    assert (told["precision"], told["recall"], told["matches"]) == (2 / 3, 1 / 4, 2)


def test_nothing_at_all_is_worth_nothing():
    told = summed([Judged(0, 0, 0, 0, 0, np.inf)], ImagePairs())
    assert told == {"precision": 0, "recall": 0, "matches": 0, "auc": [0, 0, 0]}


def test_neighbours_of_sift_find_the_views(pairs):
    """Smooth pictures through gentle homographies: most corners come out within five pixels."""
    pytest.importorskip("cv2", reason="SIFT is OpenCV's")
    told = neighbours(pairs)
    assert told["matches"] > 4
    assert 0.2 < told["auc"][1] <= 1
    assert told == neighbours(pairs)


def test_better_is_decided_at_five():
    source = ImagePairs()
    assert source.limits[1] == 5
    assert beats({"auc": [0, 0.6, 0]}, {"auc": [1, 0.5, 1]}, source)
    assert not beats({"auc": [1, 0.5, 1]}, {"auc": [0, 0.5, 0]}, source)
