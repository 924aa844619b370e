"""JSON files read value by value: the elements of a list, the fields of an object, never the whole file.

Files may be larger than memory, and a damaged or hostile one must end in an error that names the position. Python's
decoder is used, which limits depth and digits; parsers that call back at every bracket do not.
"""

import codecs
import json
import re
from collections.abc import Iterator
from typing import IO, Any, NoReturn

from raycl.data.sources.source import SourceFile

_CHUNK = 1 << 20
_BLANK = re.compile(r"[ \t\n\r]*")
_BEHIND = re.compile(r"[ \t\n\r]*,[ \t\n\r]*")
_UNFINISHED_NUMBER = 4
"""This many characters after a number may still belong to it: `1` may go on as `1.5` or `1e+5`."""

LONG_NUMBER = "a number of more than 4,300 digits: expected less, repair it or write it in quotes"
"""The error for JSON that Python's decoder refuses, since the time to read a number grows with its square."""

_decode = json.JSONDecoder().raw_decode


def json_line(line: str, number: int, file: SourceFile) -> Any:
    """Return the value on a line.

    Raises:
        BadRow: it is not JSON, or nested too deeply.
    """
    text = line.strip()
    try:
        item, end = _decode(text)
        if end != len(text):
            json.loads(line)  # names the position where the value should have ended
    except RecursionError:
        file.refuse(file.limits.too_deep, number)
    except json.JSONDecodeError as error:
        where = f"malformed JSON at column {error.colno} ({error.msg})"
        file.refuse(f"{where}: expected one object a line, repair the line", number)
    except ValueError:
        file.refuse(LONG_NUMBER, number)
    if file.limits.is_too_deep(item, text, 0, end):
        file.refuse(file.limits.too_deep, number)
    return item


class JsonStream:
    """The text of a JSON file from the front."""

    def __init__(self, file: SourceFile, stream: IO[bytes]) -> None:
        self._row = 0  # this is not a row
        self._file, self._stream = file, stream
        self._limits, self._row_bytes = file.limits, file.limits.row_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._text, self._at, self._ended = "", 0, False
        self._lines, self._column = 0, 0  # length of the text that was dropped from the front

    def next(self) -> str:
        """Return the next character that is not blank; "" at the end of the file."""
        while True:
            blank = _BLANK.match(self._text, self._at)
            assert blank is not None, "the pattern matches nothing too"
            self._at = blank.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def take(self, expected: str) -> str:
        """Skip the next character, which must be one of these.

        Raises:
            DataError: it is another.
        """
        next_character = self.next()
        if not next_character or next_character not in expected:
            wanted = " or ".join(f"'{character}'" for character in expected)
            self._fail(json.JSONDecodeError(f"Expecting {wanted}", self._text, self._at))
        self._at += 1
        return next_character

    def value(self) -> Any:
        """Read the next value.

        Raises:
            DataError: it is not JSON, too large or nested too deeply.
        """
        while True:
            start = self._at
            try:
                item, end = _decode(self._text, start)
            except json.JSONDecodeError as error:
                self.next()
                if self._at == start and not self._more():
                    self._fail(error)
                continue
            except RecursionError:
                self._refuse(self._limits.too_deep)
            except ValueError:
                self._refuse(LONG_NUMBER)
            if end + _UNFINISHED_NUMBER > len(self._text) and isinstance(item, int | float) and self._more():
                continue
            if end - start > self._row_bytes:
                self._refuse(self._limits.too_large)
            if self._limits.is_too_deep(item, self._text, start, end):
                self._refuse(self._limits.too_deep)
            self._at = end
            return item

    def elements(self) -> Iterator[Any]:
        """Yield the values of a list, one at a time."""
        self._row = 1
        self.take("[")
        if self.next() == "]":
            self.take("]")
            return
        while True:
            yield from self._elements_here()
            yield self.value()
            self._row += 1
            if self.take(",]") == "]":
                return
            self.next()

    def _elements_here(self) -> Iterator[Any]:
        """Yield the next elements that are complete in the text, followed by a comma, and within the limits.

        This is the fast way through most of a list; `value` reads or refuses the element at which it stops.
        """
        text, at, decode, match = self._text, self._at, _decode, _BEHIND.match
        is_too_deep, row_bytes = self._limits.is_too_deep, self._row_bytes
        while True:
            try:
                item, end = decode(text, at)
            except (ValueError, RecursionError):
                return
            behind = match(text, end)
            if behind is None or end - at > row_bytes or is_too_deep(item, text, at, end):
                return
            self._at = at = behind.end()
            self._row += 1
            yield item

    def names(self) -> Iterator[str]:
        """Yield the names of an object's fields; read each by `value`, `elements` or `skip` before the next."""
        self.take("{")
        if self.next() == "}":
            self.take("}")
            return
        while True:
            if self.next() != '"':
                self._fail(json.JSONDecodeError("Expecting a name in double quotes", self._text, self._at))
            name = str(self.value())
            self.take(":")
            yield name
            if self.take(",}") == "}":
                return

    def skip(self) -> None:
        """Skip the next value; a list is not kept in memory."""
        if self.next() != "[":
            self.value()
            return
        for _ in self.elements():
            pass

    def end(self) -> None:
        """Check that nothing follows.

        Raises:
            DataError: something does.
        """
        if self.next():
            self._fail(json.JSONDecodeError("Extra data", self._text, self._at))

    def _more(self) -> bool:
        """Read more, twice as much each time, so that a long value is not parsed again for every megabyte."""
        if self._ended:
            return False
        dropped, self._text = self._text[: self._at], self._text[self._at :]
        self._at = 0
        if (breaks := dropped.count("\n")) > 0:
            self._lines, self._column = self._lines + breaks, 0
            dropped = dropped[dropped.rindex("\n") + 1 :]
        self._column += len(dropped)
        if len(self._text) > self._row_bytes:
            self._refuse(self._limits.too_large)
        chunk = self._stream.read(max(_CHUNK, len(self._text)))
        self._ended = not chunk
        try:
            self._text += self._decoder.decode(chunk, final=self._ended)
        except UnicodeDecodeError:
            self._refuse("invalid UTF-8: expected UTF-8 text, convert the file to UTF-8")
        return True

    def _fail(self, error: json.JSONDecodeError) -> NoReturn:
        line, column = self._lines + error.lineno, error.colno + (self._column if error.lineno == 1 else 0)
        self._refuse(
            f"malformed JSON at line {line}, column {column} ({error.msg}): expected one complete JSON value, repair "
            "or re-export the file"
        )

    def _refuse(self, problem: str) -> NoReturn:
        self._file.refuse(problem, self._row or None)
