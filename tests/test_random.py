"""Random training functions: compiled, each gives eager's losses and gradients, whether it was rewritten or not.

A program is drawn statement by statement. What its logits `z` look like is tracked, so that the labels `y` stay beside
their rows; whether the statements can be rewritten is not: the pass decides, and is checked against eager mode.

    FLCE_EXAMPLES=2000 pytest tests/test_random.py --hypothesis-seed=1     # more and other examples than in CI

A failing program is printed as source: paste it into test_match.py.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import os
from unittest import mock

import hypothesis
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint
from util import Reason, assert_same, compiled, eager, fresh

from flce_inductor import match

EXAMPLES = int(os.environ.get("FLCE_EXAMPLES", 0))
ARGUMENTS = ("h", "w", "b", "s", "y", "u", "c", "f")


@dataclasses.dataclass(frozen=True)
class Program:
    """A training function: hidden states h [B, T, H], weight w [V, H], b [V], scalar s, labels y [B, T] of which some
    are -100, numbers u [B * T] for rows, class weights c [V], a Python number f. All of it may be checkpointed.
    """

    sizes: tuple[int, int, int, int]
    grads: tuple[str, ...]
    dynamic: bool
    checkpoint: bool
    seed: int
    lines: tuple[str, ...]
    result: str

    @property
    def source(self) -> str:
        return "\n    ".join([f"def fn({', '.join(ARGUMENTS)}):", *self.lines, f"return {self.result}"])

    def __str__(self) -> str:
        how = f"{self.sizes=} {self.grads=} {self.dynamic=} {self.checkpoint=} {self.seed=}"
        return f"{self.source}\n# {how}".replace("self.", "")

    def function(self):
        scope = {"torch": torch, "F": F}
        exec(compile(self.source, "<random program>", "exec"), scope)
        return (lambda *args: checkpoint(scope["fn"], *args, use_reentrant=False)) if self.checkpoint else scope["fn"]

    def arguments(self) -> list[torch.Tensor | float]:
        g = torch.Generator().manual_seed(self.seed)
        B, T, H, V = self.sizes
        shapes = {"h": (B, T, H), "w": (V, H), "b": (V,), "s": (), "u": (B * T,), "c": (V,)}
        values = {k: torch.randn(shape, generator=g, dtype=torch.float64) for k, shape in shapes.items()}
        values["c"] = values["c"].exp()
        values["s"] = values["s"] + 2  # it divides
        # programs cut classes off, four at most
        values["y"] = torch.randint(V - 4, (B, T), generator=g).masked_fill(torch.rand(B, T, generator=g) < 0.2, -100)
        return [*(values[k].requires_grad_(k in self.grads) for k in ARGUMENTS[:-1]), 0.75]


@dataclasses.dataclass(frozen=True)
class Logits:
    """What a program knows of its logits, the variable z: sizes, which dimension the classes are, whether view() can
    flatten it, and whether eager mode lets it be changed in place. The labels, the variable y, have the other sizes.
    """

    z: str
    y: str
    sizes: tuple[int, ...]
    classes: int
    flat: bool
    writable: bool = True

    @property
    def dims(self) -> int:
        return len(self.sizes)

    @property
    def last(self) -> bool:
        return self.classes == self.dims - 1

    @property
    def V(self) -> int:
        return self.sizes[self.classes]

    @property
    def rows(self) -> list[int]:
        """The other dimensions."""
        return [d for d in range(self.dims) if d != self.classes]

    def among_rows(self, dim: int) -> int:
        """Which dimension of the labels a dimension of the logits is."""
        return dim - (dim > self.classes)

    def vector(self, name: str) -> str:
        """A [V] argument, in a shape that broadcasts over the rows."""
        after = self.dims - 1 - self.classes
        return f"{name}[: {self.V}]" + f".view({', '.join(['-1', *'1' * after])})" * (after > 0)


Links = list[tuple[str, Logits]]  # statements with {z} and {y}, and what the logits are behind them


def same_shape(z: Logits) -> Links:
    calls = ["contiguous()", "clone()", "double()", "to(torch.float64)", "type_as(h)"]
    return [(f"{{z}} = {{z}}.{c}", dataclasses.replace(z, flat=z.flat or c == "contiguous()")) for c in calls]


def views(z: Logits) -> Links:
    links = []
    if z.last and z.dims > 2:
        N = math.prod(z.sizes[:-1])
        view = "view" if z.flat else "reshape"
        flat = dataclasses.replace(z, sizes=(N, z.V), classes=1)
        for call in ("flatten(0, -2)", f"{view}(-1, {z.V})", f"{view}(-1, {{z}}.size(-1))", f"reshape({N}, -1)"):
            links.append((f"{{z}} = {{z}}.{call}; {{y}} = {{y}}.reshape(-1)", flat))
    if z.last and z.dims == 2:
        N = z.sizes[0]
        for p in (p for p in (2, 3, 5, 7, N) if N % p == 0):
            shaped = dataclasses.replace(z, sizes=(N // p, p, z.V), classes=2)
            links.append((f"{{z}} = {{z}}.reshape({N // p}, {p}, -1); {{y}} = {{y}}.reshape({N // p}, {p})", shaped))
    if z.dims < 4:
        links.append(
            (
                "{z} = {z}.unsqueeze(0); {y} = {y}.unsqueeze(0)",
                dataclasses.replace(z, sizes=(1, *z.sizes), classes=z.classes + 1),
            )
        )
        links.append(("{z} = {z}[None]; {y} = {y}[None]", links[-1][1]))
    if z.dims > 2 and z.sizes[0] == 1 and z.classes != 0:
        squeezed = dataclasses.replace(z, sizes=z.sizes[1:], classes=z.classes - 1)
        links.append(("{z} = {z}.squeeze(0); {y} = {y}.squeeze(0)", squeezed))
    return links


def transposes(z: Logits) -> Links:
    links = []
    for i in range(z.dims):
        for j in range(i + 1, z.dims):
            order = list(range(z.dims))
            order[i], order[j] = j, i
            sizes = tuple(z.sizes[d] for d in order)
            after = dataclasses.replace(z, sizes=sizes, classes=order.index(z.classes), flat=False)
            labels = [z.among_rows(d) for d in order if d != z.classes]
            moved = "" if labels == sorted(labels) else f"; {{y}} = {{y}}.permute({labels})"
            calls = [f"transpose({i}, {j})", f"permute({order})", f"swapaxes({i - z.dims}, {j - z.dims})"]
            calls += ["mT"] * (i == z.dims - 2) + ["t()", "T"] * (z.dims == 2)
            calls += [f"movedim({i}, {j})", f"moveaxis({j}, {i - z.dims})"] * (j == i + 1)
            links += [(f"{{z}} = {{z}}.{call}{moved}", after) for call in calls]
    return links


def slices(z: Logits) -> Links:
    links = []
    for d in z.rows:
        n, before, labels = z.sizes[d], ":, " * d, ":, " * z.among_rows(d)
        if n > 2:
            for index, index_y, size in [
                (":-1", "1:", n - 1),  # the causal shift
                ("1:", "1:", n - 1),
                ("::2", "::2", (n + 1) // 2),
                (f"{n - 2}:", f"{n - 2}:", 2),
            ]:
                after = dataclasses.replace(z, sizes=(*z.sizes[:d], size, *z.sizes[d + 1 :]), flat=False)
                links.append((f"{{z}} = {{z}}[{before}{index}]; {{y}} = {{y}}[{labels}{index_y}]", after))
                if z.last and d == z.dims - 2:
                    links.append((f"{{z}} = {{z}}[..., {index}, :]; {{y}} = {{y}}[..., {index_y}]", after))
            after = dataclasses.replace(z, sizes=(*z.sizes[:d], n - 1, *z.sizes[d + 1 :]), flat=False)
            narrowed = f"narrow({z.among_rows(d)}, 1, {n - 1})"
            links.append((f"{{z}} = {{z}}.narrow({d}, 1, {n - 1}); {{y}} = {{y}}.{narrowed}", after))
            pieces = dataclasses.replace(after, writable=False)
            for call in (
                "{x}.split({n}, {d})[0]",
                "torch.split({x}, [{n}, 1], dim={d})[0]",
                "{x}.tensor_split([{n}], {d})[0]",
            ):
                texts = [call.format(x=x, n=n - 1, d=dim) for x, dim in (("{z}", d), ("{y}", z.among_rows(d)))]
                links.append((f"{{z}} = {texts[0]}; {{y}} = {texts[1]}", pieces))
        after = dataclasses.replace(
            z, sizes=z.sizes[:d] + z.sizes[d + 1 :], classes=z.classes - (d < z.classes), flat=False
        )
        links.append((f"{{z}} = {{z}}[{before}-1]; {{y}} = {{y}}[{labels}-1]", after))
        links.append((f"{{z}} = {{z}}.select({d}, 0); {{y}} = {{y}}.select({z.among_rows(d)}, 0)", after))
        pieces = dataclasses.replace(after, writable=False)
        links.append((f"{{z}} = {{z}}.unbind({d})[-1]; {{y}} = {{y}}.unbind({z.among_rows(d)})[-1]", pieces))
        if d == 0 and n > 1:
            picked = dataclasses.replace(z, sizes=(2, *z.sizes[1:]), flat=False)
            for call in ("{x} = {x}[torch.tensor([1, 0])]", "{x} = {x}.index_select(0, torch.tensor([1, 0]))"):
                links.append((f"{call.format(x='{z}')}; {call.format(x='{y}')}", picked))
    return links


def scales(z: Logits) -> Links:
    texts = ["{z} * 0.7", "0.5 * {z}", "{z} / 1.3", "-{z}", "torch.mul({z}, 2)", "{z} * s", "s * {z}", "{z} / s.exp()"]
    texts += ["{z}.mul(s)", "{z} * s.view(1)", "torch.div({z}, s)", "{z}.neg()", "{z} * f", "{z} / f", "f * {z}"]
    return [(f"{{z}} = {text}", dataclasses.replace(z, writable=True)) for text in texts]


def shifts(z: Logits) -> Links:
    b = z.vector("b")
    texts = [
        "{z} + 0.3",
        "{z} - 0.2",
        "0.1 + {z}",
        "torch.add({z}, 0.5)",
        f"{{z}} + {b}",
        f"{{z}} - {b}",
        f"{b} + {{z}}",
    ]
    texts += [f"{{z}}.sub({b})", f"{{z}} + {b}.detach() * 2"]
    return [(f"{{z}} = {text}", dataclasses.replace(z, writable=True)) for text in texts]


def caps(z: Logits) -> Links:
    texts = ["2 * torch.tanh({z} / 2)", "3 * torch.sigmoid(({z} + 1) / 2)", "0.5 * {z}.tanh()"]
    plain = ["torch.tanh({z})", "{z}.sigmoid()", "F.tanh({z} + 0.1)"]  # these save what they return for the backward
    return [(f"{{z}} = {text}", dataclasses.replace(z, writable=text in texts)) for text in texts + plain]


def in_place(z: Logits) -> Links:
    b = z.vector("b")
    statements = ["{z} *= 0.7", "{z}.mul_(0.5)", "{z}.div_(1.3)", "{z} /= 2", "{z} += 0.1", "{z}.add_(0.2)", "{z} *= s"]
    statements += [f"{{z}} += {b}", f"{{z}}.add_({b})", f"{{z}} = {{z}}.sub_({b})", "{z} = {z}.mul_(0.5).add_(1)"]
    saves = ["{z}.tanh_()", "{z} = {z}.sigmoid_()"]
    return [(s, dataclasses.replace(z, writable=s not in saves)) for s in statements + saves] * z.writable


def cuts(z: Logits) -> Links:
    after = dataclasses.replace(z, sizes=(*z.sizes[: z.classes], z.V - 2, *z.sizes[z.classes + 1 :]), flat=False)
    before = ":, " * z.classes
    texts = [f"{{z}}[{before}:{z.V - 2}]", f"{{z}}[{before}0:{z.V - 2}]"] + [f"{{z}}[..., :{z.V - 2}]"] * z.last
    return [(f"{{z}} = {text}", after) for text in texts]


def strange(z: Logits) -> Links:
    """What isn't done row by row, or isn't known to the pass."""
    c = z.classes
    texts = ["{z}.softmax(0)", "{z}.log_softmax(0)", "{z} - {z}.mean(0, keepdim=True)", f"{{z}}.cumsum({c})"]
    texts += ["{z}.cumsum(0)", f"{{z}} - {{z}}.logsumexp({c}, keepdim=True)", f"{{z}}.softmax({c}).log()"]
    texts += [f"{{z}} - {{z}}.amax({c}, keepdim=True)", f"{{z}} * ({{y}} >= 0).unsqueeze({c})", "{z} + {z}"]
    texts += ["{z} * {z}", "{z}.clamp(-1, 1)", "F.relu({z})", f"{{z}}.flip({c})", f"{{z}}.roll(1, {c})", "1 - {z}"]
    texts += [f"{{z}} * {z.vector('b')}", "{z} + h.sum()", f"{{z}} + {{z}}.sum({c}, keepdim=True)", "{z}.exp()"]
    texts += [
        f"{{z}}.masked_fill(({{y}} < 0).unsqueeze({c}), 0.0)",
        f"{{z}}.log_softmax({c})",
        "{z}.flip(0)",
        "{z} + s",
    ]
    links = [(f"{{z}} = {text}", dataclasses.replace(z, writable=False)) for text in texts]
    links.append((f"{{z}} = {{z}}.reshape({z.V}, -1).t().reshape({[*z.sizes]})", dataclasses.replace(z, flat=False)))
    if not z.last:  # the shape fits, but the classes are no more together
        scrambled = dataclasses.replace(z, sizes=(math.prod(z.sizes) // z.V, z.V), classes=1)
        links.append((f"{{z}} = {{z}}.reshape(-1, {z.V}); {{y}} = {{y}}.reshape(-1)", scrambled))
    if z.flat:
        links.append((f"{{z}} = {{z}}.as_strided({[*z.sizes]}, {{z}}.stride())", z))
    return links


KINDS = (scales, views, same_shape, slices, transposes, shifts, caps, in_place, cuts)


class _Writer:
    """Draws a program."""

    def __init__(self, draw):
        self.draw = draw
        self.lines: list[str] = []
        self.least_V = 0  # all labels are below it

    def pick(self, options):
        return self.draw(st.sampled_from(list(options)))

    def chance(self, percent: int) -> bool:
        # shrinks towards False; not at an end of the range, which is drawn more often
        return 10 <= self.draw(st.integers(0, 99)) < 10 + percent

    def number(self, least: int, most: int) -> int:
        return self.draw(st.integers(least, most))

    def head(self, sizes: tuple[int, int, int, int]) -> Logits:
        B, T, _, V = sizes
        self.least_V = V - 4
        rows = (B, T)
        if self.chance(40):
            rows = (B * T,)
            self.lines.append("h, y = h.flatten(0, 1), y.flatten()")
        elif self.chance(25):
            rows = (T, B)
            self.lines.append("h, y = h.transpose(0, 1), y.t()")
        if self.chance(25):
            self.lines.append(
                self.pick(
                    [
                        *("h = h.tanh()", "h = h * s", "h = h.detach()", "h = F.layer_norm(h, h.shape[-1:])"),
                        *("h = h + F.embedding(y.clamp(min=0), w)", "h = F.linear(h, w[: h.size(-1)])"),
                    ]
                )
            )
        if self.chance(25):
            statement, V = self.pick(
                [
                    ("w = w[:-2]", V - 2),
                    ("w = w[1:]", V - 1),
                    ("w = w.double()", V),
                    ("w = w * 0.5", V),
                    ("w = w.detach()", V),
                    ("w = w.t().clone().t()", V),
                    ("w = w.contiguous()", V),
                ]
            )
            self.lines.append(statement)
        b, dims = f"b[: {V}]", len(rows)
        wt = self.pick(["w.t()", "w.T", "w.mT", "w.transpose(0, 1)", "w.permute(1, 0)", "w.swapaxes(-1, -2)"])
        letters = "bt"[-dims:]
        plain = ["F.linear(h, w)", f"F.linear(h, w, {b})", f"F.linear(h, w, bias={b})", f"h @ {wt}"]
        plain += [f"torch.matmul(h, {wt})", f"h.matmul({wt})", f"h @ {wt} + {b}", "torch.inner(h, w)"]
        plain += [f'torch.einsum("{letters}h,vh->{letters}v", h, w)', 'torch.einsum("...h,vh->...v", h, w)']
        plain += [
            f'torch.einsum("{letters}h,hv->{letters}v", h, {wt})',
            f'torch.einsum("vh,{letters}h->{letters}v", w, h)',
        ]
        if dims == 2:
            shape = f".view({rows[0]}, {rows[1]}, {V})"
            plain += [
                f"torch.addmm({b}, h.reshape(-1, h.size(-1)), {wt}){shape}",
                f"F.linear(h.flatten(0, 1), w){shape}",
            ]
        else:
            plain += [f"torch.addmm({b}, h, {wt})", f"torch.mm(h, {wt})", f"h.mm({wt})"]
        z = Logits("z", "y", (*rows, V), dims, flat=not any("transpose(0, 1), y" in line for line in self.lines))
        if self.chance(4):
            others = [("h.unsqueeze(-2).mul(w).sum(-1)", z), ("F.linear(h, w) + F.linear(h, w.detach())", z)]
            others.append(
                (
                    f'torch.einsum("{letters}h,vh->v{letters}", h, w)',
                    dataclasses.replace(z, sizes=(V, *rows), classes=0),
                )
            )
            if dims == 1:
                turned = dataclasses.replace(z, sizes=(V, *rows), classes=0)
                others += [("w @ h.t()", turned), ("F.linear(w, h)", turned), ("F.linear(w, h).t()", z)]
                others += [(f"torch.addmm({b}, h, {wt}, alpha=0.5)", z)]
            text, z = self.pick(others)
        else:
            text = self.pick(plain)
        self.lines += [f"z = {text}", "labels = y"]
        self.start = Logits("z", "y", (*rows, V), dims, flat=False)
        return dataclasses.replace(z, flat=False) if "einsum" in text else z

    def links(self, z: Logits, most: int) -> Logits:
        for _ in range(self.number(0, most)):
            kind = strange if self.chance(2) else self.pick(KINDS)
            z = self.link(z, kind)
        return z

    def link(self, z: Logits, kind) -> Logits:
        options = [(text, after) for text, after in kind(z) if self.least_V <= after.V]
        if options:
            text, after = self.pick(options)
            self.lines += text.format(z=z.z, y=z.y).split("; ")
            return after
        return z

    def anchor(self, z: Logits, first: bool) -> tuple[str, bool]:
        """An expression that reads the logits, and whether it has a number for each row."""
        c, name = z.classes, z.z
        index = f"{z.y}.clamp(min=0).unsqueeze({c})"
        logp = self.pick(
            [
                *(f"{name}.log_softmax({c})", f"F.log_softmax({name}, dim={c})"),
                *(f"torch.log_softmax({name}, {c - z.dims})", f"({name} - {name}.logsumexp({c}, keepdim=True))"),
            ]
        )
        by_hand = [logp, logp, logp, f"{name}.softmax({c}).log()", f"torch.log(F.softmax({name}, {c}) + 1e-3)"]
        by_hand.append(f"({logp} * 0.5).clamp(min=-3)")
        gathered = self.pick(
            [f"{{}}.gather({c}, {index}).squeeze({c})", f"torch.take_along_dim({{}}, {index}, {c}).squeeze({c})"]
            + [f"{{}}[torch.arange({z.sizes[0]}), {z.y}.clamp(min=0)]"] * (z.dims == 2 and z.last)
        )
        kinds = ["cross_entropy"] * 4 + ["nll_loss", "gather", "gather", "logsumexp", "difference", "entropy", "sum"]
        # no losses by themselves
        kinds += ["accuracy", "probability", "max"] * (not first)
        kind = self.pick(kinds)
        if kind in ("cross_entropy", "nll_loss"):
            return self.loss(z, kind, self.pick(by_hand))
        expressions = {
            "gather": [gathered.format(self.pick(by_hand)), gathered.format(f"(-{logp})")],
            "logsumexp": [
                f"{name}.logsumexp({c})",
                f"torch.logsumexp({name}, dim={c})",
                f"{name}.logsumexp({c}, keepdim=True).squeeze({c})",
            ],
            "difference": [f"{name}.logsumexp({c}) - {gathered.format(name)}"],
            "entropy": [
                f"-({name}.softmax({c}) * {logp}).sum({c})",
                f"-(({logp}).exp() * {logp}).sum(dim={c})",
                f"{name}.logsumexp({c}) - (F.softmax({name}, {c}) * {name}).sum({c})",
            ],
            "accuracy": [
                f"({name}.argmax({c}) == {z.y}).double()",
                f"({name}.max({c}).indices == {z.y}).double() * {name}.detach().logsumexp({c})",
            ],
            "probability": [
                gathered.format(f"{name}.softmax({c})"),
                gathered.format(f"{logp}.exp()"),
                f"{gathered.format(logp)}.exp()",
                f"{gathered.format(f'{name}.softmax({c})')}.log()",
            ],
            "sum": [f"{logp}.sum({c})", f"{logp}.sum({c}) / {z.V}", f"{logp}.mean({c})", f"(-{logp}).mean(dim={c})"],
            "max": [
                f"{name}.detach().amax({c})",
                f"{name}.detach().max({c}).values",
                f"{name}.detach().softmax({c}).amax({c})",
            ],
        }
        return self.pick(expressions[kind]), True

    def loss(self, z: Logits, kind: str, logp: str) -> tuple[str, bool]:
        name, y = z.z if kind == "cross_entropy" else logp, z.y
        rest = [d for d in range(z.dims) if d != z.classes]
        forms = []
        if z.dims == 1 or z.classes == 1:
            forms.append((name, y))
        if z.last and z.dims > 2:
            view = "view" if z.flat and kind == "cross_entropy" else "reshape"
            forms += [(f"{name}.flatten(0, -2)", f"{y}.flatten()"), (f"{name}.{view}(-1, {z.V})", f"{y}.reshape(-1)")]
            forms += [(f"{name}.permute({[0, z.dims - 1, *range(1, z.dims - 1)]})", y)]
            forms += [(f"{name}.transpose(1, 2)", y)] * (z.dims == 3)
        elif z.classes != 1:
            turned = f"{name}.permute({[rest[0], z.classes, *rest[1:]]})" if rest else name
            forms.append((turned, y))
        logits, labels = self.pick(forms)
        options = [f"weight=c[: {z.V}]" if self.chance(25) else ""]
        options.append(self.pick(["", "", "label_smoothing=0.1"]) if kind == "cross_entropy" else "")
        ignored = self.pick(["", "", "ignore_index=2", "ignore_index=-1"])
        labels += {"": "", "ignore_index=2": ".clamp(min=0)", "ignore_index=-1": ".clamp(min=-1)"}[ignored]
        reduction = self.pick(["", "sum", "none", "mean"])
        options += [ignored, f'reduction="{reduction}"' * bool(reduction)]
        return f"F.{kind}({', '.join(filter(None, [logits, labels, *options]))})", reduction == "none"

    def term(self, i: int, z: Logits) -> str:
        """A loss: one or more statements that end with one for the variable `l{i}`."""
        if self.chance(25):
            given, values = z, f"{z.z}, {z.y}"
            if i and self.chance(50):  # another head over the same hidden states and weight
                text = self.pick(["F.linear(h, w)", "F.linear(h * 0.5, w)", "F.linear(h, w.detach())", "h @ w.t()"])
                given, values = self.start, f"{text}, labels"
            self.lines.append(f"z{i}, y{i} = {values}")
            z = self.links(dataclasses.replace(given, z=f"z{i}", y=f"y{i}"), 2)
        expression, per_row = self.anchor(z, first=not i)
        name = f"l{i}"
        self.lines.append(f"{name} = {expression}")
        if not per_row:
            reduction = self.pick(["", "", "{r} / 7", "{r} * s", "{r}.square()", "-{r}"])
        else:
            m, u = f"({z.y}.reshape({{r}}.shape) >= 0)", "u[: {r}.numel()].view_as({r})"
            q = "(0.1 * {r}).exp()"
            reduction = self.pick(
                [
                    "{r}.mean()",
                    "{r}.sum()",
                    "{r}.sum() / 7",
                    "",
                    f"({{r}} * {u}).sum()",
                    f"({{r}} * {m}).sum() / {m}.sum()",
                    f"torch.where({m}, {{r}}, 0.0).sum() / {m}.sum().clamp(min=1)",
                    f"{{r}}.masked_fill(~{m}, 0.0).mean()",
                    f"torch.min({q} * {u}, {q}.clamp(0.9, 1.1) * {u}).mean()",
                    "({r} * (-{r}).exp().detach()).mean()",
                    "{r}.square().mean()",
                    "1e-2 * {r}.square().sum()",
                    "{r}.var()",
                    "{r}.max()",
                    "{r}.logsumexp(0).sum()",
                    "{r}[::2].sum()",
                    "{r}.mean() * s",
                    f"(({{r}} - {u}).abs() * {m}).sum()",
                ]
            )
            if z.dims == 1:
                reduction = reduction.replace("[::2]", "").replace(".var()", ".sum()")
        if reduction:
            self.lines.append(f"{name} = {reduction}".format(r=name))
        return name

    def change(self, at: int, z: Logits) -> None:
        """Change something in place, and what is changed is made at the program's start."""
        victim = self.pick(["z", "h", "w", "b", "s", "c", "y", "u"])
        call = "clamp_(min=0)" if victim == "y" else self.pick(["mul_(2)", "add_(1)"])
        self.lines.insert(at, f"{victim}.{call}")
        if victim != "z":
            self.lines.insert(0, f"{victim} = {victim}.clone()")


@st.composite
def programs(draw) -> Program:
    w = _Writer(draw)
    B, T, H, V = 3, 5, 2, 11
    if w.chance(50):  # where sizes are equal, a mistake about dimensions has the right shape
        B, T, V = w.pick([(2, 7, 13), (3, 11, 11), (11, 3, 11), (3, 3, 9), (7, 3, 21)])
    z = w.head((B, T, H, V))
    headed = len(w.lines)
    z = w.links(z, 4)
    if w.chance(3):
        w.lines[-1] = f"with torch.no_grad(): {w.lines[-1]}"
    linked = len(w.lines)
    names = [w.term(i, z) for i in range(w.pick([1, 1, 2, 2, 3]))]
    if w.chance(10):
        extra = w.pick(
            [
                "z",
                f"z.topk(2, {z.classes})[0].sum()",
                f"z.softmax({z.classes})",
                "z.sum(0).square()",
                "z.square().mean()",
                f"z.amax({z.classes})",
                "z.cumsum(0).mean()",
                "z.mean()",
                "z.std()",
                "z.shape[0] * s",
                "z.detach()",
                f"z.log_softmax({z.classes})",
                f"z.softmax({z.classes}).log().sum({z.classes})",
                f"z.exp().sum({z.classes}).log()",
            ]
        )
        w.lines.append(f"l9 = {extra}")
        names.append("l9")
    if changes := w.chance(10):
        w.change(w.pick([headed, linked, len(w.lines)]), z)
    scalars = w.chance(70)
    result = " + ".join(f"{n}.sum()" for n in names) if scalars else "(" + ", ".join(names) + ",)"
    grads = tuple(n for n in "hwbsu" if w.chance(25 if n == "u" else 80))
    # a function that changes its arguments in place can't be checkpointed
    checkpointed = w.chance(10) and not changes
    return Program((B, T, H, V), grads, w.chance(10), checkpointed, w.number(0, 99), tuple(w.lines), result)


def holds_logits(graph: torch.fx.Graph, size: int) -> list[torch.fx.Node]:
    """The nodes of floating tensors of at least size elements."""
    examples = {node: node.meta.get("example_value") for node in graph.nodes}
    return [
        n for n, x in examples.items() if isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel() >= size
    ]


def run(program: Program) -> str:
    """Check a program; says what became of it."""
    fn, args = program.function(), program.arguments()
    try:
        expected = eager(fn, *args)
    except RuntimeError as error:
        # autograd's own limits, which a program may hit where it changes tensors in place
        assert "inplace" in str(error) or "in-place" in str(error) or "does not require grad" in str(error), error
        return "fails in eager mode"
    graphs = []

    def rewrite(graph):
        before = str(graph)
        original(graph)
        graphs.append((before, graph))

    original = match.rewrite
    with fresh(), mock.patch.object(match, "rewrite", rewrite):
        actual = compiled(fn, *args, dynamic=program.dynamic or None)
        texts = [(before, str(graph)) for before, graph in graphs]
    assert_same(actual, expected, 1e-10)
    assert all(reason is None or isinstance(reason, Reason) for reason in actual.reasons)
    fired = [site for site in actual.sites if site.reason is None]
    # AOTAutograd compiles again where its first try turns out to be of the wrong kind; a checkpoint's body comes first
    last = -2 if program.checkpoint else -1
    before, after = texts[last]
    assert bool(fired) == ("row_stats" in after), f"the report is not what the graph is: {actual.sites}\n{after}"
    assert fired or before == after, f"changed, though nothing is rewritten:\n{before}\n{after}"
    B, T, _, V = program.sizes
    # of two heads, one may have no loss
    if fired and len(fired) == len(actual.sites) and not program.dynamic and ", labels" not in program.source:
        made = holds_logits(graphs[last][1], B * T * (V - 4))
        assert not made, f"logits are still there: {made}"
    return "rewritten" if fired else "left alone" if actual.sites else "no loss found"


def test_random_training_functions():
    became = collections.Counter()
    settings = hypothesis.settings(
        max_examples=EXAMPLES or 60,
        derandomize=not EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        print_blob=False,
    )

    @settings
    @hypothesis.given(programs())
    def examples(program):
        hypothesis.note(f"\n{program}")
        became[run(program)] += 1

    examples()
    print(dict(became))
    assert became["rewritten"] >= 0.5 * became.total(), became
    assert became["fails in eager mode"] < 0.2 * became.total(), became
