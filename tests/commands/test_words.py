"""Commands are declared and their words are read."""

import argparse

import pytest

from vispe.commands.words import (
    at_least,
    command,
    extraction,
    fitting_of,
    folder_of,
    inference,
    kinds_of,
    knobs,
    short_of,
    size_of,
)


@pytest.fixture
def place():
    """A parser and where its commands are declared."""
    top = argparse.ArgumentParser(prog="top")
    return top, top.add_subparsers()


def test_a_command_knows_what_runs_and_its_own_name(place):
    top, commands = place
    add = command(commands, "go", print, "go there", "; writes nothing")
    add("where")
    options = top.parse_args(["go", "home"])
    assert (options.run, options.prog, options.where) == (print, "top go", "home")
    assert "Go there; writes nothing." in commands.choices["go"].format_help()


def test_each_kind_has_its_own_options(place, capsys):
    top, commands = place
    kinds = kinds_of(commands, "measure", "measure a thing")
    command(kinds, "length", min, "how long it is")("--metres", type=int)
    command(kinds, "weight", max, "how heavy it is")("--grams", type=int)
    options = top.parse_args(["measure", "length", "--metres", "3"])
    assert (options.run, options.prog, options.metres) == (min, "top measure length", 3)
    assert "grams" not in options
    text = commands.choices["measure"].format_help()
    assert "Measure a thing." in text
    assert "how heavy it is" in text
    for wrong in (["measure"], ["measure", "colour"], ["measure", "weight", "--metres", "3"]):
        with pytest.raises(SystemExit):
            top.parse_args(wrong)


def read(declare, *words):
    parser = argparse.ArgumentParser()
    declare(parser.add_argument)
    return parser.parse_args(words)


def test_the_knobs_of_an_extractor():
    default = {"max_keypoints": 2048, "resize": None, "side": "long", "device": "auto", "extractor_weights": None}
    assert knobs(read(extraction)) == default
    words = ("--detection-threshold", "0.5", "--resize", "640", "--side", "short")
    assert knobs(read(extraction, *words)) == {**default, "detection_threshold": 0.5, "resize": 640, "side": "short"}


def test_the_defaults_are_the_library_s():
    from inspect import signature

    from vispe.data.images import MAX_PIXELS
    from vispe.matching import Matcher

    options, parameters = read(extraction), signature(Matcher).parameters
    assert options.max_pixels == MAX_PIXELS
    assert options.extractor == parameters["extractor"].default


def test_inference_is_as_trained_unless_told():
    def declared(add):
        inference(add, "N", "sides")

    assert vars(read(declared)) == {"size": [], "batch": 32, "device": "auto"}
    assert read(declared, "--size", "16", "16x24").size == ["16", "16x24"]


def test_sizes_are_height_by_width():
    assert size_of("384") == (384, 384)
    assert size_of("224x448") == size_of("224X448") == (224, 448)


@pytest.mark.parametrize("text", ["", "0", "x", "3x", "x3", "-4", "1.5", "16x0", "1x2x3", "wide"])
def test_mistakes_in_sizes_are_named(text):
    with pytest.raises(ValueError, match=f"--size is N or HxW in pixels, got {text!r}"):
        size_of(text)


def test_a_short_side():
    assert short_of("384") == 384
    for text in ("0", "32x32", "-3", ""):
        with pytest.raises(ValueError, match="--size is N, the short side in pixels"):
            short_of(text)


def test_mistakes_are_named_of_counts_sizes_and_folders(tmp_path):
    assert (at_least(0)("0"), at_least(1)("12")) == (0, 12)
    for text in ("0", "-3", "x", "1.5", "", "--1"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"a whole number of at least 1 is needed, got '{text}'"):
            at_least(1)(text)
    assert (fitting_of("480"), fitting_of("480x800")) == ((480, None), (480, 800))
    for text in ("800x480", "x", "0", "1x2x3"):
        with pytest.raises(ValueError, match="--size is N or NxM, the short side and the most of the long one"):
            fitting_of(text)
    assert folder_of(tmp_path / "v1.2", "runs") == tmp_path / "v1.2"
    (tmp_path / "odd.csv").mkdir()
    assert folder_of(tmp_path / "odd.csv", "runs") == tmp_path / "odd.csv"
    (tmp_path / "file").write_text("")
    for name in ("file", "x.csv", "x.JSON"):
        with pytest.raises(ValueError, match="--out is a folder, for runs, got"):
            folder_of(tmp_path / name, "runs")
