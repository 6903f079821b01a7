"""How much a score owes to its inlier threshold: one pass over the cached matches for a whole range of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vispe.evaluate.protocol import UNBOUNDED, Protocol, column
from vispe.evaluate.runs import ERRORS
from vispe.evaluate.score import rows_of
from vispe.files import write_json
from vispe.metrics.auc import error_auc

RANGE = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0)  # pixels


def tune(
    run: Path, protocol: Protocol, *, thresholds: tuple[float, ...] = RANGE, workers: int = 1
) -> dict[str, dict[str, Any]]:
    """AUC by threshold for every estimator that has one; also written to ``tune.json`` in the folder ``run``.

    ``{estimator: {"thresholds": [n], "at": [t], "auc": [n][t], "best": threshold, "spread": [t]}}``, where ``spread``
    is the difference of the best and the worst AUC within a factor of two around the best threshold. What is best here
    is best on these very pairs: a number to distrust, which is why the whole curve is kept.
    """
    bounded = tuple(name for name in protocol.estimators if name not in UNBOUNDED)
    if not bounded:
        raise ValueError(f"{', '.join(protocol.estimators)} has no threshold to tune")
    swept = protocol.but(estimators=bounded, thresholds=dict.fromkeys(bounded, thresholds))
    columns = rows_of(run, swept, workers=workers, what="tuning")
    made = {}
    for name in bounded:
        errors = [columns[column(ERRORS[protocol.task], name, value)] for value in thresholds]
        auc = [error_auc(found, protocol.auc) for found in errors]
        best = max(range(len(thresholds)), key=lambda i: (float(auc[i].mean()), -i))
        near = [auc[i] for i, value in enumerate(thresholds) if 0.5 <= value / thresholds[best] <= 2]
        spread = [float(max(column) - min(column)) for column in zip(*near, strict=True)]
        made[name] = {
            "thresholds": list(thresholds),
            "at": list(protocol.auc),
            "auc": [values.tolist() for values in auc],
            "best": thresholds[best],
            "spread": spread,
        }
    write_json(run / "tune.json", made)
    return made
