"""Messages out and replies in, whose they are, in a fixed order and a few at a time, whatever order they arrive in."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice

from flwr.app import Message
from flwr.serverapp import Grid

_PAUSES = (0.01, 1.0)  # seconds between two looks for replies, doubling while none comes


class Asked:
    """The messages of a round, without their contents: whose a reply is, and whether they were sent at all."""

    def __init__(self, messages: Iterable[Message] = ()) -> None:
        self._messages = [message.metadata for message in messages]
        self._nodes: dict[str, int] = {}

    @property
    def sent(self) -> bool:
        return any(message.message_id for message in self._messages)

    def node(self, reply: Message) -> int:
        """Whose reply this is. What the SuperLink says about a node that is gone comes from the SuperLink itself."""
        if not self._nodes:  # a message has its id once it is sent, so not before there are replies
            self._nodes = {message.message_id: message.dst_node_id for message in self._messages if message.message_id}
        return self._nodes.get(reply.metadata.reply_to_message_id, reply.metadata.src_node_id)


def in_order(grid: Grid, messages: Iterable[Message], *, timeout: float | None, window: int) -> Iterator[Message]:
    """Send the messages and give their replies in the messages' order; those that do not come in time are passed over.

    Replies are asked for by name, the next `window` of them only, so no more than that many are in memory here; the
    rest waits in the SuperLink. What queued behind a slow client is transferred after it: the price of a fixed order.
    """
    sent = list(messages)
    accepted = {name for name in grid.push_messages(sent) if name} if sent else set()
    waiting = deque(m.metadata.message_id for m in sent if m.metadata.message_id in accepted)
    del sent
    early: dict[str, Message] = {}
    end, pause = None if timeout is None else time.monotonic() + timeout, _PAUSES[0]
    while waiting:
        late = end is not None and time.monotonic() >= end
        wanted = [name for name in islice(waiting, window) if name not in early]
        for reply in grid.pull_messages(wanted):
            early[reply.metadata.reply_to_message_id] = reply
            del reply
        if waiting[0] in early:
            pause = _PAUSES[0]
            while waiting and waiting[0] in early:
                yield early.pop(waiting.popleft())
        elif late:
            waiting.popleft()
        else:
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES[1])
