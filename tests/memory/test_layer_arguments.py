"""A layer's arguments taken apart and put together: containers come back as copies with the same content."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ithaca.errors import UnsupportedError
from ithaca.memory.layer_arguments import Arguments, apply_changes


def tensor(*, trains: bool = False) -> Tensor:
    return torch.randn(3, requires_grad=trains)


CONTAINERS: dict[str, Any] = {
    "dict": {"a": tensor(), "b": 1},
    "ordered": OrderedDict(z=tensor(), a=tensor()),
    "default": defaultdict(list, {"a": (tensor(), tensor())}),
    "mapping": UserDict(a=(tensor(), (tensor(), "x"))),
    "list": [tensor(), None, (1, tensor())],
    "empty": {},
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_arguments_container_is_rebuilt_as_copy(name: str) -> None:
    given = CONTAINERS[name]
    arguments, originals = Arguments.of((tensor(), given), {"again": given, "size": torch.Size([2]), "flag": True})
    assert len(originals) == 1, "one container at two places is one"
    run = arguments.run_with([], [])
    assert run.args[1] is run.kwargs["again"] is not given
    assert type(run.args[1]) is type(given)
    assert repr(run.args[1]) == repr(given)
    assert run.kwargs["size"] == torch.Size([2])
    assert arguments.changes(run.flat, run.containers, []) == ([], [])


def test_arguments_container_holding_itself_is_rebuilt() -> None:
    given: dict[str, Any] = {"x": tensor()}
    given["self"] = given
    run = Arguments.of((given,), {})[0].run_with([], [])
    assert run.args[0]["self"] is run.args[0] is not given


def test_arguments_changed_container_updates_callers() -> None:
    inner: list[Any] = [tensor()]
    outer: dict[str, Any] = {"inner": inner, "gone": tensor(), "swapped": (tensor(), tensor())}
    hidden = tensor(trains=True)
    arguments, originals = Arguments.of((hidden,), {"state": outer})
    flat = list(arguments.flat)
    run = arguments.run_with(arguments.differentiable, [hidden])
    own, output = run.kwargs["state"], tensor()
    left = tensor()
    own["inner"].append(left)
    del own["gone"]
    own["swapped"] = (own["swapped"][1], own["swapped"][0], output, run.args[0], 7)
    changes, tensors = arguments.changes(run.flat, run.containers, [output])
    assert [id(each) for each in tensors] == [id(left)], "what is an output already is no second one"
    handed = [tensor(), tensor()]
    before = outer["swapped"]
    apply_changes(changes, originals, flat, handed)
    assert list(outer) == ["inner", "swapped"]
    assert outer["inner"] is inner
    assert inner[1] is handed[1]
    assert outer["swapped"][0] is before[1]
    assert outer["swapped"][1] is before[0]
    assert outer["swapped"][2] is handed[0]
    assert outer["swapped"][3] is hidden
    assert outer["swapped"][4] == 7


@pytest.mark.parametrize("made", [[], {}, object(), SimpleNamespace(), {1}])
def test_arguments_other_object_in_container_is_refused(made: Any) -> None:
    arguments, _ = Arguments.of((tensor(),), {"other": 1, "state": (1, {"x": {}})})
    run = arguments.run_with([], [])
    run.kwargs["state"][1]["x"]["new"] = made
    with pytest.raises(UnsupportedError, match=rf"puts a {type(made).__name__} into a dict .*\(argument state\)"):
        arguments.changes(run.flat, run.containers, [])


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x


HOLDERS = [lambda x: SimpleNamespace(a={"b": [x]}), Slotted, lambda x: {x}, lambda x: Slotted((Slotted(x),))]


@pytest.mark.parametrize("holder", HOLDERS)
def test_arguments_graph_inside_object_is_refused(holder: Any) -> None:
    Arguments.of((tensor(), holder(tensor())), {})[0].refuse_hidden_graphs()
    with pytest.raises(UnsupportedError, match=r"argument 2, a .*, holds tensors that want a gradient"):
        Arguments.of((tensor(), holder(tensor(trains=True))), {})[0].refuse_hidden_graphs()


def test_arguments_changed_in_place_are_reported() -> None:
    inside, shared = SimpleNamespace(a={"b": [1]}), tensor()
    arguments, _ = Arguments.of((tensor(), (shared, shared[:1])), {"bag": inside, "state": {"t": tensor()}})

    def changed(change: Any) -> str | None:
        seen = arguments.object_versions(arguments.flat)
        change()
        return arguments.changed_in_place(arguments.flat, seen)

    assert changed(lambda: None) is None
    assert changed(lambda: shared.add_(1)) == "writes into a tensor that it is given (argument 2)"
    assert changed(lambda: inside.a["b"].append(2)) == "changes a SimpleNamespace that it is given (argument bag)"
    assert changed(lambda: setattr(inside, "c", 3)) == "changes a SimpleNamespace that it is given (argument bag)"
    assert changed(lambda: setattr(inside, "c", 4)) == "changes a SimpleNamespace that it is given (argument bag)"
    held = arguments.flat[-1]
    assert changed(lambda: held.mul_(2)) == "writes into a tensor that it is given (argument state)"
