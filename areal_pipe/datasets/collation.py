"""Trajectories to one padded batch: the inverse of `packing.trajectories_of`."""

from collections.abc import Sequence

from areal_pipe.contract.tensors import TensorDict, tensor_dict_of
from areal_pipe.contract.trajectory import Trajectory
from areal_pipe.episodes.packing import concat_padded_tensors


def collate(trajectories: Sequence[Trajectory], pad_value: float = 0.0) -> TensorDict:
    """One right-padded batch, row i being trajectory i.

    Args:
        trajectories: with one set of columns and extras, such as one workflow returns.
        pad_value: fills every key but `attention_mask`, which is padded with 0.

    Returns:
        Tensors in the contract's dtypes (see `packing`), as long as the longest trajectory; extras
        that are no arrays as lists with one entry per row. `{}` for no trajectories.

    Raises:
        ValueError: columns or extras that some trajectories have and others lack.
    """
    return concat_padded_tensors([tensor_dict_of(t) for t in trajectories], pad_value)
