"""What clients remember between rounds."""

from __future__ import annotations

import pytest
import torch

from fedeve.memory import Memory

LIKE = torch.zeros(3)


def vector(seed: int) -> torch.Tensor:
    return torch.randn(3, generator=torch.Generator().manual_seed(seed))


def filled(clients: list[int]) -> Memory:
    memory = Memory(("control", "other"), like=LIKE)
    memory.put({client: {"control": vector(client), "other": vector(client + 1000)} for client in clients})
    return memory


def test_a_client_that_never_wrote_remembers_zeros():
    memory = filled([5])
    assert torch.equal(memory.get(6)["control"], LIKE)
    assert set(memory.get(6)) == {"control", "other"}
    assert len(memory) == 1


def test_a_client_remembers_what_it_wrote_last():
    memory = filled([5, 2])
    memory.put({5: {"control": vector(77), "other": vector(78)}})
    assert torch.equal(memory.get(5)["control"], vector(77))
    assert torch.equal(memory.get(2)["control"], vector(2))
    assert torch.equal(memory.get(2)["other"], vector(1002))
    assert len(memory) == 2


def test_growing_keeps_what_was_there():
    memory = Memory(("control",), like=LIKE)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0)).tolist()
    for client in order:
        memory.put({client: {"control": vector(client)}})
    assert len(memory) == 200
    assert all(torch.equal(memory.get(client)["control"], vector(client)) for client in range(200))


def test_room_is_taken_by_those_who_wrote_and_not_by_the_largest_number():
    memory = filled([10**12])
    assert memory.tensors()["control"].shape == (1, 3)


def test_writing_the_same_twice_changes_nothing():
    memory, writes = filled([3, 1]), {4: {"control": vector(4), "other": vector(5)}}
    memory.put(writes)
    once = memory.tensors()
    once = {name: tensor.clone() for name, tensor in once.items()}
    memory.put(writes)
    assert all(torch.equal(memory.tensors()[name], once[name]) for name in once)


@pytest.mark.parametrize("client", [3, 8])
def test_what_was_read_and_what_was_written_are_copies(client):
    memory = filled([3])
    memory.get(client)["control"].add_(1)
    given = vector(9)
    memory.put({4: {"control": given, "other": given}})
    before = given.clone()
    given.add_(1)
    assert torch.equal(memory.get(3)["control"], vector(3))
    assert torch.equal(memory.get(8)["control"], LIKE)
    assert torch.equal(memory.get(4)["control"], before)


def test_what_was_read_does_not_change_when_its_client_writes():
    memory = filled([3])
    read = memory.get(3)["control"]
    memory.put({3: {"control": vector(50), "other": vector(51)}})
    assert torch.equal(read, vector(3))


def test_tensors_hold_all_of_it():
    memory, copy = filled([7, 0, 30]), Memory(("control", "other"), like=LIKE)
    tensors = memory.tensors()
    assert tensors["clients"].tolist() == [7, 0, 30]
    copy.load(tensors)
    assert len(copy) == 3
    for client in (7, 0, 30, 31):
        for name in ("control", "other"):
            assert torch.equal(copy.get(client)[name], memory.get(client)[name])


def test_loading_replaces_and_does_not_share():
    memory, copy = filled([7]), filled([1, 2])
    copy.load(memory.tensors())
    copy.put({7: {"control": vector(60), "other": vector(61)}})
    assert torch.equal(copy.get(1)["control"], LIKE)
    assert torch.equal(memory.get(7)["control"], vector(7))


def test_after_loading_new_clients_get_a_place_of_their_own():
    memory = Memory(("control", "other"), like=LIKE)
    memory.load(filled([7, 8]).tensors())
    memory.put({9: {"control": vector(9), "other": vector(9)}})
    assert [torch.equal(memory.get(client)["control"], vector(client)) for client in (7, 8, 9)] == [True] * 3


def test_an_empty_memory_goes_through_tensors():
    memory, copy = Memory(("control",), like=LIKE), Memory(("control",), like=LIKE)
    memory.put({1: {"control": vector(1)}})
    memory.load(copy.tensors())
    assert len(memory) == 0
    assert torch.equal(memory.get(1)["control"], LIKE)


def test_a_method_that_remembers_nothing_has_nothing_to_keep():
    memory = Memory((), like=LIKE)
    memory.put({1: {}, 2: {}})
    memory.load({})
    assert len(memory) == 0
    assert memory.get(1) == {}
    assert memory.tensors() == {}


def test_vectors_are_kept_in_the_dtype_of_the_params():
    memory = Memory(("control",), like=torch.zeros(2, dtype=torch.float64))
    memory.put({1: {"control": torch.ones(2, dtype=torch.float32)}})
    assert memory.get(1)["control"].dtype == memory.get(2)["control"].dtype == torch.float64


def test_it_moves_to_the_host_and_then_to_a_file_when_room_runs_out():
    """Memories take half of what is free: four rows on the device, eight on the host."""
    room = {"device": 8 * LIKE.nbytes, "host": 16 * LIKE.nbytes}
    memory = Memory(("control",), like=LIKE, free=room.__getitem__)
    homes = []
    for client in range(40):
        memory.put({client: {"control": vector(client)}})
        homes.append(memory.home)
    assert homes == ["device"] * 4 + ["host"] * 4 + ["file"] * 32
    assert all(torch.equal(memory.get(client)["control"], vector(client)) for client in range(40))
    again = Memory(("control",), like=LIKE)
    again.load(memory.tensors())
    assert all(torch.equal(again.get(client)["control"], vector(client)) for client in range(40))


def test_many_are_gathered_at_once_in_the_order_asked():
    memory = filled([5, 2])
    found = memory.gather([2, 9, 5])
    assert torch.equal(found["control"], torch.stack([vector(2), LIKE, vector(5)]))
    found["control"] += 1
    assert torch.equal(memory.get(2)["control"], vector(2))


def test_loading_replaces_everything_that_was_there() -> None:
    memory, other = Memory(("control",), like=torch.zeros(2)), Memory(("control",), like=torch.zeros(2))
    memory.put({7: {"control": torch.ones(2)}, 8: {"control": torch.ones(2)}, 9: {"control": torch.ones(2)}})
    other.put({3: {"control": torch.full((2,), 5.0)}})
    memory.load(other.tensors())
    assert len(memory) == 1 and memory.get(3)["control"].tolist() == [5.0, 5.0]
    assert memory.get(7)["control"].tolist() == [0.0, 0.0] and memory.tensors()["control"].shape == (1, 2)
    assert len(next(iter(memory._vectors.values()))) == 1  # no room is left over from before


@pytest.mark.parametrize(("most", "home"), [(5, "device"), (None, "host")])
def test_no_room_is_made_for_more_clients_than_there_are(most, home):
    """Five rows fit on the device; doubling from four would ask for eight."""
    room = {"device": 10 * LIKE.nbytes, "host": 100 * LIKE.nbytes}
    memory = Memory(("control",), like=LIKE, most=most, free=room.__getitem__)
    for client in range(5):
        memory.put({client: {"control": vector(client)}})
    assert memory.home == home
    assert all(torch.equal(memory.get(client)["control"], vector(client)) for client in range(5))


def test_more_clients_than_were_announced_are_remembered_too():
    memory = Memory(("control",), like=LIKE, most=2)
    for client in range(4):
        memory.put({client: {"control": vector(client)}})
    assert all(torch.equal(memory.get(client)["control"], vector(client)) for client in range(4))
