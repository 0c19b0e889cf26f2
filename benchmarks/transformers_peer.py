"""What the sampler is compared with: `transformers.generate` in torch, with our weights, in a loop of turns."""

from __future__ import annotations

from typing import Any

import numpy as np

from tbx_jax.models import Model, Params
from tbx_jax.models.hub_config import write_config
from tbx_jax.policies.weights import model_tensors


class GeneratePeer:
    """A batch of conversations in lockstep: padded on the left, one call of `generate` for each turn.

    Args:
        model: our model, of a published type.
        params: its parameters.
        end_ids: tokens that end a turn.
        max_turn_tokens: token limit of a turn; a longer one is cut off and ends its conversation.
    """

    def __init__(self, model: Model, params: Params, end_ids: frozenset[int], max_turn_tokens: int) -> None:
        import torch
        import transformers

        self._torch, self._ends = torch, sorted(end_ids)
        self.version = torch.__version__
        fields: dict[str, Any] = write_config(model.config, model.vocabulary, "float32")
        config = transformers.AutoConfig.for_model(**fields)
        self._model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        tensors = {name: torch.tensor(np.array(array)) for name, array in model_tensors(model, params).items()}
        problems = self._model.load_state_dict(tensors, strict=False)
        left = set(problems.missing_keys) - ({"lm_head.weight"} if model.config.tie_embeddings else set())
        if left or problems.unexpected_keys:
            raise RuntimeError(f"weights do not fit the peer: {left}, {problems.unexpected_keys}")
        self._model.tie_weights()
        self._settings = transformers.GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max_turn_tokens,
            eos_token_id=self._ends,
            pad_token_id=self._ends[0],
        )

    @property
    def threads(self) -> int:
        return self._torch.get_num_threads()

    @threads.setter
    def threads(self, number: int) -> None:
        self._torch.set_num_threads(number)

    def run(self, texts: np.ndarray, prompt_tokens: int, answer_tokens: int, batch: int) -> int:
        """Run all conversations, `batch` at a time; returns the number of sampled tokens."""
        written = 0
        for start in range(0, len(texts), batch):
            group = texts[start : start + batch]
            talks = [row[:prompt_tokens].tolist() for row in group]
            left = [row[prompt_tokens:].tolist() for row in group]
            while talks:
                turns = self._turns(talks)
                written += sum(map(len, turns))
                going_on = [place for place, turn in enumerate(turns) if left[place] and turn[-1] in set(self._ends)]
                talks = [talks[place] + turns[place] + left[place][:answer_tokens] for place in going_on]
                left = [left[place][answer_tokens:] for place in going_on]
            # A conversation ends with the turn after its last given text.
        return written

    def _turns(self, talks: list[list[int]]) -> list[list[int]]:
        """The next turn of each conversation."""
        torch = self._torch
        longest = max(map(len, talks))
        pads = [longest - len(talk) for talk in talks]
        tokens = torch.tensor([[self._ends[0]] * pad + talk for pad, talk in zip(pads, talks, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads])
        with torch.inference_mode():
            whole = self._model.generate(tokens, attention_mask=mask, generation_config=self._settings)
        ends = set(self._ends)
        turns = []
        for row in whole[:, longest:].tolist():
            stop = next((place for place, token in enumerate(row) if token in ends), len(row) - 1)
            turns.append(row[: stop + 1])
        return turns
