"""SuperPoint against the layout of its published file, hand-worked maps and transformers' network."""

import math

import pytest
import torch

from vispe.models.superpoint import SuperPoint, SuperPointSpec, sample
from vispe.weights.convert import convert
from vispe.weights.files import facts

SHAPES = {  # superpoint_v1.pth, as published by Magic Leap
    "conv1a": (64, 1, 3, 3),
    "conv1b": (64, 64, 3, 3),
    "conv2a": (64, 64, 3, 3),
    "conv2b": (64, 64, 3, 3),
    "conv3a": (128, 64, 3, 3),
    "conv3b": (128, 128, 3, 3),
    "conv4a": (128, 128, 3, 3),
    "conv4b": (128, 128, 3, 3),
    "convPa": (256, 128, 3, 3),
    "convPb": (65, 256, 1, 1),
    "convDa": (256, 128, 3, 3),
    "convDb": (256, 256, 1, 1),
}


def lively(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Random weights that keep the signal's size through the layers, so that scores differ between pixels."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            fan = parameter[0].numel() if parameter.ndim > 1 else 400
            parameter.normal_(std=(2 / fan) ** 0.5)
    return model.eval()


def new_name(origin: str, name: str) -> str:
    (ours,) = convert({name: torch.zeros(1)}, facts("superpoint")["origin"][origin], origin)
    return ours


def picture(h: int = 96, w: int = 128, channels: int = 3, batch: int = 1) -> torch.Tensor:
    return torch.rand(batch, channels, h, w, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def model() -> SuperPoint:
    return lively(SuperPoint())


def test_parameters_are_those_of_the_published_file(model):
    wanted = {f"{name}.weight": shape for name, shape in SHAPES.items()}
    wanted |= {f"{name}.bias": shape[:1] for name, shape in SHAPES.items()}
    assert {name: tuple(value.shape) for name, value in model.state_dict().items()} == wanted
    assert sum(p.numel() for p in model.parameters()) == 1_300_865
    assert all(new_name("official", name) == name for name in wanted)


def test_channel_8i_plus_j_is_row_i_column_j_of_its_cell():
    model = SuperPoint(SuperPointSpec(border=0, detection_threshold=0.05))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.convPb.bias[8 * 3 + 5] = 2.0
        model.convDb.bias[0] = 1.0
    found = model(torch.zeros(1, 1, 16, 24))[0]
    assert found.keypoints.tolist() == [[5, 3], [13, 3], [21, 3], [5, 11], [13, 11], [21, 11]]
    score = math.e**2 / (math.e**2 + 64)
    torch.testing.assert_close(found.scores, torch.full((6,), score))


def test_descriptors_are_read_on_the_stretched_grid_of_the_original():
    ramp = torch.arange(6.0).expand(4, 6)
    dense = torch.stack([torch.ones(4, 6), ramp])
    x = torch.tensor([3.5, 20.0, 43.0])
    read = sample(dense, torch.stack([x, torch.full_like(x, 10.0)], dim=-1))
    torch.testing.assert_close(read[:, 1] / read[:, 0], (x - 3.5) / (48 - 4.5) * 5)
    torch.testing.assert_close(read.norm(dim=-1), torch.ones(3))
    assert sample(dense, torch.empty(0, 2)).shape == (0, 2)


@pytest.mark.parametrize(
    ("border", "threshold", "size"), [(0, 0.0156, (64, 96)), (4, 0.0005, (96, 128)), (0, 0.01, (101, 75))]
)
def test_equals_transformers_with_the_same_random_weights(border, threshold, size):
    peer = pytest.importorskip("transformers", reason="transformers is the parity peer")
    config = peer.SuperPointConfig(keypoint_threshold=threshold, border_removal_distance=border, nms_radius=4)
    theirs = lively(peer.SuperPointForKeypointDetection(config)).double()
    weights = {new_name("transformers", name): value for name, value in theirs.state_dict().items()}
    spec = SuperPointSpec(border=border, detection_threshold=threshold, max_keypoints=10**6)
    ours = SuperPoint(spec).double().eval()
    ours.load_state_dict(weights, strict=True)

    h, w = size
    grey = picture(h, w, channels=1).double()
    with torch.inference_mode():
        out, found = theirs(grey.expand(-1, 3, -1, -1)), ours(grey)[0]
    keypoints = (out.keypoints[0] * torch.tensor([w, h])).round()
    # Their border test multiplies the map's size by 8 a second time: right and bottom are never cut.
    inside = (keypoints < torch.tensor([w // 8 * 8, h // 8 * 8]) - border).all(-1)
    keypoints, scores, descriptors = keypoints[inside], out.scores[0][inside], out.descriptors[0][inside]
    assert len(found.keypoints) > 50

    def reading(points):
        return (points[:, 1] * w + points[:, 0]).argsort()

    a, b = reading(keypoints), reading(found.keypoints)
    assert torch.equal(keypoints[a].double(), found.keypoints[b])
    torch.testing.assert_close(found.scores[b].float(), scores[a], atol=1e-5, rtol=0)
    torch.testing.assert_close(found.descriptors[b].float(), descriptors[a], atol=1e-5, rtol=0)


def test_strongest_first_at_most_so_many_inside_the_border(model):
    spec, model.spec = model.spec, model.spec.but(max_keypoints=20, border=10)
    found = model(picture())[0]
    model.spec = spec
    assert found.keypoints.shape == (20, 2)
    assert found.scores.shape == (20,)
    assert found.descriptors.shape == (20, 256)
    assert (found.scores.diff() <= 0).all()
    assert (found.keypoints >= 10).all()
    assert (found.keypoints < torch.tensor([128 - 10, 96 - 10])).all()
    everything = model(picture())[0]
    distances = torch.cdist(everything.keypoints, everything.keypoints, p=torch.inf).fill_diagonal_(99)
    assert distances.min() > model.spec.nms_radius
    torch.testing.assert_close(everything.descriptors.norm(dim=-1), torch.ones(len(everything.scores)))


def test_a_batch_is_its_pictures_one_by_one_and_runs_repeat(model):
    batch = picture(64, 88, batch=2)
    together, again = model(batch), model(batch)
    assert len(together) == 2
    for one, same, image in zip(together, again, batch, strict=True):
        alone = model(image[None])[0]
        for a, b, c in zip(one, same, alone, strict=True):
            assert torch.equal(a, b)
            torch.testing.assert_close(a, c, atol=1e-5, rtol=0)


def test_colour_is_weighed_by_rec_601(model):
    colour = picture()
    grey = 0.299 * colour[:, :1] + 0.587 * colour[:, 1:2] + 0.114 * colour[:, 2:]
    for a, b in zip(model(colour)[0], model(grey)[0], strict=True):
        torch.testing.assert_close(a, b)


def test_no_keypoint_lies_beyond_whole_cells(model):
    spec, model.spec = model.spec, model.spec.but(border=0)
    found = model(picture(55, 71))[0]
    model.spec = spec
    assert (found.keypoints < torch.tensor([64, 48])).all()
    assert (found.keypoints.amax(0) >= torch.tensor([56, 40])).all()  # the last cells have some


@pytest.mark.parametrize("size", [(1, 1), (7, 200), (200, 7), (8, 8), (0, 5), (9, 15)])
def test_tiny_pictures_have_no_keypoints(model, size):
    found = model(torch.rand(2, 3, *size))
    assert [[tuple(part.shape) for part in one] for one in found] == [[(0, 2), (0,), (0, 256)]] * 2


def test_an_empty_batch_and_a_constant_picture(model):
    assert model(torch.rand(0, 1, 64, 64)) == []
    assert torch.isfinite(model(torch.full((1, 1, 64, 64), 0.5))[0].descriptors).all()


def test_gradients_reach_every_parameter():
    model = lively(SuperPoint(SuperPointSpec(widths=(4, 4, 8, 8), head_width=8, descriptor_dim=8))).train()
    image = picture().requires_grad_()
    found = model(image)[0]
    (found.scores.sum() + found.descriptors[:, 0].sum()).backward()
    for tensor in (image, *model.parameters()):
        assert torch.isfinite(tensor.grad).all()
        assert tensor.grad.abs().sum() > 0


def test_bfloat16_keeps_whole_pixels():
    model = lively(SuperPoint(SuperPointSpec(widths=(4, 4, 8, 8), head_width=8, descriptor_dim=8))).bfloat16()
    found = model(picture(32, 640).bfloat16())[0]
    assert found.keypoints.dtype == torch.float32
    assert (found.keypoints[:, 0] % 2 == 1)[found.keypoints[:, 0] > 256].any()


@pytest.mark.parametrize(
    "image", [torch.rand(3, 32, 32), torch.rand(1, 4, 32, 32), torch.zeros(1, 3, 32, 32, dtype=torch.uint8)]
)
def test_wrong_pictures_are_refused(model, image):
    with pytest.raises(ValueError, match=r"SuperPoint"):
        model(image)


@pytest.mark.parametrize("knobs", [{"widths": (64, 64)}, {"nms_radius": -1}, {"border": -1}, {"max_keypoints": -1}])
def test_wrong_knobs_are_refused(knobs):
    with pytest.raises(ValueError, match="got"):
        SuperPointSpec(**knobs)
