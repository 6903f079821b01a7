"""What is true of an image of COCO's, in the forms in which detection and panoptic segmentation are scored."""

from __future__ import annotations

from vispe.data.coco import Sample
from vispe.metrics.detection import Truth
from vispe.metrics.panoptic import Segment


def truth_of(sample: Sample, *, masks: bool) -> Truth:
    """The objects of an image in the form in which they are scored, crowds among them."""
    return Truth(sample.boxes, sample.labels, sample.crowd, sample.area, sample.rles() if masks else None)


def true_segments(sample: Sample) -> list[Segment]:
    """What the numbers in the panoptic map of an image mean."""
    rows = zip(sample.ids.tolist(), sample.labels.tolist(), sample.crowd.tolist(), strict=True)
    return [Segment(*row) for row in rows]
