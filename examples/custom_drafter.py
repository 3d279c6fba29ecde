"""Write your own drafter: everything in speculation except the guessing is done for you.

    python examples/custom_drafter.py MODEL_FOLDER ["a prompt" ...]

A drafter is any object with two methods, `propose` and `forget` (trtspec.protocols.Drafter). It cannot do harm: the
target verifies every draft, so wrong ones cost time and never change the text. A drafter may raise or answer nonsense
for a request. Then one warning and the request's output (`drafter_error`) report it, and the request goes on without
drafts.

The drafter below needs no model. It remembers, over all requests, which token came after each pair of tokens, and
follows that trail. This is good for a service whose answers resemble each other.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from trtspec import LLM, SamplingParams
from trtspec.core import Proposal
from trtspec.protocols import DraftRequest


class SuccessorDrafter:
    """A drafter whose guess is the token that last followed the same two tokens, in this or any earlier request."""

    def __init__(self) -> None:
        self.successor: dict[tuple[int, ...], int] = {}
        self.num_learnt: dict[int, int] = {}  # request id -> number of its tokens that have been learnt

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        """Return a row for each request, in the same order. Called once a step with every request that wants drafts."""
        K = max(request.max_draft_len for request in requests)
        draft_tokens = torch.zeros(len(requests), K, dtype=torch.int64)  # ids of the target's vocabulary
        draft_lens = torch.zeros(len(requests), dtype=torch.int32)  # number of drafts in each row; 0 = no idea
        for row, request in enumerate(requests):
            self._learn(request)
            drafts = self._follow(request.tokens[-2:], request.max_draft_len)
            draft_tokens[row, : len(drafts)] = torch.tensor(drafts, dtype=torch.int64)
            draft_lens[row] = len(drafts)
        return Proposal(draft_tokens, draft_lens)

    def forget(self, request_id: int) -> None:
        """Drop the state of a request that has ended. What was learnt from it stays."""
        self.num_learnt.pop(request_id, None)

    def _learn(self, request: DraftRequest) -> None:
        """Learn the new tokens of a request; `request.tokens` is the prompt and the output so far, and only grows."""
        tokens = request.tokens
        for i in range(max(self.num_learnt.get(request.request_id, 0), 2), len(tokens)):
            self.successor[tokens[i - 2], tokens[i - 1]] = tokens[i]
        self.num_learnt[request.request_id] = len(tokens)

    def _follow(self, last_two: Sequence[int], most: int) -> list[int]:
        """Up to `most` guesses, each found by the two tokens before it."""
        trail = list(last_two)
        for _ in range(most):
            guess = self.successor.get(tuple(trail[-2:]))
            if guess is None:
                break
            trail.append(guess)
        return trail[len(last_two) :]


def main(folder: str, prompts: Sequence[str]) -> None:
    """Generate with and without the drafter; the text is the same, the number of steps is not."""
    params = SamplingParams(temperature=0.0, max_tokens=64)
    # The drafter may be an object, a class, or the path of a class: drafter="my_package.my_module:MyDrafter".
    speculation = {"method": "custom_class", "drafter": SuccessorDrafter(), "num_speculative_tokens": 4}
    with LLM(folder) as plain, LLM(folder, speculation) as llm:
        for prompt in prompts:
            (expected,) = plain.generate(prompt, params)
            (output,) = llm.generate(prompt, params)
            same = output.outputs[0].token_ids == expected.outputs[0].token_ids
            print(f"{prompt}{output.outputs[0].text}")
            print(f"    {output.steps} steps instead of {expected.steps}, ", end="")
            print(f"{output.tokens_per_step:.2f} tokens per step, {'same text' if same else 'TEXT DIFFERS'}\n")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit('usage: python examples/custom_drafter.py MODEL_FOLDER ["a prompt" ...]')
    main(sys.argv[1], sys.argv[2:] or ["for i in range(", "for i in range("])
