"""The tables of what there is."""

from vispe.listing import data_rows, encoding_rows, model_rows
from vispe.models import MODELS
from vispe.position import ENCODINGS
from vispe.weights import files


def test_every_model_has_a_row_as_wide_as_the_header():
    header, rows = model_rows()
    assert [row[0] for row in rows] == list(MODELS)
    assert {len(row) for row in rows} == {len(header)}


def test_the_state_of_weights(monkeypatch, tmp_path):
    monkeypatch.setenv("VISPE_CACHE", str(tmp_path))
    monkeypatch.setattr("vispe.listing.packaged", lambda weights: None)
    states = {row[0]: row[1] for row in model_rows()[1]}
    assert states["lightglue_aliked"] == "to download (48 MB)"
    assert states["superpoint"] == "to download"
    target = files.cached(files.facts("superpoint")["weights"])
    target.parent.mkdir(parents=True)
    target.write_bytes(b"x")
    assert {row[0]: row[1] for row in model_rows()[1]}["superpoint"] == "in the cache"


def test_every_data_set_has_a_source_and_a_licence():
    header, rows = data_rows()
    assert header[0] == "data"
    assert "motorcycle" in [row[0] for row in rows]
    assert all(all(cell for cell in row) for row in rows)


def test_every_encoding_has_a_row_that_says_where_it_is():
    header, rows = encoding_rows()
    assert header == ("encoding", "socket", "where", "source", "used by")
    assert [row[0] for row in rows] == list(ENCODINGS)
    swin = ("Swin table", "biased", "vispe.position.bias.SwinBias", "Liu et al. 2021, 3.2", "Swin")
    assert swin in rows
