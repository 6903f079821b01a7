"""Local features of many images in one HDF5 file.

A file says how it was made (attribute ``made``, JSON). Each image is a group named by its percent-encoded path, so that
any file name survives, with ``keypoints [n, 2]`` float32 (x, y; the first pixel's centre at 0), ``scores [n]``,
``descriptors [n, d]``, ``scales`` and ``orientations`` where there are any, and attributes ``size`` (h, w), ``pixel``
and ``sha256`` of the image file.

While it is being made, ``<name>.part`` is a folder with a small file for each image, whole or absent; a run that was
stopped, even killed, goes on from it. HDF5 itself promises nothing about a file whose writer was killed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self
from urllib.parse import quote, unquote_to_bytes

import h5py
import torch

from vispe.features import Features
from vispe.files import atomic

ARRAYS = ("keypoints", "scores", "descriptors", "scales", "orientations")
SHARDS = "[!.]*.h5"  # not what `atomic` had begun when a run was killed


class FeatureWriter:
    """Collects features for ``path``, which takes on its new content in one step when the block ends without an error.

    A file that is there already and was ``made`` alike is extended; another is refused (``ValueError``), never
    replaced. After an interruption what was done stays for the next writer that makes it alike; after an error it is
    removed.
    """

    def __init__(self, path: str | os.PathLike[str], made: dict[str, Any]) -> None:
        self.path, self.made = Path(path), json.dumps(made, sort_keys=True)
        if self.path.is_dir():
            raise ValueError(f"cannot write {str(self.path)!r}: it is a folder; name a file, such as features.h5 in it")
        if not self.path.parent.is_dir():
            raise ValueError(f"cannot write {str(self.path)!r}: there is no folder {str(self.path.parent)!r}")
        self.part = self.path.with_name(self.path.name + ".part")
        self.hashes = self._extended() if self.path.exists() else {}

    def _extended(self) -> dict[str, str]:
        """The sha256 of each group in the file that is there."""
        try:
            with h5py.File(self.path, "r") as file:
                made, hashes = file.attrs["made"], {key: group.attrs["sha256"] for key, group in file.items()}
        except (OSError, KeyError) as error:
            raise ValueError(f"will not replace {str(self.path)!r}: it is not a file of features") from error
        if made != self.made:
            was, now = json.loads(made), json.loads(self.made)
            told = ", ".join(
                f"{k} {was.get(k)!r}, not {now.get(k)!r}" for k in {**was, **now} if was.get(k) != now.get(k)
            )
            raise ValueError(f"will not replace {str(self.path)!r}: it was made with {told}; name another file")
        return hashes

    def __enter__(self) -> Self:
        made = self.part / "made.json"
        if self.part.exists() and not self.part.is_dir():
            self.part.unlink()
        self.part.mkdir(exist_ok=True)
        self.lock = self._locked()
        if not (made.is_file() and made.read_text(encoding="utf-8") == self.made):
            for old in self.part.glob("*.h5"):
                old.unlink()
        with atomic(made) as path:
            path.write_text(self.made, encoding="utf-8")
        for shard in self.part.glob(SHARDS):
            with h5py.File(shard, "r") as file:
                self.hashes.update((key, group.attrs["sha256"]) for key, group in file.items())
        return self

    def _locked(self) -> IO[str]:
        """A lock that ends with this process, however it ends: two runs would empty each other's folder."""
        lock = (self.part / "lock").open("w")
        try:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # not a POSIX system
            pass
        except OSError as error:
            lock.close()
            raise ValueError(f"another run is writing {str(self.path)!r}; wait for it or name another file") from error
        return lock

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._assemble()
        if kind is None or issubclass(kind, Exception):
            shutil.rmtree(self.part)
        self.lock.close()

    def _assemble(self) -> None:
        """The new file: the images of the old one, those done again replaced, and the new ones."""
        sources = [*self.part.glob(SHARDS), *([self.path] if self.path.exists() else [])]
        with atomic(self.path) as path, h5py.File(path, "w") as file:
            file.attrs["made"] = self.made
            for source in sources:
                with h5py.File(source, "r") as done:
                    for key in done.keys() - file.keys():
                        done.copy(key, file)

    def __len__(self) -> int:
        return len(self.hashes)

    def has(self, name: str, sha256: str) -> bool:
        """Whether ``name`` is there already, made from a file with this content."""
        return self.hashes.get(_key(name)) == sha256

    def add(self, name: str, features: Features, sha256: str) -> None:
        """Store the features of one image; safe from the moment this returns."""
        key = _key(name)
        shard = self.part / f"{hashlib.sha256(key.encode()).hexdigest()}.h5"  # a path may be too long for a file name
        with atomic(shard) as path, h5py.File(path, "w") as file:
            group = file.create_group(key)
            group.attrs.update(size=features.size, pixel=features.pixel, sha256=sha256)
            for array in ARRAYS:
                value = getattr(features, array)
                if value is not None:
                    group[array] = value.detach().float().cpu().numpy()
        self.hashes[key] = sha256


def _key(name: str) -> str:
    return quote(os.fsencode(name), safe="")


def read_names(path: str | os.PathLike[str]) -> list[str]:
    """The image names in a feature file, sorted."""
    with h5py.File(path, "r") as file:
        return sorted(os.fsdecode(unquote_to_bytes(key)) for key in file)


def read_features(path: str | os.PathLike[str], name: str) -> Features:
    """The features of image ``name``; ``KeyError`` when the file has none of it."""
    with h5py.File(path, "r") as file:
        if _key(name) not in file:
            raise KeyError(f"{os.fspath(path)!r} has no features of {name!r}")
        group = file[_key(name)]
        arrays = {array: torch.from_numpy(group[array][:]) for array in ARRAYS if array in group}
        h, w = (int(side) for side in group.attrs["size"])
        return Features(**arrays, size=(h, w), pixel=float(group.attrs["pixel"]))
