"""Matchers from end to end: one that learns, beats its descriptors, goes on exactly; mistakes have their sentence."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import vispe
from tests.data.test_megadepth import write_posed
from tests.train.test_classify import KilledError, numbers, quiet, stopped_at
from vispe import recipe
from vispe.data.megadepth import read_depth
from vispe.layers.assignment import assign
from vispe.models.lightglue import LightGlue, Points
from vispe.position.rotary import rotate
from vispe.train.match import MatchRecipe, found_pairs, from_descriptors, load_matcher, match, sharpness
from vispe.train.match_scores import lightglue, scored
from vispe.train.module import NotFiniteError

pytest.importorskip("cv2", reason="SIFT is OpenCV's")
pytest.importorskip("skimage", reason="the photographs are scikit-image's")
ROOT = Path(__file__).resolve().parents[2]
MATCH = {
    "task": "match",
    "model": {"name": "lightglue_sift", "weights": "fresh", "width": 128, "depth": 2, "num_heads": 4},
    "data": {
        "roots": ["skimage"], "first": 6, "val_part": 0.34, "val_pairs": 12,
        "views": {"size": [96, 128], "views": 4, "look": 0.0, "overlap": 0.4},
    },
    "features": {"name": "sift", "max_keypoints": 64},
    "train": {
        "epochs": 3, "batch_size": 4, "lr": 5e-4, "warmup_epochs": 0.5, "save_every": 1, "log_every": 1,
    },
    "run": {"accelerator": "cpu"},
}  # fmt: skip


def given(*words):
    return recipe.of(MATCH, MatchRecipe, words)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("match") / "run"
    words = ("train.epochs=40", "train.validate_every=20", "train.lr=1e-3")
    return folder, match(given(*words), folder, say=quiet)


# --- a whole run ------------------------------------------------------------------------------------------------------


def test_it_learns_and_says_what_it_is_worth(finished):
    folder, report = finished
    files = {"run.json", "metrics.csv", "report.json", "best.safetensors", "last.safetensors", "curves.png"}
    assert {p.name for p in folder.iterdir()} - {"tensorboard"} == {*files, "examples.png", "features.h5"}
    assert json.loads((folder / "report.json").read_text()) == report
    results = report["results"]
    assert set(results) == {"lightglue", "mutual_nn", "mutual_nn_ratio"}
    assert 0 < results["mutual_nn"]["precision"] < results["mutual_nn_ratio"]["precision"] <= 1
    rows = [row for row in numbers(folder) if "val_loss" in row]
    assert rows[-1]["val_precision"] == pytest.approx(results["lightglue"]["precision"], abs=1e-6)
    losses = [row["loss"] for row in numbers(folder) if "loss" in row]
    assert np.mean(losses[-5:]) < 0.5 * np.mean(losses[:5])
    assert report["data"] == {"train": 4, "val": 2, "skipped": []}
    for name in ("curves.png", "examples.png"):
        with Image.open(folder / name) as image:
            image.load()


def test_the_file_is_a_matcher(finished):
    """Through ``vispe.load``, its own shape read from the file; as ``Matcher``'s weights too."""
    folder, report = finished
    trained = load_matcher(folder)
    assert trained.extractor == "sift"
    loaded = vispe.load("lightglue_sift", folder / "last.safetensors")
    assert loaded.spec.depth == 2
    assert all(torch.equal(v, trained.model.state_dict()[k]) for k, v in loaded.state_dict().items())
    data = found_pairs(given(), folder, quiet)
    assert scored(data.val, lightglue(trained.model)) == report["results"]["lightglue"]


def test_the_file_matches_images(finished):
    """As ``weights`` of the extractor it was trained for; for another it is refused in a sentence."""
    skimage = pytest.importorskip("skimage.data", reason="the pictures are scikit-image's")
    weights = finished[0] / "last.safetensors"
    matcher = vispe.Matcher("sift", weights=weights, max_keypoints=256)
    assert matcher.network.spec.depth == 2
    image = np.ascontiguousarray(skimage.astronaut()[:256, :256])
    found = matcher(image, image, geometry="none")
    assert len(found) > 20
    assert (found.matches[:, 0] == found.matches[:, 1]).mean() > 0.8
    same = vispe.Matcher("sift", weights=finished[0], max_keypoints=256)(image, image, geometry="none")
    assert np.array_equal(same.matches, found.matches), "a run's folder is its last weights"
    with pytest.raises(ValueError, match="was trained for the features of sift, not of aliked_t16"):
        vispe.Matcher("aliked_t16", weights=weights)


def test_a_start_from_a_file_keeps_what_it_knew(finished, tmp_path):
    words = (f"model.weights={finished[0]}", "train.epochs=1", "train.lr=1e-12")
    report = match(given(*words), tmp_path / "run", say=quiet)
    assert report["results"]["lightglue"]["precision"] == pytest.approx(
        finished[1]["results"]["lightglue"]["precision"], abs=0.02
    )


def test_it_starts_as_its_descriptors():
    """Fresh weights give the dual softmax of the cosines, in every layer."""
    model = vispe.build("lightglue_sift", input_dim=32, width=32, depth=2, num_heads=2)
    assert isinstance(model, LightGlue)
    from_descriptors(model, torch.randn(50, 32), 20.0)
    d0, d1 = (torch.nn.functional.normalize(torch.randn(1, k, 32), dim=-1) for k in (9, 7))
    sides = [
        Points(torch.rand(1, k, 2) * 50, d, (50.0, 50.0), None, *torch.rand(2, 1, k)) for k, d in ((9, d0), (7, d1))
    ]
    with torch.inference_mode():
        found = model.match(*sides)
        zero = [model.heads[-1].matchability(d)[..., 0] for d in (d0, d1)]
        wanted = assign(d0 * 20**0.5, d1 * 20**0.5, *zero, None, None, 0.1, 1 << 20)
    assert torch.equal(found.matches0, wanted.matches0)
    torch.testing.assert_close(found.scores0, wanted.scores0, atol=1e-5, rtol=1e-4)


def test_it_starts_by_looking_at_the_most_similar_and_around_itself():
    model = vispe.build("lightglue_sift", input_dim=32, width=32, depth=1, num_heads=1)
    from_descriptors(model, torch.randn(50, 32), 200.0)
    own, cross = model.layers[0].self_attn, model.layers[0].cross_attn
    d0, d1 = (torch.nn.functional.normalize(torch.randn(k, 32), dim=-1) for k in (9, 7))
    with torch.no_grad():
        weights = (cross.qk(d0) @ cross.qk(d1).T / 32**0.5).softmax(-1)
        assert torch.equal(weights.argmax(1), (d0 @ d1.T).argmax(1))
        torch.testing.assert_close(weights, (200 * d0 @ d1.T).softmax(-1), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(cross.out(cross.v(d1)) / 32**0.5, d1)

        places = torch.tensor([[0.0, 0, 3, 0], [0.1, 0, 3, 0], [0.8, 0.5, 3, 0]])
        q, k, _ = own.qkv(torch.zeros(3, 32)).unflatten(-1, (3, -1)).unbind(1)
        turn = model.basis(places)
        scores = rotate(q, turn) @ rotate(k, turn).T
    assert torch.equal(scores.argmax(1), torch.arange(3))
    assert scores[0, 1] > scores[0, 2]


def test_a_narrower_one_starts_as_their_principal_directions():
    """Descriptors that lie in a plane of 8 dimensions lose nothing in a network of that width."""
    model = vispe.build("lightglue_sift", input_dim=32, width=8, depth=1, num_heads=2)
    basis = torch.linalg.qr(torch.randn(32, 8)).Q
    sample = torch.randn(200, 8) @ basis.T
    from_descriptors(model, sample, 20.0)
    projected = model.input_proj(sample)
    torch.testing.assert_close(projected @ projected.T, 8 * sample @ sample.T, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("width", [16, 32, 48])
def test_a_network_of_any_width_starts_as_a_dual_softmax(width):
    """Narrower, as wide, wider: of descriptors within 16 dimensions nothing is lost, and what layers see has entries of
    variance one where there is a projection."""
    model = vispe.build("lightglue_sift", input_dim=32, width=width, depth=2, num_heads=2)
    basis = torch.linalg.qr(torch.randn(32, 16)).Q
    d0, d1 = (torch.nn.functional.normalize(torch.randn(1, k, 16) @ basis.T, dim=-1) for k in (9, 7))
    from_descriptors(model, torch.cat((d0[0], d1[0])), 20.0)
    sides = [
        Points(torch.rand(1, k, 2) * 50, d, (50.0, 50.0), None, *torch.rand(2, 1, k)) for k, d in ((9, d0), (7, d1))
    ]
    with torch.inference_mode():
        scores, _ = model.every_layer(*sides)
        wanted = (20 * d0 @ d1.mT).log_softmax(1) + (20 * d0 @ d1.mT).log_softmax(2)
        surely = 2 * torch.nn.functional.logsigmoid(torch.tensor(2.0))
        for layer in scores:
            torch.testing.assert_close(layer[:, :-1, :-1], wanted + surely, atol=1e-4, rtol=1e-4)
        assert width == 32 or model.input_proj(d0).square().sum(-1).mean().item() == pytest.approx(
            min(width, 32), rel=1e-3
        )


def test_the_start_is_as_sharp_as_the_pairs_say():
    """Where partners are far more alike than others a sharp softmax is likelier; where they are not, a flat one."""

    class Pairs(list):
        def __getitems__(self, keys):
            return self[keys[0][1]]

    def made(noise):
        torch.manual_seed(0)
        d = torch.nn.functional.normalize(torch.randn(1, 30, 32), dim=-1)
        other = torch.nn.functional.normalize(d + noise * torch.randn(1, 30, 32) / 32**0.5, dim=-1)
        return SimpleNamespace(
            descriptors0=d, descriptors1=torch.cat((other, torch.zeros(1, 2, 32)), 1), matches0=torch.arange(30)[None],
            mask0=torch.ones(1, 30, dtype=torch.bool), mask1=torch.arange(32)[None] < 30,
        )  # fmt: skip

    clear, lost = (sharpness(Pairs([made(noise)] * 2)) for noise in (0.5, 2.5))
    assert lost < 20 < 40 < clear


def test_images_with_poses_and_depths(tmp_path):
    """In MegaDepth's layout: true matches lie where depth takes them, the report tells the pose's error."""
    pytest.importorskip("poselib", reason="poses are PoseLib's")
    root = write_posed(tmp_path / "megadepth")
    poses = {"root": str(root), "pairs": 8, "val_pairs": 6, "resize": 128}
    made = recipe.of({**MATCH, "poses": poses}, MatchRecipe, ["train.epochs=2", "train.negative=5"])
    report = match(made, tmp_path / "run", say=quiet)
    assert report["data"]["train"] == 4
    assert report["results"]["mutual_nn"]["recall"] > 0.3
    assert len(report["results"]["lightglue"]["auc"]) == 3
    assert np.isfinite(numbers(tmp_path / "run")[-1]["val_loss"])
    with pytest.raises(ValueError, match=r"there is no poses\.foo"):
        recipe.of({**MATCH, "poses": {**poses, "foo": 1}}, MatchRecipe)
    for path in (root / "depths" / "0001").iterdir():
        path.write_text("junk")
    read_depth.cache_clear()
    with pytest.raises(ValueError, match="is no depth map"):
        match(made, tmp_path / "other", say=quiet)


# --- going on ---------------------------------------------------------------------------------------------------------


def test_a_run_goes_on_as_if_nothing_had_been(tmp_path, monkeypatch):
    match(given(), tmp_path / "whole", say=quiet)
    for update in (1, 3, 5):
        with monkeypatch.context() as patched:
            stopped_at(patched, update)
            with pytest.raises(KilledError):
                match(given(), tmp_path / "parts", say=quiet)
    match(given(), tmp_path / "parts", say=quiet)
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")
    one, two = (load_matcher(tmp_path / run).model.state_dict() for run in ("whole", "parts"))
    assert all(torch.equal(value, two[key]) for key, value in one.items())


def test_a_run_that_began_with_a_file_goes_on_in_its_shape(finished, tmp_path, monkeypatch):
    """The recipe does not say the shape, and the file may be gone by then."""
    start = shutil.copy(finished[0] / "last.safetensors", tmp_path / "start.safetensors")
    begun = recipe.of({**MATCH, "model": {"name": "lightglue_sift", "weights": str(start)}}, MatchRecipe, [])
    with monkeypatch.context() as patched:
        stopped_at(patched, 3)
        with pytest.raises(KilledError):
            match(begun, tmp_path / "run", say=quiet)
    start.unlink()
    report = match(begun, tmp_path / "run", say=quiet)
    assert report["parameters"] == finished[1]["parameters"]
    assert report["loaded"] == [f"weights: {start}"]


def test_computing_twice_changes_nothing(tmp_path):
    for name, words in (("kept", ()), ("twice", ("train.checkpoint=true",))):
        match(given("train.epochs=1", *words), tmp_path / name, say=quiet)
    one, two = numbers(tmp_path / "kept"), numbers(tmp_path / "twice")
    for a, b in zip(one, two, strict=True):
        assert a == {key: pytest.approx(value, rel=1e-4, abs=1e-5) for key, value in b.items()}


def test_bf16(tmp_path):
    match(given("train.epochs=1", "train.precision=bf16"), tmp_path / "run", say=quiet)
    assert np.isfinite(numbers(tmp_path / "run")[-1]["val_loss"])


def test_nan_stops(tmp_path, monkeypatch):
    forward = LightGlue.every_layer

    def broken(self, *args, **kwargs):
        scores, sure = forward(self, *args, **kwargs)
        return [s * float("nan") for s in scores], sure

    monkeypatch.setattr(LightGlue, "every_layer", broken)
    with pytest.raises(NotFiniteError, match="the loss became nan at update 0"):
        match(given(), tmp_path / "run", say=quiet)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("model.name=vit_tiny_patch16_224",), "vit_tiny_patch16_224 is no LightGlue"),
        (("model.foo=1",), "foo"),
        (("model.input_dim=64",), "model.input_dim is 64, sift gives 128"),
        (("train.positive=0",), "0 < positive <= negative, in pixels, got 0"),
        (("train.balance=halves",), "train.balance"),
        (("train.layer_decay=0.5",), "are a classifier's knobs"),
        (("features.name=orb",), "orb"),
        (("data.roots=[/nowhere]",), "/nowhere"),
        (("data.views.size=[8, 8]",), "sides of at least 32 pixels"),
        (("model.weights=/nowhere/x.safetensors",), "/nowhere/x"),
        (("run.strategy=fsdp",), "matchers train with ddp"),
        (("train.batch_size=64",), "8 training examples an epoch are fewer than a batch of 64"),
    ],
)
def test_mistakes_are_named(tmp_path, words, said):
    with pytest.raises((ValueError, OSError)) as caught:
        match(given(*words), tmp_path / "run", say=quiet)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "metrics.csv").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("model.input_dim=64",),
        ("model.weights=/nowhere/x.safetensors",),
        ("model.name=lightglue_disk", "model.weights=published", "features.name=aliked_t16"),
        ("model.name=lightglue", "model.weights=published"),
        ("train.batch_size=512",),
    ],
)
def test_mistakes_are_named_before_features_are_found(tmp_path, words):
    with pytest.raises(ValueError, match=r"128|x\.safetensors|no published weights|a batch of 512"):
        match(given(*words), tmp_path / "run", say=quiet)
    assert not (tmp_path / "run").exists()


def test_mistakes_are_named_in_pictures_without_texture(tmp_path):
    for k in range(6):
        Image.new("RGB", (140, 110), (k * 30, 80, 90)).save(tmp_path / f"{k}.png")
    with pytest.raises(ValueError, match=r"sift finds no keypoint in any image to learn from \(4\)"):
        match(given(f"data.roots=[{tmp_path}]"), tmp_path / "run", say=quiet)


@pytest.mark.parametrize("path", sorted((ROOT / "configs/match").glob("lightglue_*.yaml")), ids=lambda p: p.stem)
def test_shipped_recipes_are_valid_and_say_their_command(path):
    text = path.read_text()
    assert f"# vispe train configs/match/{path.name}" in text
    assert "# time: " in text
    assert "expected: " in text
    recipe.read(path, MatchRecipe, [])


@pytest.mark.slow
def test_two_processes_are_one(tmp_path):
    """DDP over gloo gives the curve of one process."""
    import yaml

    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(MATCH))
    env = {**os.environ, "VISPE_CACHE": str(tmp_path / "cache")}
    for name, words in (("one", []), ("two", ["run.devices=2", "run.strategy=ddp"])):
        command = [sys.executable, "-m", "vispe", "train", str(path), *words, "train.epochs=2", "--out"]
        subprocess.run([*command, str(tmp_path / name)], env=env, check=True, capture_output=True)
    one, two = numbers(tmp_path / "one"), numbers(tmp_path / "two")
    assert len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        assert a == {key: pytest.approx(value, rel=1e-3, abs=2e-3) for key, value in b.items()}
