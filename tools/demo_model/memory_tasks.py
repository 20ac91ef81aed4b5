"""Facts that the user states about themselves, and later questions about them."""

import random
from dataclasses import dataclass, field

from tasks import Turn, phrase
from text_tasks import word

from vocabulary import CITIES, COLOURS, NAMES


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A kind of fact that a user can state and ask for later."""

    name: str
    tell: tuple[str, ...]
    reply: str
    ask: tuple[str, ...]
    answer: str
    unknown: str


SUBJECTS = (
    Subject(
        name="name",
        tell=("My name is {v}.", "I am {v}.", "I'm {v}.", "Call me {v}.", "You can call me {v}.", "My name's {v}.",
              "My name is {v}",
              "Hello, my name is {v}.", "Hi, I am {v}.", "Hi! I'm {v}.", "Remember my name: {v}", "Hello, I'm {v}.",
              "Hi, my name is {v}."),
        reply="Nice to meet you, {v}.",
        ask=("What is my name?", "What's my name?", "Who am I?", "Do you remember my name?", "Do you know my name?",
             "Tell me my name.",
             "What did I say my name was?", "What was my name?", "What am I called?", "Can you tell me my name?",
             "And what is my name?"),
        answer="Your name is {v}.",
        unknown="You have not told me your name.",
    ),
    Subject(
        name="city",
        tell=("I live in {v}.", "I am from {v}.", "I'm from {v}.", "My city is {v}.", "My home is in {v}."),
        reply="I will remember that you live in {v}.",
        ask=("Where do I live?", "Where am I from?", "What city do I live in?", "Which city do I live in?",
             "Do you remember where I live?"),
        answer="You live in {v}.",
        unknown="You have not told me where you live.",
    ),
    Subject(
        name="colour",
        tell=("My favourite colour is {v}.", "My favorite color is {v}.", "I like the colour {v}.",
              "My favourite color is {v}."),
        reply="I will remember that your favourite colour is {v}.",
        ask=("What is my favourite colour?", "What's my favorite color?", "What is my favorite color?",
             "Which colour do I like?"),
        answer="Your favourite colour is {v}.",
        unknown="You have not told me your favourite colour.",
    ),
    Subject(
        name="age",
        tell=("I am {v} years old.", "I'm {v} years old.", "My age is {v}.", "I'm {v} years old today."),
        reply="I will remember that you are {v} years old.",
        ask=("How old am I?", "What is my age?", "What's my age?", "Do you remember how old I am?"),
        answer="You are {v} years old.",
        unknown="You have not told me your age.",
    ),
)  # fmt: skip


def value_of(rng: random.Random, subject: Subject) -> str:
    match subject.name:
        case "name":
            made = rng.choice((rng.choice(NAMES), word(rng).capitalize()))
            return made.lower() if rng.random() < 0.06 else made
        case "city":
            return rng.choice(CITIES)
        case "colour":
            return rng.choice(COLOURS)
        case _:
            return str(rng.randint(1, 99))


@dataclass(slots=True)
class Memory:
    """The facts stated so far in one conversation; only `tell` writes them."""

    known: dict[str, str] = field(default_factory=dict)

    def tell(self, rng: random.Random) -> Turn:
        """Return a turn that states or changes a fact; half of the time the name."""
        subject = SUBJECTS[0] if rng.random() < 0.5 else rng.choice(SUBJECTS)
        value = value_of(rng, subject)
        self.known[subject.name] = value
        prompt = phrase(rng, subject.tell, polite=False, v=value)
        return Turn(
            task="memory", content=f"memory {value.lower()}", prompt=prompt, answer=subject.reply.format(v=value)
        )

    def ask(self, rng: random.Random) -> Turn:
        """Return a turn that asks for a fact, usually for one that was stated."""
        known = [subject for subject in SUBJECTS if subject.name in self.known]
        subject = rng.choice(known if known and rng.random() < 0.85 else SUBJECTS)
        value = self.known.get(subject.name)
        prompt = phrase(rng, subject.ask)
        answer = subject.unknown if value is None else subject.answer.format(v=value)
        return Turn(task="memory", content=f"memory {value or prompt}".lower(), prompt=prompt, answer=answer)
