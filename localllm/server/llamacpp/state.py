"""GET /health, /props, /slots, /metrics: the state of the server in llama.cpp's format.

Requests have no fixed slot: the first entries of /slots are the running requests. POST /slots/{id} saves, restores or
erases the last sequence of a slot.
"""

from __future__ import annotations

from pathlib import Path
from time import monotonic
from typing import Any, cast, get_args

from starlette.requests import Request
from starlette.responses import Response

from localllm import __version__
from localllm.base.notices import Notice, Setting
from localllm.base.printable import printable
from localllm.loading.media_parts import MARKER
from localllm.server.body import read_json
from localllm.server.errors import BadRequest, Loading, NotSupported, Unavailable, UnknownModel, refusal_of
from localllm.server.http import Handlers, reply
from localllm.server.info import ModelInfo
from localllm.server.llamacpp.request import CompletionBody, Wanted, described
from localllm.server.observer import Open
from localllm.server.shapes import llamacpp
from localllm.server.structs import Body, read
from localllm.server.turn import Generation, Json, SlotAction

RETRY_SECONDS = 2
# template variables that keep or drop the reasoning of earlier turns
_KEPT = ("preserve_thinking", "clear_thinking", "truncate_history_thinking", "drop_thinking")
_EFFORTS = ("reasoning_effort", "reasoning_strength")


class EraseBody(Body):
    """The body of a request for a slot."""

    model: str = ""


class SlotBody(EraseBody, kw_only=True):
    """The body of a request that saves or restores a slot."""

    filename: str


class StatusRoutes(Handlers):
    """HTTP handlers of /health, /props, /slots and /metrics."""

    async def health(self, request: Request) -> Response | Json:
        """Return OK, or 503 if the only model is loading or failed to load. With several models, always return OK."""
        models = self.service.models()
        if self.settings.offer != "model" or len(models) != 1 or models[0].state in ("loaded", "unloaded"):
            return {"status": "ok"}
        loading = models[0].state == "loading"
        error = Loading("Loading model", RETRY_SECONDS) if loading else Unavailable("The model could not be loaded")
        refusal = refusal_of(error)
        status = "loading model" if loading else "error"
        return reply({"status": status} | llamacpp.body(refusal), refusal.status, refusal.headers)

    async def props(self, request: Request) -> Json:
        name = request.query_params.get("model", "")
        try:
            model = self.service.find(name)
        except UnknownModel:
            if name:
                raise
            return self._router()
        usual = Generation(max_tokens=self.settings.max_tokens)
        shown = {"params": described(self._wanted(model, usual), (), short=True), "n_ctx": model.context}
        return {
            "default_generation_settings": shown,
            "total_slots": self.settings.parallel,
            "model_alias": model.id,
            "model_ftype": model.quantization,
            "model_path": Path(model.path).name,
            "modalities": {"vision": "image" in model.reads, "video": False, "audio": "audio" in model.reads},
            "media_marker": MARKER,
            "endpoint_slots": self.settings.slots,
            "endpoint_props": False,
            "endpoint_metrics": self.settings.metrics,
            "ui": False,
            "chat_template": model.template,
            "chat_template_caps": _template(model),
            "bos_token": model.bos,
            "eos_token": model.eos,
            "build_info": f"localllm-{__version__}",
            "is_sleeping": False,
        }

    def _router(self) -> Json:
        """Return the properties of a server with several models, as llama-server's router does."""
        return {
            "role": "router",
            "models_autoload": True,
            "model_alias": "",
            "model_path": "none",
            "default_generation_settings": {"params": {}, "n_ctx": 0},
            "endpoint_slots": self.settings.slots,
            "endpoint_props": False,
            "endpoint_metrics": self.settings.metrics,
            "build_info": f"localllm-{__version__}",
        }

    async def change_props(self, request: Request) -> Json:
        raise NotSupported("This server does not support changing global properties")

    async def slots(self, request: Request) -> list[Any]:
        if not self.settings.slots:
            raise NotSupported(
                Notice("This server does not support slots endpoint: it was started with ", Setting("no_slots"))
            )
        running = [each for each in self.service.observer.open.values() if each.running][: self.settings.parallel]
        if request.query_params.get("fail_on_no_slot") and len(running) == self.settings.parallel:
            raise Unavailable("no slot available")
        context = self.service.models()[0].context if self.service.models() else 0
        idle = {"n_ctx": context, "speculative": False, "is_processing": False}
        slots = [self._slot(each) for each in running] + [idle] * (self.settings.parallel - len(running))
        return [{"id": number} | place for number, place in enumerate(slots)]

    def _slot(self, each: Open) -> Json:
        model = self.service.find(each.model)
        most = each.generation.max_tokens
        return {
            "n_ctx": model.context,
            "speculative": False,
            "is_processing": True,
            "id_task": each.number,
            "n_prompt_tokens": each.prompt_tokens,
            "n_prompt_tokens_processed": max(each.evaluated - each.reused, 0),
            "n_prompt_tokens_cache": each.reused,
            "predicted_per_second": each.rate,
            "params": described(self._wanted(model, each.generation), (), short=True),
            "next_token": [
                {
                    "has_next_token": True,
                    "has_new_line": each.lines,
                    "n_remain": -1 if most is None else max(most - each.tokens, 0),
                    "n_decoded": each.tokens,
                }
            ],
        }

    def _wanted(self, model: ModelInfo, generation: Generation) -> Wanted:
        sampling = self.service.sampling_defaults(model.id).changed(generation.sampling)
        return Wanted(CompletionBody(stream=True), generation, sampling)

    async def change_slot(self, request: Request) -> Json:
        """Save the last sequence of a slot to a file in the server's folder, restore it, or erase it."""
        if not self.settings.slot_files:
            start = Setting("slot_save_path")
            raise NotSupported(Notice("This server does not support slots action: start it with ", start))
        action, id_ = request.query_params.get("action", ""), request.path_params["id"]
        if action not in get_args(SlotAction):
            raise BadRequest(f"Invalid action {printable(action, 50)!r}: give save, restore or erase", "action")
        if not (id_.isascii() and id_.isdigit() and len(id_) < 5 and int(id_) < self.settings.parallel):
            raise BadRequest(f"Invalid slot ID: this server has 0 to {self.settings.parallel - 1}", "id_slot")
        erases = action == "erase"
        body = EraseBody() if erases else read(await read_json(request, self.settings.limits), SlotBody)
        name = body.filename if isinstance(body, SlotBody) else ""
        began = monotonic()
        number, model = int(id_), self.service.find(body.model)
        tokens, size = await self.service.slot(model.id, number, cast("SlotAction", action), name)
        milliseconds = 1000 * (monotonic() - began)
        if erases:
            return {"id_slot": number, "n_erased": tokens}
        if action == "save":
            told = {"n_saved": tokens, "n_written": size, "timings": {"save_ms": milliseconds}}
        else:
            told = {"n_restored": tokens, "n_read": size, "timings": {"restore_ms": milliseconds}}
        return {"id_slot": number, "filename": name} | told

    async def adapters(self, request: Request) -> list[Any]:
        return []

    async def change_adapters(self, request: Request) -> Json:
        raise NotSupported("LoRA adapters are not supported")

    async def metrics(self, request: Request) -> Response:
        if not self.settings.metrics:
            raise NotSupported(
                Notice("This server does not support metrics endpoint: it was started with ", Setting("no_metrics"))
            )
        metrics = self.service.observer.metrics
        headers = {"Process-Start-Time-Unix": str(int(metrics.started))}
        return Response(metrics.text(), headers=headers, media_type="text/plain; version=0.0.4")


def _template(model: ModelInfo) -> Json:
    """Return the features of the chat template under llama.cpp's names.

    Some features are always true, since messages are converted to a form that the template accepts.
    """
    tools, thinking = "tools" in model.capabilities, "thinking" in model.capabilities
    calls = ("tools", "tool_calls", "parallel_tool_calls", "object_arguments")
    return {
        **dict.fromkeys(("supports_string_content", "supports_typed_content", "supports_system_role"), True),
        **{f"supports_{name}": tools for name in calls},
        "supports_reasoning_content": thinking,
        "supports_preserve_reasoning": any(name in model.template for name in _KEPT),
        "supports_reasoning_effort": any(name in model.template for name in _EFFORTS),
    }
