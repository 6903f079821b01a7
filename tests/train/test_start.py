"""The model a recipe starts from."""

import re

import pytest
import torch

from vispe.train.classify import fit
from vispe.train.start import model_overrides, starting_model


def test_fresh(tiny):
    model, report = starting_model(tiny().model, 5)
    assert model.spec.num_classes == 5
    assert model.spec.image_size == (16, 16)
    assert report == []


@pytest.mark.parametrize("line", ["axial", "table + mixed", "none", "{rotated: axial}"])
def test_the_encoding_is_one_line(tiny, line):
    model, _ = starting_model(tiny(f"model.position={line}").model, 2)
    assert model(torch.zeros(1, 3, 16, 16)).shape == (1, 2)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("model.widht=3", "has no 'widht'; it has image_size"),
        ("model.depth=twelve", "model.depth must be a valid integer, got 'twelve'"),
        ("model.position=spiral", "spiral"),
        ("model.image_size=17", "model: an image of (h, w) = (17, 17)"),
        ("model.name=vit_tinny", "no model is called 'vit_tinny'"),
        ("model.name=disk", "disk is no image classifier"),
    ],
)
def test_mistakes(tiny, word, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        model_overrides(tiny(word).model)


def test_a_trained_file_at_another_resolution(tiny, tmp_path):
    """Its own image size is the source of the table; head and table are told of."""
    fit(tiny("train.epochs=1"), tmp_path / "one", say=lambda _: None)
    file = tmp_path / "one" / "last.safetensors"
    given = tiny(f"model.weights={file}", "model.image_size=[24, 32]").model
    model, report = starting_model(given, 3)
    assert model.spec.grid == (6, 8)
    assert any("position" in sentence for sentence in report)
    assert any(sentence.startswith("head.weight: fresh") for sentence in report)
    same, report = starting_model(tiny(f"model.weights={file}").model, 2)
    assert not [sentence for sentence in report if "fresh" in sentence]
    assert torch.isfinite(same(torch.zeros(1, 3, 16, 16))).all()


def test_a_trained_file_of_another_shape(tiny, tmp_path):
    fit(tiny("train.epochs=1"), tmp_path / "one", say=lambda _: None)
    with pytest.raises(ValueError, match="of another shape: ") as caught:
        starting_model(tiny(f"model.weights={tmp_path / 'one'}", "model.depth=3").model, 2)
    assert "\n" not in str(caught.value)


def test_a_file_that_does_not_fit(tiny, tmp_path):
    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    with pytest.raises(ValueError, match=r"junk\.safetensors"):
        starting_model(tiny(f"model.weights={tmp_path / 'junk.safetensors'}").model, 2)
