"""The table of real pairs with ground truth: every extractor and matcher, ours and the official package's, one score
pass. ``python -m tests.bench.bench_benchmarks DATA OUT`` (DATA holds ``oxford_affine`` and ``strecha_1024``)

An hour on two cores; stop it and run it again: it goes on. ``--table`` only prints what is there.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

SETS = {  # kind, folder, size for us and for the official package, how both are scored
    "oxford": (
        "hpatches", "oxford_affine", ["--resize-short", "480"], ["--resize", "480", "--side", "short"],
        ["--preset", "exact"],
    ),
    "strecha": (
        "pairs", "strecha_1024", ["--resize-long", "1024"], ["--resize", "1024", "--side", "long"],
        ["--preset", "glue-factory"],
    ),
}  # fmt: skip
EXTRACTORS = ("aliked_n16", "aliked_n32", "disk", "sift")
KEYPOINTS = (1024, 2048)
MATCHERS = {"lightglue": ["lightglue"], "adaptive": ["lightglue", "--adaptive"], "mutual_nn": ["mutual_nn"]}


def runs() -> list[tuple[str, str, int, str]]:
    """(set, extractor, keypoints, matcher); no LightGlue for SIFT was to be had."""
    return [
        (name, extractor, keypoints, matcher)
        for name in SETS
        for extractor in EXTRACTORS
        for keypoints in KEYPOINTS
        for matcher in (MATCHERS if extractor != "sift" else ["mutual_nn"])
    ]


def folder(out: Path, who: str, name: str, extractor: str, keypoints: int, matcher: str) -> Path:
    return out / who / name / f"{extractor}_{keypoints}_{matcher}"


def make(data: Path, out: Path, who: str, name: str, extractor: str, keypoints: int, matcher: str) -> None:
    to = folder(out, who, name, extractor, keypoints, matcher)
    if (to / "scores.json").is_file():
        return
    to.mkdir(parents=True, exist_ok=True)
    for sibling in to.parent.glob(f"{extractor}_{keypoints}_*/features.h5"):  # the same features: not found again
        if sibling.parent != to and not (to / "features.h5").exists():
            shutil.copy(sibling, to / "features.h5")
    kind, where, ours, theirs, scored = SETS[name]
    root = data / where
    what = ["--extractor", extractor, "--max-keypoints", str(keypoints), "--matcher", *MATCHERS[matcher]]
    if who == "ours":
        pairs = ["--list", str(root / "pairs_with_gt.txt")] if kind == "pairs" else []
        size = [*ours, *scored]
        command = ["-m", "vispe", "evaluate", kind, "--root", str(root), *pairs, *size, *what, "--out", str(to)]
    else:
        command = ["-m", "tests.bench.official_runs", kind, str(root), str(to), *theirs, *what]
    print(" ".join(command), flush=True)
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
    if who == "official":
        again = ["-m", "vispe", "evaluate", "score", str(to), *scored]
        subprocess.run([sys.executable, *again], check=True, stdout=subprocess.DEVNULL)


def table(out: Path) -> None:
    """Markdown: ours beside the official package's, mean over pairs; AUC in percent, seconds a pair to match."""
    from vispe.evaluate.runs import read_run, told_seconds

    for name in SETS:
        measure = "precision@3" if name == "oxford" else "epipolar_precision@0.0005"
        print(f"| {name} | keypoints | matcher | AUC ours | AUC official | {measure} | matches | seconds |")
        for which in runs():
            cells = []
            for who in ("ours", "official"):
                path = folder(out, who, *which)
                if which[0] != name or not (path / "scores.json").is_file():
                    break
                run = read_run(path)
                auc = {line["estimator"]: line["auc"] for line in run.lines()}["poselib"]
                mean = run.scores["groups"]["all"]["mean"]
                seconds = told_seconds(run)["match"]
                told = "/".join(f"{100 * v:.1f}" for v in auc)
                cells.append((told, f"{mean[measure]:.3f}", f"{mean['matches']:.0f}", f"{seconds:.2f}"))
            if len(cells) == 2:
                auc, *rest = ([a, b] for a, b in zip(*cells, strict=True))
                print("|", " | ".join([*map(str, which[1:]), *auc, *(" / ".join(both) for both in rest)]), "|")


def seconds(data: Path, rounds: int = 3) -> None:
    """Extraction of an image and matching of a pair of Strecha, ours and the official package's in turns, 2 threads."""
    import torch

    from tests.bench.official_runs import Official
    from tests.bench.timing import in_turns
    from vispe.data.images import read_image
    from vispe.evaluate.predict import Pipeline

    torch.set_num_threads(2)
    images = [read_image(data / f"strecha_1024/fountain-P11/{k:04d}.jpg") for k in (4, 5)]
    print("| extractor | keypoints | matcher | official / ours | ours, seconds |")
    for extractor in EXTRACTORS[:3]:
        for keypoints in KEYPOINTS:
            for adaptive in (False, True):
                same = {"max_keypoints": keypoints, "resize": 1024, "side": "long", "adaptive": adaptive}
                ours = Pipeline(extractor=extractor, device="cpu", **same).load()
                theirs = Official(extractor=extractor, matcher="lightglue", **same)
                f0, f1 = (ours.extract(image) for image in images)
                jobs = {f"LightGlue{', adaptive' * adaptive}": (ours.match_features, theirs.match_features, (f0, f1))}
                if not adaptive:
                    jobs["extraction"] = (ours.extract, theirs.extract, (images[0], "image"))
                for what, (our, their, given) in jobs.items():
                    ratio, took = in_turns(lambda f=our, g=given: f(*g), lambda f=their, g=given: f(*g), rounds)
                    print(f"| {extractor} | {keypoints} | {what} | {ratio:.2f} | {took:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", choices=SETS, help="one of the two sets")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--seconds", action="store_true", help="only time both")
    given = parser.parse_args()
    if given.seconds:
        seconds(given.data)
        return
    if not given.table:
        for which in (which for which in runs() if given.only in (None, which[0])):
            for who in ("ours", "official"):
                make(given.data, given.out, who, *which)
    table(given.out)


if __name__ == "__main__":
    main()
