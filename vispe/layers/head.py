"""What becomes of a checkpoint's head where a model wants another."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def replace_head(state: dict[str, Tensor], own: Mapping[str, Tensor], parts: tuple[str, ...], asked: bool) -> list[str]:
    """Put the fresh head of ``own``, as a whole, in the place of one in ``state`` that has other shapes; what was done.

    ``parts``: how the names of a head begin. ``asked``: whether someone wants a head for other classes; if nobody does,
    one that ``state`` lacks is missing, which is for the strict reader to say.
    """
    fresh = {key: value for key, value in own.items() if key.startswith(parts)}
    given = {key: value for key, value in state.items() if key.startswith(parts)}
    if {key: value.shape for key, value in given.items()} == {key: value.shape for key, value in fresh.items()}:
        return []
    if not given and not asked:
        return []
    said = []
    for key in given:
        del state[key]
        if key not in fresh:
            said.append(f"{key}: dropped, this model has no such head")
    for key, value in fresh.items():
        state[key] = value
        was = f"the checkpoint's {list(given[key].shape)} is another head" if key in given else "there was none"
        said.append(f"{key}: fresh {list(value.shape)}, {was}")
    return said
