"""The truth of an image in the forms that are scored."""

import pytest

from tests.data.conftest import instances, opened, opened_panoptic, panoptic
from vispe.metrics.panoptic import Segment
from vispe.truth import true_segments, truth_of

pytest.importorskip("pycocotools", reason="the extra `detect` brings it")


def test_objects(tmp_path):
    sample = opened(tmp_path, instances())[1]
    plain, drawn = truth_of(sample, masks=False), truth_of(sample, masks=True)
    assert plain.masks is None
    assert plain.labels.tolist() == drawn.labels.tolist() == [1, 0]
    assert plain.area.tolist() == [12, 3]
    assert [mask["size"] for mask in drawn.masks] == [[8, 9], [8, 9]]
    assert truth_of(opened(tmp_path, instances())[0], masks=False).crowd.tolist() == [True]


def test_segments(tmp_path):
    sample = opened_panoptic(tmp_path, panoptic())[1]
    assert true_segments(sample) == [Segment(300, 1), Segment(70000, 0)]
