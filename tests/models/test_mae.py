"""MAE's promises: what is hidden stays hidden, what is seen is kept, and only places tell hidden patches apart."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import vispe
from vispe.models.mae import MAE, MAEOutput, patchify, unpatchify
from vispe.position.sine import sine_mae

SMALL = {
    "image_size": (32, 48),
    "patch_size": 8,
    "width": 32,
    "depth": 2,
    "heads": 2,
    "hidden": 64,
    "decoder_width": 24,
    "decoder_depth": 2,
    "decoder_heads": 3,
    "decoder_hidden": 48,
}


def small(**knobs: object) -> MAE:
    torch.manual_seed(0)
    return vispe.build("mae_vit_base_patch16", **{**SMALL, **knobs})


def pictures(b: int = 2, size: tuple[int, int] = (32, 48), seed: int = 0) -> Tensor:
    return torch.randn(b, 3, *size, generator=torch.Generator().manual_seed(seed))


def noises(b: int = 2, n: int = 24, seed: int = 0) -> Tensor:
    return torch.rand(b, n, generator=torch.Generator().manual_seed(seed))


def test_the_order_of_a_patch_worked_out_by_hand():
    image = torch.arange(2 * 4 * 4).reshape(1, 2, 4, 4)
    patches = patchify(image, 2)
    assert patches.shape == (1, 4, 8)
    assert patches[0, 1].tolist() == [2, 18, 3, 19, 6, 22, 7, 23]  # upper right: row by row, channels last


@given(h=st.integers(1, 4), w=st.integers(1, 4), patch=st.integers(1, 5), c=st.integers(1, 4))
def test_patches_go_back_where_they_were(h, w, patch, c):
    images = torch.arange(2 * c * h * w * patch * patch).reshape(2, c, h * patch, w * patch)
    patches = patchify(images, patch)
    assert patches.shape == (2, h * w, patch * patch * c)
    assert torch.equal(unpatchify(patches, patch, (h, w)), images)


@pytest.mark.parametrize(("ratio", "hidden"), [(0.75, 18), (0.5, 12), (0.9, 22), (0.01, 1)])
@torch.inference_mode()
def test_the_count_of_hidden_patches_is_exact(ratio, hidden):
    out = small(mask_ratio=ratio)(pictures(3), noises(3))
    assert isinstance(out, MAEOutput)
    assert out.mask.sum(1).tolist() == [hidden] * 3
    assert set(out.mask.unique().tolist()) == {0.0, 1.0}
    assert torch.equal(out.ids_restore.sort(1).values, torch.arange(24).expand(3, -1))


@torch.inference_mode()
def test_the_smallest_noise_stays_and_ties_keep_their_order():
    noise = noises(2)
    out = small()(pictures(), noise)
    assert torch.equal(out.ids_restore, noise.argsort(1).argsort(1))
    assert torch.equal(out.mask, (out.ids_restore >= 6).float())
    assert small()(pictures(1), torch.zeros(1, 24)).ids_restore[0].tolist() == list(range(24))


@torch.inference_mode()
def test_hidden_pixels_are_not_seen():
    """The prediction does not change with them, the loss does; a change of one visible pixel reaches everywhere."""
    model, images, noise = small(), pictures(), noises()
    before = model(images, noise)
    mask = before.mask.bool()
    patches = patchify(images, 8)
    hidden = unpatchify(torch.where(mask[..., None], patches + 1, patches), 8, (4, 6))
    after = model(hidden, noise)
    assert torch.equal(after.prediction, before.prediction)
    assert after.loss != before.loss
    one = patches.clone()
    one[0, int((~mask[0]).nonzero()[0]), 0] += 1
    moved = model(unpatchify(one, 8, (4, 6)), noise).prediction - before.prediction
    assert bool((moved[0].abs().amax(-1) > 0).all())
    assert not moved[1].any()


def test_the_loss_is_the_mean_over_hidden_patches_alone():
    model, images = small(), pictures()
    out = model(images, noises())
    error = (out.prediction - patchify(images, 8)).square().mean(-1)
    torch.testing.assert_close(out.loss, error[out.mask.bool()].mean())
    (gradient,) = torch.autograd.grad(out.loss, out.prediction)
    assert not gradient[~out.mask.bool()].any()
    assert bool((gradient[out.mask.bool()].abs().amax(-1) > 0).all())


def test_the_normalised_target_has_mean_0_and_deviation_1():
    target = small(norm_pix_loss=True).target(pictures())
    torch.testing.assert_close(target.mean(-1), torch.zeros(2, 24), atol=1e-6, rtol=0)
    torch.testing.assert_close(target.std(-1), torch.ones(2, 24))
    assert not small(norm_pix_loss=True).target(torch.ones(1, 3, 32, 48)).any()  # a flat patch: no division by zero


@torch.inference_mode()
def test_only_its_place_tells_a_hidden_patch_from_another():
    """Without the decoder's sines every hidden patch would get the same prediction; with them none does."""
    model, images, noise = small(), pictures(1), noises(1)
    out = model(images, noise)
    hidden = out.prediction[0][out.mask[0].bool()]
    assert torch.pdist(hidden).min() > 1e-4
    visible = noise.argsort(1)[:, :6]
    tokens = model.decoder_embed(model.encode(images, visible))
    x = torch.cat((tokens, model.mask_token.expand(1, 18, -1)), 1)  # the decoder without any places
    for block in model.decoder_blocks:
        x = block(x)
    assert torch.pdist(model.decoder_pred(model.decoder_norm(x))[0, 7:]).max() < 1e-5


@torch.inference_mode()
def test_a_batch_is_its_images_one_by_one():
    model, images, noise = small(), pictures(3), noises(3)
    whole = model(images, noise)
    for i in range(3):
        alone = model(images[i : i + 1], noise[i : i + 1])
        torch.testing.assert_close(whole.prediction[i : i + 1], alone.prediction, atol=1e-5, rtol=1e-5)
        assert torch.equal(whole.mask[i], alone.mask[0])


@torch.inference_mode()
def test_noise_of_the_same_split_in_another_order_changes_the_order_only():
    """The encoder is blind to the order of its tokens: the same visible patches give the same prediction."""
    model, images, noise = small(), pictures(1), noises(1)
    order = noise.argsort(1)[0]
    shuffled = torch.cat((order[:6].flip(0), order[6:].flip(0)))
    other = torch.empty(1, 24)
    other[0, shuffled] = torch.arange(24.0)
    first, second = model(images, noise), model(images, other)
    assert torch.equal(first.mask, second.mask)
    assert not torch.equal(first.ids_restore, second.ids_restore)
    torch.testing.assert_close(first.prediction, second.prediction, atol=1e-5, rtol=1e-5)
    rolled = model(images, noise.roll(1, 1))
    assert not torch.equal(rolled.mask, first.mask)
    assert rolled.mask.sum() == first.mask.sum()


@torch.inference_mode()
def test_a_generator_decides_and_torch_own_one_does_without():
    model, images = small(), pictures()
    first, second, third = (model(images, generator=torch.Generator().manual_seed(seed)) for seed in (3, 3, 4))
    assert torch.equal(first.mask, second.mask)
    assert torch.equal(first.prediction, second.prediction)
    assert not torch.equal(first.mask, third.mask)
    drawn = model(images, model.draw(images, torch.Generator().manual_seed(3)))
    assert torch.equal(first.mask, drawn.mask)
    torch.manual_seed(5)
    a = model(images)
    assert not torch.equal(a.mask, model(images).mask)
    torch.manual_seed(5)
    assert torch.equal(model(images).mask, a.mask)


@pytest.mark.parametrize("normalised", [False, True])
@torch.inference_mode()
def test_the_picture_keeps_what_was_seen_and_predicts_the_rest(normalised):
    model, images, noise = small(norm_pix_loss=normalised), pictures(), noises()
    picture, out = model.reconstruct(images, noise), model(images, noise)
    assert picture.shape == images.shape
    mask = out.mask.bool()
    before, after = patchify(images, 8), patchify(picture, 8)
    assert torch.equal(after[~mask], before[~mask])
    assert not torch.equal(after[mask], before[mask])
    assert torch.equal(model.paste(images, out), picture)
    if normalised:
        predicted = out.prediction * (before.var(-1, keepdim=True) + 1e-6).sqrt() + before.mean(-1, keepdim=True)
        torch.testing.assert_close(after[mask], predicted[mask])
        perfect = out._replace(prediction=model.target(images))
        torch.testing.assert_close(model.paste(images, perfect), images, atol=1e-5, rtol=0)
    else:
        assert torch.equal(after[mask], out.prediction[mask])


@pytest.mark.parametrize("size", [(32, 32), (8, 64), (64, 40), (16, 8)])
def test_any_size_that_patches_tile(size):
    model, n = small(), size[0] * size[1] // 64
    if n < 4:
        with pytest.raises(ValueError, match=f"leaves none of {n} patches"):
            model(pictures(1, size))
        return
    out = model(pictures(2, size))
    assert out.prediction.shape == (2, n, 192)
    assert model.reconstruct(pictures(2, size)).shape == (2, 3, *size)
    assert torch.isfinite(out.loss)


def test_a_grid_is_not_its_transpose():
    """Equal counts of patches are not equal grids."""
    model, images = small(), pictures(1)
    turned = images.transpose(-1, -2)
    first, second = model(images, torch.zeros(1, 24)).prediction, model(turned, torch.zeros(1, 24)).prediction
    assert not torch.allclose(first[:, -1], second[:, -1], atol=1e-3)
    state = model.encoder_state("table")["position.added.weight"]
    assert torch.equal(state[0], torch.zeros(32))
    assert torch.equal(state[1:], sine_mae((4, 6), 32))
    assert not torch.equal(state[1:], sine_mae((6, 4), 32))


def test_gradients_reach_every_parameter_and_none_is_a_position():
    model = small().train()
    model(pictures(), noises()).loss.backward()
    idle = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert idle == []
    assert not any("pos" in name for name in model.state_dict())


def test_it_learns_to_fill_in():
    """A few steps on stripes: a hidden patch follows from the row or column it is in."""
    torch.manual_seed(0)
    model = small(image_size=(32, 32)).train()
    images = torch.randn(8, 3, 32, 1).expand(-1, -1, -1, 32)
    optimiser = torch.optim.AdamW(model.parameters(), 2e-3, (0.9, 0.95))
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(60):
        loss = model(images, generator=generator).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) / 10 < 0.75 * losses[0]


@pytest.mark.parametrize("position", ["sine_mae", "table"])
@torch.inference_mode()
def test_the_encoder_moves_into_a_vit(position):
    """Every patch seen, the encoder is the ViT: token for token, and its pooled mean."""
    mae, images = small(), pictures()
    knobs = {key: SMALL[key] for key in ("image_size", "width", "depth", "heads", "hidden", "patch_size")}
    vit = vispe.build("vit_base_patch16_224", **knobs, position=position, num_classes=0)
    vit.load_state_dict(mae.encoder_state(position), strict=True)
    everything = torch.arange(24).expand(2, -1)
    tokens = vit.norm(vit.tokens(images))
    torch.testing.assert_close(mae.encode(images, everything), tokens, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(mae.encode(images), tokens, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(vit(images), tokens[:, 0], atol=1e-6, rtol=1e-6)
    shuffled = torch.randperm(24).expand(2, -1)
    torch.testing.assert_close(mae.encode(images, shuffled)[:, 0], tokens[:, 0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("position", ["sine_mae", "table"])
@torch.inference_mode()
def test_the_encoder_moves_by_load_to_another_size_a_pool_and_a_head(position):
    mae = small(image_size=(64, 96), patch_size=16)
    knobs = {key: SMALL[key] for key in ("width", "depth", "heads", "hidden")}
    vit = vispe.load(
        "vit_base_patch16_224",
        weights=mae.encoder_state(position),
        origin="vispe",
        source_size=(64, 96),
        image_size=(96, 64),
        position=position,
        pool="avg",
        num_classes=5,
        **knobs,
    )
    images = pictures(1, (96, 64))
    assert vit(images).shape == (1, 5)
    assert torch.equal(vit.blocks[1].mlp.fc2.weight, mae.blocks[1].mlp.fc2.weight)
    positions = vit.position.table((6, 4), torch.device("cpu"))
    assert positions is not None
    if position == "sine_mae":  # exact at any size; a resampled table is near
        assert torch.equal(positions, sine_mae((6, 4), 32))
        torch.testing.assert_close(vit.tokens(images), _unnormalised(mae, images), atol=1e-5, rtol=1e-5)
    else:
        assert vit.position.added.weight.requires_grad
        assert not torch.equal(positions[1:], sine_mae((6, 4), 32))
        assert not positions[0].any()  # the class token's row is never resampled
        assert any("resampled" in line for line in vit.report)


def _unnormalised(mae: MAE, images: Tensor) -> Tensor:
    """The encoder's tokens before its last norm."""
    seen: list[Tensor] = []
    handle = mae.norm.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    mae.encode(images)
    handle.remove()
    return seen[0]


def stored(model: MAE, grid: tuple[int, int], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The state dict as the original stores it: position tables with a batch axis and the class token's row."""
    state = dict(model.state_dict())
    for key, width in (("pos_embed", 32), ("decoder_pos_embed", 24)):
        state[key] = torch.cat((torch.zeros(1, width), sine_mae(grid, width)))[None].to(dtype)
    return state


def test_a_tag_says_what_the_decoder_predicts():
    knobs = {key: value for key, value in SMALL.items() if key != "image_size"}
    assert vispe.build("mae_vit_base_patch16.norm_pix", **knobs).spec.norm_pix_loss
    assert not vispe.build("mae_vit_base_patch16", **knobs).spec.norm_pix_loss
    assert vispe.build("mae_vit_base_patch16.transformers", **knobs).spec.eps == 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_stored_sines_are_checked_and_left_out(dtype):
    model = small()
    knobs = {**SMALL, "image_size": (64, 64)}
    loaded = vispe.load(
        "mae_vit_base_patch16",
        weights=stored(model, (4, 6), dtype),
        origin="official",
        source_size=(32, 48),
        **knobs,
    )
    assert sorted(line.split(":")[0] for line in loaded.report) == ["decoder_pos_embed", "pos_embed"]
    assert all("sines of the grid (4, 6)" in line for line in loaded.report)
    assert torch.equal(loaded.decoder_pred.weight, model.decoder_pred.weight)
    torch.testing.assert_close(loaded(pictures(), noises()), model(pictures(), noises()))
    again = vispe.load("mae_vit_base_patch16", weights=model.state_dict(), **SMALL)
    assert again.report == []


def test_other_positions_are_refused():
    model = small()
    learned = stored(model, (4, 6))
    learned["pos_embed"] = learned["pos_embed"] + 0.01
    for state, size, why in (
        (learned, (32, 48), "pos_embed is up to 0.01 away"),
        (stored(model, (6, 4)), (32, 48), "pos_embed is up to"),  # the transposed grid has as many rows
        (stored(model, (4, 6)), (64, 64), r"pos_embed is \[25, \d+\], of the grid \(8, 8\)"),
        (stored(model, (4, 6)), None, r"of the grid \(28, 28\).*source_size"),
    ):
        with pytest.raises(ValueError, match=why):
            vispe.load("mae_vit_base_patch16", weights=state, origin="official", source_size=size, **SMALL)


def test_an_encoder_alone_is_not_a_mae():
    with pytest.raises(ValueError, match="missing 'decoder_blocks"):
        vispe.load("mae_vit_base_patch16", weights=small().encoder_state(), origin="vispe", **SMALL)


def test_every_name_of_the_published_files_is_known():
    """The official names are ours but for the tables: the whole list, converted strictly, in full size on no device."""
    from vispe.models import home
    from vispe.weights.convert import convert
    from vispe.weights.files import facts

    sizes = []
    for name, spec in home("mae_vit_base_patch16").VARIANTS.items():
        with torch.device("meta"):
            own = MAE(spec).state_dict()
            names = dict(own)
            names["pos_embed"] = torch.zeros(1, spec.grid[0] * spec.grid[1] + 1, spec.width)
            names["decoder_pos_embed"] = torch.zeros(1, spec.grid[0] * spec.grid[1] + 1, spec.decoder_width)
        converted = convert(names, facts(name)["origin"]["official"], "official")
        assert converted.keys() == own.keys() | {"pos_embed", "decoder_pos_embed"}
        sizes.append(sum(tensor.numel() for tensor in names.values()))
    assert sizes[:3] == [111_907_840, 329_541_888, 657_074_508]  # base with its tables is the 111.9 M of the original


def test_the_compiled_network_is_the_same():
    model, images, noise = small(), pictures(), noises()
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    torch.testing.assert_close(compiled(images, noise), model(images, noise), atol=1e-5, rtol=1e-5)
    compiled(images).loss.backward()  # drawn inside


@torch.inference_mode()
def test_half_precision_keeps_the_loss_in_float32():
    model, images, noise = small(), pictures(), noises()
    full = model(images, noise)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model(images, noise)
    assert mixed.loss.dtype == torch.float32
    torch.testing.assert_close(mixed.loss, full.loss, atol=0.02, rtol=0.02)
    halves = model.bfloat16()(images.bfloat16(), noise)
    assert halves.loss.dtype == torch.float32
    assert torch.equal(halves.mask, full.mask)
    assert model.reconstruct(images.bfloat16(), noise).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("knobs", "why"),
    [
        ({"mask_ratio": 0.0}, "mask_ratio must be between 0 and 1, both excluded, got 0.0"),
        ({"mask_ratio": 1.0}, "got 1.0"),
        ({"mask_ratio": float("nan")}, "got nan"),
        ({"width": 34}, "width that 4 divides, got 34"),
        ({"decoder_heads": 5}, "5 decoder_heads do not divide the decoder_width 24"),
        ({"depth": 0}, "depth must be at least 1, got 0"),
        ({"image_size": (30, 32)}, r"\(30, 32\)"),
        ({"norm_pix_loss": True, "patch_size": 1, "channels": 1}, "at least 2 values, got 1"),
        ({"masks": 0.5}, "'masks'"),
    ],
)
def test_mistakes_in_the_spec_are_named(knobs, why):
    with pytest.raises(ValueError, match=why):
        small(**knobs)


def test_mistakes_in_a_call_are_named():
    model, images = small(), pictures()
    with pytest.raises(ValueError, match=r"\(30, 48\) is not a whole number of patches"):
        model(pictures(1, (30, 48)))
    with pytest.raises(ValueError, match=r"noise is \[batch, patches\] = \[2, 24\] for these images, got \[2, 23\]"):
        model(images, noises(2, 23))
    with pytest.raises(ValueError, match=r"got \[1, 24\]"):
        model.reconstruct(images, noises(1))
    with pytest.raises(ValueError, match="not both"):
        model(images, noises(), torch.Generator())
    with pytest.raises(ValueError, match="got 'axial'"):
        model.encoder_state("axial")
