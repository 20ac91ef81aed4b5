"""Tasks on memorized facts: capitals, days and months; prompts are held out, not facts."""

import random

from tasks import Turn, phrase, task

from vocabulary import CAPITALS, DAYS, MONTH_DAYS, MONTHS

CAPITAL = (
    "What is the capital of {k}?", "What's the capital of {k}?", "Capital of {k}", "Capital of {k}?",
    "The capital of {k}?",
    "Tell me the capital of {k}.", "What is {k}'s capital?", "Which city is the capital of {k}?",
    "Name the capital of {k}.",
    "What city is the capital of {k}?", "Do you know the capital of {k}?", "the capital of {k} is", "{k} capital",
)  # fmt: skip
COUNTRY = (
    "Which country has the capital {c}?", "{c} is the capital of which country?", "{c} is the capital of what country?",
    "Which country has {c} as its capital?", "What country is {c} the capital of?",
)  # fmt: skip
COUNTRIES = {capital: country for country, capital in CAPITALS.items()}
COUNTRIES["London"], COUNTRIES["Washington"] = "the United Kingdom", "the United States"


@task("capitals", share=8)
def capital(rng: random.Random) -> Turn:
    if rng.random() < 0.85:
        country = rng.choice(tuple(CAPITALS))
        shown = country.removeprefix("the ") if rng.random() < 0.3 else country
        shown = shown.lower() if rng.random() < 0.12 else shown
        prompt, answer = phrase(rng, CAPITAL, k=shown), f"The capital of {country} is {CAPITALS[country]}."
    else:
        city = rng.choice(tuple(COUNTRIES))
        prompt, answer = phrase(rng, COUNTRY, c=city), f"{city} is the capital of {COUNTRIES[city]}."
    return Turn(task="capitals", content=prompt.lower(), prompt=prompt, answer=answer)


NEXT = ("What {u} comes after {x}?", "Which {u} comes after {x}?", "What {u} is after {x}?", "What comes after {x}?",
        "Which {u} follows {x}?", "What {u} follows {x}?", "the {u} after {x}")  # fmt: skip
PREVIOUS = ("What {u} comes before {x}?", "Which {u} comes before {x}?", "What {u} is before {x}?",
            "What comes before {x}?",
            "the {u} before {x}")  # fmt: skip
LATER = ("What {u} is {n} {u}s after {x}?", "Which {u} comes {n} {u}s after {x}?", "What {u} is it {n} {u}s after {x}?")
TOMORROW = (
    "If today is {x}, what day is tomorrow?",
    "Today is {x}. What day is tomorrow?",
    "It is {x}. What day is it tomorrow?",
)
YESTERDAY = ("If today is {x}, what day was yesterday?", "Today is {x}. What day was yesterday?")
ORDINALS = (
    "first",
    "second",
    "third",
    "fourth",
    "fifth",
    "sixth",
    "seventh",
    "eighth",
    "ninth",
    "tenth",
    "eleventh",
    "twelfth",
)
WHICH = (
    "What is the {o} {u} of the {p}?",
    "Which {u} is the {o} of the {p}?",
    "Name the {o} {u} of the {p}.",
    "the {o} {u} of the {p}",
)
LIST = ("List the {u}s of the {p}.", "List the {u}s.", "What are the {u}s of the {p}?", "Name the {u}s of the {p}.",
        "List all the {u}s of the {p}.", "Tell me the {u}s of the {p}.", "Name all the {u}s.",
        "Say the {u}s of the {p}.",
        "List the {u}s in a {p}.", "List all {u}s.")  # fmt: skip
LENGTH = ("How many days are in {x}?", "How many days does {x} have?", "How many days has {x}?",
          "How many days are there in {x}?",
          "How long is {x}?")  # fmt: skip
HOW_MANY = (
    "How many {u}s are in a {p}?",
    "How many {u}s does a {p} have?",
    "How many {u}s are there in a {p}?",
    "How many {u}s in a {p}?",
)


@task("days and months", share=6)
def days_and_months(rng: random.Random) -> Turn:
    unit, names, period = rng.choice((("day", DAYS, "week"), ("month", MONTHS, "year")))
    at = rng.randrange(len(names))
    name = names[at]
    shown = name.lower() if rng.random() < 0.1 else name
    match rng.randrange(9):
        case 0 | 1:
            prompt, answer = phrase(rng, NEXT, u=unit, x=shown), f"{names[(at + 1) % len(names)]} comes after {name}."
        case 2:
            prompt, answer = phrase(rng, PREVIOUS, u=unit, x=shown), f"{names[at - 1]} comes before {name}."
        case 3:
            steps = rng.randint(2, 6 if unit == "day" else 5)
            prompt = phrase(
                rng,
                LATER,
                u=unit,
                x=shown,
                n=rng.choice((str(steps), ("two", "three", "four", "five", "six")[steps - 2])),
            )
            answer = f"{names[(at + steps) % len(names)]} is {steps} {unit}s after {name}."
        case 4:
            late = rng.random() < 0.5
            day = rng.choice(DAYS)
            other = DAYS[(DAYS.index(day) + (1 if late else -1)) % 7]
            prompt = phrase(rng, TOMORROW if late else YESTERDAY, x=day)
            answer = f"Tomorrow is {other}." if late else f"Yesterday was {other}."
        case 5:
            shown = rng.choice((ORDINALS[at], ORDINALS[at], "last" if at == len(names) - 1 else ORDINALS[at]))
            prompt = phrase(rng, WHICH, u=unit, o=shown, p=period)
            answer = f"The {shown} {unit} of the {period} is {name}."
        case 6:
            prompt, answer = phrase(rng, LIST, u=unit, p=period), ", ".join(names)
        case 7:
            at = rng.randrange(12)
            prompt, answer = phrase(rng, LENGTH, x=MONTHS[at]), f"{MONTHS[at]} has {MONTH_DAYS[at]} days."
        case _:
            unit, period, count = rng.choice((("day", "week", 7), ("month", "year", 12), ("day", "year", 365)))
            prompt, answer = phrase(rng, HOW_MANY, u=unit, p=period), f"A {period} has {count} {unit}s."
    return Turn(task="days and months", content=prompt.lower(), prompt=prompt, answer=answer)
