"""What a user may get wrong about speculation: LLM, `trtspec build` and its --dry_run say the same, in one line that
names what is wrong and what to do.

What single loaders say of single tensors is tests/models'; here are the mistakes, each by name.
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
from trtspec import LLM
from trtspec.build.plan import plan_build
from trtspec.cli import main
from trtspec.config.engine import EngineConfig
from trtspec.config.speculative import SpeculativeConfig
from trtspec.errors import CapacityError, CheckpointError, ConfigError, TrtSpecError, UnsupportedError, WeightsError
from trtspec.interop.reading import read_speculative_config
from trtspec.methods.suffix.drafter import SuffixTree
from trtspec.modes import SpeculativeDecodingMode as M
from trtspec.modes import words_for

pytestmark = pytest.mark.filterwarnings("ignore:.*runs one MTP layer")


# -- unsupported mode x architecture ---------------------------------------------------------------------------------

MODES = [mode for mode in M if mode is not M.NONE]


def asked_for(mode: M, folders: Folders) -> dict[str, Any]:
    """A speculative_config that is right for `folders.target`."""
    words, K = words_for(mode), {"num_speculative_tokens": 2}
    models: dict[M, Callable[[], dict[str, Any]]] = {
        M.USER_PROVIDED: lambda: {"drafter": "examples.custom_drafter:SuccessorDrafter", **K},
        M.SAVE_HIDDEN_STATES: lambda: {"output_directory": str(folders.tmp / "states"), "capture_layers": [0]},
        M.DRAFT_TARGET: lambda: {"model": str(folders.draft), **K},
        M.DRAFT_TARGET_ONE_MODEL: lambda: {"model": str(folders.draft), **K},
        M.PARD: lambda: {"model": str(folders.copy(folders.draft, pard_token=MASK)), **K},
        M.EAGLE: lambda: {"model": folders.eagle(), **K},
        M.EAGLE_ONE_MODEL: lambda: {"model": folders.eagle(), **K},
        M.EAGLE3: lambda: {"model": folders.eagle3(), **K},
        M.EAGLE3_ONE_MODEL: lambda: {"model": folders.eagle3(), **K},
        M.P_EAGLE: lambda: {"model": folders.eagle3(mask=MASK), **K},
        M.DFLASH: lambda: {"model": folders.dflash(), **K},
        M.DSPARK: lambda: {"model": folders.dspark(), **K},
        M.MEDUSA: lambda: {"model": folders.medusa(), **K},
        M.MLP_SPECULATOR: lambda: {"model": folders.mlp(), **K},
    }
    return {**words, **(models[mode]() if mode in models else K)}


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_a_target_that_is_not_dense(
    folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: M
) -> None:
    """Every mode. The speculation itself is right."""
    spec = asked_for(mode, folders)
    experts = folders.copy(folders.target, architectures=["MixtralForCausalLM"], model_type="mixtral")
    words = ("architecture 'MixtralForCausalLM'", str(experts), "supported: LlamaForCausalLM, MistralForCausalLM")
    assert_refused(experts, spec, UnsupportedError, words, tmp_path, capsys)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode.traits.method != "mtp"], ids=lambda mode: mode.name)
def test_the_same_on_a_dense_target_is_planned(folders: Folders, mode: M) -> None:
    """So it was the target that was refused above."""
    spec = read_speculative_config(asked_for(mode, folders))
    assert plan_build(folders.target, spec, EngineConfig()).mode in (mode.name, "NGRAM")  # AUTO chooses that


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
    "Medusa beside the target": (
        lambda f: (f.target, {"method": "medusa", "model": f.medusa(), "one_engine": False}),
        ConfigError,
        ("one_engine=False", "method='medusa'", "use one_engine=True"),
    ),
    "parallel drafting beside the target": (
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
    """MTP as a target of so many modules offers it, with other fields of config.json."""
    return lambda f: (f.copy(f.mimos[modules], **fields), {"method": "mtp"})


def without(*prefixes: str) -> Callable[[Path], str]:
    """The folder, once tensors whose names begin so are gone from it."""

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
    """A draft with a tokenizer none of whose tokens the target has."""
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
    "a name on the Hub for a folder": (
        lambda f: (f.target, {"model": "some/EAGLE3-head", "num_speculative_tokens": 2}),
        CheckpointError,
        ("'some/EAGLE3-head' is not a folder", "hf download some/EAGLE3-head --local-dir DIR"),
    ),
    "a folder beside MTP": (
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
        ("max_num_tokens = 2048 cannot hold 101 rows", "raise it to 3232 or lower max_batch_size"),
    ),
}

TABLE = {**ARCHITECTURE, **NUMBERS, **CONFUSED}


@pytest.mark.parametrize("name", TABLE)
def test_it_is_refused(folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    wrong, error, words = TABLE[name]
    target, spec = wrong(folders)
    assert_refused(target, spec, error, words, tmp_path, capsys)


# -- what needs no checkpoint to be wrong ------------------------------------------------------------------------------

NGRAM = {"method": "ngram", "num_speculative_tokens": 2}
SUFFIX = "suffix_decoding_"
FIELDS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "K = 0": ({**NGRAM, "num_speculative_tokens": 0}, ("=0: input should be greater than", "leave speculative_config")),
    "negative K": (
        {**NGRAM, "num_speculative_tokens": -1},
        ("tokens=-1: ", "greater than or equal to 1"),
    ),
    "K in quotes": ({**NGRAM, "num_speculative_tokens": "3"}, ("num_speculative_tokens='3'", "valid integer")),
    "a field that does not exist": ({**NGRAM, "num_speculative_token": 3}, ("did you mean 'num_speculative_tokens'?",)),
    "a method that does not exist": (
        {**NGRAM, "method": "eagel3"},
        ("method='eagel3' is unknown", "use one of auto, custom_class, dflash"),
    ),
    "n-grams longer than the longest": (
        {**NGRAM, "prompt_lookup_min": 4, "prompt_lookup_max": 2},
        ("prompt_lookup_min=4 exceeds prompt_lookup_max=2", "lower it to at most 2"),
    ),
    "a pool of nothing": (
        {**NGRAM, "is_public_pool": True, "ngram_pool_size": 0},
        ("ngram_pool_size=0", "or equal to 1"),
    ),
    "no drafter": ({"method": "custom_class", **K2}, ("drafter=None", "set drafter='module:Class' or an object")),
    **{
        f"{name}={value}": ({"method": "suffix", SUFFIX + name: value}, (f"{SUFFIX}{name}={value}: ", remedy))
        for name, value, remedy in (
            ("max_tree_depth", 0, "greater than or equal to 1"),
            ("max_cached_requests", -1, "greater than or equal to 0 (responses kept"),
            ("max_cached_requests", 10**7, "less than or equal to 1000000 (responses kept"),
            ("max_spec_factor", -0.5, "greater than or equal to 0"),
            ("max_spec_factor", float("nan"), "a finite number"),
            ("min_token_prob", 1.5, "less than or equal to 1"),
            ("min_token_prob", -0.1, "greater than or equal to 0"),
        )
    },
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_wrong_field(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """SpeculativeConfig says so itself, and so does all that is given one."""
    fields, words = FIELDS[name]
    with pytest.raises(ConfigError) as caught:
        SpeculativeConfig(**fields)
    assert_refused(target, fields, ConfigError, (*words, str(caught.value)), tmp_path, capsys)


@pytest.mark.parametrize("spec", [[1], "ngram", 3])
def test_what_is_no_speculative_config(target: Path, spec: Any) -> None:
    with pytest.raises(ConfigError, match=r"speculative_config=.*; use None, a dict, a SpeculativeConfig or"):
        LLM(target, spec)


def test_a_path_is_a_folder_as_text_is(target: Path, draft: Path) -> None:
    assert SpeculativeConfig(method="draft_model", model=draft, **K2).model == str(draft)


def test_a_tree_for_which_there_is_no_memory(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(self: SuffixTree, *sizes: int) -> None:
        raise MemoryError

    monkeypatch.setattr(SuffixTree, "__init__", no_memory)
    with pytest.raises(CapacityError, match=r"cached_requests=10000: there is no memory .*; lower it"):
        LLM(target, {"method": "suffix"})


# -- what a backend cannot do ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "backend"), [(M.DFLASH, "onnx"), (M.DSPARK, "onnx"), (M.DFLASH, "tensorrt"), (M.MTP, "tensorrt")]
)
def test_a_mode_that_a_backend_cannot_run(
    folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: M, backend: str
) -> None:
    """The build says so as --dry_run does, before it loads anything."""
    spec: dict[str, Any] = asked_for(mode, folders)
    target = folders.mimos[2] if mode is M.MTP else folders.target
    remedy = "num_speculative_tokens=1" if mode is M.MTP else "use another backend"
    arguments = ["build", "--checkpoint_dir", str(target), "--output_dir", str(tmp_path / "engine")]
    arguments += ["--backend", backend, "--spec", json.dumps(spec), "--dry_run"]
    assert main(arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("trtspec: ")
    assert remedy in line
    assert backend in line
