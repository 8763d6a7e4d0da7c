"""Texts of `ithaca VERB --help` below the options: examples, the list of run-file keys, exit codes."""

from __future__ import annotations

from ithaca.exit_codes import FAILED, HANG, INTERRUPTED, MISTAKE, PEER, PREEMPTED, UNTRAINED

SUMMARY = "Train Hugging Face language models, exactly, on sequences of a million tokens and more."
_KEYS = (
    "Keys: `ithaca train --show` prints every key of a run with its default; KEY.SUB=VALUE sets one, "
    "such as stages.0.length=64k."
)
_BAD = f"{MISTAKE} for a mistake in what was typed or in a file that it names"
_DONE = "0 when done"
_STOPPED = f"{INTERRUPTED} after Ctrl-C"


def _epilog(examples: list[str], codes: list[str], *more: str) -> str:
    # Blank lines between them, or click joins the lines to one paragraph.
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
        ["0 when there is a plan", f"{_BAD}, or if nothing fits", _STOPPED],
    ),
    "rehearse": _epilog(
        ["ithaca rehearse run.yaml", "ithaca rehearse --model llama-3.1-8b --length 1M --gpus 8xH100 --cap 80GB"],
        [_DONE, _BAD, _STOPPED],
        _KEYS,
    ),
    "verify": _epilog(
        ["ithaca verify run.yaml", "ithaca verify --model MODEL_FOLDER --sp 8", "ithaca verify --model qwen3_moe"],
        ["0 if every check passes", f"{FAILED} if a check fails", _BAD, _STOPPED],
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
            f"{PREEMPTED} after a signal to stop: a checkpoint is saved, and the same command resumes",
            f"{_STOPPED}, saved in the same way",
            f"{UNTRAINED} if every step of a stage was skipped",
            f"{HANG} if the ranks hang",
            f"{PEER} if a rank on another machine failed",
            f"{FAILED} for any other error",
        ],
        _KEYS,
    ),
    "export": _epilog(
        ["ithaca export runs/mine --to model", "ithaca export runs/mine --step 400 --to model --dtype bf16"],
        [_DONE, _BAD, _STOPPED],
    ),
    "doctor": _epilog(
        ["ithaca doctor", "ithaca doctor --json"],
        ["0 if training can run here", f"{FAILED} if not", _BAD, _STOPPED],
    ),
}
