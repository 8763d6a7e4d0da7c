"""The options of `ithaca plan` as the planner's own objects: a model, a machine, lengths and amounts.

Everything a user can get wrong here is refused with the nearest that works. A model's name is looked for on disk, in
the built-in table, and then on the hub if there is a network.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ithaca.config.messages import did_you_mean, list_near_paths
from ithaca.constants import CARDS_PER_NODE
from ithaca.errors import ConfigError, UnsupportedError
from ithaca.planning.machine.calibrated import read_measured, with_measured
from ithaca.planning.machine.hardware import DEVICES, Device, find_device, find_link
from ithaca.planning.model.config_check import read_content
from ithaca.planning.model.known_models import KnownModel, endings, find_model, known_names, nearest_models, read_config
from ithaca.planning.model.model_sizes import ModelSizes
from ithaca.planning.terms.traffic import Machine
from ithaca.quantities import expand_home, parse_bytes, parse_number

HUB_TIMEOUT_S = 3.0
# What usually joins nodes of cards with such a link.
_NETWORKS = {"NVLink 3": "InfiniBand HDR", "PCIe 4": "Ethernet 100G", "PCIe 5": "Ethernet 100G"}


def calibration_file() -> Path:
    """Return the file with this machine's own figures."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache, "ithaca", "calibration.json")


def read_length(text: str) -> int:
    """Return the tokens of `128k` or `1M`, in units of 1,024."""
    return _amount("--length", text, lambda value: parse_number(value, 1024), least=2)


def read_tokens(text: str) -> int:
    """Return the tokens of `2B`, in units of 1,000."""
    return _amount("--tokens", text, lambda value: parse_number(value, 1000))


def _amount(option: str, text: str, parse: Callable[[str], object], *, least: int = 1) -> int:
    try:
        value = parse(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
    assert isinstance(value, int)
    if value < least:
        raise ConfigError(f"{option} {text}: at least {least} {'is' if least == 1 else 'are'} needed")
    return value


def read_machine(
    gpus: str, nodes: int | None, host_memory: str | None, link: str | None, network: str | None
) -> Machine:
    """Return the machine of `8xH100`; without a number of nodes, 16 cards are two nodes of eight."""
    found = re.fullmatch(r"\s*(?:(\d+)(?:\s*[x*\u00d7]\s*|\s+))?([A-Z].*?)\s*", gpus, re.IGNORECASE)
    count = int(found[1] or 1) if found else 0
    if turned := re.fullmatch(r"\s*([A-Z].*\d.*?)\s*[x*\u00d7]\s*(\d{1,3})\s*", gpus, re.IGNORECASE):
        raise ConfigError(f"--gpus {gpus}: the number comes first, such as {turned[2]}x{turned[1]}")
    # A second number could be a number of cards: the user is asked, nothing is guessed.
    if (
        found is None
        or count < 1
        or re.search(r"[,+:*\u00d7]|\bx\s*\d|(?<![a-z\d])\d+\s*x\b|\s\d\s*$", found[2], re.IGNORECASE)
    ):
        raise ConfigError(f"--gpus {gpus}: write a number and one card, such as 8xH100, of a node")
    if nodes is not None and nodes < 1:
        raise ConfigError(f"--nodes {nodes}: at least 1 is needed")
    device = find_device(found[2], with_measured(DEVICES, read_measured(calibration_file())))
    if nodes is None:
        nodes = count // CARDS_PER_NODE if count > CARDS_PER_NODE and count % CARDS_PER_NODE == 0 else 1
        count //= nodes
    memory = count * device.host_memory
    if host_memory is not None:
        if host_memory.strip().isdigit():
            raise ConfigError(f"--host-memory {host_memory}: write a unit, such as {host_memory.strip()}GB")
        memory = _amount("--host-memory", host_memory, parse_bytes)
    inside = find_link(link or device.link)
    between = find_link(network or _usual_network(device))
    return Machine(device, count, nodes, memory, inside, between, usual_host=host_memory is None)


def _usual_network(device: Device) -> str:
    return _NETWORKS.get(device.link, "InfiniBand NDR")


def read_model(name: str) -> KnownModel:
    """Return the model of a folder, a config.json, a name of the built-in table, or a name on the hub."""
    path = Path(expand_home(name))
    if path.is_dir() or path.suffix == ".json" or path.is_file():
        return _from_file(path / "config.json" if path.is_dir() else path, name)
    if name.startswith((".", "/", "~")):
        raise ConfigError(
            f"--model {name!r}: no such folder here: "
            f"{did_you_mean(list_near_paths(path, 'config.json'), 'a folder with config.json is needed')}"
        )
    known = find_model(name)
    if known is not None:
        return replace(known, name=_asked_for(name, known.name))
    reason = "no such folder here, and no known model"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        config = _from_hub(name)
        if not isinstance(config, str):
            return _read(name, config)
        reason += f", and {config}"
    near = [*list_near_paths(path, "config.json"), *(nearest_models(name, 2) or known_names()[:2])]
    raise UnsupportedError(f"--model {name!r}: {reason}: {did_you_mean(near, '')} Or give a config.json")


def _asked_for(name: str, known: str) -> str:
    """Return the name of the model for a run file."""
    # The table's model (`known`) may share no more than the sizes with the model that the user named.
    if "/" in name.rstrip("/"):
        return name
    tuned = endings(name)
    return f"{known.rsplit('/', 1)[0]}/{name}" if tuned and tuned != endings(known) else known


def _from_file(file: Path, name: str) -> KnownModel:
    if not file.exists():
        raise ConfigError(f"--model {name}: {file} does not exist; a model's folder or config.json is needed")
    try:
        content = read_content(file)
    except ConfigError as error:
        raise ConfigError(f"--model {name}: {file} is no config.json: {error}") from None
    return _read(name, content)


def _read(name: str, config: dict[str, Any]) -> KnownModel:
    """Return the model of a config.json."""
    # An unusual architecture's modules are built and counted, which takes seconds.
    return read_config(name, config, _count)


def _count(name: str, config: Mapping[str, Any]) -> ModelSizes | None:
    from ithaca.models.planner.counted_sizes import counted_sizes

    return counted_sizes(name, config)


def _from_hub(name: str) -> dict[str, Any] | str:
    """Return the model's config.json from the hub, or the reason why it cannot be had."""
    try:
        from urllib.error import HTTPError
        from urllib.request import Request, urlopen

        from huggingface_hub import hf_hub_url, try_to_load_from_cache
        from huggingface_hub.utils import build_hf_headers

        cached = try_to_load_from_cache(name, "config.json")
        if isinstance(cached, str):
            content = json.loads(Path(cached).read_text(encoding="utf-8"))
        else:
            # Asked once: the library's own download tries for half a minute where there is no network.
            request = Request(hf_hub_url(name, "config.json"), headers=build_hf_headers())
            with urlopen(request, timeout=HUB_TIMEOUT_S) as answer:
                content = json.load(answer)
    except Exception as error:
        # Whatever fails in the network or at the hub is one reason for the user.
        if isinstance(error, HTTPError):
            return f"the hub answered with status {error.code}"
        return "the hub cannot be reached"
    return content if isinstance(content, dict) else "its config.json on the hub is no object"
