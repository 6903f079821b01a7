"""``match``: a recipe and photographs to a trained LightGlue, and whether it beats mutual nearest neighbours.

Pairs are made by random homographies (``vispe/data/homographies.py``), or are images with poses and depths
(``vispe/data/megadepth.py``); the extractor is frozen, its features of all images are found once (``features.h5`` in
the run's folder). The folder is that of a classifier otherwise, with
``examples.png`` (a held-out pair, its matches right and wrong) in the place of ``confusion.png``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path
from typing import Any, Literal, cast

import torch
from jaxtyping import Float
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from vispe import recipe as recipes
from vispe.classifier import load_trained, write_trained
from vispe.data.batches import Plan
from vispe.data.megadepth import DepthSpec, open_posed
from vispe.features import described
from vispe.files import write_json
from vispe.losses.matching import Balance, matching_loss
from vispe.models import RATIO
from vispe.models.lightglue import LightGlue, LightGlueSpec, MatchHead
from vispe.spec import Spec
from vispe.train.callbacks import LAST, Keep
from vispe.train.classify import Run, carried_out
from vispe.train.curves import read_curves
from vispe.train.keypoint_pairs import EvalPairs, PairBatch, Source, TrainPairs, pair_loader
from vispe.train.loaders import Loaders, Say, readers, tell_left_out
from vispe.train.match_scores import beats, draw_pair, judged, lightglue, mutual, precision_at, scored
from vispe.train.module import Learning
from vispe.train.photos import PhotoSpec, photographs
from vispe.train.report import draw_curves
from vispe.train.spec import ModelSpec, RunSpec, TrainSpec, check_together
from vispe.train.start import checked_knobs, variant
from vispe.train.views import FeatureSpec, posed_features, read_posed, read_views, view_features
from vispe.weights import build, load

TASK = "match"
FEW = 10  # held-out photographs below which a verdict is said to be by chance
MATCHABLE = 2.0  # logit of matchability at the start: most points are taken to have a partner
SCALES = (7.0, 10.0, 14.0, 20.0, 28.0, 40.0, 57.0, 80.0, 113.0)  # of cosines at the start; ALIKED wants 14, SIFT 40
# At the start: turns by a place and by a pixel of scale, against the fresh; the constant.
NEAR, SIZE, AROUND = 4.0, 0.2, 1.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatchTrain(TrainSpec):
    """How weights are found. ``positive``: pixels within which two keypoints are one point, ``negative``: beyond which
    one has no partner. ``start`` of fresh weights: "descriptors" begins as dual softmax over the descriptors (in a
    narrower network over their principal directions) and learns from there, "random" as torch draws them.
    ``checkpoint``: activations are computed twice instead of kept. ``balance``: of matches and misses in the loss,
    "means" as published, "points" for scores that can be compared between pairs (``matching_loss``)."""

    lr: float = 1e-3
    weight_decay: float = 1e-4
    positive: float = 3.0
    negative: float = 3.0
    start: Literal["descriptors", "random"] = "descriptors"
    checkpoint: bool = False
    balance: Balance = "means"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.positive <= self.negative:
            raise ValueError(f"0 < positive <= negative, in pixels, got {self.positive} and {self.negative}")
        if self.start not in ("descriptors", "random"):
            raise ValueError(f"start is descriptors or random, got {self.start!r}")
        if self.balance not in ("means", "points"):
            raise ValueError(f"balance is means or points, got {self.balance!r}")
        if self.layer_decay != 1.0 or self.label_smoothing or self.size is not None:
            raise ValueError("layer_decay, label_smoothing and size are a classifier's knobs")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatchRecipe(Spec):
    """A whole recipe; ``task: match`` tells it from a classifier's. ``poses``: images with poses and depths, instead of
    the photographs of ``data``."""

    task: Literal["match"] = "match"
    model: ModelSpec
    data: PhotoSpec = dataclasses.field(default_factory=PhotoSpec)
    poses: DepthSpec | None = None
    features: FeatureSpec = dataclasses.field(default_factory=FeatureSpec)
    train: MatchTrain = dataclasses.field(default_factory=MatchTrain)
    run: RunSpec = dataclasses.field(default_factory=RunSpec)

    def __post_init__(self) -> None:
        check_together(self.train, self.run, only_ddp="matchers train")


def match(
    recipe: MatchRecipe, out: str | os.PathLike[str], data: PairData | None = None, say: Say = print
) -> dict[str, Any]:
    """Train by ``recipe`` in the folder ``out``; the report, as in ``report.json`` (empty but in the first process).

    Goes on, refuses and stops as ``vispe.train.classify.fit`` does.
    """
    return carried_out(
        _Matching,
        recipe,
        out,
        data,
        say,
        check=lambda: None if (Path(out) / LAST).is_file() else _refuse_early(recipe, data),
        opened=lambda folder: found_pairs(recipe, folder, say),
    )


def _refuse_early(recipe: MatchRecipe, data: PairData | None) -> None:
    """``ValueError`` for what need not wait for the features, which take minutes."""
    _network(recipe)
    if data is None and recipe.poses is None:
        train, photos = recipe.train, recipe.data
        Plan(len(photographs(photos)[0]) * photos.views.pairs, train.batch_size, train.epochs, train.seed)


def _network(recipe: MatchRecipe) -> tuple[LightGlue, list[str]]:
    """The network that a run begins with, as torch draws it where it is fresh, and a sentence about its weights;
    ``ValueError`` where it does not take the recipe's features."""
    given, features = recipe.model, recipe.features
    knobs = _knobs(given)
    dims, oriented = described(features.name, **features.knobs)
    trained = _trained(given.weights) if given.weights not in ("fresh", "published") else None
    if trained is not None:
        model = trained.model
    elif given.weights == "fresh":
        has = {"input_dim": dims, "scale_and_orientation": oriented}
        if wrong := [name for name in has if knobs.get(name, has[name]) != has[name]]:
            raise ValueError(f"model.{wrong[0]} is {knobs[wrong[0]]}, {features.name} gives {has[wrong[0]]}")
        model = build(given.name, **{**knobs, **has})
    else:
        model = load(given.name, None if given.weights == "published" else given.weights, given.origin, **knobs)
    assert isinstance(model, LightGlue)
    spec = model.spec
    if spec.input_dim != dims or spec.scale_and_orientation != oriented:
        if trained is not None:
            raise ValueError(
                f"{given.weights!r} was trained for the features of {trained.extractor}, not of {features.name}"
            )
        raise ValueError(
            f"{given.name} takes descriptors of {spec.input_dim} numbers"
            f"{' with scales and orientations' * spec.scale_and_orientation}, {features.name} gives "
            f"{dims}{' with them' * oriented}"
        )
    return model, [] if given.weights == "fresh" else [f"weights: {given.weights}"]


def _knobs(given: ModelSpec) -> dict[str, Any]:
    spec = variant(given)
    if not isinstance(spec, LightGlueSpec):
        raise ValueError(f"{given.name} is no LightGlue (task: match_dense trains a LoFTR)")
    return checked_knobs(given, spec)


def _trained(weights: str) -> TrainedMatcher | None:
    """What is in a file or run that was trained here; None for other weights."""
    try:
        return load_matcher(weights)
    except ValueError:
        return None


# --- the pairs --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PairData:
    """Features of all images; ``skipped``: a sentence for each photograph that is left out."""

    train: TrainPairs
    val: EvalPairs
    skipped: tuple[str, ...] = ()

    def fingerprint(self) -> dict[str, Any]:
        """The images' count and a hash of their names and keypoints: equal when a run may go on with them."""
        made = {}
        for part, source in (("train", self.train.source), ("val", self.val.source)):
            told = repr(source.names).encode(errors="replace") + source.keypoints.numpy().tobytes()
            made[part] = {"images": len(source.names), "sha256": hashlib.sha256(told).hexdigest()}
        return made


def found_pairs(recipe: MatchRecipe, folder: Path, say: Say = print) -> PairData:
    """The features of all images in ``folder``, found now where they are not there yet."""
    features = recipe.features
    path = folder / "features.h5" if features.file is None else Path(features.file).expanduser()
    device = "cpu" if recipe.run.accelerator == "cpu" else "auto"
    made = _of_photographs if recipe.poses is None else _of_poses
    train, val, skipped = made(recipe, path, device, say)
    tell_left_out(skipped, say)
    for what, source in (("to learn from", train), ("held out", val)):
        if not source.counts.any():
            raise ValueError(f"{features.name} finds no keypoint in any image {what} ({len(source.names)})")
    count = recipe.data.val_pairs if recipe.poses is None else recipe.poses.val_pairs
    return PairData(TrainPairs(train, recipe.train.seed), EvalPairs(val, count), tuple(skipped))


def _of_photographs(recipe: MatchRecipe, path: Path, device: str, say: Say) -> tuple[Source, Source, list[str]]:
    data, features, train = recipe.data, recipe.features, recipe.train
    parts = photographs(data)
    path.parent.mkdir(parents=True, exist_ok=True)
    refuse = data.corrupt == "refuse"
    names, skipped = view_features(
        path, [*parts[0], *parts[1]], data.views, features, data.seed, device, refuse, readers(recipe.run), say
    )
    usable = set(names)
    kept = [[photo for photo in part if photo.name in usable] for part in parts]
    if not all(kept):
        raise ValueError(f"of {len(parts[0])} + {len(parts[1])} photographs too few can be used: {skipped[0]}")
    limits = (train.positive, train.negative)
    first, second = (read_views(path, part, data.views, features.max_keypoints, *limits, data.seed) for part in kept)
    return first, second, skipped


def _of_poses(recipe: MatchRecipe, path: Path, device: str, say: Say) -> tuple[Source, Source, list[str]]:
    spec, features, train = recipe.poses, recipe.features, recipe.train
    assert spec is not None
    parts = open_posed(spec)
    path.parent.mkdir(parents=True, exist_ok=True)
    posed_features(path, parts, spec, features, device)
    given = (features.max_keypoints, spec.pairs * parts[0].scenes, train.positive, train.negative)
    first, second = (read_posed(path, part, spec, *given) for part in parts)
    return first, second, []


# --- what is learnt ---------------------------------------------------------------------------------------------------


def from_descriptors(model: LightGlue, sample: Float[Tensor, "n d"], scale: float) -> None:
    """Fresh weights that begin as dual softmax over ``scale`` times the cosines of descriptors.

    Every layer adds nothing yet. A network narrower than descriptors begins with the ``width`` directions that most of
    the ``sample`` lies in; a wider one has room that they do not fill. Where there is an input projection it brings
    their entries to variance one, so that what layers learn to add is small beside them; without one (``width`` is that
    of the descriptors) layers read them as if it were so. What a layer adds is learnt sooner from where it looks first:
    across images at the point of the most similar descriptor, whose own it brings (wholly so with one head: of several,
    each compares a part of the descriptor), within an image, where positions turn queries and keys, around itself.
    """
    width, heads, dims = model.spec.width, model.spec.num_heads, model.spec.input_dim
    unit = min(width, dims) ** 0.5  # times this, entries have variance one
    with torch.no_grad():
        if isinstance(model.input_proj, nn.Linear):
            directions = torch.eye(dims)
            if width < dims:
                directions = torch.linalg.eigh(sample.T.double() @ sample.double()).eigenvectors[:, -width:].T
            nn.init.zeros_(model.input_proj.weight)[: len(directions)] = unit * directions
            nn.init.zeros_(model.input_proj.bias)
            size, gain = unit, 1.0
        else:
            size, gain = 1.0, unit
        if model.spec.position == "rotary":
            model.basis.weight.mul_(torch.tensor([NEAR, NEAR, SIZE, 1.0])[: model.basis.weight.shape[1]])
        for layer in model.layers:
            own, cross = (layer.get_submodule(name) for name in ("self_attn", "cross_attn"))
            _look_around(own.get_submodule("qkv"), gain, width, heads)
            alike = (scale * (width / heads) ** 0.5) ** 0.5 / size
            for name, factor in (("qk", alike), ("v", gain), ("out", 1.0)):
                nn.init.eye_(cross.get_parameter(f"{name}.weight")).mul_(factor)
                nn.init.zeros_(cross.get_parameter(f"{name}.bias"))
            for part in (own, cross):
                part.get_parameter("ffn.0.weight")[:, :width] *= gain
                for name in ("ffn.3.weight", "ffn.3.bias"):
                    nn.init.zeros_(part.get_parameter(name))
        for head in model.heads:
            assert isinstance(head, MatchHead)
            nn.init.eye_(head.final.weight).mul_((scale * width**0.5) ** 0.5 / size)
            nn.init.zeros_(head.final.bias)
            nn.init.zeros_(head.matchability.weight)
            nn.init.constant_(head.matchability.bias, MATCHABLE)


def _look_around(qkv: nn.Module, gain: float, width: int, heads: int) -> None:
    """Queries and keys that are mostly one constant, which turning tells apart by how far two points are."""
    weight, bias = qkv.get_parameter("weight"), qkv.get_parameter("bias")
    weight.mul_(gain)
    weight[: 2 * width] /= 2
    bias[: 2 * width] = AROUND * (width / heads) ** -0.25


def sharpness(pairs: TrainPairs) -> float:
    """Of ``SCALES`` the one with which the dual softmax of cosines makes true matches likeliest, over some pairs."""
    told = dict.fromkeys(SCALES, 0.0)
    for k in range(min(len(pairs), 64)):
        batch = pairs.__getitems__([(0, k)])
        true, partner = batch.matches0 >= 0, batch.matches0.clamp(min=0)[..., None]
        cosines = batch.descriptors0 @ batch.descriptors1.mT
        cosines = cosines.masked_fill(~(batch.mask0[:, :, None] & batch.mask1[:, None]), -torch.inf)
        for scale in SCALES:
            likely = (scale * cosines).log_softmax(1) + (scale * cosines).log_softmax(2)
            told[scale] += float(likely.gather(2, partner)[..., 0][true].sum())
    return max(SCALES, key=told.__getitem__)


class Matching(Learning):
    """``matching_loss`` of every layer. ``validated``: its mean as ``loss``, and ``precision``, ``recall`` and ``AUC5``
    (of what :meth:`Source.error` tells, at 5 of its unit) of the held-out pairs."""

    def __init__(self, model: nn.Module, spec: MatchTrain, plan: Plan, out: Path) -> None:
        super().__init__(model, spec, plan, out)
        self._sums = torch.zeros(2)

    def loss_of(self, batch: PairBatch, batch_idx: int) -> Tensor:
        network, spec = cast(LightGlue, self.model), cast(MatchTrain, self.spec)
        scores, sure = network.every_layer(*batch.sides(), checkpoint=spec.checkpoint and self.training)
        return matching_loss(scores, sure, batch.matches0, batch.matches1, spec.balance).total

    def on_validation_epoch_start(self) -> None:
        self._sums = torch.zeros(2, dtype=torch.float64, device=self.device)

    def validation_step(self, batch: PairBatch, batch_idx: int) -> None:
        real = batch.indices >= 0
        if bool(real.all()):  # else the last of a process: a pair would count twice
            self._sums += torch.tensor([float(self.loss_of(batch, batch_idx)), 1.0], device=self.device) * len(real)

    def on_validation_epoch_end(self) -> None:
        total = self.trainer.strategy.reduce(self._sums, reduce_op="sum")
        pairs: EvalPairs = self.trainer.datamodule.val_set  # type: ignore[attr-defined]
        told = scored(pairs, lightglue(self.model))  # all pairs in every process: they take seconds
        self.validated = {
            "loss": float(total[0] / total[1].clamp(min=1)),
            "precision": told["precision"],
            "recall": told["recall"],
            "AUC5": told["auc"][pairs.source.limits.index(5)],
        }

    def _rates(self) -> dict[str, Any]:
        return {"lr": self.spec.lr, "layer_decay": 1.0, "last": 0}


# --- the file ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TrainedMatcher:
    """``model`` (in eval mode), a LightGlue called ``name`` in the zoo, for the features of ``extractor``; ``recipe``
    is how it was trained, as plain JSON."""

    model: nn.Module
    name: str
    extractor: str
    recipe: dict[str, Any]


def load_matcher(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> TrainedMatcher:
    """The matcher of a file, or of a run's folder; ``ValueError`` as ``load_classifier``."""

    def made(about: dict[str, Any], model: nn.Module) -> TrainedMatcher:
        return TrainedMatcher(model, about["model"], str(about["extractor"]), dict(about["recipe"]))

    return load_trained(path, TASK, made, device)


# --- a run ------------------------------------------------------------------------------------------------------------


class _Matching(Run):
    """The state of one call of ``match``."""

    def _model(self, earlier: dict[str, Any] | None) -> tuple[nn.Module, list[str]]:
        given = self.recipe.model
        if earlier is not None:  # the file it started from may be gone
            return build(given.name, **earlier["spec"]), list(earlier["loaded"])
        model, loaded = _network(self.recipe)
        if given.weights == "fresh" and self.recipe.train.start == "descriptors":
            from_descriptors(model, self.data.train.source.sample(), sharpness(self.data.train))
        return model, loaded

    def _sizes(self, spec: Any) -> list[tuple[int, int]]:
        h, w = self.data.train.source.sizes[0].int().tolist()
        return [(h, w)]

    def _loaders(self) -> Loaders:
        return Loaders(self.data.train, self.data.val, self.plan, self.workers, pair_loader)

    @property
    def workers(self) -> int:
        return self.recipe.run.workers or 0  # features lie in memory

    def _module(self) -> Learning:
        return Matching(self.model, self.recipe.train, self.plan, self.folder)

    def _keep(self) -> Callback:
        return Keep(self._export, "AUC5")

    def _contents(self) -> str:
        train, val = self.data.train, self.data.val
        return f"{len(train.source.names)} + {len(val.source.names)} photographs, {len(train)} pairs an epoch"

    def _told(self) -> dict[str, Any]:
        return {
            "recipe": recipes.plain(self.recipe),
            "data": self.data.fingerprint(),
            "loaded": self.loaded,
            "spec": dataclasses.asdict(cast(Any, self.model.spec)),
        }

    def _export(self, state: dict[str, Tensor], name: str) -> None:
        made = TrainedMatcher(self.model, self.recipe.model.name, self.recipe.features.name, recipes.plain(self.recipe))
        write_trained(self.folder / f"{name}.safetensors", TASK, made, state)

    def _report(self) -> dict[str, Any]:
        data = self.data
        trained = load_matcher(self.folder / f"{self.recipe.train.report}.safetensors", self.device)
        rows = read_curves(self.folder / "metrics.csv")
        draw_curves(self.folder / "curves.png", rows, self.plan.updates_per_epoch)
        results = {
            "lightglue": scored(data.val, lightglue(trained.model)),
            "mutual_nn": scored(data.val, mutual()),
            "mutual_nn_ratio": scored(data.val, mutual(RATIO)),
        }
        draw_pair(self.folder / "examples.png", data.val, lightglue(trained.model))
        trained.model.spec = trained.model.spec.but(threshold=0.0)  # type: ignore[union-attr, operator]
        everything = lightglue(trained.model)
        rows_of_all = judged(data.val, everything)
        compared = {
            name: {"recall": told["recall"], "precision": told["precision"],
                   "lightglue": precision_at(rows_of_all, told["recall"])}
            for name, told in results.items() if name != "lightglue"
        }  # fmt: skip
        report = {
            "weights": f"{self.recipe.train.report}.safetensors",
            "results": results,
            "at_equal_recall": compared,
            "beats": {name: beats(row) for name, row in compared.items()},
            "pairs": len(data.val),
            "data": {
                "train": len(data.train.source.names),
                "val": len(data.val.source.names),
                "skipped": list(data.skipped),
            },
            **self._about(rows),
        }
        write_json(self.folder / "report.json", report)
        (self.folder / LAST).unlink(missing_ok=True)
        self._say(report)
        return report

    def _say(self, report: dict[str, Any]) -> None:
        self._say_pace(report)
        source = self.data.val.source
        held = report["data"]["val"]
        photos = f"{held} photograph{'s' * (held != 1)}"
        self.say(f"on {report['pairs']} held-out pairs of {photos}:")
        for name, told in report["results"].items():
            auc = " / ".join(f"{100 * value:.1f}" for value in told["auc"])
            self.say(
                f"{name}: precision {told['precision']:.3f}, recall {told['recall']:.3f}, "
                f"{told['matches']:.0f} matches, AUC at {' / '.join(map(str, source.limits))} {source.unit} {auc}"
            )
        for name, row in report["at_equal_recall"].items():
            own = "does not reach it" if row["lightglue"] is None else f"has precision {row['lightglue']:.3f}"
            tied = row["lightglue"] == row["precision"]
            verdict = "as good as" if tied else "better than" if report["beats"][name] else "not better than"
            self.say(
                f"with the threshold that gives the recall of {name} ({row['recall']:.3f}) LightGlue {own}: {verdict} "
                f"{row['precision']:.3f}"
            )
        if held < FEW:
            self.say(f"{photos} held out: with others it may come out differently")
        self.say(f"wrote {self.folder / 'report.json'}, {report['weights']}, curves.png and examples.png")
