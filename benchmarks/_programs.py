"""What peers need: packages that may be missing, and programs in processes of their own that print JSON."""

from __future__ import annotations

import contextlib
import importlib
import json
import subprocess
import threading
from collections.abc import Sequence
from typing import Any

#: The most seconds of an answer.
ANSWER = 180.0


def package(module: str, name: str, remedy: str) -> Any:
    """A module of a package that may be missing; ImportError with a remedy where it cannot be imported."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{name} is not installed ({error}): {remedy}") from error


class JsonProgram:
    """A running program that prints a line of JSON when it is ready, and one for each line that it reads."""

    def __init__(self, command: Sequence[str], *arguments: object) -> None:
        self._process = subprocess.Popen(
            [*command, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
        )

    def answer(self, question: object = "") -> dict[str, Any]:
        """The next line of JSON, after a question unless that is empty.

        Raises
        ------
        RuntimeError
            Where the program ends instead.
        TimeoutError
            Where it does not answer in time; it is ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        late, last = threading.Event(), ""
        timer = threading.Timer(ANSWER, self._end_late, [late])
        timer.start()
        try:
            if question != "":
                print(question, file=self._process.stdin, flush=True)
            # Warnings and errors come between.
            for line in self._process.stdout:
                if line.startswith("{"):
                    answer: dict[str, Any] = json.loads(line)
                    return answer
                last = line.strip() or last
        except BrokenPipeError:
            last = "it was not there to answer"
        finally:
            timer.cancel()
        if late.is_set():
            raise TimeoutError(f"the program did not answer in {ANSWER:g} s")
        raise RuntimeError(f"the program ended with {self._process.wait()}: {last or 'it printed nothing'}")

    def _end_late(self, late: threading.Event) -> None:
        late.set()
        self._process.kill()

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        # A question that nobody has read may still be in its buffer.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
