"""Every task that a recipe can name: the Spec it is read by, and the function that carries it out in a folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vispe.spec import Spec
from vispe.train.classify import fit
from vispe.train.dense import DenseRecipe, match_dense
from vispe.train.detect import DetectRecipe, detect
from vispe.train.match import MatchRecipe, match
from vispe.train.pretrain import PretrainRecipe, pretrain
from vispe.train.segment import SegmentRecipe, segment
from vispe.train.spec import ClassifyRecipe

Trained = Callable[..., dict[str, Any]]  # (recipe, folder, say=print) -> the report
TASKS: dict[Any, tuple[type[Spec], Trained]] = {
    "classify": (ClassifyRecipe, fit),
    "pretrain": (PretrainRecipe, pretrain),
    "segment": (SegmentRecipe, segment),
    "detect": (DetectRecipe, detect),
    "match": (MatchRecipe, match),
    "match_dense": (DenseRecipe, match_dense),
}


def task_of(given: Mapping[str, Any]) -> tuple[type[Spec], Trained]:
    """The Spec and the function of a recipe that is a plain mapping; ``ValueError`` for a task there is not."""
    task = given.get("task", "classify")
    if not isinstance(task, str) or task not in TASKS:
        raise ValueError(f"task is one of {', '.join(TASKS)}, got {task!r}")
    return TASKS[task]
