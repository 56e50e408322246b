"""repro.py: a finding as a script that needs no statedrift.

Rules
- For llama.cpp the script needs only llama-cpp-python, gguf and NumPy: it makes the tiny model, makes the very calls that were made,
  and compares with a fresh decode of the same tokens, or with what had to be answered.
- It exits 1 when the fault shows, 0 when not and 2 when it could not run, so that it can be bisected with.
- The calls come first, then what they are made of: who opens it sees on one screen what is done and what is wrong.
- For other targets it is two lines over statedrift's own replay, or over the command that a conformance suite gives.
"""

import os
import re
from collections.abc import Sequence
from importlib import resources

from ..oracle.contract import Checker
from ..spec.configuration import CacheConfiguration, changed
from ..spec.families import dimensions_of, doubled, family_of
from ..spec.models import Model
from ..spec.operations import (
    OPEN,
    AnyOperation,
    Cancel,
    Clear,
    Damage,
    Decode,
    Divide,
    Drop,
    Item,
    Keep,
    Remove,
    Reopen,
    Restore,
    RestoreAll,
    Rollback,
    Save,
    SaveAll,
    Share,
    Shift,
    operation_name,
)  # fmt: skip
from ..spec.programs import operation_text, program_id, program_text
from ..spec.tokens import DIRTY_SALT, DIRTY_TOKEN_COUNT, implicit_tokens
from ..store.findings import Finding
from ..targets.llama_builds import INSTALLED
from ..targets.llama_tensors import asked_tensors
from .execution import lay_out
from .retrace import Moment, retrace
from .trial import Trial

_IMPORTS, _FUNCTIONS = "# --- imports ---\n", "# --- functions ---\n"
_PARTIAL_ONLY, _ON_DEVICE = 1, 2


_ENDING = """if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception as error:
        print(f"could not run: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)
"""
_ENDING_OF_A_DEATH = """if __name__ == "__main__":
    if "--here" in sys.argv:
        program()
        sys.exit(0)
    try:
        ended = subprocess.run([sys.executable, __file__, "--here", *sys.argv[1:]], timeout=60).returncode
    except subprocess.TimeoutExpired:
        print("the process that ran the program gave no answer within 60 s")
        sys.exit(1)
    print(f"the process that ran the program ended with {ended} (0 is right)")
    died = ended < 0 or ended >= 128  # by a signal; anything else is not the fault that was seen
    sys.exit(1 if died else 2 if ended else 0)
"""


def reproduction_script(finding: Finding, trial: Trial) -> str:
    """The text of a finding's repro.py."""
    if finding.target == "llamacpp" and trial.run is not None:
        return _llamacpp_script(finding, trial)
    return _replay_script(finding)


def _head(finding: Finding, needs: str) -> str:
    indented = "".join(f"    {line}\n" for line in program_text(finding.program).splitlines())
    reason = finding.verdict.reason.replace('"""', '"')
    return (
        f'#!/usr/bin/env python3\n"""{finding.title}\n\n{reason}\n{finding.signature}\n'
        f"seen with {finding.version}; program {program_id(finding.program)}:\n\n"
        f'{indented}\n{needs}\nExits 1 when the fault shows, 0 when it does not, 2 when it could not run.\n"""\n\n'
    ).replace("\\", "\\\\")


def _replay_script(finding: Finding) -> str:
    inspect = ', "--inspect"' if finding.verdict.layer is not None else ""
    inspect += "" if finding.oracle == "own" else f', "--oracle", "{finding.oracle}"'
    return _head(
        finding, "Needs statedrift, through which this target is driven; a target named module:attribute has to be importable (PYTHONPATH)."
    ) + (
        "import subprocess\nimport sys\n\n"
        f'PROGRAM = """\\\n{program_text(finding.program)}"""\n\n'
        f'status = subprocess.call([sys.executable, "-m", "statedrift", "replay", PROGRAM, "--target", "{finding.target}", "--undocumented"{inspect}])\n'
        "sys.exit(status if status in (0, 1) else 2)\n"
    )


def command_script(finding: Finding, words: Sequence[str], python_path: str) -> str:
    """The text of a repro.py that gives a command again, in the folder where it was given.

    words        the command; the first one is a module that Python can run
    python_path  a folder that has to be importable for it; empty: none
    """
    words = (*words, "--undocumented") if words[0] == "statedrift" else words
    return _head(finding, "Needs statedrift, and the target where it is: the command is given in the folder of FOLDER.") + (
        "import os\nimport subprocess\nimport sys\n\n"
        f"FOLDER = {os.getcwd()!r}\n"
        f"COMMAND = {list(words)!r}\n\n"
        "if not os.path.isdir(FOLDER):\n"
        "    print(f'{FOLDER} is not here: write into FOLDER where the tests and their target are', file=sys.stderr)\n"
        "    sys.exit(2)\n"
        f"path = os.pathsep.join(filter(None, [{python_path!r}, os.environ.get('PYTHONPATH')]))\n"
        "status = subprocess.call([sys.executable, '-m', *COMMAND], cwd=FOLDER, env=os.environ | {'PYTHONPATH': path})\n"
        "sys.exit(status if status in (0, 1) else 2)\n"
    )


def _llamacpp_script(finding: Finding, trial: Trial) -> str:
    prelude = (resources.files(__package__) / "reproduction_prelude.py").read_text().split(_IMPORTS, 1)[1]
    imports, functions = prelude.split(_FUNCTIONS, 1)
    body = _Body(finding, trial)
    calls, ending = body.calls()
    needs = "Needs only: pip install llama-cpp-python gguf numpy. With --verbose the library speaks, too."
    if not finding.version.startswith(INSTALLED):
        needs += (
            "\nSeen with a build of its own: set LLAMA_CPP_LIB_PATH to the folder of its library, and install the llama-cpp-python\n"
            "that describes its version."
        )
    parts = [calls.strip(), *_needed(functions, calls), body.model_data().strip(), ending.strip()]
    if body.is_death:
        imports = imports.replace("import sys\n", "import subprocess\nimport sys\n")
    return _head(finding, needs) + "\n\n\n".join([imports.strip(), *parts]) + "\n"


def _needed(functions: str, calls: str) -> list[str]:
    """The functions that the calls need, directly or through others, in their order."""
    blocks = [block.strip() for block in functions.split("\n\n\n") if block.strip()]
    names = [block.removeprefix("def ").partition("(")[0] for block in blocks]
    needed: set[str] = set()
    text = calls
    while new := {name for name in names if re.search(rf"\b{name}\(", text)} - needed:
        needed |= new
        text = "\n".join(block.partition(":\n")[2] for block, name in zip(blocks, names, strict=True) if name in needed)
    return [block for block, name in zip(blocks, names, strict=True) if name in needed]


def _tensor_lines(model: Model) -> list[str]:
    family, dimensions = family_of(model), dimensions_of(model)
    if not family.is_modelled:
        return [
            f"    {(fact.name, fact.name, fact.shape, fact.draw, fact.scale, fact.offset, fact.shape, '')!r},"
            for fact in asked_tensors(model)
        ]
    facts = {fact.name: fact for fact in family.tensors(dimensions)}
    lines = []
    for tensor in family.gguf_tensors(dimensions):
        fact = facts[tensor.weight]
        entry = (tensor.name, fact.name, fact.shape, fact.draw, fact.scale, fact.offset, tensor.shape or fact.shape, tensor.transform)
        lines.append(f"    {entry!r},")
    return lines


class _Body:
    """The second half of the script: the model's facts and the calls."""

    def __init__(self, finding: Finding, trial: Trial) -> None:
        assert trial.run is not None
        self.program = finding.program
        self.verdict = finding.verdict
        self.run = trial.run
        self.tolerance = trial.tolerance
        self.cache = finding.program.cache
        self.is_death = finding.verdict.kind in ("crash", "hang")
        self.lines: list[str] = []
        self.saved: dict[str, Save | SaveAll] = {}

    # --- data --------------------------------------------------------------------------------------------------------------

    def model_data(self) -> str:
        parts = [self._data("", self.program.model)]
        if any(isinstance(operation, Damage) and operation.how == "foreign" for operation in self.program.operations):
            parts.append(self._data("FOREIGN_", doubled(self.program.model)))
        return "\n".join(parts)

    @staticmethod
    def _data(prefix: str, model: Model) -> str:
        metadata = "".join(f"    {key!r}: {value!r},\n" for key, value in family_of(model).gguf_metadata(dimensions_of(model)).items())
        tensors = "\n".join(_tensor_lines(model))
        return (
            f"{prefix}METADATA = {{\n{metadata}}}\n"
            "# GGUF name, name that keys the draw, drawn shape, distribution, scale, offset, shape, transform\n"
            f"{prefix}TENSORS = [\n{tensors}\n]\n"
        )

    # --- calls -------------------------------------------------------------------------------------------------------------

    def calls(self) -> tuple[str, str]:
        """The function that makes the calls and compares, and the end of the script."""
        self._open(self.cache)
        wrong_row = self.verdict.kind in ("wrong-output", "nonfinite")
        last = self.verdict.operation_index or 0
        for moment in retrace(self.program, self.run):
            text = operation_text(moment.operation)
            if moment.step.demand in ("skip", "undeclared"):
                self.lines.append(f"# {text}: not sent ({moment.step.reason})")
                continue
            if isinstance(moment.operation, Reopen):
                self.cache = changed(self.cache, moment.operation.changes)
            self._call(moment, text)
            if moment.index == last and not self.is_death:
                if wrong_row:
                    self._compare_rows(moment)
                else:
                    self._compare_answer(moment)
                break
        if self.is_death:
            return "def program():\n" + self._body(), _ENDING_OF_A_DEATH
        return 'def main():\n    """Returns 1 when the fault shows."""\n' + self._body(), _ENDING

    def _body(self) -> str:
        return "\n".join(f"    {line}" if line else "" for line in self.lines) + "\n"

    def _open(self, cache: CacheConfiguration) -> None:
        """A context, over memory that was used before when the program asks for it."""
        if not self.lines:
            words = f"{self.program.model.family},{self.program.model.seed}"
            self.lines.append(f"model = load_model(METADATA, TENSORS, {words!r})")
        self.lines.append(f"context = open_context(model, {self._context_changes(cache)})")
        self.lines.append("memory = llama.llama_get_memory(context)")
        if cache.start != "fresh":
            count = min(DIRTY_TOKEN_COUNT, self.run.capabilities.n_ctx or DIRTY_TOKEN_COUNT)
            vocabulary_size = dimensions_of(self.program.model)["n_vocab"]
            for sequence in range(cache.n_seq_max):
                tokens = list(implicit_tokens(sequence, 0, count, DIRTY_SALT, vocabulary_size))
                self.lines.append(f"decode(context, [(({sequence},), 0, {tokens})], last_only=True)")
            self.lines.append("llama.llama_memory_clear(memory, False)  # the memory was used before")

    def _context_changes(self, cache: CacheConfiguration) -> str:
        pool = self._pool(cache)
        changes = {"n_ctx": pool, "n_ubatch": cache.n_ubatch, "n_seq_max": cache.n_seq_max, "n_rs_seq": cache.n_rs_seq}
        flags = {"kv_unified": cache.unified, "swa_full": cache.swa_full}
        words = [f"{name}={value}" for name, value in changes.items()] + [f"{name}=True" for name, value in flags.items() if value]
        return ", ".join(words + self._cells(cache))

    @staticmethod
    def _cells(cache: CacheConfiguration) -> list[str]:
        """The type of attention cells, where it is not float32 without flash attention."""
        return (["type_k=1", "type_v=1"] if cache.kv == "f16" else []) + (["flash_attn_type=1"] if cache.flash else [])

    def _pool(self, cache: CacheConfiguration) -> int:
        """Attention cells in all, in the steps of 256 that llama.cpp makes; a model without attention needs none."""
        if not self.run.capabilities.attention:
            return 4096
        padded = -(-cache.n_ctx // 256) * 256
        return -(-cache.n_ctx * cache.n_seq_max // 256) * 256 if cache.unified else padded * cache.n_seq_max

    def _call(self, moment: Moment, text: str) -> None:
        checker, operation = moment.checker, moment.operation
        logs = checker.ledger.logs
        say = f"  # {text}"
        match operation:
            case Decode(items=items, outputs=outputs):
                self._decode(checker, items, outputs or self.cache.outputs, None, say)
            case Cancel(items=items, at=at):
                self._decode(checker, items, self.cache.outputs, at, say)
            case Rollback(sequence=sequence, token_count=count):
                whole = count >= len(logs[sequence].tokens)
                start = 0 if whole else logs[sequence].position - count + 1
                self.lines.append(f"accepted = llama.llama_memory_seq_rm(memory, {sequence}, {start}, -1){say}")
            case Remove(sequence=sequence, start=start, end=end):
                self.lines.append(f"accepted = llama.llama_memory_seq_rm(memory, {sequence}, {start}, {end}){say}")
            case Drop(sequence=sequence):
                self.lines.append(f"accepted = llama.llama_memory_seq_rm(memory, {sequence}, 0, -1){say}")
            case Share(source=source, destination=destination, start=start, end=end):
                self.lines.append(f"llama.llama_memory_seq_cp(memory, {source}, {destination}, {start}, {end}){say}")
            case Keep(sequence=sequence):
                self.lines.append(f"llama.llama_memory_seq_keep(memory, {sequence}){say}")
            case Shift(sequence=sequence, delta=delta):
                self.lines.append(f"llama.llama_memory_seq_add(memory, {sequence}, {OPEN}, {OPEN}, {delta}){say}")
            case Divide(sequence=sequence, divisor=divisor):
                self.lines.append(f"llama.llama_memory_seq_div(memory, {sequence}, {OPEN}, {OPEN}, {divisor}){say}")
            case Save(sequence=sequence, slot=slot, partial=partial, device=device):
                self.saved[slot] = operation
                self.lines.append(f"saved_{_safe(slot)} = save(context, {sequence}{_flags(partial, device)}){say}")
                self.lines.append(f"accepted = len(saved_{_safe(slot)})")
            case SaveAll(slot=slot):
                self.saved[slot] = operation
                self.lines += [f"saved_{_safe(slot)} = save_all(context){say}", f"accepted = len(saved_{_safe(slot)})"]
            case Restore(slot=slot, sequence=sequence):
                self._restore(slot, sequence, say)
            case RestoreAll(slot=slot):
                self.lines.append(f"accepted = restore_all(context, saved_{_safe(slot)}){say}")
            case Damage():
                self._damage(operation, checker, say)
            case Clear():
                self.lines.append(f"llama.llama_memory_clear(memory, True){say}")
            case Reopen():
                self.lines.append(f"llama.llama_free(context){say}")
                self._open(self.cache)

    def _decode(self, checker: Checker, items: tuple[Item, ...], outputs: str, cancel_at: int | None, say: str) -> None:
        pieces = checker.pieces(items)
        if self.cache.interleave and all(len(piece.sequences) == 1 for piece in pieces):
            batch = lay_out(pieces, True, "all").batch
            entries = [
                (owners, int(position), [int(token)])
                for owners, position, token in zip(batch.sequences, batch.positions, batch.tokens, strict=True)
            ]
        else:
            entries = [(piece.sequences, piece.first_position, list(piece.tokens)) for piece in pieces]
        options = {"all": "", "last": ", last_only=True", "embeddings": ", embeddings=True"}[outputs]
        if cancel_at is not None:
            options += f", cancel_at={cancel_at}"
        self.lines.append(f"code, rows = decode(context, {entries}{options}){say}")

    def _restore(self, slot: str, sequence: int, say: str) -> None:
        save = self.saved[slot]
        assert isinstance(save, Save)
        self.lines.append(f"accepted = restore(context, saved_{_safe(slot)}, {sequence}{_flags(save.partial, save.device)}){say}")
        if save.partial:
            self.lines.append(f"end = llama.llama_memory_seq_pos_max(memory, {sequence}) + 1")
            self.lines.append(f"accepted = accepted and llama.llama_memory_seq_rm(memory, {sequence}, end, -1)  # the attention tail")

    def _damage(self, operation: Damage, checker: Checker, say: str) -> None:
        name = f"saved_{_safe(operation.slot)}"
        match operation.how:
            case "truncate":
                self.lines.append(f"{name} = {name}[:-{operation.amount}]{say}")
            case "flip":
                at = operation.amount
                self.lines.append(f"{name} = {name}[:{at}] + bytes([{name}[{at}] ^ 1]) + {name}[{at + 1}:]{say}")
            case "header":
                self.lines.append(f'{name} = b"\\xff" * min(16, len({name})) + {name}[16:]{say}')
            case "foreign":
                slot, save = checker.ledger.slots[operation.slot], self.saved[operation.slot]
                words = f"{self.program.model.family},{self.program.model.seed}"
                self.lines.append(f"foreign_model = load_model(FOREIGN_METADATA, FOREIGN_TENSORS, {words!r}){say}")
                self.lines.append(f"foreign = open_context(foreign_model, {self._context_changes(self.cache)})")
                for sequence, log in slot.logs.items():
                    if log.tokens and sequence < self.cache.n_seq_max:
                        self.lines.append(f"decode(foreign, [(({sequence},), 0, {list(log.tokens)})], last_only=True)")
                if isinstance(save, SaveAll):
                    self.lines.append(f"{name} = save_all(foreign)")
                else:
                    sequence = save.sequence if save.sequence < self.cache.n_seq_max else 0
                    self.lines.append(f"{name} = save(foreign, {sequence}{_flags(save.partial, save.device)})")

    # --- the comparison ----------------------------------------------------------------------------------------------------

    def _compare_rows(self, moment: Moment) -> None:
        """The wrong row against the same tokens in a fresh context."""
        operation = moment.operation
        assert isinstance(operation, Decode | Cancel)
        pieces = moment.checker.pieces(operation.items)
        outputs = (operation.outputs if isinstance(operation, Decode) else None) or self.cache.outputs
        batch = lay_out(pieces, bool(self.cache.interleave), outputs).batch
        place = next(
            number
            for number, (owners, position) in enumerate(zip(batch.sequences, batch.positions, strict=True))
            if min(owners) == self.verdict.sequence and position == self.verdict.position and batch.wanted[number]
        )
        sequence = self.verdict.sequence or 0
        given = [
            (token, piece.first_position + n) for piece in pieces if sequence in piece.sequences for n, token in enumerate(piece.tokens)
        ]
        log = [
            *moment.checker.ledger.logs[sequence].tokens,
            *(token for token, position in given if position <= (self.verdict.position or 0)),
        ]
        embeddings = ", embeddings=True" if outputs == "embeddings" else ""
        single = ", ".join(["n_ctx=4096, n_ubatch=4096, n_seq_max=1", *self._cells(self.cache)])
        self.lines += [
            f"given = rows[{place}]  # sequence {sequence}, position {self.verdict.position}",
            "",
            f"log = {[int(token) for token in log]}  # everything sequence {sequence} has consumed",
            f"code, rows = decode(open_context(model, {single}), [((0,), 0, log)]{embeddings})",
            "truth = rows[len(log) - 1]",
            "difference = float(np.max(np.abs(given - truth)))",
            f"allowed = {self.tolerance:.3g} * (1 + float(np.sqrt(np.mean(truth**2))))  # 20 times the rounding noise of plain decodings",
            'print("given", np.array2string(given[:8], precision=4))',
            'print("truth", np.array2string(truth[:8], precision=4))',
            'print(f"largest difference {difference:.4g}, allowed {allowed:.2g}")',
            "return 0 if difference <= allowed else 1  # NaN is a fault, too",
        ]

    def _compare_answer(self, moment: Moment) -> None:
        """The answer, or the positions, against what they had to be."""
        operation, step = moment.operation, moment.step
        name = operation_name(operation)
        if step.outcome.word == "error":
            self._read_answer(operation)
            self.lines.append(f'print("{name} was answered", "with yes" if accepted else "with an error")')
            self.lines.append("return 0 if accepted else 1")
        elif self.verdict.kind == "bad-refusal" or (self.verdict.kind == "false-success" and step.demand == "must-refuse"):
            self._read_answer(operation)
            wanted = step.demand == "must-accept"
            must = "accepted" if wanted else "refused"
            self.lines.append(f'print("{name} was", "accepted" if accepted else "refused", "- it must be {must}")')
            self.lines.append("return 0 if accepted else 1" if wanted else "return 1 if accepted else 0")
        elif self.verdict.kind == "partial-effect":
            self._compare_with_before(moment)
        else:
            self._compare_positions(moment)

    def _read_answer(self, operation: AnyOperation) -> None:
        if isinstance(operation, Decode | Cancel):
            self.lines.append("accepted = code == 0")
        elif not isinstance(operation, Rollback | Remove | Drop | Save | SaveAll | Restore | RestoreAll):
            self.lines.append("accepted = True  # the call has no way to refuse")

    def _compare_with_before(self, moment: Moment) -> None:
        """A refused operation leaves every position; a refused restore may also leave its own sequence empty."""
        before = [tuple(pair) for pair in moment.checker.before]
        self.lines += [
            f"given = positions(context, {len(before)})",
            f"before = {before}",
            'print("before", before, "after the refusal", given)',
        ]
        if isinstance(moment.operation, Restore):
            sequence = moment.operation.sequence
            self.lines.append(
                f"before[{sequence}] = given[{sequence}] if given[{sequence}] == (-1, -1) else before[{sequence}]  # it may be empty"
            )
        elif isinstance(moment.operation, RestoreAll):
            self.lines.append("before = [new if new == (-1, -1) else old for old, new in zip(before, given)]  # they may be empty")
        self.lines.append("return 0 if given == before else 1")

    def _compare_positions(self, moment: Moment) -> None:
        """Every sequence ends where its log ends, and says that it is empty at both ends or at none."""
        moment.checker.take_effect(moment.index, moment.operation, moment.step.outcome, moment.step.positions)
        logs = moment.checker.ledger.logs
        truth = {sequence: log.position for sequence, log in enumerate(logs) if not log.unchecked}
        self.lines += [
            f"truth = {truth}  # last position of every sequence",
            f"given = positions(context, {len(logs)})",
            'print("first and last positions", given, "last ones must be", truth, "and first ones -1 where these are, else no later than them")',
            "right = all(given[s][1] == last and (given[s][0] == -1) == (last == -1) and given[s][0] <= last for s, last in truth.items())",
            "return 0 if right else 1",
        ]


def _safe(slot: str) -> str:
    return slot.replace("-", "_")


def _flags(partial: bool, device: bool) -> str:
    flags = _PARTIAL_ONLY * partial | _ON_DEVICE * device
    return f", flags={flags}" if flags else ""
