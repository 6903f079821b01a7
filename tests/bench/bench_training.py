"""Fine-tuning ViT-Ti at 384 and 518 against timm in the same loop. ``python -m tests.bench.bench_training``

The same weights, images, loss and AdamW; steps in turns, so that a busy machine slows both. Memory is what a process's
peak grows by over its first steps, in a fresh process each. ``--images FOLDER`` takes photographs from class folders,
else noise is looked at, which takes as long.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vispe
from tests.bench.timing import in_turns

SIZES = {384: 16, 518: 14}  # image size -> patch


def batch(size: int, count: int, folder: Path | None) -> Tensor:
    """``[count, 3, size, size]``, normalised."""
    if folder is None:
        return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(0))
    from vispe.data.augment import evaluation_transform
    from vispe.data.images import read_image

    paths = sorted(path for path in folder.rglob("*.jpg"))[:count]
    images = torch.stack([evaluation_transform((size, size), 1.0)(read_image(path)) for path in paths])
    return (images.float() / 255 - 0.5) / 0.5


def models(size: int) -> tuple[nn.Module, nn.Module]:
    """Ours and timm's, with timm's weights of 224 pixels read at ``size``, and two classes."""
    patch = SIZES[size]
    state = timm.create_model("vit_tiny_patch16_224", patch_size=patch, num_classes=2).state_dict()
    peer = timm.create_model("vit_tiny_patch16_224", patch_size=patch, img_size=size, num_classes=2)
    peer.load_state_dict(timm.models.vision_transformer.checkpoint_filter_fn(dict(state), peer))
    ours = vispe.load(
        "vit_tiny_patch16_224", state, "timm", source_size=(224, 224), patch_size=patch, image_size=size, num_classes=2
    )
    return ours.train(), peer.train()


def stepper(model: nn.Module, images: Tensor) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    labels = torch.arange(len(images)) % 2

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def peak() -> float:
    """MiB of this process at its largest: the kernel's own mark, which a child does not inherit."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) / 1024


def growth(which: int, size: int, count: int, folder: Path | None) -> float:
    """MiB by which the peak of a process grows over three steps."""
    model, images = models(size)[which], batch(size, count, folder)
    step, before = stepper(model, images), peak()
    for _ in range(3):
        step()
    return peak() - before


def grown(which: int, size: int, words: argparse.Namespace) -> float:
    command = [sys.executable, "-m", "tests.bench.bench_training", "--memory", str(which), str(size)]
    command += ["--batch", str(words.batch), "--threads", str(words.threads)]
    command += ["--images", str(words.images)] if words.images else []
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--memory", nargs=2, type=int, help=argparse.SUPPRESS)
    words = parser.parse_args(argv)
    torch.set_num_threads(words.threads)
    if words.memory:
        print(growth(*words.memory, words.batch, words.images))
        return
    print("training ViT-Ti      timm / ours, time   ours, ms an image   memory MiB ours, timm")
    for size in SIZES:
        images = batch(size, words.batch, words.images)
        ours, peer = models(size)
        with torch.no_grad():
            torch.testing.assert_close(ours.eval()(images), peer.eval()(images), atol=1e-4, rtol=1e-4)
        ratio, seconds = in_turns(stepper(ours.train(), images), stepper(peer.train(), images), words.rounds)
        mine, theirs = (grown(which, size, words) for which in (0, 1))
        own = seconds * 1e3 / words.batch
        print(f"{size} x {size}, patch {SIZES[size]} {ratio:17.2f} {own:20.0f} {mine:14.0f} {theirs:9.0f}", flush=True)


if __name__ == "__main__":
    main()
