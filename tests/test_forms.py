"""The tables of docs/forms.md say what is so."""

import pathlib
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from util import Reason, assert_same, compiled, eager, fresh

TEXT = (pathlib.Path(__file__).parent.parent / "docs" / "forms.md").read_text()
# what a row's code stands for
CODE = {
    "Heads": "z = {}; F.cross_entropy(z.view(-1, z.size(-1)), y.view(-1))",
    "Losses and other readers of the logits": "z = F.linear(h, W); {}",
    "Between head and loss": "z = F.linear(h, W); z = {}; F.cross_entropy(z.reshape(-1, z.size(-1)), y[: len(z)] * 0)",
    "Left alone": "z = F.linear(h, W); {}",
}


def rows():
    """Code and the reason for which it is left alone, or None, of each row with code in the four tables."""
    for section, template in CODE.items():
        part = TEXT.split(f"## {section}\n")[1].split("\n## ")[0]
        found = re.findall(r"^\| `(.+?)` \| (?:yes|(?:no: )?`([A-Z_]+)`) \|", part, re.MULTILINE)
        assert len(found) == part.count("\n| `"), section
        for code, reason in found:
            program = template.format(code).replace("y[: len(z)] * 0", "torch.zeros(z.numel() // z.size(-1)).long()")
            yield pytest.param(program, Reason[reason] if reason else None, id=code)


@pytest.mark.parametrize(("program", "reason"), [*rows()])
def test_forms(program, reason):
    program = program.replace("F.dropout(z, 0.1)", "F.dropout(z, 0.0)")  # so that it is the same twice
    *before, result = program.split("; ")
    scope = {"torch": torch, "F": F, "nn": nn}
    exec("\n    ".join(["def fn(h, W, b, s, y):", *before, f"return {result}"]), scope)
    g = torch.Generator().manual_seed(0)
    h, W, b, s = (torch.randn(shape, generator=g).requires_grad_() for shape in [(2, 4, 8), (160, 8), (160,), ()])
    y = torch.randint(8, (2, 4), generator=g)
    expected = eager(scope["fn"], h, W, b, s, y)
    with fresh():
        actual = compiled(scope["fn"], h, W, b, s, y)
    assert {site.reason for site in actual.sites} == {reason}, "\n".join(map(str, actual.sites))
    assert_same(actual, expected, 1e-3 if "half" in program else None)
