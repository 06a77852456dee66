"""Counters of a prefill group, as `BoxStatus.values` shows them."""

import dataclasses

from headrace.prefill.prompt import Prompt


@dataclasses.dataclass(slots=True)
class Counters:
    steps: int = 0
    computed_tokens: int = 0
    """Prompt rows computed and written."""
    query_only_rows: int = 0
    """Rows computed at the end of a hit only for their hidden state."""
    device_tokens: int = 0
    host_tokens: int = 0
    aborted: int = 0
    failed: int = 0
    answered: int = 0

    def count_hits(self, prompt: Prompt) -> None:
        cached = prompt.cached_tokens()
        self.device_tokens += cached["device"]
        self.host_tokens += cached["host"]

    def values(self) -> dict[str, float]:
        return {
            "steps_total": self.steps,
            "computed_tokens_total": self.computed_tokens,
            "query_only_rows_total": self.query_only_rows,
            "cached_tokens_total{tier=device}": self.device_tokens,
            "cached_tokens_total{tier=host}": self.host_tokens,
            "aborted_total": self.aborted,
            "failed_total": self.failed,
            "answered_total": self.answered,
        }
