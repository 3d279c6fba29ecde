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
from trtspec.engine.guided_drafts import draft_source, follow_grammar, outcomes_of
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


def drafted(guide: Guide, own: list[int], most: int) -> list[int]:
    """The drafts of a chain of which a drafter made `own`."""
    return guide.extend(own[: len(guide.allowed(own[:most], range(-1, most - 1)))], most)


def state(guide: Guide) -> tuple[list[int], str]:
    """What may come next, and the spacing so far."""
    mask = torch.full((1, guide.num_words), -1, dtype=torch.int32)
    guide.fill(mask, [])
    return [int(word) for word in mask[0]], str(vars(guide._spacing))


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
        drafts = drafted(guide, [], 40)
        assert state(guide) == before, "no state changes"
        assert guide.allowed(drafts, range(-1, len(drafts) - 1)) == list(range(len(drafts)))
        assert drafted(guide, [], 2) == drafts[:2] or len(drafts) < 2
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
    assert drafted(guide, [], 30) == []
    assert drafted(guide, hello, len(hello)) == hello
    assert drafted(guide, hello, 1) == hello[:1]
    rest = drafted(guide, hello, 30)[len(hello) :]
    assert written(tokenizer, rest) == "rld"
    wrong = tokenizer.encode("hello you", add_special_tokens=False)
    assert written(tokenizer, drafted(guide, wrong, 30)) == "hello world"
    assert drafted(guide, tokenizer.encode("?", add_special_tokens=False), 30) == []
    guide.accept([*tokenizer.encode("bye world?", add_special_tokens=False)])
    assert drafted(guide, wrong, 5) == [END]
    assert drafted(guide, [END, *wrong], 5) == [END], "nothing comes after the end"
    guide.accept([END])
    assert drafted(guide, wrong, 5) == []


def test_special_tokens_are_no_text(capfd: pytest.CaptureFixture[str]) -> None:
    """A drafter may guess special tokens. xgrammar would write a warning for each."""
    tokenizer = TOKENIZERS["byte_level"]
    guide = guide_of(tokenizer, StructuredOutputs(regex="a+"))
    special = [token for token in range(tokenizer.vocab_size) if tokenizer.is_special(token) and token != END]
    assert drafted(guide, [*special, tokenizer.vocab_size + 3], 5) == tokenizer.encode("a", add_special_tokens=False)
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
        assert request.is_cut == (drafts is bad)
        assert draft_source(request) == 5 or drafts is bad
    request = request_of(guide, tokenizer.encode("x", add_special_tokens=False))
    follow_grammar(request, None, 20, 20)
    assert request.drafts == []
    guide.accept(tokenizer.encode("bye", add_special_tokens=False))
    request = request_of(guide, bad)
    follow_grammar(request, None, 20, 20)
    assert written(tokenizer, request.drafts) == " world$"
    assert draft_source(request) == ~5
    assert request.kv.draft_kv_len == 10


TREE = DraftTree(parse_tree("[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]"))


@pytest.mark.parametrize("tree", [TREE, DynamicTree(3, 6, 2)], ids=["static", "dynamic"])
def test_trees_follow_the_grammar(tree: Tree) -> None:
    """Where the shape is free, forbidden nodes go with their descendants, and the first line goes on as it must.

    Where it is not, they stay, unless no node is allowed. Then the first line is what must come next.
    """
    tokenizer = TOKENIZERS["byte_level"]
    a, b, c, d = (tokenizer.encode(one, add_special_tokens=False)[0] for one in "abcd")
    guide = guide_of(tokenizer, StructuredOutputs(regex="(ab|b[cd])dd"))
    nodes = [c, b, a, b, c, d]  # node 0 is forbidden; 1 and 4 are allowed
    request = request_of(guide, nodes, TREE.parents)
    follow_grammar(request, tree, 6, 3)
    if tree.is_dynamic:
        assert (request.drafts, list(request.draft_parents)) == ([b, c, d], [-1, 0, 1])
    else:
        assert request.drafts == nodes
    assert (request.num_own_drafts, request.is_cut) == (2, True)
    guide.accept([a])
    wrong = [c, a, a, b, c, d]
    request = request_of(guide, wrong, TREE.parents)
    follow_grammar(request, tree, 6, 3)
    wanted = guide.next_tokens(3)
    assert wanted
    assert (request.num_own_drafts, draft_source(request)) == (0, ~5)
    if tree.is_dynamic:
        assert (request.drafts, list(request.draft_parents)) == (wanted, list(range(-1, len(wanted) - 1)))
    else:
        line = [0, 2, 5][: len(wanted)]
        assert [request.drafts[node] for node in line] == wanted
        assert [one for node, one in enumerate(request.drafts) if node not in line] == [
            one for node, one in enumerate(wrong) if node not in line
        ]
    choice = guide_of(tokenizer, StructuredOutputs(regex="(ab|b[cd])dd"))
    request = request_of(choice, [c, d, a, b, c, d], TREE.parents)
    follow_grammar(request, tree, 6, 3)
    assert request.drafts == [], "nothing is allowed, and nothing is forced"


def test_a_forced_line_keeps_the_limits_of_its_tree() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    a, b, c = (tokenizer.encode(one, add_special_tokens=False)[0] for one in "abc")
    for most, depth, count in ((9, 9, 4), (9, 3, 2), (4, 9, 1), (3, 9, 0)):
        guide = guide_of(tokenizer, StructuredOutputs(regex="[ab]qrst"))
        request = request_of(guide, [a, c, b], (-1, -1, -1))
        follow_grammar(request, DynamicTree(depth, most, 2), most, depth)
        forced = guide.extend([a], 9)[1:]
        assert len(forced) >= 4, "some tokens and the end"
        allowed = min(most - 2, depth - 1, len(forced))
        assert request.drafts == [a, b, *forced[:allowed]]
        assert list(request.draft_parents) == [-1, -1, *[0, *range(2, 10)][:allowed]]
        assert allowed >= count


def test_outcomes_tell_drafters_and_grammars_apart() -> None:
    """A forbidden draft counts as a rejected one of the drafter. What is forced counts for the grammar alone."""
    tokenizer = TOKENIZERS["byte_level"]
    hello = tokenizer.encode("hello", add_special_tokens=False)
    guide = guide_of(tokenizer, StructuredOutputs(regex="(hello|bye) world"))
    request = request_of(guide, [*hello, END])
    follow_grammar(request, None, 20, 20)
    own, total = len(hello), len(request.drafts)
    assert total > own
    assert outcomes_of(request, total, total) == [(5, own + 1, own), (~5, total - own, total - own)]
    assert outcomes_of(request, total, 0) == [(5, own + 1, 0)]
    assert outcomes_of(request, own, own) == [(5, own + 1, own)], "its next draft was forbidden all the same"
    guide.accept(hello)
    request = request_of(guide, hello)
    follow_grammar(request, None, 20, 20)
    assert outcomes_of(request, len(request.drafts), 1) == [(5, 1, 0), (~5, len(request.drafts), 1)]
    free = request_of(guide, hello)
    free.guide = None
    assert outcomes_of(free, 3, 2) == [(5, 3, 2)]
    assert outcomes_of(free, 0, 0) == []
    free.looked_up = True
    assert draft_source(free) == ~5, "lookups next to a model count apart from its drafts"
    assert outcomes_of(free, 3, 2) == [(~5, 3, 2)]


class Faulty:
    """A matcher whose second search for forced text fails."""

    def __init__(self, matcher: Any, error: Exception) -> None:
        self.matcher, self.error, self.calls = matcher, error, 0

    def find_jump_forward_string(self) -> str:
        self.calls += 1
        if self.calls == 2:
            raise self.error
        return str(self.matcher.find_jump_forward_string())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.matcher, name)


def test_an_error_leaves_the_state_as_it_was() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    guide = guide_of(tokenizer, StructuredOutputs(json=PERSON))
    guide.accept(tokenizer.encode('{"name": "x"', add_special_tokens=False))
    before, real = state(guide), guide._matcher
    comma = tokenizer.encode(",", add_special_tokens=False)
    guide._matcher = Faulty(real, RuntimeError("lost its way"))
    with pytest.raises(RuntimeError, match="lost"):
        guide.extend(comma, 20)
    guide._matcher = real
    assert state(guide) == before
    guide._matcher = Faulty(real, UnicodeDecodeError("utf-8", b"\xe5", 0, 1, "unexpected end of data"))
    assert guide.extend(comma, 20)[:1] == comma
    guide._matcher = real
    assert state(guide) == before


def test_the_end_follows_all_of_the_text() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    guide = guide_of(tokenizer, StructuredOutputs(grammar='root ::= "abc" "\\n"'))
    tokens = guide.next_tokens(9)
    assert tokenizer.decode(tokens) == "abc\n"
    assert tokens[-1] == END
    silent = TOKENIZERS["no_decoder"]  # has no token for any of these characters
    assert GrammarCompiler(silent, 8).guides(StructuredOutputs(regex="a"), {3}, 1)[0].next_tokens(9) in ([0, 3], [0])


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
            drafts = drafted(guide, own, 6)
            assert len(drafts) <= 6
            assert guide.allowed(drafts, range(-1, len(drafts) - 1)) == list(range(len(drafts)))
            assert state(guide) == before
            replaced += bool(drafts) and drafts[:1] != own[:1]
            some = [token for token in range(tokenizer.vocab_size) if before[0][token // 32] >> token % 32 & 1]
            taken = drafts[:2] if drafts and rng.random() < 0.7 else [rng.choice(some)]
            guide.accept(taken)
            if END in taken:
                break
    assert replaced > 20
