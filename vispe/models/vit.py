"""ViT: an image is a sequence of patches, and a learned table tells each where it is (Dosovitskiy et al. 2021, 3.1).

What is different here: the image may have any size that patches tile, square or not, at building, loading and in every
forward (the table is resampled by its family's recipe, its source grid stored and never guessed), and the table is one
line of the spec: ``position="axial"``, ``"table + mixed"``, ``"alibi"``, ``"peg"``, ``"none"`` give the same network
with another answer (``vispe/layers/sockets.py``). Names are timm's; DeiT, DINOv2 and DINOv3 are variants.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vispe.layers.head import replace_head
from vispe.layers.sockets import Position, PositionSpec
from vispe.layers.transformer import Block, PatchEmbed, init_weights
from vispe.position.grid import Grid, check_grid
from vispe.position.resample import patch_grid
from vispe.spec import Spec

Pool = Literal["token", "avg", "both"]
TABLE = PositionSpec(added="table")
HALF = (0.5, 0.5, 0.5)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTSpec(Spec):
    """Every knob of a ViT. Sizes in pixels, (h, w); one number means a square.

    ``pool``: what the head sees: the class token (with ``distilled``, both tokens' heads, averaged), the mean of the
    patches, normalised after the mean (timm's ``fc_norm``), or both side by side (DINOv2's linear head). ``position``:
    a :class:`~vispe.layers.sockets.PositionSpec`, its knobs as a mapping, or its line, ``"table + axial"``. ``mean``
    and ``std`` of RGB in [0, 1], as the weights expect. ``num_classes`` 0: no head, :meth:`ViT.forward` gives the
    pooled token. ``hidden`` is the MLP's width. ``drop_path``: the last block's rate, the first has 0.
    """

    image_size: tuple[int, int] = (224, 224)
    patch_size: int = 16
    channels: int = 3
    width: int = 768
    depth: int = 12
    heads: int = 12
    hidden: int = 3072
    mlp: Literal["gelu", "swiglu"] = "gelu"
    num_classes: int = 1000
    class_token: bool = True
    registers: int = 0
    distilled: bool = False
    pool: Pool = "token"
    position: PositionSpec = TABLE
    qkv_bias: bool = True
    patch_bias: bool = True
    layer_scale: float | None = None
    drop_path: float = 0.0
    eps: float = 1e-6
    mean: tuple[float, float, float] = HALF
    std: tuple[float, float, float] = HALF

    def __post_init__(self) -> None:
        size = (self.image_size,) * 2 if isinstance(self.image_size, int) else self.image_size
        h, w = check_grid(size, "image_size")
        object.__setattr__(self, "image_size", (h, w))
        object.__setattr__(self, "position", PositionSpec.read(self.position))
        for name in ("mean", "std"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.heads < 1 or self.width % self.heads:
            raise ValueError(f"{self.heads} heads do not divide the width {self.width}")
        for name in ("patch_size", "channels", "depth", "hidden"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if min(self.num_classes, self.registers) < 0:
            raise ValueError(f"counts must not be negative, got num_classes {self.num_classes}, {self.registers=}")
        if self.pool not in ("token", "avg", "both") or self.mlp not in ("gelu", "swiglu"):
            raise ValueError(f"pool is token, avg or both, mlp gelu or swiglu; got {self.pool!r}, {self.mlp!r}")
        if not self.class_token and (self.pool != "avg" or self.distilled):
            raise ValueError(f"without a class token pool must be 'avg', got {self.pool!r}, and nothing distilled")
        if self.distilled and self.pool != "token":
            raise ValueError(f"a distilled model pools its two tokens: pool must be 'token', got {self.pool!r}")
        patch_grid(self.image_size, (self.patch_size,) * 2)

    def but(self, **knobs: Any) -> ViTSpec:
        """A copy with some knobs changed; a mapping for ``position`` changes only the sockets it names."""
        if "position" in knobs:
            knobs = {**knobs, "position": self.position.changed(knobs["position"])}
        return super().but(**knobs)

    @property
    def grid(self) -> Grid:
        """Patches (h, w) of an image of ``image_size``."""
        return patch_grid(self.image_size, (self.patch_size,) * 2)

    @property
    def rows(self) -> int:
        """Prefix tokens with a row in the table; registers have none."""
        placed = self.position.added == "table" and self.position.prefix_rows
        return self.class_token + self.distilled if placed else 0

    @property
    def prefix(self) -> int:
        """Tokens in front of the patches: class, distillation, registers."""
        return self.class_token + self.distilled + self.registers


class ViT(nn.Module):
    """``images [b, c, h, w]``, normalised by the spec's mean and std -> logits ``[b, num_classes]``."""

    positional = ()  # the tables are the Position's own

    def __init__(self, spec: ViTSpec) -> None:
        super().__init__()
        self.spec, width = spec, spec.width
        self.report: list[str] = []  # what a loader had to change
        self.patch_embed = PatchEmbed(spec.patch_size, width, spec.channels, spec.patch_bias)
        tokens = {"cls_token": spec.class_token, "dist_token": spec.distilled, "reg_token": spec.registers}
        for name, count in tokens.items():
            self.register_parameter(name, nn.Parameter(torch.randn(1, int(count), width) * 0.02) if count else None)
        self.position = Position(spec.position, spec.grid, width, spec.heads, spec.depth, spec.prefix, spec.rows)
        drops = [spec.drop_path * i / max(spec.depth - 1, 1) for i in range(spec.depth)]  # rising, as DeiT
        self.blocks = nn.ModuleList(
            Block(
                width,
                spec.heads,
                spec.hidden,
                qkv_bias=spec.qkv_bias,
                mlp=spec.mlp,
                layer_scale=spec.layer_scale,
                drop_path=drop,
                eps=spec.eps,
            )
            for drop in drops
        )
        mean_first = spec.pool == "avg"  # then the norm has another name, so that neither is taken for the other
        self.norm = nn.Identity() if mean_first else nn.LayerNorm(width, spec.eps)
        self.fc_norm = nn.LayerNorm(width, spec.eps) if mean_first else nn.Identity()
        seen = width * (2 if spec.pool == "both" else 1)
        self.head = nn.Linear(seen, spec.num_classes) if spec.num_classes else nn.Identity()
        self.head_dist = nn.Linear(seen, spec.num_classes) if spec.num_classes and spec.distilled else None
        for part in (self.blocks, self.head, self.head_dist):
            if part is not None:
                part.apply(init_weights)

    def tokens(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b n width"]:
        """All tokens after the last block, not normalised: class, distillation, registers, patches row by row."""
        grid = self.patch_embed.grid(images)
        x = self._placed(self.patch_embed(images), grid)
        for i, (block, sockets) in enumerate(zip(self.blocks, self.position.sockets(grid, x.device), strict=True)):
            x = block(x, sockets)
            if i == 0:
                x = self.position.convolve(x, grid)
        return x

    def pooled(self, tokens: Float[Tensor, "b n width"]) -> Float[Tensor, "b seen"]:
        """What the head sees. The mean is taken before the norm with ``avg``, after it with ``both``; of a distilled
        model's two tokens it is the mean."""
        if self.spec.pool == "avg":
            return self.fc_norm(tokens[:, self.spec.prefix :].mean(1))
        if self.spec.pool == "both":
            x = self.norm(tokens)
            return torch.cat((x[:, 0], x[:, self.spec.prefix :].mean(1)), -1)
        return self.norm(tokens[:, : 1 + self.spec.distilled]).mean(1)

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        tokens = self.tokens(images)
        if self.head_dist is None:
            return self.head(self.pooled(tokens))
        first, second = self.norm(tokens[:, :2]).unbind(1)
        return (self.head(first) + self.head_dist(second)) / 2

    def layer_of(self, name: str) -> int:
        """For layer-wise learning rates: 0 for embeddings and positions, i + 1 for block i and its own bias, depth + 1
        for the rest."""
        block = re.match(r"(?:blocks|position\.biases)\.(\d+)\.", name)
        if block:
            return int(block[1]) + 1
        embeds = name.startswith(("patch_embed.", "position.", "cls_token", "dist_token", "reg_token"))
        return 0 if embeds else self.spec.depth + 1

    def _placed(self, patches: Float[Tensor, "b n width"], grid: Grid) -> Float[Tensor, "b m width"]:
        """Prefix tokens in front and the table added, in the weights' dtype also under autocast. Registers are never
        placed."""
        dtype = self.patch_embed.proj.weight.dtype
        table, rows = self.position.table(grid, patches.device), self.spec.rows
        patches = patches.to(dtype)
        front = [token for token in (self.cls_token, self.dist_token) if isinstance(token, Tensor)]
        if table is not None:
            table = table.to(dtype)
            patches = patches + table[rows:]
            front = [token + row for token, row in zip(front, table[:rows], strict=True)] if rows else front
        front += [self.reg_token] if isinstance(self.reg_token, Tensor) else []
        front = [token.to(dtype).expand(patches.shape[0], -1, -1) for token in front]
        return torch.cat((*front, patches), 1) if front else patches

    def adapt(self, state: Mapping[str, Tensor], source: ViTSpec) -> dict[str, Tensor]:
        """A checkpoint of ``source``'s grid, positions and head for this model; :attr:`report` says what was done, key
        by key.

        The table is resampled by the recipe of this model's spec; a head of another size is left at its fresh start;
        rows of class and distillation token where this model keeps none are added to the tokens themselves (equal,
        since a row is added in every forward). Nothing is dropped in silence; what still does not fit is for the
        strict reader to refuse. ValueError for a table that is not of ``source``'s grid.
        """
        state, self.report = dict(state), []
        self._fold_rows(state, source)
        state, said = self.position.adapt(state, source.grid, source.position)
        self.report += said
        if self.position.spec != self.spec.position:  # what a scale was trained on is part of the model
            self.spec = self.spec.but(position=self.position.spec)
        self._replace_norm(state)
        self._drop_zero_biases(state)
        asked = self.spec.num_classes != source.num_classes
        self.report += replace_head(state, self.state_dict(), ("head.", "head_dist."), asked)
        return state

    def _fold_rows(self, state: dict[str, Tensor], source: ViTSpec) -> None:
        """Rows of prefix tokens become part of the tokens where this model's table has none."""
        key, cells = "position.added.weight", source.grid[0] * source.grid[1]
        tokens = [name for name in ("cls_token", "dist_token") if name in state]
        if key not in state or state[key].ndim != 2:
            return
        extra = len(state[key]) - cells
        if extra not in (0, len(tokens)):
            size = " x ".join(map(str, source.grid))
            raise ValueError(
                f"{key} has {len(state[key])} rows, not the {size} = {cells} patches of an image of (h, w) = "
                f"{source.image_size} and {len(tokens)} prefix tokens"
            )
        if self.spec.rows or not extra:
            return
        for name, row in zip(tokens, state[key], strict=False):
            state[name] = state[name] + row
            self.report.append(f"{key}: the row of {name} is added to the token itself")
        state[key] = state[key][extra:]

    def _replace_norm(self, state: dict[str, Tensor]) -> None:
        """Weights of a norm after the class token are a start for one after the mean; not the other way round."""
        if self.spec.pool != "avg" or "fc_norm.weight" in state:
            return
        for key in [key for key in state if key.startswith("norm.")]:
            state[f"fc_{key}"] = state.pop(key)
            self.report.append(f"{key}: taken for fc_{key}, pool is 'avg' here")

    def _drop_zero_biases(self, state: dict[str, Tensor]) -> None:
        """DINOv3's distilled models were published with biases of q, k, v that are all zero."""
        keys = [key for key in state if key.endswith("attn.qkv.bias")]
        if self.spec.qkv_bias or not keys or any(bool(state[key].any()) for key in keys):
            return
        for key in keys:
            del state[key]
        self.report.append(f"blocks.*.attn.qkv.bias: {len(keys)} dropped, all zero, this model has none")


SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"width": 192, "depth": 12, "heads": 3, "hidden": 768},
    "small": {"width": 384, "depth": 12, "heads": 6, "hidden": 1536},
    "medium": {"width": 512, "depth": 12, "heads": 8, "hidden": 2048},
    "base": {"width": 768, "depth": 12, "heads": 12, "hidden": 3072},
    "large": {"width": 1024, "depth": 24, "heads": 16, "hidden": 4096},
    "huge": {"width": 1280, "depth": 32, "heads": 16, "hidden": 5120},
    "giant": {"width": 1536, "depth": 40, "heads": 24, "hidden": 4096, "mlp": "swiglu"},
    "small_plus": {"width": 384, "depth": 12, "heads": 6, "hidden": 1536, "mlp": "swiglu"},
    "huge_plus": {"width": 1280, "depth": 32, "heads": 20, "hidden": 5120, "mlp": "swiglu"},
}
IMAGENET: dict[str, Any] = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}


def _vit() -> dict[str, ViTSpec]:
    """Dosovitskiy et al. 2021 and Steiner et al. 2021; sizes without a head were published after ImageNet-21k only."""
    made = {}
    for size, patch, image in (
        *((size, 16, image) for size in ("tiny", "small", "base", "large") for image in (224, 384)),
        *((size, 32, image) for size in ("small", "base", "large") for image in (224, 384)),
        ("base", 8, 224),
        ("huge", 14, 224),
    ):
        made[f"vit_{size}_patch{patch}_{image}"] = ViTSpec(**SIZES[size], patch_size=patch, image_size=(image, image))
    for name in ("vit_large_patch32_224", "vit_huge_patch14_224"):
        made[name] = made[name].but(num_classes=0)
    dino = ViTSpec(**SIZES["small"], **IMAGENET, patch_size=8, num_classes=0, position=TABLE.but(recipe="dinov2"))
    return made | {"vit_small_patch8_224": dino}  # Caron et al. 2021


def _deit() -> dict[str, ViTSpec]:
    """Touvron et al. 2021 (with a distillation token or without) and 2022 (DeiT III: the class token has no row)."""
    made = {}
    for size, image in (("tiny", 224), ("small", 224), ("base", 224), ("base", 384)):
        for word, distilled in (("", False), ("distilled_", True)):
            spec = ViTSpec(**SIZES[size], **IMAGENET, image_size=(image, image), distilled=distilled)
            made[f"deit_{size}_{word}patch16_{image}"] = spec
    third: dict[str, Any] = {**IMAGENET, "layer_scale": 1e-6, "position": TABLE.but(prefix_rows=False)}
    for size, image in (*((s, i) for s in ("small", "base", "large") for i in (224, 384)), ("medium", 224)):
        made[f"deit3_{size}_patch16_{image}"] = ViTSpec(**SIZES[size], **third, image_size=(image, image))
    return made | {"deit3_huge_patch14_224": ViTSpec(**SIZES["huge"], **third, patch_size=14)}


def _rope() -> dict[str, ViTSpec]:
    """RoPE-ViT (Heo et al. 2024): axial or mixed rotary, alone or with a table (``ape``)."""
    return {
        f"vit_{size}_patch16_rope_{word}224": ViTSpec(
            **SIZES[size], **IMAGENET, layer_scale=1e-5, position=PositionSpec.parse(line, prefix_rows=False)
        )
        for size in ("small", "base", "large")
        for word, line in (
            ("", "axial"),
            ("mixed_", "mixed"),
            ("ape_", "table + axial"),
            ("mixed_ape_", "table + mixed"),
        )
    }


def _dino() -> dict[str, ViTSpec]:
    """DINOv2 (Oquab et al. 2023; registers: Darcet et al. 2023) and DINOv3 (Simeoni et al. 2025), without heads."""
    made = {}
    second: dict[str, Any] = {
        **IMAGENET,
        "num_classes": 0,
        "layer_scale": 1e-5,
        "patch_size": 14,
        "image_size": (518, 518),
    }
    registers = TABLE.but(recipe="dinov2_reg", prefix_rows=False)
    third: dict[str, Any] = {**IMAGENET, "num_classes": 0, "layer_scale": 1e-5, "eps": 1e-5, "image_size": (256, 256)}
    third |= {"registers": 4, "position": PositionSpec(rotated="dinov3")}
    for size in ("small", "base", "large", "giant"):
        knobs = {**SIZES[size], **second}
        made[f"vit_{size}_patch14_dinov2"] = ViTSpec(**knobs, position=TABLE.but(recipe="dinov2"))
        made[f"vit_{size}_patch14_reg4_dinov2"] = ViTSpec(**knobs, registers=4, position=registers)
    for size in ("small", "small_plus", "base", "large", "huge_plus"):
        for word, biased in (("", False), ("_qkvb", True)):
            made[f"vit_{size}_patch16_dinov3{word}"] = ViTSpec(**SIZES[size], **third, qkv_bias=biased)
    return made


MODEL = ViT
VARIANTS = _vit() | _deit() | _rope() | _dino()
