"""LeNet-5 (LeCun et al. 1998) with today's layers."""

from __future__ import annotations

from typing import Unpack

from jax_sparse_conv.models.chain import Chain, Conv
from jax_sparse_conv.models.units import Pool, Shared


class LeNet5(Chain):
    """LeNet-5 with ReLU, max pools and all connections: conv1, conv2, fc1, fc2, fc3, on images [N, 32, 32, 1].

    Args:
      num_classes: logits.
      **shared: see `Shared`.

    Raises:
      ValueError: an unknown implementation, or a num_classes that is no int of at least 1.
    """

    def __init__(self, num_classes: int = 10, **shared: Unpack[Shared]) -> None:
        convs = {"conv1": Conv(6, 5, pool=Pool(2, 2)), "conv2": Conv(16, 5, pool=Pool(2, 2))}
        super().__init__(convs, {"fc1": 120, "fc2": 84, "fc3": num_classes}, pool_size=5, channels=1, **shared)


lenet5 = LeNet5  # 61,706 parameters at 10 classes
