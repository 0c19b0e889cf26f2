"""`GeneratedAnswerEvaluator`: judges an answer against a reference: is it right, cites its source, is well written."""

from __future__ import annotations

import re

from .common.chat_types import TestContext
from .common.config_types import RubricConfig
from .common.judge import Judge, safe_tag_encode
from .common.rubrics_judge import RubricJudge

_SAME_MEANING = """You are a judge. You are shown a question between <query> and </query>, a reference answer, mostly
short, between <reference> and </reference>, and a candidate answer, often longer, between <candidate> and </candidate>.
Does the candidate say all that the reference says? The question tells what the two are about. How numbers are written
makes no difference. The candidate may give a currency that the reference leaves out, if it makes sense for the
question; a currency that the reference gives must be in the candidate too.
Give your answer in one word, Yes or No."""

_CLEAR = "Is the response clear and readable, and does it answer the question without confusing its reader?"
_CONCISE = "Is the response concise: complete, and without padding, filler or repetition?"


class GeneratedAnswerEvaluator:
    """Judges `x.response`.

    Args:
        judge, x: judge and test context, given by name where this is a fixture.
        fail_on_mismatch: whether an answer that does not agree with the reference fails the test at once; otherwise
            it loses half of the reward.
        rubrics_threshold: reward below which the test fails; 0 fails none.
        max_workers: maximum number of questions in flight.
    """

    def __init__(
        self,
        judge: Judge,
        x: TestContext,
        fail_on_mismatch: bool = True,
        rubrics_threshold: float = 0.7,
        max_workers: int = 2,
    ) -> None:
        self._judge = judge
        self._x = x
        self._fail_on_mismatch = fail_on_mismatch
        self._threshold = rubrics_threshold
        self._rubric_judge = RubricJudge(judge, x, max_workers=max_workers)

    def candidate_answer_matches_reference(
        self, query: str, reference: str, candidate: str, fail_on_mismatch: bool = True
    ) -> bool:
        """True when the candidate says all that the reference says; else fails the test if `fail_on_mismatch`."""
        parts = {"query": query, "reference": reference, "candidate": candidate}
        user = "".join(f"<{tag}>\n{safe_tag_encode(text)}\n</{tag}>\n" for tag, text in parts.items())
        matches = self._judge.evaluate_bool(_SAME_MEANING, user)
        if fail_on_mismatch and not matches:
            raise AssertionError(f"{_shortened(candidate)!r} does not say what {_shortened(reference)!r} says")
        return matches

    def evaluate(
        self,
        reference: str,
        ref_doc: str | None = None,
        ref_loc: str | None = None,
        fail_on_mismatch: bool | None = None,
        rubrics_threshold: float | None = None,
        *,
        ref_pages: str | None = None,
    ) -> bool:
        """True when the response says what the reference says; a reward below the threshold fails the test.

        Args:
            reference: answer to compare with.
            ref_doc: document that the response should name.
            ref_loc: place in the document (`location_in_words`); `ref_pages` is its older name.
            fail_on_mismatch, rubrics_threshold: override the evaluator's own.
        """
        must_match = self._fail_on_mismatch if fail_on_mismatch is None else fail_on_mismatch
        threshold = self._threshold if rubrics_threshold is None else rubrics_threshold
        response, query = self._x.response, self._x.query()
        rubrics = _rubrics(ref_doc, ref_pages if ref_loc is None else ref_loc)
        if must_match:
            self.candidate_answer_matches_reference(query, reference, response)
        else:
            right = f'The question was "{query}". Does the response say all that this answer says: "{reference}"?'
            rubrics.insert(0, RubricConfig(criterion=right, weight=sum(rubric.weight for rubric in rubrics)))
        result = self._rubric_judge.evaluate(response, rubrics, global_threshold=threshold, throw_on_failure=True)
        return must_match or bool(result.scores[0].rating)


def _rubrics(ref_doc: str | None, ref_loc: str | None) -> list[RubricConfig]:
    criteria = [_CLEAR, _CONCISE]
    if ref_loc is not None:
        criteria.insert(0, f"Does the response say that it goes by {location_in_words(ref_loc)} of its source?")
    if ref_doc is not None:
        criteria.insert(0, f"Does the response name the document '{ref_doc}' as its source?")
    return [RubricConfig(criterion=criterion, weight=1.0) for criterion in criteria]


_PLACE = re.compile(r"(?:(?P<sheet>.+):)?(?P<kind>[pr])(?P<first>\d+)(?:-(?P<last>\d+))?", re.IGNORECASE)
_UNITS = {"p": "page", "r": "row"}


def location_in_words(ref_loc: str) -> str:
    """One or several places in words: `,` separates alternatives, `+` places that must all be named.

    `p3` is a page, `r42` a row of a table, `July:r42` a row of its sheet July, `p3-5` a range, `Multiple_Sheets` a
    whole table; any other text is kept as it is.
    """
    choices = [[_place_in_words(place.strip()) for place in choice.split("+")] for choice in ref_loc.split(",")]
    return ", or ".join(" and ".join(filter(None, (", ".join(places[:-1]), places[-1]))) for places in choices)


def _place_in_words(place: str) -> str:
    if place == "Multiple_Sheets":
        return "several sheets"
    found = _PLACE.fullmatch(place)
    if found is None or (found["sheet"] and found["kind"].lower() == "p"):
        return place
    unit, sheet = _UNITS[found["kind"].lower()], f" in sheet '{found['sheet']}'" if found["sheet"] else ""
    if found["last"] is None:
        return f"{unit} {found['first']}{sheet}"
    return f"{unit}s {found['first']} to {found['last']}{sheet}"


def _shortened(text: str, limit: int = 200) -> str:
    return text if len(text) <= limit else text[:limit] + "..."
