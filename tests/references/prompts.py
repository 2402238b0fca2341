"""The prompts of the greedy references, as text; written for this file.

More are kept than are needed: a prompt whose continuation comes near a tie is rejected by `make_greedy.py`, and the next one takes its
place. This file owns the wording alone; tokenizing and judging are done there.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prompt:
    """A named text; special tokens written in it are meant as such."""

    name: str
    kind: str
    text: str


def conversation(*turns: tuple[str, str]) -> str:
    """What the model's chat template makes of `turns` (role, content), with the opening of the assistant's next turn."""
    return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns) + "<|im_start|>assistant\n"


def station_log() -> str:
    """A weather station's log: many numbers, so that one wrong digit in a long context is seen."""
    lines = ["Log of the weather station on the north quay. Every reading was taken by hand and checked twice.", ""]
    winds = ("north", "north-east", "east", "south-east", "south", "south-west", "west", "north-west")
    skies = ("clear", "hazy", "overcast", "broken cloud", "rain", "drizzle", "fog")
    for day in range(1, 33):
        celsius = 4 + (day * 7) % 13
        lines.append(
            f"Day {day}: {celsius} degrees at noon, wind {winds[(day * 3) % 8]} at {5 + (day * 11) % 23} knots, "
            f"{skies[(day * 5) % 7]}, pressure {990 + (day * 17) % 41} hectopascal."
        )
    lines += ["", "Summary for the harbour master, written on the last evening:"]
    return "\n".join(lines)


def ledger_code() -> str:
    """A source file of one idea, long enough to need several chunks."""
    parts = ['"""A ledger of accounts; each operation is a small class that checks itself."""', "", "from dataclasses import dataclass", ""]
    operations = (
        "Deposit",
        "Withdrawal",
        "Transfer",
        "Interest",
        "Fee",
        "Refund",
        "Correction",
        "Closing",
        "Opening",
        "Audit",
        "Freeze",
        "Thaw",
    )
    for number, operation in enumerate(operations):
        parts += [
            "",
            "@dataclass(frozen=True)",
            f"class {operation}:",
            f'    """One {operation.lower()}, in cents."""',
            "",
            "    account: str",
            "    cents: int",
            f"    number: int = {number * 37}",
            "",
            "    def apply(self, balances: dict[str, int]) -> dict[str, int]:",
            "        if self.cents < 0:",
            f'            raise ValueError("{operation.lower()} of a negative amount")',
            f"        changed = balances.get(self.account, 0) {'-' if number % 2 else '+'} self.cents",
            "        return {**balances, self.account: changed}",
            "",
        ]
    parts += ["", "def replay(operations: list[Deposit], balances: dict[str, int]) -> dict[str, int]:"]
    return "\n".join(parts)


def harbour_story() -> str:
    """Prose that wanders through a harbour, place by place."""
    places = (
        ("the rope walk", "an old woman counted hemp strands and never looked up", "tar and wet straw"),
        ("the customs house", "two clerks argued over the weight of a crate of lemons", "ink and lemon peel"),
        ("the lighthouse stairs", "a boy carried oil in a can that was larger than himself", "paraffin"),
        ("the fish market", "a cat had made a throne of an empty basket", "salt and smoke"),
        ("the chandler's shop", "lamps hung from the ceiling like fruit in an orchard", "brass polish"),
        ("the dry dock", "a ship stood on wooden legs and looked ashamed of its own size", "rust and fresh paint"),
        ("the pilots' bench", "four men waited for a sail that only one of them believed in", "pipe tobacco"),
        ("the ferry steps", "a bride and a goat were waiting for the same boat", "seaweed"),
        ("the signal mast", "flags spelled a word that nobody ashore could read", "canvas"),
        ("the net loft", "three sisters mended in silence and sang only when a knot would not hold", "linen and cork"),
        ("the baker by the gate", "the last loaf of the day was given to whoever told the best lie", "warm bread"),
        ("the grave of the first captain", "somebody had left a compass whose needle still trembled", "cut grass"),
        ("the rain barrel", "the moon had come down to drink and stayed", "nothing at all"),
        ("the sailmaker's yard", "a dog slept in a jib and would not be moved by threats", "beeswax"),
    )
    paragraphs = ["Ilse walked round the harbour once every evening, always the same way, and wrote down what she saw."]
    for hour, (place, sight, smell) in enumerate(places):
        paragraphs.append(
            f"She came to {place} when the bell had struck {hour + 3} times. There {sight}. "
            f"The air smelled of {smell}, and she noted that too, because her grandfather had told her "
            f"that a harbour is remembered with the nose. "
            f"She had {40 - 2 * hour} pages left in her book, and she did not hurry."
        )
    paragraphs.append("When she came home, she opened the book at the first page and read aloud:")
    return "\n\n".join(paragraphs)


PROMPTS: tuple[Prompt, ...] = (
    Prompt("capital", "short", "The capital of France is"),
    Prompt("one word", "short", "Hello"),
    Prompt("counting", "short", "One, two, three, four,"),
    Prompt("recipe", "short", "To bake a simple loaf of bread you need"),
    Prompt("digits", "short", "The first digits of pi are 3.14159"),
    Prompt("season", "short", "In autumn the leaves of the beech tree"),
    Prompt("sum", "chat", conversation(("user", "What is 17 + 25? Answer with the number and one sentence."))),
    Prompt(
        "harbour talk",
        "chat",
        conversation(
            ("system", "You are a patient harbour guide who answers in short sentences."),
            ("user", "Where do the ferries leave from?"),
            ("assistant", "They leave from the steps below the signal mast, every half hour."),
            ("user", "And the last one?"),
            ("assistant", "The last one leaves at ten in the evening."),
            ("user", "What can I do if I miss it?"),
        ),
    ),
    Prompt(
        "debugging talk",
        "chat",
        conversation(
            ("system", "You are a helpful programmer."),
            ("user", "My loop never ends: while x > 0: print(x)"),
            ("assistant", "The value of x is never changed inside the loop. Subtract one from it after printing."),
            ("user", "Thanks! Can you show me the whole loop, mended?"),
        ),
    ),
    Prompt(
        "garden talk",
        "chat",
        conversation(
            ("user", "Name three vegetables that grow in the shade."),
            ("assistant", "Spinach, lettuce and radishes."),
            ("user", "Which of them is ready first, and how do I know?"),
        ),
    ),
    Prompt(
        "fibonacci",
        "code",
        'def fibonacci(count: int) -> list[int]:\n    """The first `count` Fibonacci numbers."""\n    numbers = [0, 1]\n',
    ),
    Prompt(
        "query",
        "code",
        "CREATE TABLE boats (id INTEGER PRIMARY KEY, name TEXT, length REAL);\n"
        "INSERT INTO boats VALUES (1, 'Gull', 7.5);\nSELECT name FROM boats",
    ),
    Prompt("page", "code", "<!DOCTYPE html>\n<html>\n  <head>\n    <title>Tides</title>\n  </head>\n  <body>\n    <ul>\n"),
    Prompt("loop in C", "code", '#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n        printf("'),
    Prompt("German", "language", "Die Hauptstadt von Österreich heißt Wien. Die Stadt liegt an der"),
    Prompt("Spanish", "language", "El perro corre por la playa y el niño le tira una"),
    Prompt("Russian", "language", "Москва — столица России. Город стоит на"),
    Prompt("Chinese", "language", "北京是中国的首都。这座城市"),
    Prompt("Japanese", "language", "東京は日本の首都です。人口は"),
    Prompt("Arabic", "language", "القاهرة هي عاصمة مصر وتقع على"),
    Prompt("Hindi", "language", "दिल्ली भारत की राजधानी है और"),
    Prompt("Greek", "language", "Η Αθήνα είναι η πρωτεύουσα της Ελλάδας και"),
    Prompt("emoji", "language", "I love the beach 🏖️ and the sun ☀️ and the waves 🌊 because"),
    Prompt("station log", "long", station_log()),
    Prompt("ledger", "long", ledger_code()),
    Prompt("harbour story", "long", harbour_story()),
    Prompt(
        "log in a chat",
        "long",
        conversation(
            ("system", "You read logs and answer questions about them."),
            ("user", station_log()),
            ("assistant", "The month was mild, with changing winds."),
            ("user", "Which day had the strongest wind?"),
        ),
    ),
)
