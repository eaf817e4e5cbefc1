"""The front's choice of a replica: conversations stay where their prefix is, and no prefix outweighs a long queue."""

from __future__ import annotations

import random

from localllm.distributed.fleet import MOST_CHUNKS, WAITING, Fleet, fleet_of
from localllm.distributed.messages import CHUNK, chunks_of

NAMES = ["a", "b", "c"]


def fleet_with(*names: str, slack: int = 4, most_chunks: int = MOST_CHUNKS) -> Fleet:
    fleet = Fleet("front", slack, most_chunks)
    fleet.update(names)
    return fleet


def prompt(seed: int, tokens: int = 10 * CHUNK) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(1000) for _ in range(tokens)]


def best(fleet: Fleet, tokens: list[int]) -> str:
    return fleet.ranked(NAMES, chunks_of(tokens), len(tokens))[0]


def test_chunks_cover_what_is_before_them() -> None:
    tokens = prompt(1)
    assert len(chunks_of(tokens)) == 10
    assert len(chunks_of(tokens[:-1])) == 9
    changed = [tokens[0] + 1, *tokens[1:]]
    assert not set(chunks_of(tokens)) & set(chunks_of(changed))
    later = [*tokens[:-1], tokens[-1] + 1]
    assert chunks_of(later)[:-1] == chunks_of(tokens)[:-1]
    assert chunks_of(later)[-1] != chunks_of(tokens)[-1]


def test_conversations_stay_at_their_replica() -> None:
    fleet = fleet_with(*NAMES)
    talks = [prompt(seed) for seed in range(9)]
    homes: dict[int, str] = {}
    number = 0
    for turn in range(4):
        for talk, text in enumerate(talks):
            number += 1
            name = best(fleet, text)
            assert homes.setdefault(talk, name) == name, (turn, talk)
            fleet.sent(number, name, chunks_of(text))
            text += prompt(100 * turn + talk, 2 * CHUNK)  # the answer, and the next message
            fleet.ended(number, chunks_of(text[:-CHUNK]))
    assert set(homes.values()) == set(NAMES)  # new conversations are spread


def test_a_prefix_does_not_outweigh_a_longer_queue() -> None:
    fleet = fleet_with("a", "b", slack=4)
    long = prompt(1, 1000 * CHUNK)
    fleet.sent(0, "a", chunks_of(long))
    fleet.ended(0)
    went = []
    for number in range(1, 21):
        name = best(fleet, long)
        went.append(name)
        fleet.sent(number, name, ())
    assert went[:5] == ["a"] * 5  # the queue of a is at most `slack` longer
    assert abs(went.count("a") - went.count("b")) <= 5


def test_a_short_prefix_does_not_outweigh_an_open_request() -> None:
    fleet = fleet_with("a", "b")
    text = prompt(1, CHUNK)
    assert CHUNK < WAITING
    fleet.sent(1, "a", chunks_of(text))
    assert best(fleet, text) == "b"


def test_requests_without_prefixes_are_spread() -> None:
    fleet = fleet_with(*NAMES)
    for number in range(30):
        fleet.sent(number, best(fleet, [number]), ())
    assert [len(fleet.having(name)) for name in NAMES] == [10, 10, 10]


def test_idle_replicas_take_turns() -> None:
    fleet = fleet_with(*NAMES)
    assert {best(fleet, [number]) for number in range(9)} == set(NAMES)


def test_a_dead_replica_is_forgotten() -> None:
    fleet = fleet_with("a", "b")
    text = prompt(1)
    fleet.sent(1, "a", chunks_of(text))
    fleet.forget("a")
    assert fleet.names == ["b"]
    assert fleet.having("a") == [1]
    assert fleet.ranked(NAMES, chunks_of(text), len(text)) == ["b"]
    fleet.ended(1)
    assert fleet.having("a") == []
    fleet.update(["a", "b"])  # a new one of this name knows nothing
    fleet.sent(2, "b", chunks_of(text))
    fleet.ended(2)
    assert best(fleet, text) == "b"


def test_a_replica_that_serve_drops_keeps_its_requests_until_they_end() -> None:
    fleet = fleet_with("a", "b")
    fleet.sent(1, "a", ())
    fleet.update(["b"])
    assert fleet.names == ["b"]
    assert fleet.having("a") == [1]
    assert fleet.alive == 1


def test_nothing_is_sent_to_a_silent_replica() -> None:
    fleet = fleet_with("a", "b")
    fleet.suspect("a")
    assert {best(fleet, [number]) for number in range(4)} == {"b"}
    fleet.suspect("b")
    assert fleet.ranked(NAMES, (), 1) == []
    assert fleet.alive == 0
    fleet.suspect("a", False)
    assert fleet.ranked(NAMES, (), 1) == ["a"]


def test_remembered_chunks_are_bounded() -> None:
    fleet = fleet_with("a", "b", most_chunks=20)
    old, new = prompt(1), prompt(2, 20 * CHUNK)
    for number, text in enumerate((old, new)):
        fleet.sent(number, "a", chunks_of(text))
        fleet.ended(number)
    assert {best(fleet, old) for _ in range(4)} == {"a", "b"}  # forgotten
    assert {best(fleet, new) for _ in range(4)} == {"a"}


def test_the_router_finds_the_fleet_by_name() -> None:
    fleet = fleet_with("a")
    assert fleet_of("front") is fleet
    assert fleet_of("other") is None
