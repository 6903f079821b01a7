"""Images: every kind of file reads as a person sees it, everything else is refused in one line, geometry is exact."""

import io
import os
import struct
import subprocess
import sys
import threading
import time
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile, features

from vispe.data.images import (
    ImageError,
    as_image,
    check_size,
    from_bgr_uint8,
    read_image,
    to_grey,
)

H, W = 40, 60


def scene(h=H, w=W):
    """Uint8 ``[h, w, 3]``: smooth, with four corners of different colours, so that codecs keep it and turns show."""
    y, x = np.mgrid[0:h, 0:w]
    return np.stack([255 * x / (w - 1), 255 * y / (h - 1), 128 + 0 * x], -1).round().astype(np.uint8)


def tensor(array, white=255):
    return torch.from_numpy(np.asarray(array, np.float32) / np.float32(white)).permute(2, 0, 1)


def near(image, expected, tolerance=1e-6):
    assert image.dtype == torch.float32
    assert image.is_contiguous()
    assert image.shape == expected.shape
    assert (image - expected).abs().max() <= tolerance


@pytest.fixture(autouse=True)
def silence(capfd):
    """No test here may print, and none may leave Pillow or the warning filters changed."""
    before = list(warnings.filters), Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    assert before == (list(warnings.filters), Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES)
    assert capfd.readouterr() == ("", "")


# --- files that are read ----------------------------------------------------------------------------------------------

LOSSY = 0.06
CODECS = {
    "jpg": ("JPEG", {"quality": 95, "subsampling": 0}, LOSSY, None),
    "progressive.jpg": ("JPEG", {"quality": 95, "subsampling": 0, "progressive": True}, LOSSY, None),
    "png": ("PNG", {}, 0, None),
    "tif": ("TIFF", {}, 0, None),
    "lzw.tif": ("TIFF", {"compression": "tiff_lzw"}, 0, "libtiff"),
    "deflate.tif": ("TIFF", {"compression": "tiff_deflate"}, 0, "libtiff"),
    "webp": ("WEBP", {"lossless": True}, 0, "webp"),
    "bmp": ("BMP", {}, 0, None),
    "ppm": ("PPM", {}, 0, None),
    "jp2": ("JPEG2000", {}, 0, "jpg_2000"),
    "avif": ("AVIF", {"quality": 100, "subsampling": "4:4:4"}, LOSSY, "avif"),
}


def save(path, name, image=None, **more):
    kind, options, _, feature = CODECS[name]
    if feature and not features.check(feature):
        pytest.skip(f"this Pillow has no {feature}")
    (image or Image.fromarray(scene())).save(path, kind, **options, **more)
    return path


@pytest.mark.parametrize("name", CODECS)
def test_every_format(tmp_path, name):
    near(read_image(save(tmp_path / "x", name)), tensor(scene()), CODECS[name][2])


TO_STORED = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("name", ["jpg", "png", "tif", "lzw.tif", "webp"])
def test_every_exif_orientation(tmp_path, name, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = Image.fromarray(scene())
    stored = stored.transpose(TO_STORED[orientation]) if orientation > 1 else stored
    path = save(tmp_path / "x", name, stored, exif=exif)
    near(read_image(path), tensor(scene()), CODECS[name][2])
    with Image.open(path) as image:
        near(as_image(image), tensor(scene()), CODECS[name][2])


@pytest.mark.parametrize("orientation", [0, 9, 6000])
def test_an_orientation_that_is_none_is_ignored(tmp_path, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    near(read_image(save(tmp_path / "x.png", "png", exif=exif)), tensor(scene()))


@pytest.mark.parametrize("exif", [b"Exif\0\0", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff", b"Exif\0\0" + b"\xff" * 50])
@pytest.mark.parametrize("name", ["jpg", "png", "webp"])
def test_damaged_exif_does_not_spoil_a_picture(tmp_path, name, exif):
    near(read_image(save(tmp_path / "x", name, exif=exif)), tensor(scene()), CODECS[name][2])


def png(array, colour):
    """A 16-bit PNG of ``[h, w, c]`` written by hand: colour type 0 grey, 2 RGB, 4 grey and alpha, 6 RGBA."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in array)
    header = struct.pack(">IIBBBBB", array.shape[1], array.shape[0], 16, colour, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def deep(channels, seed=0):
    return np.random.default_rng(seed).integers(0, 65536, (H, W, channels), dtype=np.uint16)


@pytest.mark.parametrize(("colour", "channels"), [(0, 1), (2, 3), (6, 4)])
def test_png_keeps_sixteen_bits(tmp_path, colour, channels):
    array = deep(channels)
    (tmp_path / "x.png").write_bytes(png(array, colour))
    expected = tensor(array, 65535)
    if channels == 4:
        expected = expected[:3] * expected[3:] + 1 - expected[3:]
    near(read_image(tmp_path / "x.png"), expected.expand(3, H, W))


def test_png_grey_with_alpha_is_read_to_eight_bits(tmp_path):
    array = deep(2)
    (tmp_path / "x.png").write_bytes(png(array, 4))
    grey, alpha = tensor(array, 65535)[:1], tensor(array, 65535)[1:]
    near(read_image(tmp_path / "x.png"), (grey * alpha + 1 - alpha).expand(3, H, W), 1.5 / 255)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("byteorder", ["<", ">"])
@pytest.mark.parametrize("options", [{}, {"compression": "deflate", "predictor": True}, {"tile": (16, 16)}])
def test_tiff_keeps_sixteen_bits(tmp_path, channels, byteorder, options):
    tifffile = pytest.importorskip("tifffile", reason="tifffile writes the 16-bit TIFF files")
    if "compression" in options and not features.check("libtiff"):
        pytest.skip("this Pillow has no libtiff")
    array = deep(channels)
    photometric = "rgb" if channels == 3 else "minisblack"
    data = array if channels == 3 else array[..., 0]
    tifffile.imwrite(tmp_path / "x.tif", data, photometric=photometric, byteorder=byteorder, **options)
    near(read_image(tmp_path / "x.tif"), tensor(array, 65535).expand(3, H, W))


def test_tiff_whose_white_is_zero(tmp_path):
    tifffile = pytest.importorskip("tifffile", reason="tifffile writes the 16-bit TIFF files")
    array = deep(1)
    tifffile.imwrite(tmp_path / "x.tif", array[..., 0], photometric="miniswhite")
    near(read_image(tmp_path / "x.tif"), 1 - tensor(array, 65535).expand(3, H, W))


def test_tiff_with_sixteen_bit_planes_is_refused(tmp_path):
    tifffile = pytest.importorskip("tifffile", reason="tifffile writes the 16-bit TIFF files")
    planes = np.moveaxis(deep(3), -1, 0)
    tifffile.imwrite(tmp_path / "x.tif", planes, photometric="rgb", planarconfig="separate")
    with pytest.raises(ImageError, match="separate colour planes is not supported"):
        read_image(tmp_path / "x.tif")


def test_deep_netpbm_grey(tmp_path):
    array = deep(1)
    (tmp_path / "x.pgm").write_bytes(b"P5 %d %d 65535\n" % (W, H) + array.astype(">u2").tobytes())
    near(read_image(tmp_path / "x.pgm"), tensor(array, 65535).expand(3, H, W))


@pytest.mark.parametrize(("low", "high", "good"), [(0, 1, True), (0, 255, False), (-1, 1, False), (0, np.nan, False)])
def test_float_tiff_must_lie_between_zero_and_one(tmp_path, low, high, good):
    array = np.full((H, W), low, np.float32)
    array[0, 0] = high
    Image.fromarray(array).save(tmp_path / "x.tif")
    if good:
        near(read_image(tmp_path / "x.tif"), torch.from_numpy(array).expand(3, H, W))
    else:
        with pytest.raises(ImageError, match=r"float values must lie in \[0, 1\]"):
            read_image(tmp_path / "x.tif")


def test_integers_without_a_white_are_refused(tmp_path):
    Image.fromarray(np.zeros((H, W), np.int32)).save(tmp_path / "x.tif")
    with pytest.raises(ImageError, match="do not say what white is"):
        read_image(tmp_path / "x.tif")


@pytest.mark.parametrize("name", ["png", "tif"])
@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "LA"])
def test_modes_read_as_pillow_shows_them(tmp_path, name, mode):
    image = Image.fromarray(scene()).convert(mode)
    near(read_image(save(tmp_path / "x", name, image)), tensor(np.asarray(image.convert("RGB"))))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "P", "gif", "RGB key", "L key"])
def test_transparency_shows_white_paper(tmp_path, mode):
    """Left half clear, right half opaque black, whatever says so."""
    rgba = np.zeros((H, W, 4), np.uint8)
    rgba[:, W // 2 :, 3] = 255
    path, image, options = tmp_path / "x.png", Image.fromarray(rgba), {}
    if mode in ("LA", "PA"):
        image, path = image.convert(mode), path.with_suffix(".tif" if mode == "PA" else ".png")
    elif mode in ("P", "gif", "RGB key", "L key"):
        grey = np.where(rgba[..., 3:] == 0, [[[200, 200, 200]]], [[[0, 0, 0]]]).astype(np.uint8)
        kind = {"P": "P", "gif": "P", "RGB key": "RGB", "L key": "L"}[mode]
        image = Image.fromarray(grey).convert(kind, dither=Image.Dither.NONE)
        pixel = image.getpixel((0, 0))
        options = {"transparency": bytes([0 if i == pixel else 255 for i in range(256)]) if mode == "P" else pixel}
        path = path.with_suffix(".gif") if mode == "gif" else path
    image.save(path, **options)
    expected = torch.ones(3, H, W)
    expected[:, :, W // 2 :] = 0
    near(read_image(path), expected)


def test_half_transparent_red_is_pink(tmp_path):
    Image.new("RGBA", (20, 20), (255, 0, 0, 51)).save(tmp_path / "x.png")
    near(read_image(tmp_path / "x.png")[:, 0, 0].clone(), torch.tensor([1.0, 0.8, 0.8]))


def test_cmyk_and_ycbcr_jpegs(tmp_path):
    for mode in ("CMYK", "YCbCr"):  # Pillow writes CMYK inverted, with Adobe's marker, as Photoshop does
        Image.fromarray(scene()).convert(mode).save(tmp_path / "x.jpg", quality=95, subsampling=0)
        near(read_image(tmp_path / "x.jpg"), tensor(scene()), LOSSY)
    Image.fromarray(scene()).convert("CMYK").save(tmp_path / "x.tif")
    near(read_image(tmp_path / "x.tif"), tensor(scene()), 1 / 255)


def test_an_animation_shows_its_first_frame(tmp_path):
    frames = [Image.new("RGB", (W, H), colour) for colour in ("red", "lime", "blue")]
    for name in ("x.gif", "x.webp", "x.png", "x.tif"):
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:], lossless=True)
        near(read_image(tmp_path / name), torch.tensor([1.0, 0, 0]).view(3, 1, 1).expand(3, H, W), 0.01)


def test_names(tmp_path):
    for name in (
        "two words.png",
        "é 日本 🛵.png",
        "-x.png",
        "x",
        "wrong.jpg",
        "new\nline.png",
        os.fsdecode(b"caf\xe9.png"),
    ):
        path = save(tmp_path / name, "png")
        near(read_image(path), tensor(scene()))
        near(read_image(str(path)), tensor(scene()))
        near(as_image(str(path)), tensor(scene()))


@pytest.mark.parametrize("size", [(1, 1), (1, 5000), (5000, 1), (2, 3)])
def test_tiny_and_thin_pictures_decode_but_are_too_small_to_use(tmp_path, size):
    Image.new("RGB", size, "white").save(tmp_path / "x.png")
    image = read_image(tmp_path / "x.png")
    near(image, torch.ones(3, size[1], size[0]))
    with pytest.raises(ImageError, match=rf"'x.png' is {size[0]} x {size[1]} pixels; .* at least 16"):
        check_size(*image.shape[1:], "x.png")
    check_size(16, 16, "x.png")


def test_values_are_those_of_a_division_in_double_precision():
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16)
    assert torch.equal(as_image(grey)[0], torch.tensor(grey / 255.0, dtype=torch.float))
    assert torch.equal(as_image(Image.fromarray(grey))[0], torch.tensor(grey / 255.0, dtype=torch.float))


# --- files that are refused -------------------------------------------------------------------------------------------


def refused(path, reason, **options):
    with pytest.raises(ImageError, match=reason) as caught:
        read_image(path, **options)
    assert repr(str(path)) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_not_there_or_no_file(tmp_path):
    refused(tmp_path / "none é.jpg", "no such file")
    refused(tmp_path / "new\nline.jpg", "no such file")
    refused(tmp_path / "x" / "y.jpg", "no such file")
    refused(tmp_path, "it is a folder")
    refused(tmp_path / ("x" * 300), "name too long")
    refused("null\0byte.jpg", "null byte")
    refused("https://example.com/x.jpg", "no such file")
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "not a regular file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission(tmp_path):
    save(tmp_path / "x.png", "png").chmod(0)
    refused(tmp_path / "x.png", "permission denied")


def test_no_permission_as_the_system_says_it(tmp_path, monkeypatch):
    def denied(*args):
        raise PermissionError(13, "Permission denied")

    path = save(tmp_path / "x.png", "png")
    monkeypatch.setattr("builtins.open", denied)
    refused(path, "permission denied")


def test_what_is_no_image(tmp_path):
    path = tmp_path / "x.jpg"
    for data, reason in [
        (b"", "the file is empty"),
        (b"x", "not an image in a known format"),
        ("text, é\n".encode() * 100, "not an image in a known format"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "not an image in a known format"),
        (b"P5 ", "damaged"),
        (b"BM", "damaged"),
        (b"GIF89a", "damaged"),
        (b"\xff\xd8\xff", "damaged"),
        (b"II*\0" + b"\xff" * 100, "damaged"),
    ]:
        path.write_bytes(data)
        refused(path, reason)


@pytest.mark.parametrize("name", CODECS)
def test_truncated_anywhere(tmp_path, name):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (H, W, 3), dtype=np.uint8))
    data = save(tmp_path / "whole", name, noise).read_bytes()
    for part in np.linspace(0.02, 0.98, 25):
        (tmp_path / "x").write_bytes(data[: int(part * len(data))])
        refused(tmp_path / "x", "cannot read image")


@pytest.mark.parametrize("array", [deep(1), deep(3)])
def test_truncated_sixteen_bits(tmp_path, array):
    data = png(array, 0 if array.shape[2] == 1 else 2)
    for part in np.linspace(0.02, 0.98, 15):
        (tmp_path / "x").write_bytes(data[: int(part * len(data))])
        refused(tmp_path / "x", "cannot read image")


@pytest.mark.parametrize("name", CODECS)
def test_any_damage_gives_an_image_or_an_image_error(tmp_path, name, capfd):
    rng = np.random.default_rng(1)
    data = save(tmp_path / "whole", name, exif=Image.Exif()).read_bytes()
    for _ in range(60):
        damaged = bytearray(data)
        for place in rng.integers(0, min(len(data), rng.choice([64, 700, len(data)])), rng.integers(1, 6)):
            damaged[place] = rng.integers(0, 256)
        (tmp_path / "x").write_bytes(damaged)
        try:
            image = read_image(tmp_path / "x", max_pixels=100_000)
        except ImageError:
            continue
        assert image.shape[0] == 3
        assert not image.isnan().any()
    capfd.readouterr()  # the codecs' C libraries may complain about damage


def test_too_many_pixels_are_noticed_before_decoding(tmp_path):
    path = save(tmp_path / "x.png", "png")
    refused(path, "60 x 40 pixels, more than the limit of 2399", max_pixels=2399)
    near(read_image(path, max_pixels=2400), tensor(scene()))
    with pytest.raises(ImageError, match="more than the limit of 2399"):
        as_image(scene(), max_pixels=2399)


def test_a_decompression_bomb_costs_nothing(tmp_path):
    """65 535 x 65 535 pixels in a file of a few bytes: refused by the header alone."""
    header = struct.pack(">IIBBBBB", 65535, 65535, 8, 2, 0, 0, 0)
    data = (
        b"\x89PNG\r\n\x1a\n"
        + struct.pack(">I", 13)
        + b"IHDR"
        + header
        + struct.pack(">I", zlib.crc32(b"IHDR" + header))
    )
    data += struct.pack(">I", 4) + b"IDAT" + b"\0" * 4 + struct.pack(">I", zlib.crc32(b"IDAT" + b"\0" * 4))
    (tmp_path / "x.png").write_bytes(data)
    start = time.perf_counter()
    refused(tmp_path / "x.png", "65535 x 65535 pixels")
    assert time.perf_counter() - start < 0.5


def test_our_limit_holds_and_not_pillows(tmp_path, monkeypatch):
    path = save(tmp_path / "x.png", "png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    near(read_image(path), tensor(scene()))  # Image.open would raise DecompressionBombError
    monkeypatch.undo()


def test_running_out_of_memory_is_said(tmp_path, monkeypatch):
    def exhausted(self):
        raise MemoryError

    path = save(tmp_path / "x.png", "png")
    monkeypatch.setattr(ImageFile.ImageFile, "load", exhausted)
    refused(path, "not enough memory")


def malformed_mpo():
    """A JPEG for which Pillow warns ("malformed MPO file") and then reads the picture."""
    file = io.BytesIO()
    Image.fromarray(scene()).save(file, "JPEG", quality=95, subsampling=0)
    extra = b"MPF\0" + b"\0" * 20
    return file.getvalue()[:2] + b"\xff\xe2" + struct.pack(">H", len(extra) + 2) + extra + file.getvalue()[2:]


def test_threads_read_at_once_in_silence(tmp_path):
    (tmp_path / "x.jpg").write_bytes(malformed_mpo())
    with pytest.warns(UserWarning, match="malformed MPO"):
        Image.open(tmp_path / "x.jpg").close()
    failures = []

    def read():
        try:
            for _ in range(20):
                near(read_image(tmp_path / "x.jpg"), tensor(scene()), LOSSY)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    with pytest.warns(UserWarning, match="mine"):  # the caller's own warnings are heard again, and Pillow's too
        warnings.warn("mine", stacklevel=1)
    with pytest.warns(UserWarning, match="malformed MPO"):
        Image.open(tmp_path / "x.jpg").close()


def test_the_host_programs_filters_survive_a_failure(tmp_path):
    before = list(warnings.filters)
    refused(tmp_path / "none", "no such file")
    (tmp_path / "x").write_bytes(b"BM")
    refused(tmp_path / "x", "damaged")
    assert list(warnings.filters) == before


# --- from memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        scene(),
        scene().astype(np.uint16) * 257,
        scene() / 255,
        (scene() / 255).astype(np.float32),
        np.asfortranarray(scene()),
        scene()[::-1][::-1],
        scene().astype(">u2") * np.array(257, ">u2"),
        np.dstack([scene(), np.full((H, W), 255, np.uint8)]),
        torch.from_numpy(scene()).permute(2, 0, 1),
        tensor(scene()),
        tensor(scene()).double(),
        tensor(scene()).requires_grad_(),
        torch.cat([tensor(scene()), torch.ones(1, H, W)]),
        Image.fromarray(scene()),
    ],
)
def test_whatever_a_caller_has(source):
    image = as_image(source)
    near(image, tensor(scene()))
    assert not image.requires_grad


@pytest.mark.parametrize(
    "source", [scene()[..., 0], scene()[..., :1], torch.from_numpy(scene()[..., :1]).permute(2, 0, 1)]
)
def test_grey_is_repeated(source):
    near(as_image(source), tensor(scene()[..., :1]).repeat(3, 1, 1))


def test_half_transparent_arrays_show_white_paper():
    rgba = np.zeros((2, 2, 4), np.uint8)
    rgba[..., 3] = 51
    near(as_image(rgba), torch.full((3, 2, 2), 0.8))


@pytest.mark.parametrize("make", [lambda: tensor(scene()), lambda: (scene() / 255).astype(np.float32), scene])
def test_the_callers_memory_is_neither_kept_nor_changed(make):
    source, pristine = make(), make()
    as_image(source).fill_(0.5)
    assert (source == pristine).all()
    image = as_image(source)
    source[...] = 0
    near(image, tensor(scene()))


def test_rounding_beyond_the_range_is_clamped():
    image = as_image(np.array([[-1e-6, 1 + 1e-6]], np.float64))
    assert image.min() == 0
    assert image.max() == 1


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (torch.zeros(40, 60, 3), ["float32[40, 60, 3]", "permute(2, 0, 1)"]),
        (torch.zeros(1, 3, 40, 60), ["[1, 3, 40, 60]", "one by one"]),
        (torch.zeros(40, 60), ["[40, 60]"]),
        (torch.zeros(2, 40, 60), ["[2, 40, 60]"]),
        (torch.zeros(3, 0, 60), ["[3, 0, 60]"]),
        (torch.zeros(3, 4, 6, dtype=torch.int64), ["int64"]),
        (torch.zeros(3, 4, 6, dtype=torch.bool), ["bool"]),
        (torch.zeros(3, 4, 6, dtype=torch.complex64), ["complex64"]),
        (torch.full((3, 4, 6), 255.0), ["span 255 to 255", "[0, 1]"]),
        (torch.full((3, 4, 6), -0.5), ["span -0.5 to -0.5"]),
        (torch.full((3, 4, 6), float("nan")), ["NaN"]),
        (np.zeros((3, 40, 60)), ["float64[3, 40, 60]", "transpose(1, 2, 0)"]),
        (np.zeros((1, 40, 60, 3)), ["[1, 40, 60, 3]"]),
        (np.zeros((40, 60, 2)), ["[40, 60, 2]"]),
        (np.zeros((0, 60)), ["[0, 60]"]),
        (np.zeros((4, 6), np.int64), ["int64"]),
        (np.zeros((4, 6), bool), ["bool"]),
        (np.zeros((4, 6), object), ["object"]),
        (np.full((4, 6), 128.0), ["span 128 to 128"]),
        (np.full((4, 6), np.inf), ["span inf to inf"]),
        (np.array([[0, np.nan]]), ["NaN"]),
        ([[0, 1]], ["not list"]),
        (None, ["not NoneType"]),
        (b"x.jpg", ["not bytes"]),
        (Image.new("I", (4, 6)), ["what white is"]),
        (Image.new("F", (4, 6), 300), ["span 300 to 300"]),
    ],
)
def test_what_is_no_image_is_named(source, words):
    with pytest.raises(ImageError) as caught:
        as_image(source)
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


def test_frames_of_opencv():
    bgr = scene()[..., ::-1]
    near(from_bgr_uint8(bgr), tensor(scene()))
    near(from_bgr_uint8(np.dstack([bgr, np.full((H, W), 255, np.uint8)])), tensor(scene()))
    near(from_bgr_uint8(scene()[..., 0]), tensor(scene()[..., :1]).repeat(3, 1, 1))
    for wrong in (bgr.astype(np.float32), None, bgr[None]):
        with pytest.raises(ImageError):
            from_bgr_uint8(wrong)


def test_grey_is_kornias():
    color = pytest.importorskip("kornia.color")
    image = torch.rand(3, 7, 9)
    near(to_grey(image), color.rgb_to_grayscale(image))
    with pytest.raises(ImageError, match=r"got \[1, 7, 9\]"):
        to_grey(image[:1])


def test_the_module_needs_no_kornia_and_no_opencv():
    code = "import sys, vispe.data.images; assert not {'kornia', 'cv2', 'matplotlib'} & set(sys.modules)"
    result = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", code], cwd=Path(__file__).parents[2], check=False
    )
    assert result.returncode == 0
