"""Tokens/s of whole answers: of one request, of several in the server's scheduler, and of threads on one model.

For one request, also the rate of the time outside the model's forward passes: sampling, text and the loop.

    python benchmarks/answers.py MODEL [-t 2] [--counts 4,8,16]

Prints one JSON object. This program measures the localllm of the Python that runs it, so that against.py can compare
two installations. With localllm 0.2.0, whose models cannot be shared by threads, the figures of threads are omitted.
"""

from __future__ import annotations

import argparse
import json
import threading
from contextlib import suppress
from importlib import import_module
from time import perf_counter
from typing import Any

import localllm

PROMPT, ANSWER = 8, 48


def module(name: str) -> Any:
    """Return a module of the scheduler, which was in a separate package until 0.3.0."""
    for package in ("generation", "scheduler"):
        with suppress(ModuleNotFoundError):
            return import_module(f"localllm.{package}.{name}")
    raise SystemExit(f"localllm {localllm.__version__} has no scheduler that this program knows")


def alone(model: Any, options: Any) -> tuple[float, float]:
    """Return the decode speed of one request in tokens/s, excluding the first token: with the time of all its work,
    and with the time outside the forward passes.
    """
    passes, executable = [0.0], model.executable
    steps = [name for name in ("step", "step_top_k") if hasattr(executable, name)]

    def timed(step: Any) -> Any:
        def run(*given: Any) -> Any:
            start = perf_counter()
            try:
                return step(*given)
            finally:
                passes[0] += perf_counter() - start

        return run

    for name in steps:
        setattr(executable, name, timed(getattr(executable, name)))
    try:
        pieces = iter(model.generate(prompt_of(0), sampling=options, max_tokens=4 * ANSWER, ignore_eos=True))
        next(pieces)
        passes[0], began = 0.0, perf_counter()
        count = sum(piece.token is not None for piece in pieces)
        seconds = perf_counter() - began
    finally:
        for name in steps:
            delattr(executable, name)
    return count / seconds, count / (seconds - passes[0])


def scheduled(model: Any, options: Any, count: int) -> float:
    """Return the total tokens/s of `count` requests in a scheduler, including prompt evaluation."""
    limits = module("interfaces").SchedulerLimits(parallel=count)
    Request, Scheduler = module("request").Request, module("scheduler").Scheduler
    if hasattr(model, "new_core"):
        scheduler = Scheduler(model.new_core(limits))
    else:
        scheduler = Scheduler(model.engine, model.tokenizer, model.sampler, limits)
    with scheduler:
        left, over = [count], threading.Event()

        def listen(event: Any) -> None:
            if type(event).__name__ in ("Finished", "Failed"):
                left[0] -= 1
                if not left[0]:
                    over.set()

        began = perf_counter()
        for number in range(count):
            scheduler.submit(Request(prompt_of(number), options, ANSWER, ignore_eos=True), listen)
        over.wait()
        return count * ANSWER / (perf_counter() - began)


def threaded(model: Any, options: Any, count: int) -> float:
    """Return the total tokens/s of `count` threads on one model, including prompt evaluation."""
    model.new_core(module("interfaces").SchedulerLimits(parallel=count))

    def answer(number: int) -> None:
        for _ in model.generate(prompt_of(number), sampling=options, max_tokens=ANSWER, ignore_eos=True):
            pass

    workers = [threading.Thread(target=answer, args=(number,)) for number in range(count)]
    began = perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return count * ANSWER / (perf_counter() - began)


def prompt_of(number: int) -> list[int]:
    return [(7 * i + 13 * number) % 200 + 3 for i in range(PROMPT)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("-t", "--threads", type=int, default=None)
    parser.add_argument("--counts", default="4,8,16")
    args = parser.parse_args()
    counts = [int(count) for count in args.counts.split(",")]
    options, found = localllm.SamplingOptions(temperature=0), {}
    with localllm.load(args.model, threads=args.threads, ctx_size=512, sequences=max(counts)) as model:
        alone(model, options)
        rates = [alone(model, options) for _ in range(3)]
        found["alone"], found["alone, outside the passes"] = (max(each) for each in zip(*rates, strict=True))
        for count in counts:
            found[f"{count} sequences"] = max(scheduled(model, options, count) for _ in range(2))
            if hasattr(model, "new_core"):
                found[f"{count} threads"] = max(threaded(model, options, count) for _ in range(2))
    print(json.dumps({name: round(rate, 3) for name, rate in found.items()}))


if __name__ == "__main__":
    main()
