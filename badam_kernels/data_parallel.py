"""DistributedDataParallel reduces the parameters that require grad when it is made, and never others."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn

__all__ = ["refuse_late_wrapper"]


def refuse_late_wrapper(model: nn.Module, params: Collection[Tensor]) -> None:
    """Raises RuntimeError for a DistributedDataParallel `model` that does not reduce as many parameters as `params` of it train.

    It was made when one block alone required grad; in every other block the ranks would drift apart, in silence.
    """
    if not isinstance(model, nn.parallel.DistributedDataParallel) or model.process_group.size() == 1:
        return
    inside = {id(param) for param in model.parameters()}
    trained = sum(id(param) in inside for param in params)
    reduced = model._get_ddp_logging_data()["num_parameter_tensors"]
    if reduced < trained:
        raise RuntimeError(
            f"DistributedDataParallel was made after BlockAdam and reduces {reduced} of the {trained} parameters that train: the "
            "ranks would drift apart. Wrap the model first, with find_unused_parameters=True, and make BlockAdam from the "
            "named_parameters() of what it returns."
        )
