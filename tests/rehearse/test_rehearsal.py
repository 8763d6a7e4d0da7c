"""A rehearsed rank against a real one of a gloo world: the same shards, the same bytes at every phase's peak; against
the plan: memory by kind and what is sent; and the whole derived from few layers."""

from __future__ import annotations

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
from ithaca.models.files.pretrained import empty_model
from ithaca.models.files.read_weights import local, materialize
from ithaca.models.planner.loaded_sizes import loaded_sizes
from ithaca.models.planner.plan_in_force import job_of
from ithaca.models.support import ModelParts, decoder_layers
from ithaca.planning.machine.hardware import find_device, find_link
from ithaca.planning.memory_plan import MemoryPlan
from ithaca.planning.terms.traffic import Machine, exchanged
from ithaca.rehearse import cut_model, measured_step, phases
from ithaca.rehearse.cut_model import RankJob, build, keep_layers, running_only
from ithaca.rehearse.extrapolate import PartialRun, blocks_of, choose_runs, cut_plan, derive, derive_clocked
from ithaca.rehearse.lone_group import LoneGroup, Sent, alone
from ithaca.rehearse.measured_step import Figures, measure
from ithaca.rehearse.phases import DevicePhases
from ithaca.rehearse.prediction import RehearsalRequest, _budgets
from ithaca.rehearse.rehearsal import Rehearsed, rehearse
from ithaca.training.watch.layer_boundaries import put_boundaries
from ithaca.verify.small_models.features import small_config
from tests.ranks import run_ranks
from tests.tolerances import TRACED_MEMORY

LENGTH, LAYERS = 128, 4
SAVE = MemoryPlan(("save",) * LAYERS, (True, True, False, False), mlp_tile=32, loss_tile=32)
MIXED = MemoryPlan(("recompute", "rebuild", "save", "keep"), (True, False, False, False), mlp_tile=32, loss_tile=64)


def job(kind: str = "llama", rows: int = 1, **changes: Any) -> RankJob:
    config = small_config(kind, num_hidden_layers=LAYERS)
    return RankJob(config, LENGTH, rows, torch.float32, None, OptimizerSettings(**changes))


def shards(of: RankJob, plan: MemoryPlan, sp: int) -> dict[str, tuple[int, ...]]:
    """The shape of every weight's part on this rank."""
    model = build(of, range(LAYERS), plan, init_mesh(sp=sp, device="cpu"))
    return {key: tuple(local(p).shape) for key, p in model.named_parameters()}


def figures(of: RankJob, plan: MemoryPlan, sp: int) -> dict[str, Any]:
    """Return figures of a rank; other ranks are real or not."""
    mesh = init_mesh(sp=sp, device="cpu")
    got = measure(of, range(LAYERS), plan, mesh)
    kinds = asdict(got.kinds["backward"])
    return {"peaks": got.peaks, "kinds": kinds, "pinned": got.pinned, "loss": got.loss}


def alone_as(rank: int, world: int, of: RankJob, plan: MemoryPlan, sp: int) -> dict[str, Any]:
    with alone(world, rank, like="gloo"):
        return figures(of, plan, sp)


def test_lone_rank_has_shards_of_real_rank() -> None:
    odd = replace(job(), config=small_config("llama", num_hidden_layers=LAYERS, vocab_size=131))
    real = run_ranks(2, shards, odd, SAVE, 2)
    for rank in (0, 1):
        with alone(2, rank):
            assert shards(odd, SAVE, 2) == real[rank]
    assert real[0] != real[1]


@pytest.mark.parametrize(
    ("kind", "plan", "sp", "rows"), [("llama", SAVE, 2, 1), pytest.param("qwen3", MIXED, 1, 2, marks=pytest.mark.slow)]
)
def test_lone_rank_has_bytes_of_real_rank(kind: str, plan: MemoryPlan, sp: int, rows: int) -> None:
    real = run_ranks(2, figures, job(kind, rows), plan, sp)
    rehearsed = alone_as(1, 2, job(kind, rows), plan, sp)
    for what in ("peaks", "kinds", "pinned"):
        assert rehearsed[what] == real[1][what], what


def test_measure_again_frees_earlier_model() -> None:
    earlier: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def watched(*given: Any) -> Any:
        alive.append(sum(one() is not None for one in earlier))
        model = build(*given)
        earlier.extend(weakref.ref(each) for each in model.modules())
        return model

    with alone(2, 0), patch.object(measured_step, "build", watched):
        for _ in range(2):
            measure(job(), range(LAYERS), SAVE, init_mesh(sp=2, device="cpu"))
    assert earlier
    assert alive == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "world", "sp"), [("llama", 4, 4), ("gemma3_text", 4, 2), ("qwen3_moe", 4, 4)])
def test_lone_rank_of_four_has_bytes_of_real_rank(kind: str, world: int, sp: int) -> None:
    plan = replace(SAVE, offload=(False,) * LAYERS)
    real = run_ranks(world, figures, job(kind), plan, sp)
    rehearsed = alone_as(1, world, job(kind), plan, sp)
    assert rehearsed["kinds"]["weights"] == real[1]["kinds"]["weights"]
    if kind != "qwen3_moe":
        # Experts' own buffers depend on where tokens go, which is another rank's business too.
        assert rehearsed["peaks"] == real[1]["peaks"]
    # The bytes of another world are others.
    assert alone_as(0, 2 * world, job(kind), plan, sp)["peaks"] != real[0]["peaks"]


def test_lone_rank_loss_is_finite() -> None:
    """Garbage would spread: the loss of random weights is near that of guessing, and finite."""
    got = alone_as(1, 2, job(), SAVE, 2)
    assert got["loss"] == pytest.approx(float(torch.tensor(float(job().config.vocab_size)).log()), abs=1.0)


def test_lone_group_collectives_fill_buffers_with_own_numbers() -> None:
    with alone(4, 1):
        group = init_mesh(sp=4, device="cpu").sp_group
        assert isinstance(group, LoneGroup)
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


def test_alone_impossible_world_is_refused() -> None:
    with pytest.raises(MeshError, match="rank 4 of a world of 4: ranks count from 0 to 3"), alone(4, 4):
        pass
    with alone(2, 0), pytest.raises(MeshError, match="in a process group already"), alone(2, 1):
        pass


def request(layers: int | None, count: int = LAYERS, *, fake: bool = False, **settings: Any) -> RehearsalRequest:
    stage = {"length": LENGTH, "steps": 1, "batch": 1}
    run = read_run({"precision": "fp32", "stages": [stage], **settings})
    config = small_config("llama", num_hidden_layers=count, hidden_size=64, num_attention_heads=8)
    device = find_device("H100")
    machine = Machine(device, 4, 1, 4 * 200 * 10**9, find_link(device.link), find_link("InfiniBand NDR"))
    return RehearsalRequest(run, config, machine, rank=1, layers=layers, fake=fake)


@pytest.fixture(scope="module")
def whole() -> Rehearsed:
    return rehearse(request(None, 12))


def test_rehearse_whole_model_agrees_with_plan(whole: Rehearsed) -> None:
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


def test_memory_error_planted_wrong_plan_is_above_tolerance(whole: Rehearsed) -> None:
    """A planted fault: the plan forgets that saved tensors stay."""
    less = replace(whole.predicted, device_bytes=whole.predicted.device_bytes // 2)
    assert abs(replace(whole, predicted=less).memory_error) > TRACED_MEMORY


@pytest.mark.slow
def test_rehearse_few_layers_derives_whole_memory(whole: Rehearsed) -> None:
    few = rehearse(request(2, 12))
    assert few.derived
    assert [len(each.layers) for each in (*few.figures, *few.bare)] == [3, 3, 5]
    # Bytes do lie on a line; only ids and loss buffers beside it.
    assert few.peaks == pytest.approx(whole.peaks, rel=0.005)
    assert asdict(few.kinds) == pytest.approx(asdict(whole.kinds), rel=0.01)


@pytest.mark.slow
def test_derive_mixed_plan_without_attention_gives_whole_bytes() -> None:
    plan = MemoryPlan(("save",) * 6 + ("keep",) * 6, (True,) * 3 + (False,) * 9, LENGTH, LENGTH)
    of = replace(job(), config=small_config("llama", num_hidden_layers=12))
    runs = choose_runs(plan, (0,) * 12, more=1, bare=True)
    assert runs.derived
    with alone(2, 0):
        mesh = init_mesh(sp=2, device="cpu")

        def measured(run: PartialRun, *, bare: bool) -> Figures:
            return measure(of, run.layers, cut_plan(plan, run.layers), mesh, bare=bare)

        first, every = measured(runs.runs[0], bare=False), measure(of, range(12), plan, mesh)
        bare = [measured(run, bare=True) for run in runs.runs]
    assert local_attention.choose is choose
    assert bare[0].loss != first.loss
    for phase in ("forward", "backward", "optimizer"):
        got = derive(runs, [each.peaks[phase] for each in bare], first.peaks[phase])
        assert got == pytest.approx(every.peaks[phase], rel=0.005), phase
    assert derive(runs, [each.pinned for each in bare], first.pinned) == every.pinned > first.pinned


def test_measure_delayed_layer_has_the_delay_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A delay planted in one layer's forward, on a clock that moves when it is read; the last layer has no end."""
    count, delay = 4, 1.0
    of = replace(job(), config=small_config("llama", num_hidden_layers=count))
    plan = MemoryPlan(("save",) * count, (False,) * count, LENGTH, LENGTH)
    attend, calls, now = LocalAttention.attend, [], [0.0]

    def tick(_device: object) -> float:
        now[0] += 1e-3
        return now[0]

    def late(self: LocalAttention, *args: Any) -> Any:
        calls.append(args)
        if len(calls) % count == 2:
            now[0] += delay
        return attend(self, *args)

    monkeypatch.setattr(LocalAttention, "attend", late)
    monkeypatch.setattr(phases, "moment", tick)
    with alone(2, 0):
        got = measure(of, range(count), plan, init_mesh(sp=2, device="cpu"))
    forward, backward = got.layer_s["forward"], got.layer_s["backward"]
    assert forward[-1] is backward[0] is None
    assert [s is not None and s > delay for s in forward] == [False, True, False, False]
    assert all(s is not None and 0 < s < delay for s in backward[1:])


class Fill:
    """Stands for the two events around a filled buffer, a millisecond apart."""

    def elapsed_time(self, _other: object) -> float:
        return 1.0


def test_device_phases_leave_out_filled_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_rehearse_fake_tensors_same_bytes_as_real() -> None:
    real, fake = rehearse(request(None)), rehearse(request(None, fake=True))
    assert fake.seconds == {}
    assert fake.kinds == real.kinds
    assert fake.peaks["backward"] == real.peaks["backward"]


def test_measure_fake_experts_in_fp32_are_refused() -> None:
    with alone(2, 0, like="gloo"), pytest.raises(UnsupportedError, match="use precision=mixed or precision=bf16"):
        measure(replace(job("qwen3_moe"), fake=True), range(LAYERS), SAVE, init_mesh(sp=2, device="cpu"))


def test_rehearse_without_plan_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"memory.plan='none'"):
        rehearse(request(None, memory={"plan": "none"}))


def test_measure_counts_bytes_of_planned_exchanges() -> None:
    with alone(2, 0):
        mesh = init_mesh(sp=2, device="cpu")
        for plan in (SAVE, MIXED):
            got = measure(job(), range(LAYERS), plan, mesh)
            model = empty_model(job().config, dtype=torch.float32)
            planned = job_of(model, mesh, "shard", "adamw", fused=False, compute_dtype=None)
            planned, sizes = replace(planned, length=LENGTH), loaded_sizes(ModelParts.of(model))
            assert got.sent["all-to-all"] == sum(exchanged(sizes, planned, mode, 1).total for mode in plan.layers)


def test_choose_runs_mixed_plan_has_blocks_of_every_kind() -> None:
    modes = ("recompute", "rebuild", "rebuild", "recompute", "rebuild", "rebuild", "save", "save", "save", "keep")
    plan = MemoryPlan(modes, (True,) * 6 + (False,) * 4, 8, 8)  # type: ignore[arg-type]
    assert blocks_of(plan) == [(0, 1, 2), (3, 4, 5), (6,), (7,), (8,), (9,)]
    long = MemoryPlan(modes[:6] * 6 + modes[6:] * 1, (True,) * 36 + (False,) * 4, 8, 8)  # type: ignore[arg-type]
    runs = choose_runs(long, (0,) * 40, more=3)
    assert runs.whole == (12, 3, 1)
    assert [run.counts for run in runs.runs] == [(2, 2, 1), (3, 2, 1), (2, 3, 1)]
    assert runs.runs[0].layers == (30, 31, 32, 33, 34, 35, 37, 38, 39)
    assert cut_plan(long, runs.runs[0].layers).layers == (*modes[:6], "save", "save", "keep")


def test_derive_figures_on_a_line_is_exact() -> None:
    plan = MemoryPlan(("save",) * 30 + ("keep",) * 10, (False,) * 40, 8, 8)
    runs = choose_runs(plan, (0,) * 40)
    values = [7.0 + 3.0 * save + 11.0 * keep for save, keep in (run.counts for run in runs.runs)]
    assert derive(runs, values) == pytest.approx(7.0 + 3.0 * 30 + 11.0 * 10)
    assert derive(runs, [values[0], *(v + 1 for v in values[1:])]) != pytest.approx(7.0 + 3.0 * 30 + 11.0 * 10)
    every = choose_runs(plan, (0,) * 40, more=None)
    assert not every.derived
    assert every.runs[0].layers == tuple(range(40))


def test_derive_clocked_adds_mean_block_of_each_kind() -> None:
    modes = ("recompute", "rebuild", "rebuild") * 10 + ("keep",) * 10
    plan = MemoryPlan(modes, (False,) * 40, 8, 8)  # type: ignore[arg-type]
    runs = choose_runs(plan, (0,) * 40, bare=True)
    assert runs.runs[0].blocks == ((0, 3), (0, 3), (1, 1), (1, 1))
    # Of eight blocks of three and eight of one; the first layer's end is not known.
    layers = [None, 2.0, 3.0, 1.0, 2.0, 4.0, 10.0, 12.0]
    assert derive_clocked(runs, 100.0, layers) == pytest.approx(100 + 8 * 7 + 8 * 11)
    assert derive_clocked(choose_runs(plan, (0,) * 40, more=None), 100.0, [None] * 40) == 100.0


def test_choose_runs_first_run_has_three_layers_of_each_size() -> None:
    """FSDP2 gathers three at once: a line through two and five would count a gathered layer for every one of the rest."""
    plan = MemoryPlan(("keep",) * 28, (False,) * 28, 8, 8)
    runs = choose_runs(plan, (0, *[1] * 27))
    assert [run.counts for run in runs.runs] == [(1, 3), (1, 6)]
    assert choose_runs(plan, (0,) * 28).runs[0].counts == (3,)
    modes = MemoryPlan(("save",) * 14 + ("keep",) * 14, (False,) * 28, 8, 8)
    assert choose_runs(modes, (0,) * 28).runs[0].counts == (2, 2)


def test_budgets_cap_below_budget_wins() -> None:
    """A rank that may take less than its budget is planned for what it may take."""
    machine = read_machine("2xH100", None, None, None, None)
    for budget, cap, wanted in ((None, 40, 30), (60, 40, 40), (20, 40, 20), (60, None, 60)):
        run = RunSettings(memory={"budget": None if budget is None else f"{budget}GB"})  # type: ignore[arg-type]
        one = RehearsalRequest(run, None, machine, cap=None if cap is None else cap * 10**9)
        assert _budgets(one, gpu=False)[0] == wanted * 10**9


def test_choose_runs_bare_cuts_shorter_models() -> None:
    plan = MemoryPlan(("save",) * 28 + ("keep",) * 4, (True,) * 22 + (False,) * 10, 8, 8)
    assert not choose_runs(plan, (0,) * 32).derived
    assert [len(run.layers) for run in choose_runs(plan, (0,) * 32, bare=True).runs] == [6, 9, 9, 8]


def test_keep_layers_gives_model_of_those_layers() -> None:
    config = small_config("gemma3_text", num_hidden_layers=6)
    model = keep_layers(empty_model(config, dtype=torch.float32), (1, 4, 5))
    assert model.config.layer_types == [config.layer_types[i] for i in (1, 4, 5)]
    assert len(decoder_layers(model)) == model.config.num_hidden_layers == 3
    assert [layer.self_attn.layer_idx for layer in decoder_layers(model)] == [0, 1, 2]
    assert config.num_hidden_layers == 6


@pytest.mark.parametrize("wanted", [(0,), (0, 3)])
def test_running_only_runs_those_layers_and_restores_all(wanted: tuple[int, ...]) -> None:
    ids = {"input_ids": torch.arange(LENGTH)[None] % 32}
    with alone(2, 0, like="gloo"):
        mesh = init_mesh(sp=2, device="cpu")
        model = build(job(), range(LAYERS), MIXED, mesh)
        materialize(model)
        torch.manual_seed(0)
        for parameter in model.parameters():
            torch.nn.init.normal_(local(parameter), std=0.02)
        before = causal_loss(model, ids, mesh)
        before.backward()
        ran: list[int] = []
        put_boundaries(decoder_layers(model), lambda at: ran.append(int(at.split()[-1])) if "forward" in at else None)
        with running_only(model, wanted):
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
def test_on_device_quick_step_returns_median_of_repeats(took: tuple[float, ...], counts: float) -> None:
    """On a rented machine one step in some is held up by a neighbour, and the first by the driver."""
    each = [Figures((0,), {"forward": t / 4, "backward": t * 3 / 4}, {}, round(t), 0, 0) for t in took]
    steps = iter(each)
    mesh: Any = SimpleNamespace(shards=1)
    run = measured_step._Run(
        job(), (0,), cut_plan(SAVE, (0,)), nn.Module(), torch.optim.SGD([torch.zeros(1)]), mesh, None, []
    )
    kept = {name: lambda *given: None for name in ("_step", "_pin_memory", "_warm_up")}
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
def test_one_of_each_has_every_mode_and_kind(modes: Any, types: Any, wanted: list[int]) -> None:
    plan = MemoryPlan(modes, (False,) * len(modes), mlp_tile=32, loss_tile=32)
    assert cut_model.one_of_each(SimpleNamespace(layer_types=types), plan) == wanted


@pytest.mark.parametrize(("slow", "once", "ahead"), [(False, False, True), (True, False, False), (True, True, True)])
def test_on_device_slow_layer_warms_up_without_attention(slow: bool, once: bool, ahead: bool) -> None:
    """At a million tokens a layer's attention takes longer than all that its first call could cost the step."""
    mesh: Any = SimpleNamespace(shards=1)
    run = measured_step._Run(
        job(), (0,), cut_plan(SAVE, (0,)), nn.Module(), torch.optim.SGD([torch.zeros(1)]), mesh, None, []
    )
    real, seen = local_attention.choose, []
    kept = {name: lambda *given: None for name in ("_step", "_pin_memory")}
    long = Figures((0,), {"forward": 9.0}, {}, 1, 0, 0)
    with patch.multiple(
        measured_step._Run,
        _timed=lambda self: long,
        _warm_up=lambda self: seen.append(local_attention.choose),
        **kept,
    ):
        run.on_device(once=once, slow=slow)
    assert [choose is real for choose in seen] == [ahead]
    assert local_attention.choose is real
