"""The tests of `localllm bench`, with llama-bench's names: pp512, tg128, pp512+tg128, tg32 @ d4096; and pictures."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.base.errors import LocalLLMError
from localllm.cli.tool_options import BenchOptions


@dataclass(frozen=True, slots=True)
class Test:
    """One test: prefill of `prompt` tokens, then decode of `answer` tokens, after `depth` cached tokens or a `text`.

    With an `image` (width and height), it is a prompt with a picture, whose tokens the model decides.
    """

    prompt: int
    answer: int
    depth: int
    text: str = ""
    image: tuple[int, int] = (0, 0)

    @property
    def name(self) -> str:
        if self.image != (0, 0):
            return f"{self.image[0]}x{self.image[1]}"
        after = f" @ d{self.depth}" if self.depth else f" {self.text}" if self.text else ""
        parts = (f"pp{self.prompt}" if self.prompt else "", f"tg{self.answer}" if self.answer else "")
        return "+".join(part for part in parts if part) + after

    @property
    def tokens(self) -> int:
        return self.prompt + self.answer


def tests_of(own: BenchOptions) -> list[Test]:
    """Return the tests in order of depth, so that each test can reuse the KV cache of the previous test."""
    tests = [Test(p, 0, d) for d in own.n_depth for p in own.n_prompt if p]
    tests += [Test(0, n, d) for d in own.n_depth for n in own.n_gen if n]
    tests += [Test(p, n, d) for d in own.n_depth for p, n in own.pg]
    pictures = [Test(0, 0, 0, image=size) for size in own.image]
    if not tests and not pictures:
        raise LocalLLMError("nothing to measure: set -p or -n above 0, or give -pg or --image")
    return sorted(tests, key=lambda test: test.depth) + pictures
