"""HPatches in folders made here, and the four scenes of the Oxford set where they are."""

import tomllib

import numpy as np
import pytest
from PIL import Image

from vispe.data.hpatches import FOLDER, hpatches
from vispe.evaluate.protocol import preset, presets
from vispe.paths import shared

FACTS = tomllib.loads((shared("data") / "hpatches.toml").read_text(encoding="utf-8"))


def sequence(root, name, suffix="ppm"):
    folder = root / name
    folder.mkdir(parents=True)
    for k in range(1, 7):
        Image.new("RGB", (8, 6), (k, 0, 0)).save(folder / f"{k}.{suffix}")
        if k > 1:
            (folder / f"H_1_{k}").write_text(f"1 0 {k}\n0 1 0 \n0 0 1\n\n")
    return folder


@pytest.mark.parametrize("above", [False, True])
def test_five_pairs_a_sequence(tmp_path, above):
    root = tmp_path / FOLDER if above else tmp_path
    for name, suffix in (("v_b", "ppm"), ("i_a", "png"), ("other", "ppm")):
        sequence(root, name, suffix)
    found = hpatches(tmp_path)
    assert found.root == root
    assert [(p.image0, p.image1, p.group) for p in found.pairs][::5] == [
        ("i_a/1.png", "i_a/2.png", "illumination"),
        ("v_b/1.ppm", "v_b/2.ppm", "viewpoint"),
    ]
    assert [p.homography[0, 2] for p in found.pairs] == [2, 3, 4, 5, 6] * 2
    assert found.note == "2 of 108 sequences"
    assert (found.name, found.task, found.pixel, found.K_size) == ("hpatches", "homography", 0.0, None)
    found.check_files()


def test_the_eight_large_sequences_are_left_out(tmp_path):
    excluded = FACTS["dataset"]["excluded"]
    assert len(excluded) == 8
    for name in (*excluded, "v_b"):
        sequence(tmp_path, name)
    assert {p.image0 for p in hpatches(tmp_path).pairs} == {"v_b/1.ppm"}
    everything = hpatches(tmp_path, all_sequences=True)
    assert len(everything.pairs) == 45
    assert everything.note == "9 of 116 sequences"


def test_a_whole_benchmark_needs_no_note(tmp_path):
    for n in range(108):
        folder = tmp_path / f"v_{n:03d}"
        folder.mkdir()
        for k in range(2, 7):
            (folder / f"H_1_{k}").write_text("1 0 0\n0 1 0\n0 0 1")
    found = hpatches(tmp_path)
    assert (len(found.pairs), found.note) == (540, "")
    with pytest.raises(ValueError, match=r"648 of 648 images are missing.*the first is 'v_000/1\.ppm'.*H_1_6"):
        found.check_files()


@pytest.mark.parametrize("case", ["absent", "empty", "excluded only", "a file"])
def test_what_to_fetch(tmp_path, case):
    root = tmp_path / "root"
    if case == "a file":
        root.write_text("")
    elif case != "absent":
        root.mkdir()
    if case == "excluded only":
        sequence(root, "i_dc")
    with pytest.raises(ValueError, match=r"https://.*hpatches-sequences-release\.zip.*1\.3 GB.*Licence: MIT") as error:
        hpatches(root)
    assert repr(str(root)) in str(error.value)
    assert "\n" not in str(error.value)


def test_damage_is_named(tmp_path):
    folder = sequence(tmp_path, "v_b")
    (folder / "H_1_4").write_text("1 0 0\n0 1 0\n")
    with pytest.raises(ValueError, match=r"H_1_4.*3 lines"):
        hpatches(tmp_path)
    (folder / "H_1_4").unlink()
    with pytest.raises(ValueError, match=r"H_1_4.*No such file"):
        hpatches(tmp_path)
    (folder / "H_1_4").write_text("1 0 0\n0 1 0\n0 0 1\n")
    (folder / "4.ppm").unlink()
    with pytest.raises(ValueError, match=r"1 of 6 images are missing.*'v_b/4\.ppm'"):
        hpatches(tmp_path).check_files()


def test_the_oxford_set(measured_data):
    root = measured_data / "oxford_affine"
    if not root.is_dir():
        pytest.skip("no Oxford set here")
    found = hpatches(root)
    assert (len(found.pairs), found.note) == (20, "4 of 108 sequences")
    assert [p.group for p in found.pairs].count("illumination") == 5
    found.check_files()
    graf = next(p for p in found.pairs if p.image1 == "v_graf/2.ppm")
    np.testing.assert_allclose(graf.homography[0], (8.7976964e-01, 3.1245438e-01, -3.9430589e01))


@pytest.mark.parametrize("name", ["lightglue-paper", "glue-factory", "loftr", "roma"])
def test_presets_are_protocols(name):
    assert preset("hpatches", name, "homography").source
    assert name in presets("hpatches")


def test_published_numbers_are_percent_and_belong_to_a_preset():
    for name, claims in FACTS["published"].items():
        assert name in FACTS["preset"]
        for claim in claims:
            assert len(claim["at"]) == len(claim["auc"])
            assert 1 < min(claim["auc"]) <= max(claim["auc"]) < 100
            assert claim["auc"] == sorted(claim["auc"])
            assert claim["name"]
            assert claim["source"]
