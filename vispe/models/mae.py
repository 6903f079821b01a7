"""MAE: three quarters of the patches are hidden, and only their places say what to paint (He et al. 2022).

What is different here: the encoder sees the class token and the visible patches alone, each with the fixed sines of its
own place; the narrower decoder gets every place, the same mask token plus the sines of that place wherever a patch is
hidden. So position is all that tells one hidden patch from another. The sines are made from the grid in every forward
and no table is stored: any image that patches tile goes in, square or not. The encoder's names are ViT's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from vispe.layers.transformer import Block, PatchEmbed
from vispe.position.grid import Grid, at_least_float32, check_grid
from vispe.position.resample import patch_grid
from vispe.position.sine import sine_mae
from vispe.spec import Spec

EPS = 1e-6  # added to a patch's variance
ENCODER = ("cls_token", "patch_embed.", "blocks.", "norm.")
TABLES = {"pos_embed": "width", "decoder_pos_embed": "decoder_width"}  # checkpoints store them -> whose width


@dataclasses.dataclass(frozen=True, kw_only=True)
class MAESpec(Spec):
    """Every knob of a masked autoencoder. Sizes in pixels, (h, w); one number means a square.

    ``mask_ratio``: the share of patches hidden, in (0, 1); ``int(n * (1 - mask_ratio))`` of ``n`` stay, as in the
    source. ``norm_pix_loss``: the target is each patch's pixels less their mean, over their deviation (the paper's
    better representation; weights tagged ``.norm_pix``). ``image_size`` only says what the weights were trained at.
    ``mean`` and ``std`` of RGB in [0, 1], as the weights expect. ``hidden`` is the MLP's width.
    """

    image_size: tuple[int, int] = (224, 224)
    patch_size: int = 16
    channels: int = 3
    width: int = 768
    depth: int = 12
    heads: int = 12
    hidden: int = 3072
    decoder_width: int = 512
    decoder_depth: int = 8
    decoder_heads: int = 16
    decoder_hidden: int = 2048
    mask_ratio: float = 0.75
    norm_pix_loss: bool = False
    eps: float = 1e-6
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        h, w = (self.image_size,) * 2 if isinstance(self.image_size, int) else self.image_size
        object.__setattr__(self, "image_size", check_grid((h, w), "image_size"))
        for name in ("patch_size", "channels", "depth", "hidden", "decoder_depth", "decoder_hidden"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for part in ("", "decoder_"):
            width, heads = getattr(self, f"{part}width"), getattr(self, f"{part}heads")
            if heads < 1 or width % heads:
                raise ValueError(f"{heads} {part}heads do not divide the {part}width {width}")
            if width < 4 or width % 4:
                raise ValueError(f"the sines of two axes need a {part}width that 4 divides, got {width}")
        if not 0 < self.mask_ratio < 1:
            raise ValueError(f"mask_ratio must be between 0 and 1, both excluded, got {self.mask_ratio}")
        if self.norm_pix_loss and self.pixels < 2:
            raise ValueError(f"norm_pix_loss needs patches of at least 2 values, got {self.pixels}")

    @property
    def grid(self) -> Grid:
        """Patches (h, w) of an image of ``image_size``; ValueError unless they tile it."""
        return patch_grid(self.image_size, (self.patch_size,) * 2)

    @property
    def pixels(self) -> int:
        """Values in a patch."""
        return self.patch_size**2 * self.channels


class MAEOutput(NamedTuple):
    """What a forward gives. ``n`` patches, row by row.

    ``loss``: the mean squared error of the masked patches. ``prediction [b, n, patch * patch * c]``: every patch in the
    target's units, channels last. ``mask [b, n]``: 1.0 where hidden, 0.0 where seen. ``ids_restore [b, n]``: where each
    patch stands in the order of the noise; those below the number of visible ones are seen.
    """

    loss: Float[Tensor, ""]
    prediction: Float[Tensor, "b n pixels"]
    mask: Float[Tensor, "b n"]
    ids_restore: Int[Tensor, "b n"]


class MAE(nn.Module):
    """``images [b, c, h, w]``, normalised by the spec's mean and std -> :class:`MAEOutput`, the loss first."""

    positional = ()  # every position is a sine: nothing to learn, nothing to store

    def __init__(self, spec: MAESpec) -> None:
        super().__init__()
        self.spec, self.grid = spec, spec.grid  # an image_size that patches do not tile is refused here
        width, narrow = spec.width, spec.decoder_width
        self.report: list[str] = []  # what a loader had to change
        self.patch_embed = PatchEmbed(spec.patch_size, width, spec.channels)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, spec.heads, spec.hidden, eps=spec.eps) for _ in range(spec.depth))
        self.norm = nn.LayerNorm(width, spec.eps)
        self.decoder_embed = nn.Linear(width, narrow)
        self.mask_token = nn.Parameter(torch.randn(1, 1, narrow) * 0.02)
        self.decoder_blocks = nn.ModuleList(
            Block(narrow, spec.decoder_heads, spec.decoder_hidden, eps=spec.eps) for _ in range(spec.decoder_depth)
        )
        self.decoder_norm = nn.LayerNorm(narrow, spec.eps)
        self.decoder_pred = nn.Linear(narrow, spec.pixels)
        self.apply(_init_weights)

    def forward(
        self,
        images: Float[Tensor, "b c h w"],
        noise: Float[Tensor, "b n"] | None = None,
        generator: torch.Generator | None = None,
    ) -> MAEOutput:
        """Hide, encode, decode, compare. The patches with the smallest ``noise`` stay; without it, :meth:`draw` does.

        ``ValueError`` for noise of another shape, for noise and a generator at once, for an image that patches do not
        tile or of which none would stay visible.
        """
        grid = self.patch_embed.grid(images)
        mask, ids_restore, visible = self._hide(images, self._noise(images, grid, noise, generator), grid)
        prediction = self.decode(self.encode(images, visible), ids_restore, grid)
        error = (prediction - self.target(images)).square().mean(-1)
        return MAEOutput((error * mask).sum() / mask.sum(), prediction, mask, ids_restore)

    def draw(self, images: Float[Tensor, "b c h w"], generator: torch.Generator | None = None) -> Float[Tensor, "b n"]:
        """Noise for these images, uniform in [0, 1), from ``generator`` (on its own device) or torch's default one."""
        h, w = self.patch_embed.grid(images)
        device = images.device if generator is None else generator.device
        return torch.rand(len(images), h * w, generator=generator, device=device).to(images.device)

    def encode(
        self, images: Float[Tensor, "b c h w"], visible: Int[Tensor, "b k"] | None = None
    ) -> Float[Tensor, "b m width"]:
        """The class token and the patches ``visible`` (their indices, in any order; None: all), after the last norm."""
        x = self.patch_embed(images)
        x = x + sine_mae(self.patch_embed.grid(images), self.spec.width, x.device).to(x.dtype)
        if visible is not None:
            x = x.gather(1, visible[..., None].expand(-1, -1, x.shape[-1]))
        x = torch.cat((self.cls_token.to(x.dtype).expand(len(x), -1, -1), x), 1)  # its position is a row of zeros
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def decode(
        self, tokens: Float[Tensor, "b m width"], ids_restore: Int[Tensor, "b n"], grid: Grid
    ) -> Float[Tensor, "b n pixels"]:
        """The class token and the first patches in the order of the noise -> every patch of the grid, predicted."""
        first, seen = self.decoder_embed(tokens).split((1, tokens.shape[1] - 1), 1)
        hidden = self.mask_token.to(seen.dtype).expand(len(seen), ids_restore.shape[1] - seen.shape[1], -1)
        x = torch.cat((seen, hidden), 1).gather(1, ids_restore[..., None].expand(-1, -1, seen.shape[-1]))
        x = torch.cat((first, x + sine_mae(grid, self.spec.decoder_width, x.device).to(x.dtype)), 1)
        for block in self.decoder_blocks:
            x = block(x)
        return self.decoder_pred(self.decoder_norm(x))[:, 1:]

    def target(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b n pixels"]:
        """What is to be predicted: the pixels of each patch, at least float32, normalised if the spec says so."""
        patches = at_least_float32(patchify(images, self.spec.patch_size))
        if not self.spec.norm_pix_loss:
            return patches
        mean, deviation = _moments(patches)
        return (patches - mean) / deviation

    def reconstruct(
        self,
        images: Float[Tensor, "b c h w"],
        noise: Float[Tensor, "b n"] | None = None,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "b c h w"]:
        """The picture, in the units of ``images``: visible patches as they were, masked ones as predicted."""
        return self.paste(images, self(images, noise, generator))

    def paste(self, images: Float[Tensor, "b c h w"], output: MAEOutput) -> Float[Tensor, "b c h w"]:
        """:meth:`reconstruct` of a forward that has been made.

        With ``norm_pix_loss`` a predicted patch gets back the mean and deviation of the **true** patch, for nothing
        else is known of them: such a picture flatters the model.
        """
        patches, predicted = patchify(images, self.spec.patch_size), output.prediction
        if self.spec.norm_pix_loss:
            mean, deviation = _moments(at_least_float32(patches))
            predicted = predicted * deviation + mean
        pasted = torch.where(output.mask[..., None] > 0, predicted.to(patches.dtype), patches)
        return unpatchify(pasted, self.spec.patch_size, self.patch_embed.grid(images))

    def encoder_state(self, position: Literal["sine_mae", "table"] = "sine_mae") -> dict[str, Tensor]:
        """The encoder for a ViT of the same width, depth and patch size, in vispe's names, without a head: ``load`` it
        with ``origin="vispe"``.

        ``"sine_mae"``: no positions, for a ViT built with ``position="sine_mae"``, fixed at any size. ``"table"``: a
        table filled with the sines of ``image_size`` (class row zero), for ``position="table"``: the ViT may train it
        and resamples it at other sizes, as the original's fine-tuning does.
        """
        if position not in ("sine_mae", "table"):
            raise ValueError(f"position must be 'sine_mae' or 'table', got {position!r}")
        state = {key: value for key, value in self.state_dict().items() if key.startswith(ENCODER)}
        if position == "table":
            state["position.added.weight"] = _table(self.grid, self.spec.width).to(self.cls_token)
        return state

    def adapt(self, state: Mapping[str, Tensor], source: MAESpec) -> dict[str, Tensor]:
        """Leave out the position tables that checkpoints store, once they are found to be the sines made here.

        ``source``: the spec the weights were trained with; only its image size counts. ``ValueError`` for a table of
        another grid or with other numbers: such weights have learned to read other positions. :attr:`report` says what
        was left out.
        """
        state, self.report = dict(state), []
        grid = patch_grid(source.image_size, (self.spec.patch_size,) * 2)
        for key in [key for key in TABLES if key in state]:
            stored, made = state.pop(key), _table(grid, getattr(self.spec, TABLES[key]))
            if stored.shape != made.shape:
                raise ValueError(f"{key} is {list(stored.shape)}, of the grid {grid} it would be {list(made.shape)}")
            apart = (stored.to(made) - made).abs().max().item()
            if not apart <= max(1e-4, torch.finfo(stored.dtype).eps):
                raise ValueError(
                    f"{key} is up to {apart:.3g} away from the sines of the grid {grid}; these weights have learned "
                    "other positions (without the key in the state dict they load all the same)"
                )
            self.report.append(f"{key}: left out, it holds the sines of the grid {grid}, made anew in every forward")
        return state

    def _noise(
        self, images: Tensor, grid: Grid, noise: Tensor | None, generator: torch.Generator | None
    ) -> Float[Tensor, "b n"]:
        if noise is None:
            return self.draw(images, generator)
        if generator is not None:
            raise ValueError("noise says what is masked: give it, or a generator to draw it from, not both")
        if noise.shape != (len(images), grid[0] * grid[1]):
            raise ValueError(
                f"noise is [batch, patches] = {[len(images), grid[0] * grid[1]]} for these images, "
                f"got {list(noise.shape)}"
            )
        return noise

    def _hide(self, images: Tensor, noise: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
        """``mask [b, n]``, ``ids_restore [b, n]`` and the visible patches' indices ``[b, k]``, by rising noise."""
        n = grid[0] * grid[1]
        kept = int(n * (1 - self.spec.mask_ratio))
        if kept < 1:
            raise ValueError(f"mask_ratio {self.spec.mask_ratio} leaves none of {n} patches to see")
        order = noise.argsort(dim=1, stable=True)
        ids_restore = order.argsort(1)
        return (ids_restore >= kept).to(at_least_float32(images).dtype), ids_restore, order[:, :kept]


def patchify(images: Float[Tensor, "b c h w"], patch: int) -> Float[Tensor, "b n pixels"]:
    """Patches row by row, each ``(row, column, channel)`` flattened: the order of MAE's prediction."""
    h, w = patch_grid((images.shape[-2], images.shape[-1]), (patch, patch))
    return images.unflatten(3, (w, patch)).unflatten(2, (h, patch)).permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def unpatchify(patches: Float[Tensor, "b n pixels"], patch: int, grid: Grid) -> Float[Tensor, "b c h w"]:
    """The inverse of :func:`patchify`; the grid is given, never guessed by a square root."""
    x = patches.unflatten(2, (patch, patch, -1)).unflatten(1, grid)
    return x.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)


def _moments(patches: Float[Tensor, "b n pixels"]) -> tuple[Float[Tensor, "b n 1"], Float[Tensor, "b n 1"]]:
    """Mean and (unbiased) standard deviation of each patch."""
    variance, mean = torch.var_mean(patches, -1, keepdim=True)
    return mean, (variance + EPS).sqrt()


def _table(grid: Grid, width: int) -> Float[Tensor, "n width"]:
    """The sines of a grid behind the class token's row of zeros, as checkpoints store them."""
    return F.pad(sine_mae(grid, width), (0, 0, 1, 0))


def _init_weights(module: nn.Module) -> None:
    """MAE's start: Xavier uniform for every linear map, that of the patches included, biases zero (appendix A.1)."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Conv2d):
        nn.init.xavier_uniform_(module.weight.flatten(1))


MODEL = MAE
VARIANTS = {
    "mae_vit_base_patch16": MAESpec(),
    "mae_vit_large_patch16": MAESpec(width=1024, depth=24, heads=16, hidden=4096),
    "mae_vit_huge_patch14": MAESpec(width=1280, depth=32, heads=16, hidden=5120, patch_size=14),
}
