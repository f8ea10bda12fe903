"""A second process starts warm: graphs and the tuner's choices come from Inductor's caches, and it is told."""

import json
import os
import subprocess
import sys

PROGRAM = """
import json, logging, sys, time
import torch
import flce_inductor
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from flce_inductor import kernels, lowering

KEYS = {"flce_inductor.min_logits_bytes": 0, "flce_inductor.chunk_size": 16, "flce_inductor.autotune": True,
        "flce_inductor.skip_ignored": False}  # which leaves the tuner both orders
lines, tuned, results = [], [], {}
logger = logging.getLogger("flce_inductor")
logger.setLevel(logging.INFO)
logger.addHandler(logging.Handler())
logger.handlers[-1].emit = lambda record: lines.append(record.getMessage())
benchmark = lowering._Benchmark.__call__
lowering._Benchmark.__call__ = lambda self, candidates: tuned.extend(candidates) or benchmark(self, candidates)


def run(name, **keys):
    torch._dynamo.reset()
    for group in ("inductor", "aot_autograd"):
        counters[group].clear()
    lines.clear(), tuned.clear()
    sys.modules["flce_inductor.explain"].record_run.cache_clear()
    torch.manual_seed(0)
    h = torch.randn(40, 8, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(128, 8))
    labels = torch.randint(128, (40,))

    def step(h, weight, labels):
        return torch.nn.functional.cross_entropy(h @ weight.t(), labels)

    loss = torch.compile(step, backend="flce_inductor", options={**KEYS, **keys})(h, weight, labels)
    loss.backward()
    h64, weight64 = (x.detach().double().requires_grad_() for x in (h, weight))
    step(h64, weight64, labels).backward()
    results[name] = {
        "hits": [counters["aot_autograd"]["autograd_cache_hit"], counters["inductor"]["fxgraph_cache_hit"]],
        "misses": [counters["aot_autograd"]["autograd_cache_miss"], counters["inductor"]["fxgraph_cache_miss"]],
        "compiled": counters["inductor"]["flce_compiled"],
        "error": max((a.grad - b.grad).abs().max().item() for a, b in ((h, h64), (weight, weight64))),
        "tuned": len(tuned),
        "log": list(lines),
    }


run("first")
if sys.argv[1] == "warm":
    run("key", **{"flce_inductor.chunk_size": 20})
    text = kernels.source_digest()
    kernels.source_digest = lowering.kernels.source_digest = lambda: text + "changed"
    run("source")
print(json.dumps(results))
"""


def results(cache_dir, kind):
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache_dir)}
    done = subprocess.run([sys.executable, "-c", PROGRAM, kind], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_second_process(tmp_path):
    cold, warm = results(tmp_path, "cold")["first"], results(tmp_path, "warm")
    assert all(x["error"] < 1e-6 for x in (cold, *warm.values()))
    assert cold["hits"] == [0, 0] and cold["misses"] == [1, 2] and cold["tuned"] > 1

    first = warm["first"]
    assert first["hits"] == [1, 2] and first["misses"] == [0, 0]
    assert first["tuned"] == 0
    assert first["compiled"] == cold["compiled"] == 1
    for log in (cold["log"], first["log"]):
        assert sum("compiled code runs a fused loss (loss and gradients): H=8 V=128" in line for line in log) == 1

    for changed in ("key", "source"):  # templates and the package's version are among the sources
        assert warm[changed]["misses"][0] == 1 and warm[changed]["hits"][0] == 0, changed
        assert warm[changed]["compiled"] == 1
