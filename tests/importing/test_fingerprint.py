"""What fingerprint runs give to the pipeline's code in place of a component's outputs."""

from __future__ import annotations

import torch
from torch import nn

from graphrun.diffusers_.importing.fingerprint import FingerprintRun
from graphrun.graph.loading import load
from graphrun.sim import PLANNED


class Author(nn.Module):
    """Writes three tokens after a prompt's."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(4, 8)

    def generate(self, tokens: torch.Tensor) -> torch.Tensor:
        scores = self.scores(torch.zeros(len(tokens), 3, 4, device=self.scores.weight.device))
        return torch.cat([tokens, scores.argmax(-1)], dim=1)


def test_generated_tokens_repeat_those_of_the_prompt() -> None:
    """Pipelines decode them to a text and refuse an empty one, as FLUX.3 does; token 0 is often
    one that decodes to none."""
    with torch.device("meta"):
        author = Author()
    run = FingerprintRun(load("flux-tiny"), {"author": author}, lambda: None)
    with run.record_run():
        tokens = author.generate(torch.tensor([[5, 6, 7]], device=PLANNED))
        assert tokens.tolist()[0][:3] == [5, 6, 7]
        assert set(tokens.tolist()[0][3:]) <= {5, 6, 7}
    assert [str(call) for call in run.component_calls] == ["author.generate"]
