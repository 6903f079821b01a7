"""Pairs and what they are read from: lists, files of homographies, and everything that can be wrong with them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vispe.data.pairs import Pair, PairSet, image_pairs, read_homography, read_pair_list

K = np.array([[500.0, 0, 320], [0, 510, 240], [0, 0, 1]])
POSE = np.eye(4)
POSE[:3, 3] = (1, 0.5, 0)
H = np.array([[1.1, 0.02, 5], [-0.03, 0.9, 7], [1e-4, -2e-5, 1]])
TRUTH = {"K0": K, "K1": K, "pose": POSE}
NUMBERS = " ".join(repr(float(v)) for v in (*K.ravel(), *K.ravel(), *POSE.ravel()))


def turned(k):
    """K of the [480, 640] image after np.rot90 k times, and the turn of the camera: x' of a point x."""
    fx, fy, cx, cy = 500.0, 510.0, 320.0, 240.0
    cameras = {
        1: [[fy, 0, cy], [0, fx, 639 - cx], [0, 0, 1]],
        2: [[fx, 0, 639 - cx], [0, fy, 479 - cy], [0, 0, 1]],
        3: [[fy, 0, 479 - cy], [0, fx, cx], [0, 0, 1]],
    }
    c, s = np.cos(-np.pi / 2 * k), np.sin(-np.pi / 2 * k)
    return np.array(cameras[k], float), np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]])


def test_a_pair_keeps_its_truth_and_its_names():
    pair = Pair(image0="./a//b c.jpg", image1="ä-b.jpg", homography=H.tolist(), group="viewpoint")
    assert (pair.image0, pair.image1, pair.task) == ("a/b c.jpg", "ä-b.jpg", "homography")
    np.testing.assert_array_equal(pair.homography, H)
    with pytest.raises(ValueError, match="read-only"):
        pair.homography[0, 0] = 3
    assert Pair(image0="a", image1="b", **TRUTH).task == "pose"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image0": "/a.jpg"}, "a path below the root"),
        ({"image0": "../a.jpg"}, "a path below the root"),
        ({"image1": "x/../../a.jpg"}, "a path below the root"),
        ({"image1": ""}, "a path below the root"),
        ({"pose": None}, "either a homography or K0, K1 and pose, got K0, K1"),
        ({"K0": None, "K1": None}, "got pose"),
        ({"homography": H}, "got homography, K0, K1, pose"),
        ({"K0": K[:2]}, r"K0 must be \[3, 3\], got shape \[2, 3\]"),
        ({"K0": "abc"}, "K0 is not made of numbers"),
        ({"K1": K * np.nan}, "K1 has a value that is not finite"),
        ({"K1": K.T}, "K1 must be upper triangular"),
        ({"K1": K * (-1, 1, 1)}, "focal lengths of K1 must be positive"),
        ({"K1": K * 2}, "1 in its corner"),
        ({"K1": K + np.eye(3, k=1)}, "no skew"),
        ({"pose": POSE * 1.01}, "orthonormal"),
        ({"pose": POSE * (1, 1, -1, 1)}, "determinant 1"),
        ({"pose": POSE + np.eye(4)[::-1] * 0.1}, "orthonormal|last row"),
        ({"pose": np.vstack([POSE[:3], (0, 0, 1, 1)])}, "last row"),
        ({"pose": np.eye(4)}, "translation is zero"),
        ({"turns0": 4}, "quarter turns are 0, 1, 2 or 3, got 4"),
        ({"overlap": np.inf}, "overlap must be a finite number"),
    ],
)
def test_a_wrong_pair_is_named(change, message):
    with pytest.raises(ValueError, match=message) as error:
        Pair(**{"image0": "left one.jpg", "image1": "right.jpg", **TRUTH, **change})
    assert str(error.value).startswith("pair ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("bad", [np.zeros((3, 3)), np.ones((3, 3)), [[1, 2, 3], [2, 4, 6], [0, 0, 1]]])
def test_a_singular_homography_is_refused(bad):
    with pytest.raises(ValueError, match="singular"):
        Pair(image0="a", image1="b", homography=bad)


def test_large_translations_are_no_singular_homography():
    Pair(image0="a", image1="b", homography=[[0.5, 0, 8000], [0, 2, -9000], [1e-5, 0, 1]])


def test_a_set_has_one_kind_of_truth(tmp_path):
    one, two = Pair(image0="a", image1="b", homography=H), Pair(image0="a", image1="b", **TRUTH)
    with pytest.raises(ValueError, match="a set has one kind"):
        PairSet(name="pairs", root=tmp_path, pairs=(one, two))
    with pytest.raises(ValueError, match="a set has one kind"):
        PairSet(name="pairs", root=tmp_path, pairs=(one, Pair(image0="a", image1="c")))
    assert PairSet(name="pairs", root=tmp_path, pairs=(Pair(image0="a", image1="c"),)).task == "none"
    with pytest.raises(ValueError, match="no pairs"):
        PairSet(name="pairs", root=tmp_path, pairs=())
    with pytest.raises(ValueError, match=r"0\.0 or 0\.5, got 0\.25"):
        PairSet(name="pairs", root=tmp_path, pairs=(two,), pixel=0.25)
    with pytest.raises(ValueError, match="K_size"):
        PairSet(name="pairs", root=tmp_path, pairs=(two,), K_size=(0, 640))


def test_images_once_for_each_turn_and_missing_ones_counted(tmp_path):
    pairs = (
        Pair(image0="a.jpg", image1="b.jpg", **TRUTH),
        Pair(image0="b.jpg", image1="a.jpg", turns1=1, **TRUTH),
        Pair(image0="a.jpg", image1="c.jpg", **TRUTH),
    )
    found = PairSet(name="pairs", root=tmp_path, pairs=pairs)
    assert found.images == [("a.jpg", 0), ("b.jpg", 0), ("a.jpg", 1), ("c.jpg", 0)]
    (tmp_path / "a.jpg").touch()
    with pytest.raises(ValueError, match=r"2 of 3 images are missing.*the first is 'b\.jpg'"):
        found.check_files()
    for name in ("b.jpg", "c.jpg"):
        (tmp_path / name).touch()
    found.check_files()


# --- lists ---


@pytest.fixture
def listed(tmp_path):
    def read(text, **options):
        path = tmp_path / "list.txt"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_pair_list(path, tmp_path, **options)

    return read


def test_a_line_of_superglue(listed):
    found = listed(f"a/1.jpg b/2.jpg 1 3 {NUMBERS}\n", pixel=0.5, K_size=(480, 640), name="pairs", group=str.upper)
    (pair,) = found.pairs
    assert (pair.image0, pair.image1, pair.turns0, pair.turns1, pair.group) == ("a/1.jpg", "b/2.jpg", 1, 3, "A/1.JPG")
    assert (found.pixel, found.K_size, found.task) == (0.5, (480, 640), "pose")
    np.testing.assert_array_equal(pair.K0, K)
    np.testing.assert_array_equal(pair.pose, POSE)


def test_lines_of_glue_factory_have_no_turns(listed):
    short = " ".join(str(float(v)) for v in (*K.ravel(), *K.ravel(), *POSE[:3, :3].ravel(), *POSE[:3, 3]))
    found = listed(f"a b {NUMBERS}\nb a {short}\n")
    assert [(p.turns0, p.turns1) for p in found.pairs] == [(0, 0), (0, 0)]
    np.testing.assert_array_equal(found.pairs[0].pose, found.pairs[1].pose)


def test_what_editors_leave_behind(listed):
    line = f"a b 0 0 {NUMBERS}"
    text = f"\ufeff# a comment\r\n\r\n{line}\r\n   \r\n{line}\r\nb a 0 0 {NUMBERS}"
    assert [(p.image0, p.image1) for p in listed(text).pairs] == [("a", "b"), ("b", "a")]


@pytest.mark.parametrize("separator", ["\t", " "])
def test_names_with_spaces(listed, separator):
    quote = '"' if separator == " " else ""
    names = f"{quote}sub dir/é a.jpg{quote}{separator}{quote}b  c.jpg{quote}{separator}"
    (pair,) = listed(names + f"0 2 {NUMBERS}").pairs
    assert (pair.image0, pair.image1, pair.turns1) == ("sub dir/é a.jpg", "b  c.jpg", 2)
    assert listed(names + "\t".join(f"0 2 {NUMBERS}".split())).pairs[0].image1 == "b  c.jpg"


names = st.text(
    st.characters(blacklist_characters="/\0\n\r", blacklist_categories=("Cs",)), min_size=1, max_size=12
).filter(lambda name: name not in (".", ".."))
paths = st.lists(names, min_size=1, max_size=3).map("/".join)


@given(paths, paths)
def test_any_name_comes_back_when_it_is_quoted(tmp_path_factory, name0, name1):
    path = tmp_path_factory.mktemp("list") / "pairs.txt"
    quoted = ['"' + name.replace('"', '""') + '"' for name in (name0, name1)]
    path.write_bytes(f"{quoted[0]} {quoted[1]} 0 0 {NUMBERS}\n".encode())
    (pair,) = read_pair_list(path, path.parent).pairs
    assert (pair.image0, pair.image1) == (name0, name1)


def test_likely_confusions_stay_apart(listed):
    line = "{} {} 0 0 " + NUMBERS
    text = "\n".join(
        [line.format("a-b", "c"), line.format("a/b", "c"), line.format('"a b"', "c"), line.format("a", "b")]
    )
    assert [p.image0 for p in listed(text).pairs] == ["a-b", "a/b", "a b", "a"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"a b 0 4 {NUMBERS}", "line 2: quarter turns are 0, 1, 2 or 3, got '4'"),
        (f"a b 0 1.0 {NUMBERS}", "got '1.0'"),
        (f"a b 0 0 {NUMBERS[:-3]}x1", "line 2: '.*x1' is not a number"),
        (f"a b 0 0 {NUMBERS[:-3]}nan", "line 2: pair 'a' and 'b': pose has a value that is not finite"),
        (f"a b c 0 0 {NUMBERS}", "line 2: 2 names and 36 numbers.*got 39 columns.*tabs"),
        ("a b 0", "line 2:.*got 3 columns"),
        ("a", "line 2"),
        (f"/a b 0 0 {NUMBERS}", "line 2: pair '/a' and 'b': an image's name"),
        (f"ok ok2 0 0 {NUMBERS.replace('500.0', '501.0')}", "line 2: the pair 'ok' and 'ok2' came before"),
    ],
)
def test_a_wrong_line_is_named(listed, line, message):
    with pytest.raises(ValueError, match=message) as error:
        listed(f"ok ok2 0 0 {NUMBERS}\n{line}\n")
    assert "list.txt" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_list_that_is_none(listed, tmp_path):
    with pytest.raises(ValueError, match="lists no pairs"):
        listed("# nothing\n")
    with pytest.raises(ValueError, match="not UTF-8"):
        listed(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"cannot read '.*no\.txt': No such file"):
        read_pair_list(tmp_path / "no.txt", tmp_path)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_turns_change_no_angle_and_points_turn_back_to_the_cameras_of_the_list(k):
    """What SuperGlue scores in the turned frame is what is scored here in the file's own."""
    ray = np.array([0.2, -0.1, 1.0])
    x, y, _ = K @ ray
    inside = {1: (y, 639 - x), 2: (639 - x, 479 - y), 3: (479 - y, x)}[k]  # np.rot90 of a [480, 640] image
    camera, turn = turned(k)
    np.testing.assert_allclose((camera @ (turn @ ray))[:2], inside, atol=1e-9)
    image = np.zeros((480, 640))
    image[100, 30] = 1
    row, column = np.argwhere(np.rot90(image, k))[0]
    assert (column, row) == {1: (100, 639 - 30), 2: (639 - 30, 479 - 100), 3: (479 - 100, 30)}[k]


def test_the_list_of_strecha(measured_data):
    folder = measured_data / "strecha_1024"
    if not (folder / "pairs_with_gt.txt").is_file():
        pytest.skip("no Strecha here")
    found = read_pair_list(folder / "pairs_with_gt.txt", folder, group=lambda name: name.split("/")[0])
    assert len(found.pairs) == 45
    assert {pair.group for pair in found.pairs} == {"fountain-P11", "Herz-Jesus-P8"}
    found.check_files()


# --- files of a homography ---

LINES = "\n".join(" ".join(repr(float(v)) for v in row) for row in H)
XML = (
    '<?xml version="1.0"?>\n<opencv_storage>\n<H13 type_id="opencv-matrix">\n  <rows>3</rows>\n  <cols>3</cols>\n'
    f"  <dt>d</dt>\n  <data>\n    {LINES}</data></H13>\n</opencv_storage>\n"
)
YAML = (
    "%YAML:1.0\n---\nH13: !!opencv-matrix\n   rows: 3\n   cols: 3\n   dt: d\n"
    f"   data: [ {', '.join(repr(float(v)) for v in H.ravel())} ]\n"
)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("H_1_2", LINES),
        ("h.txt", "\ufeff# H\r\n" + LINES.replace(" ", ",\t").replace("\n", "  \r\n\r\n")),
        ("h.csv", LINES.replace("\n", " ")),
        ("h.xml", XML),
        ("h.yml", YAML),
        ("h.yaml", YAML.replace("1.1,", "1.1,\n      ")),
    ],
)
def test_homographies_of_every_kind(tmp_path, name, text):
    (tmp_path / name).write_bytes(text.encode())
    np.testing.assert_array_equal(read_homography(tmp_path / name), H)


def test_what_opencv_and_numpy_write(tmp_path):
    cv2 = pytest.importorskip("cv2")
    for name in ("h.xml", "h.yml"):
        storage = cv2.FileStorage(str(tmp_path / name), cv2.FILE_STORAGE_WRITE)
        storage.write("H", H)
        storage.release()
        np.testing.assert_array_equal(read_homography(tmp_path / name), H)
    np.save(tmp_path / "h.npy", H)
    np.testing.assert_array_equal(read_homography(tmp_path / "h.npy"), H)


class Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_a_pickle_in_an_npy_is_not_run(tmp_path):
    mark = tmp_path / "run"
    np.save(tmp_path / "h.npy", np.array([Touch(str(mark))], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"h\.npy.*not an array of numbers"):
        read_homography(tmp_path / "h.npy")
    assert not mark.exists()


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("h.txt", "1 2 3\n4 5 6\n", r"3 lines of 3 numbers, got lines of \[3, 3\]"),
        ("h.txt", "1 2 3\n4 5 x\n7 8 9", "'x' is not a number"),
        ("h.txt", "1 0 0\n0 1 0\n0 0 inf", "not finite"),
        ("h.txt", "1 2 3\n2 4 6\n0 0 1", "singular"),
        ("h.txt", "", "got lines of"),
        ("h.txt", b"\xff\xd8\xff", "not UTF-8"),
        ("h.txt", "1 " * 600_000, "too many for nine numbers"),
        ("h.npy", b"\x93NUMPY", "not an array"),
        ("h.npy", b"junk", "not an array"),
        ("h.npy", b"", "not an array"),
        ("h.xml", XML[:-40], "not XML"),
        ("h.xml", "<a/>", "one matrix of OpenCV is expected, found 0"),
        ("h.xml", XML.replace("<rows>3", "<rows>4"), "got 4 x 3 with 9 numbers"),
        ("h.xml", '<!DOCTYPE a [<!ENTITY b "c">]>' + XML, "declaration"),
        ("h.yml", YAML.replace("3", "2", 1), "singular|expected"),
        ("h.yml", YAML + YAML, "found 2"),
        ("h.yml", "H: 3", "found 0"),
    ],
)
def test_a_damaged_homography_is_named(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    if name == "h.yml" and "rows: 3" in str(data) and str(data).count("opencv") == 1:
        (tmp_path / name).write_text(str(data).replace("rows: 3", "rows: 2"))
    with pytest.raises(ValueError, match=message) as error:
        read_homography(tmp_path / name)
    assert name in str(error.value)
    assert "\n" not in str(error.value)


def test_the_first_image_against_the_others(tmp_path):
    for name in ("H2", "H3"):
        (tmp_path / name).write_text(LINES)
    (tmp_path / "x y").mkdir()
    images = [tmp_path / "x y" / "a.png", tmp_path / "x y" / "b.png", tmp_path / "c.png"]
    found = image_pairs(images, [tmp_path / "H2", tmp_path / "H3"])
    assert found.root == tmp_path
    assert [(p.image0, p.image1) for p in found.pairs] == [("x y/a.png", "x y/b.png"), ("x y/a.png", "c.png")]
    assert (found.name, found.task) == ("images", "homography")
    below = image_pairs(["x y/a.png", "c.png"], [tmp_path / "H2"], root=tmp_path)
    assert below.pairs[0].image1 == "c.png"


def test_images_and_homographies_that_do_not_fit(tmp_path):
    (tmp_path / "H").write_text(LINES)
    with pytest.raises(ValueError, match="at least two images, got 1"):
        image_pairs(["a"], [])
    with pytest.raises(ValueError, match="3 images need 2 homographies, got 1"):
        image_pairs(["a", "b", "c"], [tmp_path / "H"])
    with pytest.raises(ValueError, match=r"'b' is given twice"):
        image_pairs(["a", "b", "b"], [tmp_path / "H"] * 2)
    with pytest.raises(ValueError, match="cannot read"):
        image_pairs(["a", "b"], [tmp_path / "none"])
    with pytest.raises(ValueError, match="a path below the root"):
        image_pairs(["a", "../b"], [tmp_path / "H"], root=tmp_path)
