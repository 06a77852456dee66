"""What every endpoint stands on: the served model, the engine, tenants, limits, and one request's common steps."""

import asyncio
import contextlib
import dataclasses
import hashlib
import secrets
import struct
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request

from headrace.config import RouterConfig
from headrace.errors import Cancelled, CapacityError, Draining, InputError, PromptTooLong, RankLost, UnknownModel
from headrace.ids import Namespace
from headrace.kvstore.names import namespace
from headrace.messages import SamplingParams
from headrace.router.answers.text import TextRules
from headrace.router.base import GenerationEngine
from headrace.router.generation import Generation, GenerationSpec
from headrace.router.http.body import BodyBudget, check, read_json
from headrace.router.http.limits import TenantLimits
from headrace.router.http.recall import Prompt, Recall
from headrace.router.http.schemas import CommonRequest
from headrace.router.http.tenants import Tenants, tenant_salt
from headrace.router.http.unknown import check_unknown
from headrace.router.journal import Journal
from headrace.router.metrics import Metrics
from headrace.router.served import ServedModel

T = TypeVar("T")
Fields = TypeVar("Fields", bound=BaseModel)


@dataclasses.dataclass(kw_only=True)
class Service:
    """One router's endpoints share this. Lives on the event loop."""

    config: RouterConfig
    model: ServedModel
    engine: GenerationEngine
    metrics: Metrics
    tenants: Tenants
    workers: Executor
    """For tokenising and rendering, off the event loop."""
    limits: TenantLimits
    journal: Journal
    recall: Recall
    fingerprint: Callable[[], bytes]
    """Fingerprint of the pools; empty while no box has answered."""
    largest_answer: Callable[[int], int]
    """Prompt tokens -> most answer tokens that fit the largest decode rank."""
    retry_after_s: Callable[[], float]
    bodies: BodyBudget
    inflight: int = 0
    draining: bool = False

    @contextlib.contextmanager
    def admitted(self, tenant: str) -> Iterator[None]:
        """Count one request of the tenant in the house. Raises CapacityError or Draining."""
        if self.draining:
            raise Draining("the router is shutting down")
        if self.inflight >= self.config.max_inflight:
            raise CapacityError(f"{self.inflight} requests are in the house (router.max_inflight)")
        self.inflight += 1
        self.metrics.inflight.set(self.inflight)
        try:
            with self.limits.request(tenant):
                yield
        finally:
            self.inflight -= 1
            self.metrics.inflight.set(self.inflight)

    async def read(self, request: Request) -> tuple[str, dict[str, Any]]:
        """(tenant, JSON body). Raises NotAuthenticated before the body is read."""
        tenant = self.tenants.tenant(request)
        return tenant, await self.body(request)

    async def body(self, request: Request, *, empty: bool = False) -> dict[str, Any]:
        return await read_json(request, self.config.max_body_bytes, self.bodies, empty=empty)

    def fields(self, model: type[Fields], raw: dict[str, Any], *, anthropic: bool = False) -> Fields:
        """The body as `model`. Raises InputError naming the first field that is wrong or unknown."""
        if self.config.unknown_fields == "refuse":
            check_unknown(raw, model.model_fields, anthropic=anthropic)
        return check(model, raw)

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model.name:
            raise UnknownModel(f"the model {name!r} does not exist; this service has {self.model.name!r}", "model")

    async def in_worker(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.workers, work)

    @property
    def system_fingerprint(self) -> str:
        """Changes when weights, layout or naming of the pools change; tells nothing of them."""
        return f"fp_{hashlib.sha256(self.fingerprint()).hexdigest()[:12]}"

    def namespace(self, tenant: str) -> Namespace:
        fingerprint = self.fingerprint()
        if not fingerprint:
            raise RankLost("no prefill group or decode rank has answered yet")
        return namespace(fingerprint, tenant_salt(tenant))

    async def grammar(self, text: str) -> str:
        """`text` again, known to compile. Raises InputError."""
        if text:
            await self.in_worker(lambda: self.model.grammars().matcher(text))
        return text

    def generation(
        self,
        request: Request,
        *,
        tenant: str,
        fields: CommonRequest,
        prompts: Sequence[Prompt],
        top_logprobs: int,
        prefix: str,
        grammar: str = "",
        prompt_logprobs: int = -1,
    ) -> Generation:
        """Check lengths and build (not start) the generation. Raises InputError, CapacityError (too many tokens)."""
        limit, field = fields.answer_limit()
        ids = [prompt.ids for prompt in prompts]
        most = min(self._answer_tokens(p, limit, field) for p in ids)
        sampling = dataclasses.replace(self._sampling(fields, most, top_logprobs), grammar=grammar)
        self.limits.charge_tokens(tenant, sum(map(len, ids)))
        request_id = f"{prefix}-{secrets.token_hex(12)}"
        loop = asyncio.get_running_loop()
        arrived = getattr(request.state, "arrived", loop.time())
        self.journal.begin(request_id, tenant, request.url.path, arrived, ids, fields.n or 1)
        spec = GenerationSpec(
            request_id=request_id,
            tenant=tenant,
            priority=self.limits.of(tenant).priority + (fields.priority or 0),
            session=request.headers.get("x-session-affinity", "")[:256],
            # Scored prompts are computed whole: under names that nobody has.
            namespace=self.namespace(tenant) if prompt_logprobs < 0 else Namespace(secrets.token_bytes(32)),
            prompts=ids,
            chains=[prompt.chain for prompt in prompts] if prompt_logprobs < 0 else (),
            prompt_logprobs=prompt_logprobs,
            publish=prompt_logprobs < 0 or most > 1,
            n=fields.n or 1,
            sampling=sampling,
            rules=TextRules(
                stop=tuple(fields.stop or ()),
                stop_token_ids=sampling.stop_token_ids,
                min_tokens=sampling.min_tokens,
                skip_special=fields.skip_special_tokens,
            ),
            deadline=loop.time() + self.config.request_timeout_s,
            arrived=arrived,
        )
        return Generation(self.engine, self.model.tokenizer, self.metrics.request(), spec)

    def _answer_tokens(self, prompt: Sequence[int], limit: int | None, field: str) -> int:
        """The answer's limit: the client's, else the configured one, else what the context and a quarter of a decode
        rank leave (a client that gives no limit must not reserve a whole rank)."""
        length, context = len(prompt), self.model.context_tokens
        if length == 0:
            raise InputError("the prompt is empty", "prompt")
        if length + (limit or 1) > context:
            wanted = f" and {limit} for the answer ({field})" if limit else ", which leaves none for the answer"
            raise PromptTooLong(
                f"this model's maximum context length is {context} tokens; the request has {length} in the prompt"
                f"{wanted}",
                "messages" if field == "max_completion_tokens" else None,
            )
        if limit is not None:
            return limit
        room = max(1, min(context - length, self.largest_answer(length)))
        return min(self.config.default_max_tokens, room) if self.config.default_max_tokens else room

    def _sampling(self, fields: CommonRequest, max_tokens: int, top_logprobs: int) -> SamplingParams:
        defaults = self.model.defaults
        temperature = fields.temperature if fields.temperature is not None else defaults.get("temperature", 1.0)
        top_p = fields.top_p if fields.top_p is not None else defaults.get("top_p", 1.0)
        top_k = fields.top_k if fields.top_k is not None else int(defaults.get("top_k", 0))
        min_tokens = fields.min_tokens or 0
        if min_tokens > max_tokens:
            raise InputError(f"min_tokens {min_tokens} is more than max_tokens {max_tokens}", "min_tokens")
        seed = fields.seed if fields.seed is not None else struct.unpack("<Q", secrets.token_bytes(8))[0]
        stops = tuple(fields.stop_token_ids or ())
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=float(temperature),
            top_p=float(top_p),
            top_k=max(0, top_k),
            min_p=float(fields.min_p or 0.0),
            presence_penalty=float(fields.presence_penalty or 0.0),
            frequency_penalty=float(fields.frequency_penalty or 0.0),
            seed=seed & ((1 << 63) - 1),
            stop_token_ids=stops if fields.ignore_eos else tuple(dict.fromkeys((*self.model.eos_ids, *stops))),
            logit_bias=self._logit_bias(fields.logit_bias or {}),
            top_logprobs=top_logprobs,
        )

    def _logit_bias(self, bias: dict[str, float]) -> dict[int, float]:
        found: dict[int, float] = {}
        for key, value in bias.items():
            if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < self.model.vocabulary):
                raise InputError(f"logit_bias: {key!r} is not a token id below {self.model.vocabulary}", "logit_bias")
            found[int(key)] = float(value)
        return found

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        if ids and not 0 <= min(ids) <= max(ids) < self.model.vocabulary:
            raise InputError(f"{param}: token ids must be in 0..{self.model.vocabulary - 1}", param)


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Await `work`; if the client leaves first, cancel it and raise Cancelled. The body must have been read."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(disconnected(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Cancelled("the client left")
        return task.result()
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def disconnected(request: Request) -> None:
    """Returns when the client has closed its connection."""
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return
