"""A recipe's task names its Spec and what carries it out."""

import pytest

from vispe.train.detect import DetectRecipe, detect
from vispe.train.tasks import TASKS, task_of


def test_every_task_is_its_recipe():
    for name, (kind, _) in TASKS.items():
        assert kind.__dataclass_fields__["task"].default == name
    assert task_of({"task": "detect"}) == (DetectRecipe, detect)
    assert task_of({}) == TASKS["classify"]


@pytest.mark.parametrize("task", ["walk", None, ["detect"]])
def test_another_is_a_mistake_that_is_named(task):
    with pytest.raises(ValueError, match="task is one of classify, pretrain, segment, detect, match, match_dense, got"):
        task_of({"task": task})
