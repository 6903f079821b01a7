"""Images: the one place where they are decoded and converted.

An image is a float32 tensor ``[3, h, w]``, RGB in [0, 1], as a person sees it: the EXIF orientation is applied,
transparency lies on white paper, 16-bit values keep their 16 bits, an animation shows its first frame. Colour profiles
are not applied. Sizes and scales are ``(h, w)``, points ``(x, y)``; the first pixel has its centre at (0.0, 0.0).
"""

from __future__ import annotations

import os
import re
import stat
import threading
import warnings
from typing import IO, Any, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor

MAX_PIXELS = 200_000_000
MINIMUM_SIDE = 16  # pixels; a smaller picture is all border to an extractor

# Tried in this order. Not every format of Pillow: EPS would run Ghostscript, others have no signature to be known by.
FORMATS = ("JPEG", "PNG", "TIFF", "WEBP", "BMP", "GIF", "PPM", "JPEG2000", "AVIF")
CHANNELS = (1, 3, 4)  # grey, RGB, RGB with alpha
SLACK = 1e-4  # how far rounding may carry a float image out of [0, 1]; such values are clamped


class ImageError(ValueError):
    """An image that cannot be used; the message is one line that names it and says why."""


# --- from a file ------------------------------------------------------------------------------------------------------


def read_image(path: str | os.PathLike[str], *, max_pixels: int = MAX_PIXELS) -> Tensor:
    """The picture in a file, float32 ``[3, h, w]``; ``ImageError`` for anything but one whole, supported image file.

    The size is held against ``max_pixels`` before a pixel is decoded. A truncated file is refused, not filled with grey
    (unless the host program has set Pillow's own ``LOAD_TRUNCATED_IMAGES``). Several threads may read at once.
    """
    name = os.fspath(path)
    try:
        mode = os.stat(name).st_mode
        if not stat.S_ISREG(mode):
            raise ImageError("it is a folder" if stat.S_ISDIR(mode) else "it is not a regular file")
        with _QUIET, open(name, "rb") as file:
            return _picture(*_decode(file, max_pixels))
    except Exception as error:  # a damaged file can lead Pillow's plugins into any exception at all
        raise ImageError(f"cannot read image {name!r}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """One line that says what happened, for a person."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    if isinstance(error, MemoryError):
        return "there is not enough memory to decode it"
    detail = " ".join(str(error).split()) or type(error).__name__
    return detail if isinstance(error, ImageError) else f"it is damaged or of an unsupported kind ({detail})"


def _decode(file: IO[bytes], max_pixels: int) -> tuple[np.ndarray, float]:
    """The upright pixels ``[h, w]`` or ``[h, w, c]`` of an open file, and the value that means white."""
    image = _identify(file)
    _check_pixels(image.height, image.width, max_pixels)
    raw = [_raw_mode(tile) for tile in image.tile]
    bits, planar = _tiff_tag(image, 258, 8), _tiff_tag(image, 284, 1) == 2
    if planar and bits == 16:
        raise ImageError("TIFF with 16-bit values in separate colour planes is not supported")  # Pillow garbles it
    image.load()
    if raw and all(_DEEP.fullmatch(mode) for mode in raw):
        high, low = np.asarray(image), np.asarray(_swapped(_identify(file)))
        array, white = high.astype(np.uint16) << 8 | low, 65535.0
    else:
        array, white = _pixels(image)
    return _upright(array, _orientation(image)), white


def _identify(file: IO[bytes]) -> Any:
    """The Pillow image of an open file, header read, nothing decoded.

    ``Image.open`` would do, but for its limit on size: a module global that warns, or raises, as it sees fit.
    """
    file.seek(0)
    prefix = file.read(16)
    if not prefix:
        raise ImageError("the file is empty")
    Image.init()
    for name in FORMATS:
        factory, accept = Image.OPEN.get(name, (None, None))
        accepted = accept(prefix) if factory and accept else False
        if isinstance(accepted, str):
            raise ImageError(accepted)  # the format is known, its codec is not installed
        if factory and accepted:
            file.seek(0)
            return factory(file, "")
    raise ImageError(f"it is not an image in a known format ({', '.join(FORMATS)})")


def _check_pixels(h: int, w: int, max_pixels: int) -> None:
    if h * w > max_pixels:
        raise ImageError(f"it has {w} x {h} pixels, more than the limit of {max_pixels}")


# Pillow has no 16-bit colour: it keeps the high byte of each value. Decoding once more, with the two bytes named in the
# other order, gives the low one. (Premultiplied and grey-with-alpha files have no such twin and stay at 8 bits.)
_DEEP = re.compile(r"(RGB|RGBA|RGBX);16[BLN]")
_OTHER_ORDER = {"B": "L", "L": "B", "N": "B" if np.little_endian else "L"}


def _raw_mode(tile: Any) -> str:
    """How the samples of a Pillow tile lie in the file, such as ``RGB;16B``."""
    mode = tile[3] if isinstance(tile[3], str) else tile[3][0] if tile[3] else ""
    return mode if isinstance(mode, str) else ""


def _swapped(image: Any) -> Any:
    """The same undecoded image, which will read the two bytes of each 16-bit sample in the other order."""
    for i, tile in enumerate(image.tile):
        mode = _raw_mode(tile)
        swapped = mode[:-1] + _OTHER_ORDER[mode[-1]]
        args = swapped if isinstance(tile[3], str) else (swapped, *tile[3][1:])
        image.tile[i] = tile._replace(args=args) if hasattr(tile, "_replace") else (*tile[:3], args)
    return image


def _tiff_tag(image: Any, tag: int, default: int) -> int:
    value = getattr(image, "tag_v2", {}).get(tag, default)
    return value[0] if isinstance(value, tuple) else value


class _Quiet:
    """While a thread is inside, Pillow's remarks about odd metadata stay unsaid.

    ``warnings.catch_warnings`` restores what it found on entry, which goes wrong when threads overlap. This one adds
    a filter for Pillow's modules when the first thread enters, and takes it away when the last leaves.
    """

    pattern = r"PIL\.(?#while vispe reads an image)"

    def __init__(self) -> None:
        self.lock, self.threads = threading.Lock(), 0

    def __enter__(self) -> None:
        with self.lock:
            self.threads += 1
            if self.threads == 1:
                warnings.filterwarnings("ignore", module=self.pattern)

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.threads -= 1
            if self.threads == 0:
                filters = cast("list[Any]", warnings.filters)
                filters[:] = [item for item in filters if getattr(item[3], "pattern", None) != self.pattern]


_QUIET = _Quiet()


# --- from Pillow ------------------------------------------------------------------------------------------------------


def _pixels(image: Image.Image) -> tuple[np.ndarray, float]:
    """The pixels ``[h, w]`` or ``[h, w, 3|4]`` of a Pillow image of any mode, and the value that means white."""
    if image.mode.startswith("I;16"):
        array, white = np.asarray(image), 2.0 ** _tiff_tag(image, 258, 16) - 1  # 12-bit TIFF has white at 4095
        return (array if _tiff_tag(image, 262, 1) else white - array), white  # photometric 0: white is zero
    if image.mode == "I" and image.format in ("PNG", "PPM"):
        return np.asarray(image), 65535.0
    if image.mode == "I":
        raise ImageError("it holds signed or 32-bit integers, which do not say what white is")
    if image.mode == "F":
        array = np.asarray(image)
        _check_range(torch.tensor(array), "its float values")
        return array, 1.0
    if image.has_transparency_data:
        return np.asarray(image.convert("RGBA")), 255.0
    if image.mode in ("1", "L"):
        return np.asarray(image.convert("L")), 255.0
    return np.asarray(image.convert("RGB")), 255.0


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation, 1 to 8; 1 when there is none, or none that can be read."""
    try:
        value = image.getexif().get(0x0112, 1)
    except Exception:  # damaged EXIF does not spoil a picture
        return 1
    return value if value in range(1, 9) else 1


def _upright(array: np.ndarray, orientation: int) -> np.ndarray:
    """The stored pixels ``[h, w, ...]`` turned and mirrored to be seen; the eight values of the EXIF standard."""
    if orientation >= 5:
        array = array.swapaxes(0, 1)
    if orientation in (2, 3, 6, 7):
        array = array[:, ::-1]
    if orientation in (3, 4, 7, 8):
        array = array[::-1]
    return array


# --- from memory ------------------------------------------------------------------------------------------------------


def as_image(source: object, *, max_pixels: int = MAX_PIXELS) -> Tensor:
    """Whatever a caller has, as a new float32 ``[3, h, w]``; ``ImageError`` names what it got when that is no image.

    A path is read. A Pillow image is turned upright by its EXIF. A numpy array is ``[h, w]`` or ``[h, w, 1|3|4]``, a
    tensor ``[1|3|4, h, w]``; uint8 and (numpy) uint16 span their range, floats lie in [0, 1]; channels are RGB or RGBA.
    Nothing can tell BGR from RGB: frames of OpenCV go through ``from_bgr_uint8``.
    """
    if isinstance(source, str | os.PathLike):
        return read_image(source, max_pixels=max_pixels)
    if isinstance(source, Image.Image):
        return _from_pillow(source, max_pixels)
    if isinstance(source, np.ndarray):
        return _from_numpy(source, max_pixels)
    if isinstance(source, Tensor):
        return _from_torch(source, max_pixels)
    raise ImageError(
        f"an image is a path, a Pillow image, a numpy array or a torch tensor, not {type(source).__name__}"
    )


def from_bgr_uint8(frame: np.ndarray) -> Tensor:
    """A frame of OpenCV, uint8 ``[h, w]`` (grey) or ``[h, w, 3|4]`` (BGR, BGRA), as float32 ``[3, h, w]`` RGB."""
    if not isinstance(frame, np.ndarray) or frame.dtype != np.uint8:
        raise ImageError(f"a BGR frame is a numpy array of uint8, not {getattr(frame, 'dtype', type(frame).__name__)}")
    if frame.ndim == 3 and frame.shape[2] in (3, 4):
        frame = frame[..., [2, 1, 0, 3][: frame.shape[2]]]
    return _from_numpy(frame, MAX_PIXELS)


def _from_pillow(image: Image.Image, max_pixels: int) -> Tensor:
    try:
        _check_pixels(image.height, image.width, max_pixels)
        with _QUIET:
            image.load()
            array, white = _pixels(image)
            return _picture(_upright(array, _orientation(image)), white)
    except Exception as error:
        raise ImageError(f"cannot use the Pillow image: {_reason(error)}") from error


def _from_numpy(array: np.ndarray, max_pixels: int) -> Tensor:
    got = f"a numpy array {array.dtype}{list(array.shape)}"
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in CHANNELS) or 0 in array.shape:
        hint = "; transpose(1, 2, 0) puts the channels last" if array.ndim == 3 and array.shape[0] in CHANNELS else ""
        raise ImageError(f"a numpy image is [h, w] or [h, w, 1|3|4], got {got}{hint}")
    _check_pixels(array.shape[0], array.shape[1], max_pixels)
    if array.dtype in (np.uint8, np.uint16):
        return _picture(array, float(np.iinfo(array.dtype).max))
    if array.dtype.kind != "f":
        raise ImageError(f"a numpy image is uint8, uint16 or float, got {got}")
    image = torch.from_numpy(array.astype(np.float32))
    _check_range(image, f"the values of {got}")
    return _picture(image.clamp_(0, 1).numpy(), 1.0)


def _from_torch(tensor: Tensor, max_pixels: int) -> Tensor:
    got = f"a torch tensor {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    if tensor.ndim != 3 or tensor.shape[0] not in CHANNELS or 0 in tensor.shape:
        hint = "; permute(2, 0, 1) puts the channels first" if tensor.ndim == 3 and tensor.shape[2] in CHANNELS else ""
        hint = "; pass the images of a batch one by one" if tensor.ndim == 4 else hint
        raise ImageError(f"a torch image is [1|3|4, h, w], got {got}{hint}")
    _check_pixels(tensor.shape[1], tensor.shape[2], max_pixels)
    if tensor.dtype != torch.uint8 and not tensor.is_floating_point():
        raise ImageError(f"a torch image is uint8 or float, got {got}")
    image = tensor.detach().to(torch.float32, copy=True).contiguous()
    if tensor.dtype == torch.uint8:
        return _rgb(image.div_(255.0))
    _check_range(image, f"the values of {got}")
    return _rgb(image.clamp_(0, 1))


def _check_range(image: Tensor, what: str) -> None:
    low, high = (float(value) for value in image.aminmax())
    if not (low >= -SLACK and high <= 1 + SLACK):  # false for NaN too, which aminmax passes on
        raise ImageError(
            f"{what} must lie in [0, 1], but " + ("hold NaN" if low != low else f"span {low:g} to {high:g}")
        )


def _picture(array: np.ndarray, white: float) -> Tensor:
    """Pixels ``[h, w]`` or ``[h, w, 1|3|4]`` whose white is ``white`` as a new float32 ``[3, h, w]``."""
    array = array[..., None] if array.ndim == 2 else array
    array = np.array(array, dtype=np.uint8 if array.dtype == np.uint8 else np.float32, order="C")  # always a copy
    return _rgb(torch.from_numpy(array).permute(2, 0, 1).contiguous().to(torch.float32).div_(white))


def _rgb(image: Tensor) -> Tensor:
    """``[1|3|4, h, w]`` to ``[3, h, w]``: grey is repeated, transparency shows white paper."""
    if image.shape[0] == 1:
        return image.repeat(3, 1, 1)
    if image.shape[0] == 4:
        colour, alpha = image[:3], image[3:]
        return colour * alpha + (1 - alpha)
    return image


# --- size and shape ---------------------------------------------------------------------------------------------------


def check_size(h: int, w: int, name: str) -> None:
    """``ImageError`` when a side is shorter than ``MINIMUM_SIDE`` pixels."""
    if min(h, w) < MINIMUM_SIDE:
        raise ImageError(f"image {name!r} is {w} x {h} pixels; each side must have at least {MINIMUM_SIDE}")


def image_size(image: Tensor) -> tuple[int, int]:
    """(h, w) of ``[..., h, w]``."""
    return image.shape[-2], image.shape[-1]


def to_grey(image: Tensor) -> Tensor:
    """``[3, h, w]`` to ``[1, h, w]``: luma with the weights of Rec. 601, as in kornia's ``rgb_to_grayscale``."""
    if image.ndim != 3 or image.shape[0] != 3:
        raise ImageError(f"a colour image is [3, h, w], got {list(image.shape)}")
    return 0.299 * image[:1] + 0.587 * image[1:2] + 0.114 * image[2:]
