"""One stage: recomputation equals keeping the graph equals plain autograd, and what is bad is not added."""

from __future__ import annotations

import zlib

import pytest
import torch
from pipeline_helpers import (
    ROWS,
    TOKENS,
    back,
    backward,
    forward,
    gradients,
    head,
    make_batch,
    make_run,
    make_runtimes,
    there,
    train,
    works,
)
from pipeline_helpers import (
    hidden as hidden_of,
)

from meshd.errors import MismatchError
from meshd.gossip.values import FlatParameters
from meshd.model.loss import token_loss
from meshd.pipeline.exhaustion import out_of_memory
from meshd.pipeline.runtime import NonFinite, Pace, StageRuntime, StaleMicrobatch
from meshd.wire import CodecContext, Frame, checksum_start, codec_named


def plain_gradients(runtimes: list[StageRuntime], batch, seed: int) -> tuple[float, dict[str, torch.Tensor]]:
    """The same microbatch in one graph, with each hop's dropout drawn from its seed."""
    hidden = batch.inputs
    for hop, runtime in enumerate(runtimes):
        torch.manual_seed((seed + hop * 0x9E3779B97F4A7C15) % 2**63)
        hidden = runtime.model(hop, hidden, batch.document_starts)
    loss = token_loss(hidden, batch.labels, batch.label_mask)
    loss.backward()
    found = gradients(runtimes)
    for runtime in runtimes:
        runtime.model.zero_grad()
    return loss.item() / batch.label_tokens, found


@pytest.mark.parametrize("documents", [False, True], ids=["concat", "separate"])
@pytest.mark.parametrize("recompute", [True, False])
def test_gradients_equal_plain_autograd_with_dropout_and_documents(recompute: bool, documents: bool) -> None:
    """Other microbatches come in between forward and backward, as they do in a pipeline: dropout, positions and
    document boundaries are restored (DESIGN section 2.7)."""
    run = make_run([1, 3], pipeline={"recompute": recompute})
    runtimes = make_runtimes(run, dropout=0.3)
    batches = [make_batch(seed, labels=0.7, documents=documents) for seed in (1, 2)]
    expected: dict[str, torch.Tensor] = {}
    losses = []
    for number, batch in enumerate(batches):
        loss, found = plain_gradients(runtimes, batch, seed=100 + number)
        losses.append(loss)
        expected = {name: expected.get(name, 0) + value for name, value in found.items()}
    held = [works(batch, 3, seed=100 + number) for number, batch in enumerate(batches)]
    for work in held:
        there(runtimes, work)
    assert [(w.graph is None) for w in held[0][:2]] == [recompute] * 2
    for work, loss in zip(held, losses, strict=True):
        assert back(runtimes, work)[0] == pytest.approx(loss, rel=1e-6)
    got = gradients(runtimes)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_document_boundaries_and_dropout_matter() -> None:
    """The tests above would not see a boundary or a seed that got lost if it made no difference."""
    runtimes = make_runtimes(make_run([2]), dropout=0.3)
    losses = [
        train(runtimes, make_batch(1, documents=documents), seed)[0]
        for documents, seed in [(0, 1), (1, 1), (0, 2)]
    ]
    assert len({round(loss, 4) for loss in losses}) == 3


@pytest.mark.parametrize("family", ["gpt2-untied", "llama"])
def test_two_stages_step_like_one(family: str) -> None:
    """The same microbatches through one stage and through two halves: the same weights after several steps."""
    # eps keeps AdamW from blowing up the rounding noise of gradients that are zero (attention's key biases).
    optim = {"inner_batch": 2 * ROWS, "clip": 0.0, "weight_decay": 0.1, "eps": 1e-4}
    one, two = (make_runtimes(make_run(cut, optim=optim), family) for cut in ([], [2]))
    for number in range(6):
        batch = make_batch(number, labels=0.6)
        losses = [train(runtimes, batch, seed=number)[0] for runtimes in (one, two)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert one[0].version == two[0].version == two[1].version > 0
    named = {name: p for runtime in two for name, p in runtime.model.trainable().items()}
    for name, parameter in one[0].model.trainable().items():
        torch.testing.assert_close(named[name], parameter, rtol=1e-4, atol=1e-5, msg=name)


def test_a_ring_counts_a_microbatch_once_and_steps_when_it_is_back() -> None:
    run = make_run([2], tied="ring", optim={"inner_batch": ROWS})
    first, second = make_runtimes(run, "gpt2")
    by_hop = [first, second, first]
    batch = make_batch(1)
    work = works(batch, 3)
    there(by_hop, work)
    loss, (head, middle, origin) = back(by_hop, work)
    assert loss > 0
    assert head.step is None
    assert origin.gradient is None
    assert middle.step is not None
    assert origin.step is not None
    assert middle.step.tokens == origin.step.tokens == ROWS * TOKENS
    assert (first.version, second.version) == (1, 1)


def test_the_learning_rate_follows_global_tokens() -> None:
    spec = {"inner_batch": ROWS, "warmup_steps": 10, "lr": 0.1}
    runtimes = make_runtimes(make_run([2], optim=spec))
    pace = Pace(global_tokens=4 * ROWS * TOKENS + 3, live_replicas=1)
    step = train(runtimes, make_batch(1), pace=pace)[1][0].step
    assert step is not None
    assert step.lr == pytest.approx(
        0.05
    )  # the fifth of ten steps of warm-up, though it is this stage's first


# ---- what is not added ------------------------------------------------------------


def test_a_microbatch_older_than_max_lag_is_stale_and_adds_nothing() -> None:
    runtimes = make_runtimes(make_run([2], optim={"max_lag": 2}))
    work = works(make_batch(1), 2)
    there(runtimes, work)
    gradient = head(runtimes[1], 1, work[1])[1].gradient
    runtimes[0].version += 3
    with pytest.raises(StaleMicrobatch, match="3 steps old, max_lag is 2"):
        backward(runtimes[0], 0, work[0], gradient)
    assert gradients(runtimes[:1]) == {}
    assert runtimes[0].optimizer.tokens == 0
    runtimes[0].version -= 1
    backward(runtimes[0], 0, work[0], gradient)
    assert runtimes[0].optimizer.tokens == ROWS * TOKENS


def poison(runtime: StageRuntime) -> None:
    with torch.no_grad():
        next(p for name, p in runtime.model.trainable().items() if "mlp" in name).fill_(torch.nan)


def test_a_loss_that_is_not_finite_adds_nothing() -> None:
    runtimes = make_runtimes(make_run([2]))
    work = works(make_batch(1), 2)
    there(runtimes, work)
    poison(runtimes[1])
    with pytest.raises(NonFinite, match="the loss is nan"):
        head(runtimes[1], 1, work[1])
    assert gradients(runtimes[1:]) == {}
    assert runtimes[1].optimizer.tokens == 0


def test_an_output_that_is_not_finite_is_not_sent() -> None:
    """The receiver could only call it corrupt, and would be sent it again and again."""
    runtimes = make_runtimes(make_run([2]))
    poison(runtimes[0])
    with pytest.raises(NonFinite, match="output of hop 0"):
        forward(runtimes[0], 0, works(make_batch(1), 2)[0])


def test_a_gradient_that_turns_bad_on_the_way_back_takes_the_accumulator_with_it() -> None:
    runtimes = make_runtimes(make_run([1, 3]))
    train(runtimes, make_batch(2))
    work = works(make_batch(1), 3)
    there(runtimes, work)
    gradient = head(runtimes[2], 2, work[2])[1].gradient
    poison(runtimes[1])
    with pytest.raises(NonFinite, match=f"{ROWS * TOKENS} accumulated tokens thrown away"):
        backward(runtimes[1], 1, work[1], gradient)
    assert runtimes[1].optimizer.tokens == 0
    assert not any(value.any() for value in gradients([runtimes[1]]).values())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_gradient_from_the_wire_that_is_not_finite_is_refused(value: float) -> None:
    """C27."""
    runtimes = make_runtimes(make_run([2]))
    work = works(make_batch(1), 2)
    there(runtimes, work)
    bad = torch.zeros(ROWS, TOKENS, 32)
    bad[1, 2, 3] = value
    frame = codec_named("dense32").encode(bad, CodecContext(0, "backward", work[0].batch.inputs, 0))
    with pytest.raises(MismatchError, match="not finite"):
        backward(runtimes[0], 0, work[0], frame)
    assert gradients(runtimes[:1]) == {}


def signed(frame: Frame, dtype: str) -> None:
    """Another dtype, and the checksum that goes with it."""
    frame.header.dtype = dtype
    frame.header.checksum = zlib.crc32(frame.payload, checksum_start(frame.header))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_header_with_another_float_format_is_computed_in_the_models_own(dtype: str) -> None:
    """The header is the sender's word: it must not reach a matrix product (a peer could end this process)."""
    runtimes = make_runtimes(make_run([2]))
    work = works(make_batch(1), 2)
    there(runtimes, work)
    frame = work[1].frame
    assert frame is not None
    signed(frame, dtype)
    loss, (last, origin) = back(runtimes, work)
    assert loss > 0
    assert last.gradient is not None
    gradient = last.gradient.frame()
    signed(gradient, dtype)
    backward(runtimes[0], 0, works(make_batch(1), 2)[0], gradient)
    assert origin.gradient is None


# ---- weights that move in between ------------------------------------------------------------


@pytest.mark.parametrize("how", ["step", "gossip"])
def test_a_kept_graph_is_recomputed_once_the_weights_have_moved(how: str) -> None:
    """In-place changes are under a kept graph's feet: torch ends the backward pass for some, and silently mixes old
    activations with new weights for others."""
    run = make_run([2], pipeline={"recompute": False}, optim={"inner_batch": ROWS})
    results = []
    for keep in (True, False):
        runtimes = make_runtimes(run, dropout=0.2)
        first, second = works(make_batch(1), 2, seed=1), works(make_batch(2), 2, seed=2)
        for work in (first, second):
            there(runtimes, work)
        if how == "step":
            assert back(runtimes, first)[1][-1].step is not None
        else:
            parameters = runtimes[0].model.trainable()
            flat = FlatParameters(parameters, {name: torch.zeros_like(p) for name, p in parameters.items()})
            flat.move(torch.arange(flat.count), torch.full((flat.count,), 0.25))
        assert second[0].graph is not None
        if not keep:
            second[0].graph = None
        results.append(back(runtimes, second)[0])
        results.append({name: p.detach().clone() for name, p in runtimes[0].model.trainable().items()})
    assert results[0] == results[2]
    for name, value in results[1].items():
        assert torch.equal(value, results[3][name]), name


def test_adopting_weights_names_what_does_not_fit_and_refuses_what_is_not_finite() -> None:
    """C07, C27."""
    runtime = make_runtimes(make_run([2]))[0]
    weights = {name: p.detach().clone() for name, p in runtime.model.trainable().items()}
    name = sorted(weights)[0]
    with pytest.raises(MismatchError, match=name):
        runtime.adopt({**weights, name: torch.zeros(1)})
    with pytest.raises(MismatchError, match=name):
        runtime.adopt({key: value for key, value in weights.items() if key != name})
    spoilt = {**weights, name: torch.full_like(weights[name], torch.inf)}
    with pytest.raises(MismatchError, match=f"{name}.*not finite"):
        runtime.adopt(spoilt)
    assert all(torch.equal(p, weights[key]) for key, p in runtime.model.trainable().items())
    runtime.adopt({key: value + 1 for key, value in weights.items()})
    assert all(torch.equal(p, weights[key] + 1) for key, p in runtime.model.trainable().items())


def test_evaluation_uses_the_frozen_model_and_leaves_the_trained_one_alone() -> None:
    runtimes = make_runtimes(make_run([2], wire={"forward": "int8", "backward": "int8"}), dropout=0.5)
    frozen = [runtime.model for runtime in make_runtimes(make_run([2]))]
    for model in frozen:
        model.eval()
    batch = make_batch(1, labels=0.5)
    expected = token_loss(frozen[1](1, frozen[0](0, batch.inputs)), batch.labels, batch.label_mask).item()
    for runtime in runtimes:
        poison(runtime)
    work = works(batch, 2)
    work[1].frame = runtimes[0].forward_frozen(0, work[0], None, frozen[0]).frame()
    assert work[1].frame.header.codec == "dense32"
    loss, tokens = runtimes[1].score(1, work[1], hidden_of(runtimes[1], 1, work[1]), frozen[1])
    assert (loss, tokens) == (pytest.approx(expected, rel=1e-6), batch.label_tokens)


def test_each_boundary_and_direction_has_its_codec() -> None:
    wire = {"forward": "int8", "backward": "dense", "boundary": {1: {"forward": "dense", "backward": "int8"}}}
    runtimes = make_runtimes(make_run([1, 3], wire=wire))
    work = works(make_batch(1), 3)
    there(runtimes, work)
    _, results = back(runtimes, work)
    drafts = [each.gradient.frame() for each in results if each.gradient]
    frames = [work[1].frame, work[2].frame, *drafts]
    assert [frame.header.codec for frame in frames if frame] == ["int8", "dense", "int8", "dense"]


def test_once_the_result_is_taken_over_microbatches_pass_and_teach_nothing() -> None:
    run = make_run([2], optim={"inner_batch": ROWS})
    stages = make_runtimes(run)
    result = [{name: p.detach() + 1 for name, p in stage.model.trainable().items()} for stage in stages]
    for stage, weights in zip(stages, result, strict=True):
        stage.finish(weights)
    work = works(make_batch(1), 2)
    there(stages, work)
    loss, returned = back(stages, work)
    assert loss > 0
    assert [each.step for each in returned] == [None, None]
    for stage, weights in zip(stages, result, strict=True):
        assert stage.version == 0
        for name, parameter in stage.model.trainable().items():
            assert torch.equal(parameter, weights[name]), name


# ---- memory that runs out ------------------------------------------------------------


def exhausted(*_: object) -> torch.Tensor:
    return torch.empty(1 << 60, dtype=torch.uint8)


@pytest.mark.parametrize("where", ["half way back", "after it", "at the step"])
@pytest.mark.parametrize("hop", [0, 1])
def test_memory_that_runs_out_on_the_way_back_takes_the_accumulator_with_it(
    monkeypatch: pytest.MonkeyPatch, where: str, hop: int
) -> None:
    """The microbatch is computed elsewhere: what this stage has added of it must not be stepped on."""
    runtimes = make_runtimes(make_run([2], optim={"inner_batch": 2 * ROWS}))
    train(runtimes, make_batch(2))
    work = works(make_batch(1), 2)
    there(runtimes, work)
    runtime = runtimes[hop]
    before = {name: p.detach().clone() for name, p in runtime.model.trainable().items()}
    with monkeypatch.context() as patch:
        if where == "half way back":
            # Gradients come last layer first: the parameter that fails has others before and behind it.
            middle = sorted(runtime.model.trainable())[len(before) // 2]
            handle = runtime.model.trainable()[middle].register_hook(lambda grad: exhausted())
        elif where == "after it":
            made = runtime if hop == 0 else runtime.crossings[0]
            patch.setattr(made, "_step" if hop == 0 else "draft", exhausted)
        else:
            patch.setattr(runtime.optimizer._adamw, "step", exhausted)
        with pytest.raises(RuntimeError, match="allocate memory") as caught:
            back(runtimes, work)
        if where == "half way back":
            handle.remove()
    added = 2 if where == "at the step" or (where, hop) == ("after it", 0) else 1
    told = str(out_of_memory(caught.value))
    assert f"; {added * ROWS * TOKENS} accumulated tokens thrown away with it. Fix: " in told
    assert runtime.optimizer.tokens == 0
    assert not any(value.any() for value in gradients([runtime]).values())
    assert runtime.version == 0
    assert all(torch.equal(p, before[name]) for name, p in runtime.model.trainable().items())


def test_a_forward_pass_that_does_not_fit_leaves_what_was_added(monkeypatch: pytest.MonkeyPatch) -> None:
    runtimes = make_runtimes(make_run([2]))
    train(runtimes, make_batch(2))
    before = gradients(runtimes)
    work = works(make_batch(1), 2)
    there(runtimes, work)
    gradient = head(runtimes[1], 1, work[1])[1].gradient
    with monkeypatch.context() as patch:
        patch.setattr(runtimes[0].model, "forward", exhausted)
        with pytest.raises(RuntimeError, match="allocate memory"):
            backward(runtimes[0], 0, work[0], gradient)
    after = gradients(runtimes[:1])
    assert after
    assert all(torch.equal(before[name], value) for name, value in after.items())
    assert runtimes[0].optimizer.tokens == ROWS * TOKENS
