"""Chat templates: rendered in a sandbox, refusals carried through."""

from __future__ import annotations

import pytest

from pyspec import TemplateError
from pyspec.chat import ChatTemplate

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

HELLO = [{"role": "user", "content": "Hi"}]


def test_renders_chatml() -> None:
    text = ChatTemplate(CHATML).render(HELLO)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert ChatTemplate(CHATML).render(HELLO, add_generation_prompt=False).endswith("<|im_end|>\n")


def test_gives_tokens_variables_and_filters() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{{ messages | tojson }}{{ flag }}{{ eos_token }}", "<s>", "</s>"
    )
    assert template.render(HELLO, flag=3) == '<s>[{"role": "user", "content": "Hi"}]3</s>'


def test_refusal_carries_the_templates_message() -> None:
    template = ChatTemplate("{{ raise_exception('No user message found') }}")
    with pytest.raises(TemplateError, match="chat template: No user message found"):
        template.render(HELLO)


@pytest.mark.parametrize("source", ["{% if %}", "{{ 'a' "])
def test_broken_source_is_refused(source: str) -> None:
    with pytest.raises(TemplateError, match="does not parse"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("{{ ''.__class__.__mro__ }}", id="dunder"),
        pytest.param("{{ messages.append(1) }}", id="mutation"),
        pytest.param("{{ cycler.__init__.__globals__ }}", id="globals"),
        pytest.param("{{ 1 // 0 }}", id="python-error"),
    ],
)
def test_sandbox_refuses(source: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source).render(HELLO)
