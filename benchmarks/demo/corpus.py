"""The demo model's training text as chats (dialogues, stories, tasks, tools, small talk), and its tokenizer.

Used only by train.py. A chat is a list of (role, text). Its tokens are the begin token, then for every turn the role's
token, the text and the end-of-turn token. Tokens of the assistant have weight 1 in the loss, all other tokens
USER_WEIGHT.
"""

import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tasks import arithmetic, task
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tools import chat_with_tools
from words import NAMES

Turn = tuple[str, str]
Chat = list[Turn]

BEGIN, END = "<|endoftext|>", "<|im_end|>"
ROLES = ("system", "user", "assistant")
SPECIAL = (BEGIN, END, *(f"<|im_start|>{role}<|im_sep|>" for role in ROLES))  # the opening of a turn is one token
USER_WEIGHT = 0.25
HELD_OUT_EVERY = 50

# The pre-tokenizer that GGUF calls "qwen2". It splits numbers into single digits, so a small model can copy times and
# prices.
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Turns are formatted as in Phi-4, and tool calls as in Hermes. Programs that detect the format from the template then
# detect it correctly. tools.py writes the same text for tools.
TEMPLATE = (Path(__file__).parent / "template.jinja").read_text("utf-8").removesuffix("\n")

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a friendly assistant. Keep your answers short.",
    "You are the demo model of localllm.",
    "You are a helpful assistant who books tables, finds movies and tells stories.",
    "Be brief and polite.",
)
STORY_REQUESTS = (
    "Tell me a story about {}.",
    "Can you tell me a story about {}?",
    "Please tell me a short story about {}.",
    "I would like to hear a story about {}.",
    "Write a story about {}.",
    "Write me a short story about {}",
    "A story about {}, please.",
    "Do you know a story about {}?",
    "Could you tell me a bedtime story about {}?",
    "tell me a tale about {}",
    "Make up a story about {}.",
)
PLAIN_STORY_REQUESTS = (
    "Tell me a story.",
    "Can you tell me a story?",
    "Please tell me a short story.",
    "I would like to hear a story.",
    "Write me a story",
    "Do you know a story?",
    "Could you tell me a bedtime story?",
    "I am bored. Tell me something nice.",
)
MORE_STORY_REQUESTS = (
    "Tell me another one.",
    "Another one, please!",
    "One more story please",
    "That was nice. Can you tell me another?",
)
STORY_THANKS = (
    ("Thank you!", "You are welcome! Would you like to hear another one?"),
    ("That was a nice story.", "I am glad you liked it!"),
    ("Thanks, I like it", "I am happy to hear that. I can tell you another one if you like."),
    ("I love it!", "Thank you! I am glad you enjoyed the story."),
    ("Good night.", "Good night! Sleep well."),
)
HERO = re.compile(r"\b(an?) ((?:[a-z-]+ ){0,2})([a-z]+) (?:named|called) ([A-Z][a-z]+)")
THING = re.compile(r"\b(?:an?|the) ([a-z]{2,}[a-rt-z])\b")
SHORT_SENTENCE = re.compile(r"(?<=[.!?] )[A-Z][a-z]+(?: [a-z]+){2,9}\.")
VAGUE = (
    "little big small other same very old new good nice first next best great beautiful pretty happy sad special kind "
    "elderly deep day time way end rest one two more whole right left lot both most ground top back world thing"
)
NOT_A_TOPIC = frozenset(VAGUE.split())
PLAIN_QUOTES = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "—": "-", "–": "-", "…": "..."})


def read_dialogues(path: Path) -> list[Chat]:
    """Return the chats of a `User:`/`Assistant:` file, in which a blank line separates chats."""
    chats: list[Chat] = []
    for block in path.read_text("utf-8").split("\n\n"):
        chat: Chat = []
        for line in block.strip().splitlines():
            speaker, _, text = line.partition(": ")
            if speaker in ("User", "Assistant"):
                chat.append((speaker.lower(), " ".join(text.translate(PLAIN_QUOTES).split())))
        if len(chat) >= 2 and chat[0][0] == "user":
            chats.append(chat)
    return chats


def read_stories(path: Path) -> list[str]:
    """Return the complete stories of a TinyStories file, with a line break between paragraphs.

    One of the two files ends each story with `<|endoftext|>`. In the other file, a blank line separates paragraphs, and
    a line directly after another line begins a new story.
    """
    text = path.read_text("utf-8").translate(PLAIN_QUOTES)
    if BEGIN in text:
        blocks = [block.strip().split("\n") for block in text.split(BEGIN)]
    else:
        marked = re.sub(r"(?<=\S)[ \t]*\n(?=\S)", BEGIN, text)
        blocks = [block.strip().split("\n") for block in marked.split(BEGIN)]
    stories = ["\n".join(" ".join(line.split()) for line in block if line.strip()) for block in blocks]
    return [story for story in stories if 200 < len(story) < 1600 and story[-1] in '.!?"']


def read_smalltalk(path: Path) -> list[tuple[list[str], list[str]]]:
    """Return the possible questions and the possible answers of every entry: lines `? a | b`, `! c`."""
    entries: list[tuple[list[str], list[str]]] = []
    for block in path.read_text("utf-8").split("\n\n"):
        lines = [line for line in block.splitlines() if line[:2] in ("? ", "! ")]
        asked = [phrase.strip() for line in lines if line[0] == "?" for phrase in line[2:].split("|")]
        answers = [line[2:].strip() for line in lines if line[0] == "!"]
        if asked and answers:
            entries.append((asked, answers))
    return entries


def story_topic(story: str, rng: random.Random) -> str | None:
    """Return the topic of a story ("a dog", "a little girl named Lily"), or None if the topic is unclear."""
    hero = HERO.search(story)
    if hero and rng.random() < 0.7:
        article, adjectives, noun, name = hero.groups()
        plain = f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
        return rng.choice((plain, plain, f"{article} {adjectives}{noun}", f"{plain} named {name}", name))
    counts = Counter(word for word in THING.findall(story) if word not in NOT_A_TOPIC)
    things = [word for word, count in counts.most_common(3) if count >= 2]
    if not things:
        return None
    thing = rng.choice(things)
    return f"the {thing}" if thing in ("sun", "moon", "sea") else f"{'an' if thing[0] in 'aeiou' else 'a'} {thing}"


def typed(text: str, rng: random.Random) -> str:
    """Return a user's text as people type it: sometimes without capitals or the final full stop."""
    if rng.random() < 0.2:
        text = text.lower()
    return text.rstrip(".?!") if rng.random() < 0.2 else text


class Corpus:
    """All texts, split into a training and a held-out part. Every epoch shuffles and rephrases the training part."""

    def __init__(self, texts: Path, own: Path) -> None:
        dialogues = read_dialogues(texts / "dialog_sgd_train.txt") + read_dialogues(texts / "dialog_sgd_dev.txt")
        stories = read_stories(texts / "tinystories_decoding-gpt.txt") + read_stories(
            texts / "tinystories_smallGPT.txt"
        )
        self.smalltalk = read_smalltalk(own / "smalltalk.txt")
        self.dialogues = [chat for i, chat in enumerate(dialogues) if i % HELD_OUT_EVERY]
        self.stories = [story for i, story in enumerate(stories) if i % HELD_OUT_EVERY]
        self.sentences = [found for story in self.stories for found in SHORT_SENTENCE.findall(story)]
        self._held_dialogues = dialogues[::HELD_OUT_EVERY]
        self._held_stories = stories[::HELD_OUT_EVERY]

    def held_out(self) -> dict[str, list[Chat]]:
        """Return the held-out chats by kind. Training never uses these chats, and they do not change between calls."""
        rng = random.Random(0)
        return {
            "dialogues": self._held_dialogues,
            "tasks": [self._tasks(rng) for _ in range(300)],
            "tools": [self._tools(rng) for _ in range(100)],
            "stories": [[("user", _story_request(story, rng)), ("assistant", story)] for story in self._held_stories],
        }

    def epoch(self, seed: int) -> list[Chat]:
        """Return the dialogues once, the stories twice, tasks, chats with tools and small talk, in random order."""
        rng = random.Random(seed)
        chats = [self._dialogue(chat, rng) for chat in self.dialogues]
        for _ in range(2):
            order = rng.sample(self.stories, len(self.stories))
            while order:
                chats.append(self._story(order, rng))
        chats += [self._smalltalk(rng) for _ in range(4000)]
        chats += [self._tasks(rng) for _ in range(14000)]
        chats += [self._tools(rng) for _ in range(4500)]
        rng.shuffle(chats)
        return [[("system", rng.choice(SYSTEM_PROMPTS)), *c] if rng.random() < 0.1 else c for c in chats]

    def tuning(self, seed: int) -> list[Chat]:
        """Return mostly tasks, tools and small talk, with some chats of all other kinds, in random order.

        Many tools have unusual names here: without them the model guessed names and did not copy them.
        """
        rng = random.Random(seed)
        order = rng.sample(self.stories, len(self.stories) // 3)
        chats = [self._dialogue(chat, rng) for chat in rng.sample(self.dialogues, len(self.dialogues) // 10)]
        while order:
            chats.append(self._story(order, rng))
        chats += [self._smalltalk(rng) for _ in range(3000)]
        chats += [self._tasks(rng) for _ in range(14000)]
        chats += [self._sums(rng) for _ in range(4000)]
        chats += [self._tools(rng, odd=0.6) for _ in range(5000)]
        rng.shuffle(chats)
        return chats

    def _exchange(self, rng: random.Random) -> Chat:
        asked, answers = rng.choice(self.smalltalk)
        return [("user", typed(rng.choice(asked), rng)), ("assistant", rng.choice(answers))]

    def _task(self, rng: random.Random) -> Chat:
        asked, answer = task(rng, self.sentences)
        return [("user", typed(asked, rng) if rng.random() < 0.5 else asked), ("assistant", answer)]

    def _tasks(self, rng: random.Random) -> Chat:
        chat: Chat = []
        for _ in range(rng.choice((1, 2, 3, 4))):
            chat += self._exchange(rng) if rng.random() < 0.15 else self._task(rng)
        return chat

    def _sums(self, rng: random.Random) -> Chat:
        """Return a chat of arithmetic questions, which are rare among the tasks."""
        return [
            turn
            for asked, answer in (arithmetic(rng, self.sentences) for _ in range(rng.randint(2, 6)))
            for turn in (("user", asked), ("assistant", answer))
        ]

    def _tools(self, rng: random.Random, odd: float = 0.0) -> Chat:
        system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.3 else ""
        return chat_with_tools(rng, lambda: (self._exchange if rng.random() < 0.5 else self._task)(rng), system, odd)

    def _introduction(self, rng: random.Random) -> Chat:
        """Return two turns: the user gives a name, and later asks for it."""
        name = rng.choice(NAMES)
        said = rng.choice(("My name is {}.", "I am {}.", "Hi, I'm {}.", "Hello, my name is {}")).format(name)
        met = rng.choice((f"Nice to meet you, {name}! How can I help you?", f"Nice to meet you, {name}!"))
        between = self._exchange(rng) if rng.random() < 0.4 else []
        asked = rng.choice(("What is my name?", "Do you remember my name?", "Who am I?"))
        recalled = rng.choice((f"Your name is {name}.", f"You are {name}."))
        return [("user", said), ("assistant", met), *between, ("user", typed(asked, rng)), ("assistant", recalled)]

    def _smalltalk(self, rng: random.Random) -> Chat:
        chat: Chat = self._introduction(rng) if rng.random() < 0.12 else []
        for _ in range(rng.choice((1, 2, 2, 3, 4))):
            chat += self._exchange(rng)
        if rng.random() < 0.2:
            chat += self._story(rng.sample(self.stories, 2), rng)
        return chat

    def _dialogue(self, chat: Chat, rng: random.Random) -> Chat:
        spoken = [(role, typed(text, rng) if role == "user" else text) for role, text in chat]
        return self._exchange(rng) + spoken if rng.random() < 0.1 else spoken

    def _story(self, stories: list[str], rng: random.Random) -> Chat:
        story = stories.pop()
        chat = [("user", typed(_story_request(story, rng), rng)), ("assistant", story)]
        if stories and rng.random() < 0.15:
            chat += [("user", typed(rng.choice(MORE_STORY_REQUESTS), rng)), ("assistant", stories.pop())]
        if rng.random() < 0.2:
            said, answer = rng.choice(STORY_THANKS)
            chat += [("user", typed(said, rng)), ("assistant", answer)]
        return chat


def _story_request(story: str, rng: random.Random) -> str:
    topic = story_topic(story, rng) if rng.random() < 0.85 else None
    return rng.choice(STORY_REQUESTS).format(topic) if topic else rng.choice(PLAIN_STORY_REQUESTS)


def train_tokenizer(chats: Sequence[Chat], vocab: int) -> Tokenizer:
    """Return a byte-level BPE tokenizer of `vocab` tokens, special tokens first, trained on the texts of the chats."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for chat in chats for _, text in chat), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, chats: Iterable[Chat]) -> tuple[np.ndarray, np.ndarray]:
    """Return all chats as one stream: token ids uint16 (N,), and each token's weight in the loss float32 (N,)."""
    begin, end, *roles = range(len(SPECIAL))  # the tokenizer trainer assigns the first ids to special tokens
    role_id = dict(zip(ROLES, roles, strict=True))
    flat = [(role if i else f"^{role}", text) for chat in chats for i, (role, text) in enumerate(chat)]
    tokens: list[int] = []
    weights: list[float] = []
    for (role, _), encoding in zip(flat, tokenizer.encode_batch([text for _, text in flat]), strict=True):
        if role[0] == "^":
            tokens.append(begin)
            weights.append(0.0)
        role = role.removeprefix("^")
        tokens += [role_id[role], *encoding.ids, end]
        weights += [USER_WEIGHT] + [1.0 if role == "assistant" else USER_WEIGHT] * (len(encoding.ids) + 1)
    return np.array(tokens, np.uint16), np.array(weights, np.float32)
