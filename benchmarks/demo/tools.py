"""Chats with tools for the demo model: definitions in the system turn, a call, the tool's response, an answer.

Names of functions and parameters vary, so the model must copy them from the definitions, as with real tools.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from words import LISTS, NAMES

Turn = tuple[str, str]
Values = dict[str, Any]

_DAYS = ("today", "tomorrow", "on Monday", "on Friday", "this weekend")
_TITLES = ("Lunch with Anna", "Dentist", "Team meeting", "Call mom", "Yoga class", "Dinner", "Buy milk", "Pay the rent")
_TEXTS = ("I will be late", "See you soon", "Happy birthday", "The meeting is at 3 pm", "Dinner is ready", "Thank you")
_FILES = ("notes.txt", "README.md", "main.py", "data.csv", "todo.txt", "config.json", "report.txt", "src/app.py")
_FOLDERS = ("src", "docs", "/tmp", "photos", "tests", "music", ".")
_COMMANDS = ("ls", "pwd", "git status", "python main.py", "pytest", "ls -l", "git log", "df -h", "date")
_QUERIES = ("pizza recipes", "cheap flights", "new movies", "how to cook rice", "dog food", "python tutorial", "news")
_SONGS = ("Yellow Submarine", "Happy", "Hello", "Imagine", "Let It Be", "Yesterday", "Thriller", "Halo")
_MONEY = ("USD", "EUR", "GBP", "JPY", "CAD", "INR")
_ROOMS = ("kitchen", "bedroom", "living room", "bathroom", "garage", "garden")
_FOODS = ("Italian", "Mexican", "Chinese", "Indian", "Thai", "American", "Japanese")
_STOCKS = ("AAPL", "MSFT", "GOOG", "TSLA", "AMZN", "IBM")


@dataclass(frozen=True, slots=True)
class Tool:
    """One kind of tool: its usual names, parameters (names, type, how to draw a value), requests and answers."""

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    parameters: tuple[tuple[tuple[str, ...], str, Callable[[random.Random], Any]], ...]
    requests: tuple[str, ...]  # templates with {0}, {1} for the arguments
    result: Callable[[random.Random, Sequence[Any]], Values]
    answer: str  # template with {0} for arguments and {name} for fields of the result


def _of(items: Sequence[str]) -> Callable[[random.Random], str]:
    return lambda rng: rng.choice(items)


def _number(first: int, last: int) -> Callable[[random.Random], int]:
    return lambda rng: rng.randint(first, last)


def _sum(rng: random.Random) -> str:
    return f"{rng.randint(1, 999)} {rng.choice('+-*/')} {rng.randint(1, 99)}"


def _clock(rng: random.Random) -> str:
    return f"{rng.randint(1, 12)}{rng.choice((':00', ':30', ':15', ''))} {rng.choice(('am', 'pm'))}"


_CITY = _of(LISTS["city"].split())

TOOLS = (
    Tool(
        ("get_weather", "weather", "current_weather", "getWeather", "weather_forecast"),
        ("Get the weather of a city.", "Current weather for a place", "Returns the weather"),
        ((("city", "location", "place"), "string", _CITY),),
        ("What is the weather in {0}?", "How is the weather in {0}?", "weather in {0}", "Is it raining in {0}?"),
        lambda rng, _: {
            "temperature": rng.randint(-5, 38),
            "sky": rng.choice(("sunny", "cloudy", "rainy", "windy", "clear")),
        },
        "It is {sky} in {0}, at {temperature} degrees.",
    ),
    Tool(
        ("set_timer", "start_timer", "timer", "setTimer"),
        ("Start a timer.", "Set a timer for some minutes"),
        ((("minutes", "duration", "mins"), "integer", _number(1, 90)),),
        ("Set a timer for {0} minutes.", "Start a timer of {0} minutes", "Remind me in {0} minutes."),
        lambda rng, _: {"status": "started"},
        "The timer is set for {0} minutes.",
    ),
    Tool(
        ("search", "web_search", "search_web", "google", "find_online"),
        ("Search the web.", "Look something up on the internet"),
        ((("query", "q", "text"), "string", _of(_QUERIES)),),
        ("Search for {0}.", "Search the web for {0}", "Look up {0} online.", "Can you search for {0}?"),
        lambda rng, _: {"results": rng.randint(1, 90), "first": f"{rng.choice(NAMES)}'s page"},
        "I found {results} results. The first one is {first}.",
    ),
    Tool(
        ("play_song", "play_music", "play", "music_player"),
        ("Play a song.", "Plays music by title"),
        ((("title", "song", "track"), "string", _of(_SONGS)),),
        ("Play {0}.", "Please play the song {0}", "I want to hear {0}.", "Can you play {0}?"),
        lambda rng, _: {"playing": True},
        "I am playing {0} now.",
    ),
    Tool(
        ("send_message", "send_text", "message", "sms", "send_mail"),
        ("Send a message to somebody.", "Sends a text message"),
        ((("to", "recipient", "name"), "string", _of(NAMES)), (("text", "message", "body"), "string", _of(_TEXTS))),
        ("Send {0} a message: {1}", 'Tell {0} "{1}".', "Write to {0}: {1}", 'Message {0} that says "{1}"'),
        lambda rng, _: {"sent": True},
        "I sent your message to {0}.",
    ),
    Tool(
        ("read_file", "open_file", "cat", "view_file", "get_file"),
        ("Read a file.", "Returns what a file holds"),
        ((("path", "file", "filename"), "string", _of(_FILES)),),
        ("Read {0}.", "What is in {0}?", "Show me the file {0}.", "Open {0}"),
        lambda rng, _: {"content": rng.choice((*_TEXTS, *_TITLES))},
        'The file {0} says: "{content}"',
    ),
    Tool(
        ("list_files", "ls", "list_directory", "list_dir"),
        ("List the files of a folder.", "Lists a directory"),
        ((("folder", "path", "directory"), "string", _of(_FOLDERS)),),
        ("Which files are in {0}?", "List the files in {0}.", "Show me the folder {0}"),
        lambda rng, _: {"files": rng.sample(_FILES, 2)},
        "There are two files in {0}: {files[0]} and {files[1]}.",
    ),
    Tool(
        ("run_command", "bash", "shell", "execute", "run_shell"),
        ("Run a shell command.", "Executes a command and returns its output"),
        ((("command", "cmd"), "string", _of(_COMMANDS)),),
        ("Run {0}.", "Run the command {0}", 'Execute "{0}" please.', "Can you run {0}?"),
        lambda rng, _: {"exit_code": 0, "output": rng.choice(("ok", "done", "3 files", "no changes"))},
        "The command {0} ended with code {exit_code} and printed: {output}",
    ),
    Tool(
        ("calculate", "calculator", "math", "evaluate"),
        ("Calculate an expression.", "Does arithmetic"),
        ((("expression", "formula", "input"), "string", _sum),),
        ("What is {0}?", "Calculate {0}.", "How much is {0}?", "Please compute {0}"),
        lambda rng, found: {"result": _value(found[0])},
        "{0} is {result}.",
    ),
    Tool(
        ("get_time", "current_time", "clock", "time_in"),
        ("Get the time in a city.", "Returns the local time"),
        ((("city", "location", "timezone"), "string", _CITY),),
        ("What time is it in {0}?", "Tell me the time in {0}.", "time in {0}?"),
        lambda rng, _: {"time": _clock(rng)},
        "It is {time} in {0}.",
    ),
    Tool(
        ("convert_currency", "exchange", "currency", "convert_money"),
        ("Convert money.", "Converts an amount from one currency to another"),
        (
            (("amount", "value"), "integer", _number(1, 500)),
            (("from", "source", "from_currency"), "string", _of(_MONEY[:3])),
            (("to", "target", "to_currency"), "string", _of(_MONEY[3:])),
        ),
        ("Convert {0} {1} to {2}.", "How much is {0} {1} in {2}?", "What are {0} {1} in {2}?"),
        lambda rng, _: {"amount": rng.randint(5, 9000)},
        "{0} {1} are {amount} {2}.",
    ),
    Tool(
        ("book_table", "reserve_table", "make_reservation", "reserve"),
        ("Book a table in a restaurant.", "Reserves a table"),
        (
            (("city", "location"), "string", _CITY),
            (("time", "at"), "string", _clock),
            (("people", "seats", "guests"), "integer", _number(1, 8)),
        ),
        ("Book a table in {0} at {1} for {2}.", "I need a table for {2} in {0} at {1}.", "Table for {2}, {0}, {1}"),
        lambda rng, _: {"booked": True, "restaurant": f"{rng.choice(NAMES)}'s Kitchen"},
        "Your table for {2} at {restaurant} in {0} is booked for {1}.",
    ),
    Tool(
        ("find_restaurants", "restaurants", "search_restaurants", "places_to_eat"),
        ("Find restaurants.", "Finds places to eat"),
        ((("city", "location"), "string", _CITY), (("cuisine", "food", "kind"), "string", _of(_FOODS))),
        ("Find a {1} restaurant in {0}.", "I want {1} food in {0}.", "Where can I eat {1} food in {0}?"),
        lambda rng, _: {"name": f"{rng.choice(NAMES)}'s Kitchen", "rating": rng.randint(3, 5)},
        "{name} in {0} serves {1} food. It is rated {rating} of 5.",
    ),
    Tool(
        ("add_event", "create_event", "calendar_add", "schedule"),
        ("Add an event to the calendar.", "Creates a calendar entry"),
        ((("title", "event", "name"), "string", _of(_TITLES)), (("date", "day", "when"), "string", _of(_DAYS))),
        ('Add "{0}" to my calendar {1}.', "Schedule {0} {1}.", "Put {0} in my calendar {1}"),
        lambda rng, _: {"status": "added"},
        'I added "{0}" to your calendar {1}.',
    ),
    Tool(
        ("turn_on_light", "light_on", "switch_light", "lights"),
        ("Turn on the light in a room.", "Switches a light on"),
        ((("room", "place"), "string", _of(_ROOMS)),),
        ("Turn on the light in the {0}.", "Light on in the {0} please", "It is dark in the {0}."),
        lambda rng, _: {"light": "on"},
        "The light in the {0} is on now.",
    ),
    Tool(
        ("get_stock_price", "stock_price", "quote", "stocks"),
        ("Get the price of a stock.", "Returns a stock's price"),
        ((("symbol", "ticker", "stock"), "string", _of(_STOCKS)),),
        ("What is the price of {0}?", "How much is {0} stock?", "{0} stock price", "Check the price of {0}."),
        lambda rng, _: {"price": rng.randint(10, 900)},
        "The price of {0} is {price} dollars.",
    ),
    Tool(
        ("translate", "translator", "translate_text"),
        ("Translate a text.", "Translates into another language"),
        (
            (("text", "input"), "string", _of(_TEXTS)),
            (("language", "to", "target"), "string", _of(("French", "German", "Spanish", "Italian"))),
        ),
        ('Translate "{0}" to {1}.', 'How do you say "{0}" in {1}?', "Translate into {1}: {0}"),
        lambda rng, _: {"translation": rng.choice(("Merci", "Danke", "Gracias", "Grazie"))},
        'In {1} it is "{translation}".',
    ),
)


def _value(expression: str) -> float | int:
    a, sign, b = expression.split()
    x, y = int(a), int(b)
    return {"+": x + y, "-": x - y, "*": x * y}[sign] if sign != "/" else round(x / y, 2)


@dataclass(frozen=True, slots=True)
class Named:
    """A tool under the names that it has in one chat."""

    tool: Tool
    name: str
    description: str
    parameters: tuple[str, ...]

    def definition(self) -> Values:
        """Return the function part of an OpenAI tool definition."""
        properties = {
            name: {"type": kind} for name, (_, kind, _) in zip(self.parameters, self.tool.parameters, strict=True)
        }
        return {
            "name": self.name,
            "description": self.description,
            "parameters": {"type": "object", "properties": properties, "required": list(self.parameters)},
        }


def with_names(tool: Tool, rng: random.Random, odd: float = 0.0) -> Named:
    """Return the tool under one of its usual names, or with probability `odd` under a name that cannot be guessed."""
    name = rng.choice(tool.names)
    parameters = tuple(rng.choice(names) for names, _, _ in tool.parameters)
    if rng.random() < odd:
        name = _odd(name, rng)
    if rng.random() < odd:
        parameters = tuple(_odd(each, rng) for each in parameters)
    return Named(tool, name, rng.choice(tool.descriptions), parameters)


def _odd(name: str, rng: random.Random) -> str:
    word = rng.choice(LISTS[rng.choice(("animal", "color", "fruit", "vegetable", "vehicle"))].split()).lower()
    return rng.choice((f"{word}_{name}", f"{name}_{word}", f"{name}{rng.randint(1, 99)}", f"{word}{rng.randint(1, 9)}"))


def system_turn(definitions: Sequence[Values], system: str = "") -> str:
    """Return the system turn that the chat template writes for these functions."""
    lines = "\n".join(json.dumps(definition) for definition in definitions)
    head = f"{system}\n\n" if system else ""
    return (
        f"{head}Tools:\n<tools>\n{lines}\n</tools>\n"
        'To call one, answer <tool_call>\n{"name": NAME, "arguments": ARGUMENTS}\n</tool_call>'
    )


def call_turn(name: str, arguments: Values) -> str:
    """Return an assistant turn that calls one function."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def response_turn(content: str) -> str:
    """Return the turn with a tool's result."""
    return f"<tool_response>\n{content}\n</tool_response>"


def exchange(named: Named, rng: random.Random) -> list[Turn]:
    """Return four turns: the request, the call, the response and the answer."""
    tool = named.tool
    values = [draw(rng) for _, _, draw in tool.parameters]
    result = tool.result(rng, values)
    asked = rng.choice(tool.requests).format(*values)
    arguments = dict(zip(named.parameters, values, strict=True))
    return [
        ("user", asked),
        ("assistant", call_turn(named.name, arguments)),
        ("user", response_turn(json.dumps(result))),
        ("assistant", tool.answer.format(*values, **result)),
    ]


def chat_with_tools(rng: random.Random, other: Callable[[], list[Turn]], system: str, odd: float = 0.0) -> list[Turn]:
    """Return a chat with one to three tools. `other` makes an exchange without a call; `with_names` explains `odd`."""
    tools = [with_names(tool, rng, odd) for tool in rng.sample(TOOLS, rng.choice((1, 1, 2, 2, 3)))]
    if len({named.name for named in tools}) < len(tools):
        tools = tools[:1]
    chat: list[Turn] = [("system", system_turn([named.definition() for named in tools], system))]
    for _ in range(rng.choice((1, 2, 2, 3))):
        chat += other() if rng.random() < 0.2 else exchange(rng.choice(tools), rng)
    return chat
