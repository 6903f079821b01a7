"""Scores from caches written by hand: every number worked out on paper, every convention by its own algebra."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vispe.cache import CacheWriter
from vispe.data.pairs import Pair, PairSet
from vispe.evaluate.protocol import Protocol
from vispe.evaluate.score import Cache, framed, grouped, pair_row, right, score
from vispe.files import write_json
from vispe.geometry.homography import homography_residual

SIZE = (100, 200)
SHIFT = np.array([[1.0, 0, 4], [0, 1, -2], [0, 0, 1]])
POINTS = np.array([[20, 30], [60, 35], [100, 40], [150, 30], [30, 80], [70, 85], [110, 90], [160, 80]], float)
OWN = {"resize": 0, "thresholds": {"poselib": 2.0, "opencv": 1.0}}
K = np.array([[150.0, 0, 99], [0, 160, 52], [0, 0, 1]])


def homographies(n=1, **more):
    pairs = tuple(Pair(image0=f"{i}a", image1=f"{i}b", group="xy"[i % 2], homography=SHIFT, **more) for i in range(n))
    return PairSet(name="images", root="/nowhere", pairs=pairs)


def moved(offsets=None):
    """The points where SHIFT takes them, some pushed aside."""
    there = POINTS + np.array([4, -2])
    for i, by in (offsets or {}).items():
        there[i] += by
    return there


def content(there, matches=None, scores=None):
    matches = [(i, i) for i in range(len(POINTS))] if matches is None else matches
    return (POINTS, SIZE, there, SIZE, matches, np.linspace(0.9, 0.5, len(matches)) if scores is None else scores)


def row_of(run, protocol):
    with Cache(run) as cache:
        return pair_row(cache, cache.names[0], cache.effective(protocol))


# --- homographies -----------------------------------------------------------------------------------------------------


def test_a_pair_worked_out_by_hand(handmade):
    """Of 8 matches one is off by 2 px and one by 5 px, the rest are exact.

    Symmetric error of a pure shift: as far back as forth. Accuracy counts errors up to and including the threshold.
    Ground truth: the keypoint that is 5 px off has no partner within 3 px (-1), so 7 true matches; all 7 are found,
    and the eighth match, of an unmatchable point, is wrong: precision 7/8, recall 1.
    """
    run = handmade(homographies(), [content(moved({1: (2, 0), 5: (0, 5)}))])
    row = row_of(run, Protocol(**OWN))
    assert (row["image0"], row["image1"], row["group"]) == ("0a", "0b", "x")
    assert (row["keypoints0"], row["keypoints1"], row["matches"]) == (8, 8, 8)
    assert (row["precision@1"], row["precision@3"]) == (6 / 8, 7 / 8)
    assert [row[f"accuracy@{px}"] for px in range(1, 11)] == [6 / 8] + [7 / 8] * 3 + [1.0] * 6
    assert (row["gt_precision@3"], row["gt_recall@3"]) == (7 / 8, 1.0)
    for estimator in ("poselib 2.0", "opencv 1.0"):
        assert row[f"corner_error {estimator}"] < 2
        assert row[f"inliers {estimator}"] in (6, 7)
    assert row["corner_error opencv 1.0"] < 1e-3
    assert row["inliers dlt"] == 8


def test_a_threshold_is_not_below_itself(handmade):
    """An error of exactly 3 px: precision counts errors below, accuracy errors up to the threshold."""
    row = row_of(handmade(homographies(), [content(moved({0: (3, 0)}))]), Protocol(**OWN))
    assert row["precision@3"] == 7 / 8
    assert (row["accuracy@2"], row["accuracy@3"]) == (7 / 8, 1.0)


def test_no_matches_are_failures_and_not_gaps(handmade):
    """No match: every share is 0, every error inf, nothing is nan; the same for an image without a keypoint."""
    for kind in (content(moved(), [], []), (np.zeros((0, 2)), SIZE, moved(), SIZE, [], [])):
        row = row_of(handmade(homographies(), [kind], name=f"run{len(kind[0])}"), Protocol(**OWN))
        numbers = {name: value for name, value in row.items() if not isinstance(value, str)}
        assert all(math.isinf(value) == name.startswith("corner_error") for name, value in numbers.items())
        assert not any(math.isnan(value) for value in numbers.values())
        assert all(value == 0 for name, value in numbers.items() if "@" in name)


def test_only_the_best_matches_count_if_so_asked(handmade):
    scores = [0.1, 0.9, 0.8, 0.7, 0.2, 0.6, 0.5, 0.9]
    run = handmade(homographies(), [content(moved({0: (50, 0), 4: (50, 0)}), scores=scores)])
    assert row_of(run, Protocol(**OWN))["precision@1"] == 6 / 8
    best = row_of(run, Protocol(max_matches=6, **OWN))
    assert (best["matches"], best["precision@1"]) == (6, 1.0)
    with Cache(run) as cache:
        kept = framed(cache, cache.names[0], cache.effective(Protocol(max_matches=3, **OWN)))
    assert kept.matches[:, 0].tolist() == [1, 7, 2], "of equal scores the first stays"


@pytest.mark.parametrize("pixels", ["exact", "neglected", "glue-factory"])
def test_each_pixel_convention_has_its_own_error(handmade, pixels):
    """Image 0 is halved (s0 = 1/2), image 1 kept (s1 = 1); a perfect match of a pure shift by t.

    exact: no error. neglected: H' p = (s1 / s0) p + s1 t with p = (x + 1/2) s0 - 1/2, so that the error is
    1/2 - s1 / (2 s0) = -1/2 px in x and y: 0.7071 px. glue-factory: p = (x + 1/2) s0 and H' p = (x + 1/2) s1 + s1 t,
    which is where (x + t + 1/2) s1 lies: no error, since the truth is a shift, of which a half pixel is no matter.
    """
    wide, high = (100, 400), (200, 200)
    pairs = PairSet(name="images", root="/", pairs=(Pair(image0="a", image1="b", homography=SHIFT),))
    run = handmade(pairs, [(POINTS, high, moved(), wide, [(i, i) for i in range(8)], [1.0] * 8)], resize=100)
    protocol = Protocol(resize=100, pixels=pixels, thresholds={"poselib": 1.0, "opencv": 1.0})
    with Cache(run) as cache:
        pair = framed(cache, cache.names[0], protocol)
    assert (pair.size0, pair.size1) == ((100, 100), (100, 400))
    error = homography_residual(pair.homography, pair.points0, pair.points1)
    assert error == pytest.approx(0.5 * math.sqrt(2) if pixels == "neglected" else 0.0, abs=1e-12)
    shift = 0.0 if pixels == "glue-factory" else 0.5
    assert pair.points0 == pytest.approx((POINTS + 0.5) / 2 - shift)


@given(st.floats(0.3, 3), st.floats(0.3, 3), st.floats(-0.4, 0.4))
def test_exact_is_exact_at_any_scale(tmp_path_factory, scale0, scale1, tilt):
    """A perfect match stays perfect in the frame, whatever the homography and both resizes."""
    from vispe.evaluate.records import Record
    from vispe.evaluate.score import Framed
    from vispe.geometry.homography import warp_points

    truth = np.array([[1.1, tilt, 4], [-tilt, 0.9, -2], [tilt / 500, 0, 1]])
    sizes = [(round(100 * s), round(200 * s)) for s in (scale0, scale1)]
    there = warp_points(truth, POINTS)
    points = [(p + 0.5) * (new[1] / 200, new[0] / 100) - 0.5 for p, new in zip((POINTS, there), sizes, strict=True)]
    record = Record(
        key0="a", key1="b", group="", matches=np.zeros((0, 2)), scores=np.zeros(0), seconds=0,
        truth={"homography": truth},
    )  # fmt: skip
    pair = Framed(
        record=record, protocol=Protocol(**OWN), keypoints0=points[0], keypoints1=points[1],
        matches=np.stack([np.arange(8)] * 2, 1), scores=np.ones(8), size0=sizes[0], size1=sizes[1], original0=SIZE,
        original1=SIZE,
    )  # fmt: skip
    assert homography_residual(pair.homography, pair.points0, pair.points1).max() < 1e-9
    assert right(pair).all()


def test_corners_at_the_edges_or_at_the_centres(handmade):
    """The truth is a zoom by 1 + 1/1000 seen against an exact identity: an error of |corner| / 1000 at each corner.

    edges: corners (0, 0), (200, 0), (200, 100), (0, 100): (0 + 200 + 223.607 + 100) / 4 / 1000; centres: of 199 x 99.
    """
    zoom = np.diag([1.001, 1.001, 1])
    pairs = PairSet(name="images", root="/", pairs=(Pair(image0="a", image1="b", homography=zoom),))
    run = handmade(pairs, [(POINTS, SIZE, POINTS, SIZE, [(i, i) for i in range(8)], [1.0] * 8)])
    for corners, (w, h) in (("edges", (200, 100)), ("centres", (199, 99))):
        row = row_of(run, Protocol(corners=corners, **OWN))
        assert row["corner_error poselib 2.0"] == pytest.approx((w + math.hypot(w, h) + h) / 4000, abs=1e-6)


# --- poses ------------------------------------------------------------------------------------------------------------


def scene(n=60, seed=0):
    """Points in front of two cameras, and their pictures by K, first pixel's centre at 0."""
    random = np.random.default_rng(seed)
    world = random.uniform((-2, -1, 4), (2, 1, 8), (n, 3))
    angle = np.radians(10)
    rotation = np.array([[math.cos(angle), 0, math.sin(angle)], [0, 1, 0], [-math.sin(angle), 0, math.cos(angle)]])
    pose = np.eye(4)
    pose[:3, :3], pose[:3, 3] = rotation, (-1.0, 0.1, 0.2)
    there = world @ rotation.T + pose[:3, 3]
    views = [(p / p[:, 2:]) @ K.T for p in (world, there)]
    return pose, views[0][:, :2], views[1][:, :2]


def posed(k0=K, k1=K, pose=None, **more):
    pose = scene()[0] if pose is None else pose
    return PairSet(
        name="pairs", root="/", pairs=(Pair(image0="a", image1="b", group="s", K0=k0, K1=k1, pose=pose),), **more
    )


POSED = {"task": "pose", "resize": 0, "estimators": ("poselib", "opencv"), "auc": (5, 10, 20)}
POSED["thresholds"] = {"poselib": 1.0, "opencv": 0.5}


@pytest.mark.parametrize("pixel", [0.0, 0.5])
@pytest.mark.parametrize("resize", [0, 50, 300])
@pytest.mark.parametrize("of", [None, (50, 100)])
def test_exact_poses_whatever_the_size_and_the_convention(handmade, pixel, resize, of):
    """K may be COLMAP's (pixel 0.5) and of a resized image: the rays stay those of the scene."""
    _pose, points0, points1 = scene()
    given = K.copy()
    given[:2, 2] += 0.5
    if of is not None:
        given[:2] *= np.array([[of[1] / 200], [of[0] / 100]])
    given[:2, 2] -= 0.5 - pixel
    pairs = posed(given, given, pixel=pixel, **({} if of is None else {"K_size": of}))
    index = [(i, i) for i in range(60)]
    run = handmade(pairs, [(points0, SIZE, points1, SIZE, index, [1.0] * 60)], resize=resize)
    protocol = Protocol(**{**POSED, "resize": resize})
    with Cache(run) as cache:
        pair = framed(cache, cache.names[0], cache.effective(protocol))
        row = pair_row(cache, cache.names[0], cache.effective(protocol))
    for points, camera, original in zip((pair.points0, pair.points1), pair.cameras, (points0, points1), strict=True):
        rays = (points - camera[[0, 1], 2]) / camera[[0, 1], [0, 1]]
        assert rays == pytest.approx((original - K[[0, 1], 2]) / K[[0, 1], [0, 1]], abs=1e-6)
    assert right(pair).all()
    assert row["epipolar_precision@0.0001"] == 1.0
    assert max(row["pose_error poselib 1.0"], row["pose_error opencv 0.5"]) < 0.05
    assert row["inliers poselib 1.0"] == 60


def test_the_two_epipolar_errors_are_two(handmade):
    """A point 2e-3 off its line in one image: mean distance about 1e-3 to 2e-3, sum of squares below 1e-5."""
    _, points0, points1 = scene()
    off = points1.copy()
    off[:, 1] += 2e-3 * 160
    run = handmade(posed(), [(points0, SIZE, off, SIZE, [(i, i) for i in range(60)], [1.0] * 60)])
    mean = row_of(run, Protocol(**POSED, epipolar="mean", epipolar_thresholds=(5e-4, 5e-3)))
    squares = row_of(run, Protocol(**POSED, epipolar="squared_sum", epipolar_thresholds=(1e-7, 1e-4)))
    assert (mean["epipolar_precision@0.0005"], mean["epipolar_precision@0.005"]) == (0.0, 1.0)
    assert (squares["epipolar_precision@1e-07"], squares["epipolar_precision@0.0001"]) == (0.0, 1.0)


def test_no_pose_is_an_infinite_error(handmade):
    _, points0, points1 = scene()
    run = handmade(posed(), [(points0, SIZE, points1, SIZE, [(i, i) for i in range(4)], [1.0] * 4)])
    row = row_of(run, Protocol(**POSED))
    for what in ("pose_error", "rotation_error", "translation_error"):
        assert row[f"{what} poselib 1.0"] == row[f"{what} opencv 0.5"] == math.inf
    assert row["inliers opencv 0.5"] == 0


def test_the_sign_of_the_translation_is_not_judged(handmade):
    """A truth that looks the other way: t and -t are the same axis to this benchmark, as to its sources."""
    pose, points0, points1 = scene()
    other = pose.copy()
    other[:3, 3] *= -1
    for name, truth in (("one", pose), ("two", other)):
        run = handmade(
            posed(pose=truth), [(points0, SIZE, points1, SIZE, [(i, i) for i in range(60)], [1.0] * 60)], name
        )
        assert row_of(run, Protocol(**POSED))["translation_error poselib 1.0"] < 0.1


# --- all pairs --------------------------------------------------------------------------------------------------------


def columns(errors, groups, estimator="opencv 0.5"):
    n = len(errors)
    made = {"image0": ["a"] * n, "image1": ["b"] * n, "group": list(groups), "matches": list(range(n))}
    return {**made, "precision@1": [0.5] * n, f"corner_error {estimator}": errors, f"inliers {estimator}": [3] * n}


def test_aucs_of_groups_by_hand():
    """reference: SuperGlue's pose_auc of [0.5] is 0.75, 0.9167 and 0.95 at 1, 3, 5; of [inf] it is 0.

    [0.5, inf] together: the curve rises from (0, 0) to (0.5, 1/2) and stays: half of each.
    """
    only = Protocol(estimators=("opencv",), thresholds={"opencv": 0.5})
    groups = grouped(columns([0.5, math.inf], "vi"), only)
    assert list(groups) == ["all", "i", "v"]
    assert groups["v"]["auc"][0]["auc"] == pytest.approx([0.75, 0.916667, 0.95], abs=1e-6)
    assert groups["i"]["auc"][0]["auc"] == [0, 0, 0]
    assert groups["all"]["auc"][0]["auc"] == pytest.approx([0.375, 0.458333, 0.475], abs=1e-6)
    first = groups["all"]["auc"][0]
    assert (first["failures"], first["choice"], first["threshold"], first["inliers_mean"]) == (1, "fixed", 0.5, 3.0)
    assert all(low <= auc <= high for low, auc, high in zip(first["low"], first["auc"], first["high"], strict=True))
    assert groups["all"]["mean"] == {"matches": 0.5, "precision@1": 0.5}
    assert groups["all"]["median"] == {"matches": 0.5, "precision@1": 0.5}


def test_one_group_is_not_told_twice():
    only = Protocol(estimators=("opencv",), thresholds={"opencv": 0.5})
    assert list(grouped(columns([1.0, 2.0], "vv"), only)) == ["all"]


def test_a_swept_threshold_is_the_best_for_all_and_said_to_be():
    swept = Protocol(estimators=("opencv",), thresholds={"opencv": (0.5, 1, 2)})
    made = columns([4.0, 4.0], "vi") | {"corner_error opencv 1.0": [1.0, 2.0], "corner_error opencv 2.0": [1.0, 2.0]}
    made |= {f"inliers opencv {t}": [9, 9] for t in (1.0, 2.0)}
    first = grouped(made, swept)["v"]["auc"][0]
    assert (first["threshold"], first["choice"]) == (1, "best of 3 on these pairs"), "of equals the smallest"


def test_the_files_of_a_score(handmade):
    pairs = homographies(4)
    run = handmade(pairs, [content(moved({1: (i, 0)})) for i in range(4)])
    made = score(run, Protocol(**OWN))
    assert made == json.loads((run / "scores.json").read_text())
    assert made["benchmark"] == "images"
    assert made["task"] == "homography"
    assert made["pairs"] == made["groups"]["all"]["pairs"] == 4
    assert len(made["pairs_csv"]) == 64
    assert made["made"] == {"extractor": "by hand", "matcher": "hand", "max_keypoints": 9, "resize": 0, "side": "short"}
    assert made["protocol"]["max_keypoints"] == 9, "what was done, not what was asked"
    timing = json.loads((run / "timing.json").read_text())
    assert timing["extract"] == {"images": 8, "seconds_mean": 0.25}
    assert timing["match"] == {"pairs": 4, "seconds_mean": 0.5}
    header, *lines = (run / "pairs.csv").read_text().splitlines()
    assert header.startswith("image0,image1,group,keypoints0,keypoints1,matches,precision@1,")
    assert [line.split(",")[:2] for line in lines] == [[f"{i}a", f"{i}b"] for i in range(4)]


def test_scores_repeat_to_the_byte_alone_and_together(handmade):
    run = handmade(homographies(6), [content(moved({1: (i, 0), 2: (0, -i)})) for i in range(6)])
    seen = []
    for workers in (1, 1, 2):
        score(run, Protocol(**OWN), workers=workers)
        seen.append([(run / name).read_bytes() for name in ("scores.json", "pairs.csv")])
    assert seen[0] == seen[1] == seen[2]


def test_a_stopped_score_is_no_score_rather_than_a_mixed_one(handmade, monkeypatch):
    """Whatever the moment: nothing of an earlier score stays beside the new rows."""
    from vispe.evaluate import score as module
    from vispe.evaluate.runs import read_run

    run = handmade(homographies(), [content(moved())])
    score(run, Protocol(**OWN))
    for name in ("report.html", "tune.json", "curves.png"):
        (run / name).write_text("of the earlier score")

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_json", stop)
        with pytest.raises(KeyboardInterrupt):
            score(run, Protocol(max_matches=3, **OWN))
    assert sorted(path.name for path in run.iterdir()) == ["features.h5", "matches.h5", "pairs.csv", "run.json"]
    with pytest.raises(ValueError, match=r"scores\.json"):
        read_run(run)


def test_rows_of_another_score_are_refused(handmade):
    from vispe.evaluate.runs import read_run

    run = handmade(homographies(), [content(moved())])
    score(run, Protocol(**OWN))
    read_run(run)
    text = (run / "pairs.csv").read_text()
    (run / "pairs.csv").write_text(text.replace(",8,8,8,", ",8,8,7,"))
    with pytest.raises(ValueError, match=r"pairs\.csv' is not the one that scores\.json was made of"):
        read_run(run)


def test_versions_of_what_estimates_are_told(handmade):
    made = score(handmade(homographies(), [content(moved())]), Protocol(**OWN))
    assert {"numpy", "poselib"} <= set(made["libraries"])


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_nothing_predicted_is_said(tmp_path, handmade):
    with pytest.raises(ValueError, match=r"there is no matches.h5 in .*nothing was predicted there, or not to its end"):
        score(tmp_path, Protocol(**OWN))
    run = handmade(homographies(), [content(moved())])
    (run / "run.json").unlink()
    with pytest.raises(ValueError, match=r"there is no usable run\.json"):
        score(run, Protocol(**OWN))


def test_features_of_another_making_are_refused(handmade):
    run = handmade(homographies(), [content(moved())])
    (run / "features.h5").unlink()
    with CacheWriter(run / "features.h5", {"extractor": "another"}):
        pass
    with pytest.raises(ValueError, match="were made from other features than lie there"):
        score(run, Protocol(**OWN))


def test_features_of_another_image_are_refused(handmade):
    run = handmade(homographies(), [content(moved())])
    how = {"extractor": "by hand", "max_keypoints": 9, "resize": 0, "side": "short"}
    with CacheWriter(run / "features.h5", how) as writer:
        arrays = {"keypoints": POINTS.astype(np.float32)}
        writer.add("0b", arrays, {"size": SIZE, "pixel": 1.0, "seconds": 0.0}, "hash of a new picture")
    with pytest.raises(ValueError, match=r"0a and 0b: features and matches in .* are not of the same images"):
        score(run, Protocol(**OWN))


def test_another_frame_than_was_looked_at_is_refused_unless_it_is_named(handmade):
    run = handmade(homographies(), [content(moved())], resize=480)
    with pytest.raises(ValueError, match="was made with resize 480 and the protocol asks for 0"):
        score(run, Protocol(**OWN))
    named = score(run, Protocol(frame=50, **OWN))
    assert named["protocol"]["resize"] == 480


def test_a_protocol_for_other_pairs_is_refused(handmade):
    run = handmade(homographies(), [content(moved())])
    with pytest.raises(ValueError, match="holds homography pairs, and the protocol is one for a pose"):
        score(run, Protocol(**POSED))


@pytest.mark.parametrize("index", [(0, 8), (-1, 0), (70000, 0)])
def test_an_index_beyond_the_keypoints_is_refused(handmade, index):
    run = handmade(homographies(), [content(moved(), [index], [1.0])])
    with pytest.raises(ValueError, match="0a and 0b: a match has an index beyond the keypoints"):
        score(run, Protocol(**OWN))


def test_no_pairs_are_no_score(tmp_path):
    for name in ("features.h5", "matches.h5"):
        with CacheWriter(tmp_path / name, {}):
            pass
    write_json(tmp_path / "run.json", {"benchmark": "x", "note": ""})
    with pytest.raises(ValueError, match="there are no pairs"):
        score(tmp_path, Protocol(**OWN))


def test_no_network_is_imported():
    """Neither torch nor anything that is made of it: a score runs where pass 1 could not."""
    code = """
import sys
import vispe.evaluate.score, vispe.evaluate.tune, vispe.evaluate.compare, vispe.evaluate.runs
heavy = [name for name in ("torch", "vispe.models", "vispe.matching", "vispe.features", "cv2") if name in sys.modules]
sys.exit(", ".join(heavy) or 0)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0
