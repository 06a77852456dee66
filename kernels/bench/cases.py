"""Every case there is. A case's module builds its inputs; the room's README says which file an op's cases live in."""

from headrace.kernels.bench import attention, dense, rows, selection
from headrace.kernels.bench.case import Case


def all_cases() -> list[Case]:
    return [*attention.cases(), *selection.cases(), *rows.cases(), *dense.cases()]
