"""Names for runs: `Monitor(run_dir=True)` creates ``runs/<date>-<two words>``."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gradiometer import distributed
from gradiometer.monitor.failures import LOG, describe
from gradiometer.runs import RunError

if TYPE_CHECKING:
    from gradiometer.distributed import Ranks

_PARENT: Final = "runs"
_TRIES: Final = 100
_FIRST: Final = (
    "amber azure bold brave bright brisk calm clear clever cool coral crisp deft eager early fair fast fine "
    "fond free fresh gentle glad golden grand green keen kind light lively lucid mellow merry mild neat "
    "nimble noble plain proud quick quiet rapid ready rosy round sharp shiny silver sleek smart smooth soft "
    "solid steady still sunny swift tidy vivid warm wide wise young"
)
_SECOND: Final = (
    "acorn arch aspen badger bay beacon beech birch brook canyon cedar cliff cloud comet creek crest dawn "
    "delta dune eagle ember falcon fern field finch fjord forest glade grove harbor hawk heron hill island "
    "lake lark leaf lynx maple marsh meadow mesa moon oak orchid otter owl peak pine plain pond prairie reef "
    "ridge river robin spruce star stone stream summit swan trail valley willow wren"
)


def choose_run_dir(run_dir: Any, rank: int | None, ranks: Ranks | None, group: Any) -> Any:
    """Return ``run_dir``; for True a new folder, which is the same on all ranks.

    ``rank``: this rank; None without others. ``ranks``, ``group``: of ranks that are merged, or None.

    Raises:
        ValueError: if ranks that are not merged need a name.
        RunError: if the folder cannot be created.
        RankError: if the first rank has another argument or does not respond.
    """
    if ranks is None or group is None:
        if run_dir is not True:
            return run_dir
        if rank is not None:
            msg = "Monitor(run_dir=True, ranks=False): ranks that are not merged cannot agree on a name; "
            raise ValueError(msg + "pass the path of a folder")
        return _create()
    path, problem = None, None
    if run_dir is True and ranks.rank == 0:
        try:
            path = str(_create())
        except RunError as error:
            problem = describe(error)
    # every rank takes part, whatever its argument is
    path, problem = distributed.tell((path, problem), 0, group, what="Monitor(run_dir=True)")
    if run_dir is not True:
        return run_dir
    if path is None:
        problem = problem or f"rank {ranks.global_ranks[0]} has another run_dir; pass True there too"
        raise RunError(f"Monitor(run_dir=True) on rank {rank}: {problem}")
    return Path(path)


def _create() -> Path:
    """Create a folder that was not there, and log its path."""
    date = time.strftime("%Y-%m-%d")
    for _ in range(_TRIES):
        path = Path(_PARENT, f"{date}-{secrets.choice(_FIRST.split())}-{secrets.choice(_SECOND.split())}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            msg = f"{path.absolute()} cannot be created ({error.strerror}): pass the path of a folder instead"
            raise RunError(msg) from None
        LOG.info("this run is recorded in %s", path)
        return path
    msg = f"no free name was found for a run in {Path(_PARENT).absolute()}: pass the path of a folder instead"
    raise RunError(msg)
