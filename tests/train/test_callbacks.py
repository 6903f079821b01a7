"""The average of weights by its formula; checkpoints that run no code."""

import pickle

import pytest
import torch

pytest.importorskip("lightning", reason="training needs lightning")

from vispe.train.callbacks import AtomicIO, Average, decay_at


def test_decay_by_hand():
    assert decay_at(1, 0.99) == 2 / 11
    assert decay_at(10, 0.99) == 11 / 20
    assert decay_at(10_000, 0.99) == 0.99
    assert decay_at(5, 0.0) == 0.0


def test_average_by_the_formula():
    """Weights 1, 2, 4: 1; then 2/11 * 1 + 9/11 * 2; then 3/12 of that + 9/12 * 4."""
    from torch.optim.swa_utils import AveragedModel

    made = Average(decay=0.9)
    module = torch.nn.Linear(1, 1, bias=False)
    averaged = AveragedModel(module, use_buffers=False, **made._kwargs)
    seen = []
    for value in (1.0, 2.0, 4.0):
        module.weight.data.fill_(value)
        averaged.update_parameters(module)
        seen.append(averaged.module.weight.item())
    second = 2 / 11 + 9 / 11 * 2
    assert seen == pytest.approx([1.0, second, second / 4 + 3.0], rel=1e-6)


def test_buffers_are_averaged_where_asked():
    """Running means as weights; counts of batches are taken over."""
    from torch.optim.swa_utils import AveragedModel

    made, norm = Average(decay=0.9, buffers=True), torch.nn.BatchNorm1d(1)
    averaged = AveragedModel(norm, use_buffers=made._use_buffers, **made._kwargs)
    for count, value in enumerate((1.0, 2.0)):
        norm.running_mean.fill_(value)
        norm.num_batches_tracked.fill_(count)
        averaged.update_parameters(norm)
    assert averaged.module.running_mean.item() == pytest.approx(2 / 11 + 9 / 11 * 2)
    assert averaged.module.num_batches_tracked.item() == 1


class Evil:
    def __reduce__(self):
        return (print, ("ran",))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("data", [b"junk", b"", pickle.dumps(Evil())], ids=["junk", "empty", "code"])
def test_a_checkpoint_that_is_none(tmp_path, data, capsys):
    (tmp_path / "last.ckpt").write_bytes(data)
    with pytest.raises(ValueError, match=r"cannot resume from .*last\.ckpt"):
        AtomicIO().load_checkpoint(tmp_path / "last.ckpt")
    assert capsys.readouterr().out == ""


def test_objects_are_not_unpickled(tmp_path, capsys):
    torch.save({"a": Evil()}, tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match="cannot resume"):
        AtomicIO().load_checkpoint(tmp_path / "last.ckpt")
    assert capsys.readouterr().out == ""


def test_saved_whole(tmp_path):
    AtomicIO().save_checkpoint({"a": torch.ones(2), "b": [1, "x"]}, tmp_path / "last.ckpt")
    assert AtomicIO().load_checkpoint(tmp_path / "last.ckpt")["b"] == [1, "x"]
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]
