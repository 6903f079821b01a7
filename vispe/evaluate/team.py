"""Work that several devices share, through Lightning Fabric: each process gets its :class:`~vispe.cache.Team`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vispe.cache import Team
from vispe.data.images import ImageError
from vispe.progress import quiet
from vispe.weights.convert import WeightsError

Share = Callable[[Team, str], object]
TALKING = ("lightning.fabric", "lightning.pytorch")  # loggers that tell who has arrived


def together(share: Share, device: str, devices: int = 1, nodes: int = 1) -> bool:
    """Call ``share(team, device)`` in each of ``devices`` x ``nodes`` processes (CPU processes where ``device`` is a
    CPU), or here if that is one.

    Whether this process is the one that goes on: True, but for all processes except the first of several. A person's
    mistake met in any of them is the error it was there. What ``share`` is bound to must be picklable.
    """
    if devices < 1 or nodes < 1:
        raise ValueError(f"devices and nodes are at least 1, got {devices} and {nodes}")
    if devices * nodes == 1:
        share(Team(), device)
        return True
    fabric = _fabric(device, devices, nodes)
    if started_outside(nodes):
        with quiet(*TALKING):
            fabric.launch()
        _member(fabric, share)
    else:
        with _first_words(), quiet(*TALKING):
            fabric.launch(_Member(share))
    return fabric.global_rank == 0


def started_outside(nodes: int) -> bool:
    """Whether torchrun, SLURM or the like starts this program, once for each process."""
    return "LOCAL_RANK" in os.environ or nodes > 1


@contextmanager
def _first_words() -> Iterator[None]:
    """A person's mistake that a process of ours met, as the error it was there; without the traceback it came in."""
    from torch.multiprocessing import ProcessRaisedException

    try:
        yield
    except ProcessRaisedException as error:
        kind, _, what = str(error).strip().splitlines()[-1].partition(": ")
        known = {"ValueError": ValueError, "ImageError": ImageError, "WeightsError": WeightsError, "OSError": OSError}
        if (name := kind.rpartition(".")[2]) not in known:
            raise
        raise known[name](what) from None


def _fabric(device: str, devices: int, nodes: int) -> Any:
    from importlib.util import find_spec

    if find_spec("lightning") is None:
        raise ValueError("several devices need lightning: pip install 'vispe[train]'")
    import torch
    from lightning.fabric import Fabric

    cuda = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    strategy = "ddp" if started_outside(nodes) else "ddp_spawn"
    return Fabric(accelerator="cuda" if cuda else "cpu", devices=devices, num_nodes=nodes, strategy=strategy)


class _Member:
    """``share`` on its way to a new process. Bound, not handed over: Lightning looks into arguments and refuses frozen
    dataclasses there."""

    def __init__(self, share: Share) -> None:
        self.share = share

    def __call__(self, fabric: Any) -> None:
        _member(fabric, self.share)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """There, before Lightning tells who has arrived."""
        import lightning  # noqa: F401 - it sets the levels when it is first imported

        for name in TALKING:
            logging.getLogger(name).setLevel(logging.ERROR)
        self.share = state["share"]


def _member(fabric: Any, share: Share) -> None:
    """One process's part of the work."""
    import torch

    device = str(fabric.device)
    if device == "cpu":  # its share of the cores: threads that wait for each other stall
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // fabric.world_size))
    share(Team(rank=fabric.global_rank, size=fabric.world_size, wait=fabric.barrier), device)
