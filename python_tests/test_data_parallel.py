"""DistributedDataParallel: wrapped first, ranks stay equal to each other and to one process; wrapped last, it is refused."""

from __future__ import annotations

import tempfile

import pytest
import torch
import torch.distributed as dist
from torch import nn

from badam_kernels import BlockAdam

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")
WORLD, STEPS = 2, 7


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimizer: BlockAdam, rows: slice) -> list[torch.Tensor]:
    for step in range(STEPS):
        model(batch(step)[rows]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in model.parameters()]


def block_adam(model: nn.Module) -> BlockAdam:
    return BlockAdam(model.named_parameters(), lr=1e-2, switch_every=1, schedule="ascending")


def wrapped(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)


def rank(index: int, folder: str) -> None:
    """What one process has to say: its weights with the model wrapped first, and the error with the optimizer made first."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=index, world_size=WORLD)
    rows = slice(2 * index, 2 * index + 2)
    model = wrapped(Layers())
    weights = train(model, block_adam(model), rows)
    model = Layers()
    optimizer = block_adam(model)
    with pytest.raises(RuntimeError) as error:
        train(wrapped(model), optimizer, rows)
    torch.save((weights, str(error.value)), f"{folder}/{index}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks():
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank, (folder,), nprocs=WORLD)
        return [torch.load(f"{folder}/{index}.pt") for index in range(WORLD)]


def test_wrapped_first_ranks_equal_each_other_and_one_process(ranks):
    model = Layers()
    alone = train(model, block_adam(model), slice(None))
    for one, other, expected in zip(*(weights for weights, _ in ranks), alone, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-6)


def test_a_wrapper_made_after_the_optimizer_is_refused(ranks):
    for _, said in ranks:
        assert "made after BlockAdam and reduces 2 of the 6 parameters" in said
