"""A loss that is no number stops the run, and the batch is there to be looked at."""

import pytest
import torch
from safetensors import safe_open

from vispe.train.classify import fit
from vispe.train.module import NotFiniteError


def poisoned(monkeypatch, after):
    """The model's output is NaN from forward ``after`` on."""
    from vispe.models.vit import ViT

    forward, count = ViT.forward, [0]

    def broken(self, images):
        count[0] += self.training
        return forward(self, images) * (float("nan") if count[0] > after else 1.0)

    monkeypatch.setattr(ViT, "forward", broken)


def test_nan_stops_with_the_batch(tiny, tmp_path, monkeypatch):
    poisoned(monkeypatch, after=3)
    with pytest.raises(NotFiniteError) as caught:
        fit(tiny(), tmp_path / "run", say=lambda _: None)
    said = str(caught.value)
    assert "the loss became nan at update 3 (epoch 0)" in said
    assert "\n" not in said
    with safe_open(tmp_path / "run" / "bad_batch.safetensors", "pt") as held:
        assert held.get_tensor("images").shape == (8, 3, 16, 16)
        assert held.get_tensor("indices").shape == held.get_tensor("labels").shape == (8,)
        assert held.metadata()["update"] == "3"
    checkpoint = torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == 2
    assert all(value.isfinite().all() for value in checkpoint["state_dict"].values() if value.is_floating_point())


def test_a_rate_that_is_far_too_high(tiny, tmp_path):
    with pytest.raises(NotFiniteError, match=r"lower train\.lr"):
        fit(tiny("train.lr=1e30", "train.clip=null"), tmp_path / "run", say=lambda _: None)
