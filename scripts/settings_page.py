"""Write docs/settings.md from the settings dataclasses and the tables of TGI's flags.

With --check, only compare and fail when it is stale.
"""

import sys
from collections.abc import Iterator
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from generated_page import write_or_check

from funitel.launcher.bench.settings import BenchSettings
from funitel.launcher.cli.fleet.settings import LaunchSettings, RegisterSettings, RemoveSettings, ReplicasSettings
from funitel.launcher.cli.keys import ListKeysSettings, NewKeySettings, RevokeKeySettings
from funitel.launcher.cli.settings import ChatSettings, GenerateSettings, TopSettings
from funitel.launcher.settings import LauncherSettings
from funitel.model_server.settings import (
    DownloadSettings,
    KernelSettings,
    ModelServerSettings,
    ModelsSettings,
    PerplexitySettings,
    QuantizeSettings,
    SpecSettings,
)
from funitel.proto.settings.groups import GROUPS
from funitel.proto.settings.options import flag_of, variable_of
from funitel.proto.settings.tgi_flags import (
    INERT,
    REFUSED,
    REFUSED_VALUES,
    TRANSLATED_VALUES,
    Program,
    Refused,
    TgiFlag,
)
from funitel.router.settings import RouterSettings

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"

HEAD = """# Settings

Written by `make pages` from the settings dataclasses; change those, not this page.

Precedence: flag, environment variable, file of `--config` (launcher only, [restarts](restarts.md)), default. A line of
the file that a flag or a variable overrides is logged.

Every variable is `FUNITEL_` and the name of the flag, but for `FUNITEL_CACHE` of `--cache-dir`. Where
text-generation-inference has the setting, TGI's name, which the tables show, is read too; `FUNITEL_` before it wins
(`FUNITEL_PORT` over `PORT`). TGI's names are common, so

- the log names those that count: `settings from the environment: MODEL_ID, PORT`;
- `API_KEY` requires the key of requests, but does not open the port to other machines as `FUNITEL_API_KEY` and
  `--api-key` do ([access](access.md#addresses)); beside `--api-key-file` it is refused;
- `HOSTNAME` counts if it is an address or `localhost`, and a variable of a port unless it is a link to a Service of
  Kubernetes (`tcp://...`).

Names without `FUNITEL_` of settings that TGI does not have (`NUMA`, `DEVICE`, `NUM_THREADS`) are not read: a warning
gives the new name. `API_KEY_FILE`, `TLS_CLIENT_CA` and `PROTECT_ALL_ROUTES`, which kept clients out, are refused.

A variable `FUNITEL_DEFAULT_` and the rest of the name is a default of the launcher that the file overrides; the image
sets `FUNITEL_DEFAULT_PORT=80`. An empty variable counts as unset. A switch is a flag without a value; `--no-` before
its name turns it off. Booleans are `true`, `1`, `yes`, `on` or `false`, `0`, `no`, `off`, in any case. A repeatable
flag is given once for each value; its variable has the values separated by spaces. An unknown flag or a value of the
wrong type ends the program with exit code 2; settings that contradict each other end it with exit code 1. Both print
the reason in one line. The default "-" means that the setting is not given; its text says what then applies.

The settings of a program are in the groups that its `--help` has: `--help` alone shows the common flags, `--help=all`
all, `--help=GROUP` those of a group and `--help=WORD` those whose name, variable or description contains a word.

Every flag and variable of text-generation-inference is accepted, in one of three classes. *Honoured* ones are in the
tables of the five programs; some values have [another name](#values-of-tgi-with-another-name) here. Those
[accepted without effect](#accepted-without-effect) change no answer here and are logged when given. Those
[refused](#refused) would change answers and end the program with exit code 1.
"""

SECTIONS: tuple[tuple[str, str, type[Any]], ...] = (
    (
        "Launcher: `funitel serve MODEL`, `funitel`, `text-generation-launcher`",
        "Serves a model, which is named after `serve` or by `--model-id`. It passes settings of the router and the "
        "shards on to them as flags.",
        LauncherSettings,
    ),
    (
        "Chat: `funitel chat MODEL`",
        "Chats with a model in the terminal, or line by line from a pipe.",
        ChatSettings,
    ),
    (
        "Generate: `funitel generate PROMPT`",
        "Writes one completion to stdout; `-` as the prompt reads it from stdin.",
        GenerateSettings,
    ),
    (
        "View: `funitel top`",
        "Shows running and waiting sequences of a server. See [observability](observability.md).",
        TopSettings,
    ),
    (
        "Make a key: `funitel key new`",
        "Prints a new API key and adds its hash to a file. See [access](access.md).",
        NewKeySettings,
    ),
    ("List keys: `funitel key list`", "Lists the keys of a file.", ListKeysSettings),
    ("Revoke a key: `funitel key revoke NAME`", "Revokes a key.", RevokeKeySettings),
    (
        "Launch: `funitel launch MODEL`",
        "Launches a model on a running server. The flags of the server to use are those of all commands of "
        "[models at run time](fleet.md).",
        LaunchSettings,
    ),
    (
        "Replicas: `funitel replicas NAME`",
        "Lists the replicas of a model of a running server, adds some or removes one. See [fleet](fleet.md).",
        ReplicasSettings,
    ),
    (
        "Register: `funitel register FILE`, `funitel unregister NAME`, `funitel registrations`",
        "Adds, removes and lists custom models of a running server. See [fleet](fleet.md).",
        RegisterSettings,
    ),
    (
        "Remove: `funitel remove NAME`, `funitel cached`",
        "Deletes a model from the disk, or lists the models there. See [fleet](fleet.md).",
        RemoveSettings,
    ),
    (
        "Load generator: `funitel bench MODEL`",
        "Loads servers with requests and measures latency and throughput. See [bench](bench.md).",
        BenchSettings,
    ),
    (
        "Router: `funitel-router`, `text-generation-router`",
        "Serves HTTP for running shards. `print-schema` instead of flags prints the OpenAPI document.",
        RouterSettings,
    ),
    (
        "Shard: `funitel-server serve MODEL_ID`, `text-generation-server serve MODEL_ID`",
        "Serves one tensor-parallel rank over gRPC.",
        ModelServerSettings,
    ),
    (
        "Download: `funitel download-weights MODEL_ID`, `text-generation-server download-weights MODEL_ID`",
        "Fetches or converts a model; the last line on stdout is its folder.",
        DownloadSettings,
    ),
    (
        "Quantiser: `funitel quantize MODEL_ID OUTPUT_DIR`, also of `text-generation-server`",
        "Writes a model with smaller weights to a folder, which it prints. See [quantization](quantization.md).",
        QuantizeSettings,
    ),
    (
        "Quality: `funitel perplexity MODEL --text FILE`, also `funitel-server perplexity`",
        "Measures how well a model predicts a text, and its distance to another model. See "
        "[quantization](quantization.md#measuring-quality).",
        PerplexitySettings,
    ),
    (
        "Kernels: `funitel bench kernels MODEL_ID`, also `funitel-server bench-kernels MODEL_ID`",
        "Measures matrix products on a CPU against its memory bandwidth and multiply rate. See [bench](bench.md).",
        KernelSettings,
    ),
    (
        "Models: `funitel models MODEL`, also `funitel-server models MODEL`",
        "Lists what can be served, or says what one model needs. See [models](models.md).",
        ModelsSettings,
    ),
    (
        "Spec: `funitel spec show MODEL`, `funitel spec check MODEL`, also of `funitel-server`",
        "Prints the spec of a model, or checks one against its tensors. See [models](models.md).",
        SpecSettings,
    ),
)

PROGRAMS: tuple[Program, ...] = ("launcher", "router", "shard", "download", "quantize")


def page() -> str:
    """The whole page."""
    sections = [f"## {title}\n\n{text}\n\n" + "\n".join(table(cls)) + "\n" for title, text, cls in SECTIONS]
    return "\n".join([HEAD, *sections, translated_section(), inert_section(), refused_section()])


def translated_section() -> str:
    """The values of TGI that have another name here."""
    rows = [
        f"| `{flag_of(name)}`, `{name.upper()}` | `{value}` | `{meant.value}` | {sentence(meant.why)} |"
        for name, values in TRANSLATED_VALUES.items()
        for value, meant in values.items()
    ]
    head = "| flag and variable | TGI's value | taken as | why |\n| --- | --- | --- | --- |"
    return f"## Values of TGI with another name\n\n{head}\n" + "\n".join(rows) + "\n"


def inert_section() -> str:
    """The flags and variables that change nothing."""
    rows = "\n".join(f"| {foreign_names(row)} | {programs(row)} | {sentence(row.why)} |" for row in INERT)
    return (
        f"## Accepted without effect\n\n| flag and variable | of | why nothing changes |\n| --- | --- | --- |\n{rows}\n"
    )


def refused_section() -> str:
    """The flags, variables and values that end the program."""
    rows = [
        f"| {foreign_names(row)} | {refused_values(row)} | {programs(row)} | {sentence(row.why)} |" for row in REFUSED
    ]
    for name, values in REFUSED_VALUES.items():
        by_reason: dict[str, list[str]] = {}
        for value, why in values.items():
            by_reason.setdefault(why, []).append(f"`{value}`")
        for why, words in by_reason.items():
            rows.append(
                f"| `{flag_of(name)}`, `{name.upper()}` | {', '.join(words)} | launcher, shard | {sentence(why)} |"
            )
    head = "| flag and variable | values | of | why, and what to do |\n| --- | --- | --- | --- |"
    return f"## Refused\n\n{head}\n" + "\n".join(rows) + "\n"


def foreign_names(row: TgiFlag) -> str:
    flag = [flag_of(row.name)] if row.flag else []
    return ", ".join(f"`{name}`" for name in (*flag, *([row.env] if row.env else [])))


def programs(row: TgiFlag) -> str:
    return ", ".join(name for name in PROGRAMS if name in (*row.flag, *row.variable))


def refused_values(row: Refused) -> str:
    return f"all but {', '.join(f'`{value}`' for value in row.allowed)}" if row.allowed else "any"


def sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def table(cls: type[Any]) -> Iterator[str]:
    """One line for each setting that is a flag, in the order of their groups."""
    named = {field.name: field for field in fields(cls) if "setting" in field.metadata}
    groups = [(group, [name for name in (*group.common, *group.others) if name in named]) for group in GROUPS]
    present = [(group, names) for group, names in groups if names]
    for index, (group, names) in enumerate(present):
        if len(present) > 1:
            yield from (*([""] if index else []), f"**{group.title}** (`--help={group.name}`)", "")
        yield "| flag | variable | default | |"
        yield "| --- | --- | --- | --- |"
        for field in (named[name] for name in names):
            yield f"| {flags(field)} | {variable(field)} | {default(field.default)} | {explanation(field)} |"


def flags(field: "Field[Any]") -> str:
    meta = field.metadata["setting"]
    names = (flag_of(field.name), *meta.aliases, *([meta.short] if meta.short else []))
    return ", ".join(f"`{name}`" for name in names)


def variable(field: "Field[Any]") -> str:
    name = variable_of(field)
    return f"`{name}`" if name else "-"


def default(value: object) -> str:
    if value is None or value == ():
        return "-"
    if isinstance(value, tuple):
        return ", ".join(f"`{item}`" for item in value)
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def explanation(field: "Field[Any]") -> str:
    meta = field.metadata["setting"]
    choices = f" One of {', '.join(f'`{choice}`' for choice in meta.choices)}." if meta.choices else ""
    text: str = meta.help + choices
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page()))
