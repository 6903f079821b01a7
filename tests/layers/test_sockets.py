"""The words of a ``position:`` line: which socket each fills, what prefix tokens are told, how entries move."""

import dataclasses

import pytest
import torch

from vispe.layers.sockets import WORDS, Position, PositionSpec
from vispe.layers.transformer import Attention
from vispe.position.parameters import positional_parameters
from vispe.position.resample import RECIPES, resample, resample_bias, resample_line
from vispe.position.rotary import rotate

GRID, OTHER, WIDTH, HEADS, DEPTH, PREFIX = (3, 5), (4, 3), 32, 4, 2, 3
ADDED, ROTATED, BIASED = (WORDS[socket][1:] for socket in ("added", "rotated", "biased"))
LINES = ["none", *ADDED, *ROTATED, *BIASED, "peg", "table + mixed", "table + axial + swin + peg"]
HERE = torch.device("cpu")


def position(line: str, grid=GRID, prefix=PREFIX, **knobs) -> Position:
    """Every parameter drawn: some start at zero."""
    torch.manual_seed(0)
    spec = PositionSpec.parse(line, **knobs)
    made = Position(spec, grid, WIDTH, HEADS, DEPTH, prefix, 1 if spec.added == "table" else 0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.5)
    return made


def attention(seed: int = 0) -> Attention:
    torch.manual_seed(seed)
    layer = Attention(WIDTH, HEADS)
    torch.nn.init.normal_(layer.qkv.weight, std=0.3)
    return layer


# --- the line ---------------------------------------------------------------------------------------------------------


def test_lines_are_read_and_written_back():
    assert PositionSpec.parse("none") == PositionSpec() == PositionSpec.parse(str(PositionSpec()))
    assert PositionSpec.parse("table + axial") == PositionSpec(added="table", rotated="axial")
    assert PositionSpec.parse("peg+swin") == PositionSpec(biased="swin", convolved="peg")
    for line in LINES:
        assert PositionSpec.parse(str(PositionSpec.parse(line))) == PositionSpec.parse(line)
    words = [word for socket in WORDS.values() for word in socket if word != "none"]
    assert len(words) == len(set(words)) == 17


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PositionSpec.parse("tabel"), "'tabel' is no encoding; 'none', or words joined by"),
        (lambda: PositionSpec.parse(""), "'' is no encoding"),
        (lambda: PositionSpec.parse("table + none"), "'none' is no encoding"),
        (lambda: PositionSpec.parse("table + sine_mae"), "'sine_mae' is a second added encoding"),
        (lambda: PositionSpec.parse("axial + mixed"), "'mixed' is a second rotated encoding"),
        (lambda: PositionSpec.parse("swin + swin"), "'swin' is a second biased encoding"),
        (lambda: PositionSpec(rotated="table"), "position.rotated must be one of none, axial.*got 'table'"),
        (lambda: PositionSpec(recipe="nearest"), "position.recipe must be one of timm.*got 'nearest'"),
        (lambda: PositionSpec(base=0), "position.base must be positive, got 0"),
        (lambda: PositionSpec(reference=(0, 3)), "position.reference must be .*got"),
        (lambda: PositionSpec.of(rotatd="axial"), "PositionSpec has no 'rotatd'"),
        (lambda: Position(PositionSpec(), GRID, 30, 4, 1, 0), "4 heads do not divide the width 30"),
        (lambda: Position(PositionSpec(rotated="mixed"), GRID, 24, 4, 1, 0), "head_dim that 4 divides, got 6"),
        (lambda: Position(PositionSpec(added="row_column"), GRID, 27, 3, 1, 0), "must be even.*got 27"),
    ],
)
def test_mistakes_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --- what tokens are told ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", [GRID, OTHER, (1, 7)])
@pytest.mark.parametrize("line", LINES)
@torch.no_grad()
def test_every_line_serves_every_grid(line, grid):
    made, n = position(line), PREFIX + grid[0] * grid[1]
    table = made.table(grid, HERE)
    assert (table is None) == (made.spec.added == "none")
    if table is not None:
        assert table.shape == (grid[0] * grid[1] + made.rows, WIDTH)
    sockets = made.sockets(grid, HERE)
    assert len(sockets) == DEPTH
    x = torch.randn(2, n, WIDTH)
    for socket in sockets:
        assert attention()(x, socket).shape == x.shape
    assert made.convolve(x, grid).shape == x.shape


@pytest.mark.parametrize("line", ["none", *ROTATED, *BIASED])
@torch.no_grad()
def test_prefix_tokens_are_never_turned_and_never_biased(line):
    """Their scores with each other and with every patch are what they are without any encoding."""
    made, n = position(line), PREFIX + GRID[0] * GRID[1]
    q, k = torch.randn(2, HEADS, n, 8), torch.randn(2, HEADS, n, 8)
    for socket in made.sockets(GRID, HERE):
        if socket.turn is not None:
            turn = socket.turn.expand(HEADS, n, 4, 2)
            assert torch.equal(turn[:, :PREFIX], torch.tensor([1.0, 0.0]).expand(HEADS, PREFIX, 4, 2))
            assert not torch.equal(turn[:, PREFIX + 1], turn[:, PREFIX])
        if socket.bias is not None:
            bias = socket.bias(q)
            assert bias.shape[-2:] == (n, n)
            assert not bias[..., :PREFIX, :].any()
            assert not bias[..., :PREFIX].any()
            assert bias[..., PREFIX:, PREFIX:].abs().sum() > 0
        if socket.values is not None:
            added = socket.values((q @ k.mT).softmax(-1))
            assert added.shape == q.shape
            assert not added[:, :, :PREFIX].any()


@pytest.mark.parametrize("line", ["none", *ROTATED, *BIASED, "peg"])
@torch.no_grad()
def test_a_class_token_does_not_see_where_patches_are(line):
    """Shuffled patches leave the output of a class token's attention alone: nothing but their own place moves them."""
    made, cells = position(line, prefix=1), GRID[0] * GRID[1]
    x, shuffle = (
        torch.randn(1, 1 + cells, WIDTH),
        torch.cat((torch.zeros(1, dtype=torch.long), torch.randperm(cells) + 1)),
    )
    for socket in made.sockets(GRID, HERE):
        q_only = attention()(x, socket)[:, 0]
        moved = attention()(x[:, shuffle], socket)[:, 0]
        if line == "none":
            torch.testing.assert_close(attention()(x, socket)[:, shuffle], attention()(x[:, shuffle], socket))
        if made.spec.rotated == "none":  # keys of patches are turned, so a rotated class token's score does see them
            torch.testing.assert_close(q_only, moved, atol=1e-5, rtol=1e-5)
        else:
            assert (q_only - moved).abs().max() > 1e-3
    assert torch.equal(made.convolve(x, GRID)[:, 0], x[:, 0])


@pytest.mark.parametrize("line", ["axial", "mixed", "eva", "swin", "swin_v2", "decomposed", "alibi"])
@torch.no_grad()
def test_scores_see_differences_only(line):
    """The same content at cells (0, 0) and (1, 1), and at (1, 2) and (2, 3), scores the same."""
    made = position(line, prefix=0)
    torch.manual_seed(1)
    one, other = torch.randn(2, 1, HEADS, 1, 8)
    q, k = (t.expand(1, HEADS, 15, 8) for t in (one, other))
    for socket in made.sockets(GRID, HERE):
        scores = torch.zeros(1, HEADS, 15, 15)
        if socket.turn is not None:
            scores = rotate(q.clone(), socket.turn, socket.layout) @ rotate(k.clone(), socket.turn, socket.layout).mT
        if socket.bias is not None:
            scores = scores + socket.bias(q)
        at = {(y, x): y * 5 + x for y in range(3) for x in range(5)}
        torch.testing.assert_close(
            scores[..., at[0, 0], at[1, 1]], scores[..., at[1, 2], at[2, 3]], atol=1e-4, rtol=1e-4
        )
        assert (scores[..., at[0, 0], at[1, 1]] - scores[..., at[0, 0], at[2, 0]]).abs().max() > 1e-3


@torch.no_grad()
def test_alibi_and_shaw_by_hand():
    made = position("alibi", prefix=1)
    (socket, _) = made.sockets(GRID, HERE)
    bias = socket.bias(torch.zeros(1, HEADS, 16, 8))
    assert bias[0, 1, 1 + 5 + 1].item() == pytest.approx(-(2**-2) * 2**0.5)  # head 1 of 4, cells (0, 0) and (1, 1)
    made = position("shaw", prefix=0)
    layer, (socket, _) = made.biases[0], made.sockets(GRID, HERE)
    q = torch.randn(1, HEADS, 15, 8)
    expected = q[0, 2, 4] @ layer.key_table[14 + 3] / 8**0.5  # three tokens ahead, reach 14
    torch.testing.assert_close(socket.bias(q)[0, 2, 4, 7], expected)


@pytest.mark.parametrize("line", LINES)
def test_everything_learned_is_positional(line):
    made = position(line)
    assert dict(positional_parameters(made)).keys() == dict(made.named_parameters()).keys()
    assert not list(made.buffers())


@pytest.mark.parametrize("line", LINES)
def test_gradients_reach_every_entry(line):
    made, x = position(line), torch.randn(2, PREFIX + 15, WIDTH, requires_grad=True)
    out = sum(attention(i)(x, socket).square().sum() for i, socket in enumerate(made.sockets(GRID, HERE)))
    table = made.table(GRID, HERE)
    out = out + made.convolve(x, GRID).square().sum() + (0 if table is None else table.square().sum())
    out.backward()
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


# --- another grid -----------------------------------------------------------------------------------------------------


def state_of(made: Position) -> dict[str, torch.Tensor]:
    return {f"position.{key}": value for key, value in made.state_dict().items()}


@pytest.mark.parametrize("line", LINES)
@torch.no_grad()
def test_entries_moved_to_another_grid_give_what_the_module_gives_there(line):
    """Resampling once at loading is resampling in every forward."""
    made, moved = position(line), position(line, grid=OTHER)
    state, said = moved.adapt(state_of(made), GRID, made.spec)
    moved.load_state_dict({key.removeprefix("position."): value for key, value in state.items()})
    assert len(said) <= len(state)
    if made.spec.added != "none":
        torch.testing.assert_close(moved.table(OTHER, HERE), made.table(OTHER, HERE), atol=1e-6, rtol=1e-6)
    x = torch.randn(2, PREFIX + OTHER[0] * OTHER[1], WIDTH)
    for ours, theirs in zip(moved.sockets(OTHER, HERE), made.sockets(OTHER, HERE), strict=True):
        torch.testing.assert_close(attention()(x, ours), attention()(x, theirs), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(moved.convolve(x, OTHER), made.convolve(x, OTHER))


@torch.no_grad()
def test_each_entry_is_moved_by_its_own_recipe():
    def moved(line, **knobs):
        made = position(line, **knobs)
        state, said = position(line, grid=OTHER, **knobs).adapt(state_of(made), GRID, made.spec)
        return state_of(made), state, said

    old, new, said = moved("table", recipe="mae")
    key = "position.added.weight"
    torch.testing.assert_close(new[key], resample(old[key], GRID, OTHER, RECIPES["mae"], 1))
    assert torch.equal(new[key][0], old[key][0])  # the class token's row as it is
    assert said == [f"{key}: resampled, grid (3, 5) -> (4, 3), 1 prefix tokens, recipe of {RECIPES['mae'].source}"]
    old, new, _ = moved("row_column")
    torch.testing.assert_close(new["position.added.row"], resample_line(old["position.added.row"], 4, RECIPES["timm"]))
    old, new, said = moved("swin")
    key = "position.biases.1.table"
    torch.testing.assert_close(new[key], resample_bias(old[key], GRID, OTHER, RECIPES["swin_bias"]))
    assert len(said) == DEPTH
    old, new, _ = moved("decomposed")
    key = "position.biases.0.columns"
    torch.testing.assert_close(new[key], resample_line(old[key], 5, RECIPES["sam_relpos"]))
    old, new, _ = moved("shaw")
    key = "position.biases.0.key_table"
    assert torch.equal(new[key], old[key][3:-3])  # 15 cells reach 14, 12 reach 11


@torch.no_grad()
def test_swin_v2_keeps_the_window_it_was_trained_with():
    made, moved = position("swin_v2"), position("swin_v2", grid=OTHER)
    _, said = moved.adapt(state_of(made), GRID, made.spec)
    assert said == ["position.biases: differences scaled by grid (3, 5) of training, not (4, 3); position.reference"]
    assert moved.spec.reference == GRID
    again = Position(moved.spec, (6, 6), WIDTH, HEADS, DEPTH, PREFIX)  # built anew from that spec
    assert all(layer.window == GRID for layer in again.biases)
    _, said = again.adapt(state_of(moved), OTHER, moved.spec)
    assert said == []


@pytest.mark.parametrize("line", ["table", "row_column", "factorised", "swin", "decomposed", "shaw"])
def test_mistakes_are_named_of_a_source_grid(line):
    made = position(line)
    for wrong in ((4, 5), (15, 15)):
        for target in (OTHER, wrong):
            with pytest.raises(
                ValueError, match=r"^position\.(added|biases\.0)\.\w+: a (bias )?table of \d+ rows is not"
            ):
                position(line, grid=target).adapt(state_of(made), wrong, made.spec)


def test_a_transposed_source_grid_is_another_table():
    """Equal counts: nothing can tell, so the source is asked for and never guessed."""
    made, moved = position("table"), position("table", grid=OTHER)
    right, _ = moved.adapt(state_of(made), GRID, made.spec)
    wrong, _ = moved.adapt(state_of(made), GRID[::-1], made.spec)
    assert (right["position.added.weight"] - wrong["position.added.weight"]).abs().max() > 0.05


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("was", ["table", "mixed", "swin", "none", "row_column + peg"])
def test_another_line_is_dropped_and_starts_fresh_in_words(line, was):
    made, old = position(line), position(was)
    state, said = made.adapt(state_of(old), GRID, old.spec)
    assert state.keys() == state_of(made).keys()
    dropped = {word.partition(":")[0] for word in said if "dropped" in word}
    fresh = {word.partition(":")[0] for word in said if "fresh" in word}
    assert dropped | state.keys() >= state_of(old).keys()
    assert fresh <= state.keys()
    kept = state.keys() - fresh
    assert all(state[key] is not None and torch.equal(state[key], state_of(old)[key]) for key in kept)


def test_entries_that_fit_are_read_whatever_the_published_line_says():
    """A checkpoint of ours with ``position="mixed"``, where the name's published weights have a table."""
    made = position("mixed")
    state, said = position("mixed").adapt(state_of(made), GRID, PositionSpec(added="table"))
    assert said == []
    assert torch.equal(state["position.mixed.weight"], made.mixed.weight)


def test_missing_and_unknown_entries_of_the_same_line_are_left_to_the_strict_reader():
    made = position("swin")
    state = state_of(made)
    del state["position.biases.1.table"]
    state["position.peg.conv.bias"] = torch.zeros(WIDTH)
    found, said = position("swin").adapt(state, GRID, made.spec)
    assert found.keys() == state.keys()
    assert said == []


def test_a_spec_changes_one_knob():
    spec = PositionSpec.parse("table + axial").but(base=50.0)
    assert dataclasses.asdict(spec)["base"] == 50.0
    with torch.no_grad():
        one, other = (Position(s, GRID, WIDTH, HEADS, 1, 0, 0) for s in (spec, spec.but(base=None)))
        assert not torch.equal(one.sockets(GRID, HERE)[0].turn, other.sockets(GRID, HERE)[0].turn)


def test_a_spec_reads_a_line_a_mapping_or_itself():
    spec = PositionSpec(added="table", recipe="mae")
    assert PositionSpec.read(spec) is spec
    assert PositionSpec.read("table + axial") == PositionSpec(added="table", rotated="axial")
    assert PositionSpec.read({"rotated": "axial", "base": 10.0}) == PositionSpec(rotated="axial", base=10.0)
    with pytest.raises(ValueError, match="a line such as 'table \\+ axial' or a mapping of sockets, got 3"):
        PositionSpec.read(3)


def test_what_is_said_on_top_keeps_how_a_table_is_read():
    spec = PositionSpec(added="table", recipe="mae", prefix_rows=False)
    assert spec.changed({"rotated": "axial"}) == spec.but(rotated="axial")
    assert spec.changed("axial") == PositionSpec(rotated="axial", recipe="mae", prefix_rows=False)
    other = PositionSpec(biased="alibi")
    assert spec.changed(other) is other
