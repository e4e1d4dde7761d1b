"""The commands: each file ``NAME_command.py`` of a capability is a command, with the contract `CommandModule`.

It has a function ``NAME_command``, an ``EXAMPLE`` of its arguments, and its ``PLACE`` in the help:
one of `GROUPS`, and a number. The name of a command has ``-`` for each ``_`` in the name of its
file, and both names work. A command is imported when it is called, or when the help lists it; the
help omits commands that cannot be imported. The files in a folder ``commands`` of a capability are
commands below a command with its name: ``htp-export lora fuse``. Other packages add commands by
entry points of the group ``htp_export.commands``: name of a command → module with its function.

The parameters of the function are the arguments and options of the command. The type of a parameter
contains its help: ``Annotated[int, "Number of runs."]``. It is an argument if it has no default,
and an option otherwise; an option with the default False is a switch, ``output`` is also ``-o``,
and ``as_json`` is ``--json``. Other features are declared with ``typer.Option`` or
``typer.Argument`` in place of the text.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Protocol, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from htp_export.command.options import Idle, check_options
from htp_export.command.outputs import FORCE, IN_PLACE, Writes, check_output, reading
from htp_export.command.streams import has_lost_reader
from htp_export.command.typed_options import as_typed
from htp_export.discovery import capability_modules, plug_ins
from htp_export.errors import HtpExportError, InputError, described
from htp_export.plans.plan_options import rules_as_typed
from htp_export.process.lazy_sympy import import_onnx_ir

GROUPS = ("Export", "Look", "Check and measure", "Cut", "Optimise", "Compress", "Deploy")
"""The headings of the help, in order. Commands without a ``PLACE`` follow below another heading."""

_ELSEWHERE = ("Others", 0)

_WORDS = (
    ("tag", "the module of a node, in the metadata of the file"),
    ("owner", "the module that computes a node; several, if the node does the work of all"),
    ("region", "the nodes of a module and of the modules inside it"),
    (
        "fate",
        "what the export made of a module: computed, identity, fused, constant, dead, uncalled",
    ),
    (
        "SELECTOR",
        "modules by path, encoder.layer.*, class, class:Linear, or regular expression, re:...",
    ),
)
"""Words of the help of several commands; docs/concepts.md has them at length."""


class CommandModule(Protocol):
    """The module of a command ``NAME``; it also has the function ``NAME_command``, which runs the command.

    Attributes:
        EXAMPLE: An example of the arguments of the command.
        PLACE: One of `GROUPS`, and a number: the position of the command in the help.
    """

    EXAMPLE: str
    PLACE: tuple[str, int]


@functools.cache
def _added_names() -> dict[str, str]:
    """Return the commands of other packages: name → module."""
    return {name.replace("_", "-"): entry.value for name, entry in plug_ins("commands").items()}


def _all_names() -> dict[str, str]:
    """Return all commands: name → module; a command of another package does not replace one of htp_export."""
    modules = capability_modules("_command")
    own = {name.replace("_", "-"): module for name, module in modules.items()}
    return {**_added_names(), **own}


def command_groups() -> dict[str, list[str]]:
    """Return the commands that can be imported, in the order of the help: heading → names."""
    places: dict[str, tuple[str, int]] = {}
    for name in _all_names():
        with contextlib.suppress(ImportError, InputError):
            places[name] = getattr(_module(name), "PLACE", _ELSEWHERE)
    groups: dict[str, list[str]] = {}
    for group in (*GROUPS, _ELSEWHERE[0]):
        names = [name for name in places if places[name][0] == group]
        if names:
            groups[group] = sorted(names, key=lambda name: places[name][1])
    return groups


def command_names() -> list[str]:
    """Return the names of all commands that can be imported, in the order of the help."""
    return list(itertools.chain.from_iterable(command_groups().values()))


class _Command(TyperCommand):
    """A command that refuses options without effect.

    ``idle`` is ``IDLE`` of its module, and ``several`` its ``SEVERAL``: options that take all words
    up to the next option.
    """

    idle: Sequence[Idle] = ()
    several: Sequence[str] = ()

    def parse_args(self, context: Any, arguments: list[str]) -> list[str]:
        """Parse the arguments, and check that each option has an effect."""
        arguments = list(_repeated(arguments, self.several))
        _, _, typed = self.make_parser(context).parse_args(args=list(arguments))
        rest: list[str] = super().parse_args(context, arguments)
        check_options(self.params, typed, context.params, self.idle)
        return rest

    def invoke(self, context: Any) -> Any:
        """Run the command; it succeeds if the reader of its output needs no more, as ``| head``.

        Messages of errors name options in place of parameters of functions.
        """
        try:
            return super().invoke(context)
        except HtpExportError as error:
            message = as_typed(str(error), self.params, context.params)
            error.args = (message, *error.args[1:])
            raise
        except BrokenPipeError:
            if not has_lost_reader():
                raise
            return 0


def _repeated(arguments: Iterable[str], several: Sequence[str]) -> Iterator[str]:
    """Arguments in which an option with several values is repeated: ``--with a --with b``.

    Examples:
        >>> list(_repeated(["net.onnx", "--with", "a", "b", "-o", "page.html"], ["--with"]))
        ['net.onnx', '--with', 'a', '--with', 'b', '-o', 'page.html']
    """
    option = ""
    is_first = False
    for argument in arguments:
        if argument.startswith("-"):
            option = argument if argument in several else ""
            is_first = True
        elif option and not is_first:
            yield option
        else:
            is_first = False
        yield argument


class CommandGroup(TyperGroup):
    """The program, or a command that has commands: each is created from its file when it is requested.

    Without a command, it shows its help.
    """

    def __init__(self, above: str = "", **settings: Any) -> None:
        """Create a group; ``above`` is the prefix of its full names: ``""`` for the program, ``"lora "`` for lora."""
        super().__init__(**settings)
        self.above = above
        self.commands = dict.fromkeys(self._own(_all_names()))  # type: ignore[assignment] # created by get_command

    def _own(self, names: Iterable[str]) -> list[str]:
        """Return the names of the commands in this group among full names."""
        below = (name.removeprefix(self.above) for name in names if name.startswith(self.above))
        return list(dict.fromkeys(name.partition(" ")[0] for name in below))

    def list_commands(self, _context: Any) -> list[str]:
        """Return the names of the commands, in the order of the help."""
        return self._own(command_names())

    def get_command(self, context: Any, name: str) -> Any:
        """Return the command with a name, in which ``_`` may be used for ``-``."""
        name = name.replace("_", "-")
        if name in self.commands and self.commands[name] is None:
            full = f"{self.above}{name}"
            self.commands[name] = _command(full) if full in _all_names() else _group(full)
        return self.commands.get(name)

    def parse_args(self, context: Any, arguments: list[str]) -> list[str]:
        """Parse the arguments up to the name of a command; ``help NAME`` is ``NAME --help``."""
        if arguments[:1] == ["help"]:
            arguments = [*arguments[1:], "--help"]
        rest: list[str] = super().parse_args(context, arguments or ["--help"])
        return rest

    def format_commands(self, context: Any, formatter: Any) -> None:
        """Write the commands below their headings, all in one column."""
        groups = {group: self._own(names) for group, names in command_groups().items()}
        width = max(len(name) for names in groups.values() for name in names)
        text_width = formatter.width - width - 6  # the indentation, and the gap between the columns
        for group, names in groups.items():
            lines: list[tuple[str, str]] = []
            for name in names:
                text = self.get_command(context, name).get_short_help_str(text_width)
                lines.append((name.ljust(width), text))
            if lines:
                with formatter.section("Commands" if self.above else group):
                    formatter.write_dl(lines)

    def format_epilog(self, context: Any, formatter: Any) -> None:
        """Write the words that the help of commands uses, below that of the program."""
        super().format_epilog(context, formatter)
        if self.above:
            return
        with formatter.section("Words"):
            formatter.write_dl(list(_WORDS))


def _module(name: str) -> Any:
    """Return the module of a command; an InputError if that of another package is not a `CommandModule`."""
    module_name = _all_names()[name]
    if module_name != _added_names().get(name):
        return importlib.import_module(module_name)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # code of another package can raise any error
        raise InputError(
            f"command {name!r}: {module_name} of another package cannot be imported: {described(error)}"
        ) from error
    for attribute in (_function_name(name), "EXAMPLE", "PLACE"):
        if not hasattr(module, attribute):
            raise InputError(
                f"command {name!r}: {module_name} of another package has no {attribute}; see docs/extending.md"
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
    command.several = getattr(module, "SEVERAL", ())  # type: ignore[attr-defined]
    return command


def _group(name: str) -> CommandGroup:
    """Return the command of a capability whose commands are in its folder ``commands``."""
    package = importlib.import_module(f"htp_export.capabilities.{name.replace('-', '_')}.commands")
    return CommandGroup(f"{name} ", name=name, help=package.__doc__, rich_markup_mode=None)


def _marks(annotation: Any) -> list[Writes]:
    """Return the marks of a type that declare a parameter as an output."""
    return [mark for mark in getattr(annotation, "__metadata__", ()) if isinstance(mark, Writes)]


def _declared(name: str, kind: Any, default: Any) -> inspect.Parameter:
    """Return a parameter for typer; if its type contains only its help, it becomes an argument or an option."""
    default = inspect.Parameter.empty if default is dataclasses.MISSING else default
    texts = [text for text in getattr(kind, "__metadata__", ()) if isinstance(text, str)]
    if texts:
        option = f"--{name.removeprefix('as_').replace('_', '-')}"
        if name == "output":
            declaration = typer.Option("-o", option, help=texts[0])
        elif default is inspect.Parameter.empty:
            declaration = typer.Argument(help=texts[0])
        elif default is False:
            declaration = typer.Option(option, help=texts[0])
        else:
            declaration = typer.Option(help=texts[0])
        kind = Annotated[kind.__origin__, declaration, *_marks(kind)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command for typer, in which the fields of dataclasses of options are separate parameters.

    Before the command runs, its outputs are checked.
    """
    parameters, groups = _parameters(command)
    writes: dict[str, Writes] = {}
    for parameter in parameters:
        for mark in _marks(parameter.annotation):
            writes[parameter.name] = mark
    replacing = {"force": FORCE} if writes else {}
    if any(mark.in_place for mark in writes.values()):
        replacing["in_place"] = IN_PLACE
    parameters += [_declared(name, option, False) for name, option in replacing.items()]

    def called(**values: Any) -> None:
        import_onnx_ir()
        allowed = {name: values.pop(name) for name in replacing}
        inputs = [value for name, value in values.items() if name not in writes]
        with reading(inputs, **allowed):
            for name, mark in writes.items():
                if mark.kind is not None and values[name] is not None:
                    check_output(values[name], mark.kind)
            arguments = dict(values)
            for name, kind in groups.items():
                fields = {field.name: values[field.name] for field in dataclasses.fields(kind)}
                for option in fields:
                    arguments.pop(option, None)  # an option may be in two groups
                arguments[name] = kind(**fields)
            with rules_as_typed(values.get("plan"), values.get("rule")):
                command(**arguments)

    called.__doc__, called.__name__ = command.__doc__, command.__name__
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return called


def _parameters(
    command: Callable[..., None],
) -> tuple[list[inspect.Parameter], dict[str, type[Any]]]:
    """Return the parameters of a command for typer, and its parameters that are dataclasses of options."""
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type[Any]] = {}
    in_groups: dict[str, Any] = {}  # option → its type, which contains its help
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if not dataclasses.is_dataclass(kind):
            parameters.append(_declared(parameter.name, kind, parameter.default))
            continue
        groups[parameter.name] = kind  # type: ignore[assignment] # a dataclass, not an instance of one
        field_types = get_type_hints(kind, include_extras=True)
        for field in dataclasses.fields(kind):
            if in_groups.get(field.name) == field_types[field.name]:
                continue  # the same option in two groups
            in_groups[field.name] = field_types[field.name]
            parameters.append(_declared(field.name, field_types[field.name], field.default))
    return parameters, groups
