"""Made-up and real words that tasks are filled with. Closed lists, and names made of syllables."""

from __future__ import annotations

from random import Random


def listed(text: str) -> tuple[str, ...]:
    """The words of `text`."""
    return tuple(text.split())


FIRST_NAMES = listed(
    "Ana Ben Carla David Elena Felix Grace Hugo Irene Jonas Kira Liam Mira Nora Oscar Paula "
    "Quentin Rosa Simon Tara Ulrich Vera Walter Xenia Yara Zoe Alice Bruno Chen Diego Emma "
    "Farid Gita Hans Ida Jack Karim Lucy Maria Nils Olga Pedro Ravi Sara Tom Uma Victor Wanda "
    "Yusuf Amir"
)
LAST_NAMES = listed(
    "Silva Keller Brown Tanaka Novak Rossi Kumar Haddad Larsen Moreau Petrov Garcia Schmidt Jones "
    "Okafor Lopez Weber Fischer Olsen Costa Ivanov Sato Nguyen Evans Klein Wolf Marin Baker"
)
CITIES = listed(
    "Lima Oslo Paris Cairo Delhi Tokyo Berlin Madrid Lisbon Vienna Dublin Athens Quito Bogota "
    "Seoul Rome Prague Nairobi Boston Chicago Porto Geneva Milan Bergen Krakow Leeds Lyon Ghent"
)
COLOURS = listed("red blue green yellow black white orange purple brown pink grey")
ANIMALS = listed(
    "dog cat horse fox owl bear wolf mouse rabbit lion tiger whale eagle frog goat duck"
)
FRUITS = listed("apple pear plum cherry banana orange lemon grape peach mango melon fig")
THINGS = listed(
    "lamp chair table pen clock bottle knife mirror box drum kite ladder rope hammer bell book "
    "bicycle radio camera candle basket carpet guitar"
)
VERBS = listed(
    "load save parse send read write open close find merge split check build update remove sort "
    "count render fetch encode decode start stop reset scan apply print convert filter"
)
NOUNS = listed(
    "config user file header token line page item cache queue event table image index buffer "
    "report message path record job task session result entry node value order state"
)
FOLDERS = listed("src app lib core tests tools server client utils api web models scripts")
_ONSETS = listed("b c d f g h j k l m n p r s t v w z br cr dr fl gr kl pr st tr sh th ch bl sk")
_VOWELS = listed("a e i o u ai ea io ou ee")
_CODAS = ("", "", "", "n", "r", "s", "l", "k", "m", "x", "nd", "rt", "t")


def syllables(random: Random, count: int) -> str:
    """A made-up lower-case word."""
    return "".join(
        random.choice(_ONSETS) + random.choice(_VOWELS) + random.choice(_CODAS)
        for _ in range(count)
    )


def invented(random: Random) -> str:
    """A made-up name."""
    return syllables(random, random.randint(1, 3)).capitalize()


def person(random: Random) -> str:
    """A full, real or made-up name."""
    first = random.choice(FIRST_NAMES) if random.random() < 0.6 else invented(random)
    last = random.choice(LAST_NAMES) if random.random() < 0.6 else invented(random)
    return f"{first} {last}"


def digits(random: Random, least: int = 3, most: int = 6) -> str:
    return "".join(random.choice("0123456789") for _ in range(random.randint(least, most)))


def code_word(random: Random) -> str:
    """What a fact may hold: digits, letters and digits, or words."""
    match random.randrange(5):
        case 0 | 1:
            return digits(random, 4, 6)
        case 2:
            letters = "".join(random.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(2))
            return f"{letters}-{digits(random, 2, 4)}"
        case 3:
            return f"{random.choice(COLOURS)}-{random.choice(ANIMALS)}-{digits(random, 1, 2)}"
        case _:
            return syllables(random, random.randint(2, 3))


def identifier(random: Random) -> str:
    """A function or variable name in snake case."""
    match random.randrange(4):
        case 0:
            return f"{random.choice(VERBS)}_{random.choice(NOUNS)}"
        case 1:
            return f"{random.choice(VERBS)}_{syllables(random, random.randint(1, 2))}"
        case 2:
            return f"{random.choice(NOUNS)}_{random.choice(NOUNS)}"
        case _:
            return syllables(random, random.randint(1, 3))


def constant(random: Random) -> str:
    """An upper-case name."""
    if random.random() < 0.5:
        prefix = random.choice(("MAX", "MIN", "DEFAULT", "NUM", "INITIAL", "TOTAL"))
        return f"{prefix}_{random.choice(NOUNS).upper()}"
    return identifier(random).upper()


def path(random: Random) -> str:
    """A Python file somewhere in a project."""
    name = random.choice(NOUNS) if random.random() < 0.5 else identifier(random)
    folders = "".join(f"{random.choice(FOLDERS)}/" for _ in range(random.randint(0, 2)))
    return f"{folders}{name}.py"
