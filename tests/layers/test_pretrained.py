"""The weights of timm's classifiers in networks of features, under both of their names; what does not fit is said."""

import pytest
import torch

timm = pytest.importorskip("timm", reason="backbones are timm's")

from vispe.layers import pretrained  # noqa: E402
from vispe.layers.pretrained import library, take_weights, trained_classifier  # noqa: E402
from vispe.layers.timm_features import backbone  # noqa: E402

SWIN = {"embed_dim": 24, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 2, 4)}


@pytest.mark.parametrize(
    ("name", "knobs"),
    [("resnet18", {"channels": (8, 8, 16, 16)}), ("swin_tiny_patch4_window7_224", SWIN)],
    ids=["resnet", "swin"],
)
def test_a_classifier_is_the_start(name, knobs):
    """Every weight of the features is the classifier's, and the maps are those of timm's own features."""
    torch.manual_seed(0)
    classifier = timm.create_model(name, **knobs).eval()
    own = backbone(name, knobs, norm="batch").eval()
    own.start_from(classifier.state_dict())
    given = classifier.state_dict()
    for key, value in own.net.state_dict().items():
        assert torch.equal(value, given[key if key in given else key.replace("layers_", "layers.", 1)]), key
    x = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        last = own.net(x)[-1]
        whole = classifier.forward_features(x)
    whole = whole if name == "resnet18" else None  # Swin's own last norm lies behind the map
    if whole is not None:
        torch.testing.assert_close(last, whole)


def test_what_does_not_fit_is_named_and_changes_nothing():
    own = backbone("resnet18", {"channels": (8, 8, 16, 16)}, norm="batch")
    before = {key: value.clone() for key, value in own.net.state_dict().items()}
    with pytest.raises(ValueError, match=r"weights do not fit resnet18: missing \['conv1.weight'"):
        take_weights(own.net, {"other": torch.zeros(1)}, "resnet18")
    wrong = {**before, "conv1.weight": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"unknown or misshapen \['conv1.weight'\]"):
        take_weights(own.net, wrong, "resnet18")
    assert all(torch.equal(value, before[key]) for key, value in own.net.state_dict().items())


def test_a_download_that_fails_is_a_sentence(monkeypatch):
    class Broken:
        def create_model(self, *_, **__):
            raise OSError("no\nnetwork")

    monkeypatch.setattr(pretrained, "library", Broken)
    with pytest.raises(ValueError, match=r"timm's weights of resnet18 cannot be had \(no network\); give a file"):
        trained_classifier("resnet18", {})


def test_the_host_keeps_its_environment(monkeypatch):
    monkeypatch.delenv(pretrained.CACHE, raising=False)
    assert library().__name__ == "timm"
    assert pretrained.CACHE not in __import__("os").environ
