"""Every benchmark runs on the CPU at a tiny shape, says what it measured, and fails when a provider is wrong.

The passes run as in the product, the graphs by eager kernels, which need no C++ compiler; one test takes Inductor.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
from util import TRACING, fresh

from benchmarks import (
    accumulation,
    accuracy,
    chunk_curve,
    compile_time,
    cross_entropy,
    flce,
    ignored,
    measure,
    peers,
    report,
    train,
    unaligned,
)

ORIGIN = {"dtype", "date", "card", "driver", "threads", "torch", "flce_inductor", "commit"}
TIMES = {"ms", "ms_min", "ms_p20", "ms_p80", "idle_ms", "first_step_s", "peak_mib", "peak_plus_mib"}
HEAD = ["--device", "cpu", "--dtype", "float32", "--repeats", "2"]


@pytest.fixture(autouse=True)
def _eager_kernels(monkeypatch):
    def compiled(fn, backend="inductor", dynamic=None, **options):
        return torch.compile(
            peers.own(fn), backend=TRACING if backend == "flce_inductor" else "aot_eager", dynamic=dynamic
        )

    monkeypatch.setattr(peers, "compiled", compiled)
    monkeypatch.setattr(measure, "_start_compiler", lambda device: None)
    with fresh():
        yield


def run(capsys, command, *args: str, status: int = 0) -> list[dict]:
    """Its lines."""
    assert command.main(list(args)) == status
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for line in lines:
        assert line.keys() >= ORIGIN, line
        assert "missing" in line or line["provider"] == "floor" or line["gate"] == (status == 0), line
    return lines


def by_provider(lines: list[dict]) -> dict[str, dict]:
    return {line["provider"]: line for line in lines}


def test_flce(capsys):
    providers = "floor,eager,compile,auto_chunker,native,liger,ours"
    lines = run(capsys, flce, *HEAD, "--shapes", "96x16x300:bfloat16@C=32+dense", "--providers", providers)
    of = by_provider(lines)
    assert of["liger"]["missing"]
    for name in ("floor", "eager", "compile", "auto_chunker", "ours C=auto", "ours C=32", "ours dense"):
        assert of[name].keys() >= TIMES | {"N", "H", "V", "gradients_mib"}, of[name]
        assert of[name]["ms_min"] <= of[name]["ms_p20"] <= of[name]["ms"] <= of[name]["ms_p80"]
        assert (of[name]["N"], of[name]["H"], of[name]["V"], of[name]["dtype"]) == (96, 16, 300, "bfloat16")
    for name in ("eager", "compile", "ours C=auto"):
        assert all(0 < of[name][key] < 2e-2 for key in ("loss_err", "dh_err", "dweight_err"))
    assert of["ours C=auto"]["rewritten"] and "rewritten" not in of["compile"]
    assert of["auto_chunker"]["chunked"] is False


def test_over_n(capsys):
    lines = run(capsys, flce, *HEAD, "--shapes", "32x16x300", "--providers", "ours", "--over", "N", "--most", "128")
    assert [line["N"] for line in lines] == [32, 64, 128]


def test_presets_can_be_parsed():
    for providers, shapes in flce.PRESETS.values():
        for text in shapes.split():
            shape = flce.parse(text, "bfloat16", providers.split(","))
            made, missing = peers.contenders(shape.providers, getattr(torch, shape.dtype))
            assert len(made) + len(missing) == len(shape.providers)
            assert all(line["missing"] for line in missing)
    with pytest.raises(ValueError, match="isn't NxHxV"):
        flce.parse("8192x4096", "bfloat16", [])
    with pytest.raises(ValueError, match="no provider"):
        peers.make("other")


def test_unaligned(capsys):
    sizes = ["--rows", "64", "--hidden", "16", "--base", "256", "--offsets", "0,1", "--others", "300"]
    lines = run(capsys, unaligned, *HEAD, *sizes, "--providers", "floor,ours")
    assert [line["V"] for line in lines] == [256, 256, 257, 257, 300, 300]


def test_ignored(capsys):
    lines = run(capsys, ignored, *HEAD, "--shape", "64x16x300", "--shares", "0.5,0", "--providers", "liger,dense,ours")
    assert by_provider(lines)["liger"]["missing"]
    assert [line["ignored"] for line in lines if line["provider"] == "ours C=auto"] == [0.5, 0, 0.5, 0]
    assert {line["pattern"] for line in lines if "ms" in line} == {"random", "prefix"}
    assert all(line["expected_ms"] > 0 for line in lines if "ms" in line)


def test_chunk_curve(capsys):
    lines = run(capsys, chunk_curve, *HEAD, "--shapes", "64x16x300", "--least", "32")
    of = by_provider(lines)
    assert of.keys() == {"floor", "compile", "ours C=auto", "ours tuned", "ours C=32", "ours C=64"}
    assert of["ours C=32"]["chosen"] == [] and of["ours C=64"]["chosen"] == ["default"]
    assert of["ours C=64"]["slab_mib"] == round(64 * 300 * 4 / 2**20, 1)


def test_cross_entropy(capsys):
    lines = run(capsys, cross_entropy, *HEAD, "--shapes", "48x300", "--providers", "eager,liger,ours,in_place")
    for form in cross_entropy.FORMS:
        of = by_provider([line for line in lines if line["form"] == form])
        assert of["liger"]["missing"]
        assert of["ours"].keys() >= TIMES | {"loss_err", "dlogits_err"}
        assert ("token_err" in of["ours"]) == (form == "none+mean")


def test_accuracy(capsys):
    sizes = ["--shape", "64x16x300", "--dtypes", "bfloat16", "--chunks", "2"]
    lines = run(capsys, accuracy, "--device", "cpu", *sizes)
    assert [line["accum"] for line in lines if line["provider"] == "ours"] == ["param", "float32", "auto"]
    assert all(line["above_limit"] == [] for line in lines if "missing" not in line)


def test_a_nan_is_above_every_limit(monkeypatch, capsys):
    explicit = accuracy.flce_inductor.linear_cross_entropy
    monkeypatch.setattr(
        accuracy.flce_inductor, "linear_cross_entropy", lambda *a, **k: explicit(*a, **k) * float("nan")
    )
    assert accuracy.main(["--device", "cpu", "--shape", "64x16x300", "--dtypes", "float32", "--chunks", "1"]) == 1
    assert '"above_limit": ["loss", "dh", "dweight"]' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "lengths", "providers"),
    [
        (["--dtype", "float32"], [24, 32], "liger,ours"),
        (["--dtype", "bfloat16", "--autocast", "--checkpoint"], [32], "compile,by_hand,ours"),
    ],
)
def test_train(monkeypatch, capsys, options, lengths, providers):
    monkeypatch.setitem(peers._PEERS, "by_hand", lambda: peers.eager)
    sizes = ["--preset", "tiny", "--layers", "1", "--lengths", ",".join(map(str, lengths)), "--batch", "2"]
    lines = run(capsys, train, *HEAD, *sizes, *options, "--providers", providers)
    of = by_provider(lines)
    assert ("missing" in of["liger"]) if "liger" in of else of.keys() == {"compile", "by_hand", "ours C=auto"}
    assert [line["length"] for line in lines if line["provider"] == "ours C=auto"] == lengths
    ours = of["ours C=auto"]
    assert ours.keys() >= TIMES | {"tokens_per_s", "parameters", "loss_err", "dhead_err", "dfirst_err"}
    assert ours["rewritten"] and ours["tokens_per_s"] == pytest.approx(64e3 / ours["ms"], rel=1e-3)


def test_train_largest(capsys):
    measure.tidy(False)
    memory = (measure.in_use(False) >> 20) + 40
    sizes = ["--preset", "tiny", "--layers", "1", "--lengths", "512", "--memory", str(memory)]
    assert train.main([*HEAD, *sizes, "--largest", "batch", "--providers", "ours"]) == 0
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert line["tokens"] == 512 * line["batch"] > 0
    assert line["peak_mib"] <= memory and line["tried"] > 1


def test_train_timeline(capsys):
    sizes = ["--preset", "tiny", "--layers", "1", "--lengths", "64", "--batch", "8"]
    assert train.main([*HEAD, *sizes, "--timeline", "--providers", "ours"]) == 0
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    ms, used = zip(*line["timeline"], strict=True)
    assert list(ms) == sorted(ms) and ms[0] == 0 and len(ms) > 2
    assert min(used) > 50


def test_a_timeline_of_the_allocator(monkeypatch):
    events = [("segment_alloc", 99), ("alloc", 4), ("alloc", 8), ("free_requested", 4), ("free_completed", 4)]
    events = [{"action": a, "size": n << 20, "time_us": 500.0 * i} for i, (a, n) in enumerate(events)]
    for name, value in {
        "synchronize": None,
        "empty_cache": None,
        "memory_allocated": 10 << 20,
        "current_device": 1,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    recorded = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **how: recorded.append(how["enabled"]))
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": [[], events]})
    found = train.timeline(lambda: recorded.append("step"), True)
    assert recorded == ["all", "step", None]
    assert found == [[0, 10], [0.5, 14], [1, 22], [1.5, 22], [2, 18]]
    assert train.timeline(lambda: None, True, points=2) == [[1, 22], [1.5, 22]]


@pytest.mark.gpu
def test_on_a_gpu(capsys):
    head = ["--device", "cuda", "--repeats", "2"]
    lines = run(capsys, flce, *head, "--shapes", "256x64x1000", "--providers", "floor,compile,ours")
    assert all(line["ms"] > 0 and line["idle_ms"] > 0 and line["driver"] for line in lines)
    assert by_provider(lines)["ours C=auto"]["peak_plus_mib"] > 0
    lines = run(capsys, cross_entropy, *head, "--shapes", "64x1000", "--forms", "mean", "--providers", "ours,in_place")
    assert by_provider(lines).keys() == {"ours", "ours in place"}
    sizes = ["--preset", "tiny", "--layers", "1", "--lengths", "64"]
    assert run(capsys, train, *head, *sizes, "--providers", "ours")[0]["rewritten"]
    assert train.main([*head, *sizes, "--providers", "ours", "--timeline"]) == 0
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    used = [mib for _, mib in line["timeline"]]
    assert max(used) > min(used) >= 0
    assert train.main([*head, *sizes, "--providers", "ours", "--largest", "batch", "--memory", "100"]) == 0
    assert 0 < json.loads(capsys.readouterr().out)["peak_mib"] <= 100


def _no_softmax(h, weight, target, bias=None):
    """The right loss; gradients as if the softmax were constant."""
    logits = h @ weight.t()
    return peers.eager(h, weight, target).detach() - (logits - logits.detach()).gather(1, target[:, None]).mean()


def _half(h, weight, target, bias=None):
    return peers.eager(h, weight, target) * 1.05


def _raises(h, weight, target, bias=None):
    raise RuntimeError("on purpose")


@pytest.mark.parametrize("wrong", [_no_softmax, _half])
def test_the_gate_fails_when_a_provider_is_wrong(monkeypatch, capsys, wrong):
    monkeypatch.setitem(peers._PEERS, "liger", lambda: wrong)
    assert flce.main([*HEAD, "--shapes", "256x32x2000:bfloat16", "--providers", "eager,liger"]) == 1
    of = by_provider(map(json.loads, capsys.readouterr().out.splitlines()))
    assert of["eager"]["gate"] is True and of["liger"]["gate"] is False


def test_a_provider_that_raises_is_a_line(monkeypatch, capsys):
    monkeypatch.setitem(peers._PEERS, "liger", lambda: _raises)
    assert flce.main([*HEAD, "--shapes", "32x16x300", "--providers", "eager,liger"]) == 1
    of = by_provider(map(json.loads, capsys.readouterr().out.splitlines()))
    assert of["liger"]["failed"] == "RuntimeError: on purpose" and of["eager"]["gate"]


def test_out_of_memory_is_a_line(monkeypatch, capsys):
    def exhausted(h, weight, target, bias=None):
        raise torch.OutOfMemoryError("as the allocator says")

    monkeypatch.setitem(peers._PEERS, "liger", lambda: exhausted)
    assert flce.main([*HEAD, "--shapes", "32x16x300", "--providers", "eager,liger"]) == 0
    assert by_provider(map(json.loads, capsys.readouterr().out.splitlines()))["liger"]["out_of_memory"] is True


def test_ours_must_have_rewritten_the_loss(monkeypatch, capsys):
    monkeypatch.setattr(peers, "ours", lambda **keys: peers.compiled(peers.eager))
    assert flce.main([*HEAD, "--shapes", "32x16x300", "--providers", "ours"]) == 1
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert line["gate"] is False and line["loss_err"] < 1e-6


@pytest.mark.parametrize(
    ("spec", "reason"),
    [("liger", "runs on a GPU"), ("cce", "runs on a GPU"), ("quack", "runs on a GPU"), ("native", "has no torch.nn")],
)
def test_a_missing_peer_has_a_reason(monkeypatch, capsys, spec, reason):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delattr(torch.nn.functional, "linear_cross_entropy", raising=False)
    (line,) = run(capsys, flce, *HEAD, "--shapes", "32x16x300:float16", "--providers", spec)
    assert line["provider"] == spec and reason in line["missing"]


def test_what_cannot_be_imported_is_missing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for package in ("liger_kernel", "cut_cross_entropy", "quack"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(vars(torch._inductor.config), "auto_chunker", raising=False)
    specs = ["liger", "cce", "quack", "auto_chunker", "auto_chunker=4"]
    made, missing = peers.contenders(specs, torch.bfloat16)
    assert not made and [line["provider"] for line in missing] == specs
    with pytest.raises(peers.Missing, match="takes float16 and bfloat16"):
        peers.make("cce", torch.float32)


def test_the_order_is_seeded():
    def order() -> list[str]:
        seen = []
        trial = measure.Trial(lambda fn, _: seen.append(fn()), lambda fn: {}, fresh=False)
        contenders = {name: lambda name=name: name for name in "abcd"}
        assert measure.times(contenders, trial, False, 6).keys() == set("abcd")
        return seen

    first = order()
    rounds = [tuple(first[i : i + 4]) for i in range(0, 24, 4)]
    assert order() == first
    assert all(sorted(each) == list("abcd") for each in rounds) and len(set(rounds)) > 2


def test_times_are_those_of_the_step(monkeypatch):
    steps = []
    monkeypatch.setattr(measure, "seconds", lambda work, cuda: (work(), steps[-1])[1])
    prepared = iter([0.01, 0.03, 0.02, 0.05, 0.04])
    trial = measure.Trial(lambda fn, seconds: steps.append(seconds), lambda fn: {}, lambda: next(prepared))
    found = measure.times({"any": None}, trial, False, 5)["any"]
    assert found == {"ms": 30, "ms_min": 10, "ms_p20": 20, "ms_p80": 40, "idle_ms": None}


def test_peak_counts_what_is_freed_again():
    found = measure.peak(lambda: torch.ones(8 << 20), False)
    assert 31 < found["peak_plus_mib"] < 40
    kept = torch.ones(8 << 20)
    assert measure.peak(lambda: None, False)["peak_plus_mib"] < 8
    assert len(kept)


def test_more_than_eight_chunk_sizes_are_all_compiled(capsys):
    specs = ",".join(f"C={rows}" for rows in range(8, 17))
    lines = run(capsys, flce, *HEAD, "--repeats", "1", "--shapes", "32x16x300", "--providers", specs)
    assert len(lines) == 9 and all(line["rewritten"] for line in lines)


def _process(*args: str, timeout: float = 300) -> list[dict]:
    environment = {**os.environ, "PYTHONPATH": str(report.ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *args]
    done = subprocess.run(command, cwd=report.ROOT, env=environment, stdout=subprocess.PIPE, text=True, timeout=timeout)
    assert done.returncode == 0
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_by_inductor_in_a_process():
    lines = _process("benchmarks.flce", *HEAD, "--shapes", "1024x32x8000", "--providers", "eager,C=256")
    of = by_provider(lines)
    assert of["ours C=256"]["rows"] == 256 and of["ours C=256"]["gate"]
    logits = 1024 * 8000 * 4 / 2**20
    assert of["eager"]["peak_plus_mib"] > logits > of["ours C=256"]["peak_plus_mib"] > logits / 4
    assert of["ours C=256"]["first_step_s"] > 5 * of["ours C=256"]["ms"] / 1e3


def test_compile_time_and_accumulation_start_processes_of_their_own(monkeypatch, capsys):
    started = []

    def started_process(command, env=None, **_):
        started.append(command)
        args = command[command.index("--worker") :]
        with fresh():
            torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"] = int(len(started) % 2 == 0)
            module = accumulation if "benchmarks.accumulation" in command else compile_time
            capsys.readouterr()
            assert module.main(args) == 0
        return subprocess.CompletedProcess(command, 0, capsys.readouterr().out)

    with monkeypatch.context() as patched:
        for module in (compile_time, accumulation):
            patched.setattr(module.subprocess, "run", started_process)
        patched.setattr(measure, "about", lambda device, dtype: dict.fromkeys(ORIGIN))
        sizes = ["--device", "cpu", "--dtype", "float32", "--shape", "64x16x300"]
        assert compile_time.main([*sizes, "--rounds", "1", "--warm", "1", "--providers", "compile,ours"]) == 0
        times = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert accumulation.main([*sizes, "--micro-batches", "2"]) == 0
    assert len(started) == 6
    assert [(line["provider"], line["state"]) for line in times] == [
        ("compile", "cold"),
        ("compile", "warm"),
        ("ours", "cold"),
        ("ours", "warm"),
    ]
