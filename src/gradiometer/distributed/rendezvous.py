"""Exchange values between ranks through a store, and find missing ranks; each request has a timeout.

The store is the one that `torch.distributed` made for the default process group; it needs no device.
"""

from __future__ import annotations

import json
import os
import threading
import time
import zlib
from typing import TYPE_CHECKING, Any, Final

from gradiometer.terminal import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SAME_CALLS: Final = "every rank must make the same calls in the same order"
# where init_process_group starts the store; torchrun keeps it in its own process
STORE_HOLDER: Final = (
    "torchrun's first node"
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    else "rank 0 by default"
)
# seconds between polls of a store, at first and at most
_PAUSE: Final = 0.002
_LONGEST_PAUSE: Final = 0.5
# seconds that the store itself may take
SLACK: Final = 5.0


class RankError(RuntimeError):
    """Ranks disagree, one does not respond, or the process group cannot be used.

    The message is one line, and names the ranks if they are known.
    """

    def __str__(self) -> str:
        """Return the message; it may contain the text of another rank's error."""
        return one_line(super().__str__())


def exchange(
    store: Any, key: str, rank: int, ranks: Sequence[int], text: str, timeout: float
) -> tuple[list[int], list[str]]:
    """Send a text to the others; return the ranks missing after ``timeout`` seconds, or all texts.

    All ranks get the same result, including late ones.
    """
    own, outcome = f"{key}/{rank}", f"{key}/outcome"
    store.set(own, text)
    is_due = store.add(f"{key}/count", 1) == len(ranks) or not _appears(store, outcome, timeout)
    # the first rank that gets here writes the outcome for all
    if is_due and store.compare_set(f"{key}/decided", "", str(rank)) == str(rank).encode():
        missing = [rank for rank in ranks if not store.check([f"{key}/{rank}"])]
        texts = [] if missing else store.multi_get([f"{key}/{rank}" for rank in ranks])
        # compress: the values of most ranks are similar
        found = json.dumps([missing, [text.decode() for text in texts]])
        store.set(outcome, zlib.compress(found.encode(), 1))
    if not _appears(store, outcome, SLACK):
        decider = store.get(f"{key}/decided").decode()
        raise RankError(f"rank {decider} exited while it gathered the values of all ranks; see its log")
    try:
        # JSON: reading what another process has written must not run code
        missing, values = json.loads(zlib.decompress(store.get(outcome)))
    except (ValueError, zlib.error) as error:
        msg = "the store of the process group does not hold what the ranks told each other; "
        raise RankError(msg + "use the same version of gradiometer on all ranks") from error
    if not missing:
        # leave no keys behind
        store.delete_key(own)
        if store.add(f"{key}/left", 1) == len(ranks):
            for name in ("count", "decided", "outcome", "left"):
                store.delete_key(f"{key}/{name}")
    return missing, values


def missing_ranks(
    store: Any, keys: Sequence[str], rank: int, ranks: Sequence[int], timeout: float
) -> list[int]:
    """Report that this rank is here; return the ranks that do not report within ``timeout`` seconds.

    ``keys``: the key of this call first, then those of others; a rank that answers any of them is present.
    """
    for key in keys:
        store.set(f"{key}/{rank}", "here")
    store.set(keys[0], "called")
    missing, begin = list(ranks), time.monotonic()
    for _ in _until(timeout):
        try:
            missing = [rank for rank in missing if not any([store.check([f"{key}/{rank}"]) for key in keys])]
        except RuntimeError:
            # the rank that holds the store may end with the same error, a little earlier
            if time.monotonic() - begin < timeout / 2:
                raise
            break
        if not missing:
            break
    return missing


def _appears(store: Any, key: str, timeout: float) -> bool:
    return any(store.check([key]) for _ in _until(timeout))


def _until(timeout: float) -> Iterator[None]:
    """Yield at growing intervals until ``timeout`` seconds have passed, and once more at the end."""
    end, pause = time.monotonic() + timeout, _PAUSE
    while (left := end - time.monotonic()) > 0:
        yield
        # do not wait in the store: other threads of this process may need it
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE)
    yield


def in_time(seconds: float, function: Callable[[], Any]) -> Any:
    """Return the result of a function, but wait at most ``seconds``: a store may hang forever."""
    found: list[Any] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            found.append(function())
        except BaseException as error:  # noqa: BLE001 raised below
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not found:
        msg = f"the store of the process group, on {STORE_HOLDER}, did not respond within {seconds:g} s"
        raise RankError(msg)
    return found[0]
