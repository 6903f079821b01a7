"""Every way of reading a table, right and wrong, against hand-made tables; and the whole story on small images."""

import pytest
import torch

from tests.train.conftest import TINY, write_images
from vispe import recipe as recipes
from vispe.position.resample import RECIPES, resample
from vispe.train.resolutions import TABLE, ResolutionsRecipe, _read, resolutions, table


def test_ways_read_what_they_say():
    old, fresh = torch.randn(37, 8), torch.zeros(1 + 6 * 12, 8)  # a class token, then 4 x 9: also 6 x 6
    right = _read(old, (4, 9), (6, 12), "mae", 1, fresh)
    assert torch.equal(right, resample(old, (4, 9), (6, 12), RECIPES["mae"], 1))
    guessed = _read(old, (4, 9), (6, 12), "square root guessed", 1, fresh)
    assert torch.equal(guessed, resample(old, (6, 6), (6, 12), RECIPES["timm"], 1))
    assert torch.equal(guessed[0], old[0])
    line = _read(old, (4, 9), (6, 12), "prefix resampled too", 1, fresh)
    assert line.shape == fresh.shape
    assert not torch.equal(line[1], old[1])
    assert _read(old, (4, 9), (6, 12), "fresh", 1, fresh) is fresh


@pytest.mark.parametrize(("more", "words"), [({"ways": ["guess"]}, "guess"), ({"sizes": []}, "sizes")])
def test_mistakes_are_named(photos, more, words):
    base = {**TINY, "data": {"root": str(photos)}}
    plain = {"base": base, "sizes": [24], "ways": ["timm"], "finetune": TINY["train"], **more}
    with pytest.raises(ValueError, match=words):
        recipes.of(plain, ResolutionsRecipe)


def test_the_table_by_hand():
    rows = [{"way": "timm", "size": [8, 8], "loaded": 0.5, "tuned": 0.75}]
    text = table({"rows": rows, "size": [4, 4], "start": 0.8})
    assert "Trained at 4 x 4: 80.0 percent there." in text
    assert "| timm | 50.0 | 75.0 |" in text


@pytest.mark.slow
def test_from_end_to_end(tmp_path):
    root = write_images(tmp_path / "photos", (16, 36))
    model = {**TINY["model"], "image_size": [16, 36]}
    train = {"epochs": 1, "batch_size": 8, "lr": 1e-3}
    plain = {
        "base": {**TINY, "model": model, "data": {"root": str(root)}, "train": train},
        "sizes": [[24, 60]],
        "ways": ["timm", "square root guessed"],
        "finetune": train,
    }
    summary = resolutions(recipes.of(plain, ResolutionsRecipe), tmp_path / "out", lambda _: None)
    assert [row["way"] for row in summary["rows"]] == plain["ways"]
    assert all(0 <= row[what] <= 1 for row in summary["rows"] for what in ("loaded", "tuned"))
    state = torch.load(tmp_path / "out" / "timm-24x60.pt", weights_only=True)
    assert len(state[TABLE]) == 1 + 6 * 15
    assert (tmp_path / "out" / "resolutions.md").is_file()
