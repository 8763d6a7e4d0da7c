"""`train`: the same losses at every degree, and a run that was stopped ends as one that was not."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ithaca.config.schema import RopeSettings, RunSettings, StageSettings
from ithaca.training.schedule import rate_at
from tests.ranks import RankError, run_ranks
from tests.tolerances import BF16_LOSS, FP32_LOSS_AFTER_20_STEPS
from tests.training.runs import documents, losses, run_train, small_run, tiny_model


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def alone(place: Path) -> dict[str, Any]:
    """Twenty steps in one process: what everything else is held against."""
    return run_train(1, twenty(place, "alone"))


def twenty(place: Path, output: str, **more: Any) -> RunSettings:
    stages = [{"length": 64, "steps": 20, "batch": 4, "lr": 3e-3, "warmup": 2}]
    return small_run(place, output, **{"stages": stages, **more})


def farthest(a: list[float], b: list[float]) -> float:
    assert len(a) == len(b)
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


DEGREES = [
    pytest.param(4, 2, id="dp2xsp2"),
    pytest.param(4, 4, id="sp4", marks=pytest.mark.slow),
    pytest.param(4, 1, id="dp4", marks=pytest.mark.slow),
    pytest.param(2, 2, id="sp2", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("world", "sp"), DEGREES)
def test_all_degrees_train_to_the_same_losses(place: Path, alone: dict[str, Any], world: int, sp: int) -> None:
    got = run_train(world, twenty(place, f"w{world}s{sp}", mesh={"sp": sp}))
    assert got["finished"]
    assert losses(alone)[-1] < losses(alone)[0] - 0.3
    assert farthest(losses(got), losses(alone)) < FP32_LOSS_AFTER_20_STEPS


@pytest.mark.slow
def test_rows_taken_twice_would_be_seen(place: Path, alone: dict[str, Any]) -> None:
    """The comparison above catches a sequence group that reads another's rows."""
    (got, *_) = run_ranks(2, _same_rows, twenty(place, "planted", mesh={"sp": 1}).model_dump_json())
    assert farthest(got, losses(alone)) > 100 * FP32_LOSS_AFTER_20_STEPS


def _same_rows(text: str) -> list[float]:
    from ithaca.training import session
    from tests.training.runs import _train

    kept = session.Session.rows_of
    try:
        session.Session.rows_of = lambda self, step: [4 * step, 4 * step + 1]  # type: ignore[method-assign]
        return losses(_train(text))
    finally:
        session.Session.rows_of = kept  # type: ignore[method-assign]


SOMEWHERE = [
    "backward layer 1",
    *(pytest.param(at, marks=pytest.mark.slow) for at in ("step", "forward layer 1", "gradient norm")),
]


@pytest.mark.slow
@pytest.mark.parametrize("at", SOMEWHERE)
def test_a_stop_inside_a_step_loses_nothing(place: Path, at: str) -> None:
    whole = run_train(2, small_run(place, "whole"))
    name = "stopped " + at
    first = run_train(2, small_run(place, name), stop=7, at=at)
    assert not first["finished"]
    assert first["place"].total in (7, 8)
    second = run_train(2, small_run(place, name))
    assert second["finished"]
    assert losses(second) == losses(whole)
    assert second["sum"] == whole["sum"] is not None


@pytest.mark.slow
def test_a_run_goes_on_at_other_degrees(place: Path) -> None:
    whole = run_train(2, small_run(place, "whole2", mesh={"sp": 2}))
    run_train(2, small_run(place, "moved", mesh={"sp": 2}), stop=3)
    run_train(4, small_run(place, "moved", mesh={"sp": 4}), stop=8)
    last = run_train(1, small_run(place, "moved"))
    assert last["finished"]
    assert [line["step"] for line in last["metrics"] if line["kind"] == "step"] == list(range(1, 13))
    assert farthest(losses(last), losses(whole)) < FP32_LOSS_AFTER_20_STEPS


STAGES = [
    StageSettings(length=64, steps=4, batch=2, lr=3e-3, warmup=1),
    StageSettings(length=128, steps=4, batch=2, lr=1e-3, warmup=2, rope=RopeSettings(kind="yarn", factor=4), sp=1),
]


def test_two_stages_with_a_yarn_change(place: Path) -> None:
    more = {"stages": [stage.model_dump() for stage in STAGES], "mesh": {"sp": 2}}
    whole = run_train(2, small_run(place, "stages", **more))
    rates = [line["rate"] for line in whole["metrics"] if line["kind"] == "step"]
    assert rates == [rate_at(STAGES, number, step) for number in (0, 1) for step in range(4)]
    root = place / "stages"
    first, second = (json.loads((root / "stages" / name / "config.json").read_text()) for name in ("1-64", "2-128"))
    assert first["rope_parameters"]["rope_type"] == "default"
    assert second["rope_parameters"] | {"rope_theta": 0} == {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 0,
    }  # fmt: skip
    assert (first["max_position_embeddings"], second["max_position_embeddings"]) == (64, 128)


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stage_is_given_back_before_the_next_is_built(place: Path, world: int) -> None:
    more = {"stages": [stage.model_dump() for stage in STAGES], "mesh": {"sp": world}}
    found = run_ranks(world, _alive_at_builds, small_run(place, f"given back {world}", **more).model_dump_json())
    assert found == [[0, 0]] * world


def _alive_at_builds(text: str) -> list[int]:
    """How many parameters and moments of earlier stages there are when a stage is built."""
    from ithaca.training import trainer

    earlier: list[Callable[[], Any]] = []
    found: list[int] = []
    build, stage = trainer.build_session, trainer.StageLoop.go

    def counting(*given: Any) -> Any:
        found.append(sum(one() is not None for one in earlier))
        return build(*given)

    def noting(self: Any, place: Any) -> Any:
        try:
            return stage(self, place)
        finally:
            states = self.session.optimizer.state.values()
            tensors = [*self.session.model.parameters(), *(each["exp_avg"] for each in states)]
            earlier.extend(weakref.ref(each) for each in tensors)

    with patch.object(trainer, "build_session", counting), patch.object(trainer.StageLoop, "go", noting):
        trainer.train(RunSettings.model_validate_json(text))
    assert earlier
    return found


def test_memory_of_a_run_reaches_its_plans(place: Path) -> None:
    memory = {"budget": "3GB", "host_budget": "5GB", "layers": "recompute", "mlp_tile": 64}
    run = small_run(place, "budgets", memory=memory)
    assert run_ranks(1, _memory_of, run.model_dump_json()) == [(3 * 10**9, 5 * 10**9, {"recompute"}, 64)]


def _memory_of(text: str) -> tuple[int, int | None, set[str], int]:
    from ithaca.models.planner.plan_in_force import planner_of
    from ithaca.training import trainer

    stage, planners = trainer.StageLoop.go, []

    def noting(self: Any, place: Any) -> Any:
        planners.append(planner_of(self.session.model))
        return stage(self, place)

    with patch.object(trainer.StageLoop, "go", noting):
        trainer.train(RunSettings.model_validate_json(text))
    [planner] = planners
    assert planner is not None
    assert planner.plan is not None
    return planner.budget, planner.host_budget, set(planner.plan.layers), planner.plan.mlp_tile


@pytest.mark.slow
def test_a_stop_near_the_end_of_a_stage_loses_nothing(place: Path) -> None:
    more = {"stages": [stage.model_dump() for stage in STAGES], "mesh": {"sp": 2}}
    whole = run_train(2, small_run(place, "stages", **more))
    for stop in (3, 4, 5):
        name = f"stages stopped at {stop}"
        run_train(2, small_run(place, name, **more), stop=stop)
        assert run_train(2, small_run(place, name, **more))["sum"] == whole["sum"], stop


@pytest.mark.slow
def test_the_export_is_the_trained_model(place: Path) -> None:
    run = small_run(place, "exported")
    got = run_train(2, run)
    model = AutoModelForCausalLM.from_pretrained(Path(run.output) / "export").eval()
    tokenizer = AutoTokenizer.from_pretrained(Path(run.output) / "export")
    ids = tokenizer("the wine-dark sea", return_tensors="pt").input_ids
    with torch.no_grad():
        loss = float(model(input_ids=ids, labels=ids).loss)
    assert loss < losses(got)[0] - 0.3
    trained, plain = run_ranks(2, _logits_of_checkpoint, run.model_dump_json(), ids)[0]
    assert torch.equal(plain, trained)


def _logits_of_checkpoint(text: str, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the model itself, resumed from its last checkpoint, says of `ids`, unsharded; and what its export says.

    Both on as many threads and with no tiles, which would sum products in another order.
    """
    import ithaca
    from ithaca.mesh import init_mesh
    from ithaca.training.run.display import Display
    from ithaca.training.run.run_folder import RunFolder
    from ithaca.training.session import build_session
    from ithaca.training.trainer import _Trainer
    from ithaca.training.watch.watch import Watch

    run = RunSettings.model_validate_json(text)
    run = run.model_copy(update={"memory": run.memory.model_copy(update={"plan": "none"})})
    mesh = init_mesh(sp=2)
    with Watch.of(mesh) as watch:
        trainer = _Trainer(run, RunFolder(Path(run.output)), mesh, watch, Display(shows=False, stages=1))
        trainer.source = trainer._source()
        session = build_session(run, 0, trainer.source, trainer._prepare(), None, mesh)
        path = trainer.checkpoints.latest()
        assert path is not None
        trainer.checkpoints.load(path, session.tensors)
        session.model.eval()
        with torch.no_grad(), ithaca.unsharded(session.model):
            trained = session.model(input_ids=ids).logits
    exported = AutoModelForCausalLM.from_pretrained(Path(run.output) / "export").eval()
    with torch.no_grad():
        return trained, exported(input_ids=ids).logits


@pytest.mark.slow
def test_validation_is_the_same_at_every_degree_and_held_back(place: Path) -> None:
    more = {"validation": {"share": 0.2, "every": 6, "rows": 3}}
    results = [
        run_train(world, small_run(place, f"valid{world}{sp}", **more, mesh={"sp": sp}))
        for world, sp in [(1, 1), (2, 1), (2, 2)]
    ]
    found = [[line["loss"] for line in got["metrics"] if line["kind"] == "validation"] for got in results]
    assert len(found[0]) == 2
    for other in found[1:]:
        assert farthest(other, found[0]) < FP32_LOSS_AFTER_20_STEPS


def _bad(kind: str) -> Callable[..., Any]:
    from ithaca.training import loop

    real = loop.micro_loss

    def micro_loss(*given: Any, **named: Any) -> Any:
        return real(*given, **named) * float(kind)

    return micro_loss


def _with_bad_steps(text: str, steps: list[int], kind: str, **options: Any) -> dict[str, Any]:
    from ithaca.training import loop
    from tests.training.runs import _train

    kept, real = loop.StageLoop._step, loop.micro_loss

    def step(self: Any, place: Any, spans: Any) -> Any:
        loop.micro_loss = _bad(kind) if place.total in steps else real  # type: ignore[assignment]
        return kept(self, place, spans)

    try:
        loop.StageLoop._step = step  # type: ignore[method-assign]
        return _train(text, **options)
    finally:
        loop.StageLoop._step, loop.micro_loss = kept, real  # type: ignore[method-assign]


def test_rare_metrics_still_tell_a_stage_s_first_and_last_step(place: Path) -> None:
    got = run_train(1, small_run(place, "rare", metrics={"every": 1000, "apart_every": 1000}))
    assert [line["step"] for line in got["metrics"] if line["kind"] == "step"] == [1, 12]


@pytest.mark.parametrize("kind", ["nan", pytest.param("inf", marks=pytest.mark.slow)])
def test_a_step_that_is_not_finite_is_not_taken(place: Path, kind: str) -> None:
    run = small_run(place, f"bad {kind}")
    got = run_ranks(2, _with_bad_steps, run.model_dump_json(), [4, 5], kind)[0]
    assert got["finished"]
    assert got["place"].bad == 2
    notes = [line for line in got["metrics"] if line["kind"] == "event" and line["event"] == "bad step"]
    assert [note["step"] for note in notes] == [5, 6]
    assert ".txt" in notes[0]["rows"]
    assert losses(got)[-1] < losses(got)[0]


def _stopped_with_bad_steps(text: str, short: float) -> list[dict[str, Any]]:
    """Stopped after eight of twelve steps and gone on with; `short`: what counts as a step to be settled late."""
    from ithaca.training import loop
    from tests.training.runs import _train

    with patch.object(loop, "SHORT_S", short):
        return [_with_bad_steps(text, [4, 5], "nan", stop=8, at="forward layer 1"), _train(text)]


@pytest.mark.slow
def test_steps_settled_late_are_told_and_counted_alike(place: Path) -> None:
    found = []
    for short in (0.0, 60.0):
        run = small_run(place, f"settled {short}", metrics={"apart_every": 1})
        stopped, whole = run_ranks(2, _stopped_with_bad_steps, run.model_dump_json(), short)[0]
        assert not stopped["finished"]
        assert (stopped["place"].total, stopped["place"].bad) == (8, 2)
        assert whole["place"].bad == 2
        steps = [line for line in whole["metrics"] if line["kind"] == "step"]
        assert [line["step"] for line in steps] == list(range(1, 13))
        assert all(line["seconds"] > 0 and line["loss_by_position"] for line in steps)
        found.append(([line["loss"] for line in steps if line["step"] not in (5, 6)], whole["sum"]))
    assert found[0] == found[1]


@pytest.mark.slow
def test_too_many_of_them_in_a_row_end_the_run(place: Path) -> None:
    run = small_run(place, "too bad", limits={"bad_steps": 3, "hang": 120})
    with pytest.raises(RankError, match=r"3 in a row: the last checkpoint is kept; lower stages\.0\.lr"):
        run_ranks(2, _with_bad_steps, run.model_dump_json(), [6, 7, 8, 9], "nan")
    assert [path.name for path in (Path(run.output) / "checkpoints").iterdir()] == ["step-00000005"]


def test_another_model_another_seed_and_a_folder_in_use_are_refused(place: Path) -> None:
    run_train(1, small_run(place, "taken"), stop=6)
    with pytest.raises(RankError, match="seed was 0, is 5: put it back, or set output="):
        run_train(1, small_run(place, "taken", seed=5))
    other = tiny_model(place / "other", hidden_size=64)
    with pytest.raises(RankError, match=r"model\.name was .*model, is .*other: put it"):
        run_train(1, small_run(place, "taken", model={"name": str(other)}))
    from ithaca.training.run.run_folder import RunFolder

    with RunFolder(place / "taken").lock(), pytest.raises(RankError, match="is in use by another run"):
        run_train(2, small_run(place, "taken"))


@pytest.mark.slow
def test_weights_swapped_under_a_run_are_refused(place: Path) -> None:
    model = tiny_model(place / "swapped model")
    more = {"model": {"name": str(model)}}
    run_train(1, small_run(place, "swapped", **more), stop=6)
    tiny_model(model, num_hidden_layers=3)
    with pytest.raises(RankError, match=r"is not the model that this run began with \(num_hidden_layers was 2, is 3\)"):
        run_train(1, small_run(place, "swapped", **more))


def test_documents_changed_under_a_run_are_refused(place: Path, tmp_path: Path) -> None:
    small_run(place, "first")
    texts = documents(tmp_path / "texts")
    more = {"data": {"sources": [str(texts)]}}
    run_train(1, small_run(place, "changed", **more), stop=6)
    (texts / "999.txt").write_text("one more island")
    with pytest.raises(
        RankError, match=rf"the documents of {re.escape(str(texts))} \(41 now, 40 then\) are not those that"
    ):
        run_train(1, small_run(place, "changed", **more))


def test_a_stage_beyond_the_positions_ends_before_anything_is_built(place: Path) -> None:
    stages = [{"length": 256, "steps": 2, "batch": 2}]
    with pytest.raises(RankError, match=r"stage 1 has 256 tokens.*positions end at 64.*factor: 4"):
        run_train(1, small_run(place, "too long", stages=stages))


def test_a_batch_that_the_groups_do_not_divide_is_refused(place: Path) -> None:
    stages = [{"length": 64, "steps": 2, "batch": 3}]
    with pytest.raises(RankError, match=r"batch 3 over dp=2 sequence groups.*use stages\.0\.batch=4, or mesh\.sp=2$"):
        run_train(2, small_run(place, "uneven", stages=stages, mesh={"sp": 1}))


@pytest.mark.slow
def test_streaming_goes_on_with_the_very_next_sample(place: Path) -> None:
    data = {"sources": [str(place / "texts")], "streaming": True}
    small_run(place, "first")
    whole = run_train(2, small_run(place, "streamed", data=data))
    run_train(2, small_run(place, "streamed twice", data=data), stop=7)
    again = run_train(2, small_run(place, "streamed twice", data=data))
    assert losses(again) == losses(whole)
    assert again["sum"] == whole["sum"]


def test_a_stream_that_was_cut_meanwhile_is_refused(tmp_path: Path) -> None:
    texts = documents(tmp_path / "stream", 60)
    data = {"sources": [str(texts)], "streaming": True}
    run_train(1, small_run(tmp_path, "cut", data=data), stop=7)
    for file in sorted(texts.iterdir())[8:]:
        file.write_text(file.read_text()[:30])
    with pytest.raises(RankError, match=r"stream is not what the run has read so far, .*: put it back as it was"):
        run_train(1, small_run(tmp_path, "cut", data=data))


@pytest.mark.slow
def test_a_stream_that_changed_between_two_stages_is_told_of(tmp_path: Path) -> None:
    """The second stage begins a stream anew: there is nothing that was read, and the rows are others."""
    texts = documents(tmp_path / "stream", 60)
    stages = [{"length": 64, "steps": 2, "batch": 4}, {"length": 64, "steps": 2, "batch": 4}]
    settings = {"data": {"sources": [str(texts)], "streaming": True}, "stages": stages}
    told = run_train(1, small_run(tmp_path, "run", **settings), stop=2)["said"]
    assert not any("files of other sizes" in line for line in told)
    (texts / "000.txt").write_text("less")
    told = run_train(1, small_run(tmp_path, "run", **settings))["said"]
    assert sum("has files of other sizes: the run goes on" in line for line in told) == 1


@pytest.mark.slow
def test_adapters_train_and_are_merged(place: Path) -> None:
    more = {"lora": {"rank": 4}, "mesh": {"sp": 2}}
    whole = run_train(2, small_run(place, "lora", **more))
    run_train(2, small_run(place, "lora twice", **more), stop=7)
    again = run_train(2, small_run(place, "lora twice", **more))
    assert losses(again) == losses(whole)
    assert again["sum"] == whole["sum"]
    assert (place / "lora" / "export" / "adapter" / "adapter_config.json").exists()


KINDS = [
    pytest.param({"precision": "mixed"}, "float32", id="mixed"),
    pytest.param({"precision": "bf16", "optimizer": {"name": "bf16_sr"}}, "bfloat16", id="stochastic rounding"),
    pytest.param({"optimizer": {"name": "adamw8bit"}}, "float32", id="8 bits"),
    pytest.param({"optimizer": {"clip": 0, "in_backward": True}}, "float32", id="in backward"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("more", "kept"), KINDS)
def test_precisions_and_optimizers(
    place: Path, request: pytest.FixtureRequest, more: dict[str, Any], kept: str
) -> None:
    name = request.node.callspec.id
    stages = [{"length": 64, "steps": 12, "batch": 1 if name == "in backward" else 4, "lr": 3e-3, "warmup": 2}]
    whole = run_train(2, small_run(place, name, **more, mesh={"sp": 2}, stages=stages))
    assert losses(whole)[-1] < losses(whole)[0] - 0.2
    config = json.loads((place / name / "export" / "config.json").read_text())
    assert config["dtype"] == kept
    run_train(2, small_run(place, name + " twice", **more, mesh={"sp": 2}, stages=stages), stop=7)
    again = run_train(2, small_run(place, name + " twice", **more, mesh={"sp": 2}, stages=stages))
    assert losses(again) == losses(whole)
    assert again["sum"] == whole["sum"]


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_that_are_no_documents_are_told_of(tmp_path: Path, streaming: bool) -> None:
    file = tmp_path / "some.jsonl"
    file.write_text('{"text": "a ship on the sea"}\n' * 20 + "no json\n" + '{"text": ""}\n')
    stages = [{"length": 64, "steps": 1, "batch": 2}]
    data = {"sources": [str(file)], "bad_share": 0.5, "cache": str(tmp_path / "cache"), "streaming": streaming}
    told = run_train(1, small_run(tmp_path, "run", data=data, stages=stages))["said"]
    assert [line for line in told if "2 of 22 rows of" in line and "some.jsonl:21: not JSON" in line]
    # Three documents fill a row, so there are seven; of a stream nobody knows.
    epochs = "" if streaming else ", 0.29 epochs"
    assert f"stage 1 of 1: 64 tokens a row, 1 steps{epochs}" in told


@pytest.mark.slow
def test_losses_at_another_degree_differ_by_stochastic_rounding_alone(tmp_path: Path) -> None:
    """In fp32 they are the same; weights rounded at random are rounded otherwise in other shards (docs/train.md)."""
    apart = {}
    for name, more in (
        ("fp32", {"precision": "fp32"}),
        ("bf16_sr", {"precision": "bf16", "optimizer": {"name": "bf16_sr"}}),
    ):
        one, two = (losses(run_train(world, small_run(tmp_path, f"{name}-{world}", **more))) for world in (1, 2))
        apart[name] = max(abs(a - b) for a, b in zip(one, two, strict=True))
    assert apart["fp32"] < FP32_LOSS_AFTER_20_STEPS < apart["bf16_sr"] < BF16_LOSS
