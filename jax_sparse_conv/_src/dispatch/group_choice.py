"""When "direct" is expected to be the fastest for convolutions in groups on Hopper GPUs; which have a kernel of theirs.

By times of RegNets' layers on an H200 and an H100, as each constant says; what was not measured is left to
`direct_choice`.
"""

from __future__ import annotations

import math

from jax_sparse_conv._src.problem.workload import Workload

# Groups of few channels have a kernel of their own (cuda/dense_conv/grouped/kernel.cuh), to up to 64 features in whole
# eights. 3x3 layers of seven RegNets at batch 1, 8 and 32 under command buffers (h100_zoo_groups_1.json,
# h100_zoo_groups_2.json): groups of 24 to 56 channels are 1.7 to 21 times as fast as cuDNN's, which are slow there.
_GROUP_FEATURES = 64
_GROUP_STEP = 8
_GROUP_UNIT = 16  # bytes of channels
_GROUP_UNITS = 2048  # of _GROUP_UNIT in a window
_GROUP_MEASURED = (16, 24, 40, 48, 56)  # channels, and features, of a group
_GROUP_FLOPS = 1e10  # the most that were measured
# For 16 it has kernels in TF32 and 16 bits. Without strides ours are 1.02 to 2.3 times as fast, up to so many
# operations, and with strides 1.01 to 2.4 times up to so many elements of maps and kernel, beyond these 0.68 to 1.23
# times (batch 8 and 32 h100_zoo_groups_strided.json, by tiles of other shapes than in the files above).
_GROUP_OF_CUDNN = 16
_GROUP_OF_CUDNN_FLOPS = 9.3e8
_GROUP_STRIDED_ELEMENTS = 4.2e6
# Wider groups that cuDNN is slow for too, by "direct"'s tiles, up to the most work that was measured: in TF32 1.6 to
# 10.3 times as fast at batch 1, 8 and 32, in 16 bits 2.5 to 39 times (h200_zoo_groups_wide_*.json,
# h100_zoo_groups_wide.json).
_WIDE_GROUPS = (112, 120, 168)
_TF32_WIDE_GROUP_FLOPS = 1.03e11
_16BIT_WIDE_GROUP_FLOPS = 1.3e10


def is_faster_by_groups(workload: Workload) -> bool:
    """Whether the kernel for groups of few channels, or tiles of wider ones, are expected to beat cuDNN's."""
    geometry, channels = workload.geometry, workload.kernel_shape[3]
    is_3x3 = workload.kernel_shape[1:3] == (3, 3) and geometry.dilation == (1, 1) and max(geometry.strides) <= 2
    if (
        not is_3x3
        or geometry.groups == 1
        or channels * geometry.groups != workload.kernel_shape[4]
        or workload.flops == 0
    ):
        return False
    if channels in _WIDE_GROUPS:
        most = _16BIT_WIDE_GROUP_FLOPS if workload.itemsize == 2 else _TF32_WIDE_GROUP_FLOPS
        return not workload.is_precise and workload.flops <= most
    if channels not in _GROUP_MEASURED or workload.flops > _GROUP_FLOPS:
        return False
    if workload.is_precise or channels != _GROUP_OF_CUDNN:
        return True
    if max(geometry.strides) == 1:
        return workload.flops <= _GROUP_OF_CUDNN_FLOPS
    return workload.elements <= _GROUP_STRIDED_ELEMENTS


def has_group_kernel(workload: Workload) -> bool:
    """Whether "direct" has a kernel for groups of so few channels (cuda/dense_conv/plan/grouped_plan.cc)."""
    groups, (channels, features) = workload.geometry.groups, workload.kernel_shape[3:]
    in_group = features // groups
    if groups == 1 or in_group % _GROUP_STEP or not _GROUP_STEP <= in_group <= _GROUP_FEATURES:
        return False
    units = math.prod(workload.kernel_shape[1:3]) * channels * workload.itemsize // _GROUP_UNIT
    return channels * workload.itemsize % _GROUP_UNIT == 0 and 1 < units <= _GROUP_UNITS
