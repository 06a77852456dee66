"""What a reader may be told."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    name: str = ""
    """Name of the trace in reports; empty: the file's."""
    tokenizer: str = ""
    """Path of a `tokenizer.json`; needed by formats that hold text."""
    block_tokens: int = 64
    """Block size for formats that hold text or bare lengths; others bring their own."""
    mooncake_block_tokens: int = 512
    """Mooncake files do not say their block size; the published ones use 512."""

    def renamed(self, name: str) -> "ReadOptions":
        return dataclasses.replace(self, name=name)
