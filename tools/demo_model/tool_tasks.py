"""Tasks for tools that the user offers: the weather of a city, sums of any size, events of a calendar."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from number_tasks import ADD, DIVIDE, MULTIPLY, SUBTRACT
from tasks import Turn, held_out, phrase
from text_tasks import word
from tool_format import Call, Message, Tool, results_text

from vocabulary import ACCENTED, CITIES, DAYS, MONTH_DAYS, MONTHS, NAMES


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A request that a tool serves: the calls, what the tool returns for each, and the answer from that."""

    task: str
    content: str
    prompt: str
    calls: tuple[Call, ...]
    results: tuple[str, ...]
    answer: str

    def turns(self) -> tuple[Turn, Turn]:
        """Return the turn that calls and the turn that answers, as texts."""
        called, results = "\n".join(call.text() for call in self.calls), results_text([*self.results])
        return (
            Turn(task=f"{self.task}, call", content=self.content, prompt=self.prompt, answer=called),
            Turn(task=f"{self.task}, answer", content=self.content, prompt=results, answer=self.answer),
        )

    def messages(self) -> list[Message]:
        """Return the messages of the API up to the results."""
        ids = [f"call_{at}" for at in range(len(self.calls))]
        calls = [
            {"id": each, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for each, call in zip(ids, self.calls, strict=True)
        ]
        return [
            {"role": "user", "content": self.prompt},
            {"role": "assistant", "content": None, "tool_calls": calls},
            *(
                {"role": "tool", "tool_call_id": each, "content": result}
                for each, result in zip(ids, self.results, strict=True)
            ),
        ]


def named(rng: random.Random, names: tuple[str, ...], verbs: tuple[str, ...], nouns: tuple[str, ...]) -> str:
    """Return one of the names or a new one; a tool that the user brings has any name."""
    if rng.random() < 0.9:
        return rng.choice(names)
    parts = [rng.choice(verbs), *rng.choice(nouns).split("_")]
    return "_".join(parts) if rng.random() < 0.75 else parts[0] + "".join(map(str.capitalize, parts[1:]))


def tool(
    rng: random.Random, name: str, parameters: tuple[str, ...], optional: dict[str, str], descriptions: tuple[str, ...]
) -> Tool:
    described = rng.random() < 0.85
    text = rng.choice(descriptions) if described else ""
    return Tool(
        name=name,
        parameters=dict.fromkeys(parameters, "string"),
        optional=optional if rng.random() < 0.15 else {},
        description=text + "." if described and rng.random() < 0.5 else text,
    )


def weather_tool(rng: random.Random) -> Tool:
    names = ("get_weather", "get_weather", "get_weather", "weather", "get_current_weather", "current_weather")
    name = named(rng, names, ("get", "fetch", "find", "show", "read"), ("weather", "forecast", "city_weather"))
    parameter = rng.choice(("city", "city", "location", "place", "town"))
    return tool(
        rng, name, (parameter,), rng.choice(({"unit": "celsius|fahrenheit"}, {"unit": "string"}, {"days": "integer"})),
        ("Get the weather in a city", "Current weather of a city", "Return the weather", "Weather of a place",
         "Get the current weather in a given location", "Temperature and sky in a city", "Look up the weather"),
    )  # fmt: skip


def calculator_tool(rng: random.Random) -> Tool:
    names = ("calculator", "calculator", "calculate", "compute", "evaluate", "calc", "math")
    name = named(rng, names, ("run", "do", "get", "solve"), ("calculation", "math", "sum", "arithmetic"))
    parameter = rng.choice(("expression", "expression", "expression", "expr", "formula", "input"))
    return tool(
        rng, name, (parameter,), {"precision": "integer"},
        ("Evaluate an expression", "Calculate", "A calculator", "Compute the value of an arithmetic expression",
         "Do arithmetic", "Evaluate a mathematical expression", "Sums, products and quotients of numbers"),
    )  # fmt: skip


def calendar_tool(rng: random.Random) -> Tool:
    names = ("add_event", "add_event", "create_event", "add_to_calendar", "calendar", "create_calendar_event")
    name = named(rng, names, ("add", "create", "new", "make", "save"), ("event", "calendar_event", "appointment"))
    title = rng.choice(("title", "title", "title", "name", "event", "summary"))
    day = rng.choice(("day", "day", "day", "date", "when"))
    return tool(
        rng, name, (title, day), rng.choice(({"place": "string"}, {"notes": "string"}, {"minutes": "integer"})),
        ("Add an event to the calendar", "Create an event", "Put an event in the calendar", "Save an appointment",
         "Create a new calendar event on a day", "Add something to the user's calendar"),
    )  # fmt: skip


OTHER_TOOLS = (
    Tool(name="send_email", parameters={"to": "string", "text": "string"}, optional={}, description="Send an email"),
    Tool(name="search", parameters={"query": "string"}, optional={}, description="Search the web"),
    Tool(name="translate", parameters={"text": "string", "language": "string"}, optional={}, description="Translate"),
    Tool(name="play_music", parameters={"song": "string"}, optional={"volume": "integer"}, description="Play a song"),
    Tool(name="get_stock_price", parameters={"symbol": "string"}, optional={}, description="Price of a stock"),
    Tool(name="set_light", parameters={"on": "boolean"}, optional={"room": "string"}, description="Switch a light"),
)
"""Tools that the model never calls."""

ERRORS = ("city not found", "not found", "service unavailable", "timeout", "permission denied", "no connection",
          "not available", "invalid input", "internal error", "try again later")  # fmt: skip


def failure(rng: random.Random) -> tuple[str, str]:
    """Return the result of a tool that failed, and the answer from it."""
    text = rng.choice(ERRORS) if rng.random() < 0.6 else f"{word(rng)} {word(rng)}"
    result = json.dumps({"error": text}) if rng.random() < 0.7 else f"{rng.choice(('Error', 'error'))}: {text}"
    return result, f"The tool reported an error: {text}."


WEATHER = (
    "What is the weather in {c}?", "What's the weather in {c}?", "What is the weather like in {c}?",
    "How is the weather in {c}?", "Weather in {c}", "How warm is it in {c}?", "How cold is it in {c}?",
    "Is it sunny in {c}?", "Is it raining in {c}?", "Will it rain in {c}?", "Tell me the weather in {c}.",
    "Do I need an umbrella in {c}?", "What is the temperature in {c}?", "Get the weather for {c}.",
    "Check the weather in {c}.", "What is the weather in {c} today?", "What's the weather like in {c} right now?",
    "How hot is it in {c} now?", "What's the temperature in {c}?", "Look up the weather in {c}.",
)  # fmt: skip
WEATHER_OF_TWO = (
    "What is the weather in {c} and {d}?", "What's the weather in {c} and in {d}?", "Weather in {c} and {d}",
    "Compare the weather in {c} and {d}.", "Is it warmer in {c} or in {d}?", "Is it warmer in {c} or {d}?",
    "How is the weather in {c} and {d}?", "Tell me the weather in {c} and {d}.", "Get the weather for {c} and {d}.",
    "What is the weather like in {c} and in {d}?", "Is it colder in {c} or in {d}?",
)  # fmt: skip
SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "stormy", "clear", "dry", "partly cloudy",
         "overcast", "humid")  # fmt: skip
MORE_CITIES = tuple(
    """New York;Los Angeles;San Francisco;Boston;Chicago;Seattle;Miami;Toronto;Montreal;Vancouver;Sydney;Melbourne
    Munich;Hamburg;Cologne;Frankfurt;Zurich;Geneva;Barcelona;Milan;Naples;Venice;Lyon;Marseille;Porto;Glasgow
    Manchester;Mumbai;Shanghai;Osaka;Kyoto;Hong Kong;Dubai;Istanbul;São Paulo;Rio de Janeiro;Cape Town;Lagos""".replace(
        "\n", ";"
    )
    .replace("    ", "")
    .split(";")
)


def city(rng: random.Random) -> str:
    """Return a known or an invented name, some of two words, with accents, or in lower case."""
    kind = rng.random()
    if kind < 0.7:
        found = rng.choice(CITIES if kind < 0.4 else MORE_CITIES)
    else:
        parts = [word(rng) if rng.random() < 0.8 else rng.choice(ACCENTED) for _ in range(rng.choice((1, 1, 2)))]
        found = " ".join(part.capitalize() for part in parts)
    return found.lower() if rng.random() < 0.08 else found


def weather_result(rng: random.Random, city: str) -> tuple[str, str]:
    """Return the result for a city, and the words of the answer."""
    sky = rng.choice(SKIES) if rng.random() < 0.9 else word(rng)
    degrees = rng.randint(-15, 40) if rng.random() < 0.9 else rng.randint(-100, 400) / 10
    if rng.random() < 0.4:
        shapes = ("{t} degrees and {s}", "{t} degrees, {s}", "{s}, {t} degrees", "{s} and {t} degrees", "{t} C, {s}")
        result = rng.choice(shapes).format(t=degrees, s=sky)
    else:
        fields: list[tuple[str, object]] = [
            (rng.choice(("temperature", "temperature", "temp", "degrees", "celsius")), degrees),
            (rng.choice(("conditions", "condition", "sky", "weather", "description")), sky),
        ]
        if rng.random() < 0.3:
            fields.reverse()
        if rng.random() < 0.3:
            fields.insert(0, (rng.choice(("city", "location")), city))
        if rng.random() < 0.25:
            fields.append(rng.choice((("unit", "celsius"), ("unit", "C"), ("humidity", rng.randint(5, 99)))))
        result = json.dumps(dict(fields), ensure_ascii=False)
    return result, f"{degrees} degrees and {sky} in {city}"


def weather(rng: random.Random, tool: Tool, *, held: bool) -> Exchange:
    """Ask for the weather of one city."""
    return _weather(rng, tool, cities_on_one_side(rng, 1, held=held))


def weather_of_two(rng: random.Random, tool: Tool, *, held: bool) -> Exchange:
    """Ask for the weather of two cities, which takes two calls."""
    return _weather(rng, tool, cities_on_one_side(rng, 2, held=held))


def cities_on_one_side(rng: random.Random, count: int, *, held: bool) -> list[str]:
    found: list[str] = []
    while len(found) < count:
        each = city(rng)
        if held_out(f"weather {each.lower()}") == held and each not in found:
            found.append(each)
    return found


def _weather(rng: random.Random, tool: Tool, cities: list[str]) -> Exchange:
    (parameter,) = tool.parameters
    first, *second = cities
    templates = WEATHER_OF_TWO if second else WEATHER
    results, parts = zip(*(weather_result(rng, each) for each in cities), strict=True)
    answer = f"It is {', and '.join(parts)}."
    if not second and rng.random() < 0.06:
        result, answer = failure(rng)
        results = (result,)
    return Exchange(
        task="two calls" if second else "weather",
        content=f"weather {first.lower()}",
        prompt=phrase(rng, templates, c=first, d=second[0] if second else None),
        calls=tuple(Call(name=tool.name, arguments={parameter: each}) for each in cities),
        results=results,
        answer=answer,
    )


EXPRESSION = (
    "What is {e}?", "{e}", "Calculate {e}.", "Compute {e}.", "Evaluate {e}.", "How much is {e}?", "{e} =",
    "Work out {e}.", "What's {e}?", "Use the calculator: {e}", "{e} = ?",
)  # fmt: skip
OPERATIONS = (("+", ADD), ("-", SUBTRACT), ("*", MULTIPLY), ("/", DIVIDE))


def number(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.45:
        return str(rng.randint(0, 100))
    if kind < 0.92:
        return str(rng.randint(1, 10 ** rng.randint(2, 5)))
    return f"{rng.randint(0, 99)}.{rng.randint(1, 9)}"


def shown_number(value: Fraction) -> str:
    """Return an integer, or at most four decimals."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.4f}".rstrip("0").rstrip(".")


def expression(rng: random.Random) -> tuple[str, str, Fraction]:
    """Return a prompt, the expression in one spelling, and its value."""
    a, b = number(rng), number(rng)
    if rng.random() < 0.75:
        sign, templates = rng.choice(OPERATIONS)
        while sign == "/" and not Fraction(b):
            b = number(rng)
        x, y = Fraction(a), Fraction(b)
        value = {"+": x + y, "-": x - y, "*": x * y, "/": x / y if y else x}[sign]
        return phrase(rng, templates, a=a, b=b), f"{a} {sign} {b}", value
    values = [rng.randint(0, 100) for _ in range(3)]
    first, second = rng.choice("+-*"), rng.choice("+-*")
    made = f"{values[0]} {first} {values[1]} {second} {values[2]}"
    if rng.random() < 0.3:
        made = f"({values[0]} {first} {values[1]}) {second} {values[2]}"
    # The text holds only digits, signs and parentheses.
    value = Fraction(eval(made))
    shown = made if rng.random() < 0.5 else made.replace(" ", "")
    return phrase(rng, EXPRESSION, e=shown), made, value


def calculator(rng: random.Random, tool: Tool, *, held: bool) -> Exchange:
    """Ask for the value of an expression."""
    while True:
        prompt, made, value = expression(rng)
        if held_out(f"calculate {made}") == held:
            break
    (parameter,) = tool.parameters
    shown = shown_number(value)
    key = rng.choice(("result", "result", "value", "answer"))
    result = rng.choice((shown, shown, json.dumps({key: shown}), f'{{"{key}": {shown}}}', f'{{"{key}": {shown}}}'))
    answer = f"The result of {made} is {shown}."
    if rng.random() < 0.06:
        result, answer = failure(rng)
    return Exchange(
        task="calculator",
        content=f"calculate {made}",
        prompt=prompt,
        calls=(Call(name=tool.name, arguments={parameter: made}),),
        results=(result,),
        answer=answer,
    )


CALENDAR = (
    "Add {a}{t} {o} to my calendar.", "Add {a}{t} to my calendar {o}.", "Schedule {a}{t} {o}.",
    "Put {a}{t} in my calendar {o}.", "Plan {a}{t} {o}.", "Book {a}{t} {o}.", "Create an event: {t} {o}",
    "Set up {a}{t} {o}.", "I have {a}{t} {o}. Add it to my calendar.", "Add an event: {t} {o}",
    "I have {a}{t} {o}, put it in my calendar.", "Make an appointment: {t} {o}", "Put {a}{t} {o} in the calendar.",
    "Save {a}{t} {o}.", "Add {a}{t} {o}.", "New event {o}: {t}",
)  # fmt: skip
EVENTS = (
    "lunch", "dinner", "breakfast", "coffee", "meeting", "call", "interview", "party", "birthday party", "dentist",
    "dentist appointment", "doctor appointment", "haircut", "yoga", "gym", "piano lesson", "football", "concert",
    "team meeting", "training", "workshop", "review", "walk", "chess", "movie night", "exam", "picnic", "swim",
)  # fmt: skip
ADDED = (
    "ok", "OK", "done", "Done.", "Event added.", "Event created.", "added", '{"status": "ok"}', '{"success": true}',
    '{"status": "created", "id": {n}}', '{"id": {n}}', '{"id": "evt_{n}"}', '{"ok": true}', '{"result": "added"}',
    '{"status": "confirmed"}',
)  # fmt: skip


def event(rng: random.Random) -> str:
    name = rng.choice(EVENTS) if rng.random() < 0.8 else f"{word(rng)} {rng.choice(('meeting', 'class', 'show'))}"
    kind = rng.random()
    if kind < 0.4:
        return f"{name} with {rng.choice(NAMES)}"
    return f"{name} in {rng.choice(CITIES)}" if kind < 0.5 else name


def day(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.65:
        return rng.choice(DAYS)
    if kind < 0.85:
        return rng.choice(("today", "tomorrow"))
    month = rng.randrange(12)
    return f"{MONTHS[month]} {rng.randint(1, MONTH_DAYS[month])}"


def calendar(rng: random.Random, tool: Tool, *, held: bool) -> Exchange:
    """Ask for a new event."""
    while True:
        title, when = event(rng), day(rng)
        if held_out(f"event {title.lower()} {when}") == held:
            break
    on = when if when[0].islower() else f"on {when}"
    article = rng.choice(("a ", "my ")) if rng.random() < 0.3 else ""
    result, answer = rng.choice(ADDED).replace("{n}", str(rng.randint(1, 999))), f"I added {title} {on}."
    if rng.random() < 0.08:
        result, answer = failure(rng)
    names = [*tool.parameters]
    return Exchange(
        task="calendar",
        content=f"event {title.lower()} {when}",
        prompt=phrase(rng, CALENDAR, a=article, t=title, o=on),
        calls=(Call(name=tool.name, arguments={names[0]: title, names[1]: when}),),
        results=(result,),
        answer=answer,
    )


Serve = Callable[..., Exchange]
TOOLS: dict[str, tuple[Callable[[random.Random], Tool], tuple[Serve, ...]]] = {
    "weather": (weather_tool, (weather, weather, weather_of_two)),
    "calculator": (calculator_tool, (calculator,)),
    "calendar": (calendar_tool, (calendar,)),
}
"""For each kind of tool: what makes a declaration of it, and what makes requests that it serves."""
