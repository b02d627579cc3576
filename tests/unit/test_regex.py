"""Regular expressions of users: those that might never end are refused, the others match as Python's."""

from __future__ import annotations

import re
import sys
import time
import types

import pytest

from gemmtune import cli, filters, regex, settings
from gemmtune.errors import SettingsError
from gemmtune.regex import compiled

ENDLESS = [
    r"(a+)+$", r"(a*)*b", r"(a|a)*b", r"(a|aa)+$", r"(.*a){20}", r"(x+x+)+y", r"(\w+\s?)*$", r"([a-z]+)*=", r"(.*)*x",
    r".*.*.*.*.*.*.*.*x", r"((a{1,10}){1,10}){1,10}b", r"(?:a?){30}a{30}", r"(a|b|ab)*c", r"(?=(a+)+$)", r"(?:){100000}",
    r"((?:a|b)*a)*c", r"^(([a-z])+.)+[A-Z]([a-z])+$", r"(?P<x>a+)+(?P=x)b", r".*:.*:.*:.*:.*x", r"a{5000}", r"(?:\S+\S*)*x",
    r"(?<!a)(b+)*c", r"(a??)*?b", r"(?i:(a|A\w)*)b", r"(a)?(?(1)(b+)+|c)d", "x" * 20_000,
]  # fmt: skip
QUICK = {
    r".*foo.*": "a foo b", r".*a.*b.*": "xaxbx", r"triton:mm_.*_64x128": "triton:mm_a_64x128", r"^(?!cutlass)": "aten:mm",
    r"\d+x\d+x\d+_\w+_tn": "64x128x32_a_tn", r"(64x128|128x64)_(tn|nt)": "128x64_nt", r"(foo|bar)*baz": "foobarbaz",
    r"(?:[a-z]+_)*x": "ab_cd_x", r"stream_k": "a_stream_k", r"aten:.*|cpp:.*": "cpp:mm", r"(?:[0-9]+x){2}": "64x64x",
    r"^cpp:avx512_\d+x\d+_(columns|steps)_kc\d+_t\d+x\d+(_direct)?$": "cpp:avx512_14x32_steps_kc300_t8x1",
    r"[^:]+:[^_]+_\d+": "a:b_1", r"(?i)CUTLASS.*(pingpong|cooperative)": "cutlass_Pingpong", r"\bmm\b": "aten:mm",
    r"kc(128|300)_t\d{1,3}x\d{1,3}.*direct": "kc128_t8x1_direct", r"": "", r"^((?!tn).)*$": "nn", r"(a)(b)?\1": "aba",
    r"\w+?:\W?[^\s]*\S": "a:b", r"(?:mm|bmm|addmm)(_.*)?": "addmm_x", r"(?s)a.b\Z": "a\nb",
}  # fmt: skip
TEXTS = ("a" * 100, "ab" * 50 + "!", "1x" * 50, "a_" * 50, "")


def test_expressions_that_may_never_end_are_refused_at_once():
    begun = time.process_time()
    for pattern in ENDLESS:
        with pytest.raises(ValueError, match=r"ways|characters"):
            compiled(pattern)
    assert time.process_time() - begun < 5


def test_others_match_as_those_of_python():
    begun = time.process_time()
    for pattern, text in QUICK.items():
        assert compiled(pattern).found(text), pattern
        for other in (*TEXTS, *QUICK.values()):
            assert compiled(pattern).found(other) == (re.search(pattern, other) is not None), (pattern, other)
    assert time.process_time() - begun < 10


def test_google_re2_takes_what_python_may_not_finish(monkeypatch: pytest.MonkeyPatch):
    """A stand-in: its interface is that of the package."""

    class Refused(Exception):
        pass

    def compile_(pattern: str) -> re.Pattern[str]:
        if "(?=" in pattern:
            raise Refused("invalid perl operator: (?=")
        return re.compile("linear")

    made = types.ModuleType("re2")
    made.compile, made.error = compile_, Refused  # type: ignore[attr-defined]
    made.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "re2", made)
    compiled.cache_clear()
    assert compiled(r"(a+)+$").found("linear")
    with pytest.raises(ValueError, match=r"google-re2 refuses it: invalid perl operator"):
        compiled(r"(?=(a+)+$)")
    assert compiled(r"a+").found("caat")
    compiled.cache_clear()


def test_the_time_of_all_names_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(regex, "MOST_S", 0.0)
    compiled.cache_clear()
    with settings.patch(choice_allowlist_regex="mm") as given:
        assert filters.why_not_named("aten:mm", "aten", given) is None
        with pytest.raises(
            SettingsError, match=r"choice_allowlist_regex: got 'mm', expected .* quickly; it has taken .* a simpler one"
        ):
            filters.why_not_named("aten:mm", "aten", given)
    compiled.cache_clear()


@pytest.mark.parametrize("option", ["--allow", "--deny"])
def test_the_command_line_names_the_option(option: str, capsys: pytest.CaptureFixture[str]):
    begun = time.process_time()
    assert cli.run(["choices", "64x64x64", option, "(a+)+$"]) != 0
    assert time.process_time() - begun < 30
    text = capsys.readouterr().err
    assert "got '(a+)+$'" in text
    assert "put no * or + within another" in text
