"""Short conversation: questions of a closed set, little arithmetic, and what was said before."""

from __future__ import annotations

from random import Random

from examples.mini.tasks.sample import Answer, Message, Sample, user
from examples.mini.tasks.words import (
    ANIMALS,
    COLOURS,
    FIRST_NAMES,
    FRUITS,
    THINGS,
    invented,
    listed,
)

CAPITALS = dict(
    pair.split(":")
    for pair in listed(
        "France:Paris Germany:Berlin Spain:Madrid Italy:Rome Portugal:Lisbon Norway:Oslo "
        "Sweden:Stockholm Finland:Helsinki Denmark:Copenhagen Poland:Warsaw Austria:Vienna "
        "Hungary:Budapest Greece:Athens Ireland:Dublin Iceland:Reykjavik Egypt:Cairo Kenya:Nairobi "
        "Japan:Tokyo China:Beijing India:Delhi Peru:Lima Chile:Santiago Cuba:Havana Canada:Ottawa "
        "Turkey:Ankara Russia:Moscow Ukraine:Kyiv Vietnam:Hanoi Thailand:Bangkok Nepal:Kathmandu"
    )
)
OPPOSITES = dict(
    pair.split(":")
    for pair in listed(
        "hot:cold big:small fast:slow high:low old:new light:dark open:closed early:late "
        "full:empty hard:soft long:short loud:quiet rich:poor strong:weak wet:dry happy:sad "
        "near:far thick:thin clean:dirty left:right up:down day:night first:last"
    )
)
DAYS = listed("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = listed(
    "January February March April May June July August September October November December"
)
NUMBERS = listed("zero one two three four five six seven eight nine ten")
LEGS = {"dog": 4, "cat": 4, "horse": 4, "bird": 2, "spider": 8, "ant": 6, "fish": 0, "bee": 6}

_FIXED: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("Hi", "Hello", "Hello!", "Hi there", "Hey", "Good morning", "Good evening", "Hi!"),
        "Hello! How can I help you?",
    ),
    (
        ("Who are you?", "What are you?", "What is your name?", "Tell me who you are."),
        "I am Tandem Mini, a very small language model.",
    ),
    (
        ("How are you?", "How are you today?", "How is it going?", "Are you well?"),
        "I am fine, thank you. What can I do for you?",
    ),
    (
        ("Thanks", "Thank you", "Thank you!", "Thanks a lot", "Great, thanks!"),
        "You are welcome!",
    ),
    (
        ("Bye", "Goodbye", "See you", "Good night", "See you later"),
        "Goodbye! Have a good time.",
    ),
    (
        ("What can you do?", "How can you help me?", "What are you good at?", "Help"),
        "I can answer simple questions, find facts in a text, write small Python functions, "
        "fill JSON and call tools.",
    ),
    (
        ("How big are you?", "How many parameters do you have?", "Are you a large model?"),
        "I am small: about ten million parameters, in a file of twelve megabytes.",
    ),
    (
        ("What do you run on?", "Where do you run?", "Which server runs you?"),
        "I run on Tandem: one worker reads your prompt and another one writes my answer.",
    ),
    (
        ("What is prefill?", "Explain prefill.", "What does a prefill worker do?"),
        "Prefill reads the whole prompt once and keeps what later tokens need of it.",
    ),
    (
        ("What is decode?", "Explain decode.", "What does a decode worker do?"),
        "Decode writes the answer, token by token, from the state that prefill made.",
    ),
    (
        ("What is a KV cache?", "Explain the KV cache.", "What does a KV cache hold?"),
        "A KV cache holds keys and values of earlier tokens, so that they are computed once.",
    ),
    (
        ("What is a token?", "Explain tokens.", "What does token mean?"),
        "A token is a piece of text, often a part of a word, that a model reads or writes.",
    ),
    (
        ("Can you see images?", "Do you understand pictures?"),
        "No, I only read and write text.",
    ),
    (
        ("Tell me a joke.", "Tell me a joke", "Do you know a joke?", "Make me laugh."),
        "Why did the token cross the network? To get to the other rank.",
    ),
    (
        ("What is Python?", "Explain Python.", "Tell me about Python."),
        "Python is a programming language that is easy to read.",
    ),
    (
        ("What colour is the sky?", "Which colour has the sky?"),
        "On a clear day the sky is blue.",
    ),
    (
        ("How many days are in a week?", "How many days has a week?"),
        "A week has seven days.",
    ),
    (
        ("How many months are in a year?", "How many months has a year?"),
        "A year has twelve months.",
    ),
)


def conversation(random: Random) -> Sample:
    """One question, or one after a few others."""
    thinking = random.random() < 0.4
    messages: list[Message] = []
    for _ in range(random.choice((0, 0, 0, 1, 2))):
        question, reply, _ = _question(random)
        messages += [user(question), {"role": "assistant", "content": reply}]
    if messages and random.random() < 0.2:
        question, reply, reasoning = "What was my last question?", "", ""
        last = messages[-2]["content"]
        reply, reasoning = f"You asked: {last}", "I look at the message before this one."
    elif random.random() < 0.15:
        name = random.choice(FIRST_NAMES) if random.random() < 0.5 else invented(random)
        messages = [
            user(f"{random.choice(('My name is', 'I am', 'Call me'))} {name}."),
            {"role": "assistant", "content": f"Nice to meet you, {name}!"},
            *messages,
        ]
        question = random.choice(("What is my name?", "Do you know my name?", "Who am I?"))
        reply, reasoning = f"Your name is {name}.", f"The user said that the name is {name}."
    else:
        question, reply, reasoning = _question(random)
    messages.append(user(question))
    return Sample("conversation", messages, Answer(reply, reasoning), thinking)


def _question(random: Random) -> tuple[str, str, str]:
    """Question, answer, reasoning."""
    match random.randrange(12):
        case 0 | 1 | 2:
            questions, reply = random.choice(_FIXED)
            return random.choice(questions), reply, "A question that I know the answer to."
        case 3:
            country, capital = random.choice(list(CAPITALS.items()))
            question = random.choice(
                (f"What is the capital of {country}?", f"Which city is the capital of {country}?")
            )
            reasoning = f"The user asks for the capital of {country}."
            return question, f"The capital of {country} is {capital}.", reasoning
        case 4:
            capital = random.choice(list(CAPITALS.values()))
            country = next(key for key, value in CAPITALS.items() if value == capital)
            return (
                f"{capital} is the capital of which country?",
                f"{capital} is the capital of {country}.",
                f"The user asks where {capital} is.",
            )
        case 5:
            word, other = random.choice(list(OPPOSITES.items()))
            if random.random() < 0.5:
                word, other = other, word
            question = random.choice(
                (f"What is the opposite of {word}?", f"Say the opposite of {word}.")
            )
            return question, f"The opposite of {word} is {other}.", f"The opposite of {word}."
        case 6:
            first, second = random.randint(0, 9), random.randint(0, 9)
            if random.random() < 0.5:
                total = f"{first} + {second}"
                reply = f"{total} = {first + second}"
                return f"What is {total}?", reply, "I add the two numbers."
            first, second = max(first, second), min(first, second)
            total = f"{first} - {second}"
            reply = f"{total} = {first - second}"
            return f"What is {total}?", reply, "I subtract the second number."
        case 7:
            names = DAYS if random.random() < 0.5 else MONTHS
            place = random.randrange(len(names))
            word, step = ("after", 1) if random.random() < 0.5 else ("before", -1)
            other = names[(place + step) % len(names)]
            return (
                f"What comes {word} {names[place]}?",
                f"{other} comes {word} {names[place]}.",
                f"I need what comes {word} {names[place]}.",
            )
        case 8:
            animal, legs = random.choice(list(LEGS.items()))
            article = "An" if animal[0] in "aeiou" else "A"
            count = "no" if legs == 0 else NUMBERS[legs]
            question = f"How many legs does {article.lower()} {animal} have?"
            return question, f"{article} {animal} has {count} legs.", f"The legs of {animal}."
        case 9:
            words = random.sample(COLOURS + ANIMALS + FRUITS + THINGS, random.randint(2, 5))
            text = " ".join(words)
            question = random.choice((f"Repeat: {text}", f"Say this again: {text}"))
            return question, text, "I repeat the words."
        case 10:
            word = random.choice(COLOURS + ANIMALS + FRUITS + THINGS)
            kind = next(
                name
                for name, group in (
                    ("colour", COLOURS),
                    ("animal", ANIMALS),
                    ("fruit", FRUITS),
                    ("thing", THINGS),
                )
                if word in group
            )
            options = "a colour, an animal, a fruit or a thing"
            article = "an" if kind == "animal" else "a"
            return (
                f"Is {word} {options}?",
                f"{word.capitalize()} is {article} {kind}.",
                f"I sort {word} into one of four kinds.",
            )
        case _:
            number = random.randrange(len(NUMBERS))
            if random.random() < 0.5:
                return (
                    f"Write {number} as a word.",
                    NUMBERS[number],
                    "A digit becomes a word.",
                )
            return f"Write {NUMBERS[number]} in digits.", str(number), "A word becomes a digit."
