"""The kinds of ``vispe evaluate`` that score matchers: data sets, own pairs, stress, another score, a comparison."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vispe.commands.printing import print_rows
from vispe.commands.words import at_least, command, pairing, processes
from vispe.models import EXTRACTORS

if TYPE_CHECKING:
    from vispe.data.pairs import PairSet
    from vispe.evaluate.protocol import Protocol

Options = argparse.Namespace


def declare(kinds: Any) -> None:
    """The kinds of ``vispe evaluate`` that score matchers."""
    add = command(kinds, "hpatches", run_hpatches, "homographies on HPatches", AGAIN)
    _root(add)
    add("--all-sequences", action="store_true", help="all 116, not the 108 that are usually scored")
    _benchmark(add, "hpatches")

    add = command(kinds, "megadepth1500", run_megadepth1500, "relative poses on MegaDepth-1500", AGAIN)
    _root(add)
    add("--statistics", action="store_true", help="only tell what the index holds; needs no images")
    _benchmark(add, "megadepth1500")

    add = command(kinds, "scannet1500", run_scannet1500, "relative poses on ScanNet-1500", AGAIN)
    _root(add)
    _benchmark(add, "scannet1500")

    add = command(kinds, "pairs", run_pairs, "relative poses of your own list of pairs", AGAIN)
    add("--list", type=Path, required=True, metavar="FILE", help=LIST_HELP)
    _root(add)
    add("--pixel", type=float, default=0.0, choices=(0.0, 0.5), help=PIXEL_HELP)
    _benchmark(add, "pairs")

    add = command(
        kinds, "images", run_images, "the first image against each of the others, by their homographies", AGAIN
    )
    add("images", metavar="IMAGE", nargs="+", type=Path)
    add("--homography", metavar="FILE", nargs="+", type=Path, required=True, help=HOMOGRAPHY_HELP)
    _benchmark(add, "images")

    add = command(
        kinds, "stress", run_stress, "rotation, scale, blur, noise and low light, made from photographs", AGAIN
    )
    add("--images", type=Path, metavar="DIR", help="photographs of your own; default: scikit-image's")
    add("--kinds", nargs="+", metavar="KIND", help="of stress; default: all")
    add("--setting", default="small", choices=("small", "full"), help="how many levels; default %(default)s")
    add("--seed", type=int, default=0, metavar="N", help="default %(default)s")
    _benchmark(add, "stress")

    add = command(kinds, "score", run_score, "score what a run has predicted once more, otherwise", SCORE_HELP)
    add("folder", metavar="RUN", type=Path)
    _scoring(add)
    add("--out", type=Path, metavar="DIR", help="another folder for this score; default: RUN's own score is replaced")

    add = command(kinds, "compare", run_compare, "runs side by side, with the differences of their pairs")
    add("folders", metavar="RUN", nargs="+", type=Path)
    add("--recall", action="store_true", help="also precision where one finds as much as another; homographies only")
    add("--out", type=Path, metavar="DIR", help="write compare.png, differences.csv, compare.json, recall.png there")


AGAIN = "; predictions are kept in --out: the same line goes on after an interruption, another score takes seconds"
LIST_HELP = "38 columns a line: two names, two rotations, K0, K1, T_0to1; see vispe/data/pairs.py"
PIXEL_HELP = "where K puts the first pixel's centre: 0.0 (OpenCV) or 0.5 (COLMAP); default %(default)s"
HOMOGRAPHY_HELP = "3x3 from the first image to each other one: text, .npy, or OpenCV's XML or YAML"
PRESET_HELP = (
    "whose protocol: glue-factory, lightglue-paper, loftr, roma, xfeat, superglue, as far as they have one, or exact, "
    "vispe's own; default: glue-factory for data sets, else exact"
)
SCORE_HELP = "; reads only the run's folder, not the images"
SETTINGS = ("extractor", "matcher", "adaptive", "precision", "weights", "extractor_weights", "device")


def _root(add: Any) -> None:
    add("--root", type=Path, required=True, metavar="DIR", help="where the images are")


def _benchmark(add: Any, name: str) -> None:
    add("--extractor", default="aliked_n16", choices=EXTRACTORS, metavar="NAME", help=", ".join(EXTRACTORS))
    pairing(add)
    add("--extractor-weights", metavar="PATH", type=Path, help="extractor weights from this file")
    add("--max-keypoints", type=int, metavar="N", help="default: the preset's")
    add("--resize-short", type=int, metavar="N", help="look at images with the short side N; default: the preset's")
    add("--resize-long", type=int, metavar="N", help="or with the long side N; 0: as they are")
    add("--detection-threshold", type=float, metavar="T", help="lowest score of a keypoint; default: the preset's")
    add("--device", default="auto", help="a torch device; auto: CUDA when there is one")
    processes(add)
    _scoring(add)
    add("--out", type=Path, default=Path("out") / name, metavar="DIR", help="the run's folder; default %(default)s")


def _scoring(add: Any) -> None:
    add("--preset", metavar="NAME", help=PRESET_HELP)
    add("--estimators", metavar="A,B", help="poselib, opencv, and for homographies dlt")
    add("--threshold", nargs="+", default=[], metavar="PX", help="of inliers: 1.5, or opencv=0.5 poselib=1,2,3 (best)")
    add("--max-matches", type=int, metavar="N", help="score only the best N of a pair; 0: all")
    add(
        "--tune",
        choices=("threshold",),
        help="the whole curve of AUC by inlier threshold: tune.json, and in the report",
    )
    add("--workers", type=at_least(1), default=1, metavar="N", help="processes that score; default %(default)s")


# --- the commands -----------------------------------------------------------------------------------------------------


def run_hpatches(options: Options) -> None:
    from vispe.data.hpatches import hpatches

    _run(options, lambda: hpatches(options.root, all_sequences=options.all_sequences))


def run_megadepth1500(options: Options) -> None:
    from vispe.data.megadepth1500 import megadepth1500, statistics

    if options.statistics:
        head, rows = statistics(megadepth1500(options.root))
        print_rows([head, *rows])
    else:
        _run(options, lambda: megadepth1500(options.root))


def run_scannet1500(options: Options) -> None:
    from vispe.data.scannet1500 import scannet1500

    _run(options, lambda: scannet1500(options.root))


def run_pairs(options: Options) -> None:
    from vispe.data.pairs import read_pair_list

    _run(options, lambda: read_pair_list(options.list, options.root, pixel=options.pixel))


def run_images(options: Options) -> None:
    from vispe.data.pairs import image_pairs

    _run(options, lambda: image_pairs(options.images, options.homography))


def run_stress(options: Options) -> None:
    from vispe.data.stress import KINDS, stress

    kinds, where = tuple(options.kinds or KINDS), options.out / "images"
    _run(options, lambda: stress(where, options.images, kinds=kinds, setting=options.setting, seed=options.seed))


def run_score(options: Options) -> None:
    from vispe.evaluate.benchmark import rescore, run_beside
    from vispe.evaluate.protocol import preset, renamed
    from vispe.evaluate.score import about, protocol_of

    before = protocol_of(options.folder)
    if options.preset is not None:  # but for what pass 1 did, which is done
        named = preset(about(options.folder)["benchmark"], options.preset, before.task)
        before = named.but(resize=before.resize, side=before.side)
    protocol = renamed(_scored(before, options), about(options.folder)["benchmark"])
    folder = options.folder if options.out is None else run_beside(options.folder, options.out)
    _tell(rescore(folder, protocol, workers=options.workers, tuned=options.tune is not None), folder)


def run_compare(options: Options) -> None:
    from vispe.evaluate.compare import compare
    from vispe.evaluate.runs import read_run
    from vispe.evaluate.tables import show

    show(compare([read_run(folder) for folder in options.folders], options.out, recall=options.recall))


# --- what they share --------------------------------------------------------------------------------------------------


def _run(options: Options, open_pairs: Callable[[], PairSet]) -> None:
    from vispe.evaluate.benchmark import benchmark
    from vispe.evaluate.predict import Pipeline
    from vispe.evaluate.protocol import preset, renamed

    pairs = open_pairs()
    pairs.check_truth()  # before a protocol is looked for
    protocol = preset(pairs.name, options.preset, pairs.task)
    protocol = renamed(_scored(_looked(protocol, options), options), pairs.name)
    given = {name: getattr(options, name) for name in SETTINGS}
    paths = {name: str(given[name]) for name in ("weights", "extractor_weights") if given[name] is not None}
    if options.detection_threshold is not None:
        given["knobs"] = {"detection_threshold": options.detection_threshold}
    scores = benchmark(
        pairs, options.out, protocol, Pipeline(**{**given, **paths}), devices=options.devices, nodes=options.nodes,
        workers=options.workers, tuned=options.tune is not None,
    )  # fmt: skip
    if scores is not None:
        _tell(scores, options.out)


def _looked(protocol: Protocol, options: Options) -> Protocol:
    """The protocol with what the options say of the images and the extractor."""
    sides = {side: getattr(options, f"resize_{side}") for side in ("short", "long")}
    asked = {side: size for side, size in sides.items() if size is not None}
    if len(asked) > 1:
        raise ValueError("--resize-short and --resize-long exclude each other")
    changed: dict[str, Any] = {}
    for side, size in asked.items():
        changed = {"resize": size, "side": side}
    if options.max_keypoints is not None:
        changed["max_keypoints"] = options.max_keypoints
    return protocol.but(**changed)


def _scored(protocol: Protocol, options: Options) -> Protocol:
    """The protocol with what the options say of the score."""
    chosen = tuple(options.estimators.split(",")) if options.estimators else protocol.estimators
    thresholds: dict[str, Any] = {**protocol.thresholds, **_thresholds(options.threshold, chosen)}
    changed: dict[str, Any] = {"estimators": chosen, "thresholds": thresholds}
    if options.max_matches is not None:
        changed["max_matches"] = options.max_matches
    return protocol.but(**changed)


def _thresholds(words: list[str], estimators: tuple[str, ...]) -> dict[str, tuple[float, ...]]:
    """``["1.5"]`` or ``["opencv=0.5", "poselib=1,2,3"]`` by estimator."""
    from vispe.evaluate.protocol import UNBOUNDED

    made: dict[str, list[float]] = {}
    for word in words:
        name, equals, text = word.rpartition("=")
        try:
            values = [float(number) for number in text.split(",")]
        except ValueError:
            raise ValueError(f"--threshold takes numbers, or estimator=numbers, got {word!r}") from None
        for estimator in [name] if equals else [e for e in estimators if e not in UNBOUNDED]:
            made.setdefault(estimator, []).extend(values)
    return {name: tuple(dict.fromkeys(values)) for name, values in made.items()}


def _tell(scores: dict[str, Any], folder: Path) -> None:
    from vispe.evaluate.benchmark import auc_rows, curve_table, mean_rows, pair_rows, protocol_rows, second_rows
    from vispe.evaluate.protocol import Protocol
    from vispe.evaluate.runs import read_run

    run = read_run(folder)
    note, count = f", {scores['note']}" if scores["note"] else "", scores["pairs"]
    made = scores["made"]
    who = f"{made['extractor']} + {made['matcher']}" + (", adaptive" if made.get("adaptive") else "")
    print(f"{scores['benchmark']}{note}: {who}, {count} pair{'s' * (count != 1)}")
    print_rows(protocol_rows(Protocol.of(**scores["protocol"])))
    for rows in (pair_rows(run), auc_rows(scores), mean_rows(scores), curve_table(run), second_rows(run)):
        if rows:
            print()
            print_rows(rows)
    there = [name for name in ("scores.json", "pairs.csv", "tune.json", "curves.png") if (folder / name).is_file()]
    print(f"wrote {folder / 'report.html'}, {', '.join(there[:-1])} and {there[-1]}")
