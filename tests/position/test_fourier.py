"""SAM's Fourier features: the installed SAM, SAM 2 and kornia encoders, and one function for clicks and cells."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from torch import Tensor

from vispe.position.fourier import PromptEncoding, RandomFourier, fourier_sam, with_padding

EXACT = {"atol": 1e-6, "rtol": 0.0}
# Under the shapes' own run (tests/test_shapes.py) every call goes through a checker that no tracer can follow.
traceable = pytest.mark.skipif(
    hasattr(fourier_sam, "__wrapped__"), reason="annotations are being enforced: not traceable"
)
SIZE = (768, 1024)


def seeded(dim: int = 64) -> PromptEncoding:
    torch.manual_seed(0)
    return PromptEncoding(dim)


def clicks(b: int = 3, n: int = 11, size: tuple[int, int] = SIZE) -> Tensor:
    """Points anywhere in an image, edges included."""
    g = torch.Generator().manual_seed(1)
    return torch.rand(b, n, 2, generator=g) * torch.tensor([size[1] - 1.0, size[0] - 1.0])


LABELS = torch.tensor([1, 0, -1, 1, 0, 0, -1, 1, 1, 0, 1]).expand(3, -1)
BOXES = torch.tensor([[10.0, 20.0, 300.0, 400.0], [0.0, 0.0, 1023.0, 767.0]]).expand(3, -1, -1)


@torch.no_grad()
def kornias(ours: PromptEncoding, grid: tuple[int, int], size: tuple[int, int]):
    module = pytest.importorskip("kornia.models.sam.architecture.prompt_encoder", reason="kornia carries SAM")
    theirs = module.PromptEncoder(ours.padding.numel(), grid, size, 16)
    theirs.pe_layer.positional_encoding_gaussian_matrix.copy_(ours.fourier.directions)
    for embedding, row in zip(theirs.point_embeddings, ours.labels, strict=True):
        embedding.weight.copy_(row[None])
    theirs.not_a_point_embed.weight.copy_(ours.padding[None])
    return theirs


@torch.no_grad()
def transformers_sam(ours: PromptEncoding):
    module = pytest.importorskip("transformers.models.sam.modeling_sam", reason="transformers carries SAM")
    dim = ours.padding.numel()
    config = module.SamConfig(
        vision_config={"num_pos_feats": dim // 2}, prompt_encoder_config={"hidden_size": dim, "image_size": 1024}
    )
    theirs = module.SamPromptEncoder(config)
    theirs.shared_embedding.positional_embedding.copy_(ours.fourier.directions)
    for embedding, row in zip(theirs.point_embed, ours.labels, strict=True):
        embedding.weight.copy_(row[None])
    theirs.not_a_point_embed.weight.copy_(ours.padding[None])
    return theirs


@torch.no_grad()
def transformers_sam2(ours: PromptEncoding):
    module = pytest.importorskip("transformers.models.sam2.modeling_sam2", reason="transformers carries SAM 2")
    theirs = module.Sam2PromptEncoder(module.Sam2PromptEncoderConfig(hidden_size=ours.padding.numel()))
    theirs.shared_embedding.positional_embedding.copy_(ours.fourier.directions)
    theirs.point_embed.weight.copy_(ours.labels)
    theirs.not_a_point_embed.weight.copy_(ours.padding[None])
    return theirs


# The sources, as installed


@pytest.mark.parametrize("grid", [(1, 9), (20, 33), (64, 64), (48, 64)])
@pytest.mark.parametrize("dim", [64, 256])
def test_grids_are_kornias(grid, dim):
    ours = seeded(dim)
    wanted = kornias(ours, grid, SIZE).get_dense_pe()[0].flatten(1).T
    torch.testing.assert_close(ours.fourier.grid(grid), wanted, **EXACT)


@torch.no_grad()
@pytest.mark.parametrize("dim", [64, 256])
def test_points_are_kornias_with_the_padding_point_and_without(dim):
    """kornia as segment-anything: padding is appended only when no box is given; the image is not square."""
    ours, points = seeded(dim), clicks()
    theirs = kornias(ours, (48, 64), SIZE)
    wanted, _ = theirs((points, LABELS.clone()), None, None)
    torch.testing.assert_close(ours(*with_padding(points, LABELS), SIZE), wanted, **EXACT)
    wanted, _ = theirs((points, LABELS.clone()), BOXES[:, 0], None)
    both = torch.cat((ours(points, LABELS, SIZE), ours.boxes(BOXES[:, :1], SIZE)), 1)
    torch.testing.assert_close(both, wanted, **EXACT)


@torch.no_grad()
def test_points_and_boxes_are_transformers_sams():
    ours, points = seeded(), clicks(size=(1024, 1024))
    theirs, square = transformers_sam(ours), (1024, 1024)
    wanted, _ = theirs(points[None], LABELS[None].clone(), None, None)
    torch.testing.assert_close(ours(*with_padding(points, LABELS), square), wanted[0], **EXACT)
    wanted, _ = theirs(None, None, BOXES, None)  # [b, boxes, corners, dim]
    torch.testing.assert_close(ours.boxes(BOXES, square), wanted.flatten(1, 2), **EXACT)


@torch.no_grad()
def test_points_and_boxes_are_transformers_sam2s():
    """SAM 2 sees a box as two points labelled 2 and 3 and appends the padding point to it as well."""
    ours, points = seeded(), clicks(size=(1024, 1024))
    theirs, square = transformers_sam2(ours), (1024, 1024)
    labels = LABELS.clone()
    labels[:, 3:5] = torch.tensor([2, 3])
    wanted, _ = theirs(points[None], labels[None], None, None)
    torch.testing.assert_close(ours(*with_padding(points, labels), square), wanted[0], **EXACT)
    wanted, _ = theirs(None, None, BOXES, None)
    corners, corner_labels = BOXES[:, 0].unflatten(-1, (2, 2)), torch.tensor([2, 3]).expand(3, -1)
    torch.testing.assert_close(ours(*with_padding(corners, corner_labels), square), wanted[:, 0], **EXACT)


def test_the_same_seed_draws_kornias_directions():
    module = pytest.importorskip("kornia.models.sam.architecture.prompt_encoder", reason="kornia carries SAM")
    torch.manual_seed(3)
    theirs = module.PositionEmbeddingRandom(32, scale=2.0)
    torch.manual_seed(3)
    assert torch.equal(RandomFourier(64, scale=2.0).directions, theirs.positional_encoding_gaussian_matrix)


# Worked by hand, and claims


def test_a_quarter_turn_by_hand():
    """u = (3/4, 1/2) is half a side right of the centre: half of G's x in turns, nothing of its y."""
    directions = torch.tensor([[0.5, 1.0], [7.0, 9.0]])
    made = fourier_sam(torch.tensor([0.75, 0.5]), directions)
    torch.testing.assert_close(made, torch.tensor([1.0, 0.0, 0.0, -1.0]), **EXACT)


def test_the_centre_of_the_image_is_phase_0():
    made = RandomFourier(8)(torch.tensor([511.5, 383.5]), SIZE)
    torch.testing.assert_close(made, torch.tensor([0.0] * 4 + [1.0] * 4), **EXACT)


@given(h=st.integers(1, 12), w=st.integers(1, 12), stride=st.sampled_from([1, 4, 16]))
def test_a_cell_is_the_click_on_its_centre(h, w, stride):
    """One function for points and grids: row-major, and pixel 0 has its centre at 0."""
    fourier = RandomFourier(32)
    y, x = torch.meshgrid(*((torch.arange(n) + 0.5) * stride - 0.5 for n in (h, w)), indexing="ij")
    points = torch.stack((x, y), -1).flatten(0, 1)
    torch.testing.assert_close(fourier.grid((h, w)), fourier(points, (h * stride, w * stride)), atol=2e-5, rtol=0)


@given(dx=st.floats(-0.5, 0.5), dy=st.floats(-0.5, 0.5))
def test_similarity_sees_only_the_step_between_points(dx, dy):
    """A stationary kernel (Rahimi and Recht 2007; Tancik et al. 2020): sum of cos(4 pi step . G)."""
    g = torch.Generator().manual_seed(0)
    directions = torch.randn(2, 16, generator=g, dtype=torch.float64)
    here, step = torch.rand(20, 2, generator=g, dtype=torch.float64), torch.tensor([dx, dy], dtype=torch.float64)
    scores = (fourier_sam(here, directions) * fourier_sam(here + step, directions)).sum(-1)
    wanted = (4 * math.pi * (step @ directions)).cos().sum().expand(20)
    torch.testing.assert_close(scores, wanted, atol=1e-9, rtol=0)


def test_labels_are_added_and_padding_has_no_place():
    ours, points = seeded(), clicks()
    place = ours.fourier(points, SIZE)
    for label in range(4):
        torch.testing.assert_close(ours(points, torch.full((3, 11), label), SIZE), place + ours.labels[label])
    padded = ours(points, torch.full((3, 11), -1), SIZE)
    assert torch.equal(padded, ours.padding.expand_as(padded))


def test_labels_learn_and_directions_do_not():
    ours = seeded()
    assert {name for name, _ in ours.named_parameters()} == {"labels", "padding"}
    assert set(ours.state_dict()) == {"labels", "padding", "fourier.directions"}
    ours(*with_padding(clicks(), LABELS), SIZE).sum().backward()
    assert ours.labels.grad is not None
    assert ours.labels.grad.sum(-1).ne(0).tolist() == [True, True, False, False]
    assert ours.padding.grad is not None
    assert ours.padding.grad.unique().tolist() == [3.0 * 3]  # two labelled -1 and the appended one, in three images


# Precision and the ways of running


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_modules_and_autocast_keep_the_float32_numbers(dtype):
    fourier = RandomFourier(256)
    xy = torch.arange(4096)[:, None].expand(-1, 2)
    plain, grid = fourier(xy, (4096, 4096)), fourier.grid((20, 33))
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(fourier(xy, (4096, 4096)), plain)
        assert torch.equal(fourier.grid((20, 33)), grid)
    half = copy.deepcopy(fourier).to(dtype)
    assert half.directions.dtype == torch.float32
    assert torch.equal(half(xy, (4096, 4096)), plain)
    assert len(plain.to(dtype).unique(dim=0)) == 4096
    assert len(fourier(xy.to(dtype), (4096, 4096)).unique(dim=0)) < 4096  # the mistake itself


def test_half_prompts_round_only_what_is_learned():
    ours, points = seeded(), clicks()
    plain = ours.fourier(points, SIZE)
    half = copy.deepcopy(ours).half()
    wanted = plain + ours.labels[1].half().float()
    assert torch.equal(half(points, torch.ones(3, 11, dtype=torch.long), SIZE), wanted)


def test_meta_to_empty_load_copies_and_inference_mode():
    ours, points = seeded(), clicks()
    plain = ours(points, LABELS, SIZE)
    with torch.device("meta"):
        empty = PromptEncoding(64)
    assert empty.fourier.grid((3, 5)).is_meta
    assert empty(points.to("meta"), LABELS.to("meta"), SIZE).shape == plain.shape
    loaded = empty.half().to_empty(device="cpu").float()
    loaded.load_state_dict(ours.state_dict())
    for module in (loaded, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(module(points, LABELS, SIZE), plain)
    with torch.inference_mode():
        assert torch.equal(ours(points, LABELS, SIZE), plain)
    assert torch.equal(ours(points, LABELS, SIZE), plain)
    assert ours.double().fourier.directions.dtype == torch.float64


class Both(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prompts = seeded(16)

    def forward(self, points: Tensor, labels: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        size = (image.shape[2], image.shape[3])
        return self.prompts(*with_padding(points, labels), size), self.prompts.fourier.grid(size)


@traceable
def test_compiled_and_exported_once_for_all_sizes():
    torch._dynamo.reset()
    module = Both()
    calls = [(clicks(n=n), LABELS[:, :n], torch.zeros(1, 1, *size)) for n, size in ((5, (6, 9)), (11, (12, 7)))]
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="eager")
    dim = {name: torch.export.Dim(name, min=2, max=64) for name in ("n", "h", "w")}
    dynamic = ({1: dim["n"]}, {1: dim["n"]}, {2: dim["h"], 3: dim["w"]})
    program = torch.export.export(module, calls[0], dynamic_shapes=dynamic).module()
    for call in calls:
        for made, wanted in zip((*compiled(*call), *program(*call)), 2 * module(*call), strict=True):
            torch.testing.assert_close(made, wanted, **EXACT)


# Mistakes


@pytest.mark.parametrize("dim", [0, -2, 7])
def test_odd_dims_are_refused(dim):
    for made in (RandomFourier, PromptEncoding):
        with pytest.raises(ValueError, match=f"got {dim}"):
            made(dim)


def test_bad_scales_sizes_points_and_labels_are_refused():
    ours, points = seeded(), clicks()
    with pytest.raises(ValueError, match="got -1"):
        RandomFourier(8, scale=-1.0)
    with pytest.raises(ValueError, match=r"got \(0, 5\)"):
        ours.fourier.grid((0, 5))
    with pytest.raises(ValueError, match=r"got \(5, -1\)"):
        ours(points, LABELS, (5, -1))
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match=f"finite, got {bad}"):
            ours.fourier(torch.tensor([[1.0, bad]]), SIZE)
    wrong = (ValueError, TypeCheckError)  # the latter under the shapes' own run
    with pytest.raises(wrong, match="3"):
        ours.fourier(torch.zeros(5, 3), SIZE)
    with pytest.raises(wrong, match="5"):
        ours.boxes(torch.zeros(1, 2, 5), SIZE)
    with pytest.raises(wrong, match="7"):
        ours(points, torch.zeros(3, 7, dtype=torch.long), SIZE)
    for label in (-2, 4):
        with pytest.raises(ValueError, match=f"got {label}"):
            ours(points, torch.full((3, 11), label), SIZE)
