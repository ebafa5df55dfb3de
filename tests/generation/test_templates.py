"""Chat templates render as transformers renders them, and a hostile one costs an error and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hotset.errors import ModelError
from hotset.generation.templates import TemplateWorker

pytestmark = pytest.mark.filterwarnings("default")

MESSAGES = [
    {"role": "user", "content": "Perché? 日本 \U0001f600"},
    {"role": "assistant", "content": "Così.\n"},
    {"role": "user", "content": "{{ 'not' + 'rendered' }}"},
]
SOUND = (
    "{% for m in messages %}<{{ m.role }}>{{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    "{%- set ns = namespace(n=0) -%}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ m | tojson }}"
    "{% endfor %}",
    "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ bos_token }}{{ m.content }}{% endfor %}",
    "{% macro turn(m) %}[{{ m.role | upper }}]{{ m.content }}{% endmacro %}{{ turn(messages[0]) }}"
    "{{ strftime_now('%Y') }}",
)


@pytest.fixture(scope="module")
def worker() -> Iterator[TemplateWorker]:
    made = TemplateWorker(cpu_s=2)
    yield made
    made.close()


@pytest.mark.parametrize("template", SOUND)
def test_a_template_renders_as_in_transformers(template: str, worker: TemplateWorker, tokenizer: Any) -> None:
    stock = tokenizer.apply_chat_template(MESSAGES, chat_template=template, add_generation_prompt=True, tokenize=False)
    assert worker.render(template, MESSAGES, tokenizer.special_tokens_map) == stock


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 1/0 }}", "ZeroDivisionError"),
        ("", "renders nothing"),
        ("{% if false %}x{% endif %}", "renders nothing"),
        ("{% for m in messages %}", "TemplateSyntaxError"),
        ("{{ messages.nothing.at.all }}", "UndefinedError"),
        ("{{ raise_exception('\x1b[31mroles must alternate') }}", "roles must alternate"),
        ("{{ 'x' * 10**10 }}", "GiB of memory"),
        ("{{ 'x'.ljust(10**11) }}", "GiB of memory"),
        ("{% set a = 'x' * 1024 %}" + "{% set a = a ~ a %}" * 30 + "{{ a }}", "memory"),
        ("{{ messages[0].role * (2 * 10**7) }}", "letters"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "takes too long"),
        ("{{ 7 ** (7 ** 11) }}", "takes too long"),
    ],
)  # fmt: skip
def test_a_hostile_template_is_refused_and_the_next_one_renders(
    template: str, words: str, worker: TemplateWorker
) -> None:
    with pytest.raises(ModelError) as refused:
        worker.render(template, MESSAGES, {})
    assert words in str(refused.value)
    assert "--no-chat" in str(refused.value)
    assert str(refused.value).isprintable()
    assert worker.render("{{ messages[1].content }}", MESSAGES, {}) == "Così.\n"


def test_a_worker_that_is_gone_is_started_again(worker: TemplateWorker) -> None:
    worker.close()
    assert worker.render("{{ messages | length }}", MESSAGES, {}) == "3"
