"""The exchange of a prefill step: the model's collectives, begun from a deal. Also the group's process-group setup."""

import numpy as np
import numpy.typing as npt
import torch

from headrace.model.exchange import GroupExchange, LocalExchange
from headrace.prefill.deal import rows_of


class AloneExchange(LocalExchange):
    """One rank: nothing to agree on."""

    def begin(self, owner: npt.NDArray[np.int64], *, shared_cache: bool) -> None:
        del owner, shared_cache


class DealtExchange(GroupExchange):
    """Ranks of the default process group."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def begin(self, owner: npt.NDArray[np.int64], *, shared_cache: bool) -> None:
        lists = [torch.from_numpy(rows_of(owner, rank)).to(self._device) for rank in range(self.size)]
        self.begin_step([len(rows) for rows in lists], lists if shared_cache else None)
