"""The typer command of every program: pages of help, a flag that is positional too, variables, mistakes in one line."""

import os
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from funitel.proto.settings.help_page import ALL, Flag, HelpPage
from funitel.proto.settings.suggestions import did_you_mean
from funitel.proto.settings.variables import disregarded, first_set, image_default, overlaid

POSITIONAL = "_positional"
"""What follows the name of a setting in the name of its positional argument."""

MAX_COMPLETION = 70  # characters of a description; typer breaks longer ones into lines
_TOPIC = "--help="
_HELP = {"help_option_names": ["-h", "--help"]}


class SettingsCommand(TyperCommand):
    """The command class of `fields.as_command`.

    It has `-h`, `--help`, `--help=all`, `--help=GROUP` and `--help=WORD`. Variables that `variables.disregarded` names
    are not read.
    """

    commands: Sequence[tuple[str, str]] = ()  # on its page of help
    further: Sequence[tuple[str, Sequence[str]]] = ()  # titles and names of commands, as of HelpPage

    def __init__(self, *args: Any, context_settings: dict[str, Any] | None = None, **more: Any) -> None:
        super().__init__(*args, context_settings=_HELP | (context_settings or {}), **more)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse; the page of a topic of help ends the program."""
        if ctx.resilient_parsing:  # a shell asks for completions
            return super().parse_args(ctx, args)
        options = args[: args.index("--")] if "--" in args else args
        if (topic := next((word for word in options if word.startswith(_TOPIC)), None)) is not None:
            typer.echo(self._page_about(ctx, topic.removeprefix(_TOPIC)))
            raise typer.Exit
        with overlaid(os.environ, {**dict.fromkeys(disregarded(os.environ)), **self.defaults(ctx)}):
            return self.parse_settings(ctx, args)

    def get_params(self, ctx: Any) -> list[Any]:
        """All parameters, `--help` too."""
        return _without_pydantic(super().get_params(ctx))

    def defaults(self, ctx: Any) -> dict[str, str | None]:
        """Variables with the defaults of a container image, of settings that have no value."""
        ignored = disregarded(os.environ)
        environ = {name: value for name, value in os.environ.items() if name not in ignored}
        found: dict[str, str | None] = {}
        for names in (each.envvar for each in self.get_params(ctx) if isinstance(each.envvar, (list, tuple))):
            default = image_default(names[-1], environ)
            if default is not None and first_set(names, environ) is None:
                found[names[0]] = default
        return found

    def parse_settings(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the flags, and the variables that count."""
        self._check_repeated(ctx, args)
        ctx.allow_extra_args = True
        extra = super().parse_args(ctx, args)
        if extra:
            ctx.fail(self.surplus(ctx, extra))
        for name in [name for name in ctx.params if name.endswith(POSITIONAL)]:
            self._merge(ctx, name.removesuffix(POSITIONAL), ctx.params.pop(name))
        return extra

    def surplus(self, ctx: Any, extra: Sequence[str]) -> str:
        """What to say of words that are not expected."""
        takes = " ".join(str(each.metavar) for each in self.params if isinstance(each, TyperArgument))
        return f"unexpected argument {extra[0]!r}: {_path(ctx)} takes {takes or 'flags only'}"

    def about(self) -> str:
        """What the program does, on its page of help."""
        return self.help or ""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the short page."""
        formatter.write(self.page(ctx).short() + "\n")

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """The flags that begin with `incomplete`, each with one short line."""
        items = super().shell_complete(ctx, incomplete)
        for item in items:
            item.help = textwrap.shorten(item.help or "", MAX_COMPLETION, placeholder=" ...")
        return items

    def page(self, ctx: Any) -> HelpPage:
        """What the pages of help are made of."""
        params = self.get_params(ctx)
        arguments = [each for each in params if isinstance(each, TyperArgument)]
        options = [each for each in params if isinstance(each, TyperOption) and not each.hidden]
        path = _path(ctx)
        return HelpPage(
            program=path,
            usage=" ".join(
                [
                    path,
                    *(["[COMMAND]"] if self.commands else []),
                    "[FLAGS]",
                    *(piece for each in arguments for piece in each.get_usage_pieces(ctx)),
                ]
            ),
            about=self.about(),
            flags=[Flag.of(option) for option in options],
            arguments=[(str(each.metavar), each.help or "") for each in arguments],
            commands=self.commands,
            further=self.further,
        )

    def _page_about(self, ctx: Any, topic: str) -> str:
        page = self.page(ctx)
        text = page.all() if topic.lower() == ALL else page.about_topic(topic)
        return text or str(ctx.fail(page.no_topic(topic)))

    def _check_repeated(self, ctx: Any, args: Sequence[str]) -> None:
        """Fail for a flag that is given twice and takes one value."""
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        for option in order if not any(each.is_eager for each in order) else ():
            if isinstance(option, TyperOption) and not option.multiple and order.count(option) > 1:
                ctx.fail(f"{max(option.opts, key=len)} is given {order.count(option)} times: give it once")

    def _merge(self, ctx: Any, name: str, value: str | None) -> None:
        """Take a positional argument for the flag that means the same."""
        flag = "--" + name.replace("_", "-")
        if value is None:
            return
        if not value.strip():
            ctx.fail(f"{name.upper().removesuffix('_ID')} must not be empty")
        given, source = ctx.params[name], ctx.get_parameter_source(name)
        is_list = isinstance(given, (list, tuple))
        if source.name == "COMMANDLINE" and given != ([value] if is_list else value):
            ctx.fail(f"{value} and {flag} {' '.join(given) if is_list else given} are different models: give one")
        ctx.params[name] = [value] if is_list else value
        ctx.set_parameter_source(name, type(source).COMMANDLINE)


@dataclass(frozen=True, slots=True)
class _Coercion:
    """What makes the value of a parameter that is text or has a parser; `parse` is None for a switch."""

    parse: Callable[[Any], Any] | None

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """The value of a flag, of a variable, or the default; raises BadParameter."""
        is_list = param.multiple or param.nargs == -1
        if value is None:
            return () if is_list else None
        if self.parse is not None:
            return [self.parse(item) for item in value] if is_list else self.parse(value)
        if not isinstance(value, str):
            return value
        param._runtime_param = None  # the variable of a switch: typer reads its words
        return param.get_runtime_param().coerce(value, param=param, ctx=ctx)


def _without_pydantic(params: list[Any]) -> list[Any]:
    """The parameters, with what coerces their values; typer would import pydantic and make an adapter of it for each.

    That takes a program 0.1 to 0.2 s when it starts. A typer that asks something else for values does what it did.
    """
    for param in params:
        descriptor = getattr(param, "type_descriptor", None)
        if descriptor is None:
            continue
        kind, parse = descriptor.annotation, descriptor.parameter_info.parser
        if get_origin(kind) is list:
            kind = get_args(kind)[0]
        if parse is not None or kind in (str, bool):
            param._runtime_param = _Coercion(parse or (str if kind is str else None))
    return params


class CommandGroup(TyperGroup):
    """A program with commands."""

    def __init__(self, *args: Any, context_settings: dict[str, Any] | None = None, **more: Any) -> None:
        super().__init__(*args, context_settings=_HELP | (context_settings or {}), **more)

    def get_params(self, ctx: Any) -> list[Any]:
        """All parameters, `--help` too."""
        return _without_pydantic(super().get_params(ctx))

    def summaries(self, ctx: Any) -> list[tuple[str, str]]:
        """(name, first paragraph of its help) of each command."""
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        texts = {name: (command.help or "") if command else "" for name, command in commands.items()}
        return [(name, " ".join(text.split("\n\n")[0].split())) for name, text in texts.items()]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the commands."""
        path = _path(ctx)
        about = f"{self.help or ''}\n\n{path} COMMAND --help shows the flags of a command."
        page = HelpPage(path, f"{path} COMMAND [FLAGS]", about, (), commands=self.summaries(ctx))
        formatter.write(page.short() + "\n")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse up to the command."""
        rest = super().parse_args(ctx, args)
        if not args and not ctx.resilient_parsing:
            ctx.fail(f"{_path(ctx)} needs a command: {', '.join(self.list_commands(ctx))}")
        return rest

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command; an unknown one is a usage error that suggests another."""
        if self.get_command(ctx, args[0]) is None and not ctx.resilient_parsing:
            ctx.fail(self.unknown(ctx, args[0]))
        return super().resolve_command(ctx, args)

    def unknown(self, ctx: Any, word: str) -> str:
        """What to say of a word that is no command."""
        hint = did_you_mean(word, self.list_commands(ctx))
        return f"{_path(ctx)} has no command {word!r}{hint or f'; {_path(ctx)} --help lists them'}"


def _path(ctx: Any) -> str:
    return str(ctx.command_path).strip()
