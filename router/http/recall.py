"""What a request leaves for the next one: its prompts and answers as texts with the ids they had (`tokens/known.py`).

An answer is remembered as the next prompt will have it. For chat that is what the template makes of the message that
the client was given: the conversation is rendered once more with it, and the ids are kept as far as they spell that
text. All of it runs on worker threads; a tenant's next prompt waits for its answers that are being remembered.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, TypeVar

from headrace.errors import HeadraceError
from headrace.ids import Namespace
from headrace.kvstore.names import NameChain
from headrace.router.answers.text import TextDelta
from headrace.router.http.conversation import template_messages
from headrace.router.http.tenants import tenant_salt
from headrace.router.tokens.known import Entry, KnownTexts, spelled
from headrace.router.tokens.template import ChatTemplate
from headrace.router.tokens.tokenizer import Tokenizer

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    ids: Sequence[int]
    text: str = ""
    """Empty when the client gave ids."""
    entry: Entry | None = None
    """None: nothing is remembered after it."""
    chain: NameChain | None = None
    """Names of its blocks, where they were known or have been hashed already."""


@dataclasses.dataclass(frozen=True, slots=True)
class Conversation:
    """What the chat template is given for one request."""

    template: ChatTemplate
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    options: Mapping[str, Any]

    def text(self) -> str:
        return self.template.render(self.messages, self.tools, options=self.options)

    def written(self, prompt: str, answer: Mapping[str, Any]) -> str:
        """What follows `prompt` when the client sends `answer` (an assistant message) back and goes on; empty when the
        template then writes the prompt itself differently. Raises InputError."""
        message = template_messages([answer])[0]
        calls = message.get("tool_calls")
        follows = {"role": "tool", "content": "", "tool_call_id": calls[-1]["id"]} if calls else {"role": "user"}
        messages = [*self.messages, message, {"content": "", **follows}]
        text = self.template.render(messages, self.tools, options=self.options)
        return text[len(prompt) :] if text.startswith(prompt) else ""


class Recall:
    """Lives on the event loop."""

    def __init__(
        self,
        known: KnownTexts,
        tokenizer: Tokenizer,
        workers: Executor,
        root: Callable[[str], Namespace | None] = lambda _tenant: None,
    ) -> None:
        """`root`: of a tenant's block names; None while it is not known."""
        self.known = known
        self._root = root
        self._tokenizer = tokenizer
        self._workers = workers
        self._pending: dict[bytes, set[asyncio.Future[None]]] = {}

    async def prompts(self, tenant: str, work: Callable[[Callable[[str], Prompt]], T]) -> T:
        """Run `work` on a worker thread; it is given how to turn a text into a prompt."""
        salt, root = tenant_salt(tenant), self._root(tenant)
        if salt in self._pending:
            await asyncio.wait(self._pending[salt])

        def prompt(text: str) -> Prompt:
            ids, entry = self.known.encode(salt, text)
            return Prompt(ids, text, entry, entry.name_chain(root) if entry is not None and root is not None else None)

        return await asyncio.get_running_loop().run_in_executor(self._workers, lambda: work(prompt))

    def answered(self, prompt: Prompt, ids: Sequence[int], written: Callable[[], str]) -> None:
        """Remember an answer, soon; `written`, called on a worker thread, gives what then follows the prompt."""
        entry = prompt.entry
        if entry is None or not ids:
            return

        def remember() -> None:
            try:
                text, own = spelled(self._tokenizer, ids, written())
                if own:
                    self.known.extend(entry, prompt.text + text, own)
            except HeadraceError as error:
                log.debug("an answer is not remembered: %s", error)
            except Exception:
                log.exception("an answer could not be remembered")

        try:
            job = asyncio.get_running_loop().run_in_executor(self._workers, remember)
        except RuntimeError:
            return  # The router is going down, and what it knew with it.
        pending = self._pending.setdefault(entry.tenant, set())
        pending.add(job)
        job.add_done_callback(lambda _job: self._done(entry.tenant, job))

    def _done(self, tenant: bytes, job: "asyncio.Future[None]") -> None:
        pending = self._pending[tenant]
        pending.discard(job)
        if not pending:
            del self._pending[tenant]


class Answers:
    """The ids of one request's choices, each remembered once: when it ends, or when the request is over."""

    def __init__(
        self,
        recall: Recall,
        choices: Sequence[Prompt],
        stops: Sequence[int],
        written: Callable[[int], Callable[[], str]],
    ) -> None:
        """`choices`: the prompt of each. `stops`: ids that end an answer and are no part of it. `written(choice)`: what
        the client was given so far; the callable it returns may take long and runs on a worker thread."""
        self._recall = recall
        self._prompts = list(choices)
        self._stops = frozenset(stops)
        self._written = written
        self._open = set(range(len(self._prompts)))
        self.ids: list[list[int]] = [[] for _ in self._prompts]

    def take(self, index: int, delta: TextDelta) -> None:
        """The next delta of a choice, after its text has been added to what `written` knows."""
        ids = self.ids[index]
        ids += delta.ids
        if delta.finish_reason is not None:
            by_token = delta.finish_reason == "stop" and delta.stop is None and ids[-1:] and ids[-1] in self._stops
            self._remember(index, ids[:-1] if by_token else ids)

    def close(self) -> None:
        """The request is over, whatever happened: unfinished answers are remembered as far as they went."""
        for index in list(self._open):
            self._remember(index, list(self.ids[index]))

    def _remember(self, index: int, ids: list[int]) -> None:
        if index in self._open:
            self._open.discard(index)
            self._recall.answered(self._prompts[index], ids, self._written(index))
