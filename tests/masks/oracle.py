"""A slow, simple parser of COCO's mask strings without numpy, with which the compiled parser is compared."""

MAX_PIXELS = 2**32 - 1


class Refused(Exception):
    """The string is not a mask of this size; the argument is the reason."""


def decode(string: object, height: object, width: object) -> list[int]:
    """The runs of one mask."""
    for side in (height, width):
        if type(side) is not int or side < 1:
            raise Refused("bad_size")
    if height * width > MAX_PIXELS:
        raise Refused("bad_size")
    if isinstance(string, str):
        codes = [ord(character) - 48 for character in string]
    elif isinstance(string, bytes):
        codes = [byte - 48 for byte in string]
    else:
        raise Refused("wrong_type")

    runs: list[int] = []
    number: list[int] = []  # character codes of the number so far
    for code in codes:
        if not 0 <= code <= 63:
            raise Refused("bad_character")
        if len(number) == 12:
            raise Refused("number_too_long")
        number.append(code)
        if code >= 32:
            continue
        value = sum((digit % 32) * 32**place for place, digit in enumerate(number))
        if number[-1] >= 16:
            value -= 32 ** len(number)
        if len(runs) > 2:
            value += runs[-2]
        if value < 0:
            raise Refused("negative_run")
        runs.append(value)
        if sum(runs) > height * width:
            raise Refused("run_overflow")
        number = []
    if number:
        raise Refused("cut_number")
    if sum(runs) != height * width:
        raise Refused("sum_mismatch")
    return runs


def number(value: int, padding: int = 0) -> bytes:
    """The characters of one number, with `padding` needless ones."""
    characters = []
    while not -16 <= value < 16 or padding > 0:
        if -16 <= value < 16:
            padding -= 1
        characters.append(48 + 32 + value % 32)
        value //= 32
    return bytes([*characters, 48 + value % 32])


def encode(runs: list[int]) -> bytes:
    """The string of one mask."""
    return b"".join(number(run - runs[i - 2] if i > 2 else run) for i, run in enumerate(runs))


def pixels(runs: list[int], height: int, width: int) -> list[list[int]]:
    """The mask as rows of 0 and 1."""
    line = [index % 2 for index, run in enumerate(runs) for _ in range(run)]
    return [[line[x * height + y] for x in range(width)] for y in range(height)]
