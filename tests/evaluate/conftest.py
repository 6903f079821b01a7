"""Pairs of small pictures whose homographies are known, and caches written by hand."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from PIL import Image

from vispe.cache import CacheWriter
from vispe.data.pairs import Pair, PairSet
from vispe.evaluate.records import fingerprint, image_key, pair_key, stored
from vispe.evaluate.runs import read_run, write_rows
from vispe.files import write_json
from vispe.metrics.auc import error_auc

SHIFT = np.array([[1.0, 0, 4], [0, 1, -2], [0, 0, 1]])


def texture(seed: int, h: int = 96, w: int = 128) -> np.ndarray:
    """Blobs of several sizes, ``[h, w, 3]`` uint8."""
    random = np.random.default_rng(seed)
    layers = [
        np.kron(random.normal(size=(h // cell, w // cell, 3)), np.ones((cell, cell, 1))) * cell**0.5
        for cell in (2, 4, 8, 16)
    ]
    picture = np.sum(layers, axis=0)
    return ((picture - picture.min()) / np.ptp(picture) * 255).astype(np.uint8)


@pytest.fixture
def folder(tmp_path):
    """``make(n, name=...) -> PairSet``: n pictures, each against itself moved by 4 to the right and 2 up."""

    def make(n: int = 3, name: str = "images", root: str = "pictures") -> PairSet:
        where = tmp_path / root
        where.mkdir(exist_ok=True)
        pairs = []
        for i in range(n):
            first, second = f"{i} é.png", f"{i}-b.png"
            if not (where / first).exists():
                picture = texture(i)
                Image.fromarray(picture).save(where / first)
                Image.fromarray(np.roll(picture, (-2, 4), (0, 1))).save(where / second)
            pairs.append(Pair(image0=first, image1=second, group="even" if i % 2 == 0 else "odd", homography=SHIFT))
        return PairSet(name=name, root=where, pairs=tuple(pairs))

    return make


@pytest.fixture
def handmade(tmp_path):
    """``write(pairs, contents, made=...)`` -> a run's folder as pass 1 would have left it.

    ``contents``: for each pair ``(keypoints0, size0, keypoints1, size1, matches, scores)``.
    """

    def write(pairs: PairSet, contents, name="run", **made):
        run = tmp_path / name
        run.mkdir(exist_ok=True)
        how = {"extractor": "by hand", "max_keypoints": 9, "resize": 0, "side": "short", **made}
        with CacheWriter(run / "features.h5", how) as writer:
            for pair, (k0, size0, k1, size1, _, _) in zip(pairs.pairs, contents, strict=True):
                for image, turns, keypoints, size in (
                    (pair.image0, pair.turns0, k0, size0),
                    (pair.image1, pair.turns1, k1, size1),
                ):
                    arrays = {"keypoints": np.array(keypoints, np.float32).reshape(-1, 2)}
                    about = {"size": size, "pixel": 1.0, "seconds": 0.25}
                    writer.add(image_key(image, turns), arrays, about, f"hash of {image}")
        names = [pair_key(pair) for pair in pairs.pairs]
        with CacheWriter(run / "matches.h5", {"matcher": "hand", "features": how}, names=names) as writer:
            for pair, (_, _, _, _, matches, scores) in zip(pairs.pairs, contents, strict=True):
                truth = stored(pair, pairs)
                arrays = {
                    "matches": np.array(matches, np.int32).reshape(-1, 2), "scores": np.array(scores, np.float32),
                }  # fmt: skip
                content = fingerprint(truth, f"hash of {pair.image0}", f"hash of {pair.image1}")
                writer.add(pair_key(pair), arrays, {**truth, "seconds": 0.5}, content)
        about = {"benchmark": pairs.name, "note": pairs.note, "root": str(pairs.root)}
        write_json(run / "run.json", about)
        return run

    return write


# --- finished runs as ``score`` leaves them, of numbers drawn by a seed -----------------------------------------------

PROTOCOLS = {
    "homography": {
        "name": "glue-factory", "task": "homography", "resize": 480, "side": "short", "max_keypoints": 1024,
        "detection_threshold": None, "max_matches": 0, "frame": None, "frame_side": "short", "pixels": "exact",
        "corners": "edges", "estimators": ["poselib", "opencv", "dlt"],
        "thresholds": {"poselib": [2.0], "opencv": [0.5, 1.0]}, "auc": [1.0, 3.0, 5.0], "epipolar": "mean",
        "epipolar_thresholds": [0.0001, 0.0005, 0.001], "source": "a file, here & there",
    },
}  # fmt: skip
PROTOCOLS["pose"] = {
    **PROTOCOLS["homography"], "task": "pose", "resize": 1600, "side": "long", "estimators": ["poselib", "opencv"],
    "auc": [5.0, 10.0, 20.0],
}  # fmt: skip
CHOICES = {"poselib": (2.0, "fixed"), "opencv": (1.0, "best of 2 on these pairs"), "dlt": (None, "fixed")}


def drawn_columns(task, pairs, seed, skill):
    draw = np.random.default_rng(seed)
    hard = np.random.default_rng(99).gamma(2.0, 1.0, pairs)  # the same pairs are hard for everyone
    columns = {
        "image0": [f'scene {i // 5}, "é"/1.ppm' for i in range(pairs)],
        "image1": [f'scene {i // 5}, "é"/{i % 5 + 2}.ppm' for i in range(pairs)],
        "group": [("viewpoint", "illumination")[i % 2] if task == "homography" else f"00{i % 2}" for i in range(pairs)],
        "keypoints0": draw.integers(700, 1025, pairs),
        "keypoints1": draw.integers(700, 1025, pairs),
        "matches": (900 * np.exp(-0.35 * hard) * skill).astype(int),
    }
    if task == "homography":
        columns |= {f"precision@{px}": np.clip(skill - 0.3 / px - 0.05 * hard, 0, 1) for px in (1, 3)}
        columns |= {f"accuracy@{px}": np.clip(1 - 0.7 / px * hard / 2, 0, 1) * skill for px in range(1, 11)}
        columns |= {f"gt_{kind}@3": np.clip(skill - 0.05 * hard, 0, 1) for kind in ("precision", "recall")}
    else:
        columns |= {f"epipolar_precision@{at}": np.full(pairs, skill * at * 600) for at in (1e-4, 5e-4, 1e-3)}
    kinds = ("corner_error",) if task == "homography" else ("pose_error", "rotation_error", "translation_error")
    for estimator in PROTOCOLS[task]["estimators"]:
        for threshold in PROTOCOLS[task]["thresholds"].get(estimator, [None]):
            errors = (0.5 if task == "homography" else 2.0) * hard / skill * draw.lognormal(0, 0.4, pairs)
            errors *= 2.0 if threshold is None else 1.0
            errors[hard > 5.5] = np.inf
            name = estimator if threshold is None else f"{estimator} {threshold}"
            columns |= {f"{kind} {name}": errors for kind in kinds}
            columns[f"inliers {name}"] = (columns["matches"] * 0.8).astype(int)
    return columns


def scores_of(columns, task, made):
    names = sorted(set(columns["group"]))
    members = {"all": np.ones(len(columns["group"]), bool)}
    members |= {name: np.array(columns["group"]) == name for name in names if len(names) > 1}
    numeric = [name for name in columns if name in ("keypoints0", "keypoints1", "matches") or "@" in name]
    groups, protocol = {}, PROTOCOLS[task]
    for group, rows in members.items():
        aucs = []
        for estimator in protocol["estimators"]:
            threshold, choice = CHOICES[estimator]
            name = f"{'corner' if task == 'homography' else 'pose'}_error {estimator}"
            errors = np.asarray(columns[name if threshold is None else f"{name} {threshold}"])[rows]
            auc = error_auc(errors, protocol["auc"])
            aucs.append({
                "estimator": estimator, "threshold": threshold, "choice": choice, "at": protocol["auc"],
                "auc": auc.tolist(), "low": (auc * 0.93).tolist(), "high": (auc + 0.07 * (1 - auc)).tolist(),
                "failures": int(np.isinf(errors).sum()), "inliers_mean": 321.5,
            })  # fmt: skip
        over = {
            how: {name: float(function(np.asarray(columns[name])[rows])) for name in numeric}
            for how, function in (("mean", np.mean), ("median", np.median))
        }
        groups[group] = {"pairs": int(rows.sum()), "auc": aucs, **over}
    return {
        "benchmark": "hpatches" if task == "homography" else "megadepth1500", "version": "0.1.0", "task": task,
        "pairs": len(columns["group"]), "protocol": protocol, "made": made, "groups": groups,
    }  # fmt: skip


@pytest.fixture
def make_run(tmp_path):
    """``make_run(name, task=, pairs=, seed=, skill=, columns=, change=, **made) -> Run``: files in a new folder, read.

    ``change(scores)`` may alter the scores before they are written.
    """

    def make(name="run", *, task="homography", pairs=40, seed=0, skill=0.9, columns=None, change=None, **made):
        run = tmp_path / name
        run.mkdir()
        columns = columns or drawn_columns(task, pairs, seed, skill)
        known = {"extractor": "aliked_n16", "max_keypoints": 1024, "matcher": "lightglue", "adaptive": False}
        scores = scores_of(columns, task, {**known, "weights": "0123456789abcdef" * 4, **made})
        if change:
            change(scores)
        write_rows(run / "pairs.csv", columns)
        scores["pairs_csv"] = hashlib.sha256((run / "pairs.csv").read_bytes()).hexdigest()
        write_json(run / "scores.json", scores)
        seconds = {"extract": {"images": 8, "seconds_mean": 0.25}, "match": {"pairs": pairs, "seconds_mean": 0.04}}
        write_json(run / "timing.json", {**seconds, "score": {"seconds": 3.0, "pairs": pairs}})
        return read_run(run)

    return make
