"""Say what this machine can do, row by row, with a cure wherever it can't: `ddp_lab.doctor()`.

In a terminal: `python -m ddp_lab.doctor`; its exit status is 1 if any row is a problem.
"""

import html
import re
import shutil
import site
import sys
import textwrap
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ddp_lab import machine
from ddp_lab.machine import MIB, REPOSITORY, Row

STYLES = {"ok": ("✓", "success"), "warning": ("▲", "warn"), "problem": ("✗", "error")}  # symbol, JupyterLab's colour


@dataclass(frozen=True, repr=False)
class Report:
    """Every finding about this machine: a table in a notebook, text in a terminal."""

    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        """No row is a problem; there may be warnings."""
        return all(row.status != "problem" for row in self.rows)

    @property
    def summary(self) -> str:
        """Everything works, or the number of problems and what cures the first."""
        problems = [row for row in self.rows if row.status == "problem"]
        if problems:
            first, number = problems[0], len(problems)  # no full stop after what may be a command to copy
            return f"{number} problem{'s' * (number > 1)}; the first cure, for {first.topic}: {first.cure}"
        warnings = sum(row.status == "warning" for row in self.rows)
        return "Everything works" + (f", with {warnings} warning{'s' * (warnings > 1)}." if warnings else ".")

    def __repr__(self) -> str:
        width = 2 + max(len(row.topic) for row in self.rows)
        return "\n".join([*(_row_text(row, width) for row in self.rows), "", textwrap.fill(self.summary, 100)])

    def _repr_html_(self) -> str:
        left = 'style="text-align:left"'
        heads = "".join(f'<th scope="col" {left}>{head}</th>' for head in ("Status", "Topic", "Found", "Cure"))
        return (
            '<table style="color:var(--jp-content-font-color1, inherit)">'
            f'<caption style="text-align:left; color:inherit">{html.escape(self.summary)}</caption>'
            f"<thead><tr>{heads}</tr></thead><tbody>{''.join(map(_row_html, self.rows))}</tbody></table>"
        )


def doctor() -> Report:
    """Look at everything that distributed training needs here, in a few seconds, and change nothing.

    Backends are tried in another process: this one gets no process group, and its CUDA stays as it is.
    """
    checks = (_versions, _environment, *machine.CHECKS)
    with machine.start_probe() as probe:  # it imports PyTorch while the rest is looked at
        try:
            rows = [row for check in checks for row in _rows(check)]
            data = _rows(_data)
            pytorch = _rows(machine.pytorch, probe)
        finally:
            probe.kill()
    return Report((*rows, *pytorch, *data))  # causes first


def _rows(check: Callable[..., list[Row]], *arguments) -> list[Row]:
    """One check that breaks must not hide what the others found."""
    try:
        return check(*arguments)
    except Exception as error:
        topic, cure = check.__name__.strip("_").replace("_", " "), "cure the other rows first, then look again"
        return [Row(topic, f"could not be looked at: {type(error).__name__}: {error}", "problem", cure)]


def _versions() -> list[Row]:
    bad, found = [], [f"Python {sys.version.split()[0]}"]
    for package, minimum in _requirements():
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            version = "missing"  # has no numbers, so it counts as too old
        if _numbers(version) < _numbers(minimum):
            cure = machine.install(f"{package}>={minimum}")
            bad.append(Row(package, f"{version}; the lab needs {minimum} or later", "problem", cure))
        else:
            found.append(f"{package} {version}")
    return [Row("versions", ", ".join(found)), *bad]


def _requirements() -> list[tuple[str, str]]:
    """Return (package, minimum version) as the lab declares them, be it installed or just a checkout."""
    try:
        declared = metadata.requires("ddp-lab")
    except metadata.PackageNotFoundError:
        declared = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["dependencies"]
    matches = (re.match(r"([\w.-]+) *>= *([\d.]+)", line) for line in declared if "extra ==" not in line)
    return [match.groups() for match in matches if match]


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3]]


def _environment() -> list[Row]:
    """A notebook may run in another Python than the one that the lab was installed for."""
    here = [*site.getsitepackages(), site.getusersitepackages()]
    if any(metadata.distributions(name="ddp-lab", path=here)):
        return [Row("environment", f"the lab is installed for this Python, that of {Path(sys.prefix).name}")]
    found = f"the lab is found in {REPOSITORY} but not installed for {sys.executable}"
    cure = f"choose the kernel of the lab, or run: {sys.executable} -m pip install -e {REPOSITORY}"
    return [Row("environment", found, "warning", cure)]


def _data() -> list[Row]:
    from ddp_lab import data  # imports PyTorch, which may be broken

    try:
        folder = data.data_folder()
    except FileNotFoundError as error:
        return [_refused("data", error)]
    free = shutil.disk_usage(folder).free // MIB
    cure = f"free some on the disk of {folder}: checkpoints and full MNIST take up to 200 MiB"
    rows = [Row.judged("disk", f"{free:,} MiB free at the data folder", cure, warning=free < 200)]
    for topic, root in (("sample", data.prepare_data()), ("full MNIST", folder)):
        try:
            data.check_files(root)
            rows.append(Row(topic, "its files are valid"))
        except (FileNotFoundError, ValueError) as error:
            absent = Row(topic, "absent, and not needed; ddp_lab.prepare_data(full=True) brings it")
            rows.append(_refused(topic, error) if topic == "sample" or (root / "MNIST").is_dir() else absent)
    return rows


def _refused(topic: str, error: Exception) -> Row:
    """The lab's errors are one sentence: what is wrong, a colon, and the cure."""
    found, _, cure = str(error).rpartition(": ")
    return Row(topic, found, "problem", cure)


def _row_text(row: Row, width: int) -> str:
    margin = 9 + width
    texts = [row.found, f"cure: {row.cure}"] if row.cure else [row.found]
    lines = [line for text in texts for line in textwrap.wrap(text, 100 - margin, break_on_hyphens=False)]
    return f"{row.status:9}{row.topic:{width}}" + f"\n{'':{margin}}".join(lines)


def _row_html(row: Row) -> str:
    symbol, colour = STYLES[row.status]
    topic, found, cure = (html.escape(text) for text in (row.topic, row.found, row.cure))
    left = 'style="text-align:left"'
    mark = f'<span aria-hidden="true" style="color:var(--jp-{colour}-color1, inherit)">{symbol}</span>'
    status = f'<td style="text-align:left; white-space:nowrap">{mark} {row.status}</td>'
    return f'<tr>{status}<th scope="row" {left}>{topic}</th><td {left}>{found}</td><td {left}>{cure}</td></tr>'


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # not every pipe can carry every character of an error message
    report = doctor()
    print(report)
    sys.exit(0 if report.ok else 1)
