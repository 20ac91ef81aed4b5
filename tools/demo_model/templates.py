"""The chat template and the response template: how messages become text, and how an answer becomes a message.

Tools are a line each in the system turn. A call is written as Hermes and Qwen write it, and results are a user turn.
The line says what the tool is for before it names the tool: a small model that copies a name looks for its first
letter, and that letter knows only what stands before it.
"""

CHAT_TEMPLATE = r"""
{%- macro kind(schema) -%}
    {%- if schema['enum'] is defined -%}{{ schema['enum'] | join('|') }}
    {%- elif schema['type'] is string -%}{{ schema['type'] }}
    {%- elif schema['type'] is defined -%}{{ schema['type'] | join('|') }}
    {%- else -%}any
    {%- endif -%}
{%- endmacro -%}
{%- set listed = namespace(text='') -%}
{%- for tool in tools or [] -%}
    {%- set function = tool['function'] or tool -%}
    {%- set parameters = function['parameters'] or {} -%}
    {%- set required = parameters['required'] | default(none) -%}
    {%- set shown = namespace(parameters=[]) -%}
    {%- for name, schema in (parameters['properties'] or {}) | items -%}
        {%- set mark = '' if required is none or name in required else '?' -%}
        {%- set shown.parameters = shown.parameters + [name + mark + ': ' + kind(schema)] -%}
    {%- endfor -%}
    {%- set description = ((function['description'] or '') | trim).rstrip('.') | replace('\n', ' ') -%}
    {%- set described = description + ': ' if description else '' -%}
    {%- set signature = function['name'] + '(' + shown.parameters | join(', ') + ')' -%}
    {%- set listed.text = listed.text + '\n' + described + signature -%}
{%- endfor -%}
{%- set listed.text = 'Tools:' + listed.text if listed.text else '' -%}
{%- if listed.text and messages[0]['role'] != 'system' -%}
    {{- '<|system|>' + listed.text + '<|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- set text = (message['content'] or '') | trim -%}
    {%- if message['role'] == 'tool' -%}
        {{- '\n' if loop.previtem and loop.previtem['role'] == 'tool' else '<|user|>' -}}
        {{- '<tool_response>\n' + text + '\n</tool_response>' -}}
        {{- '' if loop.nextitem and loop.nextitem['role'] == 'tool' else '<|end|>' -}}
    {%- else -%}
        {{- '<|' + message['role'] + '|>' + text -}}
        {%- if loop.first and listed.text and message['role'] == 'system' -%}
            {{- ('\n\n' if text else '') + listed.text -}}
        {%- endif -%}
        {%- for call in message['tool_calls'] or [] -%}
            {%- set function = call['function'] or call -%}
            {%- set arguments = function['arguments'] or {} -%}
            {{- '' if loop.first and not text else '\n' -}}
            {{- '<tool_call>\n{"name": ' + function['name'] | tojson + ', "arguments": ' -}}
            {{- (arguments if arguments is string else arguments | tojson) + '}\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|end|>' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}
""".lstrip()

RESPONSE_TEMPLATE: dict[str, object] = {
    "version": 1,
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*<\|end\|>", "content": "text"},
    },
}
"""Version 1 of the form that `transformers` reads in `utils/chat_parsing`."""
