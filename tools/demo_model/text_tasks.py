"""Tasks on words: reversing, sorting, counting letters and words, letter case, repeating, JSON objects."""

import json
import random

from tasks import Turn, phrase, task

from vocabulary import ACCENTED, CITIES, EMOJI, GOODS, NAMES, NUMBER_WORDS, SCRIPTS, WORDS

CONSONANTS, VOWELS, LETTERS = "bcdfghjklmnprstvwz", "aeiou", "abcdefghijklmnopqrstuvwxyz"
FOREIGN_RANGES = ((0xC0, 0xFF), (0x100, 0x17F), (0x391, 0x3C9), (0x410, 0x44F), (0x3041, 0x30F0), (0x4E00, 0x9FA0),
                  (0xAC00, 0xD7A0), (0x1F300, 0x1F64F), (0x1F680, 0x1F6C0), (0x1F900, 0x1F9FF))  # fmt: skip


def word(rng: random.Random, *, low: int = 3, high: int = 7) -> str:
    """Return a word of `low` to `high` letters: from the list, of syllables, or of random letters."""
    kind = rng.random()
    if kind < 0.7:
        while not low <= len(found := rng.choice(WORDS)) <= high:
            pass
        return found
    length = rng.randint(low, high)
    if kind < 0.95:
        made = "".join(
            rng.choice(CONSONANTS) + rng.choice(VOWELS) + rng.choice(("", "", "n", "r", "s", "l", "t"))
            for _ in range(4)
        )
        return made[rng.randint(0, 1) :][:length]
    return "".join(rng.choice(LETTERS) for _ in range(length))


def any_word(rng: random.Random) -> str:
    """Return a word like `word`, sometimes with an accent, a capital, or in another script."""
    kind = rng.random()
    if kind < 0.06:
        return rng.choice(ACCENTED)
    if kind < 0.09:
        return rng.choice([text for text in SCRIPTS if len(text) > 1])
    if kind < 0.13:
        return word(rng).capitalize()
    return word(rng)


def quoted(rng: random.Random, text: str) -> str:
    """Return the text, sometimes in quotation marks."""
    mark = rng.choice(('"', '"', "'")) if rng.random() < 0.15 else ""
    return f"{mark}{text}{mark}"


REVERSE = (
    "Reverse the word: {w}", "Reverse {w}", "Reverse the word {w}.", "Spell {w} backwards.", "Reverse: {w}",
    "Write {w} backwards.", "What is {w} backwards?", "What is {w} spelled backwards?",
    "How do you spell {w} backwards?",
    "Reverse the letters of {w}.", "Reverse this word: {w}", "Say {w} backwards.", "What is {w} reversed?",
    "{w} backwards",
    "Reverse the string {w}", "Turn {w} around.",
)  # fmt: skip


@task("reverse", share=13)
def reverse(rng: random.Random) -> Turn:
    text = any_word(rng)
    prompt = phrase(rng, REVERSE, w=quoted(rng, text))
    return Turn(task="reverse", content=f"reverse {text.lower()}", prompt=prompt, answer=text[::-1])


SORT_WORDS = (
    "Sort these words: {w}", "Sort {w}", "Sort the words {w}", "Sort alphabetically: {w}", "Sort: {w}",
    "Sort the list {w}",
    "Put these words in order: {w}", "Put these words in alphabetical order: {w}", "Sort {w} alphabetically.",
    "Order these words: {w}", "Alphabetize {w}", "Sort this list: {w}", "Sort these words alphabetically: {w}",
)  # fmt: skip


@task("sort words", share=10)
def sort_words(rng: random.Random) -> Turn:
    count = rng.choice((3, 3, 4))
    words = rng.sample([text for text in WORDS if 3 <= len(text) <= 7], count)
    ordered = sorted(words)
    rng.shuffle(words)
    prompt = phrase(rng, SORT_WORDS, w=rng.choice((", ", ", ", ", ", " ")).join(words))
    return Turn(task="sort words", content="sort " + " ".join(ordered), prompt=prompt, answer=", ".join(ordered))


COUNT_LETTERS = (
    "How many letters are in {w}?", "How many letters are there in {w}?", "How many letters does {w} have?",
    "How many letters in {w}?", "Count the letters in {w}.", "How long is the word {w}?",
    "How many letters are in the word {w}?", "Count the letters of {w}.", "How many letters has the word {w}?",
)  # fmt: skip
COUNT_LETTER = (
    "How many {x}'s are in {w}?", "How many times does the letter {x} appear in {w}?", "How many {x}s are in {w}?",
    "How many {x}'s are there in {w}?", "Count the letter {x} in {w}.", "How often does {x} appear in {w}?",
    "How many {x} in {w}?", "How many times does {x} appear in {w}?", "How many letters {x} are in {w}?",
    "How many {x}'s in the word {w}?", "How many {x}'s does {w} have?",
)  # fmt: skip
COUNT_WORDS = (
    "How many words are in: {w}", "How many words are there in: {w}", "Count the words: {w}", "How many words: {w}",
    "Count the words in: {w}", "How many words are in this sentence: {w}", "Count the words in this sentence: {w}",
)  # fmt: skip


def times(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


@task("count letters", share=4)
def count_letters(rng: random.Random) -> Turn:
    text = word(rng, high=9)
    prompt = phrase(rng, COUNT_LETTERS, w=quoted(rng, text))
    spelled = ", ".join(f"{at} {letter}" for at, letter in enumerate(text, 1))
    return Turn(
        task="count letters",
        content=f"letters {text}",
        prompt=prompt,
        answer=f"{spelled}: {times(len(text), 'letter')}.",
    )


@task("count one letter", share=7)
def count_one_letter(rng: random.Random) -> Turn:
    text = word(rng, high=8)
    letter = rng.choice(text) if rng.random() < 0.85 else rng.choice(LETTERS)
    prompt = phrase(rng, COUNT_LETTER, w=quoted(rng, text), x=letter)
    seen = [text[: at + 1].count(letter) for at in range(len(text))]
    spelled = " ".join(f"{each}({count})" if each == letter else each for each, count in zip(text, seen, strict=True))
    answer = f"{spelled}: {times(text.count(letter), 'time')}."
    return Turn(task="count one letter", content=f"letter {letter} {text}", prompt=prompt, answer=answer)


@task("count words", share=4)
def count_words(rng: random.Random) -> Turn:
    words = [rng.choice(WORDS) for _ in range(rng.randint(1, 6))]
    prompt = phrase(rng, COUNT_WORDS, w=quoted(rng, " ".join(words)))
    listed = ", ".join(f"{at} {each}" for at, each in enumerate(words, 1))
    answer = f"{listed}: {times(len(words), 'word')}."
    return Turn(task="count words", content="words " + " ".join(words), prompt=prompt, answer=answer)


UPPER = (
    "Upper-case: {w}", "Uppercase {w}", "Make {w} upper case.", "Write {w} in capitals.", "Write {w} in upper case.",
    "Convert {w} to upper case.", "Convert to uppercase: {w}", "Upper-case the word {w}.",
    "Put {w} in capital letters.",
    "Make it upper case: {w}", "Change {w} to uppercase.", "Capitalize every letter: {w}", "Uppercase: {w}",
    "What is {w} in upper case?", "What is {w} in capital letters?", "Make {w} uppercase.", "Upper case {w}",
)  # fmt: skip
LOWER = (
    "Lower-case: {w}", "Lowercase {w}", "Make {w} lower case.", "Write {w} in lower case.",
    "Convert {w} to lower case.",
    "Convert to lowercase: {w}", "Lower-case the word {w}.", "Change {w} to lowercase.", "Lowercase: {w}",
    "What is {w} in lower case?", "Make {w} lowercase.",
)  # fmt: skip


def words_to_change(rng: random.Random) -> str:
    words = [any_word(rng) for _ in range(rng.choice((1, 1, 1, 2)))]
    return " ".join(each for each in words if each.upper().lower() == each.lower()) or "stone"


@task("upper-case", share=5)
def upper_case(rng: random.Random) -> Turn:
    text = words_to_change(rng)
    prompt = phrase(rng, UPPER, w=quoted(rng, text))
    return Turn(task="upper-case", content=f"case {text.lower()}", prompt=prompt, answer=text.upper())


@task("lower-case", share=3)
def lower_case(rng: random.Random) -> Turn:
    text = words_to_change(rng).upper()
    prompt = phrase(rng, LOWER, w=quoted(rng, text))
    return Turn(task="lower-case", content=f"case {text.lower()}", prompt=prompt, answer=text.lower())


REPEAT = (
    "Repeat after me: {w}", "Repeat: {w}", "Say: {w}", "Repeat this: {w}", "Say {w}", "Repeat {w}", "Echo: {w}",
    "Echo {w}",
    "Say this: {w}", "Repeat the sentence: {w}", "Please repeat: {w}", "Repeat exactly: {w}",
    "Repeat the following: {w}",
)  # fmt: skip
REPEAT_TIMES = (
    "Repeat {w} {n} times", "Say {w} {n} times", "Repeat the word {w} {n} times", "Write {w} {n} times",
    "Repeat {n} times: {w}", "Say {n} times: {w}",
)  # fmt: skip


def foreign(rng: random.Random) -> str:
    """Return one to five characters, most of them of several bytes."""
    low, high = rng.choice(FOREIGN_RANGES)
    return "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 5)))


def sentence(rng: random.Random) -> str:
    """Return words as people write them: some with capitals, digits, punctuation, accents or emoji."""
    words = [any_word(rng) for _ in range(rng.choice((1, 1, 2, 2, 3, 4)))]
    if rng.random() < 0.35:
        extra = rng.choice((
            rng.choice(EMOJI), rng.choice(ACCENTED), rng.choice(SCRIPTS), rng.choice(NAMES), rng.choice(CITIES),
            str(rng.randint(0, 999)), "".join(rng.choice(EMOJI) for _ in range(3)),
        ))  # fmt: skip
        words.insert(rng.randint(0, len(words)), extra)
        words = [extra] if rng.random() < 0.25 else words
    text = (", " if rng.random() < 0.08 else " ").join(words)
    if rng.random() < 0.25:
        text = text[0].upper() + text[1:]
    return text + rng.choice(("", "", "", "", ".", "!", "?"))


@task("repeat", share=8)
def repeat(rng: random.Random) -> Turn:
    text = sentence(rng)
    prompt = phrase(rng, REPEAT, w=quoted(rng, text))
    prompt = prompt if text in prompt[-len(text) - 1 :] else prompt.rstrip(".")
    return Turn(task="repeat", content=f"repeat {text.lower()}", prompt=prompt, answer=text)


@task("repeat n times", share=4)
def repeat_times(rng: random.Random) -> Turn:
    text = rng.choice((word(rng), word(rng), rng.choice(EMOJI)))
    count = rng.randint(2, 4)
    number = str(count) if rng.random() < 0.5 else NUMBER_WORDS[count]
    prompt = phrase(rng, REPEAT_TIMES, w=quoted(rng, text), n=number).rstrip(".")
    content = f"repeat {count} {text.lower()}"
    return Turn(task="repeat n times", content=content, prompt=prompt, answer=" ".join([text] * count))


JSON = (
    "Make JSON: {w}", "Make a JSON object: {w}", "Convert to JSON: {w}", "As JSON: {w}", "Turn this into JSON: {w}",
    "Write this as JSON: {w}", "Make a JSON object from this sentence: {w}", "JSON: {w}", "Give me JSON for: {w}",
    "Extract JSON: {w}", "Return JSON for: {w}", "Turn this sentence into a JSON object: {w}",
)  # fmt: skip
PERSON_AGE = (
    "{n} is {a} years old",
    "{n} is {a}",
    "{n}, {a} years old",
    "{n}, age {a}",
    "My friend {n} is {a} years old",
)
PERSON_CITY = ("{n} lives in {c}", "{n} is from {c}", "{n} comes from {c}")
PERSON_BOTH = ("{n} is {a} years old and lives in {c}", "{n} is {a} and lives in {c}", "{n} from {c} is {a} years old",
               "{n}, {a}, lives in {c}", "{n} lives in {c} and is {a} years old")  # fmt: skip
PRICE = (
    "The {g} costs {p} dollars",
    "A {g} costs {p} dollars",
    "The price of the {g} is {p} dollars",
    "the {g} is {p} dollars",
)
STOCK = ("I have {q} {g}s", "There are {q} {g}s", "We sold {q} {g}s", "I bought {q} {g}s", "{q} {g}s")


@task("json", share=6)
def json_object(rng: random.Random) -> Turn:
    name = rng.choice((rng.choice(NAMES), rng.choice(NAMES), word(rng).capitalize()))
    age, city, goods = rng.randint(1, 99), rng.choice(CITIES), rng.choice((rng.choice(GOODS), word(rng)))
    templates, found = rng.choice((
        (PERSON_AGE, {"name": name, "age": age}),
        (PERSON_CITY, {"name": name, "city": city}),
        (PERSON_BOTH, {"name": name, "age": age, "city": city}),
        (PERSON_BOTH, {"name": name, "age": age, "city": city}),
        (PRICE, {"item": goods, "price": age}),
        (STOCK, {"item": goods, "count": age + 1}),
    ))  # fmt: skip
    said = rng.choice(templates).format(n=name, a=age, c=city, g=goods, p=age, q=age + 1)
    prompt = phrase(rng, JSON, w=said + rng.choice(("", "", ".")))
    answer = json.dumps(found, ensure_ascii=False)
    return Turn(task="json", content=f"json {answer}", prompt=prompt, answer=answer)
