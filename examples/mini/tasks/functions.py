"""Small Python functions of a closed set: to write, to complete, to explain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from examples.mini.tasks.sample import Answer, Sample, user
from examples.mini.tasks.words import identifier


@dataclass(frozen=True)
class Function:
    """`{0}`, `{1}` ... are the parameters; lines of the body without their first indent."""

    names: tuple[str, ...]
    parameters: tuple[tuple[str, ...], ...]  # choices for each parameter
    does: str  # "returns ..."; also the docstring, without its first word's s
    body: str


_CHOICES = {
    "LIST": ("items", "values", "numbers", "elements", "data"),
    "TEXT": ("text", "string", "s", "word", "line"),
    "NUMBER": ("n", "x", "number", "value"),
}

# names | choices for each parameter | what it does | its body; \n ends a line of it, \ a line here
_TABLE = r"""
add plus sum_two | a,x b,y | returns the sum of {0} and {1} | return {0} + {1}
subtract minus difference | a,x b,y | returns {0} minus {1} | return {0} - {1}
multiply times product_of | a,x b,y | returns the product of {0} and {1} | return {0} * {1}
divide ratio quotient | a,x b,y | returns {0} divided by {1} | return {0} / {1}
power raise_to | a,base b,exponent | returns {0} to the power of {1} | return {0} ** {1}
square squared | NUMBER | returns the square of {0} | return {0} * {0}
double twice | NUMBER | returns twice {0} | return 2 * {0}
half halve | NUMBER | returns half of {0} | return {0} / 2
negate negative | NUMBER | returns the negative of {0} | return -{0}
is_even even | NUMBER | returns whether {0} is even | return {0} % 2 == 0
is_odd odd | NUMBER | returns whether {0} is odd | return {0} % 2 == 1
is_positive positive | NUMBER | returns whether {0} is positive | return {0} > 0
absolute magnitude | NUMBER | returns the absolute value of {0} | return {0} if {0} >= 0 else -{0}
maximum larger | a,x b,y | returns the larger of {0} and {1} | return {0} if {0} > {1} else {1}
minimum smaller | a,x b,y | returns the smaller of {0} and {1} | return {0} if {0} < {1} else {1}
first head | LIST | returns the first of {0} | return {0}[0]
last tail | LIST | returns the last of {0} | return {0}[-1]
total sum_all | LIST | returns the sum of {0} | return sum({0})
average mean | LIST | returns the average of {0} | return sum({0}) / len({0})
count size length | LIST | returns the number of {0} | return len({0})
largest find_max | LIST | returns the largest of {0} | return max({0})
smallest find_min | LIST | returns the smallest of {0} | return min({0})
unique distinct | LIST | returns {0} without duplicates | return list(set({0}))
in_order sort_up | LIST | returns {0} in ascending order | return sorted({0})
backwards flip | LIST | returns {0} in reverse order | return {0}[::-1]
is_empty empty | LIST | returns whether {0} is empty | return not {0}
upper shout | TEXT | returns {0} in upper case | return {0}.upper()
lower whisper | TEXT | returns {0} in lower case | return {0}.lower()
trim clean | TEXT | returns {0} without spaces around it | return {0}.strip()
words split_words | TEXT | returns the words of {0} | return {0}.split()
is_palindrome palindrome | TEXT | returns whether {0} is a palindrome | return {0} == {0}[::-1]
greet hello | name,user | returns a greeting for {0} | return "Hello, " + {0}
contains has | LIST item,value,x | returns whether {1} is in {0} | return {1} in {0}
read_text read_file | path,filename | returns the text of the file {0} |\
    with open({0}) as file:\n    return file.read()
factorial fact | n,number | returns the factorial of {0} |\
    result = 1\nfor i in range(2, {0} + 1):\n    result *= i\nreturn result
fibonacci fib | n,number | returns the Fibonacci number {0} |\
    a, b = 0, 1\nfor _ in range({0}):\n    a, b = b, a + b\nreturn a
count_vowels vowels | TEXT | returns the number of vowels in {0} |\
    return sum(c in "aeiou" for c in {0})
squares all_squares | LIST | returns the square of each of {0} | return [x * x for x in {0}]
evens only_even | LIST | returns the even ones of {0} | return [x for x in {0} if x % 2 == 0]
swap exchange | a,x b,y | returns {1} and {0} in this order | return {1}, {0}
"""


def _functions() -> Iterator[Function]:
    for row in _TABLE.strip().replace("|\\\n   ", "|").split("\n"):
        names, parameters, does, body = row.split(" | ")
        choices = (_CHOICES.get(one) or tuple(one.split(",")) for one in parameters.split())
        yield Function(tuple(names.split()), tuple(choices), does, body.replace("\\n", "\n"))


FUNCTIONS = tuple(_functions())


@dataclass(frozen=True)
class Written:
    """A function with its names filled in."""

    name: str
    signature: str
    does: str
    body: str

    @property
    def code(self) -> str:
        return f"{self.signature}\n{self.body}"


def written(random: Random) -> Written:
    function = random.choice(FUNCTIONS)
    name = random.choice(function.names) if random.random() < 0.7 else identifier(random)
    parameters = [random.choice(choices) for choices in function.parameters]
    lines = function.body.format(*parameters).split("\n")
    return Written(
        name,
        f"def {name}({', '.join(parameters)}):",
        function.does.format(*parameters),
        "\n".join(f"    {line}" for line in lines),
    )


def functions(random: Random) -> Sample:
    one = written(random)
    docstring = f'    """{one.does.capitalize().replace("eturns", "eturn", 1)}."""'
    match random.randrange(5):
        case 0 | 1:
            question = random.choice(
                (
                    f"Write a Python function {one.name} that {one.does}.",
                    f"I need a function {one.signature[4:-1]} that {one.does}.",
                    f"Define {one.signature[4:-1]}. It {one.does}.",
                )
            )
            reply, reasoning = one.code, f"The function {one.does}."
        case 2:
            question = random.choice(
                (
                    f"Complete this function:\n\n{one.signature}\n{docstring}",
                    f"Fill in the body.\n\n{one.signature}\n{docstring}",
                )
            )
            reply, reasoning = one.body, f"The docstring says that it {one.does}."
        case 3:
            question = random.choice(
                (
                    f"What does this function do?\n\n{one.code}",
                    f"Explain this function.\n\n{one.code}",
                    f"{one.code}\n\nWhat does {one.name} do?",
                )
            )
            reply, reasoning = f"{one.name} {one.does}.", "I read the body of the function."
        case _:
            question = f"Add a docstring.\n\n{one.code}"
            reply = f"{one.signature}\n{docstring}\n{one.body}"
            reasoning = f"The function {one.does}."
    return Sample("functions", [user(question)], Answer(reply, reasoning), random.random() < 0.3)


def source(random: Random) -> str:
    """A file of such functions, as plain text."""
    parts = []
    for _ in range(random.randint(1, 6)):
        one = written(random)
        if random.random() < 0.4:
            doc = one.does.capitalize().replace("eturns", "eturn", 1)
            parts.append(f'{one.signature}\n    """{doc}."""\n{one.body}\n')
        else:
            parts.append(f"{one.code}\n")
    return "\n\n".join(parts)
