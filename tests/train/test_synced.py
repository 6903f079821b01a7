"""Batch norms of two processes are those of one."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from vispe.train.synced import SyncedNorm, synced

TWO = """
import os, sys, torch
import torch.distributed as dist
from torch import nn
from vispe.train.synced import synced
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
torch.manual_seed(0)
x = torch.randn(4, 3, 5, 6) * 3 + 1
weight = torch.randn(4, 3, 5, 6)
norm = synced(nn.Sequential(nn.BatchNorm2d(3)))
part = x[2 * rank : 2 * rank + 2].requires_grad_()
y = norm(part)
(y * weight[2 * rank : 2 * rank + 2]).sum().backward()
torch.save({"y": y.detach(), "grad": part.grad, "state": norm.state_dict()}, sys.argv[3])
dist.barrier()
os._exit(0)  # gloo's threads may abort an interpreter that ends by itself
"""


def test_names_and_weights_are_kept():
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sequential(nn.BatchNorm2d(3))).eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    x, expected = torch.randn(2, 3, 4, 4), None
    expected = model(x)
    assert isinstance(synced(model)[1][0], SyncedNorm)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not model[1][0].training
    assert torch.equal(model(x), expected)
    model.train()
    assert torch.equal(model[1][0](x), nn.BatchNorm2d(3)(x))  # one process alone


@pytest.mark.slow
def test_two_processes_are_one(tmp_path):
    outs = [tmp_path / f"{rank}.pt" for rank in range(2)]
    words = [[sys.executable, "-c", TWO, str(rank), str(tmp_path / "meet"), str(outs[rank])] for rank in range(2)]
    running = [subprocess.Popen(command) for command in words]
    assert [one.wait(timeout=120) for one in running] == [0, 0]
    found = [torch.load(path) for path in outs]
    torch.manual_seed(0)
    x = (torch.randn(4, 3, 5, 6) * 3 + 1).requires_grad_()
    weight, norm = torch.randn(4, 3, 5, 6), nn.Sequential(nn.BatchNorm2d(3))
    y = norm(x)
    (y * weight).sum().backward()
    assert torch.allclose(torch.cat([one["y"] for one in found]), y, atol=1e-5)
    assert torch.allclose(torch.cat([one["grad"] for one in found]), x.grad, atol=1e-5)
    for one in found:
        for key, value in norm.state_dict().items():
            assert torch.allclose(one["state"][key], value, atol=1e-6), key
