"""`/v1/audio/transcriptions`: the text of a recording, from a model that reads sound."""

from __future__ import annotations

import base64
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from localllm.server.content import together
from localllm.server.errors import BadRequest, NotSupported
from localllm.server.forms import Form
from localllm.server.http import Handlers, client
from localllm.server.openai.chat import ChatBody
from localllm.server.openai.chunks import ChatWriter
from localllm.server.openai.head import new_head
from localllm.server.structs import wrong
from localllm.server.turn import Generation, Json, Turn
from localllm.server.uploads import Upload

PROMPT = "Transcribe audio to text"  # llama-server's, for models without their own
FORMATS = ("json", "text")


class Transcriptions(Handlers):
    """HTTP handlers of transcriptions."""

    async def create(self, request: Request, form: Form) -> Response | Json:
        texts = form.texts
        if "file" not in form.files:
            raise BadRequest("the form has no file; send a recording as the field `file`", "file")
        format_ = texts.get("response_format", "json")
        if format_ not in FORMATS:
            raise wrong(f"expected {' or '.join(FORMATS)}; word times are not supported", "response_format")
        if texts.get("stream", "false").lower() == "true":
            raise NotSupported("transcriptions are not streamed; chat completions with input_audio are")
        model = self.service.find(texts.get("model", "")).id
        prompt = texts.get("prompt") or PROMPT
        if language := texts.get("language"):
            prompt += f" (language: {language})"
        sound = Upload("audio", base64.b64encode(form.files["file"]).decode()).part
        turn = Turn([{"role": "user", "content": together([prompt, sound])}], self._generation(request, texts))
        writer = ChatWriter(new_head("transcription-", model), 1, ChatBody(messages=[]), False, {})
        whole: Json = await writer.collect(self.service.answer(model, turn))
        text = str(whole["choices"][0]["message"]["content"] or "").strip()
        if format_ == "text":
            return PlainTextResponse(text + "\n")
        return {"text": text, "usage": _usage(whole["usage"])}

    def _generation(self, request: Request, texts: Any) -> Generation:
        given = texts.get("temperature", "0")
        try:
            temperature = float(given)
        except ValueError:
            temperature = -1.0
        if not 0 <= temperature <= 2:
            raise wrong("expected a number from 0 to 2", "temperature")
        return Generation({"temperature": temperature}, max_tokens=self.settings.max_tokens, client=client(request))


def _usage(usage: Json) -> Json:
    return {
        "type": "tokens",
        "input_tokens": usage["prompt_tokens"],
        "output_tokens": usage["completion_tokens"],
        "total_tokens": usage["total_tokens"],
    }
