"""Labelled images from where people keep them: folders of class folders, a zip, torchvision's data sets by name.

A folder (or zip) holds ``train/CLASS/*`` and ``val/CLASS/*`` (or ``test``, ``valid``), or ``CLASS/*`` alone, which is
split by class with a seed. Nothing is decoded here except data sets that are small enough to live in memory; what
cannot be trained on (a missing or empty folder, a single class, classes of val that train does not have) is refused at
once.
"""

from __future__ import annotations

import dataclasses
import os
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vispe.data.fashion_mnist import CLASSES, DEBIAN, fashion_mnist
from vispe.data.sources import SUFFIXES, Files, Pixels, Source, Torchvision, ZipFiles, folder_files
from vispe.paths import cache_dir
from vispe.spec import Spec

VAL = ("val", "valid", "validation", "test")  # folders that may stand beside train, in this order
SPLITS = {  # torchvision data sets whose two parts are not called train and test
    "OxfordIIITPet": ("trainval", "test"),
    "FGVCAircraft": ("trainval", "test"),
    "Flowers102": ("train", "val"),
    "DTD": ("train", "val"),
    "Imagenette": ("train", "val"),
    "PCAM": ("train", "val"),
    "RenderedSST2": ("train", "val"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSpec(Spec):
    """Which images. ``root``: a folder or a zip; or ``name``: a torchvision data set, kept below ``root`` or the cache.

    ``val_fraction`` of each class is held back, drawn by ``split_seed``, where there is no val part. ``train_limit``
    and ``val_limit``: at most that many images, drawn evenly over the classes by the same seed. ``corrupt``: refuse
    images that cannot be decoded, or skip and count them. ``memory``: hold small images of one size in memory.
    """

    root: str | None = None
    name: str | None = None
    download: bool = True
    val_fraction: float = 0.2
    split_seed: int = 0
    train_limit: int | None = None
    val_limit: int | None = None
    corrupt: Literal["refuse", "skip"] = "refuse"
    memory: Literal["auto", "never"] = "auto"

    def __post_init__(self) -> None:
        if self.root is None and self.name is None:
            raise ValueError("say data.root=FOLDER (or a zip), or data.name=DATASET of torchvision")
        if not 0 < self.val_fraction < 1:
            raise ValueError(f"val_fraction lies between 0 and 1, got {self.val_fraction}")
        for name in ("train_limit", "val_limit"):
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                raise ValueError(f"{name} is at least 1 image, got {limit}")


@dataclasses.dataclass(frozen=True)
class Images:
    """Images with ``labels [n]`` (int64, into ``classes``); image i is number ``where[i]`` of ``source``."""

    source: Source
    where: Tensor
    labels: Tensor
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, i: int) -> str:
        return self.source.name(int(self.where[i]))

    def read(self, i: int) -> Tensor:
        """float32 ``[3, h, w]`` in [0, 1]; ``ImageError`` names a damaged one."""
        return self.source.read(int(self.where[i]))

    def subset(self, keep: Tensor) -> Images:
        """Those at the indices ``keep``, in that order."""
        return dataclasses.replace(self, where=self.where[keep], labels=self.labels[keep])


def open_data(spec: DataSpec) -> tuple[Images, Images]:
    """The training and the validation images; ``ValueError`` says what is missing. May download, if allowed to."""
    if spec.name is not None:
        train, val = _named(spec)
    elif zipfile.is_zipfile(spec.root or ""):
        train, val = _parted(ZipFiles(spec.root or ""), spec)
    else:
        train, val = _parted(folder_files(spec.root or ""), spec)
    train = _limited(train, spec.train_limit, spec.split_seed)
    val = _limited(val, spec.val_limit, spec.split_seed)
    if len(train.classes) < 2:
        raise ValueError(f"{_where(spec)} has a single class, {train.classes[0]!r}: there is nothing to tell apart")
    if not len(val):
        raise ValueError(f"{_where(spec)} leaves no image for validation: a class needs at least two images")
    return train, val


def open_unlabelled(spec: DataSpec) -> tuple[Images, Images]:
    """The same where labels do not matter: images may also lie in ``root`` itself, or in ``train`` and ``val`` alone.

    Class folders without a val part are split as ``open_data`` splits them, so that what is held back here is held back
    there; all other images count as one class. ``ValueError`` says what is missing.
    """
    if spec.name is not None:
        train, val = _named(spec)
    else:
        root = spec.root or ""
        train, val = _whole(ZipFiles(root) if zipfile.is_zipfile(root) else folder_files(root), spec)
    train = _limited(train, spec.train_limit, spec.split_seed)
    val = _limited(val, spec.val_limit, spec.split_seed)
    if not len(val):
        raise ValueError(f"{_where(spec)} leaves no image for validation: there must be at least two")
    return train, val


def open_part(root: str | os.PathLike[str], classes: Sequence[str]) -> Images:
    """Images to evaluate on: ``root``'s val (or test) part, or else all of it, labelled by the ``classes`` of a model.

    ``ValueError`` names classes the model does not know.
    """
    files = ZipFiles(root) if zipfile.is_zipfile(root) else folder_files(root)
    tree = _tree(files)
    part = next((name for name in VAL if name in tree and isinstance(next(iter(tree[name].values())), dict)), None)
    return _labelled(files, tree[part] if part else tree, tuple(classes), str(root))


def _where(spec: DataSpec) -> str:
    return repr(spec.name or spec.root)


# --- classes and parts ------------------------------------------------------------------------------------------------


def _tree(files: Files | ZipFiles) -> dict[str, Any]:
    """First folder -> second folder (or file) -> ... -> number of the image. Images at the top are left out."""
    tree: dict[str, Any] = {}
    for k, path in enumerate(files.paths):
        *folders, name = path.split("/")
        inner = tree
        for folder in folders:
            inner = inner.setdefault(folder, {})
        if folders:
            inner[name] = k
    if not tree:
        raise ValueError(f"{str(files.root)!r} has no images in class folders ({', '.join(SUFFIXES[:4])}, ...)")
    only = next(iter(tree.values()))
    whole = isinstance(files, ZipFiles) and len(tree) == 1  # a zip often holds a single folder that holds everything
    return only if whole and all(isinstance(inner, dict) for inner in only.values()) else tree


def _parted(files: Files | ZipFiles, spec: DataSpec) -> tuple[Images, Images]:
    tree, root = _tree(files), str(files.root)
    part = next((name for name in VAL if name in tree), None)
    if "train" in tree and part is not None:
        _empty_class_folders(files, "train", part)
        train = _labelled(files, tree["train"], None, f"{root}/train")
        return train, _labelled(files, tree[part], train.classes, f"{root}/{part}")
    if "train" in tree and len(tree) == 1:
        tree = tree["train"]
    elif "train" in tree:
        raise ValueError(f"{root!r} has a train folder but none of {', '.join(VAL)} beside it")
    return _split(_labelled(files, tree, None, root), spec)


def _whole(files: Files | ZipFiles, spec: DataSpec) -> tuple[Images, Images]:
    """Training and validation images, with or without class folders."""
    if not len(files):
        raise ValueError(f"{str(files.root)!r} has no images ({', '.join(SUFFIXES[:4])}, ...)")
    if any("/" not in path for path in files.paths):
        return _split(_unlabelled(files, range(len(files))), spec)
    tree = _tree(files)
    part = next((name for name in VAL if name in tree), None)
    if "train" in tree and part is not None:
        return _unlabelled(files, _leaves(tree["train"])), _unlabelled(files, _leaves(tree[part]))
    tree = tree["train"] if list(tree) == ["train"] else tree
    if all(isinstance(inner, dict) for inner in tree.values()):
        return _split(_labelled(files, tree, None, str(files.root)), spec)
    return _split(_unlabelled(files, _leaves(tree)), spec)


def _unlabelled(files: Files | ZipFiles, numbers: Iterable[int]) -> Images:
    where = torch.tensor(list(numbers), dtype=torch.long)
    return Images(files, where, torch.zeros_like(where), ("image",))


def _empty_class_folders(files: Files | ZipFiles, *parts: str) -> None:
    if isinstance(files, ZipFiles):
        return
    filled = {"/".join(path.split("/")[:2]) for path in files.paths}
    for part in parts:
        for folder in sorted((files.root / part).iterdir()):
            if folder.is_dir() and not folder.name.startswith(".") and f"{part}/{folder.name}" not in filled:
                raise ValueError(f"the class folder {str(folder)!r} has no images")


def _labelled(files: Files | ZipFiles, tree: dict[str, Any], classes: tuple[str, ...] | None, root: str) -> Images:
    """The images of class folders; ``classes`` None: those that there are, in the order of their names."""
    folders = sorted(name for name, inner in tree.items() if isinstance(inner, dict))
    if not folders:
        raise ValueError(f"{root!r} has no class folders")
    if classes is None:
        classes = tuple(folders)
    unknown = [name for name in folders if name not in classes]
    if unknown:
        raise ValueError(f"{root!r} has the class {unknown[0]!r}, which training does not have: {', '.join(classes)}")
    rows = [(k, classes.index(name)) for name in folders for k in _leaves(tree[name])]
    where, labels = torch.tensor(rows, dtype=torch.long).unbind(1)
    return Images(files, where, labels, classes)


def _leaves(tree: dict[str, Any]) -> Iterable[int]:
    for inner in tree.values():
        if isinstance(inner, dict):
            yield from _leaves(inner)
        else:
            yield inner


def _split(images: Images, spec: DataSpec) -> tuple[Images, Images]:
    """Parts by ``val_fraction`` of each class, at least one image where the class has two."""
    draw = torch.Generator().manual_seed(spec.split_seed)
    held = []
    for label in range(len(images.classes)):
        own = (images.labels == label).nonzero()[:, 0]
        count = min(max(round(len(own) * spec.val_fraction), 1), len(own) - 1)
        held.append(own[torch.randperm(len(own), generator=draw)[:count]])
    val = torch.cat(held).sort().values
    rest = torch.ones(len(images), dtype=torch.bool).index_fill(0, val, False).nonzero()[:, 0]
    return images.subset(rest), images.subset(val)


def _limited(images: Images, limit: int | None, seed: int) -> Images:
    """At most ``limit`` images, the classes in turn, drawn by ``seed``."""
    if limit is None or limit >= len(images):
        return images
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    labels = images.labels[order]
    turn = torch.zeros(len(images), dtype=torch.long)
    for label in range(len(images.classes)):
        own = labels == label
        turn[own] = torch.arange(int(own.sum()))
    return images.subset(order[turn.argsort(stable=True)[:limit]].sort().values)


# --- by name ----------------------------------------------------------------------------------------------------------


def _named(spec: DataSpec) -> tuple[Images, Images]:
    if spec.name == "FashionMNIST" and spec.root is None and DEBIAN.is_dir():
        return _debian("train"), _debian("val")
    import inspect

    from torchvision import datasets

    kind = getattr(datasets, spec.name or "", None)
    if not (inspect.isclass(kind) and issubclass(kind, datasets.VisionDataset)) or spec.name in (
        "ImageFolder",
        "VisionDataset",
    ):
        raise ValueError(
            f"torchvision has no data set {spec.name!r}; try FashionMNIST, CIFAR10, Food101, OxfordIIITPet"
        )
    root = Path(spec.root or cache_dir() / "torchvision")
    known = inspect.signature(kind).parameters
    parts: tuple[Any, Any] = SPLITS.get(spec.name or "", ("train", "test"))
    if "train" in known:
        train, val = (_torchvision(kind, root, spec, {"train": part}) for part in (True, False))
    elif "split" in known:
        train, val = (_torchvision(kind, root, spec, {"split": part}) for part in parts)
    else:
        return _split(_torchvision(kind, root, spec, {}), spec)
    return train, dataclasses.replace(val, classes=train.classes)


def _debian(part: str) -> Images:
    pixels, labels = fashion_mnist(DEBIAN, part)
    return Images(Pixels(pixels, f"FashionMNIST {part}"), torch.arange(len(labels)), labels, CLASSES)


def _torchvision(kind: Any, root: Path, spec: DataSpec, part: dict[str, Any]) -> Images:
    import inspect

    given: dict[str, Any] = dict(part)
    if "download" in inspect.signature(kind).parameters:
        given["download"] = spec.download
        root.mkdir(parents=True, exist_ok=True)
    try:
        dataset = kind(root, **given)
    except (RuntimeError, TypeError, OSError) as error:
        raise ValueError(f"torchvision's {spec.name} in {str(root)!r}: {error}") from None
    labels = torch.as_tensor(_labels(dataset), dtype=torch.long)
    classes = tuple(str(name) for name in getattr(dataset, "classes", range(int(labels.max()) + 1)))
    title = " ".join(
        [str(spec.name), *("train" if v is True else "test" if v is False else str(v) for v in part.values())]
    )
    return Images(Torchvision(dataset, title), torch.arange(len(labels)), labels, classes)


def _labels(dataset: Any) -> Any:
    """The labels without decoding an image, under the names torchvision's data sets give them."""
    for name in ("targets", "labels", "_labels"):
        if hasattr(dataset, name):
            return getattr(dataset, name)
    if hasattr(dataset, "_samples"):
        return [sample[1] for sample in dataset._samples]
    return [dataset[k][1] for k in range(len(dataset))]
