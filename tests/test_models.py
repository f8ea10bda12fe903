"""Models as they are trained: the step is rewritten, and loss and gradients are those of float64 eager mode.

Hugging Face's models are tiny and random, nothing is downloaded; most have no layer between embedding and head, because
tracing layers is what takes the time. What a model or trainer does around the loss (shifting
labels, casting, scaling, dividing by the number of items) is theirs; the tests only count what was rewritten.
"""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
import util
from torch import nn
from util import TRACING, Reason, assert_same, check, compiled, eager, fresh

import flce_inductor
from flce_inductor import backend

V = 160
LLAMA = dict(
    vocab_size=V,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=32,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
NO_LAYERS = {**LLAMA, "num_hidden_layers": 0}
HEADS_OF_8 = {**NO_LAYERS, "head_dim": 8}
GPT2 = dict(vocab_size=V, n_embd=16, n_layer=0, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=2)
GPT2 |= dict(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
BERT = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
BERT |= dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
T5 = dict(vocab_size=V, d_model=16, d_kv=8, d_ff=24, num_layers=0, num_heads=2, dropout_rate=0.0)
BART = dict(vocab_size=V, d_model=16, encoder_layers=0, decoder_layers=0, dropout=0.0, max_position_embeddings=32)
BART |= dict(encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24)
MOE = {**LLAMA, "head_dim": 8, "num_experts_per_tok": 2, "output_router_logits": True}

# model, the configuration's class, its arguments
MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**HEADS_OF_8, "final_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", HEADS_OF_8),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", HEADS_OF_8),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "bert": ("BertForMaskedLM", "BertConfig", BERT),
    "t5": ("T5ForConditionalGeneration", "T5Config", {**T5, "decoder_start_token_id": 0}),
    "bart": ("BartForConditionalGeneration", "BartConfig", BART),
    "cohere": ("CohereForCausalLM", "CohereConfig", {**NO_LAYERS, "logit_scale": 0.25}),
    "granite": ("GraniteForCausalLM", "GraniteConfig", {**NO_LAYERS, "logits_scaling": 4.0}),
    "phi": ("PhiForCausalLM", "PhiConfig", NO_LAYERS),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**MOE, "num_local_experts": 4}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**MOE, "num_experts": 4, "moe_intermediate_size": 8}),
}


def hugging_face(name):
    transformers = pytest.importorskip("transformers")
    model, config, arguments = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**arguments)).train()


def batch(rows=2, time=12, seed=0):
    """Token ids [rows, time], and labels of which a third are ignored."""
    ids = torch.randint(3, V, (rows, time), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:, : time // 3] = -100
    return ids, labels


def loss_of(model, ids, labels, **more):
    return model(input_ids=ids, labels=labels, **more).loss


PLAIN = ("llama", "gemma2", "gemma3", "qwen3", "bert", "t5", "bart", "cohere", "granite", "phi")


@pytest.mark.parametrize("name", PLAIN)
def test_hugging_face(name):
    # as Trainer calls a model: the sum, divided by the items of all micro-batches
    more = {"num_items_in_batch": torch.tensor(7)} if name == "qwen3" else {}
    model = hugging_face(name)
    if name == "t5" and torch.__version__ < "2.13":  # before, stock compile doesn't take its cache's copy of the config
        with pytest.raises(torch._dynamo.exc.Unsupported, match="deepcopy"):
            torch.compile(loss_of, backend="aot_eager", fullgraph=True)(model, *batch())
        more["use_cache"] = False
    (site,) = check(lambda *a: loss_of(*a, **more), model, *batch()).sites
    assert (site.N, site.H, site.V, site.one_pass) == ("24", "16", str(V), True)
    assert site.loss == f"cross_entropy({'sum' if name == 'qwen3' else 'mean'})"


def test_gpt2_breaks_the_graph_between_head_and_loss():
    """Its loss_type is None, so that the library logs a warning just before the loss."""
    model, (ids, labels) = hugging_face("gpt2"), batch()
    with fresh():
        report = flce_inductor.explain(loss_of, model, ids, labels)
    assert [site.reason for site in report] == [Reason.NO_HEAD]
    assert "logging.Logger" in report.breaks[0] and "from outside of ForCausalLMLoss, " in report[0].detail
    model.loss_type = "ForCausalLM"
    check(loss_of, model, ids, labels)


@pytest.mark.parametrize(("name", "warm"), [("mixtral", True), ("qwen3_moe", False)])
def test_mixture_of_experts(name, warm):
    """The first call installs hooks, which breaks the graph, so that the model's forward is compiled by itself and
    returns its logits. unused_logits="nan" takes them; after a call in eager mode there are none.
    """
    model, args = hugging_face(name), batch()
    reference = copy.deepcopy(model)
    reference.set_experts_implementation("batched_mm")  # the default isn't there for float64
    expected = eager(loss_of, reference, *args)
    if warm:
        loss_of(model, *args)
    with fresh(unused_logits="nan"), util.collect() as sites:
        actual = util.outcome_of(torch.compile(loss_of, backend=TRACING), (model, *args))
    assert_same(actual, expected, 1e-4)
    assert [(site.reason, site.returns_nan) for site in sites] == [(None, not warm)]


# ---------------------------------------------------------------- the model compiled, and its logits not read


def trained(model, step, batches):
    """Losses of a few steps of Adam."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for ids, labels in batches:
        loss = step(ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_compiled_model():
    """torch.compile(model) itself, with unused_logits="nan": trained as in eager mode; evaluation has its logits."""
    model, batches = hugging_face("llama"), [batch(seed=seed) for seed in range(3)]
    ids, labels = batches[0]
    reference = copy.deepcopy(model).double()
    losses = trained(reference, lambda *b: loss_of(reference, *b), batches)
    seen = []

    def train(*b):
        out = step(input_ids=b[0], labels=b[1])
        seen.append(out.logits)
        return out.loss

    with fresh(unused_logits="nan"), util.collect() as sites:
        step = torch.compile(model, backend=TRACING)
        assert trained(model, train, batches) == pytest.approx(losses, rel=1e-5)
        assert [site.returns_nan for site in sites] == [True]
        assert all(z.isnan().all() and z.shape == (2, 12, V) and not z.requires_grad for z in seen)
        assert all(z.untyped_storage().nbytes() == z.itemsize for z in seen)
        model.eval()
        with torch.no_grad():
            out, expected = step(input_ids=ids, labels=labels), reference(input_ids=ids, labels=labels)
        torch.testing.assert_close(out.logits.double(), expected.logits, rtol=0, atol=1e-4)
        assert out.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)


def test_trainer(tmp_path):
    """transformers.Trainer(torch_compile=True) with the flag of stock Inductor, gradient accumulation, prediction."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    rows = [dict(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids)) for ids in batch(16)[0]]

    def train(model, torch_compile):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            torch_compile=torch_compile,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=3,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return losses, torch.from_numpy(trainer.predict(rows).predictions)

    model = hugging_face("llama")
    losses, predictions = train(copy.deepcopy(model), False)
    with fresh(enable=True, unused_logits="nan"), util.collect() as sites, backend.tracing():
        actual_losses, actual_predictions = train(model, True)
    assert actual_losses == pytest.approx(losses, rel=1e-5) and losses[-1] < losses[0]
    torch.testing.assert_close(actual_predictions, predictions, rtol=0, atol=1e-4)
    assert [(site.reason, site.loss, site.returns_nan) for site in sites] == [(None, "cross_entropy(sum)", True)]


# ---------------------------------------------------------------- code that isn't Hugging Face's


class GPT(nn.Module):
    """A model in nanoGPT's form: tied weights; forward(ids, targets) returns (logits, loss), and at inference, without
    targets, the logits of the last position.
    """

    def __init__(self, H=16):
        super().__init__()
        self.embed = nn.Embedding(V, H)
        self.body = nn.Sequential(nn.LayerNorm(H), nn.Linear(H, H), nn.GELU())
        self.lm_head = nn.Linear(H, V, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids, targets=None):
        x = self.embed(ids)
        x = x + self.body(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def gpt():
    torch.manual_seed(0)
    ids, labels = batch()
    return GPT(), ids, labels.masked_fill(labels == -100, -1)


def test_nanogpt():
    """The step that returns the loss is rewritten; the model compiled by itself under unused_logits="nan"."""
    check(lambda model, *b: model(*b)[1], *gpt())
    check(lambda model, *b: model(*b), *gpt(), reasons=Reason.RETURNED)
    model, ids, labels = gpt()
    expected = eager(lambda model, *b: model(*b)[1], model, ids, labels)
    with fresh(unused_logits="nan"), util.collect() as sites:
        step = torch.compile(model, backend=TRACING)
        assert_same(util.outcome_of(lambda _, *b: step(*b)[1], (model, ids, labels)), expected)
        assert step(ids, labels)[0].isnan().all()
        torch.testing.assert_close(step(ids)[0], model(ids)[0])
    assert [site.reason for site in sites] == [None]


class Module(nn.Module):
    """In the form of a Lightning module: Lightning compiles its steps, which log."""

    def __init__(self):
        super().__init__()
        self.model, self.logged = GPT(), {}

    def log(self, name, value):
        self.logged[name] = value

    def training_step(self, batch, index):
        ids, labels = batch
        x = self.model.embed(ids)
        logits = self.model.lm_head(x + self.model.body(x))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)
        self.log("train_loss", loss.detach())
        self.log("train_accuracy", (logits.argmax(-1) == labels).float().mean())
        return {"loss": loss}


def test_lightning_module():
    torch.manual_seed(0)
    module, (_, ids, labels) = Module(), gpt()
    actual = check(lambda module, *b: module.training_step(b, 0)["loss"], module, ids, labels)
    assert actual.sites[0].one_pass
    with fresh():
        torch.compile(module.training_step, backend=TRACING)((ids, labels), 0)
    assert util.counters["inductor"]["flce_rewritten"] == 1
    assert module.logged["train_loss"].isfinite() and not module.logged["train_loss"].requires_grad
    assert 0 <= module.logged["train_accuracy"] <= 1


def test_gradient_accumulation():
    """A loop in accelerate's form: micro-batches of several lengths, the sum divided by the items of all of them."""
    model, *_ = gpt()
    batches = [batch(time=time, seed=time) for time in (9, 12, 15)]
    items = sum((labels != -100).sum() for _, labels in batches)

    def micro_step(model, ids, labels, items):
        logits = model.lm_head(model.embed(ids)).float()
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, V), labels[:, 1:].reshape(-1), reduction="sum") / items
        return loss / 2 * 2

    def accumulate(model, step):
        losses = []
        for ids, labels in batches:
            loss = step(model, ids, labels, items)
            loss.backward()
            losses.append(loss.detach())
        return util.Outcome(losses, [p.grad for p in model.parameters()])

    expected = accumulate(copy.deepcopy(model).double(), micro_step)
    with fresh(), util.collect() as sites:
        actual = accumulate(model, torch.compile(micro_step, backend=TRACING))
    assert_same(actual, expected, 2e-5)
    assert [site.reason for site in sites] == [None, None]  # the second is for all lengths
    assert "s" in sites[1].N


def titan_loss(pred, labels):
    """In the form of torchtitan's: a function of its own, compiled where it is built."""
    return F.cross_entropy(pred.flatten(0, 1).float(), labels.flatten(0, 1), reduction="sum", ignore_index=-100)


@pytest.mark.parametrize("built", ["plain", "compiled"])
def test_loss_built_apart(built):
    """Compiled together with the output layer it is rewritten, even if it is a compiled function of its own."""
    loss_fn = torch.compile(titan_loss, backend=TRACING) if built == "compiled" else titan_loss
    tokens = torch.tensor(11.0)

    def step(norm, output, h, labels):
        return loss_fn(output(norm(h)), labels) / tokens

    def plain_step(norm, output, h, labels):
        return titan_loss(output(norm(h)), labels) / tokens

    torch.manual_seed(0)
    args = nn.RMSNorm(16), nn.Linear(16, V, bias=False), torch.randn(2, 12, 16, requires_grad=True), batch()[1]
    expected = eager(plain_step, *args)
    with fresh():
        actual = compiled(step, *args)
    assert actual.reasons == [None]
    assert_same(actual, expected)


def test_loss_compiled_apart_is_not():
    head, loss_fn = nn.Linear(16, V, bias=False), torch.compile(titan_loss, backend=TRACING)
    h, (_, labels) = torch.randn(2, 12, 16), batch()
    with fresh(), util.collect() as sites:
        loss = loss_fn(torch.compile(head, backend=TRACING)(h), labels)
    assert [site.reason for site in sites] == [Reason.NO_HEAD]
    assert math.isclose(loss.item(), titan_loss(head(h), labels).item(), rel_tol=1e-5)
