"""A rehearsed rank against a real one of a gloo world: the same shards, the same bytes at every phase's peak; against
the plan: memory by kind and what is sent; and the whole derived from few layers."""

from __future__ import annotations

import time
import weakref
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ithaca.attention import local as local_attention
from ithaca.attention.kernels import choose
from ithaca.attention.local import LocalAttention
from ithaca.cli.plan_inputs import read_machine
from ithaca.config.schema import OptimizerSettings, RunSettings, read_run
from ithaca.errors import MeshError, UnsupportedError
from ithaca.loss.causal import causal_loss
from ithaca.mesh import init_mesh
from ithaca.models.files.read_weights import local, materialize
from ithaca.models.support import decoder_layers
from ithaca.planning.machine.hardware import find_device, find_link
from ithaca.planning.plan import MemoryPlan
from ithaca.planning.terms.traffic import Machine, exchanged
from ithaca.rehearse import measured_step, phases
from ithaca.rehearse.extrapolate import Trial, blocks_of, choose_trials, cut_plan, derive, derive_clocked
from ithaca.rehearse.lone_group import AloneGroup, Sent, alone
from ithaca.rehearse.measured_step import Figures, Part, build, cut, measure, only
from ithaca.rehearse.phases import DevicePhases
from ithaca.rehearse.rehearsal import Asked, Rehearsed, _budgets, rehearse
from ithaca.training.watch.layer_boundaries import put_boundaries
from ithaca.verify.small_models.features import small_config
from tests.ranks import run_ranks
from tests.tolerances import TRACED_MEMORY

LENGTH, LAYERS = 128, 4
SAVE = MemoryPlan(("save",) * LAYERS, (True, True, False, False), mlp_tile=32, loss_tile=32)
MIXED = MemoryPlan(("recompute", "rebuild", "save", "keep"), (True, False, False, False), mlp_tile=32, loss_tile=64)


def part(kind: str = "llama", rows: int = 1, **changes: Any) -> Part:
    config = small_config(kind, num_hidden_layers=LAYERS)
    return Part(config, LENGTH, rows, torch.float32, None, OptimizerSettings(**changes))


def shards(of: Part, plan: MemoryPlan, sp: int) -> dict[str, tuple[int, ...]]:
    """The shape of every weight's part on this rank."""
    model = build(of, range(LAYERS), plan, init_mesh(sp=sp, device="cpu"))
    return {key: tuple(local(p).shape) for key, p in model.named_parameters()}


def figures(of: Part, plan: MemoryPlan, sp: int) -> dict[str, Any]:
    """What a rank measures, whoever the other ranks are."""
    mesh = init_mesh(sp=sp, device="cpu")
    got = measure(of, range(LAYERS), plan, mesh)
    kinds = asdict(got.kinds["backward"])
    return {"peaks": got.peaks, "kinds": kinds, "pinned": got.pinned, "loss": got.loss}


def alone_as(rank: int, world: int, of: Part, plan: MemoryPlan, sp: int) -> dict[str, Any]:
    with alone(world, rank, like="gloo"):
        return figures(of, plan, sp)


def test_a_rehearsed_rank_has_the_shards_of_a_real_one() -> None:
    odd = replace(part(), config=small_config("llama", num_hidden_layers=LAYERS, vocab_size=131))
    real = run_ranks(2, shards, odd, SAVE, 2)
    for rank in (0, 1):
        with alone(2, rank):
            assert shards(odd, SAVE, 2) == real[rank]
    assert real[0] != real[1]


@pytest.mark.parametrize(
    ("kind", "plan", "sp", "rows"), [("llama", SAVE, 2, 1), pytest.param("qwen3", MIXED, 1, 2, marks=pytest.mark.slow)]
)
def test_a_rehearsed_rank_has_the_bytes_of_a_real_one(kind: str, plan: MemoryPlan, sp: int, rows: int) -> None:
    real = run_ranks(2, figures, part(kind, rows), plan, sp)
    rehearsed = alone_as(1, 2, part(kind, rows), plan, sp)
    for what in ("peaks", "kinds", "pinned"):
        assert rehearsed[what] == real[1][what], what


def test_a_run_finds_nothing_of_the_one_before() -> None:
    earlier: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def watched(*given: Any) -> Any:
        alive.append(sum(one() is not None for one in earlier))
        model = build(*given)
        earlier.extend(weakref.ref(each) for each in model.modules())
        return model

    with alone(2, 0), patch.object(measured_step, "build", watched):
        for _ in range(2):
            measure(part(), range(LAYERS), SAVE, init_mesh(sp=2, device="cpu"))
    assert earlier
    assert alive == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "world", "sp"), [("llama", 4, 4), ("gemma3_text", 4, 2), ("qwen3_moe", 4, 4)])
def test_wider_worlds_experts_and_windows_too(kind: str, world: int, sp: int) -> None:
    plan = replace(SAVE, offload=(False,) * LAYERS)
    real = run_ranks(world, figures, part(kind), plan, sp)
    rehearsed = alone_as(1, world, part(kind), plan, sp)
    assert rehearsed["kinds"]["weights"] == real[1]["kinds"]["weights"]
    if kind != "qwen3_moe":
        # Experts' own buffers depend on where tokens go, which is another rank's business too.
        assert rehearsed["peaks"] == real[1]["peaks"]
    # The bytes of another world are others.
    assert alone_as(0, 2 * world, part(kind), plan, sp)["peaks"] != real[0]["peaks"]


def test_what_arrives_is_plain_numbers() -> None:
    """Garbage would spread: the loss of random weights is near that of guessing, and finite."""
    got = alone_as(1, 2, part(), SAVE, 2)
    assert got["loss"] == pytest.approx(float(torch.tensor(float(part().config.vocab_size)).log()), abs=1.0)


def test_collectives_of_a_rank_alone() -> None:
    with alone(4, 1):
        group = init_mesh(sp=4, device="cpu").sp_group
        assert isinstance(group, AloneGroup)
        out, given = torch.full((6,), torch.nan), torch.arange(4.0)
        dist.all_to_all_single(out, given, [1, 2, 1, 2], [1, 1, 1, 1], group=group)
        assert out.tolist() == [0, 1, 2, 3, 0, 1]
        assert group.sent.bytes["all-to-all"] == 3 * 4
        table = torch.zeros(4, 2, dtype=torch.int64)
        table[1] = torch.tensor([5, 6])
        dist.all_reduce(table, group=group)
        assert table.tolist() == [[5, 6]] * 4
        part_of_sum = torch.ones(3)
        dist.all_reduce(part_of_sum, group=group)
        assert part_of_sum.tolist() == [4.0] * 3
        least = torch.tensor([7])
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
        assert least.tolist() == [7]
    assert not dist.is_initialized()


def test_a_world_that_cannot_be_is_refused() -> None:
    with pytest.raises(MeshError, match="rank 4 of a world of 4: ranks count from 0 to 3"), alone(4, 4):
        pass
    with alone(2, 0), pytest.raises(MeshError, match="in a process group already"), alone(2, 1):
        pass


def asked(layers: int | None, count: int = LAYERS, *, fake: bool = False, **settings: Any) -> Asked:
    stage = {"length": LENGTH, "steps": 1, "batch": 1}
    run = read_run({"precision": "fp32", "stages": [stage], **settings})
    config = small_config("llama", num_hidden_layers=count, hidden_size=64, num_attention_heads=8)
    device = find_device("H100")
    machine = Machine(device, 4, 1, 4 * 200 * 10**9, find_link(device.link), find_link("InfiniBand NDR"))
    return Asked(run, config, machine, rank=1, layers=layers, fake=fake)


@pytest.fixture(scope="module")
def whole() -> Rehearsed:
    return rehearse(asked(None, 12))


def test_memory_is_what_the_plan_says_and_so_is_what_is_sent(whole: Rehearsed) -> None:
    assert not whole.derived
    assert abs(whole.memory_error) < TRACED_MEMORY
    said = whole.predicted
    # The whole vocabulary's rows do not divide by the ranks: a shard is a little larger than its share.
    assert whole.kinds.weights == pytest.approx(said.kinds.weights, rel=0.01)
    assert whole.kinds.optimizer == pytest.approx(said.kinds.optimizer, rel=0.01)
    assert sum(each.bytes for each in whole.exchanges) == whole.figures[0].sent["all-to-all"]
    assert whole.degrees == (1, 1, 4)
    assert said.compute_s is None
    assert whole.step_s == whole.compute_s


def test_the_comparison_sees_a_wrong_plan(whole: Rehearsed) -> None:
    """A planted fault: the plan forgets that saved tensors stay."""
    less = replace(whole.predicted, device_bytes=whole.predicted.device_bytes // 2)
    assert abs(replace(whole, predicted=less).memory_error) > TRACED_MEMORY


@pytest.mark.slow
def test_few_layers_give_the_whole(whole: Rehearsed) -> None:
    few = rehearse(asked(2, 12))
    assert few.derived
    assert [len(each.layers) for each in (*few.figures, *few.bare)] == [3, 3, 5]
    # Bytes do lie on a line; only ids and loss buffers beside it.
    assert few.peaks == pytest.approx(whole.peaks, rel=0.005)
    assert asdict(few.kinds) == pytest.approx(asdict(whole.kinds), rel=0.01)


@pytest.mark.slow
def test_bytes_of_a_mixed_plan_follow_from_runs_without_attention() -> None:
    plan = MemoryPlan(("save",) * 6 + ("keep",) * 6, (True,) * 3 + (False,) * 9, LENGTH, LENGTH)
    of = replace(part(), config=small_config("llama", num_hidden_layers=12))
    trials = choose_trials(plan, (0,) * 12, more=1, bare=True)
    assert trials.derived
    with alone(2, 0):
        mesh = init_mesh(sp=2, device="cpu")

        def run(trial: Trial, *, bare: bool) -> Figures:
            return measure(of, trial.layers, cut_plan(plan, trial.layers), mesh, bare=bare)

        first, every = run(trials.runs[0], bare=False), measure(of, range(12), plan, mesh)
        bare = [run(trial, bare=True) for trial in trials.runs]
    assert local_attention.choose is choose
    assert bare[0].loss != first.loss
    for phase in ("forward", "backward", "optimizer"):
        got = derive(trials, [each.peaks[phase] for each in bare], first.peaks[phase])
        assert got == pytest.approx(every.peaks[phase], rel=0.005), phase
    assert derive(trials, [each.pinned for each in bare], first.pinned) == every.pinned > first.pinned


def test_layers_are_clocked_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted delay in one layer's forward is that layer's; the last of a phase has no end."""
    count, delay = 4, 1.0
    of = replace(part(), config=small_config("llama", num_hidden_layers=count))
    plan = MemoryPlan(("save",) * count, (False,) * count, LENGTH, LENGTH)
    attend, calls = LocalAttention.attend, []

    def late(self: LocalAttention, *args: Any) -> Any:
        calls.append(args)
        if len(calls) % count == 2:
            time.sleep(delay)
        return attend(self, *args)

    monkeypatch.setattr(LocalAttention, "attend", late)
    with alone(2, 0):
        got = measure(of, range(count), plan, init_mesh(sp=2, device="cpu"))
    forward, backward = got.layer_s["forward"], got.layer_s["backward"]
    assert forward[-1] is backward[0] is None
    assert [s is not None and s > delay for s in forward] == [False, True, False, False]
    assert all(s is not None and 0 < s < delay for s in backward[1:])
    assert sum(s or 0 for s in forward) < got.seconds["forward"]


class Fill:
    """Stands for the two events around a filled buffer, a millisecond apart."""

    def elapsed_time(self, _other: object) -> float:
        return 1.0


def test_filled_buffers_are_left_out_of_the_phase_they_were_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's phases on a clock of ten milliseconds; what was filled before they began is no part of them."""
    ticks = iter(range(100))
    monkeypatch.setattr(phases, "moment", lambda _device: next(ticks) / 100)
    for name in ("synchronize", "reset_peak_memory_stats", "_sleep", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda *_args: 7)
    sent, fill = Sent(), (Fill(), Fill())
    sent.spans += [fill] * 5
    with DevicePhases(torch.device("cpu"), sent, []) as phase:
        sent.spans += [fill] * 2
        phase.mark("forward", {"weights": [torch.ones(3)]})
        sent.spans += [fill] * 3
        phase.mark("backward", {"weights": [torch.ones(3)]})
        phase.mark("optimizer", {"weights": [torch.ones(3)]})
    assert phase.seconds == pytest.approx({"forward": 0.008, "backward": 0.007, "optimizer": 0.01})
    assert phase.on_host() == 12
    assert {kinds.total for kinds in phase.kinds.values()} == {7}


@pytest.mark.slow
def test_fake_tensors_have_the_bytes_of_real_ones() -> None:
    real, fake = rehearse(asked(None)), rehearse(asked(None, fake=True))
    assert fake.seconds == {}
    assert fake.kinds == real.kinds
    assert fake.peaks["backward"] == real.peaks["backward"]


def test_experts_in_fp32_without_a_gpu_are_refused_by_name() -> None:
    with alone(2, 0, like="gloo"), pytest.raises(UnsupportedError, match="use precision=mixed or precision=bf16"):
        measure(replace(part("qwen3_moe"), fake=True), range(LAYERS), SAVE, init_mesh(sp=2, device="cpu"))


def test_a_run_without_a_plan_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"memory.plan='none'"):
        rehearse(asked(None, memory={"plan": "none"}))


def test_counted_bytes_are_the_exchanges_of_every_mode() -> None:
    with alone(2, 0):
        mesh = init_mesh(sp=2, device="cpu")
        for plan in (SAVE, MIXED):
            got = measure(part(), range(LAYERS), plan, mesh)
            from ithaca.models.files.pretrained import empty_model
            from ithaca.models.planner.loaded_sizes import sizes_of
            from ithaca.models.planner.plan_in_force import job_of

            model = empty_model(part().config, dtype=torch.float32)
            job = job_of(model, mesh, "shard", "adamw", fused=False, compute_dtype=None)
            job = replace(job, length=LENGTH)
            sizes = sizes_of(model, model)
            assert got.sent["all-to-all"] == sum(exchanged(sizes, job, mode, 1).total for mode in plan.layers)


def test_blocks_are_chains_and_runs_have_some_of_each() -> None:
    modes = ("recompute", "rebuild", "rebuild", "recompute", "rebuild", "rebuild", "save", "save", "save", "keep")
    plan = MemoryPlan(modes, (True,) * 6 + (False,) * 4, 8, 8)  # type: ignore[arg-type]
    assert blocks_of(plan) == [(0, 1, 2), (3, 4, 5), (6,), (7,), (8,), (9,)]
    long = MemoryPlan(modes[:6] * 6 + modes[6:] * 1, (True,) * 36 + (False,) * 4, 8, 8)  # type: ignore[arg-type]
    trials = choose_trials(long, (0,) * 40, more=3)
    assert trials.whole == (12, 3, 1)
    assert [trial.counts for trial in trials.runs] == [(2, 2, 1), (3, 2, 1), (2, 3, 1)]
    assert trials.runs[0].layers == (30, 31, 32, 33, 34, 35, 37, 38, 39)
    assert cut_plan(long, trials.runs[0].layers).layers == (*modes[:6], "save", "save", "keep")


def test_what_lies_on_a_line_is_derived_exactly() -> None:
    plan = MemoryPlan(("save",) * 30 + ("keep",) * 10, (False,) * 40, 8, 8)
    trials = choose_trials(plan, (0,) * 40)
    values = [7.0 + 3.0 * save + 11.0 * keep for save, keep in (trial.counts for trial in trials.runs)]
    assert derive(trials, values) == pytest.approx(7.0 + 3.0 * 30 + 11.0 * 10)
    assert derive(trials, [values[0], *(v + 1 for v in values[1:])]) != pytest.approx(7.0 + 3.0 * 30 + 11.0 * 10)
    every = choose_trials(plan, (0,) * 40, more=None)
    assert not every.derived
    assert every.runs[0].layers == tuple(range(40))


def test_seconds_of_the_missing_layers_are_those_clocked() -> None:
    modes = ("recompute", "rebuild", "rebuild") * 10 + ("keep",) * 10
    plan = MemoryPlan(modes, (False,) * 40, 8, 8)  # type: ignore[arg-type]
    trials = choose_trials(plan, (0,) * 40, bare=True)
    assert trials.runs[0].blocks == ((0, 3), (0, 3), (1, 1), (1, 1))
    # Of eight blocks of three and eight of one; the first layer's end is not known.
    layers = [None, 2.0, 3.0, 1.0, 2.0, 4.0, 10.0, 12.0]
    assert derive_clocked(trials, 100.0, layers) == pytest.approx(100 + 8 * 7 + 8 * 11)
    assert derive_clocked(choose_trials(plan, (0,) * 40, more=None), 100.0, [None] * 40) == 100.0


def test_three_layers_of_each_size_are_in_the_first_run() -> None:
    """FSDP2 gathers three at once: a line through two and five would count a gathered layer for every one of the rest."""
    plan = MemoryPlan(("keep",) * 28, (False,) * 28, 8, 8)
    trials = choose_trials(plan, (0, *[1] * 27))
    assert [trial.counts for trial in trials.runs] == [(1, 3), (1, 6)]
    assert choose_trials(plan, (0,) * 28).runs[0].counts == (3,)
    modes = MemoryPlan(("save",) * 14 + ("keep",) * 14, (False,) * 28, 8, 8)
    assert choose_trials(modes, (0,) * 28).runs[0].counts == (2, 2)


def test_a_cap_is_above_a_budget() -> None:
    """A rank that may take less than its budget is planned for what it may take."""
    machine = read_machine("2xH100", None, None, None, None)
    for budget, cap, wanted in ((None, 40, 30), (60, 40, 40), (20, 40, 20), (60, None, 60)):
        run = RunSettings(memory={"budget": None if budget is None else f"{budget}GB"})  # type: ignore[arg-type]
        asked = Asked(run, None, machine, cap=None if cap is None else cap * 10**9)
        assert _budgets(asked, gpu=False)[0] == wanted * 10**9


def test_runs_without_attention_are_cheap_enough_to_cut_more_often() -> None:
    plan = MemoryPlan(("save",) * 28 + ("keep",) * 4, (True,) * 22 + (False,) * 10, 8, 8)
    assert not choose_trials(plan, (0,) * 32).derived
    assert [len(trial.layers) for trial in choose_trials(plan, (0,) * 32, bare=True).runs] == [6, 9, 9, 8]


def test_a_cut_model_has_the_layers_it_was_asked_for() -> None:
    from ithaca.models.files.pretrained import empty_model

    config = small_config("gemma3_text", num_hidden_layers=6)
    model = cut(empty_model(config, dtype=torch.float32), (1, 4, 5))
    assert model.config.layer_types == [config.layer_types[i] for i in (1, 4, 5)]
    assert len(decoder_layers(model)) == model.config.num_hidden_layers == 3
    assert [layer.self_attn.layer_idx for layer in decoder_layers(model)] == [0, 1, 2]
    assert config.num_hidden_layers == 6


@pytest.mark.parametrize("wanted", [(0,), (0, 3)])
def test_a_pass_over_some_layers_leaves_the_next_one_whole(wanted: tuple[int, ...]) -> None:
    ids = {"input_ids": torch.arange(LENGTH)[None] % 32}
    with alone(2, 0, like="gloo"):
        mesh = init_mesh(sp=2, device="cpu")
        model = build(part(), range(LAYERS), MIXED, mesh)
        materialize(model)
        torch.manual_seed(0)
        for parameter in model.parameters():
            torch.nn.init.normal_(local(parameter), std=0.02)
        before = causal_loss(model, ids, mesh)
        before.backward()
        ran: list[int] = []
        put_boundaries(decoder_layers(model), lambda at: ran.append(int(at.split()[-1])) if "forward" in at else None)
        with only(model, wanted):
            causal_loss(model, ids, mesh).backward()
        assert ran == list(wanted)
        ran.clear()
        after = causal_loss(model, ids, mesh)
        after.backward()
        assert ran == list(range(LAYERS))
        assert float(after.detach()) == float(before.detach())


@pytest.mark.parametrize(
    ("took", "counts"),
    [
        # A quick step: three more, and the one in the middle.
        ((2.0, 9.0, 1.0, 1.5), 1.5),
        # One or two more where no more fit into as long as a long step; of two the quicker.
        ((2.8, 2.6, 2.4), 2.4),
        ((4.2, 3.8), 3.8),
        # A long one stands alone.
        ((6.2,), 6.2),
    ],
)
def test_quick_steps_are_run_again_and_the_median_counts(took: tuple[float, ...], counts: float) -> None:
    """On a rented machine one step in some is held up by a neighbour, and the first by the driver."""
    each = [Figures((0,), {"forward": t / 4, "backward": t * 3 / 4}, {}, round(t), 0, 0) for t in took]
    steps = iter(each)
    mesh: Any = SimpleNamespace(shards=1)
    run = measured_step._Run(
        part(), (0,), cut_plan(SAVE, (0,)), nn.Module(), torch.optim.SGD([torch.zeros(1)]), mesh, None, []
    )
    kept = {name: lambda *given: None for name in ("_step", "_pin_ahead", "_load_kernels")}
    with patch.multiple(measured_step._Run, _timed=lambda self: next(steps), **kept):
        got = run.on_device()
    assert list(steps) == []
    assert (got.step_s, got.reserved) == (counts, round(took[0]))


@pytest.mark.parametrize(
    ("modes", "types", "wanted"),
    [
        (("save",) * 3, None, [0]),
        # The first step under another mode than the first layer's waited a second for the compiler.
        (("save", "save", "keep"), None, [0, 2]),
        (("recompute", "rebuild", "rebuild", "save"), None, [0, 1, 3]),
        # What an input is rebuilt from comes too.
        (("save", "rebuild", "rebuild", "keep"), ["a", "a", "b", "a"], [0, 1, 2, 3]),
    ],
)
def test_kernels_are_loaded_under_every_mode(modes: Any, types: Any, wanted: list[int]) -> None:
    plan = MemoryPlan(modes, (False,) * len(modes), mlp_tile=32, loss_tile=32)
    assert measured_step.one_of_each(SimpleNamespace(layer_types=types), plan) == wanted


@pytest.mark.parametrize(("slow", "once", "ahead"), [(False, False, True), (True, False, False), (True, True, True)])
def test_kernels_are_loaded_ahead_without_attention_where_a_layer_is_slow(slow: bool, once: bool, ahead: bool) -> None:
    """At a million tokens a layer's attention takes longer than all that its first call could cost the step."""
    mesh: Any = SimpleNamespace(shards=1)
    run = measured_step._Run(
        part(), (0,), cut_plan(SAVE, (0,)), nn.Module(), torch.optim.SGD([torch.zeros(1)]), mesh, None, []
    )
    real, seen = local_attention.choose, []
    kept = {name: lambda *given: None for name in ("_step", "_pin_ahead")}
    long = Figures((0,), {"forward": 9.0}, {}, 1, 0, 0)
    with patch.multiple(
        measured_step._Run,
        _timed=lambda self: long,
        _load_kernels=lambda self: seen.append(local_attention.choose),
        **kept,
    ):
        run.on_device(once=once, slow=slow)
    assert [choose is real for choose in seen] == [ahead]
    assert local_attention.choose is real
