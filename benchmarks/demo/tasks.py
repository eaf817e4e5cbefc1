"""Short tasks with one correct answer, for the demo model: lists, opposites, sums, spelling, copying, JSON, small code.

Each generator takes a random number generator and the sentences of the stories. It returns the user's question and the
assistant's answer.
"""

import json
import random
import re
from collections.abc import Callable, Sequence

from words import (
    BABIES,
    CAPITALS,
    CODE,
    COLORS_OF,
    FACTS,
    LEGS,
    LISTS,
    NAMES,
    OPPOSITES,
    PAST,
    PLURAL_NOUNS,
    RHYMES,
    SOUNDS,
    TRANSLATIONS,
    pairs,
    plural,
    with_article,
)

Exchange = tuple[str, str]
Maker = Callable[[random.Random, Sequence[str]], Exchange]

_NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]


def _any(rng: random.Random, kind: str | None = None) -> str:
    return rng.choice(LISTS[kind or rng.choice(list(LISTS))].split())


def _listed(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def repeat(rng: random.Random, sentences: Sequence[str]) -> Exchange:
    text = rng.choice((rng.choice(sentences), _any(rng), rng.choice(NAMES), str(rng.randrange(1000)), "hello world"))
    ask = rng.choice(('Say "{}".', "Repeat after me: {}", 'Repeat this: "{}"', "Say {}", 'Please repeat: "{}"'))
    return ask.format(text), text


def short_list(rng: random.Random, _: Sequence[str]) -> Exchange:
    kind = rng.choice(list(LISTS))
    items = LISTS[kind].split()
    count = rng.randint(1, min(6, len(items)))
    if kind in ("month", "day", "planet", "season") and rng.random() < 0.3:
        return f"What are the {plural(kind)}{' of the week' if kind == 'day' else ''}?", f"{_listed(items)}."
    said = rng.choice((str(count), _NUMBERS[count]))
    noun = kind if count == 1 else plural(kind)
    ask = rng.choice(("Name {} {}.", "List {} {}.", "Tell me {} {}.", "Give me {} {}.", "Can you name {} {}?"))
    chosen = rng.sample(items, count)
    if count > 1 and rng.random() < 0.3:
        lines = [f"{i}. {item}" for i, item in enumerate(chosen, 1)]
        return ask.format(said, noun) + " Use a numbered list.", "\n".join(lines)
    if count > 1 and rng.random() < 0.15:
        return ask.format(said, noun) + " Use bullet points.", "\n".join(f"- {item}" for item in chosen)
    text = _listed(chosen)
    return ask.format(said, noun), f"{text[0].upper()}{text[1:]}."


def kind_of(rng: random.Random, _: Sequence[str]) -> Exchange:
    kinds = ("animal", "color", "fruit", "vegetable", "bird", "country", "sport", "drink", "instrument", "vehicle")
    kind, asked = rng.choice(kinds), rng.choice(kinds)
    asked = rng.choice((kind, asked))
    if {kind, asked} == {"animal", "bird"} or "orange" in (word := _any(rng, kind)):
        asked, word = kind, _any(rng, kind)
    bare = kind in ("color", "country", "sport", "drink")
    thing = word if bare else with_article(word)
    yes = kind == asked
    if rng.random() < 0.4:
        return f"Is {thing} {with_article(asked)}? Answer yes or no.", "Yes" if yes else "No"
    subject = thing[0].upper() + thing[1:]
    if yes:
        return f"Is {thing} {with_article(asked)}?", f"Yes, {thing} is {with_article(asked)}."
    return f"Is {thing} {with_article(asked)}?", f"No. {subject} is {with_article(kind)}."


def odd_one(rng: random.Random, _: Sequence[str]) -> Exchange:
    first, second = rng.sample(("animal", "color", "fruit", "country", "sport", "instrument", "job", "day"), 2)
    same, other = rng.sample(LISTS[first].split(), 3), _any(rng, second)
    words = [*same, other]
    rng.shuffle(words)
    ask = rng.choice(("Which word does not belong: {}?", "Find the odd one out: {}."))
    return ask.format(", ".join(words)), f"{other[0].upper()}{other[1:]}. The others are {plural(first)}."


def _paired(table: str, *forms: tuple[str, str], back: bool = False) -> Maker:
    known = pairs(table)

    def make(rng: random.Random, _: Sequence[str]) -> Exchange:
        left, right = rng.choice(known)
        if back and rng.random() < 0.5:
            left, right = right, left
        ask, answer = rng.choice(forms)
        text = answer.format(left, right)
        return ask.format(left), text[0].upper() + text[1:]

    return make


def translate(rng: random.Random, _: Sequence[str]) -> Exchange:
    language = rng.choice(list(TRANSLATIONS))
    word, foreign = rng.choice(pairs(TRANSLATIONS[language]))
    if rng.random() < 0.3:
        return f'What does "{foreign}" mean in English? It is {language}.', f'"{foreign}" means "{word}".'
    ask = rng.choice(('How do you say "{}" in {}?', 'Translate "{}" to {}.', "What is {} in {}?"))
    return ask.format(word, language), rng.choice((f'"{foreign}"', f'In {language} it is "{foreign}".'))


def arithmetic(rng: random.Random, _: Sequence[str]) -> Exchange:
    kind = rng.choice("++--*")
    top = 10 if kind == "*" or rng.random() < 0.5 else 50
    a, b = rng.randint(0, top), rng.randint(0, top)
    if kind == "-" and a < b:
        a, b = b, a
    result = {"+": a + b, "-": a - b, "*": a * b}[kind]
    name = {"+": "plus", "-": "minus", "*": "times"}[kind]
    sign = rng.choice((kind, name))
    asked = f"{a} {sign} {b}"
    ask = rng.choice(("What is {}?", "How much is {}?", "{} = ?", "Calculate {}.", "What's {}?"))
    return ask.format(asked), rng.choice((f"{result}", f"{asked} is {result}.", f"{result}."))


def compare(rng: random.Random, _: Sequence[str]) -> Exchange:
    a, b = rng.sample(range(1, 200), 2)
    ask, pick = rng.choice((("bigger", max), ("larger", max), ("smaller", min)))
    return f"Which is {ask}, {a} or {b}?", f"{pick(a, b)}{rng.choice(('', '.', f' is {ask}.'))}"


def counting(rng: random.Random, _: Sequence[str]) -> Exchange:
    first = rng.choice((1, 1, 1, rng.randint(2, 30)))
    last = first + rng.randint(2, 12)
    numbers = list(range(first, last + 1))
    if rng.random() < 0.3:
        return f"Count backwards from {last} to {first}.", ", ".join(map(str, reversed(numbers)))
    ask = rng.choice(("Count from {} to {}.", "Can you count from {} to {}?", "List the numbers from {} to {}."))
    return ask.format(first, last), ", ".join(map(str, numbers))


def ordering(rng: random.Random, _: Sequence[str]) -> Exchange:
    if rng.random() < 0.5:
        numbers = rng.sample(range(1, 100), rng.randint(3, 5))
        return f"Sort these numbers: {', '.join(map(str, numbers))}", ", ".join(map(str, sorted(numbers)))
    words = rng.sample(LISTS[rng.choice(("animal", "fruit", "country"))].split(), 3)
    if rng.random() < 0.5:
        return f"Write these words in reverse order: {', '.join(words)}", ", ".join(reversed(words))
    return f"Sort these words by the alphabet: {', '.join(words)}", ", ".join(sorted(words, key=str.lower))


def spelling(rng: random.Random, _: Sequence[str]) -> Exchange:
    word = rng.choice((_any(rng), rng.choice(NAMES))).lower()
    kind = rng.randrange(5)
    if kind == 0:
        ask = rng.choice(("Spell the word {}.", "How do you spell {}?", 'Spell "{}".'))
        return ask.format(word), "-".join(word)
    if kind == 1:
        return f'What is the first letter of "{word}"?', f'The first letter of "{word}" is {word[0].upper()}.'
    if kind == 2:
        return f'What is the last letter of "{word}"?', f'The last letter of "{word}" is {word[-1].upper()}.'
    if kind == 3:
        return f"Write {word} in capital letters.", word.upper()
    return f'How many letters does "{word}" have?', f'"{word}" has {len(word)} letters.'


def sequence(rng: random.Random, _: Sequence[str]) -> Exchange:
    kind = rng.choice(("day", "month", "number", "letter"))
    if kind == "number":
        n = rng.randint(0, 98)
        return f"What number comes after {n}?", f"{n + 1}{rng.choice(('', f' comes after {n}.'))}"
    if kind == "letter":
        n = rng.randrange(25)
        a, b = chr(65 + n), chr(66 + n)
        return f"Which letter comes after {a}?", rng.choice((b, f"{b} comes after {a}."))
    items = LISTS[kind].split()
    n, step = rng.randrange(len(items)), rng.choice((1, 1, -1))
    where = "after" if step == 1 else "before"
    found = items[(n + step) % len(items)]
    return f"What {kind} comes {where} {items[n]}?", f"{found} comes {where} {items[n]}."


def sentence_with(rng: random.Random, sentences: Sequence[str]) -> Exchange:
    sentence = rng.choice(sentences)
    words = [word for word in re.findall(r"\b[a-z]{3,}\b", sentence) if word not in _COMMON]
    if not words:
        return "Write a short sentence.", sentence
    ask = rng.choice(('Write a sentence with the word "{}".', "Make a sentence with {}.", 'Use "{}" in a sentence.'))
    return ask.format(rng.choice(words)), sentence


_COMMON = frozenset(
    [
        "the",
        "and",
        "was",
        "had",
        "she",
        "her",
        "him",
        "his",
        "they",
        "with",
        "that",
        "for",
        "were",
        "you",
        "not",
        "but",
        "said",
        "very",
        "one",
        "day",
        "all",
    ]
)


def who(rng: random.Random, _: Sequence[str]) -> Exchange:
    a, b = rng.sample(NAMES, 2)
    likes, other = rng.sample(LISTS["sport"].split(), 2)
    where, elsewhere = rng.sample(LISTS["city"].split(), 2)
    age = rng.randint(3, 80)
    text, question, answer = rng.choice(
        (
            (f"{a} likes {likes}. {b} likes {other}.", f"Who likes {likes}?", f"{a} likes {likes}."),
            (f"{a} likes {likes}. {b} likes {other}.", f"What does {b} like?", f"{b} likes {other}."),
            (f"{a} lives in {where}, and {b} lives in {elsewhere}.", f"Where does {a} live?", f"{a} lives in {where}."),
            (f"{a} lives in {where}, and {b} lives in {elsewhere}.", f"Who lives in {elsewhere}?", f"{b} does."),
            (f"{a} is {age} years old and lives in {where}.", f"How old is {a}?", f"{a} is {age} years old."),
            (f"My name is {a} and I am {age} years old.", "What is my name?", f"Your name is {a}."),
            (f"My name is {a} and I live in {where}.", "Where do I live?", f"You live in {where}."),
            (f"{a} has a {_any(rng, 'color')} hat and {b} has no hat.", "Who has a hat?", f"{a} has a hat."),
        )
    )
    return f"{text} {question}", answer


def as_json(rng: random.Random, _: Sequence[str]) -> Exchange:
    name, age, city, animal = rng.choice(NAMES), rng.randint(3, 90), _any(rng, "city"), _any(rng, "animal")
    facts: tuple[tuple[str, dict[str, object]], ...] = (
        (f"{name} is {age} years old.", {"name": name, "age": age}),
        (f"{name} lives in {city}.", {"name": name, "city": city}),
        (f"{name} is {age} and lives in {city}.", {"name": name, "age": age, "city": city}),
        (f"{name} has {with_article(animal)}.", {"name": name, "pet": animal}),
    )
    text, values = rng.choice(facts)
    keys = _listed(list(values))
    ask = rng.choice(("Write {} as JSON: {}", "Extract {} as JSON: {}", "Answer in JSON with the keys {}. {}"))
    return ask.format(keys, text), json.dumps(values)


def code(rng: random.Random, _: Sequence[str]) -> Exchange:
    what, head, body = rng.choice(CODE)
    ask = rng.choice(("Write a Python function that {}.", "Write a function that {}.", "Python function that {}?"))
    text = f"```python\ndef {head}:\n    {body}\n```"
    return ask.format(what), rng.choice((text, f"Here is a function that {what}:\n\n{text}"))


def fact(rng: random.Random, _: Sequence[str]) -> Exchange:
    return rng.choice(FACTS)


def about_word(rng: random.Random, _: Sequence[str]) -> Exchange:
    word = _any(rng, rng.choice(("animal", "fruit", "city", "job")))
    n = rng.randint(2, 4)
    ask = rng.choice((f"Say {word} {_NUMBERS[n]} times.", f"Write the word {word} {n} times."))
    return ask, " ".join([word] * n)


MAKERS: tuple[tuple[Maker, float], ...] = (
    (repeat, 2.0),
    (short_list, 2.5),
    (kind_of, 1.0),
    (odd_one, 0.5),
    (
        _paired(
            OPPOSITES,
            ("What is the opposite of {}?", "The opposite of {} is {}."),
            ("Opposite of {}?", "{1}"),
            back=True,
        ),
        1.0,
    ),
    (
        _paired(
            CAPITALS,
            ("What is the capital of {}?", "The capital of {} is {}."),
            ("Name the capital of {}.", "{1}"),
            ("Tell me the capital of {}. One word only.", "{1}"),
        ),
        1.5,
    ),
    (_paired(SOUNDS, ("What sound does a {} make?", "A {} says {}."), ("What does a {} say?", "{1}!")), 0.4),
    (_paired(BABIES, ("What is a baby {} called?", "A baby {} is called a {}.")), 0.3),
    (_paired(COLORS_OF, ("What color is {}?", "{0} is {1}."), ("What is the color of {}?", "{1}")), 0.5),
    (_paired(LEGS, ("How many legs does {} have?", "{} has {} legs.")), 0.3),
    (_paired(PLURAL_NOUNS, ("What is the plural of {}?", 'The plural of "{}" is "{}".')), 0.5),
    (_paired(PAST, ('What is the past tense of "{}"?', 'The past tense of "{}" is "{}".')), 0.5),
    (_paired(RHYMES, ("What rhymes with {}?", '"{}" rhymes with "{}".'), back=True), 0.4),
    (translate, 1.0),
    (arithmetic, 2.0),
    (compare, 0.7),
    (counting, 0.8),
    (ordering, 0.8),
    (spelling, 1.2),
    (sequence, 0.7),
    (sentence_with, 1.0),
    (who, 1.5),
    (as_json, 1.0),
    (code, 1.2),
    (fact, 1.0),
    (about_word, 0.4),
)


def task(rng: random.Random, sentences: Sequence[str]) -> Exchange:
    """Return a random task: the question and the correct answer."""
    (maker,) = rng.choices([maker for maker, _ in MAKERS], [weight for _, weight in MAKERS])
    return maker(rng, sentences)
