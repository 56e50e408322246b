"""Films: what a plane holds is told from its bytes, and a sequence that would go on from another state than its log's is marked."""

import pytest
from statedrift.fuzz import filming
from statedrift.fuzz.execution import execute
from statedrift.fuzz.filming import film_of
from statedrift.fuzz.generation import generate, model_for
from statedrift.reports.pictures import cell_lines, is_off
from statedrift.spec.pictures import Film, FilmStep
from statedrift.spec.programs import parse_program
from statedrift.spec.verdicts import ACCEPTED, refused
from statedrift.store.findings import Answer
from statedrift.targets.registry import load_target

from tests.perfect_target import PerfectTarget

TOLERANCE = 6e-5
SHY = PerfectTarget()
UNWRITTEN = parse_program("model lfm2 seed=0; decode 0:1; decode 0:1; rollback 0 1; decode 0:1")
SHARED = parse_program(
    "model mamba2 seed=0; cache n_seq_max=2; decode 0:4; share 0 1; rollback 0 2; decode 0:1 1:2; rollback 1 1; decode 1:1; drop 0"
)


def held(step: FilmStep, cell: int) -> list[int | None]:
    return [plane.token_count for plane in step.cells[cell].planes]


def claims(step: FilmStep) -> dict[int, str]:
    return {own.sequence: own.claim for own in step.sequences}


def filmed(text: str, target: str) -> Film:
    return film_of(parse_program(text), target, (), TOLERANCE)


def test_a_rollback_to_a_plane_that_was_never_written_is_seen() -> None:
    film = film_of(UNWRITTEN, "llamacpp", (), TOLERANCE)
    assert [claims(step) for step in film.steps] == [{0: "right"}, {0: "right"}, {0: "wrong"}, {0: "wrong"}]
    third = film.steps[2].sequences[0]
    assert (third.cell, third.plane, third.pending, third.token_count, third.position) == (0, 1, 1, 1, 0)
    assert held(film.steps[2], 0) == [2, 0, 0, 0]
    assert film.steps[3].cells[0].planes[0].is_wrong
    assert "llamacpp does not show its cells" in film.note
    off = {(own.index, own.what): own.tolerances for own in film.offsets}
    assert off[1, "output"] < 1 < off[3, "output"]
    assert off[2, "layer 0 conv"] > 1


@pytest.mark.parametrize("target", ["numba", "numba-ring"])
def test_our_own_caches_go_on_from_the_states_of_their_logs(target: str) -> None:
    film = film_of(SHARED, target, (), TOLERANCE)
    assert len(film.steps) == len(SHARED.operations)
    assert {claim for step in film.steps for claim in claims(step).values()} == {"right"}
    assert all(own.tolerances <= 1 for own in film.offsets)
    assert {own.what.split()[-1] for own in film.offsets} == {"output", "conv", "recurrent"}


def test_planes_and_rings_keep_states_in_their_own_order() -> None:
    planes, ring = film_of(SHARED, "numba", (), TOLERANCE), film_of(SHARED, "numba-ring", (), TOLERANCE)
    assert held(planes.steps[0], 0) == [4, 3, 2, 1]
    assert sorted(filter(None, held(ring.steps[0], 0))) == [1, 2, 3, 4]
    assert [own.pending for own in planes.steps[2].sequences] == [2, 0]
    assert planes.steps[1].cells[0].owners == (0, 1)
    assert planes.steps[-1].cells[1].owners == ()


def test_what_was_in_memory_before_is_not_known() -> None:
    film = filmed("model lfm2 seed=0; cache n_seq_max=1 start=dirty; decode 0:1", "numba")
    assert held(film.steps[0], 0) == [1, None, None, None]


def test_a_film_ends_where_the_target_answered_otherwise() -> None:
    said = (Answer(ACCEPTED, (0, -1, -1, -1)), Answer(ACCEPTED, (1, -1, -1, -1)), Answer(refused(), (1, -1, -1, -1)))
    film = film_of(UNWRITTEN, "llamacpp", said, TOLERANCE)
    assert [step.index for step in film.steps] == [0, 1]
    assert "answered operation 3 differently" in film.note


def test_of_long_programs_the_end_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filming, "STEPS_MAX", 3)
    film = film_of(SHARED, "numba", (), TOLERANCE)
    assert (film.skipped, [step.index for step in film.steps]) == (4, [4, 5, 6])
    assert min(own.index for own in film.offsets) >= 4


@pytest.mark.parametrize(
    ("text", "target", "note"),
    [
        ("model jamba seed=0; decode 0:1", "tests.unit.test_filming:SHY", "does not show its cells"),
        ("model granitehybrid seed=0; decode 0:1", "llamacpp", "no cache of ours stands for it"),
        ("model lfm2 seed=0; decode 0:1", "nowhere", "there is no picture: "),
        ("model rwkv7 seed=0; cache n_ubatch=1; decode 0:1", "llamacpp", ""),
    ],
)
def test_where_there_is_no_picture_the_film_says_why(text: str, target: str, note: str) -> None:
    film = filmed(text, target)
    assert note in film.note
    assert film.steps == () or note == ""


@pytest.mark.parametrize("target", ["numba", "numba-ring", "numba-llamacpp"])
def test_taking_pictures_changes_nothing(target: str) -> None:
    own = load_target(target)
    camera = filming._Camera(own, SHARED.model)
    plain, watched = execute(SHARED, own), execute(SHARED, camera, camera.before)
    assert plain == watched
    assert all(picture is not None for picture in camera.pictures[1:])


def test_reopening_begins_a_new_cache() -> None:
    film = filmed("model lfm2 seed=0; cache n_seq_max=1; decode 0:3; save 0 a; reopen; restore a 0; decode 0:1", "numba")
    assert held(film.steps[2], 0) == [0, 0, 0, 0]
    assert held(film.steps[3], 0)[0] == 3
    assert claims(film.steps[4]) == {0: "right"}


def test_an_attention_side_that_was_lost_is_seen() -> None:
    film = film_of(parse_program("model lfm2 seed=0; decode 0:1; save 0 c; damage c flip 32; restore c 0"), "llamacpp", (), TOLERANCE)
    last = film.steps[-1]
    assert [is_off(own) for own in film.steps[0].sequences] == [False]
    assert [(own.claim, own.attention, is_off(own)) for own in last.sequences] == [("right", (-1, -1), True)]
    assert "attention of seq 0: empty, NOT its own" in list(cell_lines(last))


def test_a_position_that_moved_with_another_sequence_is_seen() -> None:
    film = film_of(parse_program("model lfm2 seed=0; cache n_seq_max=2; decode 0:2; share 0 1; rollback 0 1"), "llamacpp", (), TOLERANCE)
    assert [(own.claim, own.said, is_off(own)) for own in film.steps[-1].sequences] == [("right", 0, False), ("right", 0, True)]
    assert "last position of seq 1: 0, NOT its own" in list(cell_lines(film.steps[-1]))


@pytest.mark.parametrize("family", ["lfm2", "mamba2"])
@pytest.mark.parametrize("target", ["numba", "numba-ring"])
def test_whatever_a_right_cache_is_given_it_goes_on_from_the_states_of_its_logs(target: str, family: str) -> None:
    for seed in range(20):
        film = film_of(generate(seed, model_for(seed, family)), target, (), TOLERANCE)
        assert film.steps
        assert not [own for step in film.steps for own in step.sequences if is_off(own)]
        assert all(own.tolerances <= 1 for own in film.offsets)
