"""evaluate coco-..., evaluate semantic into a folder, and predict of a detector, as a person meets them."""

import json

import pytest
from PIL import Image

from tests.conftest import vispe_
from tests.evaluate.small_scenes import DATA, detector, opened, segmenter, write_scenes
from vispe.detector import load_detector, measure, save_detector
from vispe.segmenter import save_segmenter

pytest.importorskip("pycocotools", reason="the extra `detect` brings it")
pytest.importorskip("faster_coco_eval", reason="the extra `detect` brings it")
pytest.importorskip("timm", reason="the extra `detect` brings it")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Scenes, and three trained files beside them."""
    root = write_scenes(tmp_path_factory.mktemp("scenes with spaces é"))
    save_detector(root / "detr.safetensors", detector("detr_resnet50"))
    save_detector(root / "whole.safetensors", detector("mask2former_resnet50", DATA))
    save_segmenter(root / "areas.safetensors", segmenter())
    return root


def data(root, name="instances"):
    return "--images", root / "images", "--annotations", root / f"{name}.json", "--workers", 0


def test_detection(root, tmp_path, capfd):
    words = ("evaluate", "coco-detection", root / "detr.safetensors", *data(root), "--out", tmp_path / "out")
    assert vispe_(*words) == 0
    out, err = capfd.readouterr()
    lines = out.splitlines()
    assert lines[0] == f"detr_resnet50, 5 images of {root / 'instances.json'}"
    assert lines[1].split()[:4] == ["boxes", "AP", "AP50", "AP75"]
    assert lines[3] == f"wrote {tmp_path / 'out'}: examples.png, predictions.h5, report.json, results.json"
    assert err == ""
    report = json.loads((tmp_path / "out/report.json").read_text())
    told = measure(load_detector(root / "detr.safetensors"), opened(root))[0].summary()["boxes"]
    assert list(report["per_class"]["boxes"].values()) == told.pop("per_class")
    assert report["numbers"]["boxes"] == told
    assert report["checkpoint"] == str(root / "detr.safetensors")
    assert report["made"]["model"] == "detr_resnet50"
    assert len(report["data"]["sha256"]) == 64
    assert report["libraries"]["faster-coco-eval"]
    assert vispe_(*words, "--limit", 2) == 0
    assert capfd.readouterr().out.startswith("detr_resnet50, 2 images of")


def test_panoptic_and_its_things(root, tmp_path, capfd):
    words = (root / "whole.safetensors", *data(root, "panoptic"), "--limit", 2, "--size", "32x48", "--out")
    assert vispe_("evaluate", "coco-panoptic", *words, tmp_path / "p") == 0
    assert capfd.readouterr().out.splitlines()[1].split()[:4] == ["panoptic", "PQ", "SQ", "RQ"]
    assert len(list((tmp_path / "p/panoptic").iterdir())) == 2
    assert vispe_("evaluate", "coco-detection", *words, tmp_path / "d") == 0
    out = capfd.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if "AP50" in line] == ["boxes", "masks"]
    assert "left out: sky" in out
    made = json.loads((tmp_path / "d/report.json").read_text())["made"]
    assert (made["short"], made["long"]) == (32, 48)


def test_semantic_into_a_folder(root, tmp_path, capfd):
    words = ("evaluate", "semantic", root / "areas.safetensors", "--data", root / "semantic", "--size", 24, 40)
    assert vispe_(*words, "--out", tmp_path / "out") == 0
    first = [line.split()[0] for line in capfd.readouterr().out.splitlines()]
    assert first == ["segformer_b0,", "short", "24", "40", "wrote"]
    assert vispe_(*words, "--out", tmp_path / "e.json", "--batch", 4) == 0
    kept = json.loads((tmp_path / "out/report.json").read_text())["results"]
    told = json.loads((tmp_path / "e.json").read_text())["results"]
    for one, other in zip(kept, told, strict=True):
        assert one["numbers"] == other["numbers"]
        assert one["per_class"] == other["per_class"]
        assert other.keys() - one.keys() == set()


def test_mistakes_of_evaluation(root, tmp_path, complaint):
    detection, detr = ("evaluate", "coco-detection"), root / "detr.safetensors"
    assert "name a CHECKPOINT or a --model, one of them" in complaint(*detection, *data(root))
    assert "one of them" in complaint(*detection, detr, "--model", "detr_resnet50", *data(root))
    assert "--weights and --origin belong to --model" in complaint(*detection, detr, "--weights", "a", *data(root))
    for option in ("--limit", "--batch", "--devices", "--nodes"):
        said = complaint(*detection, detr, *data(root), option, 0)
        assert f"argument {option}: a whole number of at least 1 is needed, got '0'" in said
    for size in ("64x32", "3x", "axb"):
        said = complaint(*detection, detr, *data(root), "--size", size)
        assert f"--size is N or NxM, the short side and the most of the long one in pixels, got '{size}'" in said
    assert "--out is a folder, for a report" in complaint(*detection, detr, *data(root), "--out", "r.json")
    assert "was trained to segment, not to detect" in complaint(*detection, root / "areas.safetensors", *data(root))
    words = ("--model", "detr_resnet50", "--weights", root / "whole.safetensors", *data(root))
    assert "was trained here, on classes of its own" in complaint(*detection, *words)
    assert "device 'cud'" in complaint(*detection, detr, *data(root), "--device", "cud")
    said = complaint("evaluate", "coco-panoptic", detr, *data(root, "panoptic"))
    assert "finds boxes, no segments" in said
    said = complaint("evaluate", "coco-panoptic", root / "whole.safetensors", *data(root))
    assert "coco-panoptic needs a panoptic file" in said
    other = json.loads((root / "instances.json").read_text())
    other["categories"][0]["name"] = "cup"
    (root / "cups.json").write_text(json.dumps(other))
    said = complaint(*detection, detr, *data(root, "cups"))
    assert "the network cannot say 'cup' of" in said
    other["images"].append({"id": 1, "file_name": "gone.png", "height": 5, "width": 5})
    (root / "gone.json").write_text(json.dumps(other))
    assert "1 of 6 images are missing, first" in complaint(*detection, detr, *data(root, "gone"))
    assert "the network cannot say 'cup'" in complaint(*detection, detr, *data(root, "gone"), "--bad", "skip")
    panoptic = ("evaluate", "coco-panoptic", root / "whole.safetensors", *data(root, "panoptic"))
    assert "there is no folder of its PNGs '/no'; --pngs, or" in complaint(*panoptic, "--pngs", "/no")
    assert "5 of 5 PNGs are missing, first" in complaint(*panoptic, "--pngs", root / "images/..")
    semantic = ("evaluate", "semantic", root / "areas.safetensors", "--data", root / "semantic")
    assert "keep their predictions in a folder" in complaint(*semantic, "--devices", 2)


# --- predict ----------------------------------------------------------------------------------------------------------


def test_predict_writes_what_was_found(root, tmp_path, capfd):
    (tmp_path / "junk.png").write_text("junk")
    images = (root / "images/0.png", root / "images/1.png", tmp_path / "junk.png")
    words = ("predict", root / "whole.safetensors", "--threshold", 0, *images)  # images may stand behind options
    assert vispe_(*words, "--out", tmp_path / "p") == 2, "an image could not be read"
    assert vispe_(*words, "--out", tmp_path / "p", "--skip-bad") == 0
    out, err = capfd.readouterr()
    assert out.startswith(f"wrote {tmp_path / 'p'}: 2 images, ")
    assert out.endswith(" segments, 1 could not be read\n")
    assert "junk.png" in err
    names = {path.name for path in (tmp_path / "p").iterdir()}
    assert names == {f"{k}{end}" for k in (0, 1) for end in (".json", ".png", "_overlay.png")}
    assert vispe_("predict", root / "detr.safetensors", root / "images", "--out", tmp_path / "d", "--size", 32) == 0
    assert len(list((tmp_path / "d").iterdir())) == 10


def test_mistakes_of_predict(root, tmp_path, complaint):
    Image.new("RGB", (20, 20)).save(tmp_path / "x.png")
    (tmp_path / "junk.png").write_text("junk")
    detr = root / "detr.safetensors"
    assert "arguments are required: IMAGE|FOLDER" in complaint("predict", detr)
    assert "junk.png" in complaint("predict", detr, tmp_path / "junk.png")
    assert "threshold lies in [0, 1)" in complaint("predict", detr, tmp_path / "x.png", "--threshold", 2)
    assert "would be written over" in complaint("predict", detr, tmp_path / "x.png", "--out", tmp_path)
    assert "--out is a folder, for JSON files and overlays, got 'x.csv'" in complaint(
        "predict", detr, tmp_path / "x.png", "--out", "x.csv"
    )
    assert "--top is of classifiers; of objects, --threshold says" in complaint(
        "predict", detr, tmp_path / "x.png", "--top", 3
    )
    assert "--batch is of classifiers" in complaint("predict", detr, tmp_path / "x.png", "--batch", 3)
    areas = root / "areas.safetensors"
    assert "--threshold is of objects; here every" in complaint("predict", areas, tmp_path / "x.png", "--threshold", 0)
    assert "--out is a folder, for masks" in complaint("predict", areas, tmp_path / "x.png", "--out", "x.csv")
    said = complaint("predict", "--model", "vit_tiny_patch16_224", tmp_path / "x.png")
    assert "a model that finds objects is one of detr_resnet50" in said
    assert "--weights and --origin belong to --model" in complaint("predict", detr, tmp_path / "x.png", "--origin", "a")
