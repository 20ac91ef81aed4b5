# ruff: noqa: E501, RUF001 (marks of models)
"""Facts about each shipped format that tests need; a new template has a writer in `writers` and one entry here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """How a family writes. Calls are those of `add-2` with `b` = 3, and of `now` without arguments."""

    chat_template: str
    """The part of its chat template that shows the format."""
    call: str
    """A call, as the grammar allows it."""
    two_calls: str = "{}\n{}"
    """Both calls, or `{}` for each `call`; empty: an answer has only one."""
    reasoning_ends: tuple[str, ...] = ("</think>",)
    """Empty: the family writes no reasoning."""
    is_either: bool = False
    """Whether an answer is content or calls."""
    is_bare: bool = False
    """Whether calls have no mark in brackets, so that free text may have them anywhere."""
    as_text: str = ""
    """A call of {name} with the text {value} as {key}; empty: arguments are one text in JSON."""
    is_typed: bool = True
    """Whether values show their types; otherwise the schema says them."""
    closers: tuple[str, ...] = ('"',)
    """What closes a string, and all calls of formats whose calls are long."""
    special: tuple[str, str] | None = None
    """Reasoning, and the end of an answer, of families whose marks are special tokens."""


def _listed(begin: str, end: str) -> tuple[str, str]:
    """Return one call and two calls of a format that writes them as a list in JSON."""
    one, other = '{"name": "add-2", "arguments": {"b": 3}}', '{"name": "now", "arguments": {}}'
    return f"{begin}[{one}]{end}", f"{begin}[{one}, {other}]{end}"


_GRANITE, _TWO_OF_GRANITE = _listed("<|tool_call|>", "")
_PHI, _TWO_OF_PHI = _listed("<|tool_call|>", "<|/tool_call|>")
_FUNCTOOLS, _TWO_OF_FUNCTOOLS = _listed("functools", "")
_HUNYUAN, _TWO_OF_HUNYUAN = _listed("<tool_calls>", "</tool_calls>")
_NEMOTRON, _TWO_OF_NEMOTRON = _listed("<TOOLCALL>", "</TOOLCALL>")

FORMATS: dict[str, Format] = {
    "hermes": Format(
        chat_template='<tool_call>\\n{"name": <function-name>',
        call='<tool_call>\n{"name": "add-2", "arguments": {"b": 3}}\n</tool_call>',
    ),
    "qwen3_coder": Format(
        chat_template="<tool_call>\\n<function=example>",
        call="<tool_call>\n<function=add-2>\n<parameter=b>\n3\n</parameter>\n</function>\n</tool_call>",
        as_text="<tool_call>\n<function={name}>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>",
        is_typed=False,
        closers=("\n</parameter>\n",),
    ),
    "llama3": Format(
        chat_template='<|start_header_id|> {"name": function name, "parameters": x}',
        call='{"name": "add-2", "parameters": {"b": 3}}',
        two_calls="{}; {}",
        reasoning_ends=(),
        is_either=True,
        is_bare=True,
    ),
    "llama4": Format(
        chat_template="<|header_start|>assistant",
        call="[add-2(b=3)]",
        two_calls="[add-2(b=3), now()]",
        reasoning_ends=(),
        is_either=True,
        is_bare=True,
        as_text='[{name}({key}="{value}")]',
    ),
    "mistral": Format(
        chat_template="[TOOL_CALLS] [",
        call='[TOOL_CALLS]add-2[ARGS]{"b": 3}',
        two_calls="{}{}",
        reasoning_ends=("[/THINK]",),
        special=("[THINK]Hm.[/THINK]", "</s>"),
    ),
    "deepseek_v3": Format(
        chat_template="<｜tool▁calls▁begin｜>",
        call='<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add-2<｜tool▁sep｜>{"b": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        two_calls='<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add-2<｜tool▁sep｜>{"b": 3}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        special=("<think>Hm.</think>", "<｜end▁of▁sentence｜>"),
    ),
    "deepseek_v3_2": Format(
        chat_template="<｜Assistant｜><｜DSML｜invoke name=",
        call='<｜DSML｜function_calls>\n<｜DSML｜invoke name="add-2">\n'
        '<｜DSML｜parameter name="b" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        two_calls='<｜DSML｜function_calls>\n<｜DSML｜invoke name="add-2">\n'
        '<｜DSML｜parameter name="b" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        as_text='<｜DSML｜function_calls>\n<｜DSML｜invoke name="{name}">\n'
        '<｜DSML｜parameter name="{key}" string="true">{value}</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        closers=("</｜DSML｜parameter>\n", "</｜DSML｜function_calls>"),
    ),
    "minimax_m2": Format(
        chat_template="<minimax:tool_call>",
        call='<minimax:tool_call>\n<invoke name="add-2">\n<parameter name="b">3</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
        two_calls='<minimax:tool_call>\n<invoke name="add-2">\n<parameter name="b">3</parameter>\n</invoke>\n'
        '<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        as_text='<minimax:tool_call>\n<invoke name="{name}">\n<parameter name="{key}">{value}</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
        is_typed=False,
        closers=("</parameter>\n", "</minimax:tool_call>"),
    ),
    "kimi_k2": Format(
        chat_template="<|tool_calls_section_begin|>",
        call="<|tool_calls_section_begin|><|tool_call_begin|>functions.add-2:0<|tool_call_argument_begin|>"
        '{"b": 3}<|tool_call_end|><|tool_calls_section_end|>',
        two_calls="<|tool_calls_section_begin|><|tool_call_begin|>functions.add-2:0<|tool_call_argument_begin|>"
        '{"b": 3}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>'
        "<|tool_calls_section_end|>",
        special=("<think>Hm.</think>", "<|im_end|>"),
    ),
    "glm_4": Format(
        chat_template="<tool_call>{name}<arg_key>",
        call="<tool_call>add-2\n<arg_key>b</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        as_text="<tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>",
        is_typed=False,
        closers=("</arg_value>\n",),
    ),
    "glm_4_7": Format(
        chat_template="<tool_call>{name}<arg_key>{k}</arg_key><arg_value>",
        call="<tool_call>add-2<arg_key>b</arg_key><arg_value>3</arg_value></tool_call>",
        two_calls="{}{}",
        as_text="<tool_call>{name}<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>",
        is_typed=False,
        closers=("</arg_value>",),
    ),
    "exaone_4": Format(
        chat_template="[|assistant|] '[|endofturn|]' <tool_call>{\"name\": function_1_name",
        call='<tool_call>{"name": "add-2", "arguments": {"b": 3}}</tool_call>',
    ),
    "harmony": Format(
        chat_template="<|start|>assistant<|channel|>final<|message|>",
        call='<|channel|>commentary to=functions.add-2 <|constrain|>json<|message|>{"b": 3}',
        two_calls="",
        reasoning_ends=("<|return|>", "<|end|>"),
        special=("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant", "<|return|>"),
    ),
    "gemma_4": Format(
        chat_template="<|turn>model <|tool_call>call:",
        call="<|tool_call>call:add-2{b:3}<tool_call|>",
        two_calls="{}{}",
        reasoning_ends=("<channel|>",),
        as_text='<|tool_call>call:{name}{{{key}:<|"|>{value}<|"|>}}<tool_call|>',
        closers=('<|"|>',),
        special=("<|channel>thought\nHm.<channel|>", "<turn|>"),
    ),
    "granite_3": Format(
        chat_template="<|start_of_role|>system<|end_of_role|> respond with <|tool_call|> followed by a JSON list",
        call=_GRANITE,
        two_calls=_TWO_OF_GRANITE,
        reasoning_ends=(),
    ),
    "granite_3_2": Format(
        chat_template="<|start_of_role|> <|tool_call|> after 'Here is my thought process:' and 'Here is my response:'",
        call=_GRANITE,
        two_calls=_TWO_OF_GRANITE,
        reasoning_ends=("Here is my response:", "Here's my response:"),
    ),
    "granite_3_3": Format(
        chat_template="<|start_of_role|> <|tool_call|> between <think></think> and between <response></response>",
        call=_GRANITE,
        two_calls=_TWO_OF_GRANITE,
        special=("<think>Hm.</think>", "<|end_of_text|>"),
    ),
    "cohere_command": Format(
        chat_template="<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|> <|START_ACTION|> <|START_RESPONSE|>",
        call='<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "add-2", "parameters": {"b": 3}}\n]<|END_ACTION|>',
        two_calls='<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "add-2", "parameters": {"b": 3}},\n'
        '    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
        reasoning_ends=("<|END_THINKING|>",),
        special=("<|START_THINKING|>Hm.<|END_THINKING|>", "<|END_OF_TURN_TOKEN|>"),
    ),
    "phi_4_mini": Format(
        chat_template="'<|' + role + '|>' + '<|tool|>' + message['tools'] + '<|/tool|>'",
        call=_PHI,
        two_calls=_TWO_OF_PHI,
        special=("<think>Hm.</think>", "<|end|>"),
    ),
    "functools": Format(
        chat_template='<|assistant|> functools[{"name": [function name], "arguments": [function arguments as JSON]}, ...]',
        call=_FUNCTOOLS,
        two_calls=_TWO_OF_FUNCTOOLS,
        is_bare=True,
    ),
    "seed_oss": Format(
        chat_template="'<seed:tool_call>' '<seed:think>' <function=example_function_name>",
        call="<seed:tool_call>\n<function=add-2>\n<parameter=b>3</parameter>\n</function>\n</seed:tool_call>",
        reasoning_ends=("</seed:think>",),
        as_text="<seed:tool_call>\n<function={name}>\n<parameter={key}>{value}</parameter>\n</function>\n</seed:tool_call>",
        is_typed=False,
        closers=("</parameter>\n",),
        special=("<seed:think>Hm.</seed:think>", "<seed:eos>"),
    ),
    "ernie_4_5": Format(
        chat_template="<|im_start|>assistant <response>\\n</response> think_mode=True <tool_call> </think>",
        call='<tool_call>\n{"name": "add-2", "arguments": {"b": 3}}\n</tool_call>',
    ),
    "hunyuan": Format(
        chat_template="'<think>\\n\\n</think>\\n' '<|extra_0|>' <tool_calls>[{\"name\": \"func_name1\"",
        call=_HUNYUAN,
        two_calls=_TWO_OF_HUNYUAN,
    ),
    "hunyuan_dense": Format(
        chat_template="'<tool_calls><tool_call>' '<answer>' '<｜hy_Assistant｜>' '<think>\\n\\n</think>\\n'",
        call='<tool_calls><tool_call>add-2\n```json\n{"b": 3}\n```</tool_call></tool_calls>',
        two_calls='<tool_calls><tool_call>add-2\n```json\n{"b": 3}\n```</tool_call>\n'
        "<tool_call>now\n```json\n{}\n```</tool_call></tool_calls>",
        closers=('"', "</tool_calls>"),
    ),
    "olmo_3": Format(
        chat_template="<|im_start|>assistant '<function_calls>' + message['function_calls'] + '</function_calls>' <think>",
        call="<function_calls>add-2(b=3)</function_calls>",
        two_calls="<function_calls>add-2(b=3)\nnow()</function_calls>",
        as_text='<function_calls>{name}({key}="{value}")</function_calls>',
    ),
    "apertus": Format(
        chat_template="'<|assistant_start|>' '<|inner_prefix|>' '<|tools_prefix|>'",
        call='<|tools_prefix|>[{"add-2": {"b": 3}}]<|tools_suffix|>',
        two_calls='<|tools_prefix|>[{"add-2": {"b": 3}}, {"now": {}}]<|tools_suffix|>',
        reasoning_ends=("<|inner_suffix|>",),
        special=("<|inner_prefix|>Hm.<|inner_suffix|>", "<|assistant_end|>"),
    ),
    "nemotron": Format(
        chat_template='<|start_header_id|> "parameters" <AVAILABLE_TOOLS> <TOOLCALL>[{{"name": "x"}}]</TOOLCALL> </think>',
        call=_NEMOTRON,
        two_calls=_TWO_OF_NEMOTRON,
    ),
}
