"""vispe: a vision and feature-matching model zoo about position.

The public names are imported when they are first used: ``import vispe`` loads neither torch nor anything else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vispe.features import Features, Look, extractor
    from vispe.matching import Matcher, Matches, match
    from vispe.models import list_models
    from vispe.weights import WeightsError, build, load

_HOME = {
    "Features": "vispe.features",
    "Look": "vispe.features",
    "Matcher": "vispe.matching",
    "Matches": "vispe.matching",
    "WeightsError": "vispe.weights",
    "build": "vispe.weights",
    "extractor": "vispe.features",
    "list_models": "vispe.models",
    "load": "vispe.weights",
    "load_classifier": "vispe.classifier",
    "match": "vispe.matching",
}
__all__ = [
    "Features", "Look", "Matcher", "Matches", "WeightsError", "build", "extractor", "list_models", "load",
    "load_classifier", "match",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("vispe")
        except PackageNotFoundError:  # a checkout on the path, not installed
            return "unknown"
    if name not in _HOME:
        raise AttributeError(f"module 'vispe' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME, "__version__"])
