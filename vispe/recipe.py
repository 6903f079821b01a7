"""Recipes: a YAML file and words such as ``train.lr=1e-3`` to frozen Specs. Only this file knows pydantic and PyYAML.

A key that no Spec declares is refused with the known ones beside it; a value of the wrong type is refused with the
value. Types are strict (``true`` is no number, ``3`` is no text), but a whole number may stand for a float and a list
for a tuple. A Spec may say ``REST = "name"``: keys it does not know are gathered in that mapping of its own, for
someone further down who knows them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from vispe.spec import Spec

S = TypeVar("S", bound=Spec)
T = TypeVar("T")
LONG = 60  # letters of a value that a sentence still tells


def read(path: str | os.PathLike[str], kind: type[S], overrides: Iterable[str] = ()) -> S:
    """The recipe in a YAML file as a ``kind``, with ``overrides`` (``"key.sub=value"``, the value in YAML) put on top.

    ``ValueError``, one line: the file is no YAML mapping, a key is unknown, a value has the wrong type, or the Spec
    itself refuses a value. ``OSError`` when the file cannot be read.
    """
    return of(mapping(path), kind, overrides)


def mapping(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The YAML mapping in a file as it stands; errors as :func:`read`."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{os.fspath(path)!r} is not a text file") from None
    return _mapping(text, os.fspath(path))


def of(values: Mapping[str, Any], kind: type[S], overrides: Iterable[str] = ()) -> S:
    """The same from a nested mapping."""
    tree: dict[str, Any] = json.loads(json.dumps(values, default=str))
    for word in overrides:
        _put(tree, word)
    return typed(_gathered(tree, kind, ""), kind)


def typed(value: Any, kind: Any, at: str = "") -> Any:
    """``value`` (numbers, text, lists, mappings) as the type ``kind``; ``ValueError`` names the place and the value."""
    pydantic = _library("pydantic")
    try:
        return pydantic.TypeAdapter(kind).validate_json(json.dumps(value, default=str), strict=True)
    except pydantic.ValidationError as error:
        raise ValueError(_sentence(error.errors(include_url=False), at)) from None


def field_types(kind: type[Spec]) -> dict[str, Any]:
    """Knob -> annotated type of a Spec."""
    return {name: hint for name, hint in typing.get_type_hints(kind).items() if name in kind.names()}


def plain(spec: Spec) -> dict[str, Any]:
    """A Spec as JSON's own types; ``of`` reads it back."""
    return json.loads(json.dumps(dataclasses.asdict(spec), default=str))


def difference(one: Mapping[str, Any], two: Mapping[str, Any], at: str = "") -> str | None:
    """The first place where two plain recipes differ, as a sentence; None when they are equal."""
    for key in [*one, *(key for key in two if key not in one)]:
        a, b, name = one.get(key), two.get(key), f"{at}{key}"
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            if found := difference(a, b, f"{name}."):
                return found
        elif a != b:
            if max(len(repr(a)), len(repr(b))) > LONG:
                return f"{name} is another one"
            return f"{name} was {a!r} and is {b!r}"
    return None


# --- YAML -------------------------------------------------------------------------------------------------------------

# YAML 1.1 reads 1e-3 as text, since it has no dot, and the names on, off, yes and no as booleans; YAML 1.2 does not.
_FLOAT = re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$")
_BOOL = re.compile(r"^(true|True|TRUE|false|False|FALSE)$")


def _mapping(text: str, name: str) -> dict[str, Any]:
    tree = _parse(text, name)
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise ValueError(f"{name!r} is not a recipe: it must be a YAML mapping of names to values")
    return tree


def _parse(text: str, name: str) -> Any:
    yaml: Any = _library("yaml")
    safe: Any = yaml.SafeLoader

    class Loader(safe):
        """Safe, with the floats of YAML 1.2, and no name given twice."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [getattr(key, "value", None) for key, _ in node.value]
            twice = [key for key in keys if isinstance(key, str) and keys.count(key) > 1]
            if twice:
                raise ValueError(f"{name!r} says {twice[0]!r} twice")
            return super().construct_mapping(node, deep)

    tag = "tag:yaml.org,2002:"
    Loader.yaml_implicit_resolvers = {
        first: [rule for rule in rules if rule[0] != f"{tag}bool"]
        for first, rules in safe.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver(f"{tag}bool", _BOOL, list("tTfF"))
    Loader.add_implicit_resolver(f"{tag}float", _FLOAT, list("-+.0123456789"))
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise ValueError(f"{name!r} is not YAML{where}: {getattr(error, 'problem', None) or error}") from None


def _put(tree: dict[str, Any], word: str) -> None:
    """One override on top of ``tree``."""
    key, equals, text = word.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ValueError(f"an override is key=value or key.sub=value, got {word!r}")
    inner = tree
    for part in parts[:-1]:
        following = inner.get(part)
        if following is None:
            following = inner[part] = {}
        if not isinstance(following, dict):
            raise ValueError(f"{word!r}: {part!r} is {following!r}, which has no keys below it")
        inner = following
    inner[parts[-1]] = _parse(text, word)


# --- the Spec ---------------------------------------------------------------------------------------------------------


def _gathered(tree: Any, kind: Any, at: str) -> Any:
    """``tree`` with every name known to the Spec ``kind``, and the others where its ``REST`` wants them."""
    kind = next((one for one in typing.get_args(kind) if isinstance(one, type) and issubclass(one, Spec)), kind)
    if not (isinstance(tree, dict) and isinstance(kind, type) and issubclass(kind, Spec)):
        return tree
    rest = getattr(kind, "REST", None)
    known, unknown = kind.names(), [key for key in tree if key not in kind.names()]
    if unknown and rest is None:
        raise ValueError(f"there is no {at}{unknown[0]}; {at[:-1] or 'a recipe'} has {', '.join(known)}")
    types = field_types(kind)
    made = {key: _gathered(value, types[key], f"{at}{key}.") for key, value in tree.items() if key in known}
    return (
        {**made, rest: {**(made.get(rest) or {}), **{key: tree[key] for key in unknown}}} if rest and unknown else made
    )


def _sentence(errors: list[Any], at: str) -> str:
    """The first place pydantic complains about, in one line; alternatives of a union are joined by "or"."""
    own = errors[0]
    place = [str(part) for part in own["loc"] if str(part).isidentifier() or isinstance(part, int)]
    same = [error for error in errors if error["loc"][: len(own["loc"]) - 1] == own["loc"][:-1]]
    if own["type"] == "missing":
        return f"{_joined(at, place)} is missing"
    if own["type"] == "value_error":  # a Spec's own words
        where, words = _joined(at, place), str(own["ctx"]["error"])
        named = re.match(r"\w+", words)
        own_key = named is not None and isinstance(own["input"], Mapping) and named[0] in own["input"]
        return f"{where}{'.' if own_key else ': '}{words}" if where else words
    union = [error for error in same if error["input"] == own["input"]] if len(same) > 1 else [own]
    said = list(
        dict.fromkeys(
            error["msg"].replace("Input should be ", "").replace("a valid array", "a list, such as [1, 2]")
            for error in union
        )
    )
    names = [part for part in place if part not in ("int", "float", "str", "bool", "none")]
    return f"{_joined(at, names)} must be {' or '.join(said)}, got {own['input']!r}"


def _joined(at: str, place: list[str]) -> str:
    return ".".join([*([at] if at else []), *place])


def _library(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        raise ValueError(f"recipes need {name}: pip install 'vispe[train]'") from None
