"""Checkpoints and speculation that do not fit together.

LLM, `trtspec build` and its --dry_run print the same single line, which names the mistake and the remedy. tests/models
tests the errors that single loaders raise for single tensors; this file lists the mistakes, each by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.checkpoints import edit_tensors
from tests.e2e.refused import K2, Folders, Wrong, assert_refused, head
from tests.e2e.tiny import MASK
from trtspec.errors import CheckpointError, ConfigError, TrtSpecError, UnsupportedError, WeightsError
from trtspec.modes import SpeculativeDecodingMode as M
from trtspec.modes import words_for

# -- modes that an architecture does not support ---------------------------------------------------------------------

ARCHITECTURE: dict[str, tuple[Wrong, type[TrtSpecError], tuple[str, ...]]] = {
    **{
        f"{mode.name} on a target without MTP layers": (
            lambda f, mode=mode: (f.target, {**words_for(mode), "num_speculative_tokens": 1}),
            UnsupportedError,
            ("MTP layers of model_type='llama'", "those of mimo run", "Use another method"),
        )
        for mode in (M.MTP, M.MTP_EAGLE, M.MTP_EAGLE_ONE_MODEL)
    },
    **{
        f"{kind} for another {what}": (
            lambda f, kind=kind, what=what: (
                f.target,
                {
                    "method": {"mlp": "mlp_speculator"}.get(kind, kind),
                    "model": getattr(f, kind)(f.wide if what == "hidden size" else f.large),
                    "num_speculative_tokens": 2,
                },
            ),
            WeightsError,
            ("made for another target", "48, the target's is 32" if what == "hidden size" else "is 24", "use the head"),
        )
        for kind in ("eagle", "eagle3", "medusa", "mlp", "dflash", "dspark")
        for what in ("hidden size", "vocabulary")
    },
    **{
        f"{mode.name} with a draft that is not dense": (
            lambda f, mode=mode: (
                f.target,
                {
                    **words_for(mode),
                    "model": str(f.copy(f.draft, architectures=["MixtralForCausalLM"], pard_token=MASK)),
                    "num_speculative_tokens": 2,
                },
            ),
            UnsupportedError,
            ("architecture 'MixtralForCausalLM'", "copy-of-draft", "supported: LlamaForCausalLM"),
        )
        for mode in (M.DRAFT_TARGET, M.DRAFT_TARGET_ONE_MODEL, M.PARD)
    },
    "an EAGLE head that is no decoder": (
        lambda f: (f.target, {"method": "eagle", "model": str(f.copy(f.draft, architectures=["BertModel"])), **K2}),
        UnsupportedError,
        ("architecture 'BertModel' is no EAGLE head we run", "supported: LlamaForCausalLM"),
    ),
    "a target of another kind": (
        lambda f: (f.config_alone(architectures=["GPT2LMHeadModel"], model_type="gpt2", n_embd=768), None),
        UnsupportedError,
        ("architecture 'GPT2LMHeadModel'", "supported: LlamaForCausalLM"),
    ),
    "EAGLE3 with layers that the target does not have": (
        lambda f: (f.target, {"model": f.eagle3(capture=(0, 5)), "num_speculative_tokens": 2}),
        ConfigError,
        ("capture_layers=(0, 5)", "the target's 2 layers", "use the head trained for this target"),
    ),
    "EAGLE3 on a target too shallow to choose layers": (
        lambda f: (f.target, {"model": f.eagle3(capture=None), "num_speculative_tokens": 2}),
        ConfigError,
        ("num_hidden_layers=2 is too few", "set capture_layers"),
    ),
    "Medusa as two engines": (
        lambda f: (f.target, {"method": "medusa", "model": f.medusa(), "one_engine": False}),
        ConfigError,
        ("one_engine=False", "method='medusa'", "use one_engine=True"),
    ),
    "parallel drafting as two engines": (
        lambda f: (
            f.target,
            {
                "method": "draft_model",
                "model": str(f.copy(f.draft, pard_token=MASK)),
                "one_engine": False,
                "parallel_drafting": True,
                "num_speculative_tokens": 2,
            },
        ),
        ConfigError,
        ("one_engine=False", "parallel_drafting=True", "use one_engine=True"),
    ),
}

# -- MTP layers, heads, vocabularies -----------------------------------------------------------------------------------


def mtp(modules: int, **fields: Any) -> Wrong:
    """MTP on a target with `modules` MTP modules, after `fields` of its config.json were changed."""
    return lambda f: (f.copy(f.mimos[modules], **fields), {"method": "mtp"})


def without(*prefixes: str) -> Callable[[Path], str]:
    """Return a function that removes tensors from a folder and returns it. prefixes: beginnings of their names."""

    def drop(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(prefixes)]:
            del tensors[name]

    def change(folder: Path) -> str:
        edit_tensors(folder, drop)
        return str(folder)

    return change


NUMBERS: dict[str, tuple[Wrong, type[TrtSpecError], tuple[str, ...]]] = {
    "fewer MTP layers than config.json says": (
        mtp(1, num_nextn_predict_layers=2),
        WeightsError,
        ("MTP weights in", "missing: model.mtp_layers.1.final_layernorm.weight (32,)", "belong together"),
    ),
    "more MTP layers than config.json says": (
        mtp(2, num_nextn_predict_layers=1),
        WeightsError,
        ("MTP weights in", "unexpected: model.mtp_layers.1.", "belong together"),
    ),
    "no MTP layers": (
        mtp(1, num_nextn_predict_layers=0),
        ConfigError,
        ("num_nextn_predict_layers is missing or 0", "use a checkpoint that has them, or another method"),
    ),
    "a negative number of MTP layers": (
        mtp(1, num_nextn_predict_layers=-1),
        CheckpointError,
        ("num_nextn_predict_layers = -1", "config.json is no number of layers"),
    ),
    "a word for the number of MTP layers": (
        mtp(1, num_nextn_predict_layers="two"),
        CheckpointError,
        ("num_nextn_predict_layers = 'two'", "config.json is no number of layers"),
    ),
    "K over the MTP modules": (
        lambda f: (f.mimos[2], {"method": "mtp", "num_speculative_tokens": 5}),
        ConfigError,
        ("num_speculative_tokens=5 must be divisible by n_predict=2", "use 4"),
    ),
    "K over the only MTP module, one for each draft": (
        lambda f: (f.mimos[1], {"method": "mtp", "vanilla": True, "num_speculative_tokens": 2}),
        ConfigError,
        ("num_speculative_tokens=2 with n_predict=1", "use at most 1, or vanilla=False"),
    ),
    "K not divisible by n_predict, MTP": (
        lambda f: (f.mimos[2], {"method": "mtp", "one_engine": False, "num_speculative_tokens": 3}),
        ConfigError,
        ("num_speculative_tokens=3 must be divisible by n_predict=2", "use 2"),
    ),
    "K not divisible by n_predict, MLP speculator": (
        lambda f: (f.target, {"model": f.mlp(n_predict=2), "num_speculative_tokens": 3}),
        ConfigError,
        ("num_speculative_tokens=3 exceeds the 2 heads", "use at most 2"),
    ),
    "K a multiple of n_predict, MLP speculator": (
        lambda f: (f.target, {"model": f.mlp(n_predict=2), "num_speculative_tokens": 4}),
        ConfigError,
        ("num_speculative_tokens=4 exceeds the 2 heads", "use at most 2"),
    ),
    "K over the Medusa heads": (
        lambda f: (f.target, {"model": f.medusa(num_heads=3), "num_speculative_tokens": 4}),
        ConfigError,
        ("num_speculative_tokens=4 exceeds the 3 heads", "use at most 3"),
    ),
    "fewer Medusa heads than config.json says": (
        lambda f: (f.target, {"model": str(f.copy(Path(f.medusa(num_heads=3)), num_heads=4))}),
        WeightsError,
        ("missing: blocks.3.layers.0.weight (32, 32), lm_heads.3.weight (16, 32)", "belong together"),
    ),
    "a Medusa head missing that K does not need": (
        lambda f: (
            f.target,
            {"model": without("blocks.2.", "lm_heads.2.")(Path(f.medusa(num_heads=3))), "num_speculative_tokens": 1},
        ),
        WeightsError,
        ("missing: blocks.2.layers.0.weight", "lm_heads.2.weight"),
    ),
    "a stage of an MLP speculator missing": (
        lambda f: (
            f.target,
            {"model": without(*(f"speculator.{part}.2." for part in ("emb", "head", "ln", "proj")))(Path(f.mlp()))},
        ),
        WeightsError,
        ("missing: emb.2.weight (16, 32), head.2.weight (16, 32)", "belong together"),
    ),
    "an EAGLE head without its fc": (
        lambda f: (
            f.target,
            {"method": "eagle", "model": without("fc.")(Path(f.eagle())), "num_speculative_tokens": 2},
        ),
        WeightsError,
        ("missing: fc.weight (32, 64)", "set method='draft_model'"),
    ),
    "a draft of another vocabulary": (
        lambda f: (f.target, {"model": str(f.large), "num_speculative_tokens": 2}),
        ConfigError,
        ("vocab_size=24", "the target's 16", "set use_heterogeneous_vocab=True"),
    ),
    "vocabularies without intersection": (
        lambda f: (f.target, {"model": alien(f), "use_heterogeneous_vocab": True, "num_speculative_tokens": 2}),
        ConfigError,
        ("0 of the target's 16 tokens", "use a draft with more of the target's tokens, or method='ngram'"),
    ),
}


def alien(folders: Folders) -> str:
    """A draft with a tokenizer that shares no token with the target's."""
    copied = folders.copy(folders.large)
    tokenizer = json.loads((copied / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {f"zz{token}": token for token in range(24)}
    tokenizer["model"]["unk_token"] = "zz0"
    tokenizer["added_tokens"] = []
    (copied / "tokenizer.json").write_text(json.dumps(tokenizer))
    return str(copied)


# -- one checkpoint for another ----------------------------------------------------------------------------------------

CONFUSED: dict[str, tuple[Wrong, type[TrtSpecError], tuple[str, ...]]] = {
    **{
        f"{kind} head as the target": (
            lambda f, kind=kind: (head(f, kind), None),
            error,
            words,
        )
        for kind, error, words in (
            ("eagle", WeightsError, ("fc.weight is an EAGLE head's", "as model in speculative_config, with method=")),
            (
                "eagle3",
                UnsupportedError,
                ("is a draft head (LlamaForCausalLMEagle3)", "as model in speculative_config"),
            ),
            ("medusa", UnsupportedError, ("is a draft head (MedusaModel)", "as model in speculative_config")),
            ("mlp_speculator", UnsupportedError, ("is a draft head (MLPSpec", "as model in speculative_config")),
        )
    },
    **{
        f"the target as {kind} head": (
            lambda f, kind=kind: (f.target, {"method": kind, "model": str(f.target), "num_speculative_tokens": 2}),
            error,
            words,
        )
        for kind, error, words in (
            ("eagle", WeightsError, ("missing: fc.weight (32, 64)", "it is no EAGLE head", "set method='draft_model'")),
            ("eagle3", UnsupportedError, ("'LlamaForCausalLM' is no EAGLE3 head", "supported: LlamaForCausalLMEagle3")),
            ("medusa", UnsupportedError, ("model_type 'llama' is no set of Medusa heads", "or leave method unset")),
            ("mlp_speculator", UnsupportedError, ("'llama' is no MLP speculator", "or leave method unset")),
        )
    },
    **{
        f"{kind} head as {method}": (
            lambda f, kind=kind, method=method: (
                f.target,
                {"method": method, "model": str(head(f, kind)), "num_speculative_tokens": 2},
            ),
            error,
            words,
        )
        for kind, method, error, words in (
            (
                "medusa",
                "eagle",
                UnsupportedError,
                ("for method='medusa', not for method='eagle'", "leave method"),
            ),
            ("medusa", "draft_model", UnsupportedError, ("for method='medusa'", "leave method unset")),
            ("mlp_speculator", "eagle3", UnsupportedError, ("for method='mlp_speculator'", "leave method unset")),
            (
                "mlp_speculator",
                "medusa",
                UnsupportedError,
                ("for method='mlp_speculator', not for", "leave method unset"),
            ),
            ("eagle3", "eagle", UnsupportedError, ("is an EAGLE3 head", "use method='eagle3'")),
            ("eagle", "eagle3", UnsupportedError, ("is no EAGLE3 head", "supported: LlamaForCausalLMEagle3")),
            ("eagle", "draft_model", WeightsError, ("fc.weight is an EAGLE head's", "with method='eagle'")),
            ("eagle3", "draft_model", UnsupportedError, ("'LlamaForCausalLMEagle3'", "is not supported; supported:")),
        )
    },
    "a file for a folder": (
        lambda f: (f.target, {"model": str(f.draft / "config.json"), "num_speculative_tokens": 2}),
        CheckpointError,
        ("draft/config.json' is not a folder", "pass the folder of a checkpoint"),
    ),
    "a name on the Hub, which may not be asked": (
        lambda f: (f.target, {"model": "some/EAGLE3-head", "num_speculative_tokens": 2}),
        CheckpointError,
        ("'some/EAGLE3-head' is not on this machine", "download the model first"),
    ),
    "a folder with MTP": (
        lambda f: (f.mimos[1], {"method": "mtp", "model": str(f.draft), "num_speculative_tokens": 1}),
        UnsupportedError,
        ("MTP layers of model_type='llama'", "not known; those of mimo run"),
    ),
    "parallel drafting by a draft without a mask token": (
        lambda f: (f.target, {"method": "draft_model", "model": str(f.draft), "parallel_drafting": True, **K2}),
        ConfigError,
        ("none of pard_token, mask_token_id, ptd_token_id", "use one that was, or leave parallel_drafting unset"),
    ),
    "parallel drafting by an EAGLE3 head without a mask token": (
        lambda f: (f.target, {"method": "eagle3", "model": f.eagle3(), "parallel_drafting": True, **K2}),
        ConfigError,
        ("none of pard_token, mask_token_id, ptd_token_id", "use one that was, or leave parallel_drafting unset"),
    ),
    "a mask token past the vocabulary": (
        lambda f: (
            f.target,
            {"method": "draft_model", "model": str(f.copy(f.draft, pard_token=99)), "parallel_drafting": True, **K2},
        ),
        ConfigError,
        ("mask token 99 is not in its vocabulary of 16 ids", "correct its config.json"),
    ),
    "K as long as the context": (
        lambda f: (f.target, {"method": "ngram", "num_speculative_tokens": 512}),
        ConfigError,
        ("max_model_len=512 of the target is too short to draft num_speculative_tokens=512", "use a smaller K"),
    ),
    "K that fills more rows than a step has": (
        lambda f: (f.target, {"method": "ngram", "num_speculative_tokens": 100}),
        ConfigError,
        (
            "max_num_tokens = 2048 cannot hold 101 rows",
            "raise it to 3232 or lower max_batch_size or num_speculative_tokens (now 100)",
        ),
    ),
    "a tree that fills more rows than a step has": (
        lambda f: (f.target, {"method": "ngram", **K2, "max_total_draft_tokens": 100}),
        ConfigError,
        ("raise it to 3232 or lower max_batch_size or max_total_draft_tokens (now 100)",),
    ),
}

TABLE = {**ARCHITECTURE, **NUMBERS, **CONFUSED}


@pytest.mark.parametrize("name", TABLE)
def test_it_is_refused(folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    wrong, error, words = TABLE[name]
    target, spec = wrong(folders)
    assert_refused(target, spec, error, words, tmp_path, capsys)
