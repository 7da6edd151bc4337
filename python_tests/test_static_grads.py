"""Static gradients: one buffer per dtype, the same addresses at every visit, and the same training as without them."""

from __future__ import annotations

import pytest
import torch
from models import assert_same_bits, tiny, train, weights
from torch.utils._python_dispatch import TorchDispatchMode

from badam_kernels import BlockAdam, blocks

BF16, FP32 = torch.bfloat16, torch.float32
SETTINGS = dict(lr=1e-2, switch_every=2, schedule="ascending")


def make(dtype=FP32, **settings):
    model = tiny(dtype)
    return model, BlockAdam(model.named_parameters(), **SETTINGS | settings)


def active(optimizer) -> dict[str, torch.Tensor]:
    return {span.name: optimizer._params[span.name] for span in optimizer.active_block.spans}


def addresses(optimizer) -> list[int]:
    return [p.grad.data_ptr() for p in active(optimizer).values()]


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if str(function).startswith("aten."):  # not the profiler's
            self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("partition", [{}, {"max_bytes": 128}, {"always": ["norm"]}], ids=["layers", "row ranges", "always"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_training_is_bitwise_the_same(dtype, partition):
    plain, static = tiny(dtype), tiny(dtype)
    cut = [blocks.partition(model.named_parameters(), **partition) for model in (plain, static)]
    train(plain, BlockAdam(plain.named_parameters(), blocks=cut[0], **SETTINGS), range(15))
    train(static, BlockAdam(static.named_parameters(), blocks=cut[1], static_grads=True, **SETTINGS), range(15))
    assert_same_bits(weights(static), weights(plain))


def test_gradients_lie_at_the_same_aligned_addresses_at_every_visit():
    model, optimizer = make(static_grads=True)
    seen: dict[int, set] = {0: set(), 1: set(), 2: set()}
    for step in range(12):
        before = addresses(optimizer)
        seen[optimizer.active_block_index].add(tuple(before))
        assert all(address % 16 == 0 for address in before)
        block = active(optimizer)
        assert all(p.grad.shape == p.shape and not p.grad.any() for p in block.values())
        train(model, optimizer, range(step, step + 1))
    assert [len(each) for each in seen.values()] == [1, 1, 1]
    buffer = next(iter(active(optimizer).values())).grad.untyped_storage()
    largest = max(sum(-(-p.numel() // 16) * 16 for p in layer.parameters()) for layer in model.layers)
    assert buffer.nbytes() == 4 * largest


def test_a_backward_pass_accumulates_in_place():
    model, optimizer = make(static_grads=True)
    before = addresses(optimizer)
    model(torch.ones(1, 3, dtype=torch.long)).sum().backward()
    once = [p.grad.clone() for p in active(optimizer).values()]
    model(torch.ones(1, 3, dtype=torch.long)).sum().backward()
    assert addresses(optimizer) == before
    for grad, p in zip(once, active(optimizer).values()):
        torch.testing.assert_close(p.grad, 2 * grad)
    assert any(grad.any() for grad in once)


def test_a_switch_leaves_no_gradient_behind_and_starts_from_zero():
    model, optimizer = make(static_grads=True, switch_every=1)
    outgoing = active(optimizer)
    for p in outgoing.values():
        p.grad.fill_(1.0)
    optimizer.step()
    assert all(p.grad is None for p in outgoing.values())
    assert all(not p.grad.any() for p in active(optimizer).values())
    assert sum(p.grad is not None for p in model.parameters()) == len(active(optimizer))


def test_zeroing_is_one_operation_per_dtype_whatever_the_number_of_tensors():
    model, optimizer = make(static_grads=True)
    for p in active(optimizer).values():
        p.grad.fill_(1.0)
    before = addresses(optimizer)
    for set_to_none in (True, False):
        with Calls() as calls:
            optimizer.zero_grad(set_to_none)
        assert calls.names == ["aten.zero_.default"]
        assert addresses(optimizer) == before
        assert not any(p.grad.any() for p in active(optimizer).values())


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="needs a torch with Tensor.grad_dtype")
def test_gradients_take_the_dtype_that_their_parameter_asks_for():
    model = tiny(BF16)
    for p in model.layers[0].up.parameters():
        p.grad_dtype = FP32
    optimizer = BlockAdam(model.named_parameters(), static_grads=True, **SETTINGS)
    assert {n: p.grad.dtype is FP32 for n, p in active(optimizer).items()} == {n: ".up." in n for n in active(optimizer)}
    with Calls() as calls:
        optimizer.zero_grad()
    assert calls.names == ["aten.zero_.default"] * 2


def test_gradients_that_others_drop_come_back_at_zero_grad_and_a_row_without_one_is_skipped():
    model, optimizer = make(static_grads=True)
    expected = addresses(optimizer)
    before = weights(model)
    for p in active(optimizer).values():
        p.grad.fill_(1.0)
    model.layers[0].up.weight.grad = None
    optimizer.step()
    after = weights(model)
    assert torch.equal(after["layers.0.up.weight"], before["layers.0.up.weight"])
    assert not torch.equal(after["layers.0.down.weight"], before["layers.0.down.weight"])
    model.zero_grad()
    assert model.layers[0].down.weight.grad is None
    optimizer.zero_grad()
    assert addresses(optimizer) == expected
    assert not any(p.grad.any() for p in active(optimizer).values())


def test_loading_a_state_moves_the_gradients_to_its_block():
    model, optimizer = make(static_grads=True)
    train(model, optimizer, range(3))
    state = optimizer.state_dict()
    other_model, other = make(static_grads=True)
    left = active(other)
    other.load_state_dict(state)
    assert other.active_block_index == 1
    assert all(p.grad is None for p in left.values())
    assert all(p.grad is not None for p in active(other).values())


def test_closing_gives_the_buffers_up():
    model, optimizer = make(static_grads=True)
    optimizer.close()
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
