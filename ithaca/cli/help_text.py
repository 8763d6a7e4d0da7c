"""What stands below the options in `ithaca VERB --help`: examples, where all keys are listed, and exit codes."""

from __future__ import annotations

from ithaca.exit_codes import FAILED, HANG, INTERRUPTED, MISTAKE, PEER, PREEMPTED, UNTRAINED

_KEYS = (
    "Keys: `ithaca train --show` prints every key of a run with its default; KEY.SUB=VALUE sets one, "
    "such as stages.0.length=64k."
)
_BAD = f"{MISTAKE} for a mistake in what was typed or in a file that it names"
_DONE = "0 when it is done"
_STOPPED = f"{INTERRUPTED} after Ctrl-C"


def _epilog(examples: list[str], codes: list[str], *more: str) -> str:
    """Paragraphs, which the command line prints one below the other."""
    lines = ["Examples:", *examples, *more, f"Exit codes: {'; '.join(codes)}."]
    return "\n\n".join(lines)


EPILOGS = {
    "models": _epilog(["ithaca models", "ithaca models qwen3", "ithaca models --json"], [_DONE, _BAD, _STOPPED]),
    "plan": _epilog(
        [
            "ithaca plan --model llama-3.1-8b --length 1M --gpus 8xH100",
            "ithaca plan --model ./my-model --length max --gpus 4xA100-80GB --tune lora",
            "ithaca plan --model qwen3-8b --length 256k --tokens 2B --price 2.5 --compare",
        ],
        ["0 when there is a plan", f"{_BAD}, or where nothing fits", _STOPPED],
    ),
    "rehearse": _epilog(
        ["ithaca rehearse run.yaml", "ithaca rehearse --model llama-3.1-8b --length 1M --gpus 8xH100 --cap 80GB"],
        [_DONE, _BAD, _STOPPED],
        _KEYS,
    ),
    "verify": _epilog(
        ["ithaca verify run.yaml", "ithaca verify --model MODEL_FOLDER --sp 8", "ithaca verify --model qwen3_moe"],
        ["0 where every check is right", f"{FAILED} where one is off", _BAD, _STOPPED],
        _KEYS,
    ),
    "prepare": _epilog(
        ["ithaca prepare run.yaml --show 3", "ithaca prepare model.name=MODEL_FOLDER data.sources=DOCUMENTS"],
        [_DONE, _BAD, _STOPPED],
        _KEYS,
    ),
    "train": _epilog(
        [
            "ithaca train",
            "ithaca train run.yaml stages.0.length=64k mesh.sp=4",
            "ithaca train model.name=MODEL_FOLDER data.sources=DOCUMENTS 'stages=[{length: 32k, steps: 500}]'",
        ],
        [
            "0 when the last stage is done",
            _BAD,
            f"{PREEMPTED} when it was told to stop and has saved, so the same command goes on",
            f"{_STOPPED}, saved likewise",
            f"{UNTRAINED} where no step of a stage was taken",
            f"{HANG} after a hang",
            f"{PEER} where a rank on another machine failed",
            f"{FAILED} for everything else",
        ],
        _KEYS,
    ),
    "export": _epilog(
        ["ithaca export runs/mine --to model", "ithaca export runs/mine --step 400 --to model --dtype bf16"],
        [_DONE, _BAD, _STOPPED],
    ),
    "doctor": _epilog(
        ["ithaca doctor", "ithaca doctor --json"],
        ["0 where training can run", f"{FAILED} where it cannot", _BAD, _STOPPED],
    ),
}
