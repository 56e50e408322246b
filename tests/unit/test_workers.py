"""A pool's order of work, with an executor that only notes what it is given."""

from collections.abc import Iterator

import msgspec
from statedrift.fuzz.shards import ShardResult, ShardTask
from statedrift.fuzz.workers import Pool, Work


class Noted:
    """A task that is done when somebody waits for it."""

    def __init__(self, executor: "NotingExecutor", task: ShardTask) -> None:
        self.executor = executor
        self.task = task

    def result(self) -> bytes:
        self.executor.under_way.remove(self.task.shard)
        result = ShardResult(self.task.shard, self.task.count, 0, {}, {}, (), (), 0.0, 0.0, 0.0)
        return msgspec.msgpack.encode(result)

    def cancel(self) -> None:
        if self.task.shard in self.executor.under_way:
            self.executor.under_way.remove(self.task.shard)
            self.executor.given_up.append(self.task.shard)


class NotingExecutor:
    """Two processes that do nothing."""

    count = 2

    def __init__(self) -> None:
        self.submitted: list[int] = []
        self.under_way: list[int] = []
        self.given_up: list[int] = []

    def submit(self, work: Work, task: bytes) -> Noted:
        noted = Noted(self, msgspec.msgpack.decode(task, type=ShardTask))
        self.submitted.append(noted.task.shard)
        self.under_way.append(noted.task.shard)
        assert len(self.under_way) <= 2 * self.count
        return noted


def tasks(*shards: int, count: int = 64) -> Iterator[ShardTask]:
    return (ShardTask(0, shard, ("lfm2",), count) for shard in shards)


def test_results_come_in_the_order_of_the_tasks_and_few_are_under_way() -> None:
    executor = NotingExecutor()
    assert [result.shard for result in Pool(executor).shards(tasks(*range(11)))] == list(range(11))
    assert executor.submitted == list(range(11))


def test_a_task_is_taken_when_there_is_room_for_it() -> None:
    executor = NotingExecutor()
    asked: list[int] = []
    results = Pool(executor).shards(task for task in tasks(*range(11)) if not asked.append(task.shard))
    next(results)
    assert asked == [0, 1, 2, 3]


def test_what_comes_next_is_begun_and_not_done_twice() -> None:
    """Nobody waits while the last results of a round are looked at."""
    executor = NotingExecutor()
    pool = Pool(executor)
    for _ in pool.shards(tasks(0, 1, 2), tasks(3, 4, 5, 6, 7)):
        assert len(executor.under_way) == 3
    assert executor.under_way == [3, 4, 5]
    assert [result.shard for result in pool.shards(tasks(3, 4, 5, 6, 7))] == [3, 4, 5, 6, 7]
    assert executor.submitted == list(range(8))
    assert executor.given_up == []


def test_what_was_begun_and_is_not_asked_for_is_given_up() -> None:
    """The round found something: the next one's programs are others."""
    executor = NotingExecutor()
    pool = Pool(executor)
    list(pool.shards(tasks(0, 1), tasks(2, 3, count=64)))
    assert executor.under_way == [2, 3]
    assert [result.programs for result in pool.shards(tasks(2, 3, count=32))] == [32, 32]
    assert executor.given_up == [2, 3]
    assert executor.under_way == []


def test_what_was_begun_is_given_up_with_the_pool() -> None:
    executor = NotingExecutor()
    pool = Pool(executor)
    list(pool.shards(tasks(0), tasks(1, 2)))
    pool.close()
    assert executor.given_up == [1, 2]


def test_an_interrupt_gives_up_what_is_under_way() -> None:
    executor = NotingExecutor()
    results = Pool(executor).shards(tasks(*range(9)))
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert executor.under_way == []
