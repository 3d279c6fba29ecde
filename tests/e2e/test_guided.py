"""Guided texts: each has the form that was asked for, and speculation changes none of them."""

from __future__ import annotations

import builtins
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from tests.async_stand_in import HostQueue
from tests.e2e.tiny import assert_all_blocks_free, make_target, perturbed
from tests.head_checkpoints import make_eagle3
from trtspec import LLM, RequestOutput, SamplingParams, StructuredOutputs
from trtspec.build.build import build_engine
from trtspec.config.engine import EngineConfig
from trtspec.core import Proposal
from trtspec.errors import DependencyError, RequestError
from trtspec.interop.reading import read_speculative_config
from trtspec.protocols import DraftRequest
from trtspec.verify.grammar import Guide

pytest.importorskip("xgrammar", reason="pip install 'trtspec[guided]'")

# Every character that JSON needs, and pieces of several characters. Id 0 ends a text.
CHARACTERS = [chr(code) for code in range(32, 127)]
PIECES = ["</s>", *CHARACTERS, '{"', '":', '",', '"}', "true", "null", "10", "é", "ab"]
EOS, BLANK = 0, PIECES.index(" ")
LIMITS: dict[str, Any] = {"block_size": 4, "max_batch_size": 4}

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "kind": {"enum": ["red", "green", "blue"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "kind", "count", "tags"],
}
REGEX = r"[a-c]{2,5}-(10|7)+x?"
CHOICES = ["yes", "no", 'may"be', "yesterday"]
FORMS = {
    "json": StructuredOutputs(json=SCHEMA),
    "regex": StructuredOutputs(regex=REGEX),
    "choice": StructuredOutputs(choice=CHOICES),
    "grammar": StructuredOutputs(grammar='root ::= "(" item ("," item){1,4} ")"\nitem ::= [0-9] | "ab"\n'),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_target(tmp_path_factory.mktemp("guided"), vocab_size=len(PIECES) + 5, num_hidden_layers=3)
    ids = {piece: token for token, piece in enumerate(PIECES)}
    backend = tokenizers.Tokenizer(models.WordLevel(ids, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([PIECES[EOS]])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}', encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def speculation(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("drafts")
    head = make_eagle3(folder, target, (0, 1), tuple(range(len(PIECES))))
    return {
        "grammar": {"method": "grammar"},
        "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
        "trees": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, "max_total_draft_tokens": 7},
        "draft": {"method": "draft_model", "model": str(perturbed(target, 0.1, folder))},
        "eagle3": {"method": "eagle3", "model": str(head)},
        "static tree": {"method": "eagle3", "model": str(head), "speculative_token_tree": "[(0,), (1,), (0, 0)]"},
        "two engines": {"method": "eagle3", "model": str(head), "one_engine": False},
        "looked up": {"method": "eagle3", "model": str(head), "sa_config": {"threshold": 2}},
        "grown tree": {
            "method": "eagle3",
            "model": str(head),
            "max_total_draft_tokens": 7,
            "dynamic_tree_max_topK": 2,
        },
    }


def jobs() -> tuple[list[str], list[SamplingParams], list[str]]:
    """Prompts, their parameters, and the form of each text.

    Blanks have a bias against them: without it, a random model writes nothing else.
    """
    prompts, params, forms = [], [], []
    for i in range(24):
        form = list(FORMS)[i % 4]
        prompts.append(["{}", 'a "name": ', "10,10,10", "yes no yes"][i % 3])
        params.append(
            SamplingParams(
                temperature=(0.0, 1.0, 3.0)[i % 3],
                seed=i,
                max_tokens=100,
                n=2 if i % 5 == 0 else 1,
                logit_bias={BLANK: -100.0},
                structured_outputs=FORMS[form],
            )
        )
        forms.append(form)
    return prompts, params, forms


def check_form(form: str, text: str) -> None:
    if form == "json":
        value = json.loads(text)
        assert list(value) == SCHEMA["required"]
        assert len(value["name"]) <= 4
        assert value["kind"] in ("red", "green", "blue")
        assert isinstance(value["count"], int)
        assert 0 <= value["count"] <= 120
        assert 1 <= len(value["tags"]) <= 3
        assert all(isinstance(tag, bool) for tag in value["tags"])
    elif form == "choice":
        assert text in CHOICES
    else:
        assert re.fullmatch(REGEX if form == "regex" else r"\(([0-9]|ab)(,([0-9]|ab)){1,4}\)", text)


@pytest.fixture(scope="module")
def plain(target: Path) -> list[tuple[str, list[Any]]]:
    prompts, params, forms = jobs()
    with LLM(target, **LIMITS) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for form, output in zip(forms, outputs, strict=True):
        for sample in output.outputs:
            assert sample.finish_reason == "stop", (form, sample)
            assert max(sample.token_ids) < len(PIECES)  # no id without a text
            check_form(form, sample.text)
    return told(outputs)


def told(outputs: Sequence[RequestOutput]) -> list[Any]:
    return [
        [(sample.text, list(sample.token_ids), sample.finish_reason) for sample in output.outputs] for output in outputs
    ]


@pytest.mark.parametrize(
    ("mode", "K"),
    [
        *((mode, K) for mode in ("grammar", "ngram", "trees", "draft", "eagle3") for K in (1, 3)),
        ("static tree", None),
        ("two engines", 3),
        ("looked up", 3),
        ("grammar", "auto"),
        ("eagle3", "auto"),
        ("draft", "auto"),
        ("grown tree", 3),
    ],
)
def test_speculation_changes_nothing(
    target: Path, speculation: dict[str, dict[str, Any]], plain: list[Any], mode: str, K: int | str | None
) -> None:
    """Speculation changes nothing in a cache too small for all.

    Preempted requests keep the positions of their guides.
    """
    prompts, params, _ = jobs()
    wanted = speculation[mode] | ({} if K is None else {"num_speculative_tokens": K})
    with LLM(target, wanted, num_kv_blocks=41, **LIMITS) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.get_metrics().preemptions > 0
        assert llm.get_metrics().speculation.num_accepted_tokens > 0
        assert_all_blocks_free(llm)
    assert told(outputs) == plain


@pytest.mark.parametrize("backend", ["eager", "cuda"])
def test_requests_without_a_form_decode_plainly(target: Path, plain: list[Any], work: HostQueue, backend: str) -> None:
    """Requests without a form decode plainly where grammars draft, alone and next to guided ones."""
    prompts, params, _ = jobs()
    free = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    with LLM(target, **LIMITS) as llm:
        alone = told(llm.generate(["{}"] * 2, free, use_tqdm=False))
    with LLM(target, {"method": "grammar"}, backend=backend, **LIMITS) as llm:
        assert told(llm.generate(["{}"] * 2, free, use_tqdm=False)) == alone
        assert llm.get_metrics().speculation.num_draft_tokens == 0
        assert (work.num_replayed > 10) == (backend == "cuda")
        mixed = llm.generate(["{}", *prompts], [free, *params], use_tqdm=False)
        assert told(mixed) == [alone[0], *plain]
        assert llm.get_metrics().speculation.num_accepted_tokens > 0
        assert_all_blocks_free(llm)


class Contrarian:
    """A drafter of tokens that the grammar never allows, or that come after an end."""

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        K = max(request.max_draft_len for request in requests)
        rows = [[(PIECES.index("~"), EOS)[(len(request.tokens) + i) % 2] for i in range(K)] for request in requests]
        return Proposal(torch.tensor(rows), torch.tensor([request.max_draft_len for request in requests]))

    def forget(self, request_id: int) -> None:
        """Do nothing: there is no state to drop."""


def test_drafts_that_are_forbidden_cost_no_rows(target: Path, plain: list[Any]) -> None:
    """What a drafter guesses against the grammar is not verified. What the grammar forces is, in its place."""
    wanted = {"method": "custom_class", "drafter": Contrarian(), "num_speculative_tokens": 3}
    prompts, params, _ = jobs()
    with LLM(target, wanted, **LIMITS) as llm:
        assert told(llm.generate(prompts, params, use_tqdm=False)) == plain
        [request] = llm.engine.add_request([1, 2, 3], SamplingParams(structured_outputs=FORMS["grammar"], seed=0))
        verified: list[int] = []
        while llm.engine.has_work:
            for emission in llm.engine.step():
                verified += emission.drafts
    assert request.error is None
    assert PIECES.index("~") not in verified
    assert verified.count(EOS) == 1
    assert PIECES.index("(") in verified or PIECES.index(",") in verified


def test_what_a_grammar_forces_is_accepted(target: Path) -> None:
    """A text without a choice takes a step for each K + 1 tokens, after the first, which the prompt's step draws."""
    text = "abcdefghijklmnopqrstuvw"
    form = StructuredOutputs(choice=[text])
    params = SamplingParams(temperature=1.0, seed=0, max_tokens=40, structured_outputs=form)
    with LLM(target, {"method": "grammar", "num_speculative_tokens": 5}, **LIMITS) as llm:
        [output] = llm.generate(["{}"], params, use_tqdm=False)
    assert output.outputs[0].text == text
    assert output.speculation.outcomes == {(6, 5): 4}


def test_a_guide_that_cannot_draft_costs_its_request_the_drafts_alone(
    target: Path, plain: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = Guide.extend

    def extend(self: Guide, drafts: Sequence[int], most: int) -> list[int]:
        if self is doomed:
            raise RuntimeError("lost its way")
        return real(self, drafts, most)

    monkeypatch.setattr(Guide, "extend", extend)
    with LLM(target, {"method": "grammar"}, **LIMITS) as llm:
        params = SamplingParams(temperature=0.0, structured_outputs=FORMS["choice"])
        (bad,), (good,) = (llm.engine.add_request([1, 2, 3], params) for _ in range(2))
        doomed = bad.guide
        while llm.engine.has_work:
            llm.engine.step()
    assert bad.error is None
    assert bad.output_ids == good.output_ids
    assert (bad.stats.num_draft_tokens, good.stats.num_draft_tokens > 0) == (0, True)
    assert "without drafts of its grammar" in caplog.text
    assert "RuntimeError: lost its way" in caplog.text


def test_other_requests_say_what_they_would_alone(target: Path) -> None:
    """Other requests return their usual text next to guided ones.

    A guided text ends where its form does, although the model would go on.
    """
    free = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    guided = SamplingParams(temperature=0.0, structured_outputs=StructuredOutputs(regex="(ab){3}"))
    with LLM(target, **LIMITS) as llm:
        alone = told(llm.generate(["{}"], free, use_tqdm=False))
        together = llm.generate(["{}", "{}"], [free, guided], use_tqdm=False)
    assert told(together[:1]) == alone
    assert together[1].outputs[0].text == "ababab"
    assert together[1].outputs[0].token_ids[-1] == EOS


def test_any_json_object(target: Path) -> None:
    params = SamplingParams(
        temperature=0.0,
        max_tokens=200,
        structured_outputs=StructuredOutputs(json_object=True),
        logit_bias={BLANK: -100.0, PIECES.index("}"): 9.0, PIECES.index('"}'): 9.0, PIECES.index('"'): 5.0},
    )
    with LLM(target, **LIMITS) as llm:
        output = llm.generate(["{}"], params, use_tqdm=False)[0].outputs[0]
    assert output.finish_reason == "stop"
    assert isinstance(json.loads(output.text), dict)


def test_a_stop_token_ends_a_text_only_where_it_may_end(target: Path) -> None:
    """A stop token ends a text only where its form may end, however likely the token is."""
    stop = PIECES.index("!")
    params = SamplingParams(
        temperature=0.0, stop_token_ids=[stop], logit_bias={stop: 100.0}, structured_outputs=FORMS["regex"]
    )
    with LLM(target, **LIMITS) as llm:
        output = llm.generate(["{}"], params, use_tqdm=False)[0].outputs[0]
    assert output.stop_reason == stop
    check_form("regex", output.text)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"json": '{"type": "objekt"}'}, "structured_outputs: .*objekt"),
        ({"json": "{"}, "structured_outputs: "),
        ({"regex": "(a"}, "structured_outputs: "),
        ({"grammar": "root = a"}, "structured_outputs: "),
    ],
)
def test_what_cannot_be_compiled_is_refused_in_xgrammars_words(
    target: Path, form: dict[str, Any], message: str
) -> None:
    with LLM(target, **LIMITS) as llm:
        with pytest.raises(RequestError, match=message):
            llm.generate(["{}"], SamplingParams(structured_outputs=StructuredOutputs(**form)), use_tqdm=False)
        assert llm.generate(["{}"], SamplingParams(max_tokens=2), use_tqdm=False)[0].finished


def test_a_guide_that_fails_fails_its_request_alone(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, doomed = Guide.fill, []

    def fill(self: Guide, *arguments: Any) -> None:
        if self in doomed:
            raise RuntimeError("lost its way")
        real(self, *arguments)

    monkeypatch.setattr(Guide, "fill", fill)
    with LLM(target, **LIMITS) as llm:
        params = SamplingParams(temperature=0.0, structured_outputs=FORMS["choice"])
        (bad,), (good,) = (llm.engine.add_request([1, 2, 3], params) for _ in range(2))
        assert bad.guide is not None
        doomed.append(bad.guide)
        while llm.engine.has_work:
            llm.engine.step()
        assert "lost its way" in str(bad.error)
        assert good.finish_reason == "stop"
        assert_all_blocks_free(llm)


def test_without_xgrammar_the_error_says_how_to_install_it(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *arguments: Any, **more: Any) -> Any:
        if name == "xgrammar":
            raise ImportError("No module named 'xgrammar'")
        return real(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", absent)
    with LLM(target, **LIMITS) as llm, pytest.raises(DependencyError, match=r"pip install 'trtspec\[guided\]'"):
        llm.generate(["{}"], SamplingParams(structured_outputs=FORMS["json"]), use_tqdm=False)


def test_samples_have_guides_of_their_own(target: Path) -> None:
    params = SamplingParams(n=6, temperature=5.0, seed=1, structured_outputs=FORMS["choice"])
    with LLM(target, **LIMITS) as llm:
        texts = [sample.text for sample in llm.generate(["{}"], params, use_tqdm=False)[0].outputs]
    assert set(texts) <= set(CHOICES)
    assert len(set(texts)) > 1


@pytest.mark.long
@pytest.mark.parametrize("backend", ["onnx", "aoti"])
def test_engines_say_the_same(
    target: Path, speculation: dict[str, dict[str, Any]], plain: list[Any], backend: str, tmp_path: Path
) -> None:
    """Compiled engines return the same texts. A graph that verifies and drafts has the masks as one of its inputs."""
    wanted = read_speculative_config(speculation["eagle3"] | {"num_speculative_tokens": 3})
    build_engine(target, tmp_path / "engine", wanted, EngineConfig(backend=backend, dtype="float32", **LIMITS))
    prompts, params, _ = jobs()
    with LLM(tmp_path / "engine") as llm:
        assert told(llm.generate(prompts, params, use_tqdm=False)) == plain
        assert llm.get_metrics().speculation.num_accepted_tokens > 0
