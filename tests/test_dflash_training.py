"""DFlash training: the file, the model against llama.cpp's graphs, leaks, the loss, and resuming."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from dflash.config import DrafterConfig, spread_layers, tensor_shapes  # noqa: E402
from dflash.gguf_file import (  # noqa: E402
    Target,
    find_mask_token,
    read_drafter,
    read_matrix,
    write_drafter,
)
from make_synthetic_dflash import VARIANTS, make  # noqa: E402

try:
    import torch
except ImportError:
    torch = None
needs_torch = pytest.mark.skipif(torch is None, reason="needs torch")

#: bfloat16 and Q8_0 activations: what llama.cpp's scores may differ by, as a share of their spread.
ROUNDING = 0.25


def random_weights(cfg: DrafterConfig) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        name: (
            rng.standard_normal(shape) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.1)
            + (len(shape) == 1)
        ).astype(np.float32)
        for name, shape in tensor_shapes(cfg)
    }


@pytest.fixture(scope="module")
def target(model: Path) -> Target:
    return Target.read(model)


@pytest.fixture(scope="module")
def cfg(target: Target) -> DrafterConfig:
    assert target.mask_token is not None
    return DrafterConfig(
        n_embd=target.n_embd,
        n_vocab=target.n_vocab,
        n_layer=2,
        n_head=4,
        n_head_kv=2,
        head_dim=64,
        n_ff=256,
        block_size=8,
        mask_token=target.mask_token,
        target_layers=(2, 7, 22),
    )


# ---- the file, without torch ----


def test_feature_layers_are_spread_and_within_the_target() -> None:
    assert spread_layers(24) == (2, 7, 12, 17, 22)
    assert spread_layers(36) == (2, 10, 18, 26, 34)
    for n_layer in range(8, 80):
        layers = spread_layers(n_layer)
        assert len({*layers}) == 5
        assert layers[0] >= 1 and layers[-1] <= n_layer - 1
    with pytest.raises(ValueError, match="5 feature layers of a target with 6 layers"):
        spread_layers(6)


@pytest.mark.parametrize("kind", ["Q8_0", "F16", "F32"])
def test_a_written_drafter_reads_back(
    tmp_path: Path, model: Path, cfg: DrafterConfig, kind: str
) -> None:
    weights = random_weights(cfg)
    path = tmp_path / "drafter.gguf"
    write_drafter(path, cfg, weights, model, kind)
    found, tensors = read_drafter(path)
    assert found == cfg
    assert tensors.keys() == weights.keys()
    # Q8_0 rounds to 1/254 of the largest value of 32 and the scale to F16, whose unit is 2^-11.
    unit = {"Q8_0": 1 / 254 + 2**-11, "F16": 2**-11, "F32": 0}[kind]
    for name, value in weights.items():
        exact = value.ndim == 1
        bound = 0 if exact else unit * np.abs(value).max(-1, keepdims=True) * 1.01
        assert (np.abs(tensors[name] - value) <= bound).all(), name
    assert not list(tmp_path.glob("*.partial"))


def test_metadata_and_tokenizer(tmp_path: Path, model: Path, cfg: DrafterConfig) -> None:
    path = tmp_path / "drafter.gguf"
    write_drafter(path, cfg, random_weights(cfg), model, name="a drafter")
    fields = GGUFReader(path).fields
    expected = {
        "general.architecture": "dflash",
        "general.name": "a drafter",
        "dflash.embedding_length": cfg.n_embd,
        "dflash.block_count": 2,
        "dflash.block_size": 8,
        "dflash.target_layers": [2, 7, 22],
        "dflash.attention.causal": False,
        "dflash.rope.dimension_count": 64,
        "tokenizer.ggml.mask_token_id": cfg.mask_token,
    }
    assert {key: fields[key].contents() for key in expected} == expected
    theirs = GGUFReader(model).fields
    for key in theirs:
        if key.startswith("tokenizer."):
            assert fields[key].contents() == theirs[key].contents(), key
            assert fields[key].types == theirs[key].types, key


def test_what_is_wrong_is_named(tmp_path: Path, model: Path, cfg: DrafterConfig) -> None:
    weights = random_weights(cfg)
    path = tmp_path / "drafter.gguf"
    short = {**weights, "fc.weight": weights["fc.weight"][:, 1:]}
    with pytest.raises(ValueError, match=r"fc.weight is \(160, 479\), must be \(160, 480\)"):
        write_drafter(path, cfg, short, model)
    del weights["output_norm.weight"]
    with pytest.raises(ValueError, match=r"output_norm\.weight is missing"):
        write_drafter(path, cfg, weights, model)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="must be a dflash drafter"):
        read_drafter(model)
    with pytest.raises(ValueError, match="mask_token is 5000"):
        DrafterConfig(**{**cfg.__dict__, "mask_token": 5000})
    with pytest.raises(ValueError, match="target_layers"):
        DrafterConfig(**{**cfg.__dict__, "target_layers": (7, 2)})


def test_the_mask_is_a_token_that_no_text_contains(target: Target) -> None:
    assert find_mask_token(["a", "<|fim_pad|>", "\xff"], [1, 3, 1]) == 1
    assert find_mask_token(["a", "b", "\xff"], [1, 5, 1]) == 1
    assert find_mask_token(["a", "<0xFF>"], [1, 6]) == 1
    assert find_mask_token(["a", "b"], [1, 1]) is None
    tokens = GGUFReader(target.path).fields["tokenizer.ggml.tokens"].contents()
    assert tokens[target.mask_token] == "\xff"  # the byte 0xFF, which UTF-8 never uses


# ---- llama.cpp's graphs ----


@pytest.fixture(scope="module")
def text(open_engine: object, model: Path) -> list[int]:
    snippet = (ROOT / "tests" / "data" / "heldout.txt").read_text()[:600]
    return open_engine("none").tokenize(snippet)[:160]


@pytest.mark.parametrize("variant", VARIANTS)
def test_llama_cpp_runs_every_variant(
    tmp_path: Path, target: Target, text: list[int], variant: str
) -> None:
    from dflash.llama import DraftContext, Model, TargetContext

    path = tmp_path / "drafter.gguf"
    made = make(path, target, variant, layers=1, block_size=8)
    with (
        Model(target.path) as theirs,
        Model(path) as ours,
        TargetContext(theirs, made.target_layers, 256) as reader,
        DraftContext(ours, reader, 256, nextn=variant != "dflash") as drafter,
    ):
        features, _ = reader.read(text)
        drafter.inject(features[:100])
        first = drafter.block(text[100], made.mask_token, 100, 8)
        assert first.shape == (8, target.n_vocab) and np.isfinite(first).all()
        extra = drafter.nextn(8) if variant != "dflash" else np.empty(0)
        if variant == "dspark":  # a confidence in every place
            assert ((extra > 0) & (extra < 1)).all() and (extra == extra[:, :1]).all()
        elif variant == "dflash2":  # candidates, as many scores for each predecessor, zeros
            best = np.argsort(-first, 1)[1:, :4]
            assert (np.sort(extra[1:, :4], 1) == np.sort(best, 1)).all()
            assert (extra[:, 20:] == 0).all() and (extra[1:, 4:20] != 0).all()
        assert (drafter.block(text[100], made.mask_token, 100, 8) == first).all()  # nothing stays
        drafter.forget()
        drafter.inject(features[:50])
        drafter.inject(features[50:100], 50)
        again = drafter.block(text[100], made.mask_token, 100, 8)
        assert np.abs(again - first).max() <= ROUNDING * first.std()  # injected in two parts
        drafter.forget(60)
        drafter.inject(features[60:90], 60)
        shorter = drafter.block(text[90], made.mask_token, 90, 8)
        assert np.abs(shorter - first).max() > 0


@pytest.mark.parametrize("sample_from_anchor", [True, False])
def test_dspark_scores_are_those_of_dflash_and_a_bias_of_the_token_before(
    tmp_path: Path, target: Target, text: list[int], sample_from_anchor: bool
) -> None:
    """What docs/dflash.md says of the Markov head; the same seed gives both the same trunk."""
    from dflash.llama import DraftContext, Model, TargetContext

    rows, weights = {}, {}
    for variant in ("dflash", "dspark"):
        path = tmp_path / f"{variant}.gguf"
        made = make(
            path, target, variant, layers=1, block_size=6, sample_from_anchor=sample_from_anchor
        )
        weights = read_drafter(path)[1]
        with (
            Model(target.path) as theirs,
            Model(path) as ours,
            TargetContext(theirs, made.target_layers, 128) as reader,
            DraftContext(ours, reader, 128) as drafter,
        ):
            drafter.inject(reader.read(text[:40])[0])
            rows[variant] = drafter.block(text[40], made.mask_token, 40, 6)
    w1, w2 = weights["markov_w1.weight"], weights["markov_w2.weight"]
    previous, first = text[40], 0 if sample_from_anchor else 1
    for i, (plain, biased) in enumerate(zip(rows["dflash"], rows["dspark"], strict=True)):
        bias = w2 @ w1[previous] if i >= first else np.zeros(len(w2))
        assert np.abs(plain + bias - biased).max() <= ROUNDING * bias.std() + 1e-4, i
        if i >= first:
            previous = int(biased.argmax())


@needs_torch
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_the_torch_model_is_llama_cpps_graph(
    tmp_path: Path, target: Target, cfg: DrafterConfig, text: list[int], kind: str
) -> None:
    from dflash.llama import DraftContext, Model, TargetContext
    from dflash.model import Drafter
    from dflash.train import adopt, shared_matrices

    path = tmp_path / "drafter.gguf"
    write_drafter(path, cfg, random_weights(cfg), target.path, kind)
    drafter = Drafter(cfg, *shared_matrices(target.path))
    adopt(drafter, read_drafter(path)[1])
    anchors = [0, 1, 7, 60, 120]
    with (
        Model(target.path) as theirs,
        Model(path) as ours,
        TargetContext(theirs, cfg.target_layers, 256) as reader,
        DraftContext(ours, reader, 256) as context,
    ):
        features, _ = reader.read(text)
        for size in (3, cfg.block_size):
            with torch.no_grad():
                hidden = drafter(
                    torch.from_numpy(features)[None],
                    torch.tensor(text)[None],
                    torch.tensor([anchors]),
                    size,
                )
                expected = drafter.logits(hidden)[0].numpy()
            for row, anchor in zip(expected, anchors, strict=True):
                context.forget()
                if anchor:
                    context.inject(features[:anchor])
                found = context.block(text[anchor], cfg.mask_token, anchor, size)[1:]
                assert np.abs(found - row).max() <= ROUNDING * row.std(), (size, anchor)


# ---- data ----


def test_generate_writes_what_the_target_says(tmp_path: Path, target: Target) -> None:
    from click.testing import CliRunner
    from dflash.data import Shard, shards
    from dflash.llama import Model, TargetContext
    from train_dflash import main

    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"def f{i}(x):\n    return "} for i in range(30)]
    lines.append({"messages": [{"role": "user", "content": "Write a function."}]})
    prompts.write_text("\n".join(map(json.dumps, lines)))
    command = ["generate", str(target.path), str(tmp_path / "data"), "--prompts", str(prompts)]
    limits = ["--tokens", "600", "--held-out-tokens", "1", "--new-tokens", "24", "--slots", "8"]

    def run(*options: str) -> None:
        done = CliRunner().invoke(main, [*command, *limits, *options], catch_exceptions=False)
        assert done.exit_code == 0, done.output

    run()
    paths = shards(tmp_path / "data", held_out=False)
    before = [path.stat().st_mtime_ns for path in paths]
    assert shards(tmp_path / "data", held_out=True)
    run()  # enough is there
    assert [path.stat().st_mtime_ns for path in paths] == before
    with pytest.raises(ValueError, match="holds data of"):
        run("--target-layers", "1,2,3")

    shard = Shard.load(paths[0])
    assert shard.rows == 32 and {*shard.temperatures.tolist()} == {0.0, np.float32(0.8).item()}
    layers = spread_layers(target.n_layer)
    agree = []
    with Model(target.path) as model, TargetContext(model, layers, 256) as reader:
        for row in range(shard.rows):
            span = slice(shard.offsets[row], shard.offsets[row + 1])
            tokens, first = shard.tokens[span], shard.prompt_lengths[row]
            assert 1 <= first < len(tokens) <= first + 24
            features, logits = reader.read(tokens, logits=True)
            assert np.array_equal(features.astype(np.float16), shard.features[span])
            best = shard.top_ids[span][np.arange(len(tokens)), shard.top_p[span].argmax(1)]
            assert (best == logits.argmax(1)).mean() > 0.9  # float16 has ties
            if shard.temperatures[row] == 0:
                agree.append((best[first - 1 : -1] == tokens[first:]).mean())
    assert np.mean(agree) > 0.9  # greedy output is each position's likeliest token


# ---- training ----


@pytest.fixture(scope="module")
def drafter(target: Target, cfg: DrafterConfig):
    from dflash.model import Drafter
    from dflash.train import adopt, shared_matrices

    model = Drafter(cfg, *shared_matrices(target.path))
    adopt(model, random_weights(cfg))
    return model.eval()


@needs_torch
def test_drafts_do_not_see_what_they_predict(drafter, cfg: DrafterConfig) -> None:
    torch.manual_seed(0)
    features, tokens = torch.randn(2, 40, cfg.n_features), torch.randint(3, 1000, (2, 40))
    begins = torch.tensor([[3, 9, 20], [0, 11, 30]])
    with torch.no_grad():
        before = drafter(features, tokens, begins, cfg.block_size)
        for row in range(2):
            for n, anchor in enumerate(begins[row].tolist()):
                other_text, other_features = tokens.clone(), features.clone()
                other_text[row, anchor + 1 :] = 999 - other_text[row, anchor + 1 :]
                other_features[row, anchor:] += 1  # the anchor's own feature is not known either
                after = drafter(other_features, other_text, begins, cfg.block_size)
                assert torch.equal(after[row, n], before[row, n])
                other_text = tokens.clone()
                other_text[row, anchor] = 999 - other_text[row, anchor]
                after = drafter(features, other_text, begins, cfg.block_size)
                assert not torch.equal(after[row, n], before[row, n])  # the anchor is


@needs_torch
def test_drafts_use_all_features_before_the_anchor(drafter, cfg: DrafterConfig) -> None:
    features = torch.randn(1, 20, cfg.n_features, requires_grad=True)
    tokens = torch.randint(3, 1000, (1, 20))
    drafter(features, tokens, torch.tensor([[12]]), cfg.block_size).sum().backward()
    seen = features.grad[0].abs().sum(-1) > 0
    assert seen[:12].all() and not seen[12:].any()


@needs_torch
def test_embedding_and_head_are_the_targets_and_frozen(drafter, target: Target) -> None:
    names = {*dict(drafter.named_parameters())}
    assert names == {name for name, _ in tensor_shapes(drafter.cfg)} == {*drafter.state_dict()}
    assert not drafter.embeddings.requires_grad and not drafter.head.requires_grad
    head = read_matrix(target.path, "output.weight")
    hidden = torch.randn(3, target.n_embd)
    np.testing.assert_allclose(
        drafter.logits(hidden).numpy(), hidden.numpy() @ head.T, rtol=1e-4, atol=1e-4
    )


@needs_torch
def test_training_starts_at_the_anchor_and_the_newest_features(
    target: Target, cfg: DrafterConfig
) -> None:
    """What is written into the first weights: drafts depend most on what is nearest."""
    from dflash.model import Drafter
    from dflash.start import focus
    from dflash.train import shared_matrices

    torch.manual_seed(0)
    model = Drafter(cfg, *shared_matrices(target.path))
    rows = 1 + 2 * torch.randn(4000, cfg.n_features)
    assert focus(model, rows, torch.ones(cfg.n_embd)) < 0.2  # of 480 such features, 1 can be made
    features = rows[:60][None].requires_grad_()
    tokens = torch.randint(3, 1000, (1, 60))
    out = model(features, tokens, torch.tensor([[50]]), cfg.block_size)[0, 0, 0]
    out.square().sum().backward()
    influence = features.grad[0].norm(dim=-1)
    assert influence[49] > 5 * influence[:45].median()


def write_data(folder: Path, cfg: DrafterConfig, held_out: bool, rows: int = 4) -> None:
    """A shard in which every token is followed by the next number, and the features tell it."""
    from dflash.data import TOP, features_of

    folder.mkdir(exist_ok=True)
    length, rng = 40, np.random.default_rng(held_out)
    starts = rng.integers(10, 60, size=rows)
    tokens = (starts[:, None] + np.arange(length)).astype(np.int32).ravel()
    top_ids = np.stack([tokens + 1 + i for i in range(TOP)], 1).astype(np.int32)
    top_p = np.tile(np.float16([0.9, 0.1] + [0] * (TOP - 2)), (len(tokens), 1))
    path = folder / ("held-out-00000.npz" if held_out else "train-00000.npz")
    codes = np.random.default_rng(2).standard_normal((200, cfg.n_features))
    np.save(features_of(path), codes[tokens].astype(np.float16))
    np.savez(
        path,
        tokens=tokens,
        offsets=np.arange(rows + 1) * length,
        prompt_lengths=np.full(rows, 5, np.int32),
        temperatures=np.float32([0, 0.8] * (rows // 2)),
        top_ids=top_ids,
        top_p=top_p,
    )


@needs_torch
def test_the_loss_is_the_weighted_mean_of_the_drafts(
    drafter, tmp_path: Path, cfg: DrafterConfig
) -> None:
    from dflash.train import Rows, loss_of

    write_data(tmp_path, cfg, held_out=False)
    batch = Rows(tmp_path).batch(3, 6, np.random.default_rng(0))
    size, gamma, total, weights = 6, 7.0, 0.0, 0.0
    with torch.no_grad():
        hidden = drafter(batch.features, batch.tokens, batch.begins, size)
        log_p = drafter.logits(hidden.to(torch.bfloat16)).float().log_softmax(-1)
        for row in range(3):
            for n, anchor in enumerate(batch.begins[row].tolist()):
                assert 4 <= anchor < 39  # the last token of the prompt, or output before the last
                for k in range(1, size):
                    if anchor + k < 40:
                        weight = np.exp(-(k - 1) / gamma)
                        label = batch.tokens[row, anchor + k]
                        total -= weight * float(log_p[row, n, k - 1, label])
                        weights += weight
        assert float(loss_of(drafter, batch, size, gamma, 0.0)) == pytest.approx(
            total / weights, rel=1e-4
        )
        soft = float(loss_of(drafter, batch, size, gamma, 1.0))
    assert np.isfinite(soft)


@needs_torch
def test_soft_labels_follow_the_temperature(cfg: DrafterConfig) -> None:
    from dflash.train import _cross_entropy

    log_p = torch.log_softmax(torch.randn(2, 1, 1, 30), -1)
    ids = torch.tensor([[4, 9]]).expand(2, 1, 1, 2)
    share = torch.tensor([0.6, 0.3]).expand(2, 1, 1, 2)
    out = _cross_entropy(log_p, ids, share, torch.tensor([0.0, 0.5]))
    assert float(out[0]) == pytest.approx(-float(log_p[0, ..., 4]), abs=1e-4)  # greedy
    assert float(out[1]) == pytest.approx(
        -float(0.8 * log_p[1, ..., 4] + 0.2 * log_p[1, ..., 9]), abs=1e-4
    )


@needs_torch
def test_training_learns_resumes_and_fine_tunes(
    tmp_path: Path, target: Target, cfg: DrafterConfig
) -> None:
    from dflash.data import Shard, shards
    from dflash.quality import blocks, evaluate
    from dflash.train import Plan, Trainer, read_start, to_numpy

    write_data(tmp_path, cfg, held_out=False, rows=32)
    write_data(tmp_path, cfg, held_out=True)
    plan = Plan(minutes=1.0, rows=2, anchors=24, lr=3e-3, shortest_block=4)
    trainer = Trainer(tmp_path, tmp_path, target.path, cfg, plan)
    trainer.used = 10.0  # after the warm-up
    losses = [trainer.train_step() for _ in range(80)]
    assert np.mean(losses[-10:]) < 0.5 * np.mean(losses[:5])
    trainer.save()

    again = Trainer(tmp_path, tmp_path, target.path, cfg, plan)
    assert (again.step, again.blocks, again.used) == (80, 80 * 48, 10.0)
    assert again.train_step() == trainer.train_step()  # the same batch, weights and moments
    with pytest.raises(ValueError, match=r"checkpoint\.pt is of"):
        Trainer(
            tmp_path, tmp_path, target.path, DrafterConfig(**{**cfg.__dict__, "n_ff": 96}), plan
        )

    held_out = [Shard.load(path) for path in shards(tmp_path, held_out=True)]
    drafts = partial(blocks, trainer.model)
    quality = evaluate(drafts, cfg.n_vocab, held_out, cfg.block_size, nodes=(8,))
    for kinds in quality.values():
        assert kinds["chain"] > 1.5 * kinds["unigram"]
        assert kinds["tree_8"] >= kinds["chain"]

    path = tmp_path / "drafter.gguf"
    write_drafter(path, cfg, to_numpy(trainer.model.state_dict()), target.path, "F32")
    shape, weights = read_start(path)
    tuned = Trainer(tmp_path / "tuned", tmp_path, target.path, shape, plan, weights)
    assert tuned.step == 0 and tuned.train_step() < np.mean(losses[:5])


@needs_torch
def test_the_ddtree_is_the_best_first_tree() -> None:
    """Against all prefixes, sorted: the chain, then the most probable ones."""
    import itertools

    from dflash.quality import accepted, ddtree

    rng = np.random.default_rng(0)
    for _ in range(20):
        log_p = -np.sort(-np.log(rng.dirichlet([0.4] * 4, size=3)), 1).astype(np.float32)
        every = [p for d in (1, 2, 3) for p in itertools.product(range(4), repeat=d)]
        best = sorted(every, key=lambda path: -sum(log_p[d, r] for d, r in enumerate(path)))
        chain = [(0,), (0, 0), (0, 0, 0)]
        for nodes in (2, 3, 4, 9, 30):
            found = ddtree(log_p, nodes)
            assert found[:3] == chain[: nodes - 1]
            room = nodes - 1 - len(found[:3])
            assert {*found} == {*found[:3], *[p for p in best if p not in chain][:room]}
            assert all(len(p) == 1 or p[:-1] in found[: found.index(p)] for p in found[3:])
    tokens = np.array([[5, 6], [7, 8]])
    assert accepted(tokens, {(0,), (0, 0), (1,)}, [6, 7]) == 1
    assert accepted(tokens, {(0,), (0, 0), (1,)}, [5, 7, 9]) == 2
    assert accepted(tokens, {(0,), (0, 0), (1,)}, [4]) == 0


# ---- the shipped drafter ----


def test_the_shipped_drafter_is_of_the_demo_model(model: Path, target: Target) -> None:
    shipped = model.with_name("demo-dflash.gguf")
    cfg, weights = read_drafter(shipped)
    assert {name: value.shape for name, value in weights.items()} == dict(tensor_shapes(cfg))
    assert (cfg.n_embd, cfg.n_vocab, cfg.mask_token) == (
        target.n_embd,
        target.n_vocab,
        target.mask_token,
    )
    assert cfg.target_layers[-1] < target.n_layer
    assert shipped.stat().st_size < 4e6
    assert shipped.stat().st_size + model.stat().st_size < 20e6


def test_blocks_are_those_of_unpatched_llama_cpp(model: Path) -> None:
    """Top-1 blocks of the shipped drafter: unpatched llama.cpp's, and PyTorch's.

    Scores of PyTorch differ by at most `torch_difference`, because llama.cpp rounds activations to
    Q8_0. A first choice that is ahead by more than twice that must be the same. So must ours, whose
    products sum in another order, which changes what is rounded; nearly all others are, too.
    """
    from make_dflash_vectors import VECTORS, digest, llama_blocks

    kept = json.loads(VECTORS.read_text())
    drafter = model.with_name("demo-dflash.gguf")
    assert kept["target_sha256"] == digest(model), "run scripts/make_dflash_vectors.py again"
    assert kept["drafter_sha256"] == digest(drafter), "run scripts/make_dflash_vectors.py again"
    found = llama_blocks(model, drafter, kept["tokens"], [case["anchor"] for case in kept["cases"]])
    clear = same = 0
    for case, block in zip(kept["cases"], found, strict=True):
        ours = block.argmax(1)
        same += int((ours == np.array(case["stock"])).sum())
        ahead = np.array(case["gap"]) > 2 * kept["torch_difference"]
        assert np.array_equal(np.array(case["torch"])[ahead], np.array(case["stock"])[ahead])
        assert np.array_equal(ours[ahead], np.array(case["stock"])[ahead]), case["anchor"]
        clear += int(ahead.sum())
    assert same >= 0.98 * sum(len(case["stock"]) for case in kept["cases"])
    assert clear > 0.5 * sum(len(case["stock"]) for case in kept["cases"])
    spread = np.concatenate(found).std()
    assert kept["torch_difference"] <= ROUNDING * spread
