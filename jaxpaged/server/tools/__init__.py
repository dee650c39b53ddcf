"""Reads what a model writes: its reasoning, its tool calls, and the rest, as the text comes.

Parsers are chosen by name, with the names and the formats of vLLM:

    hermes       <tool_call>{"name": ..., "arguments": {...}}</tool_call>: Hermes 2 Pro and 3, Qwen 2.5 and 3
    qwen3_coder  <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>; also qwen3_xml
    qwen         either of the two, told apart call by call
    llama3_json  {"name": ..., "parameters": {...}}, several separated by ";": Llama 3.1 to 3.3

    deepseek_r1  reasoning, </think>, answer; an opening <think> is optional
    qwen3        the same where the answer, or the prompt's end, opens with <think>; else all is answer
"""

from jaxpaged.server.tools.registry import REASONING_PARSERS, TOOL_PARSERS

__all__ = ["REASONING_PARSERS", "TOOL_PARSERS"]
