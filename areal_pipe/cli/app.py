"""The commands. Each is a few lines over the library; nothing is computed here."""

from typing import Annotated

import typer

from areal_pipe.cli import outcome

app = typer.Typer(
    name="areal-pipe",
    help="Roll out prompts into trajectories that an RL trainer can trust.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="rich",
)

ConfigPath = Annotated[str, typer.Argument(metavar="CONFIG", help="Campaign file (YAML).")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Overrides, such as rollout.group_size=4 gconfig.temperature=0.7",
    ),
]
TrialUrl = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        help="A trial: FILEROOT/EXPERIMENT/TRIAL, or one version of it: .../rollout/0",
    ),
]
EndpointUrl = Annotated[
    str | None,
    typer.Option(help="S3 endpoint, where it is not the default (AWS_ENDPOINT_URL works too)."),
]


@app.command()
def run(
    config: ConfigPath,
    overrides: Overrides = None,
    no_prefect: Annotated[
        bool,
        typer.Option(
            "--no-prefect", help="Run with the library's own executor, without a Prefect server."
        ),
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="Show failures with traceback and what their code printed."
        ),
    ] = False,
) -> None:
    """Run a campaign, or what is missing of it.

    Finished episodes are kept whatever happens: the same command again goes on where it stopped.
    Exit codes: 0 whole, 1 some episodes failed, 2 bad input, 3 storage or server error, 130 Ctrl-C.
    """
    from areal_pipe.cli.run import run_command

    raise typer.Exit(
        run_command(config, overrides or [], with_prefect=not no_prefect, verbose=verbose)
    )


@app.command()
def show(
    url: TrialUrl,
    task_id: Annotated[
        int | None, typer.Option(help="The prompt; the first stored one if left out.")
    ] = None,
    sample: Annotated[int, typer.Option(help="The sample of its group.")] = 0,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Show a failure's traceback and output, too."),
    ] = False,
    endpoint_url: EndpointUrl = None,
) -> None:
    """Show one trajectory in colour: prompt, completion, reward, versions, unlikely tokens."""
    from areal_pipe.cli.reading import show_command

    show_command(url, task_id=task_id, sample=sample, endpoint_url=endpoint_url, verbose=verbose)


@app.command()
def stats(url: TrialUrl, endpoint_url: EndpointUrl = None) -> None:
    """Outcomes, rewards, pass@k, lengths and versions of a trial."""
    from areal_pipe.cli.reading import stats_command

    stats_command(url, endpoint_url=endpoint_url)


@app.command()
def check(url: TrialUrl, endpoint_url: EndpointUrl = None) -> None:
    """Verify every manifest and part of a trial; exit code 1 and a list when something is wrong."""
    from areal_pipe.cli.reading import check_command

    problems = check_command(url, endpoint_url=endpoint_url)
    raise typer.Exit(outcome.EXIT_FAILED_EPISODES if problems else 0)


@app.command()
def doctor(config: ConfigPath, overrides: Overrides = None) -> None:
    """Check a campaign before it runs: model, dataset, workflow, storage, engine."""
    from areal_pipe.cli.doctor import doctor_command

    problems = doctor_command(config, overrides or [])
    raise typer.Exit(outcome.EXIT_BAD_INPUT if problems else 0)
