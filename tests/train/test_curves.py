"""metrics.csv survives a kill in the middle of a line and forgets what is done again."""

import pytest

pytest.importorskip("lightning", reason="training needs lightning")

from vispe.train.curves import COLUMNS, Curves, read_curves


def test_rows_come_back(tmp_path):
    curves = Curves(tmp_path / "m.csv")
    curves.log_metrics({"loss": 0.1 + 0.2, "lr": 1e-7}, 1)
    curves.log_metrics({"val_loss": 1.0, "val_accuracy": 0.5, "val_top5": 1.0}, 1)
    assert read_curves(tmp_path / "m.csv") == [
        {"update": 1, "loss": 0.1 + 0.2, "lr": 1e-7},
        {"update": 1, "val_loss": 1.0, "val_accuracy": 0.5, "val_top5": 1.0},
    ]
    assert (tmp_path / "m.csv").read_text().splitlines()[0] == ",".join(COLUMNS)


@pytest.mark.parametrize("tail", ["", "4,2", "4,2.0,,", "\x00\n", "x,1,,,,,,\n"])
def test_a_torn_line_is_forgotten(tmp_path, tail):
    curves = Curves(tmp_path / "m.csv")
    for update in range(1, 4):
        curves.log_metrics({"loss": float(update)}, update)
    with open(tmp_path / "m.csv", "a") as file:
        file.write(tail)
    curves.rewind(2)
    curves.log_metrics({"loss": 9.0}, 3)
    assert [(row["update"], row["loss"]) for row in read_curves(tmp_path / "m.csv")] == [(1, 1), (2, 2), (3, 9)]


def test_no_file_yet(tmp_path):
    Curves(tmp_path / "m.csv").rewind(3)
    assert read_curves(tmp_path / "m.csv") == []
