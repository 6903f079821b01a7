"""The model that a recipe starts from: fresh, published or from a file, at another resolution if need be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from vispe import recipe as recipes
from vispe.classifier import load_classifier
from vispe.models import home
from vispe.models.detr import DETRSpec
from vispe.models.mask2former import Mask2FormerSpec
from vispe.models.segformer import SegFormerSpec
from vispe.models.segmenter_linear import SegmenterLinearSpec
from vispe.models.vit import ViTSpec
from vispe.spec import Spec
from vispe.train.spec import ModelSpec
from vispe.weights import build, load, published

KINDS: dict[type[Spec], str] = {
    ViTSpec: "image classifier",
    SegFormerSpec: "network for semantic segmentation",
    SegmenterLinearSpec: "network for semantic segmentation",
    DETRSpec: "DETR",
    Mask2FormerSpec: "Mask2Former",
}
Kind = type[Spec] | tuple[type[Spec], ...]  # of model
SEMANTIC: Kind = (SegFormerSpec, SegmenterLinearSpec)


def fresh_model(given: ModelSpec, classes: int, kind: Kind = ViTSpec) -> nn.Module:
    """The recipe's model, its weights drawn from torch's CPU generator; ``ValueError`` for a wrong name or knob."""
    return build(given.name, **{**model_overrides(given, kind), "num_classes": classes})


def starting_model(
    given: ModelSpec, classes: int, kind: Kind = ViTSpec, reader: Callable[[str], Any] = load_classifier
) -> tuple[nn.Module, list[str]]:
    """The recipe's model with the weights it asks for, and a sentence for each that is resampled, dropped or fresh.

    ``kind``: of model, one or some of ``KINDS``. A file that a training wrote, which ``reader`` knows, says itself at
    which size its positions are; for others ``source_size`` does.
    """
    if given.weights == "fresh":
        return fresh_model(given, classes, kind), []
    trained = _trained(given.weights, reader)
    if trained is not None:
        return _adapted(fresh_model(given, classes, kind), trained, given.weights)
    weights = None if given.weights == "published" else given.weights
    overrides = {**model_overrides(given, kind), "num_classes": classes}
    model = load(given.name, weights, given.origin, given.source_size, **overrides)
    return model, list(model.report)  # type: ignore[arg-type]


def _trained(weights: str, reader: Callable[[str], Any]) -> Any:
    """The model in a file or run that was trained here; None for other weights."""
    try:
        return None if weights == "published" else reader(weights)
    except ValueError:
        return None


def _adapted(model: nn.Module, trained: Any, weights: str) -> tuple[nn.Module, list[str]]:
    try:
        state = model.adapt(trained.model.state_dict(), trained.model.spec)  # type: ignore[operator]
        model.load_state_dict(state)
    except RuntimeError as error:
        spec: Any = trained.model.spec
        names = (
            "patch_size",
            "width",
            "widths",
            "depth",
            "depths",
            "heads",
            "head_width",
            "backbone",
            "queries",
            "num_queries",
        )
        shape = ", ".join(f"{name} {getattr(spec, name)}" for name in names if hasattr(spec, name))
        raise ValueError(f"{weights!r} holds a {trained.name} of another shape: {shape}") from error
    return model, list(model.report)  # type: ignore[arg-type]


def model_overrides(given: ModelSpec, kind: Kind = ViTSpec) -> dict[str, Any]:
    """The knobs for the model's own spec, checked against its types; ``ValueError`` names an unknown or wrong one."""
    spec = variant(given)
    if not isinstance(spec, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        wanted = " and no ".join(dict.fromkeys(KINDS[one] for one in kinds))
        raise ValueError(f"{given.name} is no {wanted}")
    return checked_knobs(given, spec)


def foreseen(given: ModelSpec, kind: Kind = ViTSpec) -> Any:
    """The spec that the model is going to have; None where a file of weights tells it. ``ValueError`` as
    :func:`model_overrides`."""
    knobs = model_overrides(given, kind)
    return published(given.name).but(**knobs) if given.weights in ("published", "fresh") else None


def variant(given: ModelSpec) -> Any:
    """The spec of the named variant; ``ValueError`` for an unknown name."""
    return home(given.name).VARIANTS[given.name.partition(".")[0]]


def checked_knobs(given: ModelSpec, spec: Any) -> dict[str, Any]:
    """The recipe's knobs as the types of ``spec``, the variant's own; ``ValueError`` names an unknown or wrong one."""
    types, made = recipes.field_types(type(spec)), dict(given.spec)
    spec.but(**{name: getattr(spec, name, None) for name in made})  # refuses unknown names
    for name, value in made.items():
        if name == "image_size" and isinstance(value, int):
            made[name] = (value, value)
        elif name != "position":  # its line or mapping is the spec's own business
            made[name] = recipes.typed(value, types[name], f"model.{name}")
    try:
        spec.but(**made)
    except ValueError as error:
        raise ValueError(f"model: {error}") from error
    return made
