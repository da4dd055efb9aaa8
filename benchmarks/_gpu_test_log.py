"""A plugin of pytest that says how each test ended and which kernels it launched, a line of JSON for each."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jacsparse.runtime import active_backend, backend

from ._noted_launches import TEST_LOG, NotingBackend


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Note what a test launches."""
    with contextlib.ExitStack() as stack:
        noting = NotingBackend(active_backend())
        stack.enter_context(backend(noting))
        item.stash[_NOTED] = noting
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
    """Write a line when a test has run, or was skipped or failed before."""
    report: Any = yield
    if report.when == "call" or report.outcome != "passed":
        instances = sorted({each.text for each in item.stash[_NOTED].noted})
        line = json.dumps({"test": item.nodeid, "outcome": report.outcome, "instances": instances})
        with Path(os.environ[TEST_LOG]).open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
    return report


_NOTED = pytest.StashKey[NotingBackend]()
