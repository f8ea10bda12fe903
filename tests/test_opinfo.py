"""PyTorch's own samples for nn.functional.linear_cross_entropy, compiled and through the explicit function."""

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F

import flce_inductor
from flce_inductor.backend import tracing_backend

pytestmark = pytest.mark.skipif(
    not hasattr(F, "linear_cross_entropy"), reason="torch has linear_cross_entropy from 2.13 on"
)


def samples() -> list:
    """The samples, without the chunking options, which are another implementation's."""
    from torch.testing._internal.common_methods_invocations import op_db

    distinct = {}
    for op in op_db:
        if op.name == "nn.functional.linear_cross_entropy":
            for sample in op.sample_inputs("cpu", torch.float64, requires_grad=True):
                kwargs = {k: v for k, v in sample.kwargs.items() if k != "options"}
                described = {k: tuple(v.shape) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
                shapes = [(tuple(x.shape), x.dtype) for x in (sample.input, *sample.args)]
                distinct[str((shapes, described))] = (sample.input, sample.args, kwargs)
    return list(distinct.values())


def results(fn, input, args, kwargs) -> list[torch.Tensor]:
    """The loss and the gradients of all that requires them."""
    inputs = [input, *args, *kwargs.values()]
    leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    loss = fn(input, *args, **kwargs)
    upstream = torch.linspace(1, 2, loss.numel(), dtype=loss.dtype).reshape(loss.shape)
    return [loss.detach(), *torch.autograd.grad((loss * upstream).sum(), leaves, allow_unused=True)]


def test_samples():
    explicit = rewritten = 0
    cases = samples()
    assert len(cases) > 30
    for input, args, kwargs in cases:
        weight, target = args
        want = results(lambda x, w, t, **k: F.linear_cross_entropy(x, w, t, **k), input, args, kwargs)
        torch._dynamo.reset()
        before = torch._dynamo.utils.counters["inductor"]["flce_rewritten"]
        with inductor_config.patch({"flce_inductor.min_logits_bytes": 0, "flce_inductor.min_vocab_size": 0}):
            compiled = torch.compile(
                lambda x, w, t, k=kwargs: F.linear_cross_entropy(x, w, t, **k), backend=tracing_backend
            )
            got = results(lambda x, w, t, f=compiled, **_: f(x, w, t), input, args, kwargs)
        rewritten += torch._dynamo.utils.counters["inductor"]["flce_rewritten"] - before
        torch.testing.assert_close(got, want)
        if weight.dim() == 2 and target.dtype == torch.int64:
            explicit += 1
            got = results(flce_inductor.linear_cross_entropy, input, args, kwargs)
            torch.testing.assert_close(got, want)
    assert explicit >= 10 and rewritten >= 5
