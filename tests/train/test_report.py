"""Pictures are drawn for few and for many classes, and without a single number."""

import pytest
import torch
from PIL import Image

from vispe.metrics.classification import Tally
from vispe.train.report import at_size, draw_confusion, draw_curves, peak_memory, versions


@pytest.mark.parametrize("count", [2, 15, 31, 200])
def test_confusion(tmp_path, count):
    confusion = torch.eye(count, dtype=torch.float64)
    confusion[0, 0] = 0  # a class without images
    draw_confusion(tmp_path / "c.png", confusion, [f"class ${k}_x with a long name" for k in range(count)])
    with Image.open(tmp_path / "c.png") as image:
        assert image.format == "PNG"


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"update": 1.0, "loss": 2.0, "lr": 0.1}],
        [{"update": 5.0, "val_loss": 1.0, "val_accuracy": 0.5, "val_top5": 1}],
        [{"update": 1.0, "loss": 2.0, "lr": 0.1}, {"update": 5.0, "val_loss": 1.0}],
        [{"update": 5.0, "val_loss": 1.0, "val_miou": 0.5, "val_pixel_accuracy": 0.7}],
    ],
)
def test_curves(tmp_path, rows):
    draw_curves(tmp_path / "c.png", rows, 5)
    assert (tmp_path / "c.png").stat().st_size > 1000


def test_the_entry_of_a_size():
    tally = Tally(2)
    tally.add(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1]))
    entry = at_size(tally, {"seconds": 0.5, "images_per_second": 4.0})
    assert entry["accuracy"] == 0.5
    assert entry["milliseconds_per_image"] == 250.0


def test_versions_and_memory():
    assert torch.__version__.startswith(versions()["torch"].partition("+")[0])
    assert peak_memory(torch.device("cpu")) > 50
