"""What `ced-tiny` is taught: questions with their right answers, each kind needing one mechanism of the architecture.

| skill | asks | needs |
|---|---|---|
| recall | who was said to have what, any distance back | global KV and its indexer |
| pattern | go on with a short repetition | window |
| fact | the job of a person by both names, the same in every text | n-gram memory (Engram) |
| sum | a number up to 99 plus or minus a digit | several layers |
| edit | a list of words with one word replaced | window and global KV |
| tool | a call in the model's tag syntax, by a schema in the system turn | global KV, syntax |
| chat | greetings, `help`, thanks, what it does not know | |

Everything is a function of the random generator given; the facts of `fact` are a function of the names alone.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from random import Random
from typing import Any

from training import lexicon

GREETINGS = ("Hello", "Hello!", "Hi", "Hi!", "Good day", "Hey")
HELLO = "Hello! I am ced-tiny, a very small model. Say help to see what I can do."
HELP = """I can do six things. Try:
Ada has a fox. Ben has a cup. What has Ada?
Go on: red blue red blue red
Job of Rosa Stone?
27+5?
Write fox cup hat with cup as pen
Or give me tools to call."""
THANKS = "You are welcome."
UNKNOWN = "I do not know that. Say help to see what I can do."


@dataclass(frozen=True)
class Turn:
    """One question of the user and the right answer. `calls` stands for an answer that calls a tool."""

    skill: str
    user: str
    answer: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    distance: int = 0  # recall: facts between the fact asked for and the question


def job_of(first: str, last: str) -> str:
    """The job of a person: random, and the same in every text ever made."""
    return lexicon.JOBS[zlib.crc32(f"{first} {last}".encode()) % len(lexicon.JOBS)]


def fact(random: Random) -> Turn:
    first, last = random.choice(lexicon.FIRST_NAMES), random.choice(lexicon.LAST_NAMES)
    return Turn("fact", f"Job of {first} {last}?", f"A {job_of(first, last)}.")


def sum_(random: Random) -> Turn:
    a, b = random.randrange(100), random.randrange(10)
    if random.random() < 0.5 and a >= b:
        return Turn("sum", f"{a}-{b}?", str(a - b))
    return Turn("sum", f"{a}+{b}?", str(a + b))


def pattern(random: Random) -> Turn:
    words = lexicon.COLOURS if random.random() < 0.5 else lexicon.THINGS
    period = random.randint(2, 4)
    unit = random.sample(words, period)
    shown = random.randint(period + 1, 8)
    series = [unit[i % period] for i in range(shown + 4)]
    return Turn("pattern", "Go on: " + " ".join(series[:shown]), "Then " + " ".join(series[shown:]))


def edit(random: Random) -> Turn:
    words = random.sample(lexicon.THINGS, random.randint(3, 6))
    old = random.choice(words)
    new = random.choice([w for w in lexicon.THINGS if w not in words])
    answer = "Done: " + " ".join(new if w == old else w for w in words)
    return Turn("edit", f"Write {' '.join(words)} with {old} as {new}", answer)


def chat(random: Random) -> Turn:
    kind = random.random()
    if kind < 0.35:
        return Turn("chat", random.choice(GREETINGS), HELLO)
    if kind < 0.6:
        return Turn("chat", random.choice(("help", "Help", "help!", "What can you do?", "Who are you?")), HELP)
    if kind < 0.75:
        return Turn("chat", random.choice(("Thanks", "Thank you", "Thanks!", "thank you")), THANKS)
    pool = lexicon.THINGS + lexicon.COLOURS + lexicon.CITIES + lexicon.VERBS + lexicon.JOBS
    words = " ".join(random.choice(pool) for _ in range(random.randint(1, 6)))
    return Turn("chat", words[0].upper() + words[1:] + random.choice("?.!"), UNKNOWN)


@dataclass
class Notes:
    """Facts told so far in one conversation, and questions about them."""

    random: Random
    owners: list[str] = field(default_factory=list)
    things: dict[str, str] = field(default_factory=dict)

    def tell(self, count: int, filler: float = 0.0) -> str:
        """`count` new facts as text (fewer if the names run out), with filler sentences between them."""
        left = [n for n in lexicon.FIRST_NAMES if n not in self.things]
        sentences = []
        for name in self.random.sample(left, min(count, len(left))):
            while self.random.random() < filler:
                sentences.append(self.random.choice(lexicon.FILLER))
            self.things[name] = self.random.choice(lexicon.THINGS)
            self.owners.append(name)
            sentences.append(f"{name} has a {self.things[name]}.")
        return " ".join(sentences)

    def ask(self, *names: str) -> Turn:
        """A question about some of the facts; without names, about any one."""
        names = names or (self.random.choice(self.owners),)
        distance = len(self.owners) - min(self.owners.index(name) for name in names)
        answer = " ".join(f"{name} has a {self.things[name]}." for name in names)
        return Turn("recall", f"What has {' '.join(names)}?", f"Noted: {answer}", distance=distance)


@dataclass(frozen=True)
class Tool:
    """A function that the model may call; `kinds`: parameter name -> "string" or "integer"."""

    name: str
    kinds: dict[str, str]

    def schema(self) -> dict[str, Any]:
        properties = {parameter: {"type": kind} for parameter, kind in self.kinds.items()}
        parameters = {"type": "object", "properties": properties, "required": list(self.kinds)}
        return {"type": "function", "function": {"name": self.name, "parameters": parameters}}

    def use(self, random: Random) -> list[Turn]:
        """A request that needs the tool, and what is said of its result."""
        values: dict[str, Any] = {
            parameter: random.choice(_values(parameter)) if kind == "string" else random.randint(1, 99)
            for parameter, kind in self.kinds.items()
        }
        wanted = " and ".join(f"{parameter} {value}" for parameter, value in values.items())
        result = random.choice(lexicon.THINGS) if random.random() < 0.7 else str(random.randint(1, 99))
        return [
            Turn("tool", f"Use {self.name} with {wanted}", calls=((self.name, values),)),
            Turn("result", f"<tool_result>{result}</tool_result>", f"The result is {result}."),
        ]


def _values(parameter: str) -> tuple[str, ...]:
    choices = {
        "city": lexicon.CITIES,
        "colour": lexicon.COLOURS,
        "owner": lexicon.FIRST_NAMES,
        "job": lexicon.JOBS,
    }
    return choices[parameter]


def tools(random: Random, count: int, owners: float = 0.0) -> list[Tool]:
    """Tools with names and parameters that differ. owners: share of them that have an owner in any case: first names
    are the values that are hardest to copy."""
    made: dict[str, Tool] = {}
    while len(made) < count:
        name = f"{random.choice(lexicon.VERBS)}_{random.choice(lexicon.THINGS)}"
        kinds = dict.fromkeys(random.sample(lexicon.TEXT_PARAMETERS, random.randint(0, 2)), "string")
        kinds |= dict.fromkeys(random.sample(lexicon.NUMBER_PARAMETERS, random.randint(not kinds, 1)), "integer")
        if owners and random.random() < owners:
            kinds = {"owner": "string"} | kinds
        made[name] = Tool(name, kinds)
    return list(made.values())


SIMPLE = {"fact": fact, "sum": sum_, "pattern": pattern, "edit": edit, "chat": chat}
