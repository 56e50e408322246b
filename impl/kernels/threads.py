"""One scan on several threads: each takes some of the heads.

Rules
- Kernels run without the GIL, and a head's state is read and written by one thread only: the same bits as on one thread.
- Segments stay in their order within a head, so that one may read the row that an earlier one wrote.
- The threads are the caller's: nothing is started here, and a session stays on its own.
"""

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def scan_on_threads(pool: ThreadPoolExecutor, thread_count: int, scan_heads: Callable[..., None], heads: int, *arguments: Any) -> None:
    """Run a scan over all of `heads`, cut into `thread_count` ranges or fewer, and wait for all of them.

    scan_heads  a scan's function for a range of heads, called as scan_heads(first_head, end_head, *arguments)
    arguments   those of the scan itself

    Raises what a thread raised.
    """
    count = max(1, min(thread_count, heads))
    ends = [heads * part // count for part in range(count + 1)]
    waiting = [pool.submit(scan_heads, first, end, *arguments) for first, end in itertools.pairwise(ends)]
    for one in waiting:
        one.result()
