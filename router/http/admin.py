"""Health, metrics, models, tokenising and administration."""

import asyncio
import dataclasses
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import headrace
from headrace.config import Config, to_dict
from headrace.errors import Draining, InputError
from headrace.messages import SamplingParams
from headrace.router.answers.text import TextRules
from headrace.router.fleet import Fleet
from headrace.router.generation import Generation, GenerationSpec
from headrace.router.http.body import check
from headrace.router.http.conversation import check_tools, template_messages, template_options
from headrace.router.http.errors import NotFound, json_response
from headrace.router.http.schemas import DetokenizeRequest, DrainRequest, TokenizeRequest
from headrace.router.http.service import Service, unless_gone
from headrace.router.placement import Placer

HEALTH_GENERATE_S = 30.0


@dataclasses.dataclass(kw_only=True)
class Admin:
    """Endpoints that look at the boxes behind the router, not only at the model."""

    service: Service
    fleet: Fleet
    whole_config: Config
    placer: Placer
    started: int = dataclasses.field(default_factory=lambda: int(time.time()))

    async def health(self, _service: Service, _request: Request) -> Response:
        """200 while the router takes requests."""
        if self.service.draining:
            raise Draining("the router is shutting down")
        return json_response({"status": "ok"})

    async def health_generate(self, service: Service, request: Request) -> Response:
        """A real token through the whole path, outside every tenant's cache."""
        await request.body()
        spec = GenerationSpec(
            request_id=f"health-{time.monotonic_ns()}",
            namespace=service.namespace("\0health"),
            prompts=[[0]],
            n=1,
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
            rules=TextRules(),
            deadline=asyncio.get_running_loop().time() + HEALTH_GENERATE_S,
            publish=False,
        )
        generation = Generation(service.engine, service.model.tokenizer, service.metrics.silent(), spec)

        async def drain() -> None:
            async for _ in generation.deltas():
                pass

        await unless_gone(request, drain())
        return json_response({"status": "ok", "seconds": round(generation.elapsed_s, 4)})

    async def metrics(self, service: Service, _request: Request) -> Response:
        found, down = await self.fleet.statuses()
        return Response(
            service.metrics.render(found.values(), down), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    async def flush_cache(self, service: Service, request: Request) -> Response:
        """Drop every cached block that nothing holds, in every box. 503 if one could not be flushed."""
        service.tenants.check_admin(request)
        dropped, failed = await self.fleet.flush()
        body = {"blocks": sum(dropped.values()), "by_box": dropped, "failed": failed}
        return json_response(body, 503 if failed else 200)

    async def server_info(self, service: Service, request: Request) -> Response:
        service.tenants.check_admin(request)
        found, down = await self.fleet.statuses()
        config = to_dict(self.whole_config)
        for secret in ("api_keys", "admin_key"):
            config["router"][secret] = "***" if config["router"][secret] else ""
        boxes: dict[str, Any] = {name: {"ready": s.ready, "values": s.values} for name, s in found.items()}
        return json_response(
            {
                "version": headrace.__version__,
                "model": service.model.name,
                "context_tokens": service.model.context_tokens,
                "fingerprint": service.fingerprint().hex(),
                "sampling_defaults": service.model.defaults,
                "config": config,
                "boxes": boxes,
                "down": down,
            }
        )

    async def pool(self, service: Service, request: Request) -> Response:
        """The boxes as placement sees them."""
        service.tenants.check_admin(request)
        placer, fleet = self.placer, self.fleet
        prefill = {
            name: {
                "address": fleet.prefill[name].peer.address,
                "usable": load.usable(),
                "drained": name in placer.resting,
                "device_blocks": load.blocks,
                "prompts": load.prompts,
                "pending_s": load.pending_s,
            }
            for name, load in placer.groups.items()
        }
        decode = {
            name: {
                "address": fleet.decode[name].peer.address,
                "usable": fleet.decode[name].connected,
                "drained": name in placer.resting,
                "device_blocks": room.blocks,
                "reserved_blocks": room.reserved_blocks,
                "sequences": room.sequences,
            }
            for name, room in placer.admission.rooms.items()
        }
        now = asyncio.get_running_loop().time()
        return json_response(
            {
                "policy": service.config.policy,
                "draining": service.draining,
                "prefill": prefill,
                "decode": decode,
                "nodes": sorted(fleet.nodes),
                "queued": placer.admission.queued_by_tenant,
                "left_out": [list(pair) for pair in placer.breakers.open(now)],
                "directory": placer.directory.stats(),
            }
        )

    async def drain(self, service: Service, request: Request) -> Response:
        """Without a box: this router takes no more requests. With one: it gets no more work. `undo` takes it back."""
        service.tenants.check_admin(request)
        fields = check(DrainRequest, await service.body(request, empty=True))
        if fields.box is None:
            service.draining = not fields.undo
            return json_response({"draining": service.draining, "inflight": service.inflight})
        if fields.box not in (*self.placer.groups, *self.placer.admission.rooms):
            known = ", ".join((*self.placer.groups, *self.placer.admission.rooms))
            raise InputError(f"box: {fields.box!r} is not known, expected one of {known}", "box")
        if fields.undo:
            self.placer.resting.discard(fields.box)
            self.placer.admission.poke()
        else:
            self.placer.resting.add(fields.box)
        group, room = self.placer.groups.get(fields.box), self.placer.admission.rooms.get(fields.box)
        running = group.prompts if group is not None else room.sequences if room is not None else 0
        return json_response({"box": fields.box, "drained": not fields.undo, "running": running})

    async def requests(self, service: Service, request: Request) -> Response:
        tenant = service.tenants.scope(request)
        return json_response({"object": "list", "data": service.journal.recent(tenant, 100)})

    async def explain(self, service: Service, request: Request) -> Response:
        tenant = service.tenants.scope(request)
        request_id = request.path_params["request_id"]
        found = service.journal.explain(request_id, tenant)
        if found is None:
            raise NotFound(f"request {request_id[:100]!r} is not known: never here, another key's, or too long ago")
        return json_response(found)

    async def models(self, service: Service, request: Request) -> Response:
        service.tenants.tenant(request)
        return json_response({"object": "list", "data": [self._card()]})

    async def model(self, service: Service, request: Request) -> Response:
        service.tenants.tenant(request)
        service.check_model(request.path_params["model"])
        return json_response(self._card())

    def _card(self) -> dict[str, Any]:
        model = self.service.model
        return {
            "id": model.name,
            "object": "model",
            "created": self.started,
            "owned_by": "headrace",
            "root": model.name,
            "max_model_len": model.context_tokens,
        }

    async def tokenize(self, service: Service, request: Request) -> Response:
        _, raw = await service.read(request)
        fields = check(TokenizeRequest, raw)
        service.check_model(fields.model)
        if (fields.prompt is None) == (fields.messages is None):
            raise InputError("give either prompt or messages", "prompt")

        def work() -> list[int]:
            text = fields.prompt
            if text is None:
                options = template_options(fields.chat_template_kwargs, None)
                messages = template_messages(fields.messages or [])
                text = service.model.template.render(messages, check_tools(fields.tools), options=options)
            return service.model.tokenizer.encode(text)

        tokens = await service.in_worker(work)
        return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": service.model.context_tokens})

    async def detokenize(self, service: Service, request: Request) -> Response:
        _, raw = await service.read(request)
        fields = check(DetokenizeRequest, raw)
        service.check_model(fields.model)
        service.check_ids(fields.tokens, "tokens")
        text = service.model.tokenizer.decode(fields.tokens, skip_special=fields.skip_special_tokens)
        return json_response({"prompt": text, "text": text})
