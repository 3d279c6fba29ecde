"""Drafts from grammars: what must come next is drafted, what is not allowed is not, and no state changes."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch

from tests.unit.tokenizer_kinds import TOKENIZERS
from trtspec import SamplingParams, StructuredOutputs
from trtspec.config.tree import DraftTree, DynamicTree, Tree, parse_tree
from trtspec.engine.guided_drafts import draft_source, follow_grammar
from trtspec.engine.request import Request
from trtspec.kv.blocks import SequenceKV
from trtspec.sampling_params import RequestSampling
from trtspec.text import Tokenizer
from trtspec.verify.grammar import GrammarCompiler, Guide
from trtspec.verify.grammar_drafts import Spacing

pytest.importorskip("xgrammar", reason="pip install 'trtspec[guided]'")

SPARE = 40
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "colour": {"enum": ["cyan", "magenta"]}, "age": {"type": "integer"}},
    "required": ["name", "colour", "age"],
    "additionalProperties": False,
}
VALUE = {"name": 'Ann, "the" 2nd', "colour": "magenta", "age": 34}
STYLES: dict[str, dict[str, Any]] = {"spaced": {}, "dense": {"separators": (",", ":")}, "indented": {"indent": 2}}
END = 1


def guide_of(tokenizer: Tokenizer, wanted: StructuredOutputs) -> Guide:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size + SPARE).guides(wanted, {END}, 1)[0]


def tokens_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of a text that follows other text."""
    before = tokenizer.encode("\n", add_special_tokens=False)
    ids = tokenizer.encode("\n" + text, add_special_tokens=False)
    assert ids[: len(before)] == before
    return ids[len(before) :]


def written(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """Text of tokens that follow other text; the end is "$"."""
    before = tokenizer.encode("\n", add_special_tokens=False)
    text = tokenizer.decode([*before, *(token for token in tokens if token != END)])
    return text.removeprefix("\n") + "$" * tokens.count(END)


def state(guide: Guide) -> list[int]:
    mask = torch.full((1, guide.num_words), -1, dtype=torch.int32)
    guide.fill(mask, [])
    return [int(word) for word in mask[0]]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_what_must_come_next_is_drafted(name: str, style: str) -> None:
    """Whatever the style of the JSON, its later field names and its end are drafted, and all drafts are allowed."""
    tokenizer = TOKENIZERS[name]
    guide = guide_of(tokenizer, StructuredOutputs(json=PERSON))
    text = json.dumps(VALUE, **STYLES[style])
    left, found = [*tokens_of(tokenizer, text), END], []
    while left:
        before = state(guide)
        drafts = guide.draft([], 40)
        assert state(guide) == before, "no state changes"
        assert guide.allowed(drafts, range(-1, len(drafts) - 1)) == list(range(len(drafts)))
        assert guide.draft([], 2) == drafts[:2] or len(drafts) < 2
        right = next((i for i, pair in enumerate(zip(drafts, left, strict=False)) if pair[0] != pair[1]), len(drafts))
        found += left[:right]
        guide.accept(left[: right + 1])
        left = left[right + 1 :]
    told = written(tokenizer, found)
    assert 'colour"' in told.replace(" ", "")
    assert 'age"' in told
    assert "$" in told, "the end"
    assert not any(word in told for word in ("Ann", "34")), "nothing that is free is known"


def test_a_real_choice_ends_what_must_come_next() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    guide = guide_of(tokenizer, StructuredOutputs(regex="(red|green) (a|b)c+"))
    assert guide.next_tokens(9) == []
    guide.accept(tokenizer.encode("r", add_special_tokens=False))
    assert written(tokenizer, guide.next_tokens(9)) == "ed"  # not the blank: it may belong to what follows
    guide.accept(tokenizer.encode("ed b", add_special_tokens=False))
    assert written(tokenizer, guide.next_tokens(9)) == "c"
    guide.accept(tokenizer.encode("c", add_special_tokens=False))
    assert guide.next_tokens(9) == [], "more, or the end"


def test_own_drafts_come_first_and_are_cut_where_they_leave_the_grammar() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    guide = guide_of(tokenizer, StructuredOutputs(regex="(hello|bye) world(!|\\?)"))
    hello = tokenizer.encode("hello wo", add_special_tokens=False)
    assert guide.draft([], 30) == []
    assert guide.draft(hello, len(hello)) == hello
    assert guide.draft(hello, 1) == hello[:1]
    rest = guide.draft(hello, 30)[len(hello) :]
    assert written(tokenizer, rest) == "rld"
    wrong = tokenizer.encode("hello you", add_special_tokens=False)
    assert written(tokenizer, guide.draft(wrong, 30)) == "hello world"
    assert guide.draft(tokenizer.encode("?", add_special_tokens=False), 30) == []
    guide.accept([*tokenizer.encode("bye world?", add_special_tokens=False)])
    assert guide.draft(wrong, 5) == [END]
    assert guide.draft([END, *wrong], 5) == [END], "nothing comes after the end"
    guide.accept([END])
    assert guide.draft(wrong, 5) == []


def test_special_tokens_are_no_text(capfd: pytest.CaptureFixture[str]) -> None:
    """A drafter may guess special tokens. xgrammar would write a warning for each."""
    tokenizer = TOKENIZERS["byte_level"]
    guide = guide_of(tokenizer, StructuredOutputs(regex="a+"))
    special = [token for token in range(tokenizer.vocab_size) if tokenizer.is_special(token) and token != END]
    assert guide.draft([*special, tokenizer.vocab_size + 3], 5) == tokenizer.encode("a", add_special_tokens=False)
    assert "Warning" not in "".join(capfd.readouterr())


def test_spacing_follows_the_text() -> None:
    spacing = Spacing()
    assert (spacing.before("{"), spacing.before('"')) == ("", "")
    spacing.read('{\n  "a, b": 1,')
    assert spacing.before('"') == " ", "as is usual, before there was any"
    spacing.read('\n  "c":[1,2],')
    assert spacing.before('"') == "\n  "
    spacing.read("\n")
    assert spacing.before('"') == "  ", "the rest of it"
    spacing.read("\t")
    assert spacing.before('"') == "", "another than before"
    other = spacing.copy()
    other.read('"\\"x" ')
    assert other.before(":") == ""
    assert spacing.before('"') == ""


def request_of(guide: Guide, drafts: list[int], parents: tuple[int, ...] = ()) -> Request:
    request = Request(
        request_id=5,
        tokens=[0] * 10,
        prompt_len=1,
        sampling=RequestSampling.of(SamplingParams(), 0, 1, (), {}),
        length_limit=100,
        min_tokens=0,
        eos_ids=frozenset(),
        stop_token_ids=frozenset(),
        include_stop=False,
        text=None,
        guide=guide,
        drafts=drafts,
        kv=SequenceKV(committed=9, draft_kv_len=10 + len(drafts) - 1),
    )
    request.draft_parents = parents
    return request


def test_draft_kv_of_replaced_drafts_is_not_valid() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    guide = guide_of(tokenizer, StructuredOutputs(regex="(hello|bye) world"))
    good = tokenizer.encode("hello wo", add_special_tokens=False)
    bad = tokenizer.encode("hello you", add_special_tokens=False)
    same = next(i for i, pair in enumerate(zip(good, bad, strict=False)) if pair[0] != pair[1])
    for drafts, valid in ((good, 10 + len(good) - 1), (bad, 10 + same)):
        request = request_of(guide, drafts)
        follow_grammar(request, None, 20, 20)
        assert request.kv.draft_kv_len == valid
        assert not request.is_grammar_led
        assert draft_source(request) == 5
    request = request_of(guide, tokenizer.encode("x", add_special_tokens=False))
    follow_grammar(request, None, 20, 20)
    assert request.drafts == []
    guide.accept(tokenizer.encode("bye", add_special_tokens=False))
    request = request_of(guide, bad)
    follow_grammar(request, None, 20, 20)
    assert written(tokenizer, request.drafts) == " world$"
    assert request.is_grammar_led
    assert draft_source(request) == ~5
    assert request.kv.draft_kv_len == 10


TREE = DraftTree(parse_tree("[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]"))


@pytest.mark.parametrize("tree", [TREE, DynamicTree(3, 6, 2)], ids=["static", "dynamic"])
def test_trees_follow_the_grammar(tree: Tree) -> None:
    """Forbidden nodes and their descendants go where the shape is free. If no node is allowed, a chain is drafted."""
    tokenizer = TOKENIZERS["byte_level"]
    a, b, c, d = (tokenizer.encode(one, add_special_tokens=False)[0] for one in "abcd")
    guide = guide_of(tokenizer, StructuredOutputs(regex="(ab|b[cd])dd"))
    nodes = [c, b, a, b, c, d]  # node 0 is forbidden; 1 and 4 are allowed
    request = request_of(guide, nodes, TREE.parents)
    follow_grammar(request, tree, 6, 3)
    if tree.is_dynamic:
        assert (request.drafts, list(request.draft_parents)) == ([b, c], [-1, 0])
    else:
        assert request.drafts == nodes
    assert not request.is_grammar_led
    guide.accept([a])
    request = request_of(guide, [c, a, a, b, c, d], TREE.parents)
    follow_grammar(request, tree, 6, 3)
    wanted = guide.next_tokens(3)
    assert wanted
    assert request.is_grammar_led
    if tree.is_dynamic:
        assert (request.drafts, list(request.draft_parents)) == (wanted, list(range(-1, len(wanted) - 1)))
    else:
        line = [0, 2, 5][: len(wanted)]
        assert [request.drafts[node] for node in line] == wanted
        others = [node for node in range(6) if node not in line]
        assert [request.drafts[node] for node in others] == [[c, a, a, b, c, d][node] for node in others]


def test_random_texts_of_random_schemas_are_never_left() -> None:
    """Whatever a drafter says, every draft that is kept is allowed, and the state does not change."""
    tokenizer = TOKENIZERS["byte_level"]
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size + SPARE)
    kinds: list[dict[str, Any]] = [{"type": "string"}, {"type": "integer"}, {"type": "boolean"}, {"enum": ["x", "yz"]}]
    rng = random.Random(0)
    replaced = 0
    for _ in range(12):
        names = rng.sample(["alpha", "beta", "gamma ray", "δ", "e_1"], rng.randint(1, 4))
        fields = {name: rng.choice(kinds) for name in names}
        schema = {"type": "object", "properties": fields, "required": names[: rng.randint(0, len(names))]}
        guide = compiler.guides(StructuredOutputs(json=schema), {END}, 1)[0]
        for _ in range(25):
            before = state(guide)
            own = [rng.randrange(tokenizer.vocab_size + SPARE) for _ in range(3)]
            drafts = guide.draft(own, 6)
            assert len(drafts) <= 6
            assert guide.allowed(drafts, range(-1, len(drafts) - 1)) == list(range(len(drafts)))
            assert state(guide) == before
            replaced += bool(drafts) and drafts[:1] != own[:1]
            some = [token for token in range(tokenizer.vocab_size) if before[token // 32] >> token % 32 & 1]
            taken = drafts[:2] if drafts and rng.random() < 0.7 else [rng.choice(some)]
            guide.accept(taken)
            if END in taken:
                break
    assert replaced > 20
