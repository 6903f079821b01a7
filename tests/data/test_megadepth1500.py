"""MegaDepth-1500 from both of its indices, and files that try to be more than an index."""

import io
import os
import pickle
import tomllib
import zipfile

import numpy as np
import pytest
from PIL import Image

from vispe.data import megadepth1500 as module
from vispe.data.megadepth1500 import megadepth1500, read_scene_info, statistics
from vispe.data.pairs import Pair, PairSet
from vispe.evaluate.protocol import preset
from vispe.paths import shared

FACTS = tomllib.loads((shared("data") / "megadepth1500.toml").read_text(encoding="utf-8"))
K = np.array([[700.0, 0, 400], [0, 710, 300], [0, 0, 1]])


def rotation(degrees):
    c, s = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    return np.array([[c, 0, s], [0, 1, 0], [-s, 0, c]])


def pose(degrees, t):
    found = np.eye(4)
    found[:3, :3], found[:3, 3] = rotation(degrees), t
    return found


def objects(values):
    found = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        found[i] = value
    return found


def scene():
    names = [f"Undistorted_SfM/0015/images/{k} é.jpg" for k in range(3)]
    return {
        "image_paths": objects([*names, None]),
        "depth_paths": objects(["d"] * 4),
        "intrinsics": objects([K] * 3 + [None]),
        "poses": objects([pose(0, (0, 0, 0)), pose(10, (1, 0, 0)), pose(30, (0, 0, 2)), None]),
        "pair_infos": [
            (np.array([0, 1]), np.float64(0.25), np.zeros(4)),
            (np.array([1, 2]), np.float64(0.5), np.zeros(4)),
        ],
    }


@pytest.fixture
def write(tmp_path):
    """Writes a scene as one pickle (as LoFTR's files are) or zipped (as ``np.savez`` has it)."""

    def put(found, how="pickle", protocol=4):
        path = tmp_path / "0015_0.1_0.3.npz"
        if how == "pickle":
            path.write_bytes(pickle.dumps(found, protocol))
        else:
            getattr(np, how)(path, **{**found, "pair_infos": np.array(found["pair_infos"], dtype=object)})
        return path

    return put


@pytest.mark.parametrize(
    ("how", "protocol"),
    [*(("pickle", p) for p in range(2, pickle.HIGHEST_PROTOCOL + 1)), ("savez", 4), ("savez_compressed", 4)],
)
def test_scene_info_of_every_kind(write, tmp_path, how, protocol):
    write(scene(), how, protocol)
    found = megadepth1500(tmp_path)
    assert (found.name, found.pixel, found.K_size, found.note) == ("megadepth1500", 0.5, None, "2 of 1500 pairs")
    first, second = found.pairs
    assert (first.image0, first.group, first.overlap) == ("Undistorted_SfM/0015/images/0 é.jpg", "0015", 0.25)
    np.testing.assert_allclose(first.pose, pose(10, (1, 0, 0)), atol=1e-12)
    np.testing.assert_allclose(second.pose[:3, :3], rotation(20), atol=1e-12)
    np.testing.assert_allclose(second.pose @ pose(10, (1, 0, 0)), pose(30, (0, 0, 2)), atol=1e-12)  # T_0to1 T0 = T1
    np.testing.assert_array_equal(first.K1, K)


def test_images_are_found_beside_or_below_and_counted_when_missing(write, tmp_path):
    write(scene())
    with pytest.raises(ValueError, match=r"3 of 3 images are missing.*0 é\.jpg"):
        megadepth1500(tmp_path).check_files()
    images = tmp_path / "megadepth_test_1500" / "Undistorted_SfM" / "0015" / "images"
    images.mkdir(parents=True)
    for k in range(3):
        Image.new("RGB", (8, 6)).save(images / f"{k} é.jpg")
    found = megadepth1500(tmp_path)
    assert found.root == tmp_path / "megadepth_test_1500"
    found.check_files()


class Runs:
    def __init__(self, function, *arguments):
        self.how = function, arguments

    def __reduce__(self):
        return self.how


@pytest.mark.parametrize("how", ["pickle", "savez"])
@pytest.mark.parametrize("key", ["image_paths", "pair_infos"])
def test_a_pickle_with_other_things_is_refused_and_not_run(write, tmp_path, how, key):
    mark = tmp_path / "run"
    found = scene()
    found[key] = objects([Runs(os.mkdir, str(mark))])
    path = write(found, how)
    with pytest.raises(ValueError, match=r"0015_0\.1_0\.3\.npz.*refused to load posix\.mkdir|nt\.mkdir") as error:
        megadepth1500(tmp_path)
    assert "\n" not in str(error.value)
    assert not mark.exists()
    assert path.exists()


def test_stand_ins_take_nothing_but_arrays(tmp_path):
    ndarray, dtype, scalar = np.ndarray, np.dtype, np.array(1.0)[()].__reduce__()[0]
    begin = np.zeros(1).__reduce__()[0]
    path = tmp_path / "0015_0.1_0.3.npz"
    for bad in (
        Runs(eval, "1"),
        Runs(getattr, "a", "b"),
        Runs(ndarray, (3,), "O"),  # an array of whatever lay in memory
        Runs(begin, ndarray, (10**12,), b"b"),
        Runs(begin, ndarray, (10**6,), b"O"),
        Runs(dtype, "V8"),
        Runs(scalar, dtype("O"), b"12345678"),
    ):
        path.write_bytes(pickle.dumps({"image_paths": bad}))
        with pytest.raises(ValueError, match=r"0\.3\.npz"):
            read_scene_info(path)


def test_bytes_are_never_called_objects():
    """A type whose flags a pickle cleared would let bytes pass for pointers."""
    kind = module._Kind("O8")
    kind.__setstate__((3, "|", None, None, None, -1, -1, 0))
    with pytest.raises(ValueError, match="does not fit"):
        module._empty(module.NDARRAY, (0,), b"b").__setstate__((1, (1,), kind, False, b"12345678"))
    with pytest.raises(ValueError, match="does not fit"):
        module._empty(module.NDARRAY, (0,), b"b").__setstate__((1, (1,), module._Kind("f8"), False, [1]))
    with pytest.raises(ValueError, match="no objects"):
        module._of_bytes(b"12345678", kind, (1,), "C")
    with pytest.raises(ValueError, match="do not fit"):
        module._scalar(module._Kind("f8"), b"123")
    with pytest.raises(ValueError, match="zlib"):
        module._latin1("a", "zlib")


@pytest.mark.parametrize("how", ["pickle", "savez"])
@pytest.mark.parametrize("left", [0, 1, 7, 100, 0.5, 0.95])
def test_truncated_files_are_named(write, tmp_path, how, left):
    path = write(scene(), how)
    data = path.read_bytes()
    path.write_bytes(data[: left if isinstance(left, int) else int(left * len(data))])
    with pytest.raises(ValueError, match=r"0015_0\.1_0\.3\.npz") as error:
        megadepth1500(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"poses": None}, "has no poses|no poses"),
        ({"intrinsics": objects([K[:2]] * 4)}, "pair 0.*K0 must be"),
        ({"intrinsics": objects([-K] * 4)}, "pair 0.*upper triangular|pair 0.*positive"),
        ({"poses": objects([np.eye(3)] * 4)}, r"pair 0: the pose of image 0 is not a finite \[4, 4\]"),
        ({"poses": objects([np.eye(4) * np.nan] * 4)}, "pair 0: the pose of image 0"),
        ({"poses": objects([np.eye(4)] * 4)}, "pair 0.*translation is zero"),
        ({"pair_infos": [((0, 9), 0.1, None)]}, "pair 0: images 0 and 9 of 4"),
        ({"pair_infos": [((0, -1), 0.1, None)]}, "pair 0: images 0 and -1 of 4"),
        ({"pair_infos": [(0, 1)]}, "pair 0"),
        ({"pair_infos": []}, "no pairs"),
    ],
)
def test_wrong_contents_are_named(write, tmp_path, change, message):
    found = {**scene(), **change}
    write({key: value for key, value in found.items() if value is not None})
    with pytest.raises(ValueError, match=message):
        megadepth1500(tmp_path)


def test_a_head_that_lies(tmp_path):
    path = tmp_path / "0015_0.1_0.3.npz"
    body = io.BytesIO()
    np.lib.format.write_array_header_1_0(body, {"shape": (10**12,), "fortran_order": False, "descr": "<f8"})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("poses.npy", body.getvalue())
    with pytest.raises(ValueError, match=r"needs more than|not a whole npz"):
        read_scene_info(path)


def test_glue_factorys_list(tmp_path):
    folder = tmp_path / "megadepth1500"
    (folder / "images").mkdir(parents=True)
    numbers = [*K.ravel(), *K.ravel(), *rotation(5).ravel(), 1, 0, 0]
    row = " ".join(map(str, numbers))
    (folder / "pairs_calibrated.txt").write_text(f"0015/images/a.jpg 0015/images/b.jpg {row}\n0022_c.jpg d.jpg {row}\n")
    found = megadepth1500(tmp_path)
    assert found.root == folder / "images"
    assert [p.group for p in found.pairs] == ["0015", "0022"]
    assert (found.pixel, found.note) == (0.5, "2 of 1500 pairs")
    assert megadepth1500(folder).pairs[0].image0 == "0015/images/a.jpg"


@pytest.mark.parametrize("case", ["absent", "empty"])
def test_what_to_fetch(tmp_path, case):
    root = tmp_path / "none"
    if case == "empty":
        root.mkdir()
    with pytest.raises(ValueError, match=r"megadepth1500\.zip.*1\.5 GB.*Licence"):
        megadepth1500(root)


def test_statistics_by_hand():
    def pair(name, degrees, t, overlap, group):
        return Pair(image0=name, image1="b", K0=K, K1=K, pose=pose(degrees, t), overlap=overlap, group=group)

    pairs = (pair("a", 15, (1, 0, 0), 0.2, "0015"), pair("c", 0, (0, 0, -1), None, "0022"))
    head, rows = statistics(PairSet(name="megadepth1500", root=module.Path("."), pairs=pairs, pixel=0.5))
    assert all(len(row) == len(head) for row in rows)
    table = {(row[0], row[3]): row for row in rows}
    assert table["all", "rotation, degrees"][1:3] == ("2", "3")
    assert table["0015", "rotation, degrees"][4:] == (*["15.00"] * 5, "10-20: 1")
    # The second camera of "0022" is one unit ahead; of "0015" beside, turned by 15 degrees.
    assert table["0022", "baseline to axis, degrees"][4] == "0.00"
    assert table["0015", "baseline to axis, degrees"][4] == "105.00"
    assert table["0015", "overlap"][-1] == "0.2-0.3: 1"
    assert ("0022", "overlap") not in table


@pytest.fixture
def index(measured_data):
    folder = measured_data / "megadepth1500_index"
    if not folder.is_dir():
        pytest.skip("no index of MegaDepth-1500 here")
    return megadepth1500(folder)


def test_the_real_index(index):
    assert (len(index.pairs), index.note) == (1500, "")
    assert len({(p.image0, p.image1) for p in index.pairs}) == 1500
    assert [p.group for p in index.pairs].count("0015") == 600
    folder = "Undistorted_SfM/0015/images"
    names = (f"{folder}/205993922_4ad25ed386_o.jpg", f"{folder}/2912685234_7c4c21ee78_o.jpg")
    (first,) = (p for p in index.pairs if (p.image0, p.image1) == names)
    # As in assets/megadepth_1500.json of the XFeat repository, float32.
    np.testing.assert_allclose(first.pose[:3, 3], (-0.26584458, -0.19925256, -0.87466818), rtol=1e-6)
    np.testing.assert_allclose(first.pose[0, :3], (0.99974519, -0.01893164, 0.01229564), rtol=1e-5)
    np.testing.assert_allclose(first.K0, [[2161.1, 0, 635.5], [0, 2161.1, 476.5], [0, 0, 1]])
    # Principal points are half of a whole number of pixels: the corner is at (0, 0).
    assert all((2 * p.K0[:2, 2] % 1 == 0).all() for p in index.pairs)


def test_statistics_of_the_real_index(index):
    _, rows = statistics(index)
    table = {(row[0], row[3]): row for row in rows}
    assert {row[0] for row in rows} == {"all", "0015", "0022"}
    assert table["all", "rotation, degrees"][1:3] == ("1500", "806")
    assert table["0022", "overlap"][1] == "900"
    assert 0.1 <= float(table["all", "overlap"][4]) <= float(table["all", "overlap"][8]) <= 0.7
    for row in rows:
        assert sum(int(part.rpartition(": ")[2]) for part in row[-1].split("  ")) == int(row[1])


@pytest.mark.parametrize("name", FACTS["preset"])
def test_presets_are_protocols(name):
    assert preset("megadepth1500", name, "pose").source


def test_published_numbers_are_percent_and_belong_to_a_preset():
    for name, claims in FACTS["published"].items():
        assert name in FACTS["preset"]
        for claim in claims:
            assert len(claim["at"]) == len(claim["auc"]) == 3
            assert 1 < claim["auc"][0] < claim["auc"][1] < claim["auc"][2] < 100
