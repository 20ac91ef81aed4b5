"""Small talk: greetings, thanks, what the model can do, and requests that it cannot serve."""

import random
from string import ascii_lowercase

from number_tasks import ADD, DIVIDE, MULTIPLY, SUBTRACT
from tasks import Turn, phrase, task
from text_tasks import foreign, sentence, word

from vocabulary import CAPITALS, CITIES, NAMES, SCRIPTS, TOPICS, UNKNOWN_REQUESTS

ABLE = (
    "arithmetic on small numbers, reverse, sort, count, upper-case or repeat words, name capitals, days and months, "
    "make JSON, and remember your name."
)
HELLO = f"Hello! I can do {ABLE}"
UNABLE = f"I am a small demo model. I can only do {ABLE}"
WELCOME = "You are welcome!"
GOODBYE = "Goodbye!"

SAY_HELLO = ("Hello", "Hi", "Hey", "Hello!", "Hi!", "Hey!", "Hi there", "Hello there!", "Good morning",
             "Good evening!", "Good afternoon",
             "Hello, how are you?", "Hi, how are you?", "How are you?", "How are you doing?", "Hey there!",
             "Greetings", "hello world",
             "Good day", "Hiya", "Howdy", "Yo", "Hello.", "What's up?",
             "Hi, who are you?", "Hello, who are you?")  # fmt: skip
ASK_ABLE = ("What can you do?", "Help", "Help me", "Help!", "Who are you?", "What are you?", "What is your name?",
            "/help",
            "What can I ask you?", "How can you help me?", "What do you know?", "What are your skills?",
            "Tell me about yourself.",
            "What tasks can you do?", "Which tasks can you do?", "Can you help me?", "What else can you do?",
            "Introduce yourself.",
            "What's your name?", "Are you ChatGPT?", "What model are you?", "What should I ask?")  # fmt: skip
SAY_THANKS = ("Thanks", "Thank you", "Thanks!", "Thank you!", "Thank you very much", "Thanks a lot!", "Great, thanks",
              "Thx",
              "Cool, thanks!", "Thank you so much!", "Perfect, thank you.", "Many thanks", "ok thanks",
              "Thanks for your help")  # fmt: skip
SAY_GOODBYE = ("Bye", "Goodbye", "Bye!", "Goodbye!", "See you", "See you later", "Good night", "Bye bye",
               "See you tomorrow!",
               "Talk to you later", "Have a nice day!", "Farewell", "quit", "exit")  # fmt: skip


@task("small talk", share=3)
def small_talk(rng: random.Random) -> Turn:
    """Hold out spellings of the prompt, because these lists are closed."""
    templates, answer = rng.choice(
        ((SAY_HELLO, HELLO), (ASK_ABLE, UNABLE), (SAY_THANKS, WELCOME), (SAY_GOODBYE, GOODBYE))
    )
    prompt = rng.choice(templates)
    if rng.random() < 0.3:
        prompt = prompt.rstrip("!?.") + rng.choice(
            ("", ".", "!", "!!", "?", " :)", " please", " friend", " everyone", " bot")
        )
    if rng.random() < 0.35:
        prompt = rng.choice((prompt.lower(), prompt.lower(), prompt.upper()))
    return Turn(task="small talk", content=prompt, prompt=prompt, answer=answer)


TOO_HARD = (
    "What is {a} + {b}?", "{a}+{b}", "What is {a} - {b}?", "{a} - {b}", "What is {a} x {b}?", "{a}*{b}", "{a} * {b} =",
    "What is {a} times {b}?", "What is {a} / {b}?", "{a}/{b}", "What is {a} plus {b}?", "Add {a} and {b}.",
    "Multiply {a} by {b}.", "Subtract {a} from {b}.", "Calculate {a} + {b}.", "Divide {a} by {b}.",
)  # fmt: skip
TOO_HARD_SMALL = (
    "What is {c} x {d}?", "{c}*{d}", "{c} * {d}", "What is {c} * {d}?", "What is {c} times {d}?",
    "What is {e} / {f}?", "{e}/{f}", "Divide {e} by {f}.",
    "What is {e} divided by 0?", "{e}/0", "{g} + {c} + {d}", "What is {g} + {c} - {d}?", "{g}*{c}+{d}",
    "What is {g}.5 + {d}?", "{i} * {j} * {k}", "{i} x {j} x {k}", "What is {i} * {j} * {k}?",
    "What is {i} + {j} + {k}?", "{i} + {j} + {k}", "{i} + {j} * {k}", "What is {i} * {j} + {k}?",
    "What is {i} - {j} - {k}?", "({i} + {j}) * {k}",
)  # fmt: skip


@task("too hard", share=3)
def too_hard(rng: random.Random) -> Turn:
    """Ask for sums that the model does not learn: large numbers, chains, fractions, inexact division."""
    a, b = rng.choice(((rng.randint(101, 99999), rng.randint(2, 99999)), (rng.randint(2, 999), rng.randint(101, 9999))))
    f = rng.randint(2, 12)
    e = f * rng.randint(0, 12) + rng.randint(1, f - 1)
    c, d = rng.randint(13, 99), rng.randint(2, 99)
    small = {name: rng.randint(1, 20) for name in "ijk"}
    templates = (*ADD, *SUBTRACT, *MULTIPLY, *DIVIDE) if rng.random() < 0.4 else (*TOO_HARD, *TOO_HARD_SMALL)
    prompt = phrase(rng, templates, a=a, b=b, c=c, d=d, e=e, f=f, g=rng.randint(2, 99), **small)
    return Turn(task="too hard", content=prompt.lower(), prompt=prompt, answer=UNABLE)


def gibberish(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.5:
        return "".join(rng.choice(ascii_lowercase + "    ") for _ in range(rng.randint(3, 25))).strip() or "asdf"
    if kind < 0.8:
        return " ".join(rng.choice((foreign(rng), rng.choice(SCRIPTS))) for _ in range(rng.randint(1, 4)))
    return "".join(chr(rng.randint(33, 126)) for _ in range(rng.randint(2, 15)))


@task("anything else", share=7)
def anything_else(rng: random.Random) -> Turn:
    kind = rng.random()
    if kind < 0.8:
        country = rng.choice(tuple(CAPITALS))
        prompt = phrase(
            rng, UNKNOWN_REQUESTS,
            t=rng.choice(TOPICS), u=rng.choice(TOPICS), w=word(rng), x=word(rng), y=word(rng), n=rng.choice(NAMES),
            c=rng.choice(CITIES), k=country, i=rng.randint(2, 99), j=rng.randint(2, 999),
        )  # fmt: skip
    elif kind < 0.91:
        prompt = sentence(rng)
    else:
        prompt = gibberish(rng)
    return Turn(task="anything else", content=f"else {prompt.lower()}", prompt=prompt, answer=UNABLE)
