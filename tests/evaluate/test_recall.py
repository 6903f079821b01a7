"""Precision at equal recall: by hand, of real runs, and what has no recall is refused."""

import json

import numpy as np
import pytest

from vispe.data.pairs import Pair, PairSet
from vispe.evaluate.benchmark import benchmark
from vispe.evaluate.compare import compare
from vispe.evaluate.predict import Pipeline
from vispe.evaluate.protocol import Protocol
from vispe.evaluate.recall import EqualRecall, curve, judged, sentences
from vispe.evaluate.runs import read_run
from vispe.evaluate.tables import show
from vispe.files import write_json

OWN = Protocol(resize=0, max_keypoints=200, estimators=("poselib",), thresholds={"poselib": 1.0})
POINTS = [(10, 10), (30, 10), (50, 40), (90, 70)]
SIZE = (96, 128)


@pytest.fixture
def by_hand(tmp_path, handmade):
    """Three keypoints of image 0 are in image 1, one of them 20 pixels off; of four matches the second surest is
    wrong."""
    pairs = PairSet(name="images", root=tmp_path, pairs=(Pair(image0="a", image1="b", homography=np.eye(3)),))
    second = [*POINTS[:3], (70, 70)]
    matches, scores = [[0, 0], [1, 2], [2, 2], [3, 3]], [0.9, 0.8, 0.2, 0.1]
    run = handmade(pairs, [(POINTS, SIZE, second, SIZE, matches, scores)])
    told = json.loads((run / "run.json").read_text())
    write_json(run / "run.json", {**told, "protocol": OWN.but(max_keypoints=9).plain()})
    return run


def test_by_hand(by_hand):
    """Right are 0-0 and 2-2; 1-2 and 3-3 are wrong; three are true."""
    found = judged(by_hand)
    assert found.right.tolist() == [True, False, True, False]
    assert found.true == 3
    assert (found.precision, found.recall) == (1 / 2, 2 / 3)
    recalls, precisions = curve(found)
    assert recalls.tolist() == [1 / 3, 1 / 3, 2 / 3, 2 / 3]
    assert precisions.tolist() == [1, 1 / 2, 2 / 3, 1 / 2]


def test_sentences():
    rows = (
        EqualRecall(run="A", other="B", recall=0.5, precision=0.75, other_precision=0.6),
        EqualRecall(run="B", other="A", recall=0.9, precision=None, other_precision=0.4),
    )
    assert sentences(()) == []
    assert sentences(rows) == [
        "All pairs taken together (the means above are of pairs):",
        "at the recall of B, 0.500, where its precision is 0.600, A has precision 0.750",
        "at the recall of A, 0.900, where its precision is 0.400, B never finds so many",
    ]


def test_runs_on_the_same_keypoints(folder, tmp_path, capsys):
    pytest.importorskip("cv2", reason="SIFT is OpenCV's")
    pairs = folder(2)
    for name in ("mutual_nn", "mutual_nn_ratio"):
        made = Pipeline(extractor="sift", matcher=name, max_keypoints=200, resize=0, side="short")
        benchmark(pairs, tmp_path / name, OWN, made)
    runs = [read_run(tmp_path / name) for name in ("mutual_nn", "mutual_nn_ratio")]
    found = compare(runs, tmp_path / "both", recall=True)
    of_all, of_few = found.recalls
    assert (of_all.run, of_all.other, of_few.run, of_few.other) == ("B", "A", "A", "B")
    assert of_all.precision is None, "the ratio test leaves right ones out"
    assert of_few.recall < of_all.recall
    assert of_few.precision == pytest.approx(of_few.other_precision, abs=0.1)
    assert json.loads((tmp_path / "both" / "compare.json").read_text())["equal_recall"][0]["run"] == "B"
    assert (tmp_path / "both" / "recall.png").stat().st_size > 5000
    capsys.readouterr()
    show(found)
    assert "B never finds so many" in capsys.readouterr().out


def test_mistakes_are_named(tmp_path, by_hand):
    told = json.loads((by_hand / "run.json").read_text())
    poses = Protocol(task="pose", resize=0, estimators=("poselib",), thresholds={"poselib": 1.0}).plain()
    write_json(by_hand / "run.json", {**told, "protocol": poses})
    with pytest.raises(ValueError, match="holds poses: which keypoints are the same is known for homographies only"):
        judged(by_hand)
    with pytest.raises(ValueError, match="there is no run of a benchmark"):
        judged(tmp_path / "none")
