"""Pack what `benchmarks/gpu.py` needs on a machine with a GPU and without a network, in files of a limited size.

The machine has Python, torch and Triton. Packed are, each where it is asked for:

    site   packages that funitel's router, launcher and model server need, httpx and py-spy (--no-site leaves them out)
    vllm   vLLM, without what a Llama in bfloat16 does not need and with CUDA code for one architecture (--vllm VERSION)
    demo   the GGUF of the demo model (--demo)

Wheels are downloaded by pip, those of `site` at the versions of constraints.txt. Packages of --present are not packed.

    python -m pip freeze > present.txt                                        # there, or by hand
    python benchmarks/gpu_pack.py pack --present present.txt --vllm 0.26.0 --demo
    bash pack/unpack.sh TARGET                                                # there, after each transfer
    PYTHONPATH=TARGET/site:$PYTHONPATH python benchmarks/gpu.py --vllm-site TARGET/vllm --demo TARGET/MODEL.gguf
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

if __name__ == "__main__":
    sys.path.append(sys.path.pop(0))  # last: scripts beside this one have names that packages have too

from gpu_packing import contents, pieces
from gpu_packing.errors import PackError
from gpu_packing.wheels import Collection, Download, Pip, Present, Target, Wheel, read_pins
from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from funitel.model_server.hub import resolve
from funitel.proto.errors import FunitelError

ROOT = Path(__file__).parents[1]
DEMO = "smollm2-135m-instruct"
OLDEST_ARCHITECTURE = 70  # of which CUDA 13 and its predecessor make machine code

MakeDownload = Callable[[Target, Path], Download]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="FOLDER", help="where the pieces go; a new or empty folder")
    parser.add_argument("--python", default="3.12", metavar="VERSION", help="of the machine (default: 3.12)")
    parser.add_argument(
        "--present",
        nargs="+",
        default=[],
        metavar="FILE_OR_NAMES",
        help="packages that are there: names, name==version, or files of such lines; without a version any is right",
    )
    parser.add_argument("--no-site", action="store_true", help="do not pack what funitel needs")
    parser.add_argument("--vllm", metavar="VERSION", help="pack this release of vLLM")
    parser.add_argument("--arch", type=int, default=90, help="architecture of the GPU: 90 of sm_90 (default: 90)")
    parser.add_argument("--demo", nargs="?", const=DEMO, metavar="GGUF", help="pack the demo model, or this file")
    parser.add_argument("--piece-mib", type=int, default=60, help="most of a file and of a transfer (default: 60)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None, make_download: MakeDownload = Pip) -> int:
    arguments = parse(argv)
    try:
        pack(arguments, make_download)
    except (PackError, FunitelError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def pack(arguments: argparse.Namespace, make_download: MakeDownload) -> None:
    """Write the pieces, and print what each is.

    Raises:
        PackError: input does not fit, or something cannot be had.
    """
    _check(arguments)
    target, present = Target(arguments.python), Present.of(arguments.present)
    packages: dict[str, dict[str, str]] = {}
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="gpu-pack-", dir=out.parent) as name:
        scratch = Path(name)
        paths = []
        download = make_download(target, scratch / "wheels")
        if not arguments.no_site:
            wheels = _site_wheels(target, download, present)
            packages["site"] = _versions(wheels)
            contents.unpack_wheels(wheels, scratch / "site")
            paths.append(_tar(scratch, "site"))
        if arguments.vllm is not None:
            wheels = _vllm_wheels(target, download, present, arguments.vllm)
            packages["vllm"] = _versions(wheels)
            left_out = contents.files_left_out_of_vllm(arguments.arch)
            contents.unpack_wheels(wheels, scratch / "vllm", left_out)
            print(*contents.thin_libraries(scratch / "vllm", arguments.arch), sep="\n", flush=True)
            paths.append(_tar(scratch, "vllm"))
        if arguments.demo is not None:
            paths.append(_demo(arguments.demo))
        archives = pieces.split(paths, out, arguments.piece_mib * pieces.MIB)
    pieces.write_manifest(out, archives, packages)
    print(*pieces.describe(archives), sep="\n")


def _check(arguments: argparse.Namespace) -> None:
    if arguments.piece_mib < 1:
        raise PackError(f"--piece-mib takes a number of at least 1, not {arguments.piece_mib}")
    if arguments.arch < OLDEST_ARCHITECTURE:
        raise PackError(f"--arch takes an architecture such as 90, not {arguments.arch}")
    if arguments.out.is_file() or arguments.out.is_dir() and any(arguments.out.iterdir()):
        raise PackError(f"{arguments.out} is not an empty folder")
    if arguments.no_site and arguments.vllm is None and arguments.demo is None:
        raise PackError("there is nothing to pack: --no-site needs --vllm or --demo")
    try:
        Version(arguments.vllm or "0")
    except InvalidVersion as error:
        raise PackError(f"--vllm takes a version such as 0.26.0, not {arguments.vllm!r}") from error


def _site_wheels(target: Target, download: Download, present: Present) -> list[Wheel]:
    pins = read_pins(ROOT / "constraints.txt")
    collection = Collection(target, download, present, pins=pins, left_out=contents.is_with_torch)
    return list(collection.collect(contents.site_requirements(ROOT / "pyproject.toml")).values())


def _vllm_wheels(target: Target, download: Download, present: Present, version: str) -> list[Wheel]:
    collection = Collection(
        target,
        download,
        present,
        left_out=contents.is_left_out_of_vllm,
        replaced=contents.VLLM_REPLACED,
        follows_extras=False,
    )
    return list(collection.collect([Requirement(f"vllm=={version}")]).values())


def _versions(wheels: Sequence[Wheel]) -> dict[str, str]:
    return {wheel.name: str(wheel.version) for wheel in wheels}


def _tar(scratch: Path, name: str) -> Path:
    path = scratch / f"{name}.tar.xz"
    pieces.write_tar(scratch / name, path)
    return path


def _demo(name: str) -> Path:
    """The GGUF that is given, or that of a model of the catalogue."""
    if Path(name).is_file():
        return Path(name)
    found = sorted(resolve.resolve(name).folder.glob("*.gguf"))
    if not found:
        raise PackError(f"{name} has no GGUF")
    return found[0]


if __name__ == "__main__":
    sys.exit(main())
