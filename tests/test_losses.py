"""losses.Loss: cross_entropy's reductions of row statistics, and their derivatives, against torch in float64."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from flce_inductor.losses import REDUCTIONS, Loss

V, N = 11, 23


def problem(weighted=True, ignore_index=-100):
    """Logits [N, V], labels of which a third are ignored, class weights of which two are 0."""
    torch.manual_seed(0)
    logits = (3 * torch.randn(N, V, dtype=torch.float64)).requires_grad_()
    target = torch.randint(V, (N,))
    target[::3] = ignore_index
    u = torch.rand(V, dtype=torch.float64) if weighted else None
    if weighted:
        u[:2] = 0
    return logits, target, u


def statistics(logits, target, u, ignore_index=-100):
    """nll, lse, zsum, as the ops give them."""
    nll = F.cross_entropy(logits, target, reduction="none", ignore_index=ignore_index)
    return nll, logits.logsumexp(1), (logits if u is None else logits * u).sum(1)


def ours(loss, logits, target, u):
    return loss(*statistics(logits, target, u, loss.ignore_index), target, u, V)


def theirs(loss, logits, target, u):
    """F.cross_entropy, with the z-loss by its explicit formula."""
    args = dict(reduction=loss.reduction, ignore_index=loss.ignore_index, label_smoothing=loss.label_smoothing)
    result = F.cross_entropy(logits, target, u, **args)
    if loss.z_loss:
        valid = target != loss.ignore_index
        z = loss.z_loss * logits.logsumexp(1) ** 2 * valid
        result = result + {"none": lambda: z, "sum": z.sum, "mean": lambda: z.sum() / valid.sum()}[loss.reduction]()
    return result


def same(got, want):
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-14, equal_nan=True)


LOSSES = [
    Loss(reduction, ignore_index, smoothing, z_loss)
    for reduction, ignore_index, smoothing, z_loss in itertools.product(
        REDUCTIONS, [-100, 0, 5], [0.0, 0.1, 1.0], [0.0, 1e-2]
    )
]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda x: f"{x.reduction}{x.ignore_index}-{x.label_smoothing}-{x.z_loss}")
def test_equals_cross_entropy(loss, weighted):
    logits, target, u = problem(weighted, loss.ignore_index)
    got, want = ours(loss, logits, target, u), theirs(loss, logits, target, u)
    same(got, want)
    upstream = torch.randn_like(want)
    for g, w in zip(*(torch.autograd.grad(x, logits, upstream) for x in (got, want)), strict=True):
        same(g, w)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda x: f"{x.reduction}{x.ignore_index}-{x.label_smoothing}-{x.z_loss}")
def test_weights_of_the_labels_that_sum_to_0(loss):
    """A mean is NaN then, with label smoothing, too, whose other term would be infinite."""
    logits, target, u = problem(ignore_index=loss.ignore_index)
    target[target != loss.ignore_index] = 1
    got, want = ours(loss, logits, target, u), theirs(loss, logits, target, u)
    same(got, want)
    assert want.isnan().all() == (loss.reduction == "mean")


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "loss",
    [x for x in LOSSES if x.reduction != "none"],
    ids=lambda x: f"{x.reduction}{x.ignore_index}-{x.label_smoothing}-{x.z_loss}",
)
def test_cotangents_are_its_derivatives(loss, weighted):
    logits, target, u = problem(weighted, loss.ignore_index)
    nll, lse, zsum = (x.detach().requires_grad_() for x in statistics(logits, target, u, loss.ignore_index))
    want = torch.autograd.grad(loss(nll, lse, zsum, target, u, V), (nll, lse, zsum), allow_unused=True)
    g_nll, g_lse, g_zsum, g_square = loss.cotangents(target, u, V, torch.float64)
    zero = torch.zeros(N, dtype=torch.float64)
    of_lse = zero if g_lse is None else g_lse
    of_lse = of_lse if g_square is None else of_lse + 2 * lse.detach() * g_square
    valid = target != loss.ignore_index
    same(torch.where(valid, g_nll, 0.0), torch.where(valid, want[0], 0.0))  # an ignored row's nll is a constant
    same(of_lse, zero if want[1] is None else want[1])
    same(zero if g_zsum is None else g_zsum, zero if want[2] is None else want[2])
    assert (g_lse is None) == (g_zsum is None) == (not loss.label_smoothing)
    assert (g_square is None) == (not loss.z_loss)
    for g in (g_nll, g_lse, g_zsum, g_square):
        assert g is None or not g[~valid].any()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_all_ignored(reduction, smoothing, weighted):
    """As torch: a mean over no label is NaN; and the cotangents are zeros, not 0 times infinity."""
    logits, target, u = problem(weighted)
    target[:] = -100
    for z_loss in (0.0, 0.1):
        loss = Loss(reduction, -100, smoothing, z_loss)
        got = ours(loss, logits, target, u)
        same(got, theirs(loss, logits, target, u))
        assert got.isnan() if reduction == "mean" else not got.any()
        if reduction != "none":
            assert not any(g.any() for g in loss.cotangents(target, u, V, torch.float64) if g is not None)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("others", [0.0, 1.0])
def test_labels_of_weight_zero(reduction, smoothing, others):
    """A mean over labels that all weigh 0 is 0 / 0, as torch's; with label smoothing and other classes x / 0."""
    logits, target, u = problem()
    target, u = target.clamp(max=1), torch.full_like(u, others)
    u[:2] = 0
    loss = Loss(reduction, -100, smoothing)
    got, want = ours(loss, logits, target, u), theirs(loss, logits, target, u)
    if reduction != "mean":
        same(got, want)
        return
    assert not got.isfinite() and not want.isfinite()
    g_nll = loss.cotangents(target, u, V, torch.float64)[0]
    assert g_nll[target >= 0].isnan().all()  # as the gradient of torch's
    (grad,) = torch.autograd.grad(want, logits)
    assert grad[target >= 0].isnan().all()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_rows(reduction):
    loss = Loss(reduction, -100, 0.1, 0.1)
    logits, target, u = torch.empty(0, V, dtype=torch.float64), torch.empty(0, dtype=torch.int64), problem()[2]
    same(ours(loss, logits, target, u), theirs(loss, logits, target, u))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_dtype_is_that_of_the_statistics(reduction):
    """Class weights of another dtype neither widen nor narrow a loss."""
    logits, target, u = problem()
    loss = Loss(reduction, -100, 0.1, 0.1)
    stats = [x.float() for x in statistics(logits, target, u)]
    assert loss(*stats, target, u, V).dtype == torch.float32
    assert loss(*stats, target, u.bfloat16(), V).dtype == torch.float32
    if reduction != "none":
        assert {g.dtype for g in loss.cotangents(target, u, V, torch.float32)} == {torch.float32}
