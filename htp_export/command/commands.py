"""The commands: every file ``NAME_command.py`` of a capability is one; `CommandModule` is its contract.

It has a function ``NAME_command``, an ``EXAMPLE`` of what is typed after the name, and its
``PLACE`` in the help: one of `GROUPS`, and a number. A command has ``-`` where its file has ``_``,
and is found under both names. It is imported when it is called, or when the help lists it; the help
leaves out what cannot be imported. The commands in a folder ``commands`` of a capability are those
of a command with its name: ``htp-export lora fuse``. Other packages add commands by entry points of
the group ``htp_export.commands``: the name of a command → the module with its function.

The parameters of the function are what is typed. The type of one holds its help: ``Annotated[int,
"What it is for."]``. Then it is an argument if it has no default, else an option; one that is False
by default is a switch, ``output`` is ``-o`` too, and ``as_json`` is ``--json``. What is more than
that is declared with ``typer.Option`` or ``typer.Argument`` in place of the text.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Protocol, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from htp_export.command.options import Idle, check_options
from htp_export.command.outputs import FORCE, IN_PLACE, Writes, check_output, reading
from htp_export.discovery import capability_modules, plug_ins
from htp_export.errors import InputError, described
from htp_export.plans.plan_options import rules_as_typed

GROUPS = ("Export", "Look", "Check and measure", "Cut", "Optimise", "Compress", "Deploy")
"""The headings of the help, in order. Commands without a ``PLACE`` stand below one more."""

_ELSEWHERE = ("Others", 0)


class CommandModule(Protocol):
    """The module of a command ``NAME``; it also has the function ``NAME_command``, which runs the command.

    Attributes:
        EXAMPLE: An example of the text after the name of the command.
        PLACE: One of `GROUPS`, and a number: the place of the command in the help.
    """

    EXAMPLE: str
    PLACE: tuple[str, int]


@functools.cache
def _added_names() -> dict[str, str]:
    """The commands of other packages: name → module."""
    return {name.replace("_", "-"): entry.value for name, entry in plug_ins("commands").items()}


def _all_names() -> dict[str, str]:
    """All commands: name → module; a command of another package does not replace one of ours."""
    own = {
        name.replace("_", "-"): module for name, module in capability_modules("_command").items()
    }
    return {**_added_names(), **own}


def command_groups() -> dict[str, list[str]]:
    """The commands that can be imported, as the help lists them: heading → names."""
    places: dict[str, tuple[str, int]] = {}
    for name in _all_names():
        with contextlib.suppress(ImportError, InputError):
            places[name] = getattr(_module(name), "PLACE", _ELSEWHERE)
    listed = {
        group: [name for name in places if places[name][0] == group]
        for group in (*GROUPS, _ELSEWHERE[0])
    }
    return {
        group: sorted(names, key=lambda name: places[name][1])
        for group, names in listed.items()
        if names
    }


def command_names() -> list[str]:
    """The names of all commands that can be imported, in the order of the help."""
    return [name for names in command_groups().values() for name in names]


class _Command(TyperCommand):
    """A command that refuses options without effect; ``idle`` is what its file says of them in ``IDLE``."""

    idle: Sequence[Idle] = ()

    def parse_args(self, context: Any, arguments: list[str]) -> list[str]:
        """Read what was typed."""
        _, _, typed = self.make_parser(context).parse_args(args=list(arguments))
        rest: list[str] = super().parse_args(context, arguments)
        check_options(self.params, typed, context.params, self.idle)
        return rest


class CommandGroup(TyperGroup):
    """The program, or a command that has commands: each is made from its file when it is asked for.

    Without a command, it shows its help.
    """

    def __init__(self, above: str = "", **settings: Any) -> None:
        """Begin with the words before the names of the commands: none for the program, ``"lora "`` for its own."""
        super().__init__(**settings)
        self.above = above
        self.commands = dict.fromkeys(self._own(_all_names()))  # type: ignore[assignment] # made when asked for

    def _own(self, names: Iterable[str]) -> list[str]:
        """The commands of this group among full names."""
        below = (name.removeprefix(self.above) for name in names if name.startswith(self.above))
        return list(dict.fromkeys(name.partition(" ")[0] for name in below))

    def list_commands(self, _context: Any) -> list[str]:
        """The names of the commands, as the help lists them."""
        return self._own(command_names())

    def get_command(self, context: Any, name: str) -> Any:
        """The command of a name; the name of the Python function, with ``_``, is one too."""
        name = name.replace("_", "-")
        if name in self.commands and self.commands[name] is None:
            full = f"{self.above}{name}"
            self.commands[name] = _command(full) if full in _all_names() else _group(full)
        return self.commands.get(name)

    def parse_args(self, context: Any, arguments: list[str]) -> list[str]:
        """Read what was typed up to the name of a command."""
        rest: list[str] = super().parse_args(context, arguments or ["--help"])
        return rest

    def format_commands(self, context: Any, formatter: Any) -> None:
        """Write the commands below their headings, all in one column."""
        groups = {group: self._own(names) for group, names in command_groups().items()}
        width = max(len(name) for names in groups.values() for name in names)
        for group, names in groups.items():
            lines = [
                (
                    name.ljust(width),
                    self.get_command(context, name).get_short_help_str(formatter.width - width - 6),
                )
                for name in names
            ]
            if lines:
                with formatter.section("Commands" if self.above else group):
                    formatter.write_dl(lines)


def _module(name: str) -> Any:
    """The module of a command; an InputError if that of another package is no `CommandModule`."""
    home = _all_names()[name]
    if home != _added_names().get(name):
        return importlib.import_module(home)
    try:
        module = importlib.import_module(home)
    except Exception as error:  # of another package: it may do anything
        raise InputError(
            f"command {name!r}: {home} of another package cannot be imported: {described(error)}"
        ) from error
    missing = [
        each for each in (_function_name(name), "EXAMPLE", "PLACE") if not hasattr(module, each)
    ]
    if missing:
        raise InputError(
            f"command {name!r}: {home} of another package has no {missing[0]}; see docs/extending.md"
        )
    return module


def _function_name(name: str) -> str:
    return f"{name.rpartition(' ')[2].replace('-', '_')}_command"


def _command(name: str) -> Any:
    module = _module(name)
    own = name.rpartition(" ")[2]
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(own, cls=_Command, epilog=f"Example: htp-export {name} {module.EXAMPLE}")(
        flattened(getattr(module, _function_name(name)))
    )
    command = typer.main.get_command(app)
    command.idle = getattr(module, "IDLE", ())  # type: ignore[attr-defined] # it is a _Command
    return command


def _group(name: str) -> CommandGroup:
    """The command with the name of a capability, whose commands are those in its folder ``commands``."""
    package = importlib.import_module(f"htp_export.capabilities.{name.replace('-', '_')}.commands")
    return CommandGroup(f"{name} ", name=name, help=package.__doc__, rich_markup_mode=None)


def _marks(annotation: Any) -> list[Writes]:
    """The mark of an option that names what is written."""
    return [mark for mark in getattr(annotation, "__metadata__", ()) if isinstance(mark, Writes)]


def _declared(name: str, kind: Any, default: Any) -> inspect.Parameter:
    """A parameter as typer reads it, also where its type holds no more than its help."""
    default = inspect.Parameter.empty if default is dataclasses.MISSING else default
    text = next((text for text in getattr(kind, "__metadata__", ()) if isinstance(text, str)), None)
    if text is not None:
        option = f"--{name.removeprefix('as_').replace('_', '-')}"
        if name == "output":
            how = typer.Option("-o", option, help=text)
        elif default is inspect.Parameter.empty:
            how = typer.Argument(help=text)
        else:
            how = typer.Option(*[option] * (default is False), help=text)
        kind = Annotated[kind.__origin__, how, *_marks(kind)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the fields of its dataclasses of options as parameters of its own, which typer can read."""
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if not dataclasses.is_dataclass(kind):
            parameters.append(_declared(parameter.name, kind, parameter.default))
            continue
        groups[parameter.name] = kind
        of_fields = get_type_hints(kind, include_extras=True)
        parameters += [
            _declared(field.name, of_fields[field.name], field.default)
            for field in dataclasses.fields(kind)
        ]

    writes = {
        parameter.name: mark for parameter in parameters for mark in _marks(parameter.annotation)
    }
    replacing = {"force": FORCE} if writes else {}
    if any(mark.in_place for mark in writes.values()):
        replacing["in_place"] = IN_PLACE
    parameters += [_declared(name, option, False) for name, option in replacing.items()]

    def called(**given: Any) -> None:
        allowed = {name: given.pop(name) for name in replacing}
        with reading((value for name, value in given.items() if name not in writes), **allowed):
            for name, mark in writes.items():
                if mark.kind is not None and given[name] is not None:
                    check_output(given[name], mark.kind)
            for name, kind in groups.items():
                given[name] = kind(
                    **{field.name: given.pop(field.name) for field in dataclasses.fields(kind)}
                )
            with rules_as_typed(given.get("plan"), given.get("rule")):
                command(**given)

    called.__doc__, called.__name__ = command.__doc__, command.__name__
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return called
