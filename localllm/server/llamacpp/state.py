"""GET /health, /props, /slots, /metrics: the state of the server in llama.cpp's words.

There are no slots here: answers come and go. The first places of /slots are the answers that are being written.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localllm import __version__
from localllm.notice import Notice, Setting
from localllm.server.errors import Loading, NotSupported, Unavailable
from localllm.server.fields import Fields
from localllm.server.http import reply
from localllm.server.llamacpp.request import Wanted, described
from localllm.server.observed import Observed, Open
from localllm.server.refusal import refusal_of
from localllm.server.settings import Settings
from localllm.server.shapes import llamacpp
from localllm.server.turn import Generation, Json, ModelInfo

RETRY_SECONDS = 2


class State:
    """The handlers of the state."""

    def __init__(self, service: Observed, settings: Settings) -> None:
        self.service = service
        self.settings = settings

    async def health(self, request: Request, fields: Fields) -> Response | Json:
        """Ready, unless the only model is not loaded yet. Of several, each is loaded when it is asked for."""
        models = self.service.models()
        if len(models) != 1 or models[0].state in ("loaded", "unloaded"):
            return {"status": "ok"}
        loading = models[0].state == "loading"
        error = Loading("Loading model", RETRY_SECONDS) if loading else Unavailable("The model could not be loaded")
        refusal = refusal_of(error)
        status = "loading model" if loading else "error"
        return reply({"status": status} | llamacpp.body(refusal), refusal.status, refusal.headers)

    async def props(self, request: Request, fields: Fields) -> Json:
        model = self.service.find(fields.text("model", ""))
        usual = Generation(max_tokens=self.settings.max_tokens)
        shown = {"params": described(self._wanted(model, usual), (), short=True), "n_ctx": model.context}
        return {
            "default_generation_settings": shown,
            "total_slots": self.settings.parallel,
            "model_alias": model.id,
            "model_ftype": model.quantization,
            "model_path": model.path,
            "modalities": {"vision": False, "video": False, "audio": False},
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

    async def change_props(self, request: Request, fields: Fields) -> Json:
        raise NotSupported("This server does not support changing global properties")

    async def slots(self, request: Request, fields: Fields) -> list[Any]:
        if not self.settings.slots:
            raise NotSupported(
                Notice("This server does not support slots endpoint: it was started with ", Setting("no_slots"))
            )
        running = [each for each in self.service.open.values() if each.running][: self.settings.parallel]
        if fields.text("fail_on_no_slot", "") and len(running) == self.settings.parallel:
            raise Unavailable("no slot available")
        context = self.service.models()[0].context if self.service.models() else 0
        idle = {"n_ctx": context, "speculative": False, "is_processing": False}
        places = [self._place(each) for each in running] + [idle] * (self.settings.parallel - len(running))
        return [{"id": number} | place for number, place in enumerate(places)]

    def _place(self, each: Open) -> Json:
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
        return Wanted(
            generation=generation,
            sampling=self.service.sampling_defaults(model.id).changed(generation.sampling),
            stream=True,
            return_tokens=False,
            timings_per_token=False,
            return_progress=False,
            response_fields=(),
            probs=generation.logprobs or 0,
            slot=-1,
            keep=0,
            discard=0,
            indent=0,
            milliseconds=-1,
            ping=None,
            grammar="",
        )

    async def save_slot(self, request: Request, fields: Fields) -> Json:
        raise NotSupported(
            Notice("This server does not support slots action: prompts are kept by ", Setting("cache_dir"))
        )

    async def adapters(self, request: Request, fields: Fields) -> list[Any]:
        return []

    async def change_adapters(self, request: Request, fields: Fields) -> Json:
        raise NotSupported("LoRA adapters are not supported")

    async def metrics(self, request: Request, fields: Fields) -> Response:
        if not self.settings.metrics:
            raise NotSupported(
                Notice("This server does not support metrics endpoint: it was started with ", Setting("no_metrics"))
            )
        metrics = self.service.metrics
        headers = {"Process-Start-Time-Unix": str(int(metrics.started))}
        return Response(metrics.text(), headers=headers, media_type="text/plain; version=0.0.4")


def _template(model: ModelInfo) -> Json:
    """What the template can do, by llama.cpp's names."""
    tools, thinking = "tools" in model.capabilities, "thinking" in model.capabilities
    return {"supports_tools": tools, "supports_tool_calls": tools, "supports_reasoning_content": thinking}
