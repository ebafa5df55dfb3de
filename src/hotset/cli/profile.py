"""`hotset profile`: look at what was learnt from use, and merge, compare, make, export and forget it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotset.cli.help_words import Commands
from hotset.cli.output import JsonFlag, emit, note
from hotset.cli.run_options import TrustRemoteCode
from hotset.cli.targets import ForceFlag, refuse_existing
from hotset.cli.traces import TraceFile, load_trace
from hotset.errors import HotsetError, ProfileError
from hotset.text import printable

if TYPE_CHECKING:
    from hotset.profile import Fingerprint, Profile
    from hotset.trace import Trace

app = Commands(
    help="Keep what was learnt from use: list, show, merge, compare and make profiles.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="A profile: its name, or a path.", show_default=False)]
OutName = Annotated[
    str, typer.Option("-o", "--out", metavar="NAME", help="The new profile: a name, or a path.", show_default=False)
]
ForeignFlag = Annotated[bool, typer.Option("--allow-foreign", help="Take profiles of fine-tunes of one model, too.")]


@app.command("list")
def list_(as_json: JsonFlag = False) -> None:
    """List the profiles that have a name.

    Example: hotset profile list
    """
    from hotset.cli.profile_view import list_views
    from hotset.profile.folder import folder, known

    document = {"folder": str(folder()), "profiles": [_entry(name, path) for name, path in known().items()]}
    emit(document, as_json, *([] if as_json else list_views(document)))


@app.command("show")
def show(name: Name, as_json: JsonFlag = False) -> None:
    """Show what a profile holds and how concentrated its use of experts is.

    Example: hotset profile show chat
    """
    from hotset.cli.profile_view import figures, show_views

    profile, path = _load(name)
    document = {"name": name, "file": str(path), "bytes": path.stat().st_size, **figures(profile)}
    emit(document, as_json, *([] if as_json else show_views(document)))


@app.command("merge")
def merge(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="Profiles of one model.", show_default=False)],
    out: OutName,
    weights: Annotated[
        str | None, typer.Option(metavar="LIST", help="How much each counts, such as 2,1; all alike if left out.")
    ] = None,
    allow_foreign: ForeignFlag = False,
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Merge the profiles of several workloads into one.

    Example: hotset profile merge chat code -o both --weights 2,1
    """
    from hotset.profile.combine import merge as merge_profiles

    target = _target(out, force)
    shares = None if weights is None else _numbers(weights)
    profiles = _load_alike(names, allow_foreign)
    _save(merge_profiles(profiles, shares, allow_foreign=allow_foreign), out, target, as_json)


@app.command("diff")
def diff(
    before: Annotated[str, typer.Argument(metavar="A", help="A profile.", show_default=False)],
    after: Annotated[str, typer.Argument(metavar="B", help="Another of the same model.", show_default=False)],
    top: Annotated[int, typer.Option(min=1, help="How many of the experts that changed most to show.")] = 10,
    allow_foreign: ForeignFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Tell how far two profiles are apart.

    Example: hotset profile diff monday friday
    """
    from hotset.cli.profile_view import diff_views
    from hotset.profile.combine import compare

    some, other = _load_alike([before, after], allow_foreign)
    document = {"before": before, "after": after, **compare(some, other, top)}
    emit(document, as_json, *([] if as_json else diff_views(document)))


@app.command("forget")
def forget(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Delete a profile.

    Example: hotset profile forget chat
    """
    from hotset.profile.folder import locate
    from hotset.profile.format import check_kind

    path = locate(name)
    try:
        check_kind(path)
    except ProfileError as error:
        raise ProfileError(f"{error} (only profiles are forgotten; other files are yours to delete)") from None
    if not yes:
        _ask(path)
    try:
        path.unlink()
    except OSError as error:
        raise ProfileError(f"cannot delete {path} ({error.strerror}): may you write in its folder?") from error
    emit({"forgotten": name, "file": str(path)}, as_json, printable(f"{path}: forgotten"))


@app.command("export")
def export(
    name: Name,
    csv: Annotated[Path, typer.Option("--csv", metavar="OUT", help="Where to write the CSV.", show_default=False)],
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Write one line per expert, for a spreadsheet.

    Example: hotset profile export chat --csv chat.csv
    """
    from hotset.files import write_beside
    from hotset.profile.export import to_csv

    refuse_existing(force, csv)
    profile, _ = _load(name)
    with write_beside(csv) as scratch:
        scratch.write_text(to_csv(profile), encoding="utf-8")
    rows = profile.shape.total_experts
    emit({"file": str(csv), "rows": rows}, as_json, printable(f"{csv}: {rows:,} experts"))


@app.command("make")
def make(
    trace: TraceFile,
    out: OutName,
    model: Annotated[
        Path | None, typer.Option(metavar="MODEL", help="The folder of the model that the trace is of.")
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Make a profile from a recorded trace.

    Example: hotset profile make run.safetensors --model ./olmoe -o chat
    """
    from dataclasses import replace

    from hotset.profile.fold import profile_of

    target = _target(out, force)
    loaded = load_trace(trace)
    profile = profile_of(loaded, _fingerprint(loaded, trace, model, trust_remote_code))
    if not profile.fingerprint.digest:
        note("the trace does not say which weights it is of: using the profile needs --allow-foreign, or pass --model")
    _save(replace(profile, meta={"trace": str(trace)}), out, target, as_json)


def _fingerprint(trace: Trace, named: Path, model: Path | None, trust_remote_code: bool) -> Fingerprint:
    """Which model the trace is of: as the person says, as the trace says, or as it ships with hotset."""
    from hotset.generation.prompt_files import SHIPPED
    from hotset.profile import Fingerprint
    from hotset.profile.format import MAX_TEXT

    if model is None and str(named).startswith(SHIPPED):
        from hotset.reference import path

        model = path()
    if model is not None:
        return _fingerprint_of(str(model), trust_remote_code)
    architecture, digest = (printable(trace.meta.get(key, ""))[:MAX_TEXT] for key in ("architecture", "digest"))
    return Fingerprint(architecture or "unknown", digest)


def _fingerprint_of(model: str, trust_remote_code: bool) -> Fingerprint:
    from hotset.cli.loading import quiet_libraries
    from hotset.generation.errors import LOADING, translate_errors
    from hotset.generation.text_model import locate
    from hotset.models.fingerprint import fingerprint_of_folder

    place = locate(model)
    with quiet_libraries(), translate_errors(place, "load the model", LOADING):
        return fingerprint_of_folder(place, trust_remote_code=trust_remote_code)


def _entry(name: str, path: Path) -> dict[str, Any]:
    """One line of the list; a file that is damaged says why instead of spoiling the rest."""
    from hotset.cli.profile_view import summary
    from hotset.profile import Profile

    entry = {"name": name, "file": str(path)}
    try:
        return entry | {"damaged": None, "bytes": path.stat().st_size} | summary(Profile.load(path))
    except HotsetError as error:
        return entry | {"damaged": str(error)}
    except OSError as error:
        return entry | {"damaged": f"{path}: {error.strerror or error}"}


def _load(name: str) -> tuple[Profile, Path]:
    from hotset.profile import Profile
    from hotset.profile.folder import locate

    path = locate(name)
    return Profile.load(path), path


def _load_alike(names: list[str], allow_foreign: bool) -> list[Profile]:
    """Profiles of one model; the first that is of another is named."""
    profiles = [_load(name)[0] for name in names]
    for name, profile in zip(names, profiles, strict=True):
        try:
            profile.check(profiles[0].shape, profiles[0].fingerprint, allow_foreign=allow_foreign)
        except ProfileError as error:
            raise ProfileError(f"{name} does not go with {names[0]}: {error}") from None
    return profiles


def _target(out: str, force: bool) -> Path:
    from hotset.profile.folder import locate

    target = locate(out)
    refuse_existing(force, target)
    return target


def _save(profile: Profile, name: str, target: Path, as_json: bool) -> None:
    from hotset.cli.profile_view import summary, written
    from hotset.profile.folder import make_room

    make_room(target)
    profile.save(target)
    document = {"name": name, "file": str(target), "bytes": target.stat().st_size, **summary(profile)}
    emit(document, as_json, printable(written(document)))


def _ask(path: Path) -> None:
    if not sys.stdin.isatty():
        raise ProfileError(f"to delete {path} without being asked, pass --yes")
    sys.stderr.write(f"Delete {path}? [y/N] ")  # stdout is for the answer alone
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        note("nothing was deleted")
        raise typer.Exit(1)


def _numbers(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise ProfileError(f'cannot read the weights "{text}": write one number per profile, such as 2,1') from None
