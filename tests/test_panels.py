"""What encodings say about a grid: worked answers, the query's own cell, and what moving everything changes."""

import pytest
import torch

from vispe.panels import GRID, NO_GRID, PANELS, QUERY, field
from vispe.position import ENCODINGS


def of(*sockets):
    return [name for name in PANELS if ENCODINGS[name].socket in sockets]


def test_the_tables_name_encodings_that_there_are():
    """Not the reverse: a new encoding may be in neither, and is then named at the figure's foot (test_plots)."""
    assert PANELS.keys() <= ENCODINGS.keys()
    assert not NO_GRID - ENCODINGS.keys()
    assert not PANELS.keys() & NO_GRID
    assert {ENCODINGS[name].socket for name in PANELS} == {entry.socket for entry in ENCODINGS.values()}


@pytest.mark.parametrize("name", PANELS)
@pytest.mark.parametrize(("grid", "query"), [(GRID, QUERY), ((24, 8), (23, 0))])
def test_a_field_is_a_finite_number_a_cell_and_the_same_every_time(name, grid, query):
    generator = torch.get_rng_state()
    values = field(name, grid, query)
    assert values.shape == grid
    assert values.isfinite().all()
    assert not values.requires_grad
    torch.manual_seed(5)
    assert torch.equal(field(name, grid, query), values)
    torch.set_rng_state(generator)


def test_the_callers_generator_is_left_alone():
    before = torch.get_rng_state()
    field("table with grid")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", of("added", "rotated", "none"))
def test_a_cell_is_most_like_itself(name):
    values = field(name)
    assert values[QUERY] == pytest.approx(1, abs=1e-5)
    assert values.max() <= 1 + 1e-5


@pytest.mark.parametrize("name", of("rotated"))
def test_rotary_sees_differences_only(name):
    """The query moved by (3, 5) sees what it saw before, moved by (3, 5)."""
    here, there = field(name), field(name, query=(QUERY[0] + 3, QUERY[1] + 5))
    torch.testing.assert_close(there[3:, 5:], here[:-3, :-5], atol=2e-5, rtol=0)


def test_a_random_table_does_not():
    here, there = field("table with grid"), field("table with grid", query=(QUERY[0] + 3, QUERY[1] + 5))
    assert (there[3:, 5:] - here[:-3, :-5]).abs().max() > 0.1


def test_alibi_by_hand():
    """The first of 8 heads has slope 1/2."""
    values = field("ALiBi, 2-D")
    assert values[QUERY] == 0
    assert values[QUERY[0] + 3, QUERY[1] + 4] == pytest.approx(-2.5)


def test_axial_rotary_by_hand():
    """Base 100, 16 frequencies an axis: one cell to the right turns half of the pairs, and the others not at all."""
    theta = 100.0 ** (-torch.arange(16) / 16)
    right = field("rotary 2-D axial")[QUERY[0], QUERY[1] + 1]
    assert right == pytest.approx((0.5 + theta.cos().mean() / 2).item(), abs=1e-6)


def test_channel_order_does_not_matter_to_a_similarity():
    for name in ("sine 2-D, timm", "sine 2-D, LoFTR"):
        torch.testing.assert_close(field(name), field("sine 2-D, MAE"), atol=1e-5, rtol=0)


def test_a_trained_basis_by_hand():
    """The long side of 16 x 24 cells is 2 long: cells are 1/12 apart, and a pair turns by the difference's product."""
    weight = torch.tensor([[3.0, 0.0], [1.0, -2.0]])
    values = field("rotary, learned basis", basis=weight)
    wanted = weight @ torch.tensor([4 / 12, 2 / 12])
    assert values[QUERY[0] + 2, QUERY[1] + 4] == pytest.approx(wanted.cos().mean().item(), abs=1e-6)


def test_zero_padding_tells_the_border_only():
    one, four = field("PEG"), field("Mix-FFN")
    assert (one[1:-1, 1:-1] == 0).all()
    assert (one[0] > 0.1).all()
    assert (four[4:-4, 4:-4] < 1e-6).all()  # each block looks one cell further
    assert (four[3, 4:-4] > 1e-6).all()


def test_nothing_tells_nothing():
    assert field("none").allclose(torch.ones(GRID))


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="'rotary 1-D'"):
        field("rotary 1-D")
    with pytest.raises(ValueError, match=r"\(16, 0\)"):
        field("none", query=(16, 0))
