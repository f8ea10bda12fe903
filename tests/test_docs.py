"""The documentation says what is so: its code runs, its links lead somewhere, the tests that it names exist.

A code block of docs/*.md is run if a comment stands before it:

    <!-- test rewritten=1 left=0        how many losses are rewritten and left alone
    torch code that runs first, unseen by the reader -->

with "defaults" for the keys' defaults (else every head is large enough). A comment `<!-- check ... -->` behind the
block holds code that runs after it, and a block behind `<!-- output -->` is what it prints. Inductor's passes run as in
the product, its kernels as eager code.
"""

import ast
import contextlib
import functools
import io
import json
import pathlib
import re

import pytest
import torch
import torch.nn.functional as F
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code
from util import collect, counters, fresh

from flce_inductor import backend

ROOT = pathlib.Path(__file__).parent.parent
PAGES = {path.name: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
_COMMENT = r"<!-- {}((?: [a-z]+(?:=\d+)?)*)\s*?(\n.*?)?\s*-->\n"
_FENCE = r"```{}\n(.*?)\n```\n"
_BLOCK = re.compile(
    _COMMENT.format("test")
    + _FENCE.format("python")
    + r"(?:<!-- output -->\n"
    + _FENCE.format("text")
    + ")?"
    + r"(?:<!-- check\n(.*?)-->\n)?",
    re.DOTALL,
)


def blocks():
    """Each code block with a test, of each page."""
    for page, text in PAGES.items():
        for found in _BLOCK.finditer(text):
            heading = re.findall(r"^#+ (.+)$", text[: found.start()], re.MULTILINE)[-1]
            yield pytest.param(*found.groups(), id=f"{page}:{heading}")


@contextlib.contextmanager
def eager_kernels(monkeypatch):
    """Inductor's passes, then the graphs in eager mode; unlike backend.tracing() it switches nothing on."""
    original = compile_fx.compile_fx

    def traced(gm, example_inputs, inner_compile=None, config_patches=None, **rest):
        if config_patches is None:  # called by itself
            return original(gm, example_inputs, backend._run_eagerly, **rest)
        patches = {**config_patches, "force_disable_caches": True}
        return original(gm, example_inputs, backend._run_eagerly, config_patches=patches, **rest)

    with monkeypatch.context() as patched:
        patched.setattr(compile_fx, "compile_fx", traced)
        yield


@pytest.mark.parametrize(("options", "before", "code", "output", "after"), [*blocks()])
def test_code(options, before, code, output, after, monkeypatch):
    for library in ("transformers", "accelerate"):
        if library in (before or "") + code:
            pytest.importorskip(library)
    wanted = dict(re.findall(r"(\w+)=(\d+)", options))
    keys = {"min_logits_bytes": 64 << 20, "min_vocab_size": 128} if "defaults" in options else {}
    scope = {"__name__": "__main__"}
    torch.manual_seed(0)
    printed = io.StringIO()
    with fresh(**keys, enable=False), eager_kernels(monkeypatch):
        exec(compile(before or "", "before", "exec"), scope)
        with collect() as sites, contextlib.redirect_stdout(printed):
            exec(compile(code, "train.py", "exec"), scope)
        # what a check compiles beside it doesn't count, but that it runs a function of the block does
        with collect() as later:
            exec(compile(after or "", "after", "exec"), scope)
    sites = sites or later
    counted = [sum(site.reason is None for site in sites), sum(site.reason is not None for site in sites)]
    assert counted == [int(wanted.get(k, 0)) for k in ("rewritten", "left")], "\n".join(map(str, sites))
    if output is not None:
        assert plain(printed.getvalue()) == plain(output)


def plain(text):
    """An output without what differs between versions of torch and machines."""
    text = re.sub(r"\d+ rows a chunk", "C rows a chunk", text.strip())
    return re.sub(r"^(    train.py:\d+: ).*", r"\1", text, flags=re.MULTILINE)


def test_every_block_is_run():
    """A comment that is written in another way would keep its block from being run, in silence."""
    for page, text in PAGES.items():
        assert text.count("<!-- test") == len(_BLOCK.findall(text)), page
        found = [x for block in _BLOCK.finditer(text) for x in block.groups()[3:] if x is not None]
        assert text.count("<!-- output") + text.count("<!-- check") == len(found), page
    assert PAGES["quickstart.md"].count("```python") == PAGES["quickstart.md"].count("<!-- test")


# ---------------------------------------------------------------- the example of how-it-works.md


def simplified(graph):
    """A line for each call of a graph."""

    def called(target):
        return target if isinstance(target, (str, torch._ops.OpOverload)) else target.__name__

    calls = [n for n in graph.nodes if n.op in ("call_function", "call_method")]
    return [f"{n.name} = {called(n.target)}({', '.join(map(repr, n.args))})" for n in calls]


def without_numbers(line):
    """A line without the numbers of buffers and nodes, and Dynamo's l_x_ for x: they differ between versions."""
    return re.sub(r"\b(?:l_)?([a-z_]+?)_?\d*\b(?=[ ,)\]]|$)", r"\1", line.strip())


@pytest.mark.skipif(torch.__version__ < "2.13", reason="shown as torch 2.13 to 2.15 make them")
def test_graphs_and_code_of_the_example(monkeypatch):
    """Each line that how-it-works.md shows is in the graphs, or in Inductor's code."""
    shown = [
        line
        for part in re.findall(r"<!-- lines -->\n```\w+\n(.*?)```", PAGES["how-it-works.md"], re.DOTALL)
        for line in part.splitlines()
    ]
    assert len(shown) > 20
    seen = []
    for kind in (backend._PreGradPass, backend._JointPass):

        def watched(self, graph, original=kind.__call__):
            seen.extend(simplified(graph))
            original(self, graph)
            seen.extend(simplified(graph))

        monkeypatch.setattr(kind, "__call__", watched)
    scope = {"torch": torch, "F": F}
    (example,) = re.findall(r"<!-- example -->\n```python\n(.*?)```", PAGES["how-it-works.md"], re.DOTALL)
    h, weight = torch.randn(1024, 64, requires_grad=True), torch.randn(32000, 64, requires_grad=True)
    caches = torch._functorch.config.patch(enable_autograd_cache=False)  # the passes don't run for what is cached
    with fresh(), caches, inductor_config.patch(fx_graph_cache=False):
        exec(example, scope)
        _, codes = run_and_get_code(lambda: scope["step"](h, weight, torch.zeros(1024).long()).backward())
        assert counters["inductor"]["flce_compiled"] == 1  # as quickstart.md says
    seen += [line for code in codes for line in code.splitlines()]
    known = {without_numbers(line) for line in seen}
    assert [line for line in shown if without_numbers(line) not in known] == []


def test_every_page_is_in_the_index():
    linked = re.findall(r"\]\(docs/([\w-]+\.md)", PAGES["README.md"])
    assert {*linked} == {*PAGES} - {"README.md"}


# ---------------------------------------------------------------- numbers


def results(name):
    return [json.loads(line) for line in (ROOT / "benchmarks" / "results" / name).read_text().splitlines()]


def test_accuracy_of_the_weight_gradient():
    """The table of numerics.md is what the results say."""
    part = PAGES["numerics.md"].split("<!-- accuracy: dweight_ratio -->\n")[1].split("<!-- end")[0]
    columns = re.findall(r'(bf16|fp16) `"(\w+)"`', part.splitlines()[0])
    names = {"bf16": "bfloat16", "fp16": "float16"}
    measured = {
        (x["dtype"], x["accum"], x["chunks"]): f"{x['dweight_ratio']:.2f}"
        for x in results("2026-11-29-h200-accuracy.jsonl")
        if x["provider"] == "ours"
    }
    rows = [[cell.strip() for cell in row.strip("| ").split("|")] for row in part.splitlines()[2:]]
    assert len(rows) >= 6 and len(columns) == 6
    for chunks, *cells in rows:
        assert cells == [measured[names[dtype], accum, int(chunks)] for dtype, accum in columns]


# ---------------------------------------------------------------- links and names


def anchors(text):
    """GitHub's anchors of a page's headings."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#{1,6} (.+?)\s*$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"\[(.+?)\]\(.+?\)", r"\1", h).lower()).replace(" ", "-") for h in headings}


def links(page):
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```", "", PAGES[page], flags=re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("page", PAGES)
def test_links(page):
    folder = ROOT if page == "README.md" else ROOT / "docs"
    for link in links(page):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (folder / path).resolve() if path else folder / page
        assert target.exists(), f"{page}: {link}"
        if anchor:
            assert anchor in anchors(target.read_text()), f"{page}: {link}"


@functools.cache
def names(path):
    """The tests of a file: functions, classes and Class::function."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        inner = [x.name for x in node.body if isinstance(x, ast.FunctionDef)] if isinstance(node, ast.ClassDef) else []
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found |= {node.name, *(f"{node.name}::{name}" for name in inner)}
    return found


def named_tests(page):
    return re.findall(r"`tests/(test_\w+\.py)(?:::([\w:]+))?`", PAGES[page])


@pytest.mark.parametrize("page", PAGES)
def test_named_tests_exist(page):
    for file, name in named_tests(page):
        path = ROOT / "tests" / file
        assert path.is_file() and (not name or name in names(path)), f"{page}: {file}::{name}"


@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page):
    """`flce_inductor/ops.py`, `templates/rows.py.jinja`, and names in them, `match/chain.py::follow`."""
    for path, name in re.findall(
        r"`((?:flce_inductor|templates|benchmarks)/[\w/.-]+\.\w+)(?:::([\w.]+))?`", PAGES[page]
    ):
        file = ROOT / path
        assert file.is_file(), f"{page}: {path}"
        found = not name or re.search(rf"^\s*(def |class )?{re.escape(name.split('.')[-1])}\b", file.read_text(), re.M)
        assert found, f"{page}: {path}::{name}"
