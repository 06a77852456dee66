"""Prompts that have the block structure of a trace: token ids drawn from the id of each block. Equal chains give equal
tokens, different ones differ in the first block that differs, whatever the tokeniser."""

import random

from headrace.kernels.formats import BLOCK_TOKENS
from headrace.lab.traces.form import Request


class Prompts:
    """`first_token` .. `last_token`: ids that any model takes as plain text (special tokens lie outside)."""

    def __init__(self, seed: int = 0, first_token: int = 300, last_token: int = 1299) -> None:
        self._seed = seed
        self._range = range(first_token, last_token + 1)

    def tokens(self, request: Request, session: int) -> list[int]:
        """`request.input_tokens` ids: 64 for each block of the chain, then tokens of this request alone."""
        ids: list[int] = []
        for block in request.blocks():
            ids += self._draw(f"b{block}", BLOCK_TOKENS)
        rest = request.input_tokens - len(ids)
        if rest > 0:
            ids += self._draw(f"r{session}.{request.sequence}", rest)
        return ids[: request.input_tokens]

    def _draw(self, key: str, count: int) -> list[int]:
        return random.Random(f"{self._seed}/{key}").choices(self._range, k=count)
