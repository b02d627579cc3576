"""``gemmtune report``: pages, Markdown and pictures of stores, exports and results."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import json
import math
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from store_cases import KEYS, MACHINES, failure
from store_cases import row as stored

from gemmtune import cli
from gemmtune.errors import StoreError
from gemmtune.page import MOST_SHOWN
from gemmtune.problem import Problem
from gemmtune.report import pages
from gemmtune.report.facts import totals
from gemmtune.report.roofline import Roof, Scale, labels
from gemmtune.report.sources import EXPECTED, read
from gemmtune.selector.machine_limits import DISTURBED_LIMITS, LIMITS
from gemmtune.selector.segments import TABLE, Segment, Table
from gemmtune.store.key import canonical
from gemmtune.store.row import Limit, Ranged
from gemmtune.store.store import Store

row = functools.partial(stored, finalist=True)
ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
ATTACK = "<script>alert()</script>"
EMPTY = {"meta", "input", "br", "wbr"}
VOID_BY_SLASH = {"line", "path"}


class Page(HTMLParser):
    """A page's elements. It fails on an element that is closed out of order, and on a resource from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows = 0
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(text)
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        assert not {"src", "onclick", "onload"} & values.keys(), (tag, values)
        assert tag != "link"
        self.rows += tag == "tr"
        self.ids += [values["id"] or ""] if "id" in values else []
        self.links += [values["href"] or ""] if "href" in values else []
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID_BY_SLASH

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open[-1] == "option" != tag:
            self.open.pop()
        assert self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.text += data


def limits(mode: str, bandwidth: float) -> list[Limit]:
    machine = canonical(json.loads(MACHINES[0]) | {"timing": mode})
    return [Limit(fingerprint=machine, name=n, value=x) for n, x in (("bandwidth_gbps", bandwidth), ("float32_gflops", 2.0))]


@pytest.fixture
def filled(own_store):
    """A store with two problems of which one has failures, limits, and a table."""
    store = Store.open(own_store)
    store.put([row(0, name="aten:mm", backend="aten", time_us=40.0, baseline=True), row(1, time_us=20.0)])
    store.put([failure(2, reason=f"{ATTACK} after 12 s"), failure(3, reason=f"{ATTACK} after 13 s")])
    store.put([row(4, key=KEYS[2], info={"disturbed": "a neighbour"})])
    for limit in (*limits(DISTURBED_LIMITS, 1.0), *limits(LIMITS, 4.0)):
        store.put_limits(limit.fingerprint, {limit.name: limit.value})
    store.close()
    return own_store


def test_page_of_the_store(capsys, filled, tmp_path):
    assert cli.run(["report", "--html", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / 'page.html'}\n"
    text = (tmp_path / "page.html").read_text()
    page = Page(text)
    assert len(set(page.ids)) == len(page.ids)
    assert {"#p0", "#p1"} == set(page.links), "a point for each problem"
    assert {"p0", "p1"} <= set(page.ids)
    assert ATTACK not in text
    assert f"2 choices timed_out: {ATTACK} after # s" in page.text, "reasons that differ in a number are one"
    for shown in ("2.00 ×", "20.0", "40.0", "a neighbour", "float32", "2 rows", "Dashed"):
        assert shown in page.text, shown
    assert "http" not in text.replace("http-equiv", "")


def test_limits_are_the_quiet_ones(filled):
    first, _ = read(filled).entries
    nbytes, flops = first.work()
    assert first.limit_us == pytest.approx(max(nbytes / 4.0, flops / 2.0) / 1e3)
    assert first.share == pytest.approx(first.limit_us / 20.0)


@pytest.mark.parametrize("font", [8, 22])
@pytest.mark.parametrize(
    "rates",
    [(800, 780, 420, 1500, 50), (1, 1, 1, 1), (1, 1.2, 1.4, 1.7, 2.1, 2.5, 3), (1, 1e3, 1e6), (9e9, 8e9, 1)],
    ids=["H100", "equal", "steps", "apart", "out of reach"],
)
def test_labels_of_limits_stand_apart_and_name_each(rates, font):
    x, y = Scale(low=2.0, high=2000.0, start=66.0, end=732.0), Scale(low=0.5, high=5e3, start=344.0, end=12.0)
    tops = [Roof(bandwidth=3.0, rate=float(rate), dtype=f"float{number}") for number, rate in enumerate(rates)]
    found = labels([*tops, *tops], x, y, font)
    assert sorted(name for label in found for name in label.names) == sorted(top.dtype for top in tops), "each once"
    boxes = [(label.right - 0.6 * font * len(label.text), label.right, y(label.rate)) for label in found]
    assert all(right <= x.end for _, right, _ in boxes)
    for (left, right, height), (other_left, other_right, other) in itertools.combinations(boxes, 2):
        assert right < other_left or other_right < left or abs(height - other) >= font, found
    lines = {top.dtype: y(top.at(x.high)) for top in tops}
    assert all(abs(y(label.rate) - lines[name]) < 1.2 * font for label in found for name in label.names), "near their lines"


def test_a_mean_says_of_how_many_and_why(own_store, tmp_path):
    store, busy = Store.open(own_store), {"disturbed": "other work"}
    interrupted = {"finalist": False}  # no final rounds: a short measurement of a few milliseconds may be off by any factor
    for key, us, fields in ((KEYS[0], 40.0, {}), (KEYS[1], 400.0, {"info": busy}), (KEYS[2], 40000.0, interrupted)):
        torch = row(0, key=key, name="aten:mm", backend="aten", time_us=us, baseline=True, **fields)
        store.put([torch, row(1, key=key, time_us=20.0, **fields)])
    store.close()
    result = RESULT | {"speedup_over_torch": None, "disturbed": "other work"}
    torch = {"name": "aten:mm", "time_us": 50.0, "status": "ok", "reason": "", "baseline": True, "info": {"host_us": 2.0}}
    file = tmp_path / "result.json"
    file.write_text(json.dumps([RESULT, result | {"choices": [*RESULT["choices"], torch]}, RESULT | {"speedup_over_torch": None}]))
    for path in (own_store, file):
        facts = {name: value for value, name in totals(read(path).entries)}
        assert facts["torch's speed, geometric mean of 1 of 3"] == "2.00 ×"
        assert (facts["too disturbed to compare with torch"], facts["without a time to compare"]) == ("1", "1")
        md, html = tmp_path / "x.md", tmp_path / "x.html"
        assert cli.run(["report", str(path), "--md", str(md), "--html", str(html)]) == 0
        assert "2.00 (1 of 3)" in md.read_text()
        assert "2.00 (1 of 3)" in Page(html.read_text()).text


def test_an_export_and_a_result_tell_the_same(filled, tmp_path):
    export = tmp_path / "export.json"
    assert cli.run(["export", str(export)]) == 0
    assert read(export).entries == read(filled).entries
    assert read(export).limits == read(filled).limits


def test_two_files_side_by_side(filled, tmp_path):
    later = tmp_path / "later" / filled.name
    later.parent.mkdir()
    Store.open(later).put(
        [
            row(0, name="aten:mm", backend="aten", time_us=40.0, baseline=True),
            row(1, time_us=30.0),
            row(5, key=KEYS[2], time_us=14.05),
        ]
    )
    html, md = tmp_path / "page.html", tmp_path / "page.md"
    assert cli.run(["report", str(filled), str(later), "--html", str(html), "--md", str(md)]) == 0
    page, text = Page(html.read_text()), md.read_text()
    for shown in ("1slower", "0faster", "1another pick, equal time", "1.50"):
        assert shown in page.text, shown
    assert "Dashed" not in page.text, "the later file has no limits"
    assert text.startswith(f"# gemmtune: {filled.parent.name}/{filled.name} and later/{filled.name}\n")
    assert "**1** slower, **0** faster, **1** with another pick in equal time." in text
    assert re.search(r"\| mm 16x64x32 .* \| 20\.0 \| 30\.0 \| 1\.50 \| `triton:mm_1` \| `triton:mm_1` \|", text)


def test_markdown_is_printed_and_no_cell_breaks_a_row(capsys, filled):
    store = Store.open(filled)
    store.put([row(9, name="x:`|<b>", backend="x", time_us=1.0)])
    store.close()
    assert cli.run(["report"]) == 0
    out = capsys.readouterr().out
    tables = [line for line in out.splitlines() if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", line)) in (4, 5) for line in tables)
    assert "<b>" not in out.replace("\\<", "")


def test_hidden_characters_and_machines_are_shown(own_store, tmp_path):
    store = Store.open(own_store)
    sly = canonical(json.loads(MACHINES[0]) | {"device": "\u202eevil\x1b[31m"})
    store.put([row(0), row(1, fingerprint=sly)])
    store.close()
    html, md = tmp_path / "page.html", tmp_path / "page.md"
    assert cli.run(["report", "--html", str(html), "--md", str(md)]) == 0
    for text in (html.read_text(), md.read_text()):
        assert not {"\u202e", "\x1b"} & set(text)
    page = Page(html.read_text())
    assert "machine" in page.text
    assert page.text.count("a CPU") >= 2, "among the machines, in its row and in a filter"
    store = Store.open(own_store)
    store.put([row(2, fingerprint=machine, name="aten:mm", time_us=40.0, baseline=True) for machine in (MACHINES[0], sly)])
    store.close()
    assert cli.run(["report", "--md", str(md)]) == 0
    assert "| mm 16x64x32 float32 nn on cpu (a CPU) |" in md.read_text()


def test_limits_of_a_busy_machine_are_marked(own_store, tmp_path):
    store = Store.open(own_store)
    store.put([row(1, time_us=20.0)])
    for limit in limits(DISTURBED_LIMITS, 1.0):
        store.put_limits(limit.fingerprint, {limit.name: limit.value})
    store.close()
    [entry] = read(own_store).entries
    assert entry.limit_rough
    assert cli.run(["report", "--html", str(tmp_path / "page.html")]) == 0
    assert f"~{entry.share:.0%}" in Page((tmp_path / "page.html").read_text()).text


def test_times_that_cannot_be_give_no_ratio(own_store, tmp_path):
    """The host's time was measured apart, so that it may seem longer than a whole call."""
    store = Store.open(own_store)
    store.put([row(0, name="aten:mm", time_us=1.0, baseline=True, info={"host_us": 1.9}), row(1, time_us=0.5)])
    store.close()
    assert [entry.speedup for entry in read(own_store).entries] == [None]
    made = [str(tmp_path / f"page.{end}") for end in ("html", "md", "png")]
    assert cli.run(["report", *(word for path in made for word in (f"--{path.rpartition('.')[2]}", path))]) == 0


def test_an_endless_file_is_an_error(capsys, monkeypatch):
    monkeypatch.setattr("gemmtune.report.sources.MOST_BYTES", 1000)
    assert cli.run(["report", "/dev/zero"]) == 1
    assert "got more than 1000 bytes" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["reference18.json", "quantized.json"])
def test_results_of_the_benchmark(tmp_path, name):
    source = read(ROOT / "benchmarks/results/nvidia-h200" / name)
    assert len(source.entries) >= 18
    assert all(entry.time_us and entry.speedup for entry in source.entries)
    assert "NVIDIA H200" in source.machine
    assert cli.run(["report", str(ROOT / "benchmarks/results/nvidia-h200" / name), "--html", str(tmp_path / "page.html")]) == 0
    assert "NVIDIA H200" in Page((tmp_path / "page.html").read_text()).text


@pytest.mark.parametrize(("ratio", "speed"), [(1.0, 1.0), (0.5, 2.0), (None, 6 / 5)])
def test_speed_of_a_gate_is_that_of_its_turns(tmp_path, ratio, speed):
    """Medians of both times are further apart than the turns, in which other work slows both."""
    file = tmp_path / "gate.json"
    file.write_text(json.dumps(changed(GATE, ("problems", 0, "ratio"), ratio)))
    assert read(file).entries[0].speedup == speed


def test_files_of_two_machines_say_which(tmp_path):
    results = (str(ROOT / "benchmarks/results" / device / "reference18.json") for device in ("nvidia-h200", "nvidia-h100"))
    html, md = tmp_path / "page.html", tmp_path / "page.md"
    assert cli.run(["report", *results, "--html", str(html), "--md", str(md)]) == 0
    for text in (Page(html.read_text()).text, md.read_text()):
        assert re.search(
            r"Before: nvidia-h200/reference18.json, NVIDIA H200, .* After: nvidia-h100/reference18.json, NVIDIA H100 ", text
        )


def test_a_table_has_a_bar_of_its_segments(own_store, tmp_path):
    segments = (
        Segment(lo=1, hi=16, name="triton:a", backend="triton", content_hash="a", sampled_m=1),
        Segment(lo=17, hi=64, name="aten:mm", backend="aten", content_hash="b", sampled_m=32),
    )
    store = Store.open(own_store)
    store.put_ranged(Ranged(key=KEYS[0], fingerprint=MACHINES[0], kind=TABLE, value=Table(segments=segments, seed=0).to_json()))
    store.close()
    assert cli.run(["report", "--html", str(tmp_path / "page.html")]) == 0
    assert 'aria-label="M = 1..16: triton:a, M = 17..64: aten:mm"' in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    "text", ["{", "[1]", "7", '{"scenarios": []}', '{"shapes": [1], "environment": {}}', "SQLite format 3 or not"]
)
def test_other_files_are_an_error(capsys, tmp_path, text):
    (tmp_path / "x").write_text(text)
    assert cli.run(["report", str(tmp_path / "x")]) == 1
    said = capsys.readouterr().err
    assert str(tmp_path / "x") in said
    assert text == '{"shapes": [1], "environment": {}}' or EXPECTED in said


RESULT = {
    "problem": {"text": "t"}, "pick": "a", "speedup_over_torch": 2.0, "limit_us": 1.0, "seconds": 1.0,
    "choices": [
        {"name": "a", "time_us": 5.0, "status": "ok", "reason": ""},
        {"name": "b", "time_us": 6.0, "status": "ok", "reason": ""},
        {"name": "c", "time_us": None, "status": "crashed", "reason": "x"},
    ],
}  # fmt: skip
BENCHMARK = {
    "environment": {"device": "d", "versions": {}}, "limits": {"bandwidth_gbps": 9.0},
    "shapes": [{
        "problem": "p", "pick": "a", "limit_us": 1.0, "tuning_s": {"gemmtune": 1.0}, "errors": {},
        "regimes": {"graph": {"gemmtune_us": 5.0, "references": {"torch": {"time_us": 6.0}}}},
        "finalists": [{"name": "b", "time_us": 6.0}],
    }],
}  # fmt: skip
GATE = {
    "verdict": "PASS", "rule": {}, "device": "d", "versions": {},
    "problems": [{
        "problem": json.loads(KEYS[0]), "candidate": "a", "candidate_us": 5.0, "reference_us": 6.0, "ratio": 0.5,
        "verdict": "PASS", "reason": "",
    }],
}  # fmt: skip
ODD = (-1e300, 1e308, "5", True, [1], {"a": 1}, math.nan, math.inf, 10**18)


def places(value, kind, path=()):
    """Yield the path of each value of a kind."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, x in inner:
        yield from places(x, kind, (*path, name))
    if type(value) is kind:
        yield path


def changed(whole, path, odd):
    """Return a copy of plain values with another one at the path."""
    *above, last = path
    copied = inner = copy.deepcopy(whole)
    for name in above:
        inner = inner[name]
    inner[last] = odd
    return copied


def test_odd_numbers_and_texts_are_errors(tmp_path):
    file = tmp_path / "x.json"
    for whole in ([RESULT], BENCHMARK, GATE):
        file.write_text(json.dumps(whole))
        assert [entry.time_us for entry in read(file).entries] == [5.0]
        for path in places(whole, float):
            for odd in ODD:
                file.write_text(json.dumps(changed(whole, path, odd)))
                with pytest.raises(StoreError, match=re.escape(f"{file}: ")):
                    pytest.fail(f"{path} = {odd} is taken: {read(file)}")
        for path in places(whole, str):
            for odd in (7, [1], None):  # some texts are read by nobody
                file.write_text(json.dumps(changed(whole, path, odd)))
                with contextlib.suppress(StoreError):
                    pages.report([read(file)])


def test_bad_arguments(capsys, own_store, filled, tmp_path):
    assert cli.run(["report", "a", "b", "c"]) == 2
    assert "got 3, expected one, or two" in capsys.readouterr().err
    assert cli.run(["report", str(tmp_path / "none")]) == 1
    assert "No such file" in capsys.readouterr().err
    assert cli.run(["report", "--html", str(tmp_path / "none" / "x.html")]) == 2
    assert "does not exist; make it, or name another" in capsys.readouterr().err
    filled.unlink()
    assert cli.run(["report"]) == 1
    assert "got no measurement; gemmtune tune makes some" in capsys.readouterr().err


def test_picture(filled, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib draws pictures")
    assert cli.run(["report", "--png", str(tmp_path / "x.png")]) == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_picture_without_matplotlib(capsys, filled, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.run(["report", "--png", str(tmp_path / "x.png")]) == 1
    assert "pip install matplotlib" in capsys.readouterr().err


SCRIPT = """
<script>
addEventListener("load", async () => {
  const elements = document.querySelectorAll("*").length, table = document.querySelector("#problems"), rows = () => [...table.tBodies[0].rows];
  const plain = () => rows().filter((row) => !row.classList.contains("detail"));
  const head = [...table.tHead.rows[0].cells].find((cell) => cell.textContent.trim() === "µs").firstElementChild;
  head.focus();
  const focused = document.activeElement === head;
  head.click();
  const down = plain().map((row) => Number(row.cells[[...head.parentElement.parentElement.cells].indexOf(head.parentElement)].dataset.order));
  const find = document.querySelector("form input");
  find.value = "mm 900017x";
  find.dispatchEvent(new Event("input", { bubbles: true }));
  const kept = plain().length;
  find.value = "";
  find.dispatchEvent(new Event("input", { bubbles: true }));
  const last = document.querySelector("svg a:last-of-type").getAttribute("href");
  location.hash = last;
  await new Promise((done) => addEventListener("hashchange", () => setTimeout(done)));
  const linked = document.querySelector(last)?.matches(":target") ?? false;
  const [, some, all] = document.querySelector("p[data-table=problems]")?.children ?? [];
  some?.click();
  all?.click();
  const every = plain().length;
  find.value = "mm 900017x";
  find.dispatchEvent(new Event("input", { bubbles: true }));
  plain()[0].querySelector("button")?.click();
  const luminance = (color) => color.match(/[\\d.]+/g).slice(0, 3).map((x) => (x /= 255) <= .03928 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4)
    .reduce((sum, x, i) => sum + x * [.2126, .7152, .0722][i], 0);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const color = getComputedStyle(node).backgroundColor;
      if (!/, 0\\)$/.test(color)) return color;
    }
    return "rgb(255, 255, 255)";
  };
  let contrast = 21;
  for (const node of document.querySelectorAll("main *")) {
    if (!node.childElementCount && node.textContent.trim() && !node.closest("svg")) {
      const [a, b] = [luminance(getComputedStyle(node).color), luminance(behind(node))].sort((x, y) => y - x);
      contrast = Math.min(contrast, (a + .05) / (b + .05));
    }
  }
  const [plot, words] = [document.querySelector("svg").getBoundingClientRect(), [...document.querySelectorAll("svg text")]];
  const boxes = words.map((word) => word.getBoundingClientRect());
  const cut = words.filter((_, i) => boxes[i].left < plot.left || boxes[i].right > plot.right || boxes[i].bottom > plot.bottom);
  const over = words.filter((_, i) => boxes.some((b, j) => j < i && b.left + 1 < boxes[i].right && boxes[i].left + 1 < b.right
    && b.top + 3 < boxes[i].bottom && boxes[i].top + 3 < b.bottom));
  const unread = [...cut, ...over].map((word) => word.textContent);
  const wide = document.documentElement.scrollWidth > document.documentElement.clientWidth;
  const gain = [...table.tHead.rows[0].cells].find((cell) => cell.textContent.trim() === "× torch").getBoundingClientRect();
  const out = document.createElement("pre");
  out.id = "seen";
  const page = getComputedStyle(document.body).backgroundColor;
  out.textContent = JSON.stringify({ page, gain: gain.width > 0 && gain.right <= innerWidth, elements, focused, linked, every, sorted: down.every((x, i) => !i || down[i - 1] >= x), rows: down.length, kept, contrast, wide, unread });
  document.body.append(out);
});
</script>
"""  # noqa: E501


@pytest.mark.rotates(8)
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 390])
def test_page_in_a_browser(own_store, tmp_path, dark, width):
    count = 5000 if width == 1280 and not dark else 50
    store = Store.open(own_store)
    rows = []
    for number in range(count):
        key = Problem.mm(900017 if number == 3 else 1000 + number, 64, 32, device_type="cpu").key
        rows.append(row(0, key=key, name="aten:mm", backend="aten", time_us=40.0 + number % 7, baseline=True))
        rows.append(row(1, key=key, time_us=20.0 + number % 11))
    store.put(rows)
    rates = {"bfloat16": 110.0, "float16": 108.0, "tf32": 90.0, "float8_e4m3fn": 210.0, "float32": 1.0}
    store.put_limits(MACHINES[0], {"bandwidth_gbps": 9.0} | {f"{name}_gflops": rate for name, rate in rates.items()})
    store.close()
    file = tmp_path / "page.html"
    assert cli.run(["report", "--html", str(file)]) == 0
    file.write_text(file.read_text().replace("</main>", "</main>" + SCRIPT, 1))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900", f"--user-data-dir={tmp_path / 'profile'}"]
    flags += ["--virtual-time-budget=20000", *(["--blink-settings=preferredColorScheme=0"] if dark else [])]
    done = subprocess.run([CHROMIUM, *flags, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    seen = json.loads(re.search(r'<pre id="seen">(.*?)</pre>', done.stdout)[1])
    assert (seen["focused"], seen["linked"], seen["sorted"], seen["wide"]) == (True, True, True, False), seen
    assert seen["unread"] == [], "words of the plot are cut off, or overlap"
    assert seen["gain"], "a phone shows the gain before anybody scrolls"
    assert (seen["rows"], seen["every"], seen["kept"]) == (min(count, MOST_SHOWN), count, 1), seen
    assert seen["elements"] < 30_000, "a browser takes seconds for more"
    assert seen["page"] == ("rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)")
    assert seen["contrast"] >= 4.5, seen
