"""Small models and drivers that the tests share."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Layer(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class TinyLM(nn.Module):
    """Embedding, `layers` of different widths inside (so that blocks are uneven), head."""

    def __init__(self, layers: int = 3, width: int = 8, vocabulary: int = 11):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, width + 3 * i + 1) for i in range(layers))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def tiny(dtype: torch.dtype = torch.float32, seed: int = 0, **kwargs) -> TinyLM:
    """A TinyLM with weights that every dtype represents exactly, so that runs in different dtypes start equal."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = TinyLM(**kwargs)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param.clamp(-2, 2).mul(64).round().div(64))
    return model.to(dtype)


def loss_of(model: TinyLM, step: int, batch: int = 4) -> Tensor:
    """The language-model loss on the batch that belongs to `step`."""
    tokens = torch.randint(0, 11, (batch, 6), generator=torch.Generator().manual_seed(1000 + step))
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def set_gradients(optimizer, step: int, dtype: torch.dtype | None = None) -> None:
    """Give every parameter of the active block a gradient that depends on its name and `step` only, exact in 16 bits."""
    for name in {span.name for span in optimizer.active_block.spans}:
        param = optimizer._params[name]
        generator = torch.Generator().manual_seed(hash_of(name) + step)
        gradient = torch.randn(param.shape, generator=generator).mul(16).round().div(64)
        param.grad = gradient.to(param.device, dtype or param.dtype)


def trace(optimizer, steps: int) -> str:
    """The active block's index at each of `steps` steps."""
    seen = ""
    for step in range(steps):
        seen += str(optimizer.active_block_index)
        set_gradients(optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
    return seen


def hash_of(text: str) -> int:
    """A small number from `text` that does not change between processes."""
    return sum((i + 1) * byte for i, byte in enumerate(text.encode())) * 1009


def train(model, optimizer, steps: range, scheduler=None) -> list[float]:
    """Plain loop; the losses."""
    losses = []
    for step in steps:
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def bits(tensor: Tensor) -> Tensor:
    """The bit pattern of `tensor`, so that equality is bitwise."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(kinds[tensor.element_size()]).clone()


def weights(model) -> dict[str, Tensor]:
    return {name: bits(param) for name, param in model.named_parameters()}


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), f"{name} differs in {(actual[name] != value).sum()} elements"


def flat_state(state: dict, prefix: str = "") -> dict[str, object]:
    """A nested state dict as one level, tensors by their bits."""
    flat: dict[str, object] = {}
    items = state.items() if isinstance(state, dict) else enumerate(state)
    for key, value in items:
        name = f"{prefix}/{key}"
        if isinstance(value, Tensor):
            flat[name] = (str(value.dtype), tuple(value.shape), bits(value).flatten().tolist())
        elif isinstance(value, (dict, list, tuple)):
            flat |= flat_state(value, name)
        else:
            flat[name] = value
    return flat
