"""Matchers of whole images: points in pixels of the images, best first; the pipeline takes them like any other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import vispe
from vispe.data.images import ImageError
from vispe.detector_free import DetectorFree
from vispe.features import Look
from vispe.matching import Matcher
from vispe.models import DETECTOR_FREE, MATCHERS, MODELS


@pytest.fixture(scope="module")
def state():
    torch.manual_seed(0)
    return vispe.build("loftr_coarse_bmvs").state_dict()


@pytest.fixture(scope="module")
def image():
    torch.manual_seed(3)
    return torch.rand(3, 120, 160)


def test_every_one_is_a_matcher_and_a_model():
    assert set(DETECTOR_FREE) <= set(MATCHERS)
    assert set(DETECTOR_FREE.values()) <= set(MODELS)


def test_points_are_in_pixels_of_the_images_whatever_size_they_were_looked_at(state, image):
    half = DetectorFree("loftr_coarse", look=Look(resize=80), weights=state, threshold=0.0)
    f0, f1 = half(image, image)
    assert len(f0) == len(f1) > 2
    assert f0.size == (120, 160)
    assert f0.pixel == 2.0
    assert bool((f0.scores[:-1] >= f0.scores[1:]).all())
    # The centre of pixel 16 k of the small image is the point 32 k + 1/2 of the large one.
    assert torch.equal((f0.keypoints - 0.5) % 32, torch.zeros(len(f0), 2))
    few, _ = DetectorFree("loftr_coarse", look=Look(resize=80), weights=state, threshold=0.0, max_matches=2)(
        image, image
    )
    assert torch.equal(few.keypoints, f0.keypoints[:2])


def test_an_image_alone_has_no_keypoints(state, image):
    matcher = DetectorFree("loftr_coarse", look=Look(resize=80), weights=state)
    alone = matcher.no_keypoints(image)
    assert (len(alone), alone.size, alone.pixel) == (0, (120, 160), 2.0)
    with pytest.raises(ImageError, match="'tiny'"):
        matcher.no_keypoints(image[:, :4], "tiny")


@pytest.mark.parametrize("upright", ["0", "180", "auto"])
def test_the_pipeline_gives_matches_without_an_extractor(state, image, upright):
    matcher = Matcher(matcher="loftr_coarse", weights=state, threshold=0.0)
    found = matcher(image, image, geometry="homography", upright=upright)
    assert (found.extractor, found.matcher) == (None, "loftr_coarse")
    assert len(found) == len(found.keypoints0) == len(found.keypoints1) > 5
    assert np.array_equal(found.matches, np.arange(len(found)).repeat(2).reshape(-1, 2))
    assert found.summary("a", "b")["extractor"] is None
    assert set(found.seconds) == {"read", "match", "verify"}
    assert bool((found.keypoints1 >= 0).all())
    assert bool((found.keypoints1 < (160, 120)).all())
    if upright == "180":
        assert found.rotation == 180
        assert bool(((159 - found.keypoints1[:, 0]) % 16 == 0).all())


def test_a_small_image_is_named(state):
    with pytest.raises(ImageError, match="'tiny'"):
        DetectorFree("loftr_coarse", weights=state)(torch.rand(3, 64, 64), torch.rand(3, 4, 64), ("left", "tiny"))


def test_an_image_matched_with_itself_by_a_network_that_refines_both(image):
    """Random weights whose norms have seen the image: cells differ, and most find themselves."""
    torch.manual_seed(0)
    knobs = {"widths": (16, 16, 32, 64), "blocks": (1, 1, 1, 1), "depth": 1}
    network = vispe.build("efficient_loftr", **knobs).train()
    for norm in (m for m in network.modules() if isinstance(m, torch.nn.BatchNorm2d)):
        norm.momentum = 1.0
    with torch.no_grad():
        network(image[None], image[None])
        network._fine(network._side(image.mean(0)[None, None]))
    f0, f1 = DetectorFree("efficient_loftr", weights=network.state_dict(), **knobs)(image, image)
    assert len(f0) == len(f1) > 50
    assert f0.size == (120, 160)
    assert bool((f0.scores[:-1] >= f0.scores[1:]).all())
    assert (f0.keypoints - f1.keypoints).norm(dim=1).median() < 1
    assert bool(((f0.keypoints * 2) % 2 == 1).all())


WRONG = [
    ({"extractor": "sift"}, "loftr matches whole images: it takes no extractor"),
    ({"extractor_weights": "x.pth"}, "no weights of one"),
    ({"adaptive": True}, "loftr has no adaptivity"),
    ({"max_keypoints": 0}, "max_keypoints must be at least 1, got 0"),
    ({"detection_threshold": 0.5}, "LoFTRSpec has no 'detection_threshold'"),
    ({"device": "nowhere"}, "device 'nowhere' cannot be used here"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_a_wrong_pipeline_says_so(wrong, message):
    with pytest.raises(ValueError, match=message):
        Matcher(matcher="loftr", **wrong)


def test_what_needs_keypoints_refuses(state):
    with pytest.raises(
        ValueError,
        match="a detector-free matcher is one of loftr, loftr_indoor, loftr_coarse, efficient_loftr, got 'roma'",
    ):
        DetectorFree("roma")
    with pytest.raises(ValueError, match="loftr_coarse matches images, not features"):
        Matcher(matcher="loftr_coarse", weights=state).match_features(None, None)
