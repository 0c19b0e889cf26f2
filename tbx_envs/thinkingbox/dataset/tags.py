"""Tags of tasks: `domain:x`, `eval:x`, `category:x`, `skip`, and labels, which are all other tags.

Values after a colon are lower case. When a dataset has a taxonomy, `tag_taxonomy.yaml` (sections `domain`, `eval` and
`category`, each with the allowed values), other values are problems.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tbx_envs.errors import did_you_mean

SKIP = "skip"


@dataclasses.dataclass(frozen=True, slots=True)
class Tags:
    """The tags of a scenario, of a test, or of both.

    Attributes:
        labels: labels as written.
        categories, domain, eval_type: values without their prefixes.
        skip: True when the test is not to be run.
    """

    labels: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    domain: str | None = None
    eval_type: str | None = None
    skip: bool = False

    def flat(self) -> tuple[str, ...]:
        """All tags as they would be written in one list."""
        return (
            *([f"domain:{self.domain}"] if self.domain else []),
            *([f"eval:{self.eval_type}"] if self.eval_type else []),
            *(f"category:{category}" for category in self.categories),
            *self.labels,
            *([SKIP] if self.skip else []),
        )


def parse_tags(given: Sequence[Any] | Mapping[str, Any] | None) -> Tags:
    """The tags in a list, as in a dataset's files, or in a mapping, as in hydrated test cases.

    Of several `domain:` or `eval:` tags the last one counts, so that a test's overrides its module's.

    Raises:
        ValueError: some are invalid; the message has a line for each.
    """
    if isinstance(given, Mapping):
        given = _as_list(given)
    wrong = [f"tag {tag!r} is not text; write text" for tag in given or () if not isinstance(tag, str)]
    of_prefix: dict[str, list[str]] = {"domain": [], "eval": [], "category": []}
    labels, skip = [], False
    for tag in given or ():
        if not isinstance(tag, str):
            continue
        prefix, colon, value = tag.partition(":")
        if colon and prefix.lower() in of_prefix:
            of_prefix[prefix.lower()].append(value.lower())
            if not value.strip():
                wrong.append(f"tag {tag!r} has no value after the colon; give one")
        elif tag.lower() == SKIP:
            skip = True
        else:
            labels.append(tag)
    if wrong:
        raise ValueError("\n".join(wrong))
    domain, eval_type = (of_prefix[prefix][-1:] for prefix in ("domain", "eval"))  # empty, or the last one
    return Tags(
        tuple(labels), tuple(of_prefix["category"]), next(iter(domain), None), next(iter(eval_type), None), skip
    )


def is_skipped(given: Any) -> bool:
    """True when `skip` is among the tags, which may be invalid otherwise."""
    if isinstance(given, Mapping):
        return bool(given.get("skip"))
    return isinstance(given, list) and any(isinstance(tag, str) and tag.lower() == SKIP for tag in given)


def merge_tags(scenario: Tags, test: Tags) -> Tags:
    """Labels of both; `domain` and `eval` of the test, else of the scenario; categories of the test."""
    return Tags(
        labels=(*scenario.labels, *test.labels),
        categories=test.categories,
        domain=test.domain or scenario.domain,
        eval_type=test.eval_type or scenario.eval_type,
        skip=scenario.skip or test.skip,
    )


def unknown_values(tags: Tags, taxonomy: Mapping[str, Sequence[str]]) -> list[str]:
    """A sentence about each tag whose value is not in the taxonomy.

    Args:
        tags: tags to check.
        taxonomy: section (`domain`, `eval`, `category`) -> allowed values; a missing section allows any.
    """
    used = [("domain", tags.domain), ("eval", tags.eval_type), *(("category", value) for value in tags.categories)]
    return [
        f"tag '{section}:{value}' is not in the taxonomy.{did_you_mean(value, taxonomy[section])} "
        f"Known: {', '.join(taxonomy[section])}."
        for section, value in used
        if value is not None and value not in taxonomy.get(section, (value,))
    ]


def _as_list(given: Mapping[str, Any]) -> list[Any]:
    """A hydrated test case's tags in the form of a list.

    Raises:
        ValueError: there are unknown keys.
    """
    known = ("labels", "category", "domain", "eval_type", "skip")
    if unknown := [key for key in given if key not in known]:
        raise ValueError(f"tags have no {', '.join(map(repr, unknown))}; they have {', '.join(known)}")
    domain, eval_type = given.get("domain"), given.get("eval_type")
    return [
        *([f"domain:{domain}"] if domain else []),
        *([f"eval:{eval_type}"] if eval_type else []),
        *(f"category:{category}" for category in given.get("category") or ()),
        *(given.get("labels") or ()),
        *([SKIP] if given.get("skip") else []),
    ]
