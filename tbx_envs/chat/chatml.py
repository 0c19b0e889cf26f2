"""Our own ChatML templates, for models that were trained on ChatML but whose template leaves tools out (SmolLM2).

`CHATML_WITH_TOOLS` is for general use; `CHATML_COMPACT` is for a small model that is trained on one domain and learns
its rules and tools from demonstrations: it renders turns only, so that an episode is hundreds of tokens, not thousands.

Messages have the layout that those models know. Our additions: tools are described after the first system message,
calls are written in the `hermes` format, results are messages of the role `tool`, and reasoning is kept in all turns.
Every server renders a policy folder saved with such a template in the same way.
"""

CHATML_WITH_TOOLS = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- 'You can call these tools:\n<tools>\n' }}
    {%- for tool in tools %}
        {{- tool | tojson + '\n' }}
    {%- endfor %}
    {{- '</tools>\nTo call one, write its name and arguments as JSON, like this:\n' }}
    {{- '<tool_call>\n{"name": "...", "arguments": {"...": "..."}}\n</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\n' }}
        {%- if message.reasoning_content %}
            {{- '<think>\n' + message.reasoning_content + '\n</think>\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}
                {{- '\n' }}
            {%- endif %}
            {{- '<tool_call>\n{"name": ' + call.function.name | tojson }}
            {{- ', "arguments": ' + call.function.arguments | tojson + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

CHATML_COMPACT = r"""
{%- for message in messages if message.role != 'system' %}
    {{- '<|im_start|>' + message.role + '\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\n{"name": ' + call.function.name | tojson }}
        {{- ', "arguments": ' + call.function.arguments | tojson + '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

# Name on the command line -> template.
CHAT_TEMPLATES = {"tools": CHATML_WITH_TOOLS, "compact": CHATML_COMPACT}
