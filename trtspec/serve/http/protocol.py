"""Request bodies: the fields of OpenAI's completions and chat completions, and those that vLLM's server adds.

An unknown field is an error that names the field. A known field that this server cannot honour is refused by name,
unless its value asks for nothing. null always asks for nothing: it is as if the field were absent.

Pydantic reports every error of a body, and FastAPI copies the report, while all streams wait. So fields that may be
long are bounded, or their validation ends at the first error.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    model_validator,
)

from trtspec.sampling_params import MOST_STOP_CHARACTERS

MAX_SAMPLES = 128
"""Maximum number of samples of one request: prompts times n."""

MAX_GRAMMAR = 65_536
"""Maximum number of characters of a schema or a grammar. The engine compiles it between steps; all requests wait."""

MAX_FIELDS = 100
"""Maximum number of fields of an object whose fields are known; fewer fields exist."""

MAX_MESSAGES = 4096
"""Maximum number of messages of a conversation, of parts of a message, and of tool calls of a message."""

MAX_BIASES = 4096
"""Maximum number of tokens in a logit_bias."""

T = TypeVar("T")
Many = Annotated[list[T], Field(fail_fast=True)]
TokenIds = Many[Annotated[int, Field(ge=0)]]
StopText = Annotated[str, StringConstraints(min_length=1, max_length=MOST_STOP_CHARACTERS)]


class Fields(BaseModel):
    """An object that has these fields and no others."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _those_that_ask(cls, value: Any) -> Any:
        """Drop the fields that are null. ValueError for too many fields."""
        if not isinstance(value, dict):
            return value
        if len(value) > MAX_FIELDS:
            raise ValueError(f"the object has {len(value)} fields; /openapi.json says which there are")
        return {name: one for name, one in value.items() if one is not None}


class StreamOptions(Fields):
    """Options of a stream.

    include_usage: a last chunk with `usage` and no choices. continuous_usage_stats: usage in every chunk (vLLM).
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = Field(default=False, description="chunks are not padded")


def _few_biases(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"there are {len(value)} biases; give {MAX_BIASES} at most")
    return value


Biases = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]], BeforeValidator(_few_biases)
]


def _kind(prompt: Any) -> str | None:
    """Form of a prompt, by its first item; None if it has none of the forms.

    So an error is reported once, and not for each of the forms that were not meant.
    """
    if not isinstance(prompt, list):
        return "text" if isinstance(prompt, str) else None
    first = prompt[0] if prompt else 0
    return "texts" if isinstance(first, str) else "lists" if isinstance(first, list) else "ids"


Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[Many[str], Field(max_length=MAX_SAMPLES), Tag("texts")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[Many[TokenIds], Field(max_length=MAX_SAMPLES), Tag("lists")],
    Discriminator(
        _kind,
        custom_error_type="prompt_kind",
        custom_error_message="give a text, a list of texts, a list of token ids, or a list of such lists",
    ),
]


class JsonSchema(Fields):
    """A JSON schema in OpenAI's wrapper."""

    model_config = ConfigDict(populate_by_name=True)

    name: str = Field(default="schema", max_length=64)
    description: str | None = None
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class ResponseFormat(Fields):
    """The format of an answer. type: "text", "json_object", or "json_schema" with a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_where_asked(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError('json_schema goes with type "json_schema", and only there')
        return self


class GenerationRequest(Fields):
    """The fields that both endpoints take."""

    model: str | None = Field(default=None, description="a name of /v1/models; unset = the one that is served")
    n: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=100, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2, allow_inf_nan=False)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2, allow_inf_nan=False)
    logit_bias: Biases | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: StopText | Annotated[list[StopText], Field(max_length=64)] | None = None
    response_format: ResponseFormat | None = None
    user: str | None = Field(default=None, description="ignored")
    metadata: dict[str, Any] | None = Field(default=None, description="ignored")
    store: bool | None = Field(default=None, description="ignored: nothing is stored")
    service_tier: str | None = Field(default=None, description="ignored")
    prompt_cache_key: str | None = Field(default=None, description="ignored: all prompts share one cache")
    safety_identifier: str | None = Field(default=None, description="ignored")

    # fields beyond OpenAI's, as in vLLM's server
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    min_p: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    repetition_penalty: float | None = Field(default=None, gt=0, le=100, allow_inf_nan=False)
    min_tokens: int = Field(default=0, ge=0)
    stop_token_ids: TokenIds | None = Field(default=None, max_length=1024)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    guided_json: dict[str, Any] | Annotated[str, Field(max_length=MAX_GRAMMAR)] | None = None
    guided_regex: str | None = Field(default=None, max_length=4096)
    guided_choice: list[str] | None = Field(default=None, max_length=1024)
    guided_grammar: str | None = Field(default=None, max_length=MAX_GRAMMAR)
    return_token_ids: bool = Field(default=False, description="token_ids in each choice")

    # fields of this server alone
    num_speculative_tokens: int | None = Field(
        default=None,
        ge=0,
        description="draft tokens a step, or depth of a draft tree, at most the engine's K; 0 = plain decoding",
    )
    return_speculation: bool = Field(
        default=False, description="what each step was offered, accepted and rejected, in each choice of a stream"
    )
    timeout: float | None = Field(default=None, gt=0, allow_inf_nan=False, description="seconds for the whole request")

    @model_validator(mode="after")
    def _options_of_streams(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with stream=true; leave it out, or stream")
        return self


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions."""

    prompt: Prompt
    max_tokens: int | None = Field(default=16, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool = False
    best_of: int | None = Field(default=None, ge=1, description="only n itself: nothing is ranked")
    suffix: str | None = Field(default=None, description="not supported")


class Function(Fields):
    """A function that the model may call. parameters: a JSON schema."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Fields):
    """A tool. A function is the only kind."""

    type: Literal["function"] = "function"
    function: Function


class FunctionName(Fields):
    """The function's name in a tool_choice."""

    name: str


class NamedTool(Fields):
    """A tool_choice that names a function."""

    type: Literal["function"] = "function"
    function: FunctionName


class TextPart(Fields):
    """A text part of a message's content. There are no other parts, because the models read only text."""

    type: Literal["text"]
    text: str


class FunctionCall(Fields):
    """A function call of an earlier turn. arguments: JSON text."""

    name: str
    arguments: str


class ToolCall(Fields):
    """A tool call of an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Fields):
    """One turn of a conversation. The chat template decides which roles exist."""

    role: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    content: str | Annotated[Many[TextPart], Field(max_length=MAX_MESSAGES)] | None = None
    name: str | None = None
    tool_calls: Many[ToolCall] | None = Field(default=None, max_length=MAX_MESSAGES)
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None


class ChatCompletionRequest(GenerationRequest):
    """The body of POST /v1/chat/completions."""

    messages: Many[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: Many[Tool] | None = Field(default=None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    modalities: Annotated[list[Literal["text"]], Field(max_length=8)] | None = Field(
        default=None, description="there is text alone"
    )

    @property
    def demands_call(self) -> bool:
        """Whether the answer must be a tool call, whatever the model would answer otherwise."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @model_validator(mode="after")
    def _tools_fit(self) -> ChatCompletionRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs=true")
        if not self.tools and self.tool_choice not in (None, "none"):
            raise ValueError("tool_choice goes with tools")
        if isinstance(self.tool_choice, NamedTool):
            names = [tool.function.name for tool in self.tools or ()]
            if self.tool_choice.function.name not in names:
                raise ValueError(f"tool_choice names {self.tool_choice.function.name!r}; tools: {', '.join(names)}")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens and max_completion_tokens say the same; give one of them")
        return self
