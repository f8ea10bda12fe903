"""The demo: its text, its batches, its verdict on the curves, and a tiny run of all three workers."""

import json
import math
import os
import subprocess
import sys
from collections import Counter

import pytest
import torch

from flce_inductor import demo


@pytest.fixture(scope="module")
def texts():
    return list(demo.corpus())


@pytest.fixture(scope="module")
def tokenizer(texts):
    return demo.Tokenizer.from_texts(texts, demo.parse_args([]).vocab)


# ----------------------------------------------------------------------------------------------------- text and batches


def test_default_vocabulary_has_at_least_30000_types_of_real_text(tokenizer):
    assert len(tokenizer) >= 30_000
    assert len(set(tokenizer.types)) == len(tokenizer)
    assert tokenizer.types[0] == "<unk>"


def test_tokens_join_to_the_text(texts):
    for text in (*texts[:40], texts[-1], "x² + ½\t\n\n   été_1 0x7f  --->\r\n"):
        assert "".join(demo.TOKEN.findall(text)) == text


def test_known_text_round_trips_and_unknown_words_become_unk(tokenizer):
    text = "def __init__(self, name=None):\n    return [i for i in range(10)]\n"
    ids = tokenizer.encode(text)
    assert 0 not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(tokenizer.encode("import zyzzyvaqx\n")) == "import<unk>\n"


def test_vocabulary_keeps_the_most_frequent_types_whatever_the_order_of_the_text():
    counts = Counter({"b": 2, "a": 2, "c": 3, "d": 1})
    reordered = Counter({"d": 1, "a": 2, "c": 3, "b": 2})
    assert demo.Tokenizer(counts, 4).types == demo.Tokenizer(reordered, 4).types == ["<unk>", "c", "a", "b"]


def test_batches_are_a_function_of_seed_and_step():
    tokens = torch.arange(1000)
    torch.manual_seed(1)
    inputs, labels = demo.batch_at(tokens, step=3, batch=4, seq=16, seed=0)
    torch.manual_seed(2)
    again = demo.batch_at(tokens, step=3, batch=4, seq=16, seed=0)
    assert inputs.shape == labels.shape == (4, 16)
    assert torch.equal(inputs, again[0]) and torch.equal(labels, again[1])
    assert torch.equal(labels, inputs + 1), "the label is the next token"
    assert not torch.equal(inputs, demo.batch_at(tokens, step=4, batch=4, seq=16, seed=0)[0])
    assert not torch.equal(inputs, demo.batch_at(tokens, step=3, batch=4, seq=16, seed=1)[0])


def test_batches_reach_the_last_token_and_no_further():
    tokens = torch.arange(18)  # two windows of 16 + 1
    seen = {demo.batch_at(tokens, step, 1, 16, 0)[1].max().item() for step in range(20)}
    assert seen == {16, 17}


def test_default_sizes_are_those_promised():
    args = demo.parse_args(["--device", "cpu"])
    assert args.batch * args.seq >= 4096
    assert args.steps >= 10
    assert args.dtype == "float32"


# ------------------------------------------------------------------------------------------------------------ agreement


def curves(**planted):
    curve = [10.6 - 0.2 * step for step in range(20)]
    return {name: planted.get(name, list(curve)) for name in demo.RUNS}


def changed(step, factor):
    curve = curves()["eager"]
    curve[step] *= factor
    return curve


@pytest.mark.parametrize("dtype", list(demo.TOLERANCES))
def test_equal_curves_agree(dtype):
    assert demo.check_agreement(curves(), dtype) == 0.0


def test_rounding_agrees():
    largest = demo.check_agreement(curves(flce_inductor=changed(7, 1 + 3e-7)), "float32")
    assert largest == pytest.approx(3e-7, rel=0.1)


@pytest.mark.parametrize("name", demo.RUNS)
@pytest.mark.parametrize("step, factor", [(0, 1 + 1e-5), (9, 1 + 2e-3), (19, 0.99)])
def test_planted_difference_fails_and_names_step_and_values(name, step, factor):
    with pytest.raises(demo.DemoError) as caught:
        demo.check_agreement(curves(**{name: changed(step, factor)}), "float32")
    assert f"step {step + 1}:" in str(caught.value)
    assert f"{changed(step, factor)[step]:.8g}" in str(caught.value)


def test_planted_difference_of_this_package_is_held_to_the_yardstick():
    with pytest.raises(demo.DemoError, match="step 10"):
        demo.check_agreement(curves(flce_inductor=changed(9, 1 + 2e-5)), "float32")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_loss_fails(bad):
    broken = curves()["eager"]
    broken[4] = bad
    with pytest.raises(demo.DemoError, match="step 5"):
        demo.check_agreement({name: list(broken) for name in demo.RUNS}, "float32")


def test_yardstick_widens_later_steps_but_never_past_the_cap():
    tolerance = demo.TOLERANCES["float32"]
    moved = tolerance.floor * 0.9  # what stock torch.compile is off by, from step 5 on
    compiled = [loss * (1 + moved * (step >= 5)) for step, loss in enumerate(curves()["eager"])]
    ours = changed(12, 1 + 3 * moved)
    demo.check_agreement(curves(compile=compiled, flce_inductor=ours), "float32")
    with pytest.raises(demo.DemoError):
        demo.check_agreement(curves(flce_inductor=ours), "float32")
    with pytest.raises(demo.DemoError, match="step 13"):  # a yardstick that is itself far off excuses nothing
        far = changed(12, 1 + 2 * tolerance.cap)
        demo.check_agreement(curves(compile=far, flce_inductor=far), "float32")


def test_missing_steps_fail():
    with pytest.raises(demo.DemoError, match="lengths"):
        demo.check_agreement(curves(flce_inductor=[1.0]), "float32")


# ----------------------------------------------------------------------------------------------------------- whole runs

TINY = ["--device", "cpu", "--steps", "3", "--batch", "2", "--seq", "32", "--hidden", "32", "--layers", "1"]
TINY += ["--vocab", "2000", "--min-logits-bytes", "1"]


def run_demo(out, *options):
    command = [sys.executable, "-m", "flce_inductor.demo", *TINY, "--out", str(out), *options]
    # At these sizes a second thread only waits for the first, and for whatever else the machine is doing.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def test_tiny_demo_of_all_three(tmp_path):
    done = run_demo(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "loss curves agree (max relative difference" in done.stdout
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert list(results) == list(demo.RUNS)
    assert results["flce_inductor"]["rewritten"] >= 1
    assert all(len(run["losses"]) == 3 for run in results.values())
    # 2000 words, equally likely at the start
    assert results["eager"]["losses"][0] == pytest.approx(math.log(2000), abs=0.2)
    for label in ("loss, step 1", "loss, step 3", "peak of a step (MiB)", "time per step (s)", "compile time (s)"):
        assert label in done.stdout
    assert (tmp_path / "demo.png").exists() or "pip install flce_inductor[demo]" in done.stdout


def canned(**changes):
    """Stands in for run_worker: results without a process."""
    result = {"losses": [7.6, 7.5, 7.4], "seconds": [2.0, 1.0, 1.0], "rewritten": 1, "step_seconds": 1.0}
    result |= {"compile_seconds": 1.0, "peak_bytes": 2**30, "resident_bytes": None, "memory_method": "made up"}
    return lambda name, *_: result | (changes if name == "flce_inductor" else {})


@pytest.mark.parametrize(
    "changes, status, message",
    [
        ({}, 0, "loss curves agree"),
        ({"rewritten": 0}, 1, "rewrote nothing"),
        ({"rewritten": None}, 1, "rewrote nothing"),
        ({"losses": [7.6, 7.5, 7.3]}, 1, "loss curves differ at step 3"),
    ],
)
def test_exit_status_and_message(tmp_path, monkeypatch, capsys, changes, status, message):
    monkeypatch.setattr(demo, "run_worker", canned(**changes))
    assert demo.main([*TINY, "--out", str(tmp_path)]) == status
    printed = capsys.readouterr()
    assert message in (printed.err if status else printed.out)
    assert "time per step (s)" in printed.out, "the table is printed in any case"


@pytest.mark.parametrize("tied", [True, False])
def test_model(tied):
    model = demo.LanguageModel(vocab=50, seq=16, hidden=32, layers=2, tied=tied)
    assert (model.head.weight is model.embedding.weight) == tied
    tokens = torch.arange(32).view(2, 16)
    logits = model(tokens)
    assert logits.shape == (2, 16, 50)
    changed_end = tokens.clone()
    changed_end[:, -1] = 0
    torch.testing.assert_close(model(changed_end)[:, :-1], logits[:, :-1], msg="attention looks ahead")
    loss = demo.train_loss(model, tokens, tokens)
    loss.backward()
    assert loss.shape == ()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_worker_that_dies_fails_with_its_last_words(tmp_path):
    done = run_demo(tmp_path, "--runs", "eager", "--lr", "-1")
    assert done.returncode == 1
    assert "Invalid learning rate" in done.stderr


def test_without_matplotlib_the_table_still_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # makes the import raise ImportError
    assert demo.main([*TINY, "--runs", "eager", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "pip install flce_inductor[demo]" in printed
    assert "time per step (s)" in printed
    assert not (tmp_path / "demo.png").exists()


def test_bad_options_are_refused():
    for options in (["--steps", "1"], ["--batch", "0"], ["--dtype", "float16"]):
        with pytest.raises(SystemExit) as caught:
            demo.parse_args(options)
        assert caught.value.code == 2
