"""Where images are: files below a folder, members of a zip, pixels in memory, a torchvision data set.

All answer the same four questions (``Source``), and all may be asked by several threads and worker processes at once.
"""

from __future__ import annotations

import io
import os
import threading
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from PIL import Image
from torch import Tensor

from vispe.data.images import ImageError, as_image, read_image

SUFFIXES = (".jpg", ".jpeg", ".png", ".tif", ".tiff", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".jp2", ".avif")


class Source(Protocol):
    """Where the bytes are. ``stamp`` changes when the bytes do: what is known of them is cached under it."""

    def __len__(self) -> int: ...
    def name(self, k: int) -> str: ...
    def stamp(self, k: int) -> str: ...
    def read(self, k: int) -> Tensor:
        """Image ``k`` as float32 ``[3, h, w]`` in [0, 1]; ``ImageError`` names it."""


class Files:
    """Image files below a folder."""

    def __init__(self, root: Path, paths: Sequence[str]) -> None:
        self.root, self.paths = root, list(paths)

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, k: int) -> str:
        return os.fspath(self.root / self.paths[k])

    def stamp(self, k: int) -> str:
        state = os.stat(self.root / self.paths[k])
        return f"{state.st_size}-{state.st_mtime_ns}"

    def read(self, k: int) -> Tensor:
        return read_image(self.root / self.paths[k])


def folder_files(root: str | os.PathLike[str]) -> Files:
    """Every image below ``root``, in the order of their names; hidden files are passed over."""
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise ValueError(f"there is no folder or zip {str(root)!r}")
    found = []
    for where, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(where, name).relative_to(folder).as_posix() for name in names if _is_image(name)]
    return Files(folder, sorted(found))


class ZipFiles:
    """Image files inside a zip, read without unpacking it. Each process opens it for itself."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.fspath(root)
        with zipfile.ZipFile(root) as archive:
            infos = sorted((i for i in archive.infolist() if _is_image(i.filename)), key=lambda i: i.filename)
        self.paths, self._crc = [info.filename for info in infos], [info.CRC for info in infos]
        self._lock, self._open = threading.Lock(), (0, None)

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, k: int) -> str:
        return f"{self.root}:{self.paths[k]}"

    def stamp(self, k: int) -> str:
        return f"{self._crc[k]:08x}"

    def read(self, k: int) -> Tensor:
        try:
            with self._lock:
                data = self._archive().read(self.paths[k])
            return as_image(Image.open(io.BytesIO(data)))
        except (ImageError, OSError, zipfile.BadZipFile, SyntaxError, Image.DecompressionBombError) as error:
            raise ImageError(f"cannot read image {self.name(k)!r}: {error}") from None

    def _archive(self) -> zipfile.ZipFile:
        process, archive = self._open
        if process != os.getpid() or archive is None:
            archive = zipfile.ZipFile(self.root)
            self._open = (os.getpid(), archive)  # type: ignore[assignment]
        return archive

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None, "_open": (0, None)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())


class Pixels:
    """Images of one size in memory: uint8 ``[n, 1|3, h, w]``."""

    def __init__(self, pixels: Tensor, title: str) -> None:
        self.pixels, self.title = pixels, title

    def __len__(self) -> int:
        return len(self.pixels)

    def name(self, k: int) -> str:
        return f"{self.title}[{k}]"

    def stamp(self, k: int) -> str:
        return "memory"

    def read(self, k: int) -> Tensor:
        return self.pixels[k].expand(3, -1, -1).float() / 255


class Torchvision:
    """A torchvision data set that gives Pillow images."""

    def __init__(self, dataset: Any, title: str) -> None:
        self.dataset, self.title = dataset, title

    def __len__(self) -> int:
        return len(self.dataset)

    def name(self, k: int) -> str:
        return f"{self.title}[{k}]"

    def stamp(self, k: int) -> str:
        return f"{len(self)}"

    def read(self, k: int) -> Tensor:
        try:
            return as_image(self.dataset[k][0])
        except Exception as error:  # a damaged file leads decoders into any exception
            raise ImageError(f"cannot read image {self.name(k)!r}: {error}") from None


def _is_image(path: str) -> bool:
    name = path.rsplit("/", 1)[-1]
    return name.lower().endswith(SUFFIXES) and not name.startswith(".") and "__MACOSX" not in path
