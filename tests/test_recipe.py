"""Recipes: YAML and words to Specs, and a sentence for each mistake."""

import dataclasses
import re
from pathlib import Path
from typing import Any, Literal

import pytest

from vispe.spec import Spec

pytest.importorskip("pydantic", reason="recipes need pydantic")
pytest.importorskip("yaml", reason="recipes need PyYAML")

from vispe import recipe
from vispe.train.spec import ClassifyRecipe

ROOT = Path(__file__).resolve().parents[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part(Spec):
    lr: float = 1e-3
    count: int = 1
    size: int | tuple[int, int] | None = None
    sizes: tuple[int | tuple[int, int], ...] = ()
    on: bool = False
    kind: Literal["a", "b"] = "a"

    def __post_init__(self):
        if self.lr <= 0:
            raise ValueError(f"lr must be positive, got {self.lr}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model(Spec):
    REST = "spec"

    name: str
    spec: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Whole(Spec):
    model: Model
    part: Part = dataclasses.field(default_factory=Part)


def read(tmp_path, text, *words):
    path = tmp_path / "r.yaml"
    path.write_text(text)
    return recipe.read(path, Whole, words)


def test_numbers_lists_null_and_booleans_are_what_they_look_like(tmp_path):
    got = read(tmp_path, "model: {name: x}\npart: {lr: 1e-3, sizes: [3, [2, 3]], size: [4, 5], on: true}")
    assert got.part == Part(lr=1e-3, sizes=(3, (2, 3)), size=(4, 5), on=True)
    assert read(tmp_path, "model: {name: x}\npart: {size: null, lr: 3}").part == Part(lr=3.0)


def test_words_lie_on_top_of_the_file(tmp_path):
    words = ("part.lr=2e-5", "part.on=true", "part.size=[1, 2]", "part.kind=b", "model.depth=3")
    got = read(tmp_path, "model: {name: x, width: 4}\npart: {lr: 1.0, count: 7}", *words)
    assert got.part == Part(lr=2e-5, on=True, size=(1, 2), kind="b", count=7)
    assert got.model.spec == {"width": 4, "depth": 3}
    assert read(tmp_path, "model: {name: x}\npart: {size: 3}", "part.size=null").part.size is None


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("part.foo=1", "there is no part.foo; part has lr, count, size, sizes, on, kind"),
        ("foo=1", "there is no foo; a recipe has model, part"),
        ("part.lr=fast", "part.lr must be a valid number, got 'fast'"),
        ("part.count=true", "part.count must be a valid integer, got True"),
        ("part.count=1.5", "part.count must be a valid integer, got 1.5"),
        ("part.on=1", "part.on must be a valid boolean, got 1"),
        ("part.kind=c", "part.kind must be 'a' or 'b', got 'c'"),
        ("part.lr=-1", "part.lr must be positive, got -1.0"),
        ("model.name=3", "model.name must be a valid string, got 3"),
        ("model.name.x=3", "'name' is 'x', which has no keys below it"),
        ("part.sizes=3", "part.sizes must be a list, such as [1, 2], got 3"),
        ("part=3", "part must be an object, got 3"),
        ("lr", "an override is key=value or key.sub=value, got 'lr'"),
        ("=3", "an override is key=value or key.sub=value, got '=3'"),
        ("part.size=[1", "'part.size=[1' is not YAML"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, word, said):
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        read(tmp_path, "model: {name: x}", word)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- 1", "is not a recipe: it must be a YAML mapping"),
        ("", "is not a recipe"),
        ("a: [", "is not YAML, line 1"),
        ("part: {lr: 1.0, lr: 2.0}", "says 'lr' twice"),
        ("part: {}", "model is missing"),
    ],
)
def test_files_that_are_no_recipes(tmp_path, text, said):
    with pytest.raises(ValueError, match=said):
        read(tmp_path, text)


def test_a_missing_or_binary_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        recipe.read(tmp_path / "none.yaml", Whole)
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not a text file"):
        recipe.read(tmp_path / "b.yaml", Whole)


def test_no_object_is_built_from_yaml(tmp_path):
    with pytest.raises(ValueError, match="is not YAML"):
        read(tmp_path, "model: !!python/object/apply:os.system ['true']")


def test_plain_and_back():
    one = recipe.of({"model": {"name": "x", "w": [1, 2]}, "part": {"size": [1, 2]}}, Whole)
    assert recipe.of(recipe.plain(one), Whole) == one


def test_the_first_difference_is_named():
    one = {"a": 1, "b": {"c": 2, "d": 3}}
    assert recipe.difference(one, {"a": 1, "b": {"c": 2, "d": 3}}) is None
    assert recipe.difference(one, {"a": 1, "b": {"c": 4, "d": 3}}) == "b.c was 2 and is 4"
    assert recipe.difference(one, {**one, "e": 1}) == "e was None and is 1"


@pytest.mark.parametrize("path", sorted((ROOT / "configs/classify").glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_recipes_are_valid_and_say_their_command(path):
    from vispe.train.start import model_overrides

    text = path.read_text()
    assert text.startswith("# ")
    assert f"# vispe train configs/classify/{path.name}" in text
    assert "# time: " in text
    assert "expected: " in text
    words = [] if "FashionMNIST" in text else ["data.root=photos"]
    model_overrides(recipe.read(path, ClassifyRecipe, words).model)
