"""From what is found in a model's text to output items, and the events that tell of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import count

from jaxpaged.server.responses import ChatLogprob
from jaxpaged.server.responses_api.objects import (
    CallDelta,
    CallDone,
    CallItem,
    ItemEvent,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    PartEvent,
    ReasoningDelta,
    ReasoningDone,
    ReasoningItem,
    ReasoningText,
    StreamEvent,
    TextDelta,
    TextDone,
)
from jaxpaged.server.state import random_id
from jaxpaged.server.tools.events import Arguments, Content, Event, Reasoning, ToolEnd, ToolStart
from jaxpaged.server.tools.reply import new_call_id


class OutputItems:
    """The items of one answer. An item ends when the next one begins; how the text was cut makes no difference.

    Events carry copies: what was told does not change.

    Attributes:
        items: so far, in order; the last one has its text only when it has ended.
    """

    def __init__(self) -> None:
        self.items: list[OutputItem] = []
        self._sequence = count()
        self._is_open = False  # the last item
        self._text: list[str] = []  # of the last item
        self._logprobs: list[ChatLogprob] = []  # of tokens whose text was not told yet

    def next_number(self) -> int:
        """The sequence number of the next event."""
        return next(self._sequence)

    def take(self, events: Iterable[Event], logprobs: Iterable[ChatLogprob] = ()) -> Iterator[StreamEvent]:
        """Events of the next piece of the answer.

        Args:
            logprobs: of the piece's tokens; they go with the next text that the answer shows.
        """
        self._logprobs += logprobs
        for event in events:
            match event:
                case Content(text):
                    yield from self._say(text)
                case Reasoning(text):
                    yield from self._reason(text)
                case ToolStart(name):
                    yield from self._close("completed")
                    yield from self._add(CallItem(id=f"fc_{random_id()}", call_id=new_call_id(), name=name))
                case Arguments(text):
                    yield from self._argue(text)
                case ToolEnd():
                    yield from self._close("completed")

    def finish(self, status: ItemStatus) -> Iterator[StreamEvent]:
        """Ends the last item, with `status` if it was still open."""
        yield from self._close(status)

    def _say(self, text: str) -> Iterator[StreamEvent]:
        if not text:
            return
        item = self.items[-1] if self._is_open else None
        if not isinstance(item, MessageItem):
            yield from self._close("completed")
            item = MessageItem(id=f"msg_{random_id()}")
            yield from self._add(item)
            item.content = [OutputText(logprobs=[])]
            yield self._part("response.content_part.added", item.id, item.content[0])
        self._text.append(text)
        logprobs = self._take_logprobs()
        item.content[0].logprobs.extend(logprobs)
        yield TextDelta(
            sequence_number=self.next_number(),
            item_id=item.id,
            output_index=len(self.items) - 1,
            delta=text,
            logprobs=logprobs,
        )

    def _reason(self, text: str) -> Iterator[StreamEvent]:
        item = self.items[-1] if self._is_open else None
        if not isinstance(item, ReasoningItem):
            yield from self._close("completed")
            item = ReasoningItem(id=f"rs_{random_id()}")
            yield from self._add(item)
            item.content = [ReasoningText()]
            yield self._part("response.content_part.added", item.id, item.content[0])
        self._text.append(text)
        yield ReasoningDelta(
            sequence_number=self.next_number(), item_id=item.id, output_index=len(self.items) - 1, delta=text
        )

    def _argue(self, text: str) -> Iterator[StreamEvent]:
        item = self.items[-1]
        assert isinstance(item, CallItem)
        self._text.append(text)
        yield CallDelta(
            sequence_number=self.next_number(), item_id=item.id, output_index=len(self.items) - 1, delta=text
        )

    def _add(self, item: OutputItem) -> Iterator[StreamEvent]:
        self.items.append(item)
        self._is_open = True
        yield self._item("response.output_item.added", item)

    def _close(self, status: ItemStatus) -> Iterator[StreamEvent]:
        if not self._is_open:
            return
        self._is_open = False
        item, index = self.items[-1], len(self.items) - 1
        text, self._text = "".join(self._text), []
        if isinstance(item, CallItem):
            item.arguments = text
            item.status = "completed" if _is_json(item.arguments) else "incomplete"
            yield CallDone(
                sequence_number=self.next_number(),
                item_id=item.id,
                output_index=index,
                name=item.name,
                arguments=item.arguments,
            )
        else:
            item.status = status
            item.content[0].text = text
            if isinstance(item, MessageItem):
                item.content[0].logprobs.extend(self._take_logprobs())
            yield self._text_done(item, index)
            yield self._part("response.content_part.done", item.id, item.content[0])
        yield self._item("response.output_item.done", item)

    def _text_done(self, item: MessageItem | ReasoningItem, index: int) -> StreamEvent:
        number, text = self.next_number(), item.content[0].text
        if isinstance(item, ReasoningItem):
            return ReasoningDone(sequence_number=number, item_id=item.id, output_index=index, text=text)
        logprobs = list(item.content[0].logprobs)
        return TextDone(sequence_number=number, item_id=item.id, output_index=index, text=text, logprobs=logprobs)

    def _take_logprobs(self) -> list[ChatLogprob]:
        logprobs, self._logprobs = self._logprobs, []
        return logprobs

    def _item(self, kind: str, item: OutputItem) -> ItemEvent:
        return ItemEvent(
            sequence_number=self.next_number(),
            type=kind,  # type: ignore[arg-type]
            output_index=len(self.items) - 1,
            item=item.model_copy(deep=True),
        )

    def _part(self, kind: str, item_id: str, part: OutputText | ReasoningText) -> PartEvent:
        return PartEvent(
            sequence_number=self.next_number(),
            type=kind,  # type: ignore[arg-type]
            item_id=item_id,
            output_index=len(self.items) - 1,
            part=part.model_copy(deep=True),
        )


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
