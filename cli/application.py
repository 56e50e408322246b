"""The commands and their options; everything they do is in this room's other files, imported when a command runs.

Rules
- A usage error of any kind is one line on standard error and status 64.
- Options exist only when what they ask for exists.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from . import failures
from .builds import LlamaDirOption, LlamaIncludeOption, LlamaLibOption

_click_exception: type[Exception] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

application = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="Finds where a cached recurrent state drifts from the truth.",
    epilog="Exit status: 0 clean, 1 a divergence, 2 could not test, 64 a usage error, 70 a fault of statedrift.",
)
bench = typer.Typer(rich_markup_mode=None, help="The suite's own measurements.")
application.add_typer(bench, name="bench")

TargetOption = Annotated[str, typer.Option("--target", metavar="TARGET", help="A target's name, or module:attribute.")]
OptionalTarget = Annotated[str | None, typer.Option("--target", metavar="TARGET", help="A target's name, or module:attribute.")]
ProgramArgument = Annotated[
    str, typer.Argument(metavar="PROGRAM", help="A file, a finding's folder or id, the text itself, or - for standard input.")
]
CampaignOption = Annotated[
    Path | None,
    typer.Option("--campaign", metavar="DIR", help="Where to look for an id or a finding's folder; else every campaign in runs/."),
]
AgainstOption = Annotated[
    str | None,
    typer.Option("--against", metavar="TARGET", help="Hold the target to this one instead of to the truth."),
]
InspectOption = Annotated[bool, typer.Option("--inspect", help="Compare the state rows that the target shows, too.")]
OracleOption = Annotated[
    str,
    typer.Option(
        "--oracle", metavar="own|engine", help="What says which outputs are right: our own recompute, or a fresh one by the target itself."
    ),
]
UndocumentedOption = Annotated[
    bool,
    typer.Option("--undocumented", help="Also fail on what diverges only in uses that the target's documentation does not promise."),
]
FamilyOption = Annotated[list[str] | None, typer.Option("--family", metavar="FAMILY", help="Only this family; may be given several times.")]
ProfileOption = Annotated[
    str, typer.Option("--profile", metavar="PROFILE", help="Which kind of programs: swarm, speculative, server, agents, soak.")
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, max=(1 << 32) - 1, help="The same seed gives the same programs.")]
JobsOption = Annotated[int | None, typer.Option("--jobs", min=1, max=1024, help="Processes to use on this machine (1).")]
SchedulerOption = Annotated[
    str | None, typer.Option("--scheduler", metavar="ADDRESS", help="Use the workers of this Dask cluster, as in tcp://127.0.0.1:8786.")
]


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"statedrift {version('statedrift')}")
        raise typer.Exit()


@application.callback()
def front(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and stop.")] = False,
) -> None:
    """Finds where a cached recurrent state drifts from the truth."""


@application.command()
def fuzz(
    target: TargetOption,
    family: FamilyOption = None,
    profile: ProfileOption = "swarm",
    seconds: Annotated[
        float | None,
        typer.Option(
            "--seconds",
            help="Seconds to look for, and to reduce what is found (60 unless --programs is given); measuring the noise first is not counted.",
        ),
    ] = None,
    programs: Annotated[int | None, typer.Option("--programs", min=1, help="How many programs to try.")] = None,
    seed: SeedOption = 0,
    jobs: JobsOption = None,
    scheduler: SchedulerOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Keep the campaign and its findings here; one that is there goes on.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over beside it, in DIR-2, DIR-3, ...")] = False,
    undocumented: UndocumentedOption = False,
    against: AgainstOption = None,
    inspect: InspectOption = False,
    oracle: OracleOption = "own",
    baseline: Annotated[
        Path | None,
        typer.Option("--baseline", metavar="FILE", help="Replay these known findings first, and fail on what is new or expired only."),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="With --baseline: also fail on a known finding that does not show any more.")
    ] = False,
    llama_dir: LlamaDirOption = None,
    llama_include: LlamaIncludeOption = None,
    llama_lib: LlamaLibOption = None,
    against_lib: Annotated[
        str | None,
        typer.Option(
            "--against-lib",
            metavar="OTHER",
            help="Report only what this other build of llama.cpp does not do: a source tree, a library, or llama-cpp-python.",
        ),
    ] = None,
) -> int:
    """Look for divergences with generated programs."""
    from .fuzzing import fuzz_command

    return fuzz_command(
        target,
        tuple(family or ()),
        seconds,
        programs,
        seed,
        jobs,
        out,
        undocumented,
        against,
        inspect,
        oracle,
        profile,
        scheduler,
        fresh,
        baseline,
        strict,
        against_lib,
    )


@application.command()
def replay(
    program: ProgramArgument,
    target: TargetOption,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    undocumented: UndocumentedOption = False,
    campaign: CampaignOption = None,
    against: AgainstOption = None,
    inspect: InspectOption = False,
    oracle: OracleOption = "own",
    llama_dir: LlamaDirOption = None,
    llama_include: LlamaIncludeOption = None,
    llama_lib: LlamaLibOption = None,
) -> int:
    """Run one program on a target and judge it."""
    from .replaying import replay_command

    return replay_command(program, target, json, undocumented, campaign, against, inspect, oracle)


@application.command()
def explain(
    program: ProgramArgument,
    target: TargetOption,
    undocumented: UndocumentedOption = False,
    campaign: CampaignOption = None,
    against: AgainstOption = None,
    inspect: InspectOption = False,
    oracle: OracleOption = "own",
    llama_dir: LlamaDirOption = None,
    llama_include: LlamaIncludeOption = None,
    llama_lib: LlamaLibOption = None,
) -> int:
    """Show one program step by step, answers beside the truth."""
    from .explaining import explain_command

    return explain_command(program, target, undocumented, campaign, against, inspect, oracle)


@application.command()
def reduce(
    program: ProgramArgument,
    target: TargetOption,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the reduced program here.")] = None,
    undocumented: UndocumentedOption = False,
    campaign: CampaignOption = None,
    against: AgainstOption = None,
    inspect: InspectOption = False,
    oracle: OracleOption = "own",
    llama_dir: LlamaDirOption = None,
    llama_include: LlamaIncludeOption = None,
    llama_lib: LlamaLibOption = None,
) -> int:
    """Find the smallest program that still diverges."""
    from .reducing import reduce_command

    return reduce_command(program, target, out, undocumented, campaign, against, inspect, oracle)


@application.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A campaign's folder.")],
    csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write the findings as CSV; - is standard output.")] = None,
    parquet: Annotated[Path | None, typer.Option("--parquet", metavar="FILE", help="Write the findings as Parquet.")] = None,
    junit: Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="Write JUnit XML, for the test page of a CI job.")] = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", metavar="FILE", help="Write Markdown, for the page of a CI job.")] = None,
    trend: Annotated[Path | None, typer.Option("--trend", metavar="FILE", help="Add a row for today to a table in Markdown.")] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write one page with everything, for a browser.")] = None,
    frames: Annotated[
        Path | None,
        typer.Option("--frames", metavar="FOLDER", help="Write all tables as Parquet into this folder: programs, answers, errors, ..."),
    ] = None,
) -> int:
    """Show a campaign again, or write its findings."""
    from .reporting import report_command

    return report_command(folder, csv, parquet, junit=junit, markdown=markdown, trend=trend, html=html, frames=frames)


@application.command()
def compare(
    first: Annotated[str, typer.Argument(metavar="A", help="A campaign's folder, or a target.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    family: FamilyOption = None,
    seconds: Annotated[float | None, typer.Option("--seconds", help="Of two targets: how long to look for differences (20).")] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Of two targets: keep the campaign here.")] = None,
    llama_dir: LlamaDirOption = None,
    llama_include: LlamaIncludeOption = None,
    llama_lib: LlamaLibOption = None,
) -> int:
    """Show what only one of two campaigns, or targets, has."""
    from .comparing import compare_command

    return compare_command(first, second, tuple(family or ()), seconds, out)


@application.command()
def baseline(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A campaign's folder.")],
    file: Annotated[Path, typer.Option("--file", metavar="FILE", help="The baseline, in TOML; --update makes it when there is none.")],
    update: Annotated[
        bool, typer.Option("--update", help="Add the campaign's findings, and bring up to date when they were seen.")
    ] = False,
    prune: Annotated[bool, typer.Option("--prune", help="Remove the entries that the campaign's gate replayed and that are gone.")] = False,
) -> int:
    """Change a file of known findings by what a campaign found."""
    from .gating import baseline_command

    return baseline_command(folder, file, update, prune)


@application.command()
def targets(
    llama_dir: LlamaDirOption = None,
    llama_include: LlamaIncludeOption = None,
    llama_lib: LlamaLibOption = None,
) -> int:
    """List the targets and what each can do."""
    from .inventory import targets_text
    from .output import say

    say(targets_text())
    return failures.OK


@application.command()
def families() -> int:
    """List the model families and their dimensions."""
    from .inventory import families_text
    from .output import say

    say(families_text())
    return failures.OK


@application.command()
def size(
    family: FamilyOption = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="DIMENSIONS", help="Dimensions of the family: 'n_layer=48 n_embd=2048'.")
    ] = None,
    layers: Annotated[
        list[str] | None,
        typer.Option("--layers", metavar="LAYERS", help="Layers: '12 attention n_head_kv=4 head_dim=128'; several add up."),
    ] = None,
    cache: Annotated[str, typer.Option("--cache", metavar="CACHE", help="The cache: 'n_seq_max=4 n_rs_seq=3 n_ctx=8192 kv=f16'.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> int:
    """Show the bytes of a cache of any real size."""
    from .sizing import size_command

    return size_command(tuple(family or ()), model, tuple(layers or ()), cache, json)


@application.command()
def doctor(
    target: OptionalTarget = None,
    family: FamilyOption = None,
    llama_dir: LlamaDirOption = None,
    llama_include: LlamaIncludeOption = None,
    llama_lib: LlamaLibOption = None,
) -> int:
    """Check the installation and what its answers are worth."""
    from .doctor import doctor_command

    return doctor_command(target, tuple(family or ()))


@bench.command()
def throughput(
    target: Annotated[
        list[str] | None,
        typer.Option(
            "--target", metavar="TARGET", help="Measure this target; may be given several times. Else numba, and llamacpp if it is here."
        ),
    ] = None,
    family: FamilyOption = None,
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="How long to measure each target and family.")] = 20.0,
    seed: SeedOption = 0,
    write: Annotated[Path | None, typer.Option("--write", metavar="FILE", help="Write the report as Markdown.")] = None,
    llama_dir: LlamaDirOption = None,
    llama_include: LlamaIncludeOption = None,
    llama_lib: LlamaLibOption = None,
) -> int:
    """Measure programs per second on one core, beside a naive test."""
    from .throughput import throughput_command

    return throughput_command(tuple(target or ()), tuple(family or ()), seconds, seed, write)


@bench.command()
def kernels(
    check: Annotated[
        bool, typer.Option("--check", help="Only whether results are right and every part runs; no time is looked at.")
    ] = False,
    write: Annotated[Path | None, typer.Option("--write", metavar="FILE", help="Write the report as Markdown.")] = None,
) -> int:
    """Measure our CPU kernels beside the processor's limits and others."""
    from .kernels import kernels_command

    return kernels_command(check, write)


@bench.command()
def mutants(
    mutant: Annotated[
        list[str] | None, typer.Option("--mutant", metavar="NAME", help="This one; may be given several times. Else all.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="10 seeds of at most 60 s each, in place of 3 of 20 s.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Beside uniform choices, a Hypothesis state machine, and HypoFuzz.")] = False,
    results: Annotated[
        Path | None, typer.Option("--results", metavar="FILE", help="Keep every run here, and go on from what is there.")
    ] = None,
    twins: Annotated[
        float | None,
        typer.Option("--twins", metavar="SECONDS", help="Run the fixed twins of each family for so long, not for 64 programs."),
    ] = None,
    write: Annotated[Path | None, typer.Option("--write", metavar="FILE", help="Write the report as Markdown.")] = None,
    csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write a line for every run.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Measure how soon named faults in our own caches are found."""
    from .mutants import mutants_command

    return mutants_command(tuple(mutant or ()), full, compare, results, json, twins, write, csv)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the answer is the exit status, and nothing is raised."""
    command: Callable[..., Any] = typer.main.get_command(application)
    try:
        status = command(args=arguments, prog_name="statedrift", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status if isinstance(status, int) else failures.OK
    except _click_exception as error:
        failures.complain(_usage_message(error))
        return failures.USAGE
    except typer.Abort:
        return failures.status_of_failure(KeyboardInterrupt())
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else failures.USAGE
    except (Exception, KeyboardInterrupt) as error:
        return failures.status_of_failure(error)


def _usage_message(error: Any) -> str:
    message = " ".join(str(error.format_message()).split())
    message = message[:1].lower() + message[1:]
    context = getattr(error, "ctx", None)
    if message.startswith("missing command"):
        message = "a command is missing"
    return f"{message.rstrip('.')}; see {context.command_path if context else 'statedrift'} --help"
