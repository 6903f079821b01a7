"""Pass 2: what pass 1 wrote, to scores. It reads ``features.h5`` and ``matches.h5`` and knows no network.

Writes ``pairs.csv``, a row for each pair, and ``scores.json``, what they come to with the protocol that made it; both
depend on the cached files and the protocol alone, to the byte. ``timing.json`` stands apart, as seconds never repeat.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import vispe
from vispe.cache import CacheReader, Entry
from vispe.evaluate.protocol import Protocol, column
from vispe.evaluate.records import Record
from vispe.evaluate.runs import ERRORS, write_rows
from vispe.files import write_json
from vispe.geometry.benchmark import HOMOGRAPHY, POSE
from vispe.geometry.epipolar import (
    epipolar_distance_mean,
    epipolar_distance_squared_sum,
    essential_from_pose,
    fundamental_from_essential,
)
from vispe.geometry.homography import (
    Array,
    corner_error,
    homography_residual,
    rescale_homography,
    rescale_homography_centres,
    symmetric_transfer_error,
)
from vispe.geometry.pose import rotation_error, translation_error
from vispe.metrics.auc import error_auc
from vispe.metrics.bootstrap import auc_interval
from vispe.metrics.matching import accuracy, homography_ground_truth, match_precision, match_recall, precision
from vispe.progress import track

ACCURACY = tuple(range(1, 11))  # pixels of mean matching accuracy
PRECISION = (1, 3)  # pixels
POSITIVE = 3.0  # pixels within which two keypoints are the same point
EPIPOLAR = {"mean": epipolar_distance_mean, "squared_sum": epipolar_distance_squared_sum}
DERIVED = ("scores.json", "pairs.csv", "timing.json", "tune.json", "report.html", "curves.png")
RECENT = 32  # images whose keypoints are kept at hand
Row = dict[str, Any]


def score(run: Path, protocol: Protocol, *, workers: int = 1) -> dict[str, Any]:
    """Score the cached matches in the folder ``run``; what ``scores.json`` then holds.

    ``workers``: processes that estimate. What an earlier score has left goes first and ``scores.json`` comes last, with
    the sha256 of its ``pairs.csv``. ``ValueError`` when the cache is not there, not whole, or not of one making.
    """
    start = time.perf_counter()
    if workers < 1:
        raise ValueError(f"workers are at least 1, got {workers}")
    with Cache(run) as cache:
        protocol, made, seconds = cache.effective(protocol), cache.made(), cache.seconds()
    columns = rows_of(run, protocol, workers=workers)
    pairs = len(columns["image0"])
    scores = {
        **about(run),
        "version": vispe.__version__,
        "libraries": libraries(),
        "task": protocol.task,
        "pairs": pairs,
        "protocol": protocol.plain(),
        "made": made,
        "groups": grouped(columns, protocol),
    }
    for made_of in DERIVED:  # of an earlier score: a run that is stopped here is one without a score, never a mixed one
        (run / made_of).unlink(missing_ok=True)
    write_rows(run / "pairs.csv", columns)
    scores["pairs_csv"] = hashlib.sha256((run / "pairs.csv").read_bytes()).hexdigest()
    write_json(run / "scores.json", scores)
    write_json(run / "timing.json", {**seconds, "score": {"seconds": time.perf_counter() - start, "pairs": pairs}})
    return scores


def libraries() -> dict[str, str]:
    """The versions of what estimates and adds up."""
    found = {}
    for name in ("numpy", "poselib", "opencv-python-headless", "opencv-python"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def rows_of(run: Path, protocol: Protocol, *, workers: int = 1, what: str = "scoring") -> dict[str, list[Any]]:
    """The columns of ``pairs.csv`` by name, from the cache in the folder ``run``."""
    with Cache(run) as cache:
        protocol, names = cache.effective(protocol), cache.names
    rows = list(track(_rows(run, names, protocol, workers), what, "pairs", total=len(names)))
    return {name: [row[name] for row in rows] for name in rows[0]}


def about(run: Path) -> dict[str, Any]:
    """What ``run.json`` says of the pairs: the benchmark, and how much of it this is."""
    try:
        told = json.loads((run / "run.json").read_text(encoding="utf-8"))
        return {"benchmark": str(told["benchmark"]), "note": str(told["note"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"there is no usable run.json in {str(run)!r}: predict again") from error


def protocol_of(run: Path) -> Protocol:
    """The protocol that a run was made with; ``ValueError`` when it says none."""
    path = run / "run.json"
    if not path.is_file():
        raise ValueError(f"there is no run of a benchmark in {str(run)!r}")
    try:
        told = json.loads(path.read_text(encoding="utf-8"))["protocol"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{str(path)!r} is damaged: predict again") from error
    return Protocol.of(**told)


class Cache:
    """The two files of a run, opened together and held against each other; use it in a ``with``."""

    def __init__(self, run: Path) -> None:
        for name in ("matches.h5", "features.h5"):
            if not (run / name).is_file():
                raise ValueError(f"there is no {name} in {str(run)!r}: nothing was predicted there, or not to its end")
        self.run = run
        self.matches, self.features = CacheReader(run / "matches.h5"), CacheReader(run / "features.h5")
        self.names = self.matches.names()
        self.keypoints = functools.lru_cache(RECENT)(self._keypoints)
        if not self.names:
            raise ValueError(f"there are no pairs in {str(run / 'matches.h5')!r}")
        for file, key in ((self.matches, "matcher"), (self.features, "extractor")):
            if key not in file.made:
                raise ValueError(f"{file.path!r} is damaged, or another kind of file: it does not name its {key}")
        if self.matches.made.get("features") != self.features.made:
            raise ValueError(f"the matches in {str(run)!r} were made from other features than lie there; predict again")

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self.matches.close()
        self.features.close()

    def effective(self, protocol: Protocol) -> Protocol:
        """The protocol with what pass 1 really did; ``ValueError`` when it is not one for these pairs."""
        truth, made = self.record(self.names[0]).truth, self.features.made
        task = "homography" if "homography" in truth else "pose" if "pose" in truth else "unknown"
        if protocol.task != task:
            raise ValueError(f"{str(self.run)!r} holds {task} pairs, and the protocol is one for a {protocol.task}")
        for name in ("resize", "side"):
            if protocol.frame is None and made.get(name) != protocol.plain()[name]:
                raise ValueError(
                    f"{str(self.run)!r} was made with {name} {made.get(name)!r} and the protocol asks for "
                    f"{protocol.plain()[name]!r}, so that errors would be measured in another frame; predict again"
                )
        did = {name: made.get(name) for name in ("resize", "side", "max_keypoints")}
        return protocol.but(**did)

    def made(self) -> dict[str, Any]:
        """Who found and who matched, and how."""
        features = {f"extractor_{k}" if k == "weights" else k: v for k, v in self.features.made.items()}
        return {**features, **{k: v for k, v in self.matches.made.items() if k != "features"}}

    def record(self, name: str) -> Record:
        """A pair; ``ValueError`` when its matches were made from other images than the features lie there of."""
        found = Record.of(name, self.matches.read(name))
        contents = (self.features.sha256(key) for key in (found.key0, found.key1))
        if found.made_from(*contents) != self.matches.sha256(name):
            raise ValueError(
                f"{' and '.join(found.names)}: features and matches in {str(self.run)!r} are not of the same images; "
                "predict again"
            )
        return found

    def keypoints_of(self, pair: Record) -> tuple[Array, Array]:
        """Those of both images, or the pair's own: ``[m, 2]`` and ``[n, 2]`` pixels of the images."""
        return pair.points or (self.keypoints(pair.key0)[0], self.keypoints(pair.key1)[0])

    def _keypoints(self, key: str) -> tuple[Array, tuple[int, int]]:
        entry: Entry = self.features.read(key, ["keypoints"])
        h, w = (int(side) for side in entry.attributes["size"])
        return entry.arrays["keypoints"].astype(np.float64), (h, w)

    def seconds(self) -> dict[str, Any]:
        """Mean seconds of pass 1 for an image and for a pair."""
        keys = self.features.names()
        of_images = [float(self.features.read(key, []).attributes["seconds"]) for key in keys]
        of_pairs = [self.record(name).seconds for name in self.names]
        return {
            "extract": {"images": len(keys), "seconds_mean": float(np.mean(of_images))},
            "match": {"pairs": len(of_pairs), "seconds_mean": float(np.mean(of_pairs))},
        }


def _rows(run: Path, names: Sequence[str], protocol: Protocol, workers: int) -> Iterator[Row]:
    if workers <= 1:
        with Cache(run) as cache:
            for name in names:
                yield pair_row(cache, name, protocol)
        return
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        yield from pool.imap(functools.partial(_row, run, protocol), names, chunksize=4)


_opened = functools.lru_cache(1)(lambda run: Cache(run))  # by a worker process, until it ends


def _row(run: Path, protocol: Protocol, name: str) -> Row:
    return pair_row(_opened(run), name, protocol)


# --- one pair ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, kw_only=True)
class Framed:
    """A pair in the frame that its errors are measured in: all keypoints, the matched points, the images' sizes."""

    record: Record
    protocol: Protocol
    keypoints0: Array
    keypoints1: Array
    matches: Array
    scores: Array
    size0: tuple[int, int]
    size1: tuple[int, int]
    original0: tuple[int, int]
    original1: tuple[int, int]

    @property
    def points0(self) -> Array:
        return self.keypoints0[self.matches[:, 0]]

    @property
    def points1(self) -> Array:
        return self.keypoints1[self.matches[:, 1]]

    @property
    def homography(self) -> Array:
        """The true ``H_0to1`` between the frames."""
        exact = self.protocol.pixels == "exact"
        scales = _scale(self.original0, self.size0), _scale(self.original1, self.size1)
        return (rescale_homography_centres if exact else rescale_homography)(self.record.truth["homography"], *scales)

    @property
    def cameras(self) -> tuple[Array, Array]:
        """``K [3, 3]`` of both frames."""
        given = tuple(self.record.truth["K_size"]) if "K_size" in self.record.truth else None
        sizes = (given or self.original0, self.size0), (given or self.original1, self.size1)
        return tuple(  # type: ignore[return-value]
            self._camera(self.record.truth[name], _scale(*size)) for name, size in zip(("K0", "K1"), sizes, strict=True)
        )

    def _camera(self, K: Array, scale: tuple[float, float]) -> Array:  # noqa: N803
        scaled = np.array(K, np.float64)
        shift = 0.5 - self.record.truth["pixel"] if self.protocol.pixels == "exact" else 0.0
        scaled[:2, 2] += shift  # the first pixel's corner at 0: there a resize is a scale and nothing else
        scaled[:2] *= np.array(scale)[:, None]
        scaled[:2, 2] -= 0.5 if self.protocol.pixels == "exact" else 0.0
        return scaled


def _scale(size: tuple[int, int], new: tuple[int, int]) -> tuple[float, float]:
    """(sx, sy) of a resize from ``size`` to ``new``, both (h, w)."""
    return new[1] / size[1], new[0] / size[0]


def framed(cache: Cache, name: str, protocol: Protocol) -> Framed:
    """The pair ``name`` of the cache in the protocol's frame; ``ValueError`` when an index is out of range."""
    record = cache.record(name)
    size0, size1 = (cache.keypoints(key)[1] for key in (record.key0, record.key1))
    k0, k1 = cache.keypoints_of(record)
    matches = record.matches.reshape(-1, 2)
    if len(matches) and not ((matches >= 0) & (matches < (len(k0), len(k1)))).all():
        raise ValueError(f"{' and '.join(record.names)}: a match has an index beyond the keypoints")
    best = np.argsort(-record.scores, kind="stable")[: protocol.max_matches or None]
    new0, new1 = protocol.frame_size(size0), protocol.frame_size(size1)
    half = 0.0 if protocol.pixels == "glue-factory" else 0.5
    moved = [(k + 0.5) * _scale(size, new) - half for k, size, new in ((k0, size0, new0), (k1, size1, new1))]
    return Framed(
        record=record, protocol=protocol, keypoints0=moved[0], keypoints1=moved[1], matches=matches[best],
        scores=record.scores[best], size0=new0, size1=new1, original0=size0, original1=size1,
    )  # fmt: skip


def pair_row(cache: Cache, name: str, protocol: Protocol) -> Row:
    """The row of ``pairs.csv`` for a pair."""
    pair = framed(cache, name, protocol)
    image0, image1 = pair.record.names
    row: Row = {"image0": image0, "image1": image1, "group": pair.record.group}
    row |= {"keypoints0": len(pair.keypoints0), "keypoints1": len(pair.keypoints1), "matches": len(pair.matches)}
    return row | (_homography_row(pair) if protocol.task == "homography" else _pose_row(pair))


def _homography_row(pair: Framed) -> Row:
    truth, points = pair.homography, (pair.points0, pair.points1)
    symmetric = precision(symmetric_transfer_error(truth, *points), PRECISION)
    forward = accuracy(homography_residual(truth, *points), ACCURACY)
    row: Row = {f"precision@{px}": float(value) for px, value in zip(PRECISION, symmetric, strict=True)}
    row |= {f"accuracy@{px}": float(value) for px, value in zip(ACCURACY, forward, strict=True)}
    partners = homography_ground_truth(pair.keypoints0, pair.keypoints1, truth, positive=POSITIVE)
    row["gt_precision@3"] = match_precision(pair.matches, partners)
    row["gt_recall@3"] = match_recall(pair.matches, partners)
    h, w = pair.size0
    corners = (h, w) if pair.protocol.corners == "edges" else (h - 1, w - 1)
    for estimator, threshold in pair.protocol.swept():
        found = HOMOGRAPHY[estimator](*points, threshold, pair.scores)
        row[column("corner_error", estimator, threshold)] = corner_error(found.matrix, truth, corners)
        row[column("inliers", estimator, threshold)] = int(found.inliers.sum())
    return row


def _pose_row(pair: Framed) -> Row:
    K0, K1 = pair.cameras  # noqa: N806
    points, pose = (pair.points0, pair.points1), pair.record.truth["pose"]
    rotation, translation = pose[:3, :3], pose[:3, 3]
    plane = [(p - K[[0, 1], 2]) / K[[0, 1], [0, 1]] for p, K in zip(points, (K0, K1), strict=True)]
    errors = EPIPOLAR[pair.protocol.epipolar](essential_from_pose(rotation, translation), *plane)
    limits = pair.protocol.epipolar_thresholds
    row: Row = {f"epipolar_precision@{at}": float(v) for at, v in zip(limits, precision(errors, limits), strict=True)}
    for estimator, threshold in pair.protocol.swept():
        found = POSE[estimator](*points, K0, K1, threshold or 0.0)
        ok = found.rotation is not None and found.translation is not None
        turned = rotation_error(found.rotation, rotation) if ok else math.inf  # type: ignore[arg-type]
        moved = translation_error(found.translation, translation) if ok else math.inf  # type: ignore[arg-type]
        for what, value in zip(
            ("pose_error", "rotation_error", "translation_error"), (max(turned, moved), turned, moved), strict=True
        ):
            row[column(what, estimator, threshold)] = value
        row[column("inliers", estimator, threshold)] = int(found.inliers.sum())
    return row


def right(pair: Framed) -> NDArray[np.bool_]:
    """Which of the matches the truth bears out, within ``POSITIVE`` pixels of the frame: one way for a homography, the
    mean distance to the epipolar lines for a pose."""
    points = pair.points0, pair.points1
    if pair.protocol.task == "homography":
        return homography_residual(pair.homography, *points) < POSITIVE
    pose = pair.record.truth["pose"]
    lines = fundamental_from_essential(essential_from_pose(pose[:3, :3], pose[:3, 3]), *pair.cameras)
    return epipolar_distance_mean(lines, *points) < POSITIVE


# --- all pairs --------------------------------------------------------------------------------------------------------


def grouped(columns: Mapping[str, Sequence[Any]], protocol: Protocol) -> dict[str, Any]:
    """What the pairs come to, for all and for each group by itself; a swept threshold is chosen on all, once."""
    chosen = [_chosen(columns, protocol, estimator) for estimator in protocol.estimators]
    groups, members = {"all": np.arange(len(columns["group"]))}, np.array(columns["group"], object)
    named = sorted(set(columns["group"]))
    if len(named) > 1:
        groups |= {name: np.flatnonzero(members == name) for name in named}
    return {name: _group(columns, protocol, chosen, rows) for name, rows in groups.items()}


def _chosen(columns: Mapping[str, Sequence[Any]], protocol: Protocol, estimator: str) -> tuple[str, float | None, str]:
    """The estimator, its threshold, and how that was chosen; of equals the smallest."""
    thresholds = protocol.thresholds.get(estimator, ())
    if len(thresholds) < 2:
        return estimator, next(iter(thresholds), None), "fixed"
    what = ERRORS[protocol.task]
    mean = [error_auc(columns[column(what, estimator, value)], protocol.auc).mean() for value in thresholds]
    return estimator, thresholds[int(np.argmax(mean))], f"best of {len(thresholds)} on these pairs"


def _group(
    columns: Mapping[str, Sequence[Any]],
    protocol: Protocol,
    chosen: Sequence[tuple[str, float | None, str]],
    rows: NDArray[np.int64],
) -> dict[str, Any]:
    aucs = []
    for estimator, threshold, choice in chosen:
        errors = np.array(columns[column(ERRORS[protocol.task], estimator, threshold)], np.float64)[rows]
        low, high = auc_interval(errors, protocol.auc)
        inliers = np.array(columns[column("inliers", estimator, threshold)], np.float64)[rows]
        aucs.append(
            {
                "estimator": estimator,
                "threshold": threshold,
                "choice": choice,
                "at": list(protocol.auc),
                "auc": error_auc(errors, protocol.auc).tolist(),
                "low": low.tolist(),
                "high": high.tolist(),
                "failures": int(np.isinf(errors).sum()),
                "inliers_mean": float(inliers.mean()),
            }
        )
    bounded = [name for name in columns if _is_bounded(name)]

    def over(how: Callable[[Array], Any]) -> dict[str, float]:
        return {name: float(how(np.array(columns[name], np.float64)[rows])) for name in bounded}

    return {"pairs": len(rows), "auc": aucs, "mean": over(np.mean), "median": over(np.median)}


def _is_bounded(name: str) -> bool:
    """Whether a column has numbers that cannot be infinite."""
    return "@" in name or name in ("keypoints0", "keypoints1", "matches")
