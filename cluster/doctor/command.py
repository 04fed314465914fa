"""`tandem doctor`: one line a check, as soon as it is known; exit status 1 if any has failed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict

from cluster.config import load_config
from cluster.doctor.finding import LIMIT_S, Finding, run_checks

DOCTOR = "check this machine and this installation; exit status 1 if anything fails"


def add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    doctor = commands.add_parser("doctor", help=DOCTOR, description=DOCTOR)
    doctor.add_argument("--config", help="TOML file that is to be launched here")
    doctor.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    doctor.add_argument(
        "--limit", type=float, default=LIMIT_S, help="seconds for each check (default: %(default)s)"
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(run=run_doctor)


def run_doctor(options: argparse.Namespace) -> int:
    """Raises StartupError for a configuration that cannot be."""
    from cluster.doctor.checks import checks  # not earlier: `tandem --help` needs none of it

    config = load_config(options.config, options.set)
    return report(run_checks(checks(config, options.limit), options.limit), as_json=options.json)


def report(findings: Iterator[Finding], *, as_json: bool) -> int:
    found = []
    for finding in findings:
        found.append(finding)
        if not as_json:
            print(finding, flush=True)
    failed = [finding.name for finding in found if finding.level == "fail"]
    warned = sum(finding.level == "warn" for finding in found)
    if as_json:
        print(json.dumps([asdict(finding) for finding in found], indent=2))
    else:
        verdict = f"failed: {', '.join(failed)}" if failed else "nothing failed"
        print(f"{len(found)} checks, {warned} warnings; {verdict}")
    return 1 if failed else 0
