"""Photographs beside themselves turned, shrunk, blurred, noisy or dark: pairs whose homography is exact, by a seed.

Image 0 is the centre of a photograph, pixel for pixel, a square of ``size`` or of the photograph's short side. A larger
photograph is first reduced so that its short side is sqrt(2) of that: then no turn leaves it. Image 1 is always drawn
from the photograph, never from image 0, and rounded to 8 bits once.

Beyond its edges a photograph goes on as its mirror image, ever more blurred. Black corners would tell the angle, and
their edges hold keypoints; sharp mirror images hold copies of what is to be found, two of which make a turn by half.

- rotation: about the centre, counter-clockwise; 0 is image 0 itself, and 90 and 180 are ``np.rot90`` to the bit.
- scale: image 1 sees so many times more, so that the photograph is that much smaller in it. The other way round, four
  times larger, would ask a 512-pixel photograph for detail that it does not have. Before it shrinks it is blurred to
  the 0.5 pixel of a camera that Lowe (2004, section 3.2) assumes of every image: else aliasing would be measured.
- blur, noise, light: the four corners of image 1 have moved by up to 8 % of its side, as in DeTone et al. (2016), by
  less than what troubles a matcher. Without it a match of equal places would be right: so would a matcher that knows
  only positions, or keypoints that stick to the pixel grid. The move is the photograph's, the same at all levels.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vispe.data.pairs import Pair, PairSet
from vispe.files import write_atomically
from vispe.geometry.homography import Array, warp_points
from vispe.progress import track

Image = NDArray[np.float32]  # [h, w, 3] in [0, 1]

RECIPE = 1  # raised whenever the same words give other pixels
MARK = "vispe stress"  # where a PNG keeps the sha256 of what it was made from
MINIMUM = 64  # pixels of a side of image 0
MOVED = 0.08  # of the side: how far a corner moves at most, right and down
FADING, FAR = 1 / 16, 1 / 6  # of the side: where only blur is left beyond a photograph; the sigma of that blur
CAMERA = 0.5  # pixels: the sigma of the blur that any image has
GAMMA = 2.2  # of stored values: light is their power
ELECTRONS = 2000  # that a white pixel counts in full light, as the small pixel of a telephone does


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What is made harder: what its axis is called, the digits of a level in a group's name, the levels."""

    axis: str
    digits: str
    small: tuple[float, ...]
    full: tuple[float, ...]


KINDS = {
    "rotation": Kind(
        axis="rotation, degrees",
        digits="03.0f",
        small=(0, 15, 30, 45, 60, 90, 135, 180),
        full=tuple(range(0, 181, 15)),
    ),
    "scale": Kind(
        axis="times smaller", digits="4.2f", small=(1, 1.5, 2, 3, 4), full=(1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4)
    ),
    "blur": Kind(axis="blur, sigma in pixels", digits="3.1f", small=(0, 1, 2, 4), full=(0, 0.5, 1, 1.5, 2, 3, 4, 6)),
    "noise": Kind(
        axis="noise, sigma where white is 1",
        digits="4.2f",
        small=(0, 0.1, 0.2, 0.4),
        full=(0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4),
    ),
    "light": Kind(
        axis="share of full light",
        digits="5.3f",
        small=(1, 0.1, 0.01, 0.003),
        full=(1, 0.3, 0.1, 0.03, 0.01, 0.005, 0.003, 0.002),
    ),
}
PHOTOGRAPHS = (  # inside scikit-image's wheel; those of "small" first
    "astronaut", "camera", "chelsea", "coffee", "stereo_motorcycle", "brick", "clock", "coins", "grass", "gravel",
    "hubble_deep_field", "immunohistochemistry", "moon", "retina", "rocket",
)  # fmt: skip
SETTINGS = {"small": 5, "full": None}  # photographs


def stress(
    out: str | os.PathLike[str],
    images: str | os.PathLike[str] | None = None,
    *,
    kinds: Sequence[str] = tuple(KINDS),
    setting: str = "small",
    size: int = 480,
    seed: int = 0,
    limit: int | None = None,
) -> PairSet:
    """Pairs of every photograph at every level, grouped as in ``"rotation 030"``; their images are written to ``out``.

    ``images``: a folder of photographs, else those of scikit-image. ``limit``: photographs at most, the first by name;
    None is 5 for ``small``, all for ``full``. Images that lie in ``out`` and were made of the same are kept, so that a
    second call writes nothing and one that was stopped goes on. ``ValueError`` names what cannot be used.
    """
    _check(kinds, setting, size, seed, limit)
    folder = Path(out)
    found = _skimage() if images is None else _folder(Path(images), folder)
    taken = found[: SETTINGS[setting] if limit is None else limit]
    groups = [(kind, level) for kind in dict.fromkeys(kinds) for level in getattr(KINDS[kind], setting)]
    pairs = []
    for make in track(taken, "drawing", "photographs"):
        pairs += _pairs(make(size), folder, groups, size, seed)
    what = "of scikit-image" if images is None else f"of {len(found)}"
    note = f"{setting}, {len(taken)} photograph{'s' * (len(taken) > 1)} {what}, {size} pixels, seed {seed}"
    return PairSet(name="stress", root=folder, pairs=tuple(pairs), note=note)


def group_name(kind: str, level: float) -> str:
    """``"rotation 030"``, ``"light 0.100"``: in the order of levels when sorted."""
    return f"{kind} {level:{KINDS[kind].digits}}"


def parse_group(group: str) -> tuple[str, float]:
    """``"rotation 030" -> ("rotation", 30.0)``; ``ValueError`` for what is no group of this benchmark."""
    kind, _, number = group.partition(" ")
    try:
        level = float(number)
        if kind in KINDS and 0 <= level < math.inf and group_name(kind, level) == group:
            return kind, level
    except ValueError:
        pass
    raise ValueError(f"{group!r} is no kind and level of the stress benchmark, such as 'rotation 030'")


def _check(kinds: Sequence[str], setting: str, size: int, seed: int, limit: int | None) -> None:
    if setting not in SETTINGS:
        raise ValueError(f"setting must be one of {', '.join(SETTINGS)}, got {setting!r}")
    if not kinds or isinstance(kinds, str):
        raise ValueError(f"kinds are some of {', '.join(KINDS)}, got {kinds!r}")
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"a kind must be one of {', '.join(KINDS)}, got {kind!r}")
    for name, value, least in (("size", size, MINIMUM), ("seed", seed, 0), ("limit", limit, 1)):
        if value is not None and (type(value) is not int or value < least):
            raise ValueError(f"{name} is a whole number from {least} on, got {value!r}")


# --- photographs ------------------------------------------------------------------------------------------------------


class Photograph:
    """A photograph that is decoded when it is first drawn from. ``content`` is the sha256 of what ``read`` gives."""

    def __init__(self, name: str, content: str, read: Callable[[], Any], size: int) -> None:
        self.name, self.content, self.read, self.size = name, content, read, size

    @cached_property
    def pixels(self) -> Image:
        """Its short side is at most sqrt(2) of the size."""
        from vispe.data.resizing import resize

        image = self.read()
        if min(image.shape[1:]) < self.size / 2:
            raise ValueError(
                f"{self.name!r} is {image.shape[2]} x {image.shape[1]} pixels: for images of {self.size} pixels a "
                f"photograph needs at least {math.ceil(self.size / 2)} on its short side"
            )
        short = math.ceil(math.sqrt(2) * self.size)
        if min(image.shape[1:]) > short:
            image, _ = resize(image, short, side="short")
        return np.ascontiguousarray(image.permute(1, 2, 0).numpy())

    @property
    def side(self) -> int:
        """Of image 0."""
        return min(self.size, *self.pixels.shape[:2])

    @cached_property
    def far(self) -> Image:
        """What is left of it far beyond its edges."""
        return _blurred(self.pixels, FAR * self.side)

    def seen(self, homography: Array, scale: float = 1.0) -> Image:
        """``[side, side, 3]``: image 1, its ``H_0to1`` given; ``scale``: how many pixels of image 0 go into one."""
        h, w = self.pixels.shape[:2]
        v, u = np.mgrid[: self.side, : self.side].reshape(2, -1)
        xy = warp_points(np.linalg.inv(homography), np.stack([u, v], 1))
        xy += (w - self.side) // 2, (h - self.side) // 2
        near = self.pixels if scale <= 1 else _blurred(self.pixels, CAMERA * math.sqrt(scale**2 - 1))
        image = _sampled(near, xy)
        beyond = np.hypot(*np.maximum(np.abs(xy - ((w - 1) / 2, (h - 1) / 2)) - (w / 2, h / 2), 0).T)
        outside = beyond > 0
        share = np.clip(beyond[outside, None] / (FADING * self.side), 0, 1).astype(np.float32)
        share = share**2 * (3 - 2 * share)
        image[outside] += share * (_sampled(self.far, xy[outside]) - image[outside])
        return image.reshape(self.side, self.side, 3).clip(0, 1)


Maker = Callable[[int], Photograph]  # of the size


def photograph(name: str) -> NDArray[Any]:
    """The pixels of one of ``PHOTOGRAPHS``; of a stereo pair the left. ``ValueError`` without scikit-image."""
    try:
        import skimage.data as data
    except ImportError as error:
        raise ValueError("the photographs come with scikit-image: pip install 'vispe[demo]'") from error
    found = getattr(data, name)()
    return np.ascontiguousarray(found[0] if isinstance(found, tuple) else found)


def _skimage() -> list[Maker]:
    def make(name: str, size: int) -> Photograph:
        from vispe.data.images import as_image

        array = photograph(name)
        return Photograph(name, hashlib.sha256(array.tobytes()).hexdigest(), partial(as_image, array), size)

    return [partial(make, name) for name in PHOTOGRAPHS]


def _folder(images: Path, out: Path) -> list[Maker]:
    """The images below a folder; ``out`` must not be there, or its images would be photographs the next time."""
    from vispe.data.images import read_image
    from vispe.data.sources import folder_files

    if not images.is_dir():
        raise ValueError(f"there is no folder {str(images)!r}")
    if out.resolve().is_relative_to(images.resolve()):
        raise ValueError(f"the images cannot be written into the folder of photographs: {str(out)!r}")
    names = folder_files(images).paths
    if not names:
        raise ValueError(f"there are no images in {str(images)!r}")

    def make(name: str, size: int) -> Photograph:
        try:
            content = hashlib.sha256((images / name).read_bytes()).hexdigest()
        except OSError as error:
            raise ValueError(f"cannot read image {str(images / name)!r}: {error.strerror}") from error
        return Photograph(name, content, partial(read_image, images / name), size)

    return [partial(make, name) for name in names]


def _blurred(image: Image, sigma: float) -> Image:
    """A Gaussian of ``sigma`` pixels; beyond its edges the image is mirrored."""
    import cv2

    return np.asarray(cv2.GaussianBlur(image, (0, 0), sigma, borderType=cv2.BORDER_REFLECT), np.float32)


def _sampled(image: Image, xy: Array) -> Image:
    """``[n, 3]`` at points ``[n, 2]``, by cubic convolution; beyond its edges the image is mirrored.

    a = -1/2 (Keys 1981), where a straight ramp stays one. With the -3/4 of torch and OpenCV edges move by up to 0.05
    pixels, and OpenCV rounds places to 1/32.
    """
    h, w = image.shape[:2]
    flat, low = image.reshape(-1, 3), np.floor(xy).astype(np.int64)
    (wx, wy), (x, y) = _cubic((xy - low).T), low.T
    columns = [_mirrored(x + i - 1, w) for i in range(4)]
    out = np.zeros((len(xy), 3), np.float32)
    for j in range(4):
        row = _mirrored(y + j - 1, h) * w
        for i in range(4):
            out += (wx[i] * wy[j])[:, None] * flat.take(row + columns[i], axis=0)
    return out


def _cubic(t: Array) -> NDArray[np.float32]:
    """``[2, n]``, how far from the pixel before, to ``[2, 4, n]``, the weights of the four around."""
    d = np.abs(t[:, None] - np.array([-1, 0, 1, 2])[:, None])
    near, far = (1.5 * d - 2.5) * d**2 + 1, ((-0.5 * d + 2.5) * d - 4) * d + 2
    return np.where(d <= 1, near, far).astype(np.float32)


def _mirrored(i: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    i = i % (2 * n)
    return np.minimum(i, 2 * n - 1 - i)


# --- pairs ------------------------------------------------------------------------------------------------------------


def _pairs(photo: Photograph, out: Path, groups: Sequence[tuple[str, float]], size: int, seed: int) -> list[Pair]:
    """The pairs of a photograph; what of their images is not there yet is written."""
    first = f"{photo.name}/0.png"
    side = _keep(out / first, _mark(photo, size), lambda: photo.seen(np.eye(3)))
    pairs = []
    for kind, level in groups:
        group, homography = group_name(kind, level), _homography(kind, level, side, _draw(photo, seed))
        other = f"{photo.name}/{group.replace(' ', '_')}.png"
        _keep(out / other, _mark(photo, size, seed, group), partial(_altered, photo, homography, kind, level, seed))
        pairs.append(Pair(image0=first, image1=other, group=group, homography=homography))
    return pairs


def _homography(kind: str, level: float, side: int, draw: np.random.Generator) -> Array:
    """``H_0to1 [3, 3]``."""
    centre = (side - 1) / 2
    if kind == "rotation":
        cos, sin = math.cos(math.radians(level)), math.sin(math.radians(level))
        about = np.array([[cos, sin, 0], [-sin, cos, 0], [0, 0, 1]])  # y points down
    elif kind == "scale":
        about = np.diag([1 / level, 1 / level, 1])
    else:
        corners = np.array([[0, 0], [1, 0], [1, 1], [0, 1]]) * side - 0.5
        return _through(corners, corners + draw.uniform(-MOVED, MOVED, (4, 2)) * side)
    there, back = np.eye(3), np.eye(3)
    there[:2, 2], back[:2, 2] = centre, -centre
    return there @ about @ back


def _through(corners: Array, moved: Array) -> Array:
    """The homography ``[3, 3]`` of four points, its last number 1: two equations a point in the eight others."""
    rows = np.zeros((4, 2, 8))
    rows[:, 0, :2] = rows[:, 1, 3:5] = corners
    rows[:, 0, 2] = rows[:, 1, 5] = 1
    rows[:, :, 6:] = -moved[:, :, None] * corners[:, None]
    return np.append(np.linalg.solve(rows.reshape(8, 8), moved.ravel()), 1).reshape(3, 3)


def _altered(photo: Photograph, homography: Array, kind: str, level: float, seed: int) -> Image:
    """Image 1 before it is rounded."""
    image, draw = photo.seen(homography, level if kind == "scale" else 1.0), _draw(photo, seed, group_name(kind, level))
    if kind == "blur" and level > 0:
        return _blurred(image, level)
    if kind == "noise":
        return image + np.float32(level) * draw.standard_normal(image.shape, np.float32)
    if kind == "light" and level < 1:
        counted = draw.poisson(image.astype(np.float64) ** GAMMA * level * ELECTRONS) / ELECTRONS
        return (counted ** (1 / GAMMA)).astype(np.float32)
    return image


def _draw(photo: Photograph, seed: int, group: str = "") -> np.random.Generator:
    """The same numbers for the same seed, content and group, whatever other photographs there are."""
    whole = hashlib.sha256(f"{seed} {photo.content} {group}".encode()).digest()
    return np.random.default_rng(int.from_bytes(whole, "big"))


def _mark(photo: Photograph, *words: object) -> str:
    return hashlib.sha256(json.dumps([RECIPE, photo.content, *words]).encode()).hexdigest()


def _keep(path: Path, mark: str, make: Callable[[], Image]) -> int:
    """The side of the image in a file, which is made unless it is there and bears the mark."""
    from PIL import Image as Pillow
    from PIL.PngImagePlugin import PngInfo

    try:
        with Pillow.open(path) as there:
            if there.info.get(MARK) == mark:
                return there.width
    except Exception:  # none there, or none that can be read: whatever the reason, it is made again
        pass
    pixels = np.rint(make() * 255).clip(0, 255).astype(np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    note = PngInfo()
    note.add_text(MARK, mark)
    write_atomically(path, lambda temporary: Pillow.fromarray(pixels).save(temporary, format="PNG", pnginfo=note))
    return len(pixels)
