"""`train`: equal losses at every degree, and stopped runs that end bit for bit as runs without a stop."""

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
from ithaca.training import loop
from ithaca.training.schedule import rate_at
from ithaca.training.trainer import train
from tests.ranks import RankError, run_ranks
from tests.tolerances import BF16_LOSS, FP32_LOSS_AFTER_20_STEPS
from tests.training.runs import documents, losses, run_train, small_run, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    """Return the reference run: twenty steps in one process."""
    return run_train(1, twenty(folder, "alone"))


def twenty(folder: Path, output: str, **more: Any) -> RunSettings:
    stages = [{"length": 64, "steps": 20, "batch": 4, "lr": 3e-3, "warmup": 2}]
    return small_run(folder, output, **{"stages": stages, **more})


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
def test_degrees_train_to_the_same_losses(folder: Path, alone: dict[str, Any], world: int, sp: int) -> None:
    got = run_train(world, twenty(folder, f"w{world}s{sp}", mesh={"sp": sp}))
    assert got["finished"]
    assert losses(alone)[-1] < losses(alone)[0] - 0.3
    assert farthest(losses(got), losses(alone)) < FP32_LOSS_AFTER_20_STEPS


@pytest.mark.slow
def test_rows_taken_twice_change_losses(folder: Path, alone: dict[str, Any]) -> None:
    """Plant a fault: a sequence group reads the rows of another group."""
    (got, *_) = run_ranks(2, _same_rows, twenty(folder, "planted", mesh={"sp": 1}).model_dump_json())
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
def test_stop_inside_step_resumes_bit_for_bit(folder: Path, at: str) -> None:
    whole = run_train(2, small_run(folder, "whole"))
    name = "stopped " + at
    first = run_train(2, small_run(folder, name), stop=7, at=at)
    assert not first["finished"]
    assert first["progress"].total in (7, 8)
    second = run_train(2, small_run(folder, name))
    assert second["finished"]
    assert losses(second) == losses(whole)
    assert second["sum"] == whole["sum"] is not None


@pytest.mark.slow
def test_resume_at_other_degrees_gives_same_losses(folder: Path) -> None:
    whole = run_train(2, small_run(folder, "whole2", mesh={"sp": 2}))
    run_train(2, small_run(folder, "moved", mesh={"sp": 2}), stop=3)
    run_train(4, small_run(folder, "moved", mesh={"sp": 4}), stop=8)
    last = run_train(1, small_run(folder, "moved"))
    assert last["finished"]
    assert [line["step"] for line in last["metrics"] if line["kind"] == "step"] == list(range(1, 13))
    assert farthest(losses(last), losses(whole)) < FP32_LOSS_AFTER_20_STEPS


STAGES = [
    StageSettings(length=64, steps=4, batch=2, lr=3e-3, warmup=1),
    StageSettings(length=128, steps=4, batch=2, lr=1e-3, warmup=2, rope=RopeSettings(kind="yarn", factor=4), sp=1),
]


def test_two_stages_with_yarn_change_positions_and_rates(folder: Path) -> None:
    more = {"stages": [stage.model_dump() for stage in STAGES], "mesh": {"sp": 2}}
    whole = run_train(2, small_run(folder, "stages", **more))
    rates = [line["rate"] for line in whole["metrics"] if line["kind"] == "step"]
    assert rates == [rate_at(STAGES, number, step) for number in (0, 1) for step in range(4)]
    root = folder / "stages"
    first, second = (json.loads((root / "stages" / name / "config.json").read_text()) for name in ("1-64", "2-128"))
    assert first["rope_parameters"]["rope_type"] == "default"
    assert second["rope_parameters"] | {"rope_theta": 0} == {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 0,
    }  # fmt: skip
    assert (first["max_position_embeddings"], second["max_position_embeddings"]) == (64, 128)


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_finished_stage_is_freed_before_next_is_built(folder: Path, world: int) -> None:
    more = {"stages": [stage.model_dump() for stage in STAGES], "mesh": {"sp": world}}
    found = run_ranks(world, _alive_at_builds, small_run(folder, f"given back {world}", **more).model_dump_json())
    assert found == [[0, 0]] * world


def _alive_at_builds(text: str) -> list[int]:
    """Return the number of live parameters and moments of earlier stages at the building of each stage."""
    from ithaca.training import trainer

    earlier: list[Callable[[], Any]] = []
    found: list[int] = []
    build, stage = trainer.build_session, trainer.StageLoop.run_from

    def counting(*given: Any) -> Any:
        found.append(sum(one() is not None for one in earlier))
        return build(*given)

    def noting(self: Any, folder: Any) -> Any:
        try:
            return stage(self, folder)
        finally:
            states = self.session.optimizer.state.values()
            tensors = [*self.session.model.parameters(), *(each["exp_avg"] for each in states)]
            earlier.extend(weakref.ref(each) for each in tensors)

    with patch.object(trainer, "build_session", counting), patch.object(trainer.StageLoop, "run_from", noting):
        trainer.train(RunSettings.model_validate_json(text))
    assert earlier
    return found


def test_memory_settings_reach_the_plan(folder: Path) -> None:
    memory = {"budget": "3GB", "host_budget": "5GB", "layers": "recompute", "mlp_tile": 64}
    run = small_run(folder, "budgets", memory=memory)
    assert run_ranks(1, _memory_of, run.model_dump_json()) == [(3 * 10**9, 5 * 10**9, {"recompute"}, 64)]


def _memory_of(text: str) -> tuple[int, int | None, set[str], int]:
    from ithaca.models.planner.memory_planner import planner_of
    from ithaca.training import trainer

    stage, planners = trainer.StageLoop.run_from, []

    def noting(self: Any, folder: Any) -> Any:
        planners.append(planner_of(self.session.model))
        return stage(self, folder)

    with patch.object(trainer.StageLoop, "run_from", noting):
        trainer.train(RunSettings.model_validate_json(text))
    [planner] = planners
    assert planner is not None
    assert planner.plan is not None
    return planner.budget, planner.host_budget, set(planner.plan.layers), planner.plan.mlp_tile


@pytest.mark.slow
def test_stop_near_stage_end_resumes_bit_for_bit(folder: Path) -> None:
    more = {"stages": [stage.model_dump() for stage in STAGES], "mesh": {"sp": 2}}
    whole = run_train(2, small_run(folder, "stages", **more))
    for stop in (3, 4, 5):
        name = f"stages stopped at {stop}"
        run_train(2, small_run(folder, name, **more), stop=stop)
        assert run_train(2, small_run(folder, name, **more))["sum"] == whole["sum"], stop


@pytest.mark.slow
def test_export_gives_logits_of_trained_model(folder: Path) -> None:
    run = small_run(folder, "exported")
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
    """Return the logits of `ids` by the model resumed from its last checkpoint, unsharded, and by its export.

    Both on as many threads and with no tiles, which would sum products in another order.
    """
    import ithaca
    from ithaca.mesh import init_mesh
    from ithaca.training.run.display import Display
    from ithaca.training.run.run_folder import RunFolder
    from ithaca.training.session import build_session
    from ithaca.training.start import RunContext, find_model, prepare_documents
    from ithaca.training.watch.watch import Watch

    run = RunSettings.model_validate_json(text)
    run = run.model_copy(update={"memory": run.memory.model_copy(update={"plan": "none"})})
    mesh = init_mesh(sp=2)
    with Watch.of(mesh) as watch:
        context = RunContext.of(run, RunFolder(Path(run.output)), mesh, watch, Display(shows=False, stages=1))
        source = find_model(context)
        prepared, _ = prepare_documents(context, source)
        session = build_session(run, 0, source, prepared, None, mesh)
        path = context.checkpoints.latest()
        assert path is not None
        context.checkpoints.load(path, session.tensors)
        session.model.eval()
        with torch.no_grad(), ithaca.unsharded(session.model):
            trained = session.model(input_ids=ids).logits
    exported = AutoModelForCausalLM.from_pretrained(Path(run.output) / "export").eval()
    with torch.no_grad():
        return trained, exported(input_ids=ids).logits


@pytest.mark.slow
def test_validation_at_every_degree_gives_same_losses(folder: Path) -> None:
    more = {"validation": {"share": 0.2, "every": 6, "rows": 3}}
    results = [
        run_train(world, small_run(folder, f"valid{world}{sp}", **more, mesh={"sp": sp}))
        for world, sp in [(1, 1), (2, 1), (2, 2)]
    ]
    found = [[line["loss"] for line in got["metrics"] if line["kind"] == "validation"] for got in results]
    assert len(found[0]) == 2
    for other in found[1:]:
        assert farthest(other, found[0]) < FP32_LOSS_AFTER_20_STEPS


def _ended_after_its_first_save(text: str) -> None:
    """Train until the first checkpoint is whole, and stop there as a killed run does."""
    real = loop.StageLoop.run_from

    class Killed(Exception):
        pass

    def run_from(self: Any, progress: Any) -> Any:
        save = self.save

        def saved(at: Any) -> None:
            save(at)
            raise Killed

        self.save = saved
        return real(self, progress)

    with patch.object(loop.StageLoop, "run_from", run_from), pytest.raises(Killed):
        train(RunSettings.model_validate_json(text))


def test_validation_due_with_a_checkpoint_is_not_lost_with_the_run(folder: Path) -> None:
    run = small_run(folder, "killed at 5", validation={"share": 0.2, "every": 5, "rows": 2})
    run_ranks(1, _ended_after_its_first_save, run.model_dump_json())
    resumed = run_train(1, run)
    assert [line["step"] for line in resumed["metrics"] if line["kind"] == "validation"] == [5, 10, 12]


def _bad(kind: str) -> Callable[..., Any]:
    real = loop.micro_loss

    def micro_loss(*given: Any, **named: Any) -> Any:
        return real(*given, **named) * float(kind)

    return micro_loss


def _with_bad_steps(text: str, steps: list[int], kind: str, **options: Any) -> dict[str, Any]:
    from tests.training.runs import _train

    kept, real = loop.StageLoop.launch, loop.micro_loss

    def step(self: Any, folder: Any, spans: Any) -> Any:
        loop.micro_loss = _bad(kind) if folder.total in steps else real  # type: ignore[assignment]
        return kept(self, folder, spans)

    try:
        loop.StageLoop.launch = step  # type: ignore[method-assign]
        return _train(text, **options)
    finally:
        loop.StageLoop.launch, loop.micro_loss = kept, real  # type: ignore[method-assign]


def test_rare_metrics_keep_first_and_last_step(folder: Path) -> None:
    got = run_train(1, small_run(folder, "rare", metrics={"every": 1000, "apart_every": 1000}))
    assert [line["step"] for line in got["metrics"] if line["kind"] == "step"] == [1, 12]


@pytest.mark.parametrize("kind", ["nan", pytest.param("inf", marks=pytest.mark.slow)])
def test_nonfinite_step_is_not_taken(folder: Path, kind: str) -> None:
    run = small_run(folder, f"bad {kind}")
    got = run_ranks(2, _with_bad_steps, run.model_dump_json(), [4, 5], kind)[0]
    assert got["finished"]
    assert got["progress"].bad == 2
    notes = [line for line in got["metrics"] if line["kind"] == "event" and line["event"] == "bad step"]
    assert [note["step"] for note in notes] == [5, 6]
    assert ".txt" in notes[0]["rows"]
    assert losses(got)[-1] < losses(got)[0]


def _stopped_with_bad_steps(text: str, short: float) -> list[dict[str, Any]]:
    """Stop after eight of twelve steps and resume; `short`: `SHORT_S`, below which a step is settled after the next."""
    from tests.training.runs import _train

    with patch.object(loop, "SHORT_S", short):
        return [_with_bad_steps(text, [4, 5], "nan", stop=8, at="forward layer 1"), _train(text)]


@pytest.mark.slow
def test_deferred_settling_gives_same_records(folder: Path) -> None:
    found = []
    for short in (0.0, 60.0):
        run = small_run(folder, f"settled {short}", metrics={"apart_every": 1})
        stopped, whole = run_ranks(2, _stopped_with_bad_steps, run.model_dump_json(), short)[0]
        assert not stopped["finished"]
        assert (stopped["progress"].total, stopped["progress"].bad) == (8, 2)
        assert whole["progress"].bad == 2
        steps = [line for line in whole["metrics"] if line["kind"] == "step"]
        assert [line["step"] for line in steps] == list(range(1, 13))
        assert all(line["seconds"] > 0 and line["loss_by_position"] for line in steps)
        found.append(([line["loss"] for line in steps if line["step"] not in (5, 6)], whole["sum"]))
    assert found[0] == found[1]


@pytest.mark.slow
def test_bad_steps_in_a_row_end_the_run(folder: Path) -> None:
    run = small_run(folder, "too bad", limits={"bad_steps": 3, "hang": 120})
    with pytest.raises(RankError, match=r"3 in a row: the last checkpoint is kept; lower stages\.0\.lr"):
        run_ranks(2, _with_bad_steps, run.model_dump_json(), [6, 7, 8, 9], "nan")
    assert [path.name for path in (Path(run.output) / "checkpoints").iterdir()] == ["step-00000005"]


def test_folder_of_another_run_or_in_use_is_refused(folder: Path) -> None:
    run_train(1, small_run(folder, "taken"), stop=6)
    with pytest.raises(RankError, match="seed was 0, is 5: put it back, or begin a second run with output="):
        run_train(1, small_run(folder, "taken", seed=5))
    other = tiny_model(folder / "other", hidden_size=64)
    with pytest.raises(RankError, match=r"model\.name was .*model, is .*other: put it"):
        run_train(1, small_run(folder, "taken", model={"name": str(other)}))
    from ithaca.training.run.run_folder import RunFolder

    with RunFolder(folder / "taken").lock(), pytest.raises(RankError, match="is in use by another run"):
        run_train(2, small_run(folder, "taken"))


@pytest.mark.slow
def test_resume_with_other_weights_is_refused(folder: Path) -> None:
    model = tiny_model(folder / "swapped model")
    more = {"model": {"name": str(model)}}
    run_train(1, small_run(folder, "swapped", **more), stop=6)
    tiny_model(model, num_hidden_layers=3)
    with pytest.raises(RankError, match=r"is not the model that this run began with \(num_hidden_layers was 2, is 3\)"):
        run_train(1, small_run(folder, "swapped", **more))


def test_resume_with_changed_documents_is_refused(folder: Path, tmp_path: Path) -> None:
    small_run(folder, "first")
    texts = documents(tmp_path / "texts")
    more = {"data": {"sources": [str(texts)]}}
    run_train(1, small_run(folder, "changed", **more), stop=6)
    (texts / "999.txt").write_text("one more island")
    with pytest.raises(
        RankError, match=rf"the documents of {re.escape(str(texts))} \(41 now, 40 then\) are not those that"
    ):
        run_train(1, small_run(folder, "changed", **more))


def test_stage_beyond_positions_is_refused_with_factor(folder: Path) -> None:
    stages = [{"length": 256, "steps": 2, "batch": 2}]
    with pytest.raises(RankError, match=r"stage 1 has 256 tokens.*positions end at 64.*factor: 4"):
        run_train(1, small_run(folder, "too long", stages=stages))


def test_batch_not_divided_by_groups_is_refused(folder: Path) -> None:
    stages = [{"length": 64, "steps": 2, "batch": 3}]
    with pytest.raises(RankError, match=r"batch 3 over dp=2 sequence groups.*use stages\.0\.batch=4, or mesh\.sp=2$"):
        run_train(2, small_run(folder, "uneven", stages=stages, mesh={"sp": 1}))


@pytest.mark.slow
def test_stream_resumes_with_next_sample(folder: Path) -> None:
    data = {"sources": [str(folder / "texts")], "streaming": True}
    small_run(folder, "first")
    whole = run_train(2, small_run(folder, "streamed", data=data))
    run_train(2, small_run(folder, "streamed twice", data=data), stop=7)
    again = run_train(2, small_run(folder, "streamed twice", data=data))
    assert losses(again) == losses(whole)
    assert again["sum"] == whole["sum"]


def test_resume_with_cut_stream_is_refused(tmp_path: Path) -> None:
    texts = documents(tmp_path / "stream", 60)
    data = {"sources": [str(texts)], "streaming": True}
    run_train(1, small_run(tmp_path, "cut", data=data), stop=7)
    for file in sorted(texts.iterdir())[8:]:
        file.write_text(file.read_text()[:30])
    with pytest.raises(RankError, match=r"stream is not what the run has read so far, .*: put it back as it was"):
        run_train(1, small_run(tmp_path, "cut", data=data))


@pytest.mark.slow
def test_stream_changed_between_stages_warns(tmp_path: Path) -> None:
    """Change the files before the second stage, which begins the stream anew."""
    texts = documents(tmp_path / "stream", 60)
    stages = [{"length": 64, "steps": 2, "batch": 4}, {"length": 64, "steps": 2, "batch": 4}]
    settings = {"data": {"sources": [str(texts)], "streaming": True}, "stages": stages}
    said = run_train(1, small_run(tmp_path, "run", **settings), stop=2)["said"]
    assert not any("files of other sizes" in line for line in said)
    (texts / "000.txt").write_text("less")
    said = run_train(1, small_run(tmp_path, "run", **settings))["said"]
    assert sum("has files of other sizes: the run goes on" in line for line in said) == 1


@pytest.mark.slow
def test_adapters_resume_and_are_merged_in_export(folder: Path) -> None:
    more = {"lora": {"rank": 4}, "mesh": {"sp": 2}}
    whole = run_train(2, small_run(folder, "lora", **more))
    run_train(2, small_run(folder, "lora twice", **more), stop=7)
    again = run_train(2, small_run(folder, "lora twice", **more))
    assert losses(again) == losses(whole)
    assert again["sum"] == whole["sum"]
    assert (folder / "lora" / "export" / "adapter" / "adapter_config.json").exists()


KINDS = [
    pytest.param({"precision": "mixed"}, "float32", id="mixed"),
    pytest.param({"precision": "bf16", "optimizer": {"name": "bf16_sr"}}, "bfloat16", id="stochastic rounding"),
    pytest.param({"optimizer": {"name": "adamw8bit"}}, "float32", id="8 bits"),
    pytest.param({"optimizer": {"clip": 0, "in_backward": True}}, "float32", id="in backward"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("more", "kept"), KINDS)
def test_precision_and_optimizer_resume_bit_for_bit(
    folder: Path, request: pytest.FixtureRequest, more: dict[str, Any], kept: str
) -> None:
    name = request.node.callspec.id
    stages = [{"length": 64, "steps": 12, "batch": 1 if name == "in backward" else 4, "lr": 3e-3, "warmup": 2}]
    whole = run_train(2, small_run(folder, name, **more, mesh={"sp": 2}, stages=stages))
    assert losses(whole)[-1] < losses(whole)[0] - 0.2
    config = json.loads((folder / name / "export" / "config.json").read_text())
    assert config["dtype"] == kept
    run_train(2, small_run(folder, name + " twice", **more, mesh={"sp": 2}, stages=stages), stop=7)
    again = run_train(2, small_run(folder, name + " twice", **more, mesh={"sp": 2}, stages=stages))
    assert losses(again) == losses(whole)
    assert again["sum"] == whole["sum"]


@pytest.mark.parametrize("streaming", [False, True])
def test_bad_rows_warn_with_file_and_line(tmp_path: Path, streaming: bool) -> None:
    file = tmp_path / "some.jsonl"
    file.write_text('{"text": "a ship on the sea"}\n' * 20 + "no json\n" + '{"text": ""}\n')
    stages = [{"length": 64, "steps": 1, "batch": 2}]
    data = {"sources": [str(file)], "bad_share": 0.5, "cache": str(tmp_path / "cache"), "streaming": streaming}
    said = run_train(1, small_run(tmp_path, "run", data=data, stages=stages))["said"]
    assert [line for line in said if "2 of 22 rows of" in line and "some.jsonl:21: not JSON" in line]
    # Three documents fill a row, so there are seven rows; the number of a stream's rows is not known.
    epochs = "" if streaming else ", 0.29 epochs"
    assert f"stage 1 of 1: 64 tokens a row, 1 steps{epochs}" in said


@pytest.mark.slow
def test_degree_changes_losses_only_by_stochastic_rounding(tmp_path: Path) -> None:
    """Losses are equal in fp32; stochastic rounding rounds the same weight otherwise in another shard (docs/train.md)."""
    apart = {}
    for name, more in (
        ("fp32", {"precision": "fp32"}),
        ("bf16_sr", {"precision": "bf16", "optimizer": {"name": "bf16_sr"}}),
    ):
        one, two = (losses(run_train(world, small_run(tmp_path, f"{name}-{world}", **more))) for world in (1, 2))
        apart[name] = max(abs(a - b) for a, b in zip(one, two, strict=True))
    assert apart["fp32"] < FP32_LOSS_AFTER_20_STEPS < apart["bf16_sr"] < BF16_LOSS
