"""A trajectory as a tensor dict: the step from stored columns to what trainers take."""

from typing import Any

import numpy as np
import torch

from areal_pipe.contract.trajectory import Trajectory

TensorDict = dict[str, Any]
"""Keys to tensors whose first dimension is the batch, and lists with one entry per row."""

TOKEN_COLUMNS = {"loss_mask": np.int32, "logprobs": np.float32, "versions": np.int32}
"""Optional columns that are aligned with input_ids, and their dtypes."""


def tensor_dict_of(t: Trajectory) -> TensorDict:
    """A trajectory as a batch of one, in the contract's dtypes; see `packing`."""
    data: TensorDict = {"input_ids": torch.from_numpy(t.input_ids.copy())[None]}
    for name in TOKEN_COLUMNS:
        column = getattr(t, name)
        if column is not None:
            data[name] = torch.from_numpy(column.copy())[None]
    for key, value in t.extras.items():
        is_array = isinstance(value, np.ndarray)
        data[key] = torch.from_numpy(np.array(value))[None] if is_array else [value]
    data["attention_mask"] = torch.ones_like(data["input_ids"], dtype=torch.bool)
    if t.reward is not None:
        data["rewards"] = torch.tensor([t.reward], dtype=torch.float32)
    return data
