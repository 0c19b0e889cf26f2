"""Fixtures for test code of these tests; the check worker finds them by its `paths`."""

import contextlib

STEPS = []


class Ledger:
    def __init__(self, currency="EUR"):
        self.currency = currency


class Account:
    def __init__(self, ledger, x, judge, note="none", *, limit=3):
        self.ledger, self.x, self.judge, self.note, self.limit = ledger, x, judge, note, limit


@contextlib.contextmanager
def opened(name):
    STEPS.append(f"enter {name}")
    yield STEPS
    STEPS.append(f"leave {name}")
    print(" ".join(STEPS))


@contextlib.contextmanager
def strict(x):
    yield "nothing"
    assert x.metadata.get("seen"), "nobody looked"


@contextlib.contextmanager
def refusing():
    if not STEPS:
        raise AssertionError("closed")
    yield


class Swallows:
    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        return True


def broken():
    raise AssertionError("cannot be made")


def needs_second(second):
    return second


def needs_first(first):
    return first


def asks_too_much(colour):
    return colour
