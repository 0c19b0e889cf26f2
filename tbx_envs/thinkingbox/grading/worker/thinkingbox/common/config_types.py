"""`RubricConfig`: one criterion of a rubric."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, Field, model_validator


class RubricConfig(BaseModel):
    """A criterion that a judge answers with yes or no, and the weight of a yes.

    `weight` is in points for a criterion to be met and for a `deduction`; for a `multiplicative` penalty it is the
    share of the reward that a yes removes.
    """

    criterion: str
    weight: float = Field(ge=0)
    is_penalty: bool = False
    penalty_type: Literal["deduction", "multiplicative"] = "deduction"

    @model_validator(mode="after")
    def _share_is_at_most_one(self) -> Self:
        if self.is_penalty and self.penalty_type == "multiplicative" and self.weight > 1:
            raise ValueError(f"a multiplicative penalty takes away a share from 0 to 1, not {self.weight}")
        return self
