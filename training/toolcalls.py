# ruff: noqa: E501 - tables of sentences read better one a line
"""Synthetic conversations with tools: the model learns to copy a tool's name and the arguments from the
question.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

CITIES = [
    "Paris", "London", "Berlin", "Madrid", "Rome", "Tokyo", "Lima", "Oslo", "Cairo", "Delhi", "Seoul",
    "Sydney", "Boston", "Chicago", "Denver", "Dublin", "Vienna", "Prague", "Athens", "Lisbon", "Warsaw",
    "Geneva", "Nairobi", "Toronto", "Havana", "Munich", "Kyoto", "Osaka", "Milan", "Naples", "Zurich",
    "Hamburg", "Austin", "Dallas", "Seattle", "Miami", "Houston", "Moscow", "Mumbai", "Bangkok",
    "Jakarta", "Manila", "Hanoi", "Beijing", "Shanghai", "Taipei", "Melbourne", "Auckland", "Helsinki",
    "Stockholm", "Copenhagen", "Brussels", "Amsterdam", "Budapest", "Bucharest", "Sofia", "Istanbul",
    "Ankara", "Tehran", "Baghdad", "Riyadh", "Dubai", "Doha",
]  # fmt: skip
NAMES = [
    "Alice", "Bob", "Carol", "Dave", "Erin", "Frank", "Grace", "Heidi", "Ivan", "Judy", "Mallory",
    "Nina", "Oscar", "Peggy", "Rupert", "Sybil", "Trent", "Victor", "Walter", "Zoe",
]  # fmt: skip
THINGS = [
    "milk", "bread", "coffee", "laptop", "phone", "camera", "book", "guitar", "bicycle", "lamp",
    "table", "chair", "jacket", "boots", "tent", "kettle", "printer", "keyboard", "monitor", "mouse",
    "headphones", "backpack", "watch", "umbrella", "piano", "carpet", "mirror", "blanket", "scissors",
    "hammer",
]  # fmt: skip
TOPICS = [
    "quantum computing", "solar panels", "machine learning", "ancient Rome", "black holes", "jazz music",
    "climate change", "chess openings", "python asyncio", "ocean currents", "electric cars", "deep learning",
    "coral reefs", "the moon landing", "sourdough bread", "world history",
]  # fmt: skip
LANGS = [
    "French", "German", "Spanish", "Italian", "Japanese", "Korean", "Dutch", "Polish", "Greek", "Turkish",
    "Hindi", "Swedish",
]  # fmt: skip
_SYL = [
    "ba", "be", "bi", "bo", "da", "de", "di", "do", "fa", "fi", "ga", "go", "ka", "ke", "ki", "ko",
    "la", "le", "li", "lo", "ma", "me", "mi", "mo", "na", "ne", "ni", "no", "pa", "pe", "po", "ra",
    "re", "ri", "ro", "sa", "se", "si", "so", "ta", "te", "ti", "to", "va", "ve", "vi", "vo", "za",
    "ze", "zo",
]  # fmt: skip

S, J, N = "string", "integer", "number"
# name, synonyms of the name, description, parameters (name, type, description, source of the value), questions, result
Tool = tuple[tuple[str, ...], str, tuple[tuple[str, str, str, str], ...], tuple[str, ...], str]
TOOLS: tuple[Tool, ...] = (
    (("get_weather", "weather", "get_current_weather", "fetch_weather"), "Get the current weather of a city",
     ((("city"), S, "Name of the city", "city"),),
     ("What is the weather in {0}?", "What's the weather like in {0}?", "How is the weather in {0} today?", "Weather in {0}?",
      "Is it raining in {0}?", "Tell me the weather in {0}."), "The weather in {0} is {r}."),
    (("get_weather", "get_forecast"), "Get the weather of a location", (("location", S, "City", "city"),),
     ("What is the weather in {0}?", "What's the weather in {0}?", "Is it sunny in {0}?", "How warm is it in {0}?"), "The weather in {0} is {r}."),
    (("get_time", "current_time", "get_current_time"), "Get the current time in a city", (("city", S, "City", "city"),),
     ("What time is it in {0}?", "Tell me the time in {0}.", "Current time in {0}?"), "The time in {0} is {r}."),
    (("add", "add_numbers", "sum"), "Add two numbers", (("a", N, "First number", "int"), ("b", N, "Second number", "int")),
     ("What is {0} plus {1}?", "Add {0} and {1}.", "What is {0} + {1}?", "Compute {0} + {1}."), "The result is {r}."),
    (("multiply", "multiply_numbers", "product"), "Multiply two numbers", (("a", N, "First number", "int"), ("b", N, "Second number", "int")),
     ("What is {0} times {1}?", "Multiply {0} by {1}.", "What is {0} * {1}?"), "The result is {r}."),
    (("search", "web_search", "search_web"), "Search the web", (("query", S, "Search query", "topic"),),
     ("Search for {0}.", "Search the web for {0}.", "Find information about {0}.", "Look up {0}."), "I found this: {r}."),
    (("send_email", "email"), "Send an email", (("to", S, "Recipient", "name"), ("subject", S, "Subject line", "topic")),
     ("Send an email to {0} about {1}.", "Email {0} about {1}.", "Write an email to {0} with the subject {1}."), "Done: {r}."),
    (("translate", "translate_text"), "Translate text", (("text", S, "Text to translate", "topic"), ("language", S, "Target language", "lang")),
     ("Translate {0} to {1}.", "Translate '{0}' into {1}.", "How do you say {0} in {1}?"), "It is {r}."),
    (("get_stock_price", "stock_price"), "Get the price of a stock", (("symbol", S, "Ticker symbol", "ticker"),),
     ("What is the stock price of {0}?", "How much is {0} stock?", "Price of {0}?"), "The price of {0} is {r}."),
    (("create_reminder", "set_reminder", "remind"), "Create a reminder", (("text", S, "What to remember", "chore"), ("minutes", J, "Minutes from now", "int")),
     ("Remind me to {0} in {1} minutes.", "In {1} minutes, remind me to {0}.", "Set a reminder to {0} in {1} minutes."), "Done: {r}."),
    (("add_to_cart", "order_item", "buy"), "Add a product to the cart", (("item", S, "Product", "thing"), ("quantity", J, "How many", "small")),
     ("Add {1} {0} to my cart.", "Order {1} {0}.", "Buy {1} {0}."), "Done: {r}."),
    (("get_user", "lookup_user", "find_user"), "Look up a user by id", (("id", J, "User id", "int"),),
     ("Who is user {0}?", "Look up user {0}.", "Find the user with id {0}."), "User {0} is {r}."),
    (("read_file", "open_file", "cat"), "Read a file", (("path", S, "Path of the file", "path"),),
     ("Read the file {0}.", "Show me {0}.", "What is in {0}?", "Open {0}."), "The file says {r}."),
    (("get_docs", "lookup_docs"), "Look up the documentation of a name", (("name", S, "Name", "word"),),
     ("Look up the docs of {0}.", "Get the documentation for {0}.", "Find the docs of {0}."), "It says {r}."),
    (("convert_currency", "exchange"), "Convert an amount of money", (("amount", N, "Amount", "int"), ("source", S, "Source currency", "money"), ("target", S, "Target currency", "money")),
     ("Convert {0} {1} to {2}.", "How much is {0} {1} in {2}?", "Exchange {0} {1} for {2}."), "It is {r}."),
    (("book_flight", "find_flights"), "Find flights between two cities", (("origin", S, "From", "city"), ("destination", S, "To", "city")),
     ("Find flights from {0} to {1}.", "Book a flight from {0} to {1}.", "I want to fly from {0} to {1}."), "I found {r}."),
    (("play_music", "play"), "Play music", (("artist", S, "Artist", "name"),), ("Play music by {0}.", "Play {0}.", "I want to hear {0}."), "Done: {r}."),
    (("square_root", "sqrt"), "Compute a square root", (("x", N, "Number", "int"),),
     ("What is the square root of {0}?", "Compute sqrt of {0}."), "The result is {r}."),
    (("set_temperature", "set_thermostat"), "Set the temperature of a room", (("room", S, "Room", "room"), ("degrees", J, "Degrees Celsius", "small")),
     ("Set the {0} to {1} degrees.", "Make the {0} {1} degrees.", "Change the temperature in the {0} to {1}."), "Done: {r}."),
    (("lights_on", "turn_on_light", "switch_light"), "Turn on the light in a room", (("room", S, "Room", "room"),),
     ("Turn on the light in the {0}.", "Switch on the {0} light.", "Light on in the {0}, please."), "Done: {r}."),
)  # fmt: skip


def word(rng: Random) -> str:
    """A made-up word: teaches copying instead of recall."""
    return "".join(rng.choice(_SYL) for _ in range(rng.randint(2, 4)))


def value(source: str, rng: Random) -> Any:
    """One argument value of a kind; a third of the free names are made up."""
    made_up = rng.random() < 0.33
    if source == "city":
        return word(rng).capitalize() if made_up else rng.choice(CITIES)
    if source == "name":
        return word(rng).capitalize() if made_up else rng.choice(NAMES)
    if source == "int":
        return rng.randint(0, 10 ** rng.randint(1, 4))
    if source == "small":
        return rng.randint(1, 30)
    if source == "topic":
        return f"{word(rng)} {word(rng)}" if made_up else rng.choice(TOPICS)
    if source == "thing":
        return word(rng) if made_up else rng.choice(THINGS)
    if source == "path":
        return f"{rng.choice(['/etc', '/tmp', 'src', 'data', 'docs'])}/{word(rng)}.{rng.choice(['txt', 'py', 'md', 'json'])}"
    if source == "ticker":
        return "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.randint(3, 4)))
    if source == "chore":
        return f"{rng.choice(['call', 'visit', 'pay', 'email', 'meet'])} {value('name', rng)}"
    pools = {"lang": LANGS, "money": ["USD", "EUR", "GBP", "JPY", "CHF"], "word": [word(rng)],
             "room": ["kitchen", "bedroom", "bathroom", "office", "hall", "garage"]}  # fmt: skip
    return rng.choice(pools[source])


SYNONYMS: dict[str, tuple[str, ...]] = {
    "city": ("city", "location", "place", "town", "where"), "location": ("location", "city", "place"),
    "a": ("a", "x", "first", "left", "num1"), "b": ("b", "y", "second", "right", "num2"),
    "query": ("query", "q", "text", "term", "keywords"), "to": ("to", "recipient", "address"),
    "subject": ("subject", "topic", "title"), "text": ("text", "message", "content", "phrase"),
    "language": ("language", "lang", "target"), "symbol": ("symbol", "ticker", "stock"),
    "minutes": ("minutes", "delay", "in_minutes"), "item": ("item", "product", "article"),
    "quantity": ("quantity", "count", "amount", "n"), "id": ("id", "user_id", "uid", "number"),
    "path": ("path", "file", "filename"), "name": ("name", "symbol", "what"),
    "amount": ("amount", "value", "sum"), "source": ("source", "from_currency", "base"),
    "target": ("target", "to_currency", "quote"), "origin": ("origin", "from_city", "start"),
    "destination": ("destination", "to_city", "end"), "artist": ("artist", "singer", "band"),
    "x": ("x", "number", "value"), "room": ("room", "place", "area"), "degrees": ("degrees", "temperature", "t"),
}  # fmt: skip


def renamed(tool: Tool, rng: Random) -> Tool:
    """The tool with other parameter names: they have to be read in the list, not remembered."""
    out: list[tuple[str, str, str, str]] = []
    for pname, ptype, pdoc, source in tool[2]:
        new = word(rng) if rng.random() < 0.2 else rng.choice(SYNONYMS[pname])
        out.append((new if all(new != p[0] for p in out) else pname + "_2", ptype, pdoc, source))
    return (tool[0], tool[1], tuple(out), tool[3], tool[4])


def schema(tool: Tool, name: str, rng: Random) -> dict[str, Any]:
    """The tool in OpenAI's shape; now and then without descriptions or `required`, as people write them."""
    props: dict[str, Any] = {}
    described = rng.random() < 0.6
    for pname, ptype, pdoc, _ in tool[2]:
        props[pname] = {"type": ptype, "description": pdoc} if described else {"type": ptype}
    params: dict[str, Any] = {"type": "object", "properties": props}
    if rng.random() < 0.7:
        params["required"] = list(props)
    out: dict[str, Any] = {"name": name, "description": tool[1], "parameters": params}
    if rng.random() < 0.15:
        del out["description"]
    return {"type": "function", "function": out}


def result_of(name: str, rng: Random) -> tuple[str, str]:
    """A tool's answer: (content of the tool message, the words the assistant repeats)."""
    short = rng.choice(
        [
            "sunny",
            "cloudy",
            "rainy",
            "ok",
            "12 degrees",
            "18:45",
            "saved",
            word(rng),
            str(rng.randint(0, 999)),
        ]
    )
    style = rng.random()
    if style < 0.5:
        return short, short
    return json.dumps({rng.choice(["result", "value", "status"]): short}), short


def sample(rng: Random, other: tuple[str, str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """One conversation with tools: (messages, tools). `other` is a question that needs no tool, with its
    answer.
    """
    picked: list[tuple[Tool, str]] = []
    descriptions: set[str] = set()
    for t in rng.sample(TOOLS, rng.choice((1, 1, 2, 2, 3, 4))):
        name = rng.choice(t[0])
        t = renamed(t, rng)
        if t[1] not in descriptions and all(name != n for _, n in picked):
            style = rng.random()
            if style < 0.2:
                name = f"{word(rng)}_{name}"
            elif style < 0.35:
                name = f"{name}_{word(rng)}"
            elif style < 0.5:
                name = rng.choice(
                    (
                        word(rng),
                        f"{word(rng)}_{word(rng)}",
                        name.title().replace("_", ""),
                        f"{name}_v{rng.randint(1, 9)}",
                    )
                )
            picked.append((t, name))
            descriptions.add(t[1])
    tools = [schema(t, n, rng) for t, n in picked]
    tool, name = rng.choice(picked)
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.3:
        messages.append(
            {
                "role": "system",
                "content": rng.choice(("You are a helpful assistant.", "Use the tools when needed.")),
            }
        )
    if rng.random() < 0.22:  # no tool fits
        messages += [{"role": "user", "content": other[0]}, {"role": "assistant", "content": other[1]}]
        return messages, tools
    values = [value(p[3], rng) for p in tool[2]]
    arguments = {p[0]: v for p, v in zip(tool[2], values, strict=True)}
    question = rng.choice(tool[3]).format(*values)
    if rng.random() < 0.15:
        question = rng.choice(("Please: ", "Hi! ", "Hello, ")) + question
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    messages += [
        {"role": "user", "content": question},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    if rng.random() < 0.4:
        content, short = result_of(name, rng)
        messages += [
            {"role": "tool", "content": content},
            {"role": "assistant", "content": tool[4].format(*values, r=short)},
        ]
    return messages, tools
