"""What was found in llama.cpp: a page of signatures and architectures, from campaigns that were run.

    python benchmarks/findings_llamacpp.py CAMPAIGN ... [--write FILE] [--no-compare]

Rules
- Only what the campaigns' folders hold is said: every row is a finding that was reduced and run ten times more. The page says what was not reached.
- One signature over all architectures: a finding's own without its family. The smallest of its programs is shown.
- Unless told not to, every finding that both oracles can judge is tried once more under the other one, and the page says where they part;
  and every finding is tried with the other kind of attention pool.
- Why a signature is there, llamacpp_causes.py says; where it says nothing, the page says that.
- All campaigns have to be of one version of the engine.
Source: llama.h of the version that is named on the page, for the sentences that are quoted.
"""

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from llamacpp_causes import CAUSE_OF, CAUSES
from statedrift.cli.throughput import machine_facts
from statedrift.fuzz.reduction import cost
from statedrift.fuzz.signatures import fine_signature
from statedrift.fuzz.trial import Bench
from statedrift.oracle.recompute import use_one_thread
from statedrift.reports.terminal import never_accepted, never_executed
from statedrift.spec.errors import UnavailableError, UsageError
from statedrift.spec.families import family_of
from statedrift.spec.models import Model
from statedrift.spec.operations import operation_name
from statedrift.spec.programs import program_line, program_text
from statedrift.store.campaigns import Campaign, read_campaign
from statedrift.store.findings import Finding
from statedrift.targets.llamacpp import TARGET

LOSSES = {
    "wrong-output": {
        "self": "Every call was accepted, and the sequence goes on from a state that its tokens do not give: text comes, and it is not the model's.",
        "other": "A sequence that the last operation does not name goes on from a state that its tokens do not give: one user's operation changes another's text.",
    },
    "nonfinite": {"": "Outputs are NaN or infinite: sampling from them fails, or picks anything."},
    "wrong-position": {
        "": "What llama_memory_seq_pos_min and _max say of a sequence is not what it holds: who goes by them (to number tokens, to see what a cache still has) is misled."
    },
    "bad-refusal": {"": "A call that has all that it needs is refused, and what the caller wanted does not happen."},
    "false-success": {
        "": "The call says yes, or cannot say no, and has not done what it was asked, or only a part of it: the caller goes on as if it had."
    },
    "partial-effect": {"": "The call says no and has changed something all the same: what the caller believes to be untouched is not."},
    "crash": {"": "The process dies, with every other sequence in it."},
    "hang": {"": "The call does not return."},
}
HEADER = {
    "rollback": (
        "llama_memory_seq_rm: \"Removes all tokens that belong to the specified sequence and have positions in [p0, p1)\", \"Returns false if a partial "
        "sequence cannot be removed\"; n_rs_seq: \"number of recurrent-state snapshots per seq for rollback (0 = no rollback) [EXPERIMENTAL]\""
    ),
    "remove": (
        "llama_memory_seq_rm: \"Removes all tokens that belong to the specified sequence and have positions in [p0, p1)\", "
        "\"Returns false if a partial sequence cannot be removed\", \"Removing a whole sequence never fails\""
    ),
    "drop": "llama_memory_seq_rm: \"Removing a whole sequence never fails\"",
    "share": "llama_memory_seq_cp: \"Copy all tokens that belong to the specified sequence to another sequence\"",
    "keep": "llama_memory_seq_keep: \"Removes all tokens that do not belong to the specified sequence\"",
    "shift": "llama_memory_seq_add: \"Adds relative position \"delta\" to all tokens that belong to the specified sequence and have positions in [p0, p1)\"",
    "divide": "llama_memory_seq_div: \"Integer division of the positions by factor of `d > 1`\"",
    "clear": "llama_memory_clear: \"Clear the memory contents\"",
    "cancel": (
        "abort_callback: \"if it returns true, execution of llama_decode() will be aborted\", \"currently works only with CPU execution\"; llama_decode, of "
        "what is aborted: \"the ubatches that have been processed will remain in the memory state of the context\""
    ),
}  # fmt: skip
"""Sentences of llama.h about the calls that an operation becomes."""


FAMILY_CAUSES = {
    "plamo2": (
        "src/models/plamo2.cpp, build_plamo2_mamba_layer, two places: the projected input {2 * d_inner, tokens, sequences} is permuted to {.., sequences, tokens} and then "
        "read as if it had not been, so that of several sequences with several tokens in a ubatch most rows are taken for others; and the new states are written at kv_head * "
        "n_seqs rows, where the other Mamba graphs have kv_head, so that several sequences whose cells do not begin at 0 write to other rows, or past the last one"
    ),
    "arwkv7": (
        "src/llama-graph.cpp, build_rwkv_token_shift_store: the last normed input of every sequence is a view with gaps (the other tokens lie between), and it is copied through "
        "ggml_view_1d as if it had none, so that all sequences of a ubatch but the first keep another token's input; rwkv6 and rwkv7 hand it a tensor without gaps"
    ),
}  # fmt: skip
FAMILY_CAUSES["rwkv6qwen2"] = FAMILY_CAUSES["arwkv7"]
"""Of families that go wrong in plain decodes: what was read in the source of llama-cpp-python 0.3.36. No build with it changed was made."""


class Group(NamedTuple):
    """One signature: its words without target and family, and its findings, the smallest program first."""

    words: str
    findings: list[Finding]

    @property
    def families(self) -> list[str]:
        return sorted({finding.family for finding in self.findings})

    @property
    def is_documented(self) -> bool:
        return any(finding.documented for finding in self.findings)


def words_of(finding: Finding) -> str:
    """The signature without its target and family, e.g. "wrong-output at decode (self) after decode+rollback"."""
    return finding.signature.partition(" ")[2]


def groups_of(campaigns: Sequence[Campaign]) -> list[Group]:
    """Signatures, documented ones first, those of many families before those of few."""
    by_words: dict[str, list[Finding]] = defaultdict(list)
    for campaign in campaigns:
        for finding in campaign.findings:
            by_words[words_of(finding)].append(finding)
    groups = [
        Group(words, sorted(findings, key=lambda finding: (not finding.documented, cost(finding.program))))
        for words, findings in by_words.items()
    ]
    return sorted(groups, key=lambda group: (not group.is_documented, -len(group.families), group.words))


def reliability(findings: Sequence[Finding]) -> str:
    """How often the reduced programs showed it again: "10/10", or the least of several."""
    worst = min(findings, key=lambda finding: finding.reproduced / finding.reruns)
    return f"{worst.reproduced}/{worst.reruns}"


# --- the other oracle ----------------------------------------------------------------------------------------------------------


class Compared(NamedTuple):
    """How many findings of modelled families the other oracle sees, too, and those that it does not."""

    same: int
    parted: list[tuple[Finding, str]]


def compare_oracles(campaigns: Sequence[Campaign]) -> Compared:
    """Try every finding of a family that both can judge under the oracle that did not find it."""
    same, parted = 0, []
    for oracle, other in (("engine", "own"), ("own", "engine")):
        findings = [
            finding
            for campaign in campaigns
            for finding in campaign.findings
            if finding.oracle == oracle and family_of(Model(finding.family)).is_modelled
        ]
        if not findings:
            continue
        with Bench("llamacpp", oracle=other) as bench:
            for finding in findings:
                trial = bench.try_program(finding.program)
                is_same = (trial.verdict.kind, trial.verdict.operation_index) == (finding.verdict.kind, finding.verdict.operation_index)
                same += is_same
                if not is_same:
                    parted.append((finding, f"with `--oracle {other}`: {trial.verdict.kind} {trial.verdict.reason}".strip()))
    return Compared(same, parted)


# --- attention pools -----------------------------------------------------------------------------------------------------------


class Pools(NamedTuple):
    """With which kinds of attention pool a finding's program shows its signature: separate ones (unified=0), one for all (unified=1)."""

    separate: bool
    unified: bool

    @property
    def words(self) -> str:
        """As it is said of one finding."""
        return {(True, True): "either way", (True, False): "unified=0 only", (False, True): "unified=1 only"}.get(self, "neither way")


def pools_of(campaigns: Sequence[Campaign]) -> dict[str, Pools]:
    """Every finding's program, run with separate pools and with one: whether what was found shows. Keys are signatures."""
    pools: dict[str, Pools] = {}
    for oracle in ("own", "engine"):
        findings = [finding for campaign in campaigns for finding in campaign.findings if finding.oracle == oracle]
        if not findings:
            continue
        with Bench("llamacpp", oracle=oracle) as bench:
            for finding in findings:
                shown = Pools(*(_shows(bench, finding, unified) for unified in (0, 1)))
                before = pools.get(finding.signature, Pools(False, False))
                pools[finding.signature] = Pools(before.separate or shown.separate, before.unified or shown.unified)
    return pools


def without_unseen(campaigns: Sequence[Campaign], pools: dict[str, Pools]) -> tuple[list[Campaign], list[Finding]]:
    """The campaigns without the findings whose programs do not show it again, in a process that ran nothing before; and those."""
    unseen = [finding for campaign in campaigns for finding in campaign.findings if not any(pools.get(finding.signature, (True,)))]
    kept = [
        msgspec.structs.replace(campaign, findings=tuple(finding for finding in campaign.findings if finding not in unseen))
        for campaign in campaigns
    ]
    return kept, unseen


def _shows(bench: Bench, finding: Finding, unified: int) -> bool:
    bench.renew()
    program = msgspec.structs.replace(finding.program, cache=msgspec.structs.replace(finding.program.cache, unified=unified))
    verdict = bench.try_program(program).verdict
    return verdict.is_divergence and fine_signature("llamacpp", program, verdict) == finding.signature


# --- the page ------------------------------------------------------------------------------------------------------------------


def page_text(campaigns: Sequence[Campaign], compared: Compared | None, pools: dict[str, Pools], unseen: Sequence[Finding] = ()) -> str:
    """The whole page; `pools`: empty when they were not tried; `unseen`: findings that did not show again. Raises UsageError when the campaigns are of several versions."""
    versions = {campaign.account.version for campaign in campaigns}
    if len(versions) != 1:
        raise UsageError(f"the campaigns are of several versions: {', '.join(sorted(versions))}")
    (version,) = versions
    groups = groups_of(campaigns)
    tested = sorted(
        {family for campaign in campaigns for family in campaign.account.families if family not in campaign.account.could_not_test}
    )
    days = sorted({campaign.account.started_at[:10] for campaign in campaigns})
    parts = [
        "# What was found in llama.cpp",
        f"Written by `python benchmarks/findings_llamacpp.py CAMPAIGN ... --write FILE` from campaigns of {' and '.join(days)} against\n"
        f"**{version}**, on {dict(machine_facts())['processor']}. Every line is a finding of those campaigns: a program that was reduced and run ten times more. "
        "Models are real architectures at toy size with random weights; what each call is, says [programs.md](../programs.md).",
        f"{len(groups)} signatures in {sum(campaign.account.programs for campaign in campaigns):,} programs over {len(tested)} families.",
        *_pool_parts(groups, pools),
        "## Faults",
        "What was read in the source of the version above; the numbers are those of the signatures below. The last two columns count findings, a signature of one family each: "
        "those whose program shows it with a pool for every sequence (unified=0), and with one for all (unified=1).",
        _fault_table(groups, pools),
        "## Signatures and families",
        "A number says how often the reduced program showed it again, of ten runs. (u): every program of it needs a use that the target lists as undocumented.",
        _table(groups, tested),
        "## One by one",
        *(_section(number, group, pools) for number, group in enumerate(groups, 1)),
        *_cause_parts(campaigns),
        "## The two oracles",
        _oracle_text(campaigns, compared),
        "## What was not reached",
        "\n".join(f"- {line}" for line in (*_gaps(campaigns, tested, groups), *_unseen_lines(unseen))),
        "## The campaigns",
        "\n".join(_campaign_line(campaign) for campaign in campaigns),
    ]
    return "\n\n".join(parts) + "\n"


def _table(groups: Sequence[Group], tested: Sequence[str]) -> str:
    lines = ["| | signature | " + " | ".join(tested) + " |", "|---|---|" + "---|" * len(tested)]
    for number, group in enumerate(groups, 1):
        cells = []
        for family in tested:
            own = [finding for finding in group.findings if finding.family == family]
            cells.append(reliability(own).partition("/")[0] if own else "")
        label = group.words.replace("|", "\\|") + ("" if group.is_documented else " (u)")
        lines.append(f"| {number} | {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _pool_parts(groups: Sequence[Group], pools: dict[str, Pools]) -> list[str]:
    """How many findings show with which kind of pool; nothing when it was not tried."""
    if not pools:
        return []
    lines = ["| findings | unified=0 | unified=1 | either way |", "|---|---:|---:|---:|"]
    for label, is_documented in (("documented", True), ("in undocumented uses (u) only", False)):
        own = {finding.signature for group in groups for finding in group.findings if finding.documented is is_documented}
        shown = [pools[signature] for signature in own]
        counts = sum(pool.separate for pool in shown), sum(pool.unified for pool in shown), sum(all(pool) for pool in shown)
        lines.append(f"| {len(own)} {label} | " + " | ".join(map(str, counts)) + " |")
    return ["\n".join(lines)]


def _fault_table(groups: Sequence[Group], pools: dict[str, Pools]) -> str:
    """The faults that these signatures come from, and the signatures that nobody has looked into."""
    lines = ["| in | what happens | signatures | unified=0 | unified=1 |", "|---|---|---|---:|---:|"]
    for cause in CAUSES:
        numbers = [number for number, group in enumerate(groups, 1) if group.words in cause.signatures]
        if not numbers:
            continue
        shown = [
            pools[name] for name in {finding.signature for number in numbers for finding in groups[number - 1].findings} if name in pools
        ]
        counts = (str(sum(pool.separate for pool in shown)), str(sum(pool.unified for pool in shown))) if shown else ("", "")
        lines.append(f"| {cause.place} | {cause.told} | {', '.join(map(str, numbers))} | {counts[0]} | {counts[1]} |")
    unexplained = [str(number) for number, group in enumerate(groups, 1) if group.words not in CAUSE_OF]
    if unexplained:
        lines.append(f"| not looked into | | {', '.join(unexplained)} | | |")
    return "\n".join(lines)


def _section(number: int, group: Group, pools: dict[str, Pools]) -> str:
    first = group.findings[0]
    losses = LOSSES[first.verdict.kind]
    loss = losses.get(first.verdict.relation or "self") or losses.get("") or ""
    judges = sorted({finding.oracle for finding in group.findings})
    seen = (
        f"Seen in {', '.join(group.families)}; reproduced {reliability(group.findings)}; judged with `--oracle {'` and `'.join(judges)}`."
    )
    if first.signature in pools:
        seen += f" The program above shows it {pools[first.signature].words}."
    cause = CAUSE_OF.get(group.words)
    parts = [
        f"### {number}. {first.title}",
        f"`{group.words}`",
        f"```\n{program_text(first.program)}```",
        f"{first.verdict.reason}." if first.verdict.reason else "",
        f"**Why** ({cause.place}). {cause.told}." if cause else "",
        f"{loss} {seen}".strip(),
        _documentation(first),
    ]
    return "\n\n".join(filter(None, parts))


def _documentation(finding: Finding) -> str:
    """What the header says of the calls, and of the uses that the program cannot do without."""
    lines = []
    if finding.undocumented_uses and not finding.documented:
        sentences = {entry.use: entry.sentence for entry in TARGET.undocumented}
        lines += [f"Not documented: {use}. {sentences.get(use, '')}" for use in finding.undocumented_uses]
    names = dict.fromkeys(operation_name(operation) for operation in finding.program.operations)
    lines += [f"The header, of `{name}`: {HEADER[name]}." for name in names if name in HEADER]
    used = "`llama_decode`" + (" and saved states" if any(name.startswith(("save", "restore")) for name in names) else "")
    if not lines and not {"decode", "cancel"} & names.keys() and finding.program.cache.start == "fresh":
        return "- Nothing is called but what opens a context."
    return "\n".join(f"- {line}" for line in lines) or f"- Nothing but {used} is used."


def _cause_parts(campaigns: Sequence[Campaign]) -> list[str]:
    """Families whose plain decodes go wrong, with what was read of the cause; empty where there is none."""
    plain = {
        finding.family
        for campaign in campaigns
        for finding in campaign.findings
        if finding.verdict.kind == "wrong-output" and {operation_name(operation) for operation in finding.program.operations} == {"decode"}
    }
    by_cause: dict[str, list[str]] = defaultdict(list)
    for family in sorted(plain & FAMILY_CAUSES.keys()):
        by_cause[FAMILY_CAUSES[family]].append(family)
    lines = [f"- {', '.join(families)}: {cause}." for cause, families in by_cause.items()]
    told = "These need no state operation at all: several sequences in one batch are enough. What was read in the source (no build with it changed was made; there may be more):"
    return ["## Plain decodes of several sequences", told, "\n".join(lines)] if lines else []


def _oracle_text(campaigns: Sequence[Campaign], compared: Compared | None) -> str:
    judged = Counter(campaign.account.oracle for campaign in campaigns)
    told = (
        "With `--oracle engine` an output is right when a fresh session of the same engine that is given the whole log at once gives it, too; "
        "it cannot see what is wrong in the same way every time. With `--oracle own` it is right when our float64 recompute gives it. "
        f"Campaigns here: {', '.join(f'{count} with {oracle}' for oracle, count in sorted(judged.items()))}."
    )
    if compared is None:
        return told
    total = compared.same + len(compared.parted)
    lines = [
        f"{told}\n\nOf {total} findings in families that both can judge, tried again under the other oracle, {compared.same} came to the same verdict at the same operation."
    ]
    lines += [f"- `{finding.signature}`: {said}" for finding, said in compared.parted]
    return "\n".join(lines)


def _gaps(campaigns: Sequence[Campaign], tested: Sequence[str], groups: Sequence[Group]) -> Iterator[str]:
    quiet = [family for family in tested if not any(family in group.families for group in groups)]
    if quiet:
        yield f"Nothing was found in {', '.join(quiet)}; that is no proof that nothing is there."
    for campaign in campaigns:
        for family, reason in campaign.account.could_not_test.items():
            yield f"{family}: {reason}"
        if names := never_executed(campaign.account):
            yield f"never executed in the campaign of {', '.join(campaign.account.families)}: {', '.join(names)}"
        if names := never_accepted(campaign.account):
            yield f"never accepted in the campaign of {', '.join(campaign.account.families)}: {', '.join(names)}"
        if not campaign.account.complete:
            yield f"the campaign of {', '.join(campaign.account.families)} was stopped before its end"
    untested = [family for family in TARGET.families if family not in tested]
    if untested:
        yield f"Families that the target runs and no campaign here had: {', '.join(untested)}."
    yield "Only the CPU backend, one thread, float32 attention cells and no flash attention; no quantised weights, no large model, no long context, no other build."
    yield "Causes are named only where the source was read; a title says what happens, not why. Two faults of one signature are one row, and one fault can be several rows."


def _unseen_lines(unseen: Sequence[Finding]) -> Iterator[str]:
    for finding in unseen:
        yield (
            f"Left out above: `{finding.signature}`, found and reduced by a campaign, which its program does not show in a process that ran "
            f"nothing before: `{program_line(finding.program)}`."
        )


def _campaign_line(campaign: Campaign) -> str:
    account = campaign.account
    noise = max(account.noise.values(), key=lambda own: own.floor, default=None)
    floor = "" if noise is None else f"; largest noise floor {noise.floor:.2g}, tolerance {noise.tolerance:.2g}"
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in account.verdicts.items() if count)
    return (
        f"- `statedrift fuzz --target {account.target} --oracle {account.oracle} {' '.join(f'--family {family}' for family in account.families)}"
        f" --seed {account.seed} --programs {account.programs}`, {account.programs:,} programs: {kinds}{floor}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Read, try again, print, write."""
    parser = argparse.ArgumentParser(description="What was found in llama.cpp.")
    parser.add_argument("campaigns", nargs="+", type=Path, metavar="CAMPAIGN", help="a campaign's folder")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page")
    parser.add_argument("--no-compare", action="store_true", help="do not try findings under the other oracle, nor with other pools")
    given = parser.parse_args(arguments)
    use_one_thread()
    try:
        campaigns = [read_campaign(folder) for folder in given.campaigns]
        pools = {} if given.no_compare else pools_of(campaigns)
        campaigns, unseen = without_unseen(campaigns, pools)
        page = page_text(campaigns, None if given.no_compare else compare_oracles(campaigns), pools, unseen)
    except (UsageError, UnavailableError) as error:
        print(f"findings_llamacpp: {error}", file=sys.stderr)
        return 2
    print(page, end="")
    if given.write:
        given.write.parent.mkdir(parents=True, exist_ok=True)
        given.write.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
